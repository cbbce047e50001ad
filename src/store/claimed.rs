//! What claiming does to a run, and how one ends that cannot be read: the same for every database.

use std::time::Duration;

use super::row::{self, Cells, StatusColumns};
use super::{ClaimedRun, Former, StoreError};
use crate::domain::{
    EncodedBody, End, EndStatus, EventBody, InboxNumber, Run, RunError, RunStatus, RunView, Timestamp,
};

/// Reads a run from a row with `run_columns!`, `state`, `inbox` and `spec`; without what was said in it.
pub(super) fn read(row: &impl Cells) -> Result<ClaimedRun, StoreError> {
    let run = row::run(row)?;
    let corrupt = |error: sqlx::Error| StoreError::Corrupt { run: run.id, reason: error.to_string() };
    let spec = row::spec(row.optional_text("spec").map_err(corrupt)?.as_deref(), run.id)?;
    let state = row.optional_text("state").map_err(corrupt)?;
    let inbox = row.integer("inbox").map_err(corrupt)?;
    let inbox = InboxNumber::try_from(inbox).map_err(|error| corrupt(sqlx::Error::Decode(error.into())))?;
    let former = match run.status {
        RunStatus::Running { .. } => Former::LetGo,
        RunStatus::Queued { .. } | RunStatus::Waiting { .. } | RunStatus::Finished { .. } => Former::None,
    };
    Ok(ClaimedRun { run, spec, state, inbox, former, history: Vec::new(), transcript: Vec::new() })
}

/// Brings a run that is claimed up to that. `was_held` says that a process had it which never let go of it.
pub(super) fn take(claimed: &mut ClaimedRun, was_held: bool, now: Timestamp) {
    if was_held && claimed.former == Former::LetGo {
        claimed.former = Former::Gone;
    }
    let run = &mut claimed.run;
    run.generation += 1;
    run.status = match std::mem::replace(&mut run.status, RunStatus::Queued { paused: None }) {
        RunStatus::Queued { paused: None } => {
            // Where it was raised since, the worker hears of that and adds it.
            let timeout = Duration::from_millis(claimed.spec.limits.timeout_ms);
            RunStatus::Running { started_at: now, deadline_at: now.plus(timeout) }
        }
        RunStatus::Queued { paused: Some(paused) } => RunStatus::Running {
            started_at: paused.started_at,
            deadline_at: now.plus(Duration::from_millis(paused.left_ms)),
        },
        // Time goes on while nobody has it.
        other @ (RunStatus::Running { .. } | RunStatus::Waiting { .. } | RunStatus::Finished { .. }) => other,
    };
}

/// The columns of a run that ends since it cannot be read; its `started_at` and `deadline_at` stay as they are.
pub(super) fn unreadable_end(error: &StoreError, finished_at: Timestamp) -> Result<StatusColumns, StoreError> {
    let end = End::Stopped {
        status: EndStatus::InternalError,
        partial: None,
        error: RunError { code: "stored_run_unreadable".to_owned(), message: error.to_string(), retryable: true },
    };
    StatusColumns::of(&RunStatus::Finished { started_at: None, deadline_at: None, finished_at, end })
}

/// The last event of a run that has ended.
pub(super) fn run_end(run: &Run) -> Result<EncodedBody, StoreError> {
    let duration = match &run.status {
        RunStatus::Finished { started_at: Some(started_at), finished_at, .. } => finished_at.since(*started_at),
        RunStatus::Finished { started_at: None, .. }
        | RunStatus::Running { .. }
        | RunStatus::Waiting { .. }
        | RunStatus::Queued { .. } => Duration::ZERO,
    };
    let body = EventBody::RunEnd {
        run: RunView::from(run),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
    };
    EncodedBody::new(&body).map_err(|error| StoreError::Failed(error.into()))
}
