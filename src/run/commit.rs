//! One step becomes durable, then visible.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::task::Work;
use crate::agent::{Doing, Machine, Observation, Transition, UnexpectedObservation};
use crate::domain::{EncodedBody, Event, EventBody, InboxItem, InboxNumber, Pause, Run, RunStatus, RunView, Timestamp};
use crate::event::{Activity, ExecutingCall, LiveRun};
use crate::store::{KeyUse, StepCommit, Store, StoreError};

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
    /// What was said to the run does not fit it.
    #[error("the run's state does not fit what happened: {0}")]
    Machine(#[from] UnexpectedObservation),
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
    run.limits = *machine.limits();
    run.status = match machine.doing() {
        Doing::Nothing | Doing::Calling { .. } | Doing::Running(_) => return,
        Doing::Waiting(calls) => {
            let paused = pause(&run.status, now);
            let until = match run.status {
                RunStatus::Waiting { until, .. } => until,
                RunStatus::Queued { .. } | RunStatus::Running { .. } | RunStatus::Finished { .. } => {
                    now.plus(Duration::from_millis(machine.limits().wait_timeout_ms))
                }
            };
            RunStatus::Waiting { paused, until, calls }
        }
        Doing::Answered => match &run.status {
            // A worker has it already.
            RunStatus::Running { .. } => return,
            RunStatus::Queued { .. } | RunStatus::Waiting { .. } | RunStatus::Finished { .. } => {
                RunStatus::Queued { paused: Some(pause(&run.status, now)) }
            }
        },
        Doing::Over(end) => {
            let (started_at, deadline_at) = match &run.status {
                RunStatus::Queued { paused } => (paused.map(|paused| paused.started_at), None),
                RunStatus::Running { started_at, deadline_at } => (Some(*started_at), Some(*deadline_at)),
                RunStatus::Waiting { paused, .. } => (Some(paused.started_at), None),
                RunStatus::Finished { started_at, deadline_at, .. } => (*started_at, *deadline_at),
            };
            RunStatus::Finished { started_at, deadline_at, finished_at: now, end: end.clone() }
        }
    };
}

/// What a run keeps of its time from `now` on.
fn pause(status: &RunStatus, now: Timestamp) -> Pause {
    match status {
        RunStatus::Waiting { paused, .. } | RunStatus::Queued { paused: Some(paused) } => *paused,
        RunStatus::Running { started_at, deadline_at } => {
            let left_ms = u64::try_from(deadline_at.since(now).as_millis()).unwrap_or(u64::MAX);
            Pause { started_at: *started_at, left_ms }
        }
        // Neither was at work.
        RunStatus::Queued { paused: None } | RunStatus::Finished { .. } => Pause { started_at: now, left_ms: 0 },
    }
}

/// Encodes what happened. What shows the run itself comes last: that it waits, or that it ended.
pub(super) fn encode(events: &[EventBody], run: &Run, moment: Moment) -> Result<Vec<EncodedBody>, serde_json::Error> {
    let mut encoded = events.iter().map(EncodedBody::new).collect::<Result<Vec<_>, _>>()?;
    match &run.status {
        RunStatus::Queued { .. } | RunStatus::Running { .. } => {}
        RunStatus::Waiting { until, calls, .. } => {
            encoded.push(EncodedBody::new(&EventBody::<RunView>::Waiting { calls: calls.clone(), until: *until })?);
        }
        RunStatus::Finished { started_at, .. } => {
            let duration = started_at.map_or(Duration::ZERO, |_| moment.ran_for);
            let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            encoded.push(EncodedBody::new(&EventBody::RunEnd { run: RunView::from(run), duration_ms })?);
        }
    }
    Ok(encoded)
}

/// Who commits.
#[derive(Clone, Copy)]
pub(super) enum Author<'k> {
    /// The run's worker. It waits for a database that is away, since the step has happened and only a commit makes it
    /// count.
    Worker,
    /// Somebody who is told that the database is away. A caller may ask with a key.
    Other(Option<&'k KeyUse>),
}

