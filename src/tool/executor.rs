//! Runs a group of calls that may overlap and gives each exactly one outcome, whatever its tool does.
//!
//! A bounded number of calls run at the same time, in the order of the calls; each has its time from its own start.
//! Two tasks per call: one for the tool, which may panic or block, and one that watches it and holds the clock, so
//! that a timeout does not depend on anybody asking for the next outcome.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::Instrument as _;

use super::workspace::Workspace;
use super::{ProgressSink, Tool, ToolCtx, ToolError};
use crate::domain::text::panic_text;
use crate::domain::{Effect, OutcomeKind, RunId, ToolOutcome};

/// How long a tool has to wind up after its token fired; then it is dropped. Enough for `run_command`, which ends a
/// process tree politely in half a second.
pub const WIND_UP: Duration = Duration::from_millis(700);

/// How long a dropped tool may take to be gone. One that is not by then blocks its thread.
pub const VANISH: Duration = Duration::from_millis(150);

/// A stopped run has to have ended within a second, with what is to be stored after its calls.
const _: () = assert!(WIND_UP.as_millis() + VANISH.as_millis() <= 850);

/// Most calls of a group that run at the same time. A turn may hold 128 calls; a call may be a process tree or a
/// request to somebody's server, and more of those at once would be slower, not faster.
pub const MAX_AT_ONCE: usize = 16;

/// A call that passed the registry's check.
pub struct ReadyCall {
    /// The call.
    pub id: String,
    /// Its tool.
    pub tool: Arc<dyn Tool>,
    /// Arguments that fit the tool's schema.
    pub arguments: Map<String, Value>,
}

/// What the calls of a group share.
#[derive(Clone)]
pub struct GroupCtx {
    /// The run.
    pub run: RunId,
    /// The files it may touch.
    pub workspace: Arc<Workspace>,
    /// Fires on cancel and deadline of the run; each call gets a child of it.
    pub cancel: CancellationToken,
    /// Most time for one call.
    pub timeout: Duration,
    /// Where calls tell what is going on.
    pub progress: Arc<dyn ProgressSink>,
}

/// The end of one call of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct Executed {
    /// What the model reads.
    pub outcome: ToolOutcome,
    /// Why the run cannot go on, if it cannot: the tool said so, or it panicked.
    pub fatal: Option<String>,
}

/// A group of calls at work. Dropping it cancels them all.
pub struct Execution {
    tasks: JoinSet<Executed>,
    _starts: JoinSet<()>,
    ids: HashMap<Id, String>,
    _cancel: DropGuard,
}

/// Starts the calls, [`MAX_AT_ONCE`] of them at once and each other one when an earlier one has ended. Must be called
/// inside a tokio runtime.
pub fn execute(calls: Vec<ReadyCall>, mut ctx: GroupCtx) -> Execution {
    ctx.cancel = ctx.cancel.child_token();
    let guard = ctx.cancel.clone().drop_guard();
    let mut tasks = JoinSet::new();
    let mut ids = HashMap::with_capacity(calls.len());
    let mut turns = Vec::with_capacity(calls.len());
    for call in calls {
        let id = call.id.clone();
        let (turn, has_turn) = oneshot::channel();
        turns.push(turn);
        let handle = tasks.spawn(supervise(call, ctx.clone(), has_turn).in_current_span());
        ids.insert(handle.id(), id);
    }
    let mut starts = JoinSet::new();
    starts.spawn(give_turns(turns));
    Execution { tasks, _starts: starts, ids, _cancel: guard }
}

/// What a call holds while it runs.
type Turn = OwnedSemaphorePermit;

/// Gives each call its turn in the order of the calls.
async fn give_turns(turns: Vec<oneshot::Sender<Turn>>) {
    let at_once = Arc::new(Semaphore::new(MAX_AT_ONCE));
    for turn in turns {
        // Nobody closes the semaphore.
        let Ok(permit) = Arc::clone(&at_once).acquire_owned().await else { return };
        // A call that was stopped before its turn does not want it any more; then it is free for the next.
        drop(turn.send(permit));
    }
}

