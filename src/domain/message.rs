//! What is said in a run: user, assistant and tool messages, in order, append-only.

use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{ErrorMark, OutcomeKind};

/// One entry of a transcript.
///
/// A transcript is well formed when every tool call of an assistant message is answered by exactly
/// one tool message before the next assistant message, and no tool message answers anything else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Message {
    /// From the caller.
    User(UserMessage),
    /// From the model.
    Assistant(AssistantMessage),
    /// The outcome of one tool call.
    Tool(ToolMessage),
}

/// What the caller says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UserMessage {
    /// Ordered parts; at least one.
    pub content: Vec<Part>,
}

/// What the model says, and which tools it wants to use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AssistantMessage {
    /// Ordered parts; empty when the model only calls tools.
    pub content: Vec<Part>,
    /// The calls of this message, in the model's order; their ids are unique in the message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The text was cut off (cancel, deadline, failure of the provider): it is not an answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
}

/// The outcome of one tool call, as the model reads it.
#[derive(Clone, Debug, PartialEq, Deserialize, ToSchema)]
pub struct ToolMessage {
    /// The call this answers.
    pub call_id: String,
    /// The tool's name as hames knows it.
    pub name: String,
    /// The text the model reads, already cut to `max_tool_result_chars`.
    pub content: String,
    /// How the call ended.
    pub outcome: OutcomeKind,
    /// Whether the model is told that the call failed; follows from `outcome`.
    #[schema(value_type = bool)]
    pub is_error: ErrorMark,
}

impl Serialize for ToolMessage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { call_id, name, content, outcome, is_error: ErrorMark } = self;
        let mut form = serializer.serialize_struct("ToolMessage", 5)?;
        form.serialize_field("call_id", call_id)?;
        form.serialize_field("name", name)?;
        form.serialize_field("content", content)?;
        form.serialize_field("outcome", outcome)?;
        form.serialize_field("is_error", &outcome.is_error())?;
        form.end()
    }
}

/// A piece of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Plain text.
    Text {
        /// The text; any Unicode.
        text: String,
    },
    /// The model's reasoning.
    Reasoning {
        /// Readable reasoning; may be empty when the provider shows only a token.
        text: String,
        /// What the provider wants back unchanged with this part, if anything.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<ReasoningToken>,
    },
}

/// Opaque data a provider attaches to its reasoning. It is returned to the same wire byte for byte and
/// never shown to another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReasoningToken {
    /// The wire that made it: `openai_chat`, …
    pub wire: String,
    /// Its content, in that wire's own form.
    pub data: Value,
}

/// One call the model asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolCall {
    /// Unique in its message; given by the provider, made by us where the provider gives none.
    pub id: String,
    /// The name the model used, mapped back from the wire's spelling.
    pub name: String,
    /// The arguments.
    pub arguments: Arguments,
}

/// The arguments of a call as the model wrote them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Arguments {
    /// A JSON object, the only form a tool can be called with.
    Object(Map<String, Value>),
    /// Anything else, raw: cut-off JSON, a bare string, a list. Never executed, never repaired.
    Malformed(String),
}

impl Message {
    /// The visible text, its text parts joined; reasoning is left out.
    pub fn text(&self) -> String {
        match self {
            Self::User(message) => joined_text(&message.content),
            Self::Assistant(message) => message.text(),
            Self::Tool(message) => message.content.clone(),
        }
    }

    /// A user message of one text part.
    pub fn user(text: impl Into<String>) -> Self {
        Self::User(UserMessage { content: vec![Part::Text { text: text.into() }] })
    }
}

impl AssistantMessage {
    /// The visible text, its text parts joined; reasoning is left out.
    pub fn text(&self) -> String {
        joined_text(&self.content)
    }
}

fn joined_text(parts: &[Part]) -> String {
    parts
        .iter()
        .filter_map(|part| match part {
            Part::Text { text } => Some(text.as_str()),
            Part::Reasoning { .. } => None,
        })
        .collect()
}

/// Deepest nesting of arguments. The JSON reader stops at 128 levels, and what is accepted must also read back
/// from inside the message, the event and the state it is stored in.
const MAX_ARGUMENT_DEPTH: usize = 100;

impl Arguments {
    /// Reads what a provider sent as arguments. Empty or white space means no arguments (`{}`);
    /// raw control characters inside strings are accepted, since models emit them; everything else
    /// that is not a JSON object of at most 100 levels is kept as [`Arguments::Malformed`].
    pub fn parse(raw: &str) -> Self {
        if raw.trim().is_empty() {
            return Self::Object(Map::new());
        }
        let parsed = serde_json::from_str(raw).or_else(|_| serde_json::from_str(&escape_control_characters(raw)));
        match parsed {
            Ok(Value::Object(object))
                if !object.values().any(|value| is_deeper_than(value, MAX_ARGUMENT_DEPTH - 1)) =>
            {
                Self::Object(object)
            }
            Ok(_) | Err(_) => Self::Malformed(raw.to_owned()),
        }
    }

    /// One text for all spellings of the same arguments: keys sorted at every level, no white space.
    /// Malformed arguments are their own raw text.
    pub fn canonical(&self) -> String {
        match self {
            Self::Object(object) => {
                let mut out = String::new();
                write_canonical_object(object, &mut out);
                out
            }
            Self::Malformed(raw) => raw.clone(),
        }
    }
}

