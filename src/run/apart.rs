//! How runs begin that may have ended processes: before everything else that was left behind, a few at a time, and
//! those that are suspected most one at a time. If one is to blame, it ends this process with hardly another to share
//! the blame.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

/// A run is a suspect once so many processes in a row ended with it before it got any further.
const SUSPECT: u32 = 2;
/// From here on it begins alone.
const ALONE: u32 = SUSPECT + 1;
/// A run is ended once more processes in a row than these ended with it before it got any further: those in which it
/// came to be a suspect, and those in which it had its turn.
pub(super) const MAX_CRASHES: u32 = ALONE + 1;
/// How long a suspect keeps a place. It gets further, or ends the process, in less.
const TURN: Duration = Duration::from_secs(2);
/// Most suspects that have a place; one more has it with each that did no harm.
const MOST_PLACES: usize = 64;
/// How long what is not suspected waits for the suspects.
const HOLD: Duration = Duration::from_secs(5);

/// How a run begins.
pub(super) enum Start {
    /// It is new.
    AtOnce,
    /// It is no suspect, and lets those pass first.
    Held(Arc<Apart>),
    /// It waits for its turn.
    Suspect(Suspect),
}

/// Lets suspects pass before the others.
#[derive(Debug)]
pub(super) struct Apart {
    suspects: watch::Sender<Suspects>,
    places: Arc<Semaphore>,
    /// How many places there are, taken or not.
    width: AtomicUsize,
    /// The supervisor's: it waits for turns to end, which they do with their runs.
    tasks: TaskTracker,
}

/// How many suspects have not got further yet.
#[derive(Debug, Default)]
struct Suspects {
    all: usize,
    /// Those of them that begin alone.
    alone: usize,
}

/// A run that may have ended processes, in line; no longer when this is dropped.
pub(super) struct Suspect {
    apart: Arc<Apart>,
    is_alone: bool,
}

/// The turn of a suspect; over when this is dropped, or after two seconds.
pub(super) struct Turn {
    _suspect: Suspect,
    _over: oneshot::Sender<()>,
}

impl Apart {
    /// Nobody is suspected. `tasks` are the tasks of whoever begins runs.
    pub(super) fn new(tasks: TaskTracker) -> Self {
        Self {
            suspects: watch::Sender::default(),
            places: Arc::new(Semaphore::new(1)),
            width: AtomicUsize::new(1),
            tasks,
        }
    }

    /// How a run begins that so many processes ended with. A suspect is in line from now on: where several runs are to
    /// begin, this is asked of all before the first one is.
    pub(super) fn start(self: &Arc<Self>, crashes: u32) -> Start {
        if crashes < SUSPECT {
            return Start::Held(Arc::clone(self));
        }
        let is_alone = crashes >= ALONE;
        self.suspects.send_modify(|suspects| {
            suspects.all += 1;
            suspects.alone += usize::from(is_alone);
        });
        Start::Suspect(Suspect { apart: Arc::clone(self), is_alone })
    }

    /// Resolves when it holds of the suspects. The sender is here, so it is not gone.
    async fn until(&self, holds: impl Fn(&Suspects) -> bool) {
        drop(self.suspects.subscribe().wait_for(|suspects| holds(suspects)).await);
    }

    /// Ends a turn once its holder is done with it, or has had it long enough.
    fn end_in_time(self: &Arc<Self>, place: OwnedSemaphorePermit, done: oneshot::Receiver<()>, is_alone: bool) {
        let apart = Arc::clone(self);
        self.tasks.spawn(async move {
            drop(timeout(TURN, done).await);
            drop(place);
            // It did no harm, so it is less likely that others do.
            if !is_alone && apart.width.load(Ordering::Relaxed) < MOST_PLACES {
                apart.width.fetch_add(1, Ordering::Relaxed);
                apart.places.add_permits(1);
            }
        });
    }
}

impl Start {
    /// Waits until the run may begin. What it gives is held until the run has got further.
    pub(super) async fn wait(self) -> Option<Turn> {
        match self {
            Self::AtOnce => None,
            Self::Held(apart) => {
                drop(timeout(HOLD, apart.until(|suspects| suspects.all == 0)).await);
                None
            }
            Self::Suspect(suspect) => suspect.turn().await,
        }
    }
}

impl Suspect {
    async fn turn(self) -> Option<Turn> {
        let Self { apart, is_alone } = &self;
        let places = if *is_alone {
            apart.width.load(Ordering::Relaxed)
        } else {
            apart.until(|suspects| suspects.alone == 0).await;
            1
        };
        let places = u32::try_from(places).unwrap_or(u32::MAX);
        // Never closed.
        let place = Arc::clone(&apart.places).acquire_many_owned(places).await.ok()?;
        let (over, done) = oneshot::channel();
        apart.end_in_time(place, done, *is_alone);
        Some(Turn { _suspect: self, _over: over })
    }
}

impl Drop for Suspect {
    fn drop(&mut self) {
        self.apart.suspects.send_modify(|suspects| {
            suspects.all = suspects.all.saturating_sub(1);
            suspects.alone = suspects.alone.saturating_sub(usize::from(self.is_alone));
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn suspect(apart: &Arc<Apart>, crashes: u32) -> Start {
        let start = apart.start(crashes);
        assert!(matches!(start, Start::Suspect(_)), "{crashes}");
        start
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_suspected_pass_alone_then_the_others_then_what_is_held() {
        let apart = Arc::new(Apart::new(TaskTracker::new()));
        let held = apart.start(1);
        let second = suspect(&apart, 2);
        let first = suspect(&apart, 3);
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let pass = |name, start: Start| {
            let order = Arc::clone(&order);
            async move {
                let turn = start.wait().await;
                order.lock().unwrap().push((name, "begins"));
                tokio::task::yield_now().await;
                order.lock().unwrap().push((name, "got further"));
                drop(turn);
            }
        };
        let begun = Instant::now();
        tokio::join!(pass("held", held), pass("second", second), pass("first", first));
        let expected = ["first", "second", "held"].map(|name| [(name, "begins"), (name, "got further")]);
        assert_eq!(*order.lock().unwrap(), expected.concat());
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_ends_by_itself_and_each_one_makes_room_for_one_more() {
        let apart = Arc::new(Apart::new(TaskTracker::new()));
        let begun = Instant::now();
        let mut begins = Vec::new();
        let mut turns = Vec::new();
        let starts: Vec<Start> = (0..7).map(|_| suspect(&apart, 2)).collect();
        let held = apart.start(0);
        for start in starts {
            turns.push(start.wait().await);
            begins.push(begun.elapsed().as_secs());
        }
        assert_eq!(begins, [0, 2, 2, 4, 4, 4, 4]);
        assert!(held.wait().await.is_none());
        assert_eq!(begun.elapsed(), Duration::from_secs(4) + HOLD, "none of them got further");
        drop(turns);
        apart.start(0).wait().await;
        assert_eq!(begun.elapsed(), Duration::from_secs(4) + HOLD);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_gives_up_keeps_nobody_waiting() {
        let apart = Arc::new(Apart::new(TaskTracker::new()));
        let (gone, other) = (suspect(&apart, 4), suspect(&apart, 2));
        drop(gone);
        let turn = other.wait().await;
        let waiting = suspect(&apart, 4);
        assert!(timeout(TURN / 2, waiting.wait()).await.is_err(), "the other has its turn");
        drop(turn);
        apart.start(0).wait().await;
    }
}
