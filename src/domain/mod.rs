//! The nouns of the service: plain data with its invariants. No IO, no async, no clock.
//!
//! Every other module speaks in these types; this one imports none of ours.

mod budget;
mod event;
mod failure;
mod id;
mod inbox;
mod message;
mod outside;
mod request;
mod run;
pub mod text;
mod timestamp;
mod tool;
mod trace;
mod turn;

pub use budget::{InvalidUsage, Limits, TokenUsage, Usage};
pub use event::{AbandonedAttempt, EncodedBody, Event, EventBody, EventKind, LimitKind};
pub use failure::{FailureClass, ModelFailure, RunError};
pub use id::{Generation, InvalidRunId, RunId, Seq, TenantId};
pub use inbox::{InboxItem, InboxNumber};
pub use message::{Arguments, AssistantMessage, Message, Part, ReasoningToken, ToolCall, ToolMessage, UserMessage};
pub use outside::{Approval, Approvals, CallResult, Decision, RunPatch, SteeringMessage, ToolResults};
pub use request::{
    ClientTool, ClientToolKind, ContextPatch, FieldError, InputMessage, InputRole, LimitsPatch, RunInput, RunRequest,
    TextOrParts, TextPart, ToolChoice,
};
pub use run::{
    ContextPolicy, ContextStrategy, End, EndStatus, ModelRef, OnBusy, OnRepeat, ParallelTools, Pause, PendingCall,
    PendingKind, Run, RunSpec, RunStatus, RunStatusName, RunView,
};
pub use timestamp::{InvalidTimestamp, Timestamp};
pub use tool::{Effect, ErrorMark, Gate, InvalidToolName, OnUnknown, OutcomeKind, ToolName, ToolOutcome, ToolSpec};
pub use trace::{InvalidTraceparent, TRACEPARENT, TRACESTATE, TraceContext};
pub use turn::{Delta, FinishReason, ModelRequest, ModelTurn};