/// Escapes control characters that stand raw inside JSON string literals and changes nothing else.
fn escape_control_characters(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len() + 16);
    let (mut in_string, mut escaped) = (false, false);
    for c in raw.chars() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            c if in_string && c < '\u{20}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
                continue;
            }
            _ => {}
        }
        out.push(c);
    }
    out
}

/// Whether a value has more than `levels` levels of lists and objects.
fn is_deeper_than(value: &Value, levels: usize) -> bool {
    let mut inner: Box<dyn Iterator<Item = &Value>> = match value {
        Value::Object(object) => Box::new(object.values()),
        Value::Array(items) => Box::new(items.iter()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => return false,
    };
    levels == 0 || inner.any(|value| is_deeper_than(value, levels - 1))
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(object) => write_canonical_object(object, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string());
        }
    }
}

fn write_canonical_object(object: &Map<String, Value>, out: &mut String) {
    // serde_json's map is sorted or insertion-ordered depending on a feature any dependency can turn on.
    let mut entries: Vec<_> = object.iter().collect();
    entries.sort_by_key(|(key, _)| key.as_str());
    out.push('{');
    for (index, (key, value)) in entries.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&Value::from(key.as_str()).to_string());
        out.push(':');
        write_canonical(value, out);
    }
    out.push('}');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Arguments {
        match value {
            Value::Object(map) => Arguments::Object(map),
            other => panic!("{other} is not an object"),
        }
    }

    #[test]
    fn arguments_are_an_object_or_kept_raw() {
        for (raw, expected) in [
            ("", object(json!({}))),
            (" \n", object(json!({}))),
            (r#"{"a":1}"#, object(json!({"a": 1}))),
            (r#"{"content":"if(a){b}{c}"}"#, object(json!({"content": "if(a){b}{c}"}))),
            ("{\"c\":\"line1\nline2\\n\t\"}", object(json!({"c": "line1\nline2\n\t"}))),
            ("\"Oslo\"", Arguments::Malformed("\"Oslo\"".into())),
            ("[1]", Arguments::Malformed("[1]".into())),
            ("null", Arguments::Malformed("null".into())),
            (r#"{"path":"a.txt","content":"li"#, Arguments::Malformed(r#"{"path":"a.txt","content":"li"#.into())),
            (r#"{"a":1}{"b":2}"#, Arguments::Malformed(r#"{"a":1}{"b":2}"#.into())),
        ] {
            assert_eq!(Arguments::parse(raw), expected, "{raw}");
        }
    }

    #[test]
    fn nesting_beyond_the_parsers_depth_is_malformed_and_not_a_crash() {
        let raw = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(Arguments::parse(&raw), Arguments::Malformed(raw));
    }

    #[test]
    fn nesting_beyond_what_reads_back_is_malformed() {
        for (depth, accepted) in [(2, true), (100, true), (101, false), (127, false)] {
            let objects = format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
            let lists = format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
            for raw in [objects, lists] {
                assert_eq!(matches!(Arguments::parse(&raw), Arguments::Object(_)), accepted, "{raw}");
            }
        }
    }

    #[test]
    fn canonical_form_ignores_key_order_and_white_space() {
        let one = Arguments::parse(r#"{"b": [1, {"z":1,"y":"q\"" }], "a": null}"#);
        let two = Arguments::parse(r#"{"a":null,"b":[1,{"y":"q\"","z":1}]}"#);
        assert_eq!(one.canonical(), two.canonical());
        assert_eq!(one.canonical(), r#"{"a":null,"b":[1,{"y":"q\"","z":1}]}"#);
    }

    #[test]
    fn messages_have_the_published_form() {
        let message = Message::Assistant(AssistantMessage {
            content: vec![Part::Text { text: "hi".into() }],
            tool_calls: vec![ToolCall { id: "c1".into(), name: "t".into(), arguments: Arguments::parse("{}") }],
            incomplete: false,
        });
        let value = serde_json::to_value(&message).unwrap();
        assert_eq!(
            value,
            json!({"role": "assistant", "content": [{"type": "text", "text": "hi"}],
                   "tool_calls": [{"id": "c1", "name": "t", "arguments": {}}]})
        );
        assert_eq!(serde_json::from_value::<Message>(value).unwrap(), message);
    }

    #[test]
    fn whether_a_result_is_an_error_follows_from_its_outcome() {
        for (outcome, is_error) in [(OutcomeKind::Result, false), (OutcomeKind::TimedOut, true)] {
            let message = Message::Tool(ToolMessage {
                call_id: "c1".into(),
                name: "t".into(),
                content: "x".into(),
                outcome,
                is_error: ErrorMark,
            });
            let text = serde_json::to_string(&message).unwrap();
            let outcome = json!(outcome);
            let expected = format!(
                r#"{{"role":"tool","call_id":"c1","name":"t","content":"x","outcome":{outcome},"is_error":{is_error}}}"#
            );
            assert_eq!(text, expected);
            let wrong = text.replace(&format!("\"is_error\":{is_error}"), &format!("\"is_error\":{}", !is_error));
            assert_ne!(wrong, text);
            for read in [text, wrong] {
                assert_eq!(serde_json::from_str::<Message>(&read).unwrap(), message);
            }
        }
    }
}
