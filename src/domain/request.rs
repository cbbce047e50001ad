//! What a caller asks for, before any name is resolved or any default filled in.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{ContextStrategy, OnBusy, OnRepeat, ParallelTools, RunId, ToolName};

/// The body of `POST /runs`. Only `input` is required. A caller narrows what the agent and the server
/// allow and never widens it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
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
    /// Tools by name or by pattern (`fs.*`), among the agent's, and tools that the caller executes. All of the agent's
    /// when no name and no pattern is among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<ToolChoice>>,
    /// Names or patterns of tools whose calls somebody has to approve before they run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approval: Vec<String>,
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
    /// The conversation the run belongs to: 1 to 128 characters. It continues the newest run of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub thread: Option<String>,
    /// What happens when another run of the thread, or the previous run, has not ended.
    #[serde(default)]
    pub on_busy: OnBusy,
    /// A run to continue: its transcript comes before the input. Not together with `thread`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "run_019000000000700080000000000000ab")]
    pub previous_run: Option<RunId>,
    /// Labels of your own: at most 32, keys up to 64 and values up to 512 characters.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// A tool for a run.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ToolChoice {
    /// A name or a pattern.
    Named(String),
    /// A tool that the caller executes.
    Client(ClientTool),
}

/// A tool that the caller executes: the run waits, and the caller posts the result to `tool_results`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct ClientTool {
    /// Always `client`.
    #[serde(rename = "type")]
    pub kind: ClientToolKind,
    /// The name the model calls it by.
    pub name: ToolName,
    /// What the model reads of it.
    #[serde(default)]
    pub description: String,
    /// JSON Schema (2020-12) of its arguments, of an object; no arguments when absent.
    #[serde(default = "no_arguments")]
    #[schema(value_type = Object)]
    pub parameters: Value,
}

/// The `type` of a [`ClientTool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientToolKind {
    /// Executed by the caller.
    Client,
}

fn no_arguments() -> Value {
    serde_json::json!({"type": "object", "properties": {}})
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Choice;
        impl<'de> Visitor<'de> for Choice {
            type Value = ToolChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a tool, a pattern, or an object of type `client`")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<ToolChoice, E> {
                Ok(ToolChoice::Named(name.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, fields: A) -> Result<ToolChoice, A::Error> {
                ClientTool::deserialize(serde::de::value::MapAccessDeserializer::new(fields)).map(ToolChoice::Client)
            }
        }
        deserializer.deserialize_any(Choice)
    }
}

/// What to work on: a text, or a conversation that ends with a user message.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
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
#[serde(deny_unknown_fields, expecting = "an object")]
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
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum TextOrParts {
    /// One text part.
    Text(String),
    /// Several.
    Parts(Vec<TextPart>),
}

impl<'de> Deserialize<'de> for RunInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let visitor = TextOrList::new("a text or a list of messages", Self::Text, Self::Messages);
        deserializer.deserialize_any(visitor)
    }
}

impl<'de> Deserialize<'de> for TextOrParts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let visitor = TextOrList::new("a text or a list of parts", Self::Text, Self::Parts);
        deserializer.deserialize_any(visitor)
    }
}

/// Reads a text or a list. Unlike a derived untagged enum it reports an error at the place where it is.
struct TextOrList<T, I> {
    expected: &'static str,
    text: fn(String) -> T,
    list: fn(Vec<I>) -> T,
}

impl<T, I> TextOrList<T, I> {
    fn new(expected: &'static str, text: fn(String) -> T, list: fn(Vec<I>) -> T) -> Self {
        Self { expected, text, list }
    }
}

impl<'de, T, I: Deserialize<'de>> Visitor<'de> for TextOrList<T, I> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        Ok((self.text)(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<T, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(items)).map(self.list)
    }
}

/// A part of an input message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", from = "TextPartForm")]
pub enum TextPart {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
}

/// A text part as it is read: an object, with an error for each field that says where it is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct TextPartForm {
    #[serde(rename = "type")]
    kind: TextPartKind,
    text: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum TextPartKind {
    Text,
}

impl From<TextPartForm> for TextPart {
    fn from(form: TextPartForm) -> Self {
        match form.kind {
            TextPartKind::Text => Self::Text { text: form.text },
        }
    }
}

/// Bounds a caller may set; what is absent takes the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
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
    /// One wait for an answer from outside, in milliseconds; at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub wait_timeout_ms: Option<u64>,
}

/// Context settings a caller may set; what is absent takes the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn input_is_a_text_or_messages_and_reads_itself_back() {
        for value in [
            json!({"input": "hi", "limits": {}, "context": {"strategy": "trim"}, "on_busy": "reject", "on_repeat": "warn",
                   "parallel_tools": "read_only"}),
            json!({"input": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                             {"role": "assistant", "content": "ho"}],
                   "limits": {"max_steps": 1}, "context": {"strategy": "trim", "max_tokens": 5}, "on_busy": "reject", "on_repeat": "stop",
                   "parallel_tools": "never"}),
        ] {
            let request: RunRequest = serde_json::from_value(value.clone()).unwrap();
            assert_eq!(serde_json::to_value(&request).unwrap(), value);
        }
    }

    #[test]
    fn a_wrong_input_is_named_for_what_it_is() {
        for (input, message) in [
            (json!(7), "invalid type: integer `7`, expected a text or a list of messages"),
            (json!([{"role": "user", "content": 7}]), "invalid type: integer `7`, expected a text or a list of parts"),
            (json!([{"role": "robot", "content": ""}]), "unknown variant `robot`, expected `user` or `assistant`"),
            (json!([{"role": "user"}]), "missing field `content`"),
        ] {
            let error = serde_json::from_value::<RunInput>(input).unwrap_err().to_string();
            assert_eq!(error, message);
        }
    }
}
