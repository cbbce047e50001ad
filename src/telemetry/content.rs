//! What was said, as attributes of spans: only with `telemetry.capture_content`.
//!
//! The forms are the JSON schemas of the conventions ("Recording content on attributes"). An attribute is a text with
//! JSON, since the attributes of spans have no objects.

use serde_json::{Map, Value, json};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::names::{
    GEN_AI_INPUT_MESSAGES, GEN_AI_OUTPUT_MESSAGES, GEN_AI_SYSTEM_INSTRUCTIONS, GEN_AI_TOOL_CALL_ARGUMENTS,
    GEN_AI_TOOL_CALL_RESULT, GEN_AI_TOOL_DEFINITIONS,
};
use crate::domain::{Arguments, FinishReason, Message, ModelRequest, ModelTurn, Part, RunSpec, ToolCall, ToolOutcome};

pub(super) fn of_agent<'m>(span: &Span, spec: &RunSpec, input: impl Iterator<Item = &'m Message>) {
    set(span, GEN_AI_INPUT_MESSAGES, &messages(input));
    instructions(span, spec.instructions.as_deref());
}

pub(super) fn of_answer(span: &Span, answer: &str, reason: FinishReason) {
    let parts = json!([{"type": "text", "content": answer}]);
    set(
        span,
        GEN_AI_OUTPUT_MESSAGES,
        &json!([{"role": "assistant", "parts": parts, "finish_reason": reason.as_str()}]),
    );
}

pub(super) fn of_request(span: &Span, request: &ModelRequest) {
    set(span, GEN_AI_INPUT_MESSAGES, &messages(request.messages.iter().map(AsRef::as_ref)));
    instructions(span, request.instructions.as_deref());
    let tools: Vec<Value> = request
        .tools
        .iter()
        .map(|tool| {
            json!({"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters})
        })
        .collect();
    if !tools.is_empty() {
        set(span, GEN_AI_TOOL_DEFINITIONS, &Value::Array(tools));
    }
}

pub(super) fn of_turn(span: &Span, turn: &ModelTurn) {
    let parts = said(&turn.content, &turn.tool_calls);
    set(
        span,
        GEN_AI_OUTPUT_MESSAGES,
        &json!([{"role": "assistant", "parts": parts, "finish_reason": turn.finish.as_str()}]),
    );
}

pub(super) fn of_call(span: &Span, arguments: &Map<String, Value>) {
    set(span, GEN_AI_TOOL_CALL_ARGUMENTS, &Value::Object(arguments.clone()));
}

pub(super) fn of_outcome(span: &Span, outcome: &ToolOutcome) {
    set(span, GEN_AI_TOOL_CALL_RESULT, &Value::String(outcome.content.clone()));
}

fn instructions(span: &Span, text: Option<&str>) {
    if let Some(text) = text {
        set(span, GEN_AI_SYSTEM_INSTRUCTIONS, &json!([{"type": "text", "content": text}]));
    }
}

fn messages<'m>(all: impl Iterator<Item = &'m Message>) -> Value {
    all.map(|message| match message {
        Message::User(message) => json!({"role": "user", "parts": parts(&message.content)}),
        Message::Assistant(message) => {
            json!({"role": "assistant", "parts": said(&message.content, &message.tool_calls)})
        }
        Message::Tool(message) => json!({"role": "tool", "parts": [
            {"type": "tool_call_response", "id": message.call_id, "response": message.content}
        ]}),
    })
    .collect()
}

fn said(content: &[Part], calls: &[ToolCall]) -> Vec<Value> {
    let mut all = parts(content);
    all.extend(calls.iter().map(|call| {
        let arguments = match &call.arguments {
            Arguments::Object(arguments) => Value::Object(arguments.clone()),
            Arguments::Malformed(text) => Value::String(text.clone()),
        };
        json!({"type": "tool_call", "id": call.id, "name": call.name, "arguments": arguments})
    }));
    all
}

fn parts(content: &[Part]) -> Vec<Value> {
    content
        .iter()
        .map(|part| match part {
            Part::Text { text } => json!({"type": "text", "content": text}),
            Part::Reasoning { text, .. } => json!({"type": "reasoning", "content": text}),
        })
        .collect()
}

fn set(span: &Span, name: &'static str, value: &Value) {
    span.set_attribute(name, value.to_string());
}
