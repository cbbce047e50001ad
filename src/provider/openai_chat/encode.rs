//! A model request as the body of a chat completions request.

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::{Dialect, LimitField, ReasoningField, UsageRequest, WIRE};
use crate::domain::{Arguments, AssistantMessage, Message, ModelRequest, Part, ToolCall, ToolSpec};
use crate::provider::conversation::{Conversation, Encode};
use crate::provider::names::NameMap;

/// More than a body has besides its parts and the model's name, in bytes.
const REST_BYTES: usize = 256;

/// The body of a request.
#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    messages: Vec<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// Builds the body out of the parts of a conversation that is up to this request.
pub fn body(
    request: &ModelRequest,
    conversation: &Conversation,
    dialect: &Dialect,
) -> Result<Vec<u8>, serde_json::Error> {
    let limit = |field: LimitField| request.max_output_tokens.filter(|_| dialect.limit == field);
    let messages: Vec<_> = conversation.instructions().into_iter().chain(conversation.messages()).collect();
    let tools = conversation.tools();
    let bytes: usize = messages.iter().copied().chain(tools).map(|part| part.get().len() + 1).sum();
    let mut out = Vec::with_capacity(bytes + request.model.len() + REST_BYTES);
    let body = Body {
        model: &request.model,
        messages,
        tools,
        max_tokens: limit(LimitField::MaxTokens),
        max_completion_tokens: limit(LimitField::MaxCompletionTokens),
        stream: true,
        stream_options: match dialect.usage {
            UsageRequest::Asked => Some(StreamOptions { include_usage: true }),
            UsageRequest::Unmentioned => None,
        },
    };
    serde_json::to_writer(&mut out, &body)?;
    Ok(out)
}

/// Writes the parts of a request. Every sequence of them is one the provider takes: call arguments are JSON objects
/// whatever the model wrote, names fit the provider's pattern, tool schemas are objects.
pub struct ChatEncoder<'a> {
    /// How tool names are spelt.
    pub names: &'a NameMap,
    /// What the server takes.
    pub dialect: &'a Dialect,
}

impl Encode for ChatEncoder<'_> {
    fn instructions(&self, text: &str) -> Result<Box<RawValue>, serde_json::Error> {
        to_raw_value(&json!({"role": "system", "content": text}))
    }

    fn tools(&self, tools: &[ToolSpec]) -> Result<Box<RawValue>, serde_json::Error> {
        to_raw_value(&tools.iter().map(|tool| encode_tool(tool, self.names)).collect::<Vec<_>>())
    }

    fn message(&self, message: &Message) -> Result<Box<RawValue>, serde_json::Error> {
        to_raw_value(&match message {
            Message::User(_) => json!({"role": "user", "content": message.text()}),
            Message::Tool(tool) => json!({"role": "tool", "tool_call_id": tool.call_id, "content": tool.content}),
            Message::Assistant(assistant) => encode_assistant(assistant, self.names, self.dialect),
        })
    }
}

fn encode_assistant(message: &AssistantMessage, names: &NameMap, dialect: &Dialect) -> Value {
    let text = message.text();
    let mut out = Map::new();
    out.insert("role".into(), "assistant".into());
    // Without text, `null` is what OpenAI itself writes beside calls; alone only a string is taken.
    let content = if text.is_empty() && !message.tool_calls.is_empty() { Value::Null } else { text.into() };
    out.insert("content".into(), content);
    if !message.tool_calls.is_empty() {
        out.insert("tool_calls".into(), message.tool_calls.iter().map(|call| encode_call(call, names)).collect());
    }
    if let Some(field) = dialect.reasoning_field
        && let Some(reasoning) = reasoning(message, field)
    {
        out.insert(field.as_str().into(), reasoning);
    }
    Value::Object(out)
}

fn encode_call(call: &ToolCall, names: &NameMap) -> Value {
    let arguments = match &call.arguments {
        Arguments::Object(_) => call.arguments.canonical(),
        // The provider refuses the whole request when arguments of the past are not an object.
        Arguments::Malformed(_) => "{}".to_owned(),
    };
    json!({"id": call.id, "type": "function", "function": {"name": names.to_wire(&call.name), "arguments": arguments}})
}

/// The reasoning of a message in the form the server wants it back; `None` when there is none.
fn reasoning(message: &AssistantMessage, field: ReasoningField) -> Option<Value> {
    let parts = message.content.iter().filter_map(|part| match part {
        Part::Reasoning { text, token } => Some((text, token)),
        Part::Text { .. } => None,
    });
    match field {
        ReasoningField::ReasoningContent | ReasoningField::Reasoning => {
            let text: String = parts.map(|(text, _)| text.as_str()).collect();
            (!text.is_empty()).then(|| text.into())
        }
        ReasoningField::ReasoningDetails => {
            let details: Vec<Value> = parts
                .filter_map(|(_, token)| token.as_ref())
                .filter(|token| token.wire == WIRE)
                .filter_map(|token| token.data.as_array())
                .flatten()
                .cloned()
                .collect();
            (!details.is_empty()).then(|| details.into())
        }
    }
}

fn encode_tool(tool: &ToolSpec, names: &NameMap) -> Value {
    let mut parameters = tool.parameters.as_object().cloned().unwrap_or_default();
    // An empty schema is refused: the type and the properties have to be written.
    parameters.entry("type").or_insert_with(|| "object".into());
    parameters.entry("properties").or_insert_with(|| json!({}));
    json!({"type": "function", "function": {
        "name": names.to_wire(tool.name.as_str()), "description": tool.description, "parameters": parameters,
    }})
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
