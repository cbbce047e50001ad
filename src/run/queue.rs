//! Who is at work and who waits. The store is the truth about those that wait: they are claimed when something
//! changed and, since a hint can be lost, every second; the count here only bounds admission.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::store::Backlog;

/// How long a lost hint can hold up the queue.
const LOOK: Duration = Duration::from_secs(1);

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
    /// Those of them that no worker can take yet.
    blocked: usize,
}

impl Counts {
    /// Runs that have, or will have, a place in the queue.
    const fn all(&self) -> usize {
        self.entering + self.waiting
    }

    /// Those of them that come before whoever comes next.
    const fn before(&self) -> usize {
        self.all().saturating_sub(self.blocked)
    }
}

/// Where an accepted run goes.
pub(super) enum Place {
    /// To work.
    Slot(Slot),
    /// To the queue.
    Waiting(WaitingPlace),
}

/// The right to be at work. Dropping it lets the next one in.
pub(super) struct Slot {
    permit: Option<OwnedSemaphorePermit>,
    queue: Arc<Queue>,
}

impl Slot {
    /// It was not used: nothing has changed for those that wait.
    pub(super) fn give_back(mut self) {
        drop(self.permit.take());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.permit.take().is_some() && self.queue.counts().all() > 0 {
            self.queue.changed.notify_one();
        }
    }
}

/// A place in the queue for a run that is not stored yet. Dropping it gives it back.
pub(super) struct WaitingPlace {
    queue: Arc<Queue>,
}

impl WaitingPlace {
    /// The run is stored and waits.
    pub(super) fn stored(self) {
        self.queue.counts().waiting += 1;
        self.queue.changed.notify_one();
    }
}

impl Drop for WaitingPlace {
    fn drop(&mut self) {
        let mut counts = self.queue.counts();
        counts.entering = counts.entering.saturating_sub(1);
    }
}

impl Queue {
    pub(super) fn new(max_concurrent: usize, max_waiting: usize) -> Arc<Self> {
        Arc::new(Self {
            slots: Arc::new(Semaphore::new(max_concurrent.min(Semaphore::MAX_PERMITS))),
            counts: Mutex::default(),
            max_waiting,
            changed: Notify::new(),
        })
    }

    /// Whether one more run would be given a place.
    pub(super) fn has_room(&self) -> bool {
        let counts = self.counts();
        counts.all() < self.max_waiting || (counts.before() == 0 && self.slots.available_permits() > 0)
    }

    /// A place for one more run; `None` when all are taken. Nobody overtakes those that wait.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut counts = self.counts();
        if counts.before() == 0
            && let Some(slot) = self.free_slot()
        {
            return Some(Place::Slot(slot));
        }
        if counts.all() >= self.max_waiting {
            return None;
        }
        counts.entering += 1;
        Some(Place::Waiting(WaitingPlace { queue: Arc::clone(self) }))
    }

    /// A place in the queue for one more run that has to wait for another one; `None` when all are taken.
    pub(super) fn enter_waiting(self: &Arc<Self>) -> Option<WaitingPlace> {
        let mut counts = self.counts();
        if counts.all() >= self.max_waiting {
            return None;
        }
        counts.entering += 1;
        Some(WaitingPlace { queue: Arc::clone(self) })
    }

    /// A run that was accepted before is in the queue again; it needs no place.
    pub(super) fn came_back(&self) {
        self.counts().waiting += 1;
        self.changed.notify_one();
    }

    /// `count` runs left the store's queue. Somebody may have counted them out already, so the store is asked again.
    pub(super) fn left(&self, count: usize) {
        if count == 0 {
            return;
        }
        let mut counts = self.counts();
        counts.waiting = counts.waiting.saturating_sub(count);
        self.changed.notify_one();
    }

    /// How many runs wait, as far as is known.
    pub(super) fn waiting(&self) -> usize {
        self.counts().waiting
    }

    /// The store says how many runs wait.
    pub(super) fn recount(&self, backlog: Backlog) {
        let number = |count| usize::try_from(count).unwrap_or(usize::MAX);
        let mut counts = self.counts();
        counts.blocked = number(backlog.blocked);
        counts.waiting = number(backlog.ready.saturating_add(backlog.blocked));
    }

    /// Looks into the queue without waiting for a change.
    pub(super) fn look(&self) {
        self.changed.notify_one();
    }

    /// Waits until something may have changed.
    pub(super) async fn changed(&self) {
        // Time running out is as good as a change.
        drop(timeout(LOOK, self.changed.notified()).await);
    }

    /// Slots for runs that wait, as many as can be used, at most `most`.
    pub(super) fn slots_for_waiting(self: &Arc<Self>, most: usize) -> Vec<Slot> {
        let counts = self.counts();
        let useful = most.min(counts.waiting.saturating_sub(counts.blocked));
        drop(counts);
        std::iter::from_fn(|| self.free_slot()).take(useful).collect()
    }

    /// A slot, if one is free.
    pub(super) fn free_slot(self: &Arc<Self>) -> Option<Slot> {
        let permit = Arc::clone(&self.slots).try_acquire_owned().ok()?;
        Some(Slot { permit: Some(permit), queue: Arc::clone(self) })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // They are hints, set right by the next look at the store, so a panic elsewhere does no harm.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(place: Option<Place>) -> WaitingPlace {
        match place {
            Some(Place::Waiting(place)) => place,
            Some(Place::Slot(_)) => panic!("a slot"),
            None => panic!("no place"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_is_asked_for_does_not_wait() {
        let queue = Queue::new(1, 2);
        let start = tokio::time::Instant::now();
        queue.look();
        queue.changed().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        queue.changed().await;
        assert_eq!(start.elapsed(), LOOK);
    }

    // The one that was cancelled is counted out by whoever ended it and by a look at the store in between.
    #[tokio::test(start_paused = true)]
    async fn a_run_that_was_counted_out_twice_does_not_hide_the_one_behind_it() {
        let queue = Queue::new(1, 10);
        let Some(Place::Slot(slot)) = queue.enter() else { panic!() };
        waiting(queue.enter()).stored();
        waiting(queue.enter()).stored();
        queue.changed().await;
        queue.recount(Backlog { ready: 1, blocked: 0 });
        queue.left(1);
        let start = tokio::time::Instant::now();
        drop(slot);
        queue.changed().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[test]
    fn places_come_back_whatever_becomes_of_the_run() {
        let queue = Queue::new(1, 2);
        let Some(Place::Slot(slot)) = queue.enter() else { panic!() };
        waiting(queue.enter()).stored();
        let unstored = waiting(queue.enter());
        assert!(queue.enter().is_none() && !queue.has_room());
        drop(unstored);
        assert!(queue.has_room());
        drop(slot);
        // The slot is free, and the one that waits comes first.
        let next = waiting(queue.enter());
        assert_eq!(queue.slots_for_waiting(64).len(), 1);
        queue.left(1);
        drop(next);
        assert!(matches!(queue.enter(), Some(Place::Slot(_))));
    }
}
