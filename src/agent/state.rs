//! What goes into the machine and what comes out: its stored state, its steps, its observations.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::transcript::IllFormed;
use crate::domain::{
    Arguments, Effect, End, EventBody, InboxItem, LimitKind, Limits, Message, ModelFailure, ModelTurn, Part,
    PendingCall, PendingKind, RunError, ToolCall, ToolOutcome, Usage, UserMessage,
};

/// Where a run stands between two steps, without what its spec and its transcript already say. Its JSON is stored
/// with each commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentState {
    /// Model responses so far.
    pub steps: u32,
    /// Tool calls so far, refused and failed ones included.
    pub tool_calls: u32,
    /// What providers reported.
    pub usage: Usage,
    /// Tokens counted against `max_tokens`: reported ones, and estimates for calls that reported none.
    pub(super) spent_tokens: u64,
    /// A repeat was answered with a warning; the next one ends the run.
    pub(super) repeat_warned: bool,
    /// Limits that were warned of.
    pub(super) limits_warned: BTreeSet<LimitKind>,
    /// Messages left out of the newest request.
    pub(super) dropped: usize,
    /// The bounds, once they were changed while the run was active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) limits: Option<Limits>,
    /// What the caller said since the last model call; enters the transcript before the next one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) said: Vec<UserMessage>,
    pub(super) phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    /// Not started.
    New,
    /// The model is to be called.
    Model { attempt: u32 },
    /// The newest batch is at work: one slot per call, in order.
    Tools { slots: Vec<Slot> },
    /// The newest batch waits for answers from outside.
    Waiting { slots: Vec<Slot> },
    /// The answers are there, and a worker has to go on with the batch.
    Answered { slots: Vec<Slot> },
    /// Over.
    Finished { end: End },
}

/// Where one call of the batch stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Slot {
    /// Valid, not started.
    Pending(Valid),
    /// Somebody outside has to answer first.
    Asked(PendingKind),
    /// Its start is recorded, its outcome is not.
    Started(Valid),
    /// It has its outcome.
    Done,
}

/// A call that can run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Valid {
    /// What it can change.
    pub(super) effect: Effect,
    /// Its arguments, when somebody replaced those of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) edited: Option<Arguments>,
}

impl Valid {
    pub(super) const fn as_asked(effect: Effect) -> Self {
        Self { effect, edited: None }
    }

    /// The call as it is run.
    pub(super) fn apply(&self, call: &ToolCall) -> ToolCall {
        let arguments = self.edited.as_ref().unwrap_or(&call.arguments).clone();
        ToolCall { id: call.id.clone(), name: call.name.clone(), arguments }
    }
}

/// What is to be done now.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Observe the start.
    Start,
    /// Call the model and observe a turn, a retry or a failure.
    CallModel(ModelCall),
    /// Run these calls, all at the same time, and observe each outcome. Their starts are recorded.
    RunTools(Vec<ToolCall>),
    /// Let go of the run until answers come from outside.
    Wait,
    /// Observe that a worker goes on.
    Resume,
    /// Nothing; the run is over.
    Finish(End),
}

/// What a run is doing between two steps.
pub enum Doing<'a, I: Iterator<Item = ToolCall>> {
    /// It has not started.
    Nothing,
    /// The model is called.
    Calling {
        /// The step, from 1.
        step: u32,
        /// The attempt, from 1.
        attempt: u32,
    },
    /// These calls run.
    Running(I),
    /// These calls wait for answers from outside.
    Waiting(Vec<PendingCall>),
    /// The answers are there, and a worker has to go on.
    Answered,
    /// It is over.
    Over(&'a End),
}

/// One model call.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCall {
    /// The step, from 1.
    pub step: u32,
    /// The attempt, from 1.
    pub attempt: u32,
    /// What the model sees.
    pub messages: Vec<Arc<Message>>,
}

