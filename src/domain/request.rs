//! What a caller asks for, before any name is resolved or any default filled in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ContextStrategy, OnRepeat, ParallelTools};

/// The body of `POST /runs`. Only `input` is required. A caller narrows what the agent and the server
/// allow and never widens it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// A configured agent; the server's default agent when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// What to work on.
    pub input: RunInput,
    /// Replaces the agent's instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
    /// `provider/model`, among those the agent allows; the agent's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Tools by name or by pattern (`fs.*`), among the agent's; all of the agent's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<String>>,
    /// Bounds, under the server's ceilings.
    #[serde(default)]
    pub limits: LimitsPatch,
    /// How much of the transcript the model sees.
    #[serde(default)]
    pub context: ContextPatch,
    /// What a repeated call means.
    #[serde(default)]
    pub on_repeat: OnRepeat,
    /// Whether read-only calls of one batch may overlap.
    #[serde(default)]
    pub parallel_tools: ParallelTools,
    /// A configured workspace the agent may use; the agent's own when absent, else a fresh, empty one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// Labels of your own: at most 32, keys up to 64 and values up to 512 characters.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// What to work on: a text, or a conversation that ends with a user message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum RunInput {
    /// One user message.
    Text(String),
    /// Earlier messages, and the one to answer.
    Messages(Vec<InputMessage>),
}

impl Default for RunInput {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

/// One message of the conversation so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InputMessage {
    /// Who said it.
    pub role: InputRole,
    /// What was said.
    pub content: TextOrParts,
}

/// Who said a message of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputRole {
    /// The caller's side.
    User,
    /// The model's side.
    Assistant,
}

/// A text, or a list of text parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum TextOrParts {
    /// One text part.
    Text(String),
    /// Several.
    Parts(Vec<TextPart>),
}

/// A part of an input message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum TextPart {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
}

/// Bounds a caller may set; what is absent takes the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsPatch {
    /// Most model responses; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_steps: Option<u32>,
    /// Most tool calls; zero allows none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tool_calls: Option<u32>,
    /// Most tokens over all model calls; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_tokens: Option<u64>,
    /// The whole run, in milliseconds; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub timeout_ms: Option<u64>,
    /// One attempt at one model call, in milliseconds; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub model_timeout_ms: Option<u64>,
    /// One tool call, in milliseconds; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub tool_timeout_ms: Option<u64>,
}

/// Context settings a caller may set; what is absent takes the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ContextPatch {
    /// What happens to rounds that do not fit.
    #[serde(default)]
    pub strategy: ContextStrategy,
    /// Most tokens of one request; the model's window less its reserved output when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub max_tokens: Option<u64>,
    /// Most Unicode scalar values of one tool result; 8000 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tool_result_chars: Option<usize>,
}

/// One thing wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// JSON path from the body's root: `$.limits.max_steps`.
    pub path: String,
    /// What is wrong, what was given, what is allowed.
    pub message: String,
}

impl FieldError {
    /// An error at a path.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }
}