/// Commits a transition of a run and publishes it; `work.run` then is the run as stored.
pub(super) async fn commit(
    store: &dyn Store,
    work: &mut Work,
    mut transition: Transition,
    moment: Moment,
    author: Author<'_>,
) -> Result<(), CommitError> {
    let key = match author {
        Author::Worker => None,
        Author::Other(key) => key,
    };
    let before = work.run.status.clone();
    let stored = loop {
        apply(&mut work.run, &work.machine, moment.now);
        // A run that has ended goes on from nowhere.
        let state = match work.machine.end() {
            Some(_) => None,
            None => Some(serde_json::to_string(work.machine.state())?),
        };
        let run = &work.run;
        let commit = StepCommit {
            run: run.id,
            generation: run.generation,
            after: run.last_seq,
            time: moment.now,
            status: run.status.clone(),
            cancel_requested_at: run.cancel_requested_at,
            steps: run.steps,
            tool_calls: run.tool_calls,
            usage: run.usage,
            crashes: run.crashes,
            inbox_read: work.inbox_read,
            state,
            events: encode(&transition.events, run, moment)?,
            key: key.cloned(),
        };
        work.live.committing();
        match store.commit_step(commit).await {
            Ok(stored) => break stored,
            // The final event shows the whole run, so it has to know of a request that came in between.
            Err(StoreError::CancelRequested { at, .. }) => work.run.cancel_requested_at = Some(at),
            // The run goes on with what it had not heard, or tells of it with its end.
            Err(StoreError::Unread { inbox, .. }) => {
                work.run.status = before.clone();
                let heard = hear(store, work, inbox).await?;
                transition.events.extend(heard.events);
            }
            Err(error @ StoreError::Unavailable(_)) if matches!(author, Author::Worker) => {
                tracing::warn!(%error, "the database is away; the step waits to be committed");
                sleep(RETRY).await;
            }
            Err(error) => return Err(error.into()),
        }
    };
    work.run.cancel_requested_at = stored.cancel_requested_at;
    work.inbox = stored.inbox;
    publish(&work.live, &stored.events, &mut work.run, &work.machine);
    Ok(())
}

/// Takes in what was said to the run, up to item `inbox` at least.
pub(super) async fn hear(store: &dyn Store, work: &mut Work, inbox: InboxNumber) -> Result<Transition, CommitError> {
    let items = loop {
        match store.inbox(work.run.id, work.inbox_read).await {
            Ok(items) => break items,
            Err(error @ StoreError::Unavailable(_)) => {
                tracing::warn!(%error, "the database is away; the run waits for it");
                sleep(RETRY).await;
            }
            Err(error) => return Err(error.into()),
        }
    };
    work.inbox_read = items.last().map_or(inbox, |(number, _)| (*number).max(inbox));
    work.inbox = work.inbox.max(work.inbox_read);
    let timeout = work.machine.limits().timeout_ms;
    let items: Vec<InboxItem> = items.into_iter().map(|(_, item)| item).collect();
    for item in &items {
        if let InboxItem::Amendment { metadata: Some(metadata), limits: _ } = item {
            work.run.metadata.clone_from(metadata);
        }
    }
    let transition = work.machine.observe(Observation::Said(items), &work.tools)?;
    if let RunStatus::Running { deadline_at, .. } = &mut work.run.status {
        let more = work.machine.limits().timeout_ms.saturating_sub(timeout);
        *deadline_at = deadline_at.plus(Duration::from_millis(more));
    }
    Ok(transition)
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
        Doing::Nothing | Doing::Waiting(_) | Doing::Answered => Activity::Idle,
        Doing::Calling { step, attempt } => Activity::Writing { step, attempt },
        Doing::Running(calls) => {
            Activity::Executing(calls.map(|call| ExecutingCall { call_id: call.id, name: call.name }).collect())
        }
        Doing::Over(_) => Activity::Ended,
    }
}

/// Progress notes of tools, passed on to whoever watches the run.
pub(super) struct LiveProgress(pub(super) Arc<LiveRun>);

impl crate::tool::ProgressSink for LiveProgress {
    fn progress(&self, call_id: &str, text: &str) {
        self.0.progress(call_id, text);
    }
}