impl Execution {
    /// The next call to end; `None` when each call has given its outcome. Safe to drop and call again.
    pub async fn next(&mut self) -> Option<Executed> {
        let (id, executed) = match self.tasks.join_next_with_id().await? {
            Ok((id, executed)) => (id, Ok(executed)),
            Err(error) => (error.id(), Err(error)),
        };
        let call_id = self.ids.remove(&id);
        Some(executed.unwrap_or_else(|error| {
            let call_id = call_id.unwrap_or_default();
            tracing::error!(call_id, error = &error as &dyn std::error::Error, "the supervisor of a tool call died");
            let content = "This call failed inside the server. Its effects may have happened.".to_owned();
            let outcome = ToolOutcome { call_id, kind: OutcomeKind::Error, content, duration_ms: 0 };
            Executed { outcome, fatal: Some("the supervisor of a tool call died".to_owned()) }
        }))
    }
}

/// What the tool's own task gives.
struct Finished {
    result: Result<String, ToolError>,
    /// Measured where the tool ended, not where somebody noticed.
    after: Duration,
    /// Whether the call had been told to stop by then.
    told_to_stop: bool,
}

/// Why a call has to stop.
#[derive(Clone, Copy)]
enum Stop {
    TimedOut,
    Cancelled,
}

impl Stop {
    const fn kind(self) -> OutcomeKind {
        match self {
            Self::TimedOut => OutcomeKind::TimedOut,
            Self::Cancelled => OutcomeKind::Aborted,
        }
    }
}

/// How a call went that did not wind up when it was told to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Abandoned {
    /// It was dropped.
    Dropped,
    /// It could not even be dropped: it blocks its thread.
    Stuck,
}

/// What became of a tool's own task; `None` never happens, since the set holds one task until it is joined.
type Joined<T> = Option<Result<T, JoinError>>;

async fn supervise(call: ReadyCall, ctx: GroupCtx, turn: oneshot::Receiver<Turn>) -> Executed {
    let ReadyCall { id, tool, arguments } = call;
    let name = tool.spec().name.clone();
    let effect = tool.effect(&arguments);
    let (timeout, cancel) = (ctx.timeout, ctx.cancel.child_token());
    let turn = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        turn = turn => turn.ok(),
    };
    let started = Instant::now();
    let executed = |kind, content, fatal| {
        let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Executed { outcome: ToolOutcome { call_id: id.clone(), kind, content, duration_ms }, fatal }
    };
    // Held to the end of the call.
    let Some(_turn) = turn else {
        let text = format!("`{name}` was not started: the run was stopped first. Nothing was executed.");
        return executed(OutcomeKind::Aborted, text, None);
    };

    let tool_ctx = ToolCtx {
        run: ctx.run,
        call_id: id.clone(),
        workspace: ctx.workspace,
        timeout,
        cancel: cancel.clone(),
        progress: ctx.progress,
    };
    let mut task = JoinSet::new();
    task.spawn(
        async move {
            let result = tool.call(&tool_ctx, &arguments).await;
            Finished { result, after: started.elapsed(), told_to_stop: tool_ctx.cancel.is_cancelled() }
        }
        .in_current_span(),
    );

    let panicked = |error: JoinError| {
        let panic =
            error.try_into_panic().map_or_else(|error| error.to_string(), |panic| panic_text(&*panic).to_owned());
        tracing::error!(tool = %name, call_id = id, panic, "a tool panicked");
        format!("the tool `{name}` panicked; the server's log has the details")
    };
    // What a tool returns after it was told to stop, or after its time, is refused: it may have stopped half-way.
    let ended = |joined: Joined<Finished>, stop: Option<Stop>| {
        let stopped = |stop: Stop| stopped_text(name.as_str(), effect, stop, None, timeout);
        match joined {
            Some(Ok(finished)) => {
                let late = if finished.told_to_stop {
                    Some(stop.unwrap_or(Stop::Cancelled))
                } else if finished.after > timeout {
                    Some(Stop::TimedOut)
                } else {
                    None
                };
                match (late, finished.result) {
                    (Some(stop), result) => executed(stop.kind(), stopped(stop), fatal(&result)),
                    (None, Ok(content)) => executed(OutcomeKind::Result, content, None),
                    (None, Err(error)) => {
                        let text = error.to_string();
                        executed(OutcomeKind::Error, text, fatal(&Err(error)))
                    }
                }
            }
            Some(Err(error)) => {
                let text = format!("`{name}` failed inside the server. {}", effects_text(effect));
                let (kind, text) = stop.map_or((OutcomeKind::Error, text), |stop| (stop.kind(), stopped(stop)));
                executed(kind, text, Some(panicked(error)))
            }
            // This does not happen; it still is an outcome.
            None => executed(OutcomeKind::Error, format!("`{name}` gave no result."), None),
        }
    };
    let stop = tokio::select! {
        biased;
        joined = task.join_next() => return ended(joined, None),
        () = cancel.cancelled() => Stop::Cancelled,
        () = tokio::time::sleep(timeout) => Stop::TimedOut,
    };

    cancel.cancel();
    let abandoned = match see_off(&mut task).await {
        Ok(joined) => return ended(joined, Some(stop)),
        Err(abandoned) => abandoned,
    };
    match abandoned {
        Abandoned::Dropped => tracing::warn!(tool = %name, call_id = id, "a tool ignored its stop and was dropped"),
        Abandoned::Stuck => {
            tracing::error!(tool = %name, call_id = id, "a tool blocks its thread and cannot be stopped")
        }
    }
    executed(stop.kind(), stopped_text(name.as_str(), effect, stop, Some(abandoned), timeout), None)
}

