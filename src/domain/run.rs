//! A run: what was asked, where it stands, how it ended.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

use super::{
    Arguments, FinishReason, Generation, Limits, Message, RunError, RunId, Seq, TenantId, Timestamp, ToolName,
    ToolSpec, TraceContext, Usage,
};

/// A model at a configured provider, written `provider/model`. The model part may hold slashes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelRef {
    /// The name of a `[providers.NAME]` section.
    pub provider: String,
    /// The model's name there.
    pub model: String,
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.provider, self.model)
    }
}

impl FromStr for ModelRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((provider, model)) if !provider.is_empty() && !model.is_empty() => {
                Ok(Self { provider: provider.to_owned(), model: model.to_owned() })
            }
            _ => Err(format!("`{text}` is not a model; expected `provider/model`")),
        }
    }
}

impl Serialize for ModelRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModelRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What a run was accepted as: every default filled in, every name resolved, nothing left to decide.
/// Immutable once stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The agent's name.
    pub agent: String,
    /// The conversation the run starts from; well formed, ends with a user message.
    pub input: Vec<Message>,
    /// The system prompt.
    pub instructions: Option<String>,
    /// The model.
    pub model: ModelRef,
    /// Most tokens one answer may have; `None` leaves it to the provider.
    pub max_output_tokens: Option<u32>,
    /// The tools on offer, in the order they are shown to the model.
    pub tools: Vec<ToolName>,
    /// Tools that the caller executes; shown to the model after the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub client_tools: Vec<ToolSpec>,
    /// Those of `tools` whose calls somebody has to approve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approval: Vec<ToolName>,
    /// The bounds.
    pub limits: Limits,
    /// How much of the transcript the model sees.
    pub context: ContextPolicy,
    /// What a repeated call means.
    pub on_repeat: OnRepeat,
    /// The occurrence of one call, counted over the run, that is a repeat; at least 2.
    pub repeat_limit: u32,
    /// Whether read-only calls of one batch may overlap.
    pub parallel_tools: ParallelTools,
    /// A configured workspace; `None` is a fresh, empty one.
    pub workspace: Option<String>,
    /// The caller's own labels.
    pub metadata: BTreeMap<String, String>,
    /// The place in the caller's trace. It stands here, since it has to outlive the queue and the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceContext>,
}

/// How much of the transcript the model sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContextPolicy {
    /// What happens to rounds that do not fit.
    pub strategy: ContextStrategy,
    /// Most tokens of one request: instructions, tool schemas and messages together.
    pub max_tokens: u64,
    /// Most Unicode scalar values of one tool result; longer ones keep head and tail.
    pub max_tool_result_chars: usize,
}

/// What happens to rounds that do not fit the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContextStrategy {
    /// The oldest whole rounds are left out of the request.
    #[default]
    Trim,
}

/// What a repeated call means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRepeat {
    /// The repeat is not executed and the model is told; the next one ends the run.
    #[default]
    Warn,
    /// The first repeat ends the run.
    Stop,
    /// No check.
    Allow,
}

/// What a new run of a thread means for the run of the thread that has not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBusy {
    /// The new run is refused.
    #[default]
    Reject,
    /// The new run begins once the others have ended.
    Queue,
    /// The others are asked to end, and the new run begins once they have.
    Interrupt,
}

/// Whether read-only calls of one batch may overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParallelTools {
    /// Neighbouring read-only calls overlap; everything else runs alone, in order.
    #[default]
    ReadOnly,
    /// One call at a time.
    Never,
}

/// What a run that was at work and is not keeps of its time: it does not count while nobody works on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// When its first worker took it.
    pub started_at: Timestamp,
    /// Milliseconds that are left until its deadline once it goes on.
    pub left_ms: u64,
}

/// A call whose outcome somebody outside has to give or allow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PendingCall {
    /// The call.
    pub call_id: String,
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Arguments,
    /// What is waited for.
    pub kind: PendingKind,
}

/// What a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PendingKind {
    /// The caller executes it and delivers the result.
    Client,
    /// Somebody allows it, changes it or denies it.
    Approval,
    /// It was started, a crash hid what came of it, and somebody says what did.
    UnknownOutcome,
}

/// Where a run stands. A cancel request is a stored instant beside it, since it can arrive in any status.
#[derive(Clone, Debug, PartialEq)]
pub enum RunStatus {
    /// Accepted or resumed, waiting for a free slot.
    Queued {
        /// `None` before it was ever at work.
        paused: Option<Pause>,
    },
    /// In the hands of a worker.
    Running {
        /// When its first worker took it.
        started_at: Timestamp,
        /// When it must have ended.
        deadline_at: Timestamp,
    },
    /// In nobody's hands until somebody outside answers.
    Waiting {
        /// Its time.
        paused: Pause,
        /// When the wait is over, whatever came; the run then ends as `timeout`.
        until: Timestamp,
        /// What is waited for, in the order of the calls; never empty.
        calls: Vec<PendingCall>,
    },
    /// Ended, for good.
    Finished {
        /// When its first worker took it; `None` when it was cancelled in the queue.
        started_at: Option<Timestamp>,
        /// When it must have ended; `None` when it never started.
        deadline_at: Option<Timestamp>,
        /// When it ended.
        finished_at: Timestamp,
        /// How.
        end: End,
    },
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model gave its answer.
    Completed {
        /// The text of the last response; never empty.
        answer: String,
        /// `length` says that the answer was cut by the output limit.
        finish_reason: FinishReason,
    },
    /// Something else ended it first.
    Stopped {
        /// What.
        status: EndStatus,
        /// Text so far, if any.
        partial: Option<String>,
        /// Why, in words.
        error: RunError,
    },
}

