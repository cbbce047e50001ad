//! One step becomes durable, then visible.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::agent::{Doing, Machine, Transition};
use crate::domain::{EncodedBody, Event, EventBody, Run, RunStatus, RunView, Timestamp};
use crate::event::{Activity, ExecutingCall, LiveRun};
use crate::store::{StepCommit, Store, StoreError};

/// How long to wait before a commit is tried again while the database is away.
const RETRY: Duration = Duration::from_millis(250);

/// A step cannot be recorded, so the run must not go on in this process.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommitError {
    /// The store refused or failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// State or event cannot be encoded.
    #[error("the step cannot be encoded: {0}")]
    Encode(#[from] serde_json::Error),
}

/// When a step happens.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// The time to record.
    pub(super) now: Timestamp,
    /// How long the run has been at work, by a clock that never goes back.
    pub(super) ran_for: Duration,
}

impl Moment {
    /// That of a run which begins now.
    pub(super) const fn first(now: Timestamp) -> Self {
        Self { now, ran_for: Duration::ZERO }
    }
}

/// Brings a run up to what its machine says.
pub(super) fn apply(run: &mut Run, machine: &Machine, now: Timestamp) {
    let state = machine.state();
    run.steps = state.steps;
    run.tool_calls = state.tool_calls;
    run.usage = state.usage;
    if let Some(end) = machine.end() {
        let (started_at, deadline_at) = match &run.status {
            RunStatus::Queued => (None, None),
            RunStatus::Running { started_at, deadline_at } => (Some(*started_at), Some(*deadline_at)),
            RunStatus::Finished { started_at, deadline_at, .. } => (*started_at, *deadline_at),
        };
        run.status = RunStatus::Finished { started_at, deadline_at, finished_at: now, end: end.clone() };
    }
}

/// Encodes what happened; the final event is added when the run has ended.
pub(super) fn encode(events: &[EventBody], run: &Run, moment: Moment) -> Result<Vec<EncodedBody>, serde_json::Error> {
    let mut encoded = events.iter().map(EncodedBody::new).collect::<Result<Vec<_>, _>>()?;
    if let RunStatus::Finished { started_at, .. } = &run.status {
        let duration = started_at.map_or(Duration::ZERO, |_| moment.ran_for);
        let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        encoded.push(EncodedBody::new(&EventBody::RunEnd { run: RunView::from(run), duration_ms })?);
    }
    Ok(encoded)
}

/// Commits a transition of `machine` and publishes it; `run` then is the run as stored. Waits for a database that is
/// away, since the step has happened and only a commit makes it count.
pub(super) async fn commit(
    store: &dyn Store,
    live: &LiveRun,
    run: &mut Run,
    machine: &Machine,
    transition: Transition,
    moment: Moment,
) -> Result<(), CommitError> {
    apply(run, machine, moment.now);
    // A run that has ended goes on from nowhere.
    let state = match machine.end() {
        Some(_) => None,
        None => Some(serde_json::to_string(machine.state())?),
    };
    let stored = loop {
        let commit = StepCommit {
            run: run.id,
            generation: run.generation,
            time: moment.now,
            status: run.status.clone(),
            cancel_requested_at: run.cancel_requested_at,
            steps: run.steps,
            tool_calls: run.tool_calls,
            usage: run.usage,
            state: state.clone(),
            events: encode(&transition.events, run, moment)?,
        };
        live.committing();
        match store.commit_step(commit).await {
            Ok(stored) => break stored,
            // The final event shows the whole run, so it has to know of a request that came in between.
            Err(StoreError::CancelRequested { at, .. }) => run.cancel_requested_at = Some(at),
            Err(error @ StoreError::Unavailable(_)) => {
                tracing::warn!(%error, "the database is away; the step waits to be committed");
                sleep(RETRY).await;
            }
            Err(
                error @ (StoreError::Fenced { .. }
                | StoreError::Failed(_)
                | StoreError::Corrupt { .. }
                | StoreError::Unusable(_)),
            ) => return Err(error.into()),
        }
    };
    run.cancel_requested_at = stored.cancel_requested_at;
    publish(live, &stored.events, run, machine);
    Ok(())
}

/// Makes committed events visible.
pub(super) fn publish(live: &LiveRun, stored: &[Event], run: &mut Run, machine: &Machine) {
    if let Some(last) = stored.last() {
        run.last_seq = last.seq;
    }
    live.publish(stored, run, activity(machine));
}

/// What a run is doing once its step is committed.
fn activity(machine: &Machine) -> Activity {
    match machine.doing() {
        Doing::Nothing => Activity::Idle,
        Doing::Calling { step, attempt } => Activity::Writing { step, attempt },
        Doing::Running(calls) => Activity::Executing(
            calls.map(|call| ExecutingCall { call_id: call.id.clone(), name: call.name.clone() }).collect(),
        ),
        Doing::Over => Activity::Ended,
    }
}

/// Progress notes of tools, passed on to whoever watches the run.
pub(super) struct LiveProgress(pub(super) Arc<LiveRun>);

impl crate::tool::ProgressSink for LiveProgress {
    fn progress(&self, call_id: &str, text: &str) {
        self.0.progress(call_id, text);
    }
}
