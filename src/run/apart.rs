//! One at a time: how runs begin that may have ended processes. If one is to blame, it ends this process alone, and the
//! others are not blamed with it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// How long one keeps the others waiting. It gets further, or ends the process, in less.
const TURN: Duration = Duration::from_secs(2);

/// Lets one after the other pass.
#[derive(Debug, Default)]
pub(super) struct Apart {
    /// When the turn of whoever passed last is over; `None` when it is.
    until: Mutex<Option<Instant>>,
    over: Notify,
}

/// The turn of a run; over when this is dropped, or after two seconds.
pub(super) struct Turn {
    apart: Arc<Apart>,
    until: Instant,
}

impl Apart {
    /// Waits for a turn.
    pub(super) async fn turn(self: &Arc<Self>) -> Turn {
        loop {
            let waiting = self.over.notified();
            let now = Instant::now();
            let busy_until = {
                let mut until = self.until();
                match *until {
                    Some(until) if until > now => until,
                    Some(_) | None => {
                        let mine = now + TURN;
                        *until = Some(mine);
                        return Turn { apart: Arc::clone(self), until: mine };
                    }
                }
            };
            // Its end is as good as being told of it.
            drop(timeout_at(busy_until, waiting).await);
        }
    }

    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        // Each change is one assignment, so a panic elsewhere leaves nothing half-changed.
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut until = self.apart.until();
        if *until == Some(self.until) {
            *until = None;
            self.apart.over.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_turn_ends_with_its_holder_or_by_itself() {
        let apart = Arc::new(Apart::default());
        let start = Instant::now();
        let first = apart.turn().await;
        let second = tokio::time::timeout(TURN / 2, apart.turn()).await;
        assert!(second.is_err(), "the first one has its turn");
        drop(first);
        let second = apart.turn().await;
        assert_eq!(start.elapsed(), TURN / 2);
        let third = apart.turn().await;
        assert_eq!(start.elapsed(), TURN / 2 + TURN, "nobody holds the others up for longer");
        drop(second);
        assert!(tokio::time::timeout(TURN / 2, apart.turn()).await.is_err(), "a turn that is over ends no other");
        drop(third);
        apart.turn().await;
    }
}
