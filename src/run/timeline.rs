//! The times of a run at work. The clock of the machine can step back; a run's times never do, and its duration is
//! measured.

use std::time::Duration;

use tokio::time::Instant;

use super::commit::Moment;
use crate::domain::{Run, RunStatus, Timestamp};

/// The times of one run in this process.
pub(super) struct Timeline {
    begun: Instant,
    /// How long it had run before this process took it.
    before: Duration,
    newest: Timestamp,
}

impl Timeline {
    /// Begins at `now`. The run may have been started before, perhaps by another process.
    pub(super) fn of(run: &Run, now: Timestamp) -> Self {
        let started_at = match &run.status {
            RunStatus::Running { started_at, .. } => Some(*started_at),
            RunStatus::Waiting { paused, .. } | RunStatus::Queued { paused: Some(paused) } => Some(paused.started_at),
            RunStatus::Queued { paused: None } | RunStatus::Finished { .. } => None,
        };
        let before = started_at.map_or(Duration::ZERO, |started_at| now.since(started_at));
        Self { begun: Instant::now(), before, newest: started_at.map_or(now, |started_at| now.max(started_at)) }
    }

    /// The time to record when the clock says `now`.
    fn at(&mut self, now: Timestamp) -> Timestamp {
        self.newest = self.newest.max(now);
        self.newest
    }

    /// How long the run has been at work.
    fn elapsed(&self) -> Duration {
        self.before + self.begun.elapsed()
    }

    /// When a step happens that is recorded while the clock says `now`.
    pub(super) fn moment(&mut self, now: Timestamp) -> Moment {
        Moment { now: self.at(now), ran_for: self.elapsed() }
    }
}
