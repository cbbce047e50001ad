//! How runs at work are told to end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::domain::{RunId, Timestamp};

/// A run at work, as seen by whoever wants it to end.
#[derive(Debug, Default)]
pub(super) struct Control {
    cancelled: CancellationToken,
    at: Mutex<Option<Timestamp>>,
    /// Something was said to the run that it may not have heard.
    mail: AtomicBool,
}

impl Control {
    /// The run was asked to end at this time. The first one counts.
    pub(super) fn cancel(&self, at: Timestamp) {
        lock(&self.at).get_or_insert(at);
        self.cancelled.cancel();
    }

    /// Fires when the run was asked to end.
    pub(super) const fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }

    /// Something was said to the run.
    pub(super) fn posted(&self) {
        self.mail.store(true, Ordering::Release);
    }

    /// Whether something was said since this was last asked.
    pub(super) fn take_mail(&self) -> bool {
        self.mail.swap(false, Ordering::Acquire)
    }

    /// When the run was asked to end.
    pub(super) fn cancelled_at(&self) -> Option<Timestamp> {
        *lock(&self.at)
    }
}

/// The runs at work in this process.
#[derive(Debug, Default)]
pub(super) struct Active(Mutex<HashMap<RunId, Arc<Control>>>);

/// A run's entry among the active ones; gone with it.
pub(super) struct Registration {
    active: Arc<Active>,
    id: RunId,
    control: Arc<Control>,
}

impl Active {
    /// Enters a run.
    pub(super) fn register(self: &Arc<Self>, id: RunId) -> Registration {
        let control = Arc::new(Control::default());
        lock(&self.0).insert(id, Arc::clone(&control));
        Registration { active: Arc::clone(self), id, control }
    }

    /// Tells a run to end; `false` when it is not at work here.
    pub(super) fn cancel(&self, id: RunId, at: Timestamp) -> bool {
        let control = lock(&self.0).get(&id).cloned();
        match control {
            Some(control) => {
                control.cancel(at);
                true
            }
            None => false,
        }
    }

    /// Tells a run that something was said to it. One that is not at work here hears of it when it is.
    pub(super) fn posted(&self, id: RunId) {
        if let Some(control) = lock(&self.0).get(&id) {
            control.posted();
        }
    }

    /// Whether a run is at work here.
    pub(super) fn has(&self, id: RunId) -> bool {
        lock(&self.0).contains_key(&id)
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

impl Registration {
    /// The run.
    pub(super) const fn id(&self) -> RunId {
        self.id
    }

    /// How the run is told to end.
    pub(super) const fn control(&self) -> &Arc<Control> {
        &self.control
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut active = lock(&self.active.0);
        if active.get(&self.id).is_some_and(|control| Arc::ptr_eq(control, &self.control)) {
            active.remove(&self.id);
        }
    }
}

/// Each change under these locks is one assignment, so a panic elsewhere leaves nothing half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
