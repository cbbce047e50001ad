//! Durable events: the numbered log of a run, which is also its transcript.

use bytes::Bytes;
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::run::RunView;
use super::{
    Arguments, Effect, ErrorMark, FailureClass, FinishReason, Message, ModelRef, OutcomeKind, PendingCall, RunId, Seq,
    Timestamp, TokenUsage,
};

/// What happened, without number and time. Serialised once, when it is made; every reader gets the same bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventBody<R = serde_json::Value> {
    /// The run was accepted.
    RunQueued {},
    /// A worker took the run.
    RunStart {
        /// The agent's name.
        agent: String,
        /// The model it uses.
        #[schema(value_type = String)]
        model: ModelRef,
    },
    /// A model call is made.
    ModelStart {
        /// The step it belongs to, from 1.
        step: u32,
        /// The attempt, from 1; a later one replaces all deltas of the one before.
        attempt: u32,
    },
    /// An attempt failed and another one follows.
    ModelRetry {
        /// The step.
        step: u32,
        /// The attempt that follows.
        attempt: u32,
        /// What failed.
        reason: FailureClass,
        /// The failure in words.
        message: String,
        /// Milliseconds until the next attempt.
        delay_ms: u64,
    },
    /// The model responded.
    ModelEnd {
        /// The step.
        step: u32,
        /// The attempt that succeeded.
        attempt: u32,
        /// Milliseconds from this attempt's start.
        duration_ms: u64,
        /// Why the model stopped.
        finish_reason: FinishReason,
        /// Tokens of this call, when the provider said.
        usage: Option<TokenUsage>,
    },
    /// The model call failed for good.
    ModelError {
        /// The step.
        step: u32,
        /// The last attempt.
        attempt: u32,
        /// Milliseconds from this attempt's start.
        duration_ms: u64,
        /// What failed.
        reason: FailureClass,
        /// The failure in words.
        message: String,
    },
    /// A message entered the transcript.
    Message {
        /// The step it belongs to.
        step: u32,
        /// The message.
        message: Message,
    },
    /// A tool call is about to run: this is committed before it does.
    ToolStart {
        /// The step.
        step: u32,
        /// The call.
        call_id: String,
        /// The tool.
        name: String,
        /// Its arguments.
        arguments: Arguments,
        /// What it can change.
        effect: Effect,
    },
    /// A tool call has its outcome; this is its entry in the transcript.
    #[serde(serialize_with = "tool_end")]
    ToolEnd {
        /// The step.
        step: u32,
        /// The call.
        call_id: String,
        /// The tool, as the model named it.
        name: String,
        /// How it ended.
        outcome: OutcomeKind,
        /// Whether the model is told that the call failed.
        #[schema(value_type = bool)]
        is_error: ErrorMark,
        /// What the model reads.
        content: String,
        /// Milliseconds from its start; zero when it never started.
        duration_ms: u64,
    },
    /// Older rounds were left out of the next request.
    ContextTrimmed {
        /// The step.
        step: u32,
        /// Messages of the transcript that the model does not see.
        dropped_messages: usize,
        /// Estimated tokens of the request.
        estimated_tokens: u64,
    },
    /// Four fifths of a limit are used up.
    LimitWarning {
        /// Which.
        limit: LimitKind,
        /// How much of it is used.
        used: u64,
        /// How much there is.
        max: u64,
    },
    /// The run waits for answers from outside.
    Waiting {
        /// What it waits for, in the order of the calls.
        calls: Vec<PendingCall>,
        /// When it ends unless it is answered.
        #[schema(value_type = String, format = DateTime)]
        until: Timestamp,
    },
    /// All that was waited for has come; the run goes on once a worker is free.
    Resumed {},
    /// The process that ran it is gone, and another one goes on from what was committed.
    Recovered {
        /// The attempt at a model call that was cut off, if one was; another one follows.
        abandoned: Option<AbandonedAttempt>,
        /// Calls that had been started, have no recorded outcome, and are run again: doing so changes nothing more.
        rerun: Vec<String>,
        /// Calls that had been started and whose outcome nobody knows; they are not run again.
        unknown: Vec<String>,
    },
    /// Somebody asked to end the run.
    CancelRequested {},
    /// The run ended; nothing follows.
    RunEnd {
        /// The final run.
        #[schema(value_type = RunView)]
        run: R,
        /// Milliseconds from its start; zero when it never started.
        duration_ms: u64,
    },
}

