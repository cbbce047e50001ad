//! Tests of the request body.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::domain::{OutcomeKind, ReasoningToken, RunId, ToolMessage};

const USUAL: Dialect = Dialect { reasoning_field: None, usage: UsageRequest::Asked, limit: LimitField::MaxTokens };

fn request(messages: Vec<Message>, tools: Vec<ToolSpec>) -> ModelRequest {
    ModelRequest {
        run: RunId::new(Uuid::nil()),
        step: 2,
        attempt: 1,
        model: "m".into(),
        instructions: None,
        messages: messages.into_iter().map(Arc::new).collect(),
        tools: tools.into(),
        max_output_tokens: None,
        trace: None,
    }
}

fn body(request: &ModelRequest, dialect: Dialect) -> Value {
    let names = NameMap::new(request.tools.iter().map(|tool| tool.name.as_str()));
    let mut conversation = Conversation::default();
    conversation.bring_up_to(request, 0, &ChatEncoder { names: &names, dialect: &dialect }).unwrap();
    serde_json::from_slice(&super::body(request, &conversation, &dialect).unwrap()).unwrap()
}

fn assistant(content: Vec<Part>, calls: &[(&str, &str)]) -> Message {
    let tool_calls = calls.iter().enumerate().map(|(number, (name, arguments))| ToolCall {
        id: format!("c{number}"),
        name: (*name).into(),
        arguments: Arguments::parse(arguments),
    });
    Message::Assistant(AssistantMessage { content, tool_calls: tool_calls.collect(), incomplete: false })
}

fn text(text: &str) -> Part {
    Part::Text { text: text.into() }
}

#[test]
fn a_whole_request() {
    let tool = ToolSpec {
        name: "fs.read".parse().unwrap(),
        description: "reads".into(),
        parameters: json!({"type": "object", "properties": {"p": {}}, "required": ["p"]}),
    };
    let answer = ToolMessage {
        call_id: "c0".into(),
        name: "fs.read".into(),
        content: "alpha".into(),
        outcome: OutcomeKind::Result,
        is_error: crate::domain::ErrorMark,
    };
    let mut request = request(
        vec![
            Message::user("hi"),
            assistant(vec![text("look")], &[("fs.read", "{\"p\":\"a\\n\"}")]),
            Message::Tool(answer),
        ],
        vec![tool],
    );
    request.instructions = Some("be brief".into());
    request.max_output_tokens = Some(64);
    let name = NameMap::new(["fs.read"]).to_wire("fs.read");
    assert_eq!(
        body(&request, USUAL),
        json!({
            "model": "m", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 64,
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "look",
                 "tool_calls": [{"id": "c0", "type": "function", "function": {"name": name, "arguments": "{\"p\":\"a\\n\"}"}}]},
                {"role": "tool", "tool_call_id": "c0", "content": "alpha"},
            ],
            "tools": [{"type": "function", "function": {"name": name, "description": "reads",
                "parameters": {"type": "object", "properties": {"p": {}}, "required": ["p"]}}}],
        })
    );
    let plain = Dialect { usage: UsageRequest::Unmentioned, limit: LimitField::MaxCompletionTokens, ..USUAL };
    let body = body(&request, plain);
    assert_eq!(
        (body.get("stream_options"), body.get("max_tokens"), &body["max_completion_tokens"]),
        (None, None, &json!(64))
    );
}

#[test]
fn schemas_are_objects_with_properties() {
    for (parameters, expected) in [
        (json!({}), json!({"type": "object", "properties": {}})),
        (json!({"type": "object"}), json!({"type": "object", "properties": {}})),
        (json!({"properties": {"a": {}}}), json!({"type": "object", "properties": {"a": {}}})),
    ] {
        let tool = ToolSpec { name: "t".parse().unwrap(), description: String::new(), parameters };
        assert_eq!(body(&request(vec![], vec![tool]), USUAL)["tools"][0]["function"]["parameters"], expected);
    }
}

#[test]
fn replayed_calls_are_always_valid() {
    let messages = vec![assistant(
        vec![],
        &[("t", "{\"cut\":\"of"), ("t", "\"Oslo\""), ("t", ""), ("not a name!", "{\"b\":1,\"a\":2}")],
    )];
    let body = body(&request(messages, vec![]), USUAL);
    assert_eq!(body["messages"][0]["content"], Value::Null);
    let sent: Vec<_> = body["messages"][0]["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| call["function"]["arguments"].clone())
        .collect();
    assert_eq!(sent, ["{}", "{}", "{}", "{\"a\":2,\"b\":1}"]);
    assert_eq!(body["messages"][0]["tool_calls"][3]["function"]["name"], NameMap::default().to_wire("not a name!"));
    assert_eq!(body.get("tools"), None);
}

#[test]
fn an_assistant_message_without_anything_has_empty_content() {
    assert_eq!(
        body(&request(vec![assistant(vec![], &[])], vec![]), USUAL)["messages"][0],
        json!({"role": "assistant", "content": ""})
    );
}

#[test]
fn reasoning_goes_back_only_where_it_is_wanted() {
    let token = |wire: &str, data: Value| Some(ReasoningToken { wire: wire.into(), data });
    let content = vec![
        Part::Reasoning { text: "one ".into(), token: token("other", json!(["x"])) },
        Part::Reasoning { text: "two".into(), token: token(WIRE, json!([{"type": "reasoning.text", "text": "two"}])) },
        text("hi"),
    ];
    let request = request(vec![assistant(content, &[("t", "{}")])], vec![]);
    let message = |reasoning_field| {
        let message = body(&request, Dialect { reasoning_field, ..USUAL })["messages"][0].clone();
        assert_eq!(message["content"], "hi");
        ReasoningField::ALL.map(|field| message.get(field.as_str()).cloned().unwrap_or_default())
    };
    assert_eq!(message(None), [json!(null), json!(null), json!(null)]);
    assert_eq!(message(Some(ReasoningField::ReasoningContent)), [json!("one two"), json!(null), json!(null)]);
    assert_eq!(message(Some(ReasoningField::Reasoning)), [json!(null), json!("one two"), json!(null)]);
    let details = json!([{"type": "reasoning.text", "text": "two"}]);
    assert_eq!(message(Some(ReasoningField::ReasoningDetails)), [json!(null), json!(null), details]);
}
