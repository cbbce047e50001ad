//! A model request as the body of a chat completions request.

use serde_json::{Map, Value, json};

use super::{Dialect, LimitField, ReasoningField, UsageRequest, WIRE};
use crate::domain::{Arguments, AssistantMessage, Message, ModelRequest, Part, ToolCall, ToolSpec};
use crate::provider::names::NameMap;

/// Builds the body. Every sequence it sends is one the provider takes: call arguments are JSON objects
/// whatever the model wrote, names fit the provider's pattern, tool schemas are objects.
pub fn encode(request: &ModelRequest, names: &NameMap, dialect: &Dialect) -> Value {
    let system = request.instructions.iter().map(|text| json!({"role": "system", "content": text}));
    let messages = request.messages.iter().map(|message| encode_message(message, names, dialect));
    let mut body = Map::new();
    body.insert("model".into(), request.model.clone().into());
    body.insert("messages".into(), system.chain(messages).collect());
    if !request.tools.is_empty() {
        body.insert("tools".into(), request.tools.iter().map(|tool| encode_tool(tool, names)).collect());
    }
    if let Some(max) = request.max_output_tokens {
        let field = match dialect.limit {
            LimitField::MaxTokens => "max_tokens",
            LimitField::MaxCompletionTokens => "max_completion_tokens",
        };
        body.insert(field.into(), max.into());
    }
    body.insert("stream".into(), true.into());
    match dialect.usage {
        UsageRequest::Asked => body.insert("stream_options".into(), json!({"include_usage": true})),
        UsageRequest::Unmentioned => None,
    };
    Value::Object(body)
}

fn encode_message(message: &Message, names: &NameMap, dialect: &Dialect) -> Value {
    match message {
        Message::User(_) => json!({"role": "user", "content": message.text()}),
        Message::Tool(tool) => json!({"role": "tool", "tool_call_id": tool.call_id, "content": tool.content}),
        Message::Assistant(assistant) => encode_assistant(assistant, names, dialect),
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