/// Writes the fields of [`EventBody::ToolEnd`].
#[expect(clippy::too_many_arguments, reason = "the fields of the variant, as serde hands them over")]
fn tool_end<S: Serializer>(
    step: &u32,
    call_id: &str,
    name: &str,
    outcome: &OutcomeKind,
    _is_error: &ErrorMark,
    content: &str,
    duration_ms: &u64,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut form = serializer.serialize_struct("ToolEnd", 7)?;
    form.serialize_field("step", step)?;
    form.serialize_field("call_id", call_id)?;
    form.serialize_field("name", name)?;
    form.serialize_field("outcome", outcome)?;
    form.serialize_field("is_error", &outcome.is_error())?;
    form.serialize_field("content", content)?;
    form.serialize_field("duration_ms", duration_ms)?;
    form.end()
}

/// An attempt at a model call of which nothing is known but that it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AbandonedAttempt {
    /// The step.
    pub step: u32,
    /// The attempt, from 1.
    pub attempt: u32,
    /// Tokens it is counted with against `max_tokens`: those of its request, estimated. They are not part of `usage`.
    pub estimated_tokens: u64,
}

/// A limit that can be warned of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// `max_steps`
    MaxSteps,
    /// `max_tool_calls`
    MaxToolCalls,
    /// `max_tokens`
    MaxTokens,
}

/// The type of an event, as stored beside it and as the SSE event name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// See [`EventBody::RunQueued`]; the others likewise.
    RunQueued,
    /// A worker took the run.
    RunStart,
    /// A model call is made.
    ModelStart,
    /// Another attempt follows.
    ModelRetry,
    /// The model responded.
    ModelEnd,
    /// The model call failed for good.
    ModelError,
    /// A message entered the transcript.
    Message,
    /// A tool call starts.
    ToolStart,
    /// A tool call ended.
    ToolEnd,
    /// Older rounds were left out.
    ContextTrimmed,
    /// A limit is nearly used up.
    LimitWarning,
    /// Answers from outside are waited for.
    Waiting,
    /// They have come.
    Resumed,
    /// Another process goes on.
    Recovered,
    /// Somebody asked to end the run.
    CancelRequested,
    /// The run ended.
    RunEnd,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::RunQueued,
        Self::RunStart,
        Self::ModelStart,
        Self::ModelRetry,
        Self::ModelEnd,
        Self::ModelError,
        Self::Message,
        Self::ToolStart,
        Self::ToolEnd,
        Self::ContextTrimmed,
        Self::LimitWarning,
        Self::Waiting,
        Self::Resumed,
        Self::Recovered,
        Self::CancelRequested,
        Self::RunEnd,
    ];

    /// The published spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RunQueued => "run_queued",
            Self::RunStart => "run_start",
            Self::ModelStart => "model_start",
            Self::ModelRetry => "model_retry",
            Self::ModelEnd => "model_end",
            Self::ModelError => "model_error",
            Self::Message => "message",
            Self::ToolStart => "tool_start",
            Self::ToolEnd => "tool_end",
            Self::ContextTrimmed => "context_trimmed",
            Self::LimitWarning => "limit_warning",
            Self::Waiting => "waiting",
            Self::Resumed => "resumed",
            Self::Recovered => "recovered",
            Self::CancelRequested => "cancel_requested",
            Self::RunEnd => "run_end",
        }
    }

    /// Reads the published spelling.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }
}