/// The terminal statuses other than `completed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndStatus {
    /// `max_steps` responses, and still calling tools.
    StepLimit,
    /// A batch did not fit what was left of `max_tool_calls`.
    ToolLimit,
    /// The next request would not fit what was left of `max_tokens`.
    TokenLimit,
    /// Not even the shortest useful request fits the window.
    ContextLimit,
    /// The model kept repeating itself.
    RepeatLimit,
    /// The run's deadline passed.
    Timeout,
    /// It was cancelled.
    Aborted,
    /// The model side failed, after retries.
    ModelError,
    /// hames or a tool broke.
    InternalError,
}

impl EndStatus {
    /// The published status.
    pub const fn name(self) -> RunStatusName {
        match self {
            Self::StepLimit => RunStatusName::StepLimit,
            Self::ToolLimit => RunStatusName::ToolLimit,
            Self::TokenLimit => RunStatusName::TokenLimit,
            Self::ContextLimit => RunStatusName::ContextLimit,
            Self::RepeatLimit => RunStatusName::RepeatLimit,
            Self::Timeout => RunStatusName::Timeout,
            Self::Aborted => RunStatusName::Aborted,
            Self::ModelError => RunStatusName::ModelError,
            Self::InternalError => RunStatusName::InternalError,
        }
    }
}

impl End {
    /// The published status.
    pub const fn name(&self) -> RunStatusName {
        match self {
            Self::Completed { .. } => RunStatusName::Completed,
            Self::Stopped { status, .. } => status.name(),
        }
    }
}

impl RunStatus {
    /// The published status.
    pub const fn name(&self) -> RunStatusName {
        match self {
            Self::Queued { .. } => RunStatusName::Queued,
            Self::Running { .. } => RunStatusName::Running,
            Self::Waiting { .. } => RunStatusName::Waiting,
            Self::Finished { end, .. } => end.name(),
        }
    }

    /// Whether nothing happens to the run by itself: it has ended, or waits for answers from outside.
    pub const fn is_at_rest(&self) -> bool {
        match self {
            Self::Finished { .. } | Self::Waiting { .. } => true,
            Self::Queued { .. } | Self::Running { .. } => false,
        }
    }

    /// Whether the run has ended.
    pub const fn is_finished(&self) -> bool {
        match self {
            Self::Finished { .. } => true,
            Self::Queued { .. } | Self::Running { .. } | Self::Waiting { .. } => false,
        }
    }
}

/// A run as stored, without its spec and its transcript, which only a worker needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its name.
    pub id: RunId,
    /// Whose it is.
    pub tenant: TenantId,
    /// The fence.
    pub generation: Generation,
    /// Where it stands.
    pub status: RunStatus,
    /// The agent's name.
    pub agent: String,
    /// The model it was accepted with.
    pub model: ModelRef,
    /// The conversation it belongs to.
    pub thread: Option<String>,
    /// The run whose transcript it continues.
    pub continues: Option<RunId>,
    /// The bounds.
    pub limits: Limits,
    /// The caller's own labels.
    pub metadata: BTreeMap<String, String>,
    /// Model responses so far.
    pub steps: u32,
    /// Tool calls so far, refused and failed ones included.
    pub tool_calls: u32,
    /// Tokens so far.
    pub usage: Usage,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When somebody asked to end it.
    pub cancel_requested_at: Option<Timestamp>,
    /// The number of its newest durable event.
    pub last_seq: Seq,
    /// Processes in a row that took it over from one that was gone, and under which it has not got any further.
    pub crashes: u32,
}

/// The published form of a [`Run`].
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Run)]
pub struct RunView {
    /// `run_` and 32 hexadecimal digits.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    pub id: RunId,
    /// `queued`, `running`, or one of the terminal statuses.
    pub status: RunStatusName,
    /// The agent's name.
    pub agent: String,
    /// `provider/model`.
    #[schema(value_type = String, example = "openai/gpt-5")]
    pub model: ModelRef,
    /// The conversation it belongs to.
    pub thread: Option<String>,
    /// The run whose transcript it continues.
    #[schema(value_type = Option<String>)]
    pub previous_run: Option<RunId>,
    /// The final text of a completed run.
    pub answer: Option<String>,
    /// Text so far of a run that stopped early.
    pub partial: Option<String>,
    /// Why a finished run did not complete.
    pub error: Option<RunError>,
    /// Why the model stopped writing the answer; `length` says the output limit cut it.
    pub finish_reason: Option<FinishReason>,
    /// Model responses so far.
    pub steps: u32,
    /// Tool calls so far, refused and failed ones included.
    pub tool_calls: u32,
    /// Tokens so far.
    pub usage: Usage,
    /// The bounds.
    pub limits: Limits,
    /// What a waiting run waits for.
    pub pending: Vec<PendingCall>,
    /// The caller's own labels.
    pub metadata: BTreeMap<String, String>,
    /// When it was accepted.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When a worker took it.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Timestamp>,
    /// When it must have ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub deadline_at: Option<Timestamp>,
    /// When a waiting run ends unless it is answered; its deadline stands still meanwhile.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub waiting_until: Option<Timestamp>,
    /// When somebody asked to end it.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub cancel_requested_at: Option<Timestamp>,
    /// When it ended.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Timestamp>,
}