/// What happened outside.
#[derive(Clone, Debug, PartialEq)]
pub enum Observation {
    /// A worker has the run and begins.
    Start,
    /// The model responded.
    ModelTurn {
        /// The response.
        turn: ModelTurn,
        /// Milliseconds of this attempt.
        duration_ms: u64,
    },
    /// An attempt failed and another one follows.
    ModelRetry {
        /// Why.
        failure: ModelFailure,
        /// What had been streamed, if anything; it was paid for.
        partial: Vec<Part>,
        /// Milliseconds until the next attempt.
        delay_ms: u64,
    },
    /// The model call failed for good.
    ModelFailed {
        /// Why.
        failure: ModelFailure,
        /// Milliseconds of the last attempt.
        duration_ms: u64,
        /// What had been streamed, if anything.
        partial: Vec<Part>,
    },
    /// Started calls ended.
    ToolOutcomes {
        /// Their outcomes.
        outcomes: Vec<ToolOutcome>,
        /// A tool says that the run cannot go on.
        fatal: Option<String>,
    },
    /// Another worker had the run, and what it did since its last commit is lost.
    TakenOver,
    /// Somebody outside answered.
    Answers(Vec<Answer>),
    /// A worker goes on once the answers are there.
    Resumed,
    /// Things were said to the run.
    Said(Vec<InboxItem>),
    /// The run has to end now.
    Interrupt {
        /// Why.
        cause: Interrupt,
        /// What had been streamed of a response that was being written.
        partial: Vec<Part>,
        /// Outcomes of started calls as far as they are known.
        outcomes: Vec<ToolOutcome>,
    },
}

/// What somebody outside says of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// What came of it: of a call the caller executed, or of one whose outcome was unknown.
    Result {
        /// The call.
        call_id: String,
        /// What the model reads.
        content: String,
        /// Whether it failed.
        is_error: bool,
    },
    /// It may run.
    Approve {
        /// The call.
        call_id: String,
    },
    /// It may run with other arguments.
    Edit {
        /// The call.
        call_id: String,
        /// The arguments.
        arguments: Map<String, Value>,
    },
    /// It may not run.
    Deny {
        /// The call.
        call_id: String,
        /// What the model is told.
        message: Option<String>,
    },
}

impl Answer {
    /// The call.
    pub fn call_id(&self) -> &str {
        match self {
            Self::Result { call_id, .. }
            | Self::Approve { call_id }
            | Self::Edit { call_id, .. }
            | Self::Deny { call_id, .. } => call_id,
        }
    }
}

/// An answer cannot be taken. None of those it came with is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerProblem {
    /// No call of that id waits for an answer.
    #[error("call `{call_id}` does not wait for an answer; {}", waiting(.pending))]
    NotPending {
        /// The call.
        call_id: String,
        /// Those that do.
        pending: Vec<String>,
    },
    /// The call has an answer among these already.
    #[error("call `{0}` is answered twice")]
    Twice(String),
    /// The call waits for something else.
    #[error("call `{call_id}` waits for {expected}")]
    WrongKind {
        /// The call.
        call_id: String,
        /// What it waits for.
        expected: &'static str,
    },
    /// The new arguments do not fit the tool.
    #[error("the arguments for call `{call_id}` cannot be used: {problem}")]
    Arguments {
        /// The call.
        call_id: String,
        /// Why.
        problem: String,
    },
}

fn waiting(pending: &[String]) -> String {
    match pending {
        [] => "none does".to_owned(),
        pending => format!("these do: {}", pending.join(", ")),
    }
}

/// Why a run has to end now.
#[derive(Clone, Debug, PartialEq)]
pub enum Interrupt {
    /// Somebody asked for it.
    Cancel,
    /// Its deadline passed.
    Deadline,
    /// Nobody answered in time.
    WaitExpired,
    /// hames itself cannot go on.
    Failed(RunError),
    /// Whoever ran it is gone, and with it what came of calls it had started.
    WorkerLost(RunError),
}

/// What an observation led to.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Transition {
    /// What to record, in order; `run_end` is added by whoever knows the whole run.
    pub events: Vec<EventBody>,
}

/// The observation does not fit where the run stands: a second outcome, a turn nobody asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnexpectedObservation {
    /// The machine waits for something else.
    #[error("{observation} does not fit: {expected}")]
    Phase {
        /// What came.
        observation: &'static str,
        /// What the machine waits for.
        expected: &'static str,
    },
    /// No started call of that id is without an outcome.
    #[error("an outcome came for call `{0}`, which is not running")]
    Outcome(String),
    /// Answers cannot be taken.
    #[error(transparent)]
    Answer(#[from] AnswerProblem),
    /// Recording it would break the transcript.
    #[error(transparent)]
    Transcript(#[from] IllFormed),
}
