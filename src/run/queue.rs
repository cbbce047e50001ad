//! How many runs are at work and how many wait. The store is the truth about those that wait; the count here only
//! saves asking it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Slots for runs at work, and a bound on those that wait for one.
pub(super) struct Queue {
    slots: Arc<Semaphore>,
    counts: Mutex<Counts>,
    max_waiting: usize,
    changed: Notify,
}

#[derive(Default)]
struct Counts {
    /// Runs with a place in the queue that are not stored yet.
    entering: usize,
    /// Runs that are stored as queued, as far as is known.
    waiting: usize,
}

/// Where an accepted run goes.
pub(super) enum Place {
    /// To work.
    Slot(OwnedSemaphorePermit),
    /// To the queue. Kept until the run is stored, with [`Queue::stored`], or is not, with [`Queue::abandoned`].
    Waiting,
}

impl Queue {
    pub(super) fn new(max_concurrent: usize, max_waiting: usize) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(max_concurrent.min(Semaphore::MAX_PERMITS))),
            counts: Mutex::default(),
            max_waiting,
            changed: Notify::new(),
        }
    }

    /// A place for one more run; `None` when all are taken. Nobody overtakes those that wait.
    pub(super) fn enter(&self) -> Option<Place> {
        let mut counts = self.counts();
        let before = counts.entering + counts.waiting;
        if before == 0
            && let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned()
        {
            return Some(Place::Slot(slot));
        }
        if before >= self.max_waiting {
            return None;
        }
        counts.entering += 1;
        Some(Place::Waiting)
    }

    /// A run that was given a waiting place is stored.
    pub(super) fn stored(&self) {
        let mut counts = self.counts();
        counts.entering = counts.entering.saturating_sub(1);
        counts.waiting += 1;
        self.changed.notify_one();
    }

    /// A run that was given a waiting place could not be stored.
    pub(super) fn abandoned(&self) {
        let mut counts = self.counts();
        counts.entering = counts.entering.saturating_sub(1);
    }

    /// `count` runs left the store's queue.
    pub(super) fn left(&self, count: usize) {
        let mut counts = self.counts();
        counts.waiting = counts.waiting.saturating_sub(count);
    }

    /// The store says how many runs wait: when this process starts, and when fewer came than were counted.
    pub(super) fn recount(&self, waiting: usize) {
        self.counts().waiting = waiting;
        self.changed.notify_one();
    }

    /// Waits until runs wait and slots are free; gives as many slots as can be used, at most `most`.
    pub(super) async fn slots_for_waiting(&self, most: usize) -> Vec<OwnedSemaphorePermit> {
        loop {
            let changed = self.changed.notified();
            if self.counts().waiting > 0
                && let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await
            {
                let useful = most.min(self.counts().waiting);
                let more = std::iter::from_fn(|| Arc::clone(&self.slots).try_acquire_owned().ok());
                return std::iter::once(slot).chain(more.take(useful.saturating_sub(1))).collect();
            }
            changed.await;
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Each change is one assignment, so a panic elsewhere leaves nothing half-changed.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
