//! What goes into the machine and what comes out: its stored state, its steps, its observations.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::transcript::IllFormed;
use crate::domain::{
    Effect, End, EventBody, LimitKind, Message, ModelFailure, ModelTurn, Part, RunError, ToolCall, ToolOutcome, Usage,
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
    /// Over.
    Finished { end: End },
}

/// Where one call of the batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Slot {
    /// Valid, not started.
    Pending(Effect),
    /// Its start is recorded, its outcome is not.
    Started,
    /// It has its outcome.
    Done,
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
    /// Nothing; the run is over.
    Finish(End),
}

/// What a run is doing between two steps.
pub enum Doing<'a, I: Iterator<Item = &'a ToolCall>> {
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
    /// It is over.
    Over,
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

/// Why a run has to end now.
#[derive(Clone, Debug, PartialEq)]
pub enum Interrupt {
    /// Somebody asked for it.
    Cancel,
    /// Its deadline passed.
    Deadline,
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
    /// Recording it would break the transcript.
    #[error(transparent)]
    Transcript(#[from] IllFormed),
}