/// Every published status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RunStatus)]
pub enum RunStatusName {
    /// Accepted, waiting for a free slot.
    Queued,
    /// In the hands of a worker.
    Running,
    /// In nobody's hands until somebody outside answers.
    Waiting,
    /// The model gave its answer.
    Completed,
    /// `max_steps` responses, and still calling tools.
    StepLimit,
    /// A batch did not fit what was left of `max_tool_calls`.
    ToolLimit,
    /// The next request would not fit what was left of `max_tokens`.
    TokenLimit,
    /// Not even the shortest useful request fits the window.
    ContextLimit,
    /// The model kept repeating itself.
    RepeatLimit,
    /// The run's deadline passed.
    Timeout,
    /// It was cancelled.
    Aborted,
    /// The model side failed, after retries.
    ModelError,
    /// hames or a tool broke.
    InternalError,
}

impl RunStatusName {
    /// All of them, active ones first.
    pub const ALL: [Self; 13] = [
        Self::Queued,
        Self::Running,
        Self::Waiting,
        Self::Completed,
        Self::StepLimit,
        Self::ToolLimit,
        Self::TokenLimit,
        Self::ContextLimit,
        Self::RepeatLimit,
        Self::Timeout,
        Self::Aborted,
        Self::ModelError,
        Self::InternalError,
    ];

    /// The published spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Completed => "completed",
            Self::StepLimit => "step_limit",
            Self::ToolLimit => "tool_limit",
            Self::TokenLimit => "token_limit",
            Self::ContextLimit => "context_limit",
            Self::RepeatLimit => "repeat_limit",
            Self::Timeout => "timeout",
            Self::Aborted => "aborted",
            Self::ModelError => "model_error",
            Self::InternalError => "internal_error",
        }
    }
}

impl From<&Run> for RunView {
    fn from(run: &Run) -> Self {
        let (started_at, deadline_at, finished_at) = match &run.status {
            RunStatus::Queued { paused } => (paused.map(|paused| paused.started_at), None, None),
            RunStatus::Running { started_at, deadline_at } => (Some(*started_at), Some(*deadline_at), None),
            RunStatus::Waiting { paused, .. } => (Some(paused.started_at), None, None),
            RunStatus::Finished { started_at, deadline_at, finished_at, .. } => {
                (*started_at, *deadline_at, Some(*finished_at))
            }
        };
        let (waiting_until, pending) = match &run.status {
            RunStatus::Waiting { until, calls, .. } => (Some(*until), calls.clone()),
            RunStatus::Queued { .. } | RunStatus::Running { .. } | RunStatus::Finished { .. } => (None, Vec::new()),
        };
        let (answer, partial, error, finish_reason) = match &run.status {
            RunStatus::Queued { .. } | RunStatus::Running { .. } | RunStatus::Waiting { .. } => {
                (None, None, None, None)
            }
            RunStatus::Finished { end: End::Completed { answer, finish_reason }, .. } => {
                (Some(answer.clone()), None, None, Some(*finish_reason))
            }
            RunStatus::Finished { end: End::Stopped { partial, error, .. }, .. } => {
                (None, partial.clone(), Some(error.clone()), None)
            }
        };
        Self {
            id: run.id,
            status: run.status.name(),
            agent: run.agent.clone(),
            model: run.model.clone(),
            thread: run.thread.clone(),
            previous_run: run.continues,
            answer,
            partial,
            error,
            finish_reason,
            steps: run.steps,
            tool_calls: run.tool_calls,
            usage: run.usage,
            limits: run.limits,
            pending,
            metadata: run.metadata.clone(),
            created_at: run.created_at,
            started_at,
            deadline_at,
            waiting_until,
            cancel_requested_at: run.cancel_requested_at,
            finished_at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_names_are_spelt_as_serialised() {
        for name in RunStatusName::ALL {
            assert_eq!(serde_json::to_value(name).unwrap(), name.as_str());
        }
    }

    #[test]
    fn a_model_reference_splits_at_the_first_slash() {
        let model: ModelRef = "hub/org/model".parse().unwrap();
        assert_eq!((model.provider.as_str(), model.model.as_str()), ("hub", "org/model"));
        for bad in ["", "gpt", "/gpt", "openai/"] {
            assert!(bad.parse::<ModelRef>().is_err(), "{bad}");
        }
    }
}
