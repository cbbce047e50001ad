//! Whether a model response can be taken, and which of its calls can run.

use crate::domain::{Effect, FailureClass, Gate, ModelFailure, ModelTurn, OnUnknown, ToolCall};

/// What the machine asks about tools. Pure: the same call always gets the same answer within a run.
pub trait Toolbox {
    /// Checks a call's name and arguments.
    fn check(&self, call: &ToolCall) -> Checked;

    /// What to do about a call that was started when a crash hid its outcome, and that must not be run again.
    fn on_unknown(&self, call: &ToolCall) -> OnUnknown;
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    /// The tool exists, is on offer, and the arguments fit its schema.
    Ready {
        /// What it can change.
        effect: Effect,
        /// Repeating it is how it is used.
        pollable: bool,
        /// What has to come from outside.
        gate: Gate,
    },
    /// It cannot run; the text tells the model why and what would be right.
    Invalid(String),
}

/// Checks the envelope of a response before anything of it is recorded: every id and name is a non-empty string and
/// ids are unique. (That content is text, calls are a list and arguments are present is settled by decoding.)
pub(super) fn check_envelope(turn: &ModelTurn) -> Result<(), ModelFailure> {
    let broken = |message: String| Err(ModelFailure::new(FailureClass::Protocol, message));
    for (index, call) in turn.tool_calls.iter().enumerate() {
        if call.id.is_empty() {
            return broken(format!("tool call {index} of the model's response has no id"));
        }
        if call.name.is_empty() {
            return broken(format!("tool call `{}` of the model's response has no name", call.id));
        }
        if turn.tool_calls.iter().take(index).any(|earlier| earlier.id == call.id) {
            return broken(format!("the model's response has two tool calls with the id `{}`", call.id));
        }
    }
    if turn.tool_calls.is_empty() && turn.text().trim().is_empty() {
        return Err(ModelFailure::new(FailureClass::Empty, "the model's response has neither text nor tool calls"));
    }
    Ok(())
}
