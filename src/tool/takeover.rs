//! Ends a command whose supervisor does not do its work any more: the command stopped it, or killed it.
//!
//! Two looks, each taken again until it finds nobody several times in a row:
//! - below the supervisor. A stopped one is still the parent of everything that detached itself, so as long as it
//!   exists this finds all of the tree.
//! - through the whole process table for the variables that name the run and the call. A supervisor that was killed
//!   has nobody below it any more. This is a safety net: a process that changes its environment escapes it.

use std::io;
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::process::{Marks, kill_marked, signal_below};

/// How long one of the two looks is repeated. What SIGKILL has not ended by then waits inside the kernel.
const LOOK_BOUND: Duration = Duration::from_millis(500);

/// How many looks in a row have to find nobody: one look misses a process that forks and exits while it lasts.
const EMPTY_LOOKS: u32 = 5;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// How long a supervisor that was let go may take to kill its tree and exit.
const LET_GO: Duration = Duration::from_millis(300);

/// Who is left of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Nobody was found.
    Nobody,
    /// Somebody does not end, or the process table could not be read.
    Somebody,
}

impl Left {
    const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nobody, Self::Nobody) => Self::Nobody,
            (Self::Somebody, _) | (_, Self::Somebody) => Self::Somebody,
        }
    }
}

/// The process that supervises a command, and what its command can be told by.
pub(super) struct Supervisor {
    pub(super) child: Child,
    pub(super) marks: Marks,
}

impl Supervisor {
    /// Kills the command, then the supervisor, then whoever else carries the marks.
    pub(super) async fn take_over(&mut self) -> Left {
        // Until its exit is taken the number belongs to no other process.
        let below = match self.child.id() {
            Some(pid) => repeat(move || signal_below(pid.cast_signed(), Signal::KILL)).await,
            None => Left::Nobody,
        };
        if let Err(error) = self.child.start_kill() {
            tracing::debug!(%error, "a supervisor was gone when it was to be killed");
        }
        let bound = Instant::now() + LOOK_BOUND;
        match timeout_at(bound, self.child.wait()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "waiting for a supervisor failed"),
            Err(_) => tracing::warn!("a supervisor was killed and does not end"),
        }
        let marks = self.marks.clone();
        below.and(repeat(move || kill_marked(&marks)).await)
    }

    /// Sees to the end of a supervisor whose control channel was closed, and so has to kill its tree and exit.
    pub(super) async fn see_off(mut self) {
        match timeout(LET_GO, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => return,
            Ok(Ok(_)) => tracing::warn!("a supervisor that was let go died or failed"),
            Ok(Err(error)) => tracing::warn!(%error, "waiting for a supervisor failed"),
            Err(_) => tracing::warn!("a supervisor that was let go does not end; its command is killed"),
        }
        if self.take_over().await == Left::Somebody {
            tracing::error!("a command that was let go cannot be killed");
        }
    }
}

/// Kills again and again until there is nobody, within a bound.
async fn repeat(kill: impl Fn() -> io::Result<usize> + Clone + Send + 'static) -> Left {
    let until = Instant::now() + LOOK_BOUND;
    let mut empty = 0;
    loop {
        let found =
            tokio::task::spawn_blocking(kill.clone()).await.unwrap_or_else(|error| Err(io::Error::other(error)));
        match found {
            Ok(0) => empty += 1,
            Ok(_) if Instant::now() < until => empty = 0,
            Ok(_) => return Left::Somebody,
            Err(error) => {
                tracing::error!(%error, "the processes of a command cannot be looked for");
                return Left::Somebody;
            }
        }
        if empty == EMPTY_LOOKS {
            return Left::Nobody;
        }
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// What a look finds, from how many looks there were before it.
    async fn looks(find: fn(usize) -> io::Result<usize>) -> (Left, usize) {
        let taken = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&taken);
        let left = repeat(move || find(counter.fetch_add(1, Ordering::Relaxed))).await;
        (left, taken.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn somebody_who_is_missed_by_some_looks_is_found_by_the_next() {
        let empty = EMPTY_LOOKS as usize;
        assert_eq!(looks(|_| Ok(0)).await, (Left::Nobody, empty));
        assert_eq!(looks(|look| Ok(usize::from(look == 4))).await, (Left::Nobody, 5 + empty));
        assert_eq!(looks(|_| Err(io::Error::other("no table"))).await, (Left::Somebody, 1));
        assert_eq!(looks(|_| Ok(1)).await.0, Left::Somebody);
    }
}