/// Waits for the end of a task that was told to stop, but never longer than [`WIND_UP`] and [`VANISH`] together.
async fn see_off<T: Send + 'static>(task: &mut JoinSet<T>) -> Result<Joined<T>, Abandoned> {
    if let Ok(joined) = tokio::time::timeout(WIND_UP, task.join_next()).await {
        return Ok(joined);
    }
    task.abort_all();
    match tokio::time::timeout(VANISH, task.join_next()).await {
        // What it returned at the last moment is refused like any late result.
        Ok(_) => Err(Abandoned::Dropped),
        Err(_) => Err(Abandoned::Stuck),
    }
}

fn fatal(result: &Result<String, ToolError>) -> Option<String> {
    match result {
        Ok(_) | Err(ToolError::Respond(_)) => None,
        Err(ToolError::Fatal(reason)) => Some(reason.clone()),
    }
}

/// What the model reads of a call that was stopped. It was running, and the text never says otherwise.
fn stopped_text(name: &str, effect: Effect, stop: Stop, abandoned: Option<Abandoned>, timeout: Duration) -> String {
    let why = match stop {
        Stop::TimedOut => format!("`{name}` was running and did not finish within {} ms", timeout.as_millis()),
        Stop::Cancelled => format!("`{name}` was running when the run was stopped"),
    };
    let how = match abandoned {
        None => "it was told to stop and did",
        Some(Abandoned::Dropped) => "it was told to stop, did not, and was abandoned",
        Some(Abandoned::Stuck) => "it was told to stop, did not, and may still be running",
    };
    format!("{why}; {how}. Its result is lost. {}", effects_text(effect))
}

const fn effects_text(effect: Effect) -> &'static str {
    match effect {
        Effect::ReadOnly => "It only reads, so it changed nothing.",
        Effect::Idempotent | Effect::SideEffect => {
            "Its effects may have happened, wholly or in part: look before you repeat it."
        }
    }
}

#[cfg(test)]
#[path = "executor_tests.rs"]
mod tests;