impl<R> EventBody<R> {
    /// The type.
    pub const fn kind(&self) -> EventKind {
        match self {
            Self::RunQueued {} => EventKind::RunQueued,
            Self::RunStart { .. } => EventKind::RunStart,
            Self::ModelStart { .. } => EventKind::ModelStart,
            Self::ModelRetry { .. } => EventKind::ModelRetry,
            Self::ModelEnd { .. } => EventKind::ModelEnd,
            Self::ModelError { .. } => EventKind::ModelError,
            Self::Message { .. } => EventKind::Message,
            Self::ToolStart { .. } => EventKind::ToolStart,
            Self::ToolEnd { .. } => EventKind::ToolEnd,
            Self::ContextTrimmed { .. } => EventKind::ContextTrimmed,
            Self::LimitWarning { .. } => EventKind::LimitWarning,
            Self::Waiting { .. } => EventKind::Waiting,
            Self::Resumed {} => EventKind::Resumed,
            Self::Recovered { .. } => EventKind::Recovered,
            Self::CancelRequested {} => EventKind::CancelRequested,
            Self::RunEnd { .. } => EventKind::RunEnd,
        }
    }
}

/// An event body in its final bytes, not yet numbered. Numbers are given inside the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedBody {
    /// The type.
    pub kind: EventKind,
    /// A JSON object that starts with `{"type":`.
    pub json: Bytes,
}

impl EncodedBody {
    /// Encodes a body.
    pub fn new<R: Serialize>(body: &EventBody<R>) -> Result<Self, serde_json::Error> {
        Ok(Self { kind: body.kind(), json: serde_json::to_vec(body)?.into() })
    }
}

/// One committed event. The same number always has the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The run.
    pub run: RunId,
    /// Its number, from 1.
    pub seq: Seq,
    /// When it happened; taken just before it was committed.
    pub time: Timestamp,
    /// What happened.
    pub body: EncodedBody,
}

impl Event {
    /// The published JSON: `{"run_id","seq","time","type", …}`.
    pub fn json(&self) -> Bytes {
        let head = format!(r#"{{"run_id":"{}","seq":{},"time":"{}","#, self.run, self.seq, self.time);
        let body = self.body.json.get(1..).unwrap_or_default();
        let mut out = Vec::with_capacity(head.len() + body.len());
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(body);
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_event_has_its_number_and_time_beside_its_body() {
        let body: EventBody = EventBody::ModelStart { step: 1, attempt: 2 };
        let event = Event {
            run: RunId::new(uuid::Uuid::nil()),
            seq: 7,
            time: Timestamp::from_millis(0),
            body: EncodedBody::new(&body).unwrap(),
        };
        assert_eq!(
            serde_json::from_slice::<Value>(&event.json()).unwrap(),
            json!({"run_id": "run_00000000000000000000000000000000", "seq": 7, "time": "1970-01-01T00:00:00.000Z",
                   "type": "model_start", "step": 1, "attempt": 2})
        );
    }

    #[test]
    fn the_end_of_a_call_says_whether_it_failed_and_reads_back_without_that() {
        let body: EventBody = EventBody::ToolEnd {
            step: 1,
            call_id: "c".into(),
            name: "t".into(),
            outcome: OutcomeKind::Aborted,
            is_error: ErrorMark,
            content: "x".into(),
            duration_ms: 2,
        };
        let text = r#"{"type":"tool_end","step":1,"call_id":"c","name":"t","outcome":"aborted","is_error":true,"content":"x","duration_ms":2}"#;
        assert_eq!(EncodedBody::new(&body).unwrap().json, text);
        for text in [text.to_owned(), text.replace("true", "false")] {
            assert_eq!(serde_json::from_str::<EventBody>(&text).unwrap(), body);
        }
    }

    #[test]
    fn kinds_are_spelt_as_serialised() {
        for (body, kind) in [
            (EventBody::<Value>::RunQueued {}, EventKind::RunQueued),
            (EventBody::CancelRequested {}, EventKind::CancelRequested),
            (EventBody::RunEnd { run: json!({}), duration_ms: 0 }, EventKind::RunEnd),
        ] {
            assert_eq!(body.kind(), kind);
            assert_eq!(serde_json::to_value(&body).unwrap()["type"], kind.as_str());
        }
        for kind in EventKind::ALL {
            assert_eq!(EventKind::parse(kind.as_str()), Some(kind));
        }
    }
}
