//! Chat completion chunks, and whole answers, as fragments.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::WIRE;
use crate::domain::{FinishReason, ReasoningToken, TokenUsage};
use crate::provider::accumulator::{ArgumentPiece, CallFragment, Fragment};
use crate::provider::client::{Decoded, Decoder, StreamError};
use crate::provider::error::ProviderError;
use crate::provider::json::{self, Fields, Piece};
use crate::provider::sse::Event;

/// Most entries of `reasoning_details` that a response numbers. Each stands for a block of reasoning.
const MAX_NUMBERED_DETAILS: usize = 1_024;

/// The state of one response.
#[derive(Debug, Default)]
pub struct ChatDecoder {
    details: Details,
    /// What the model says in place of an answer when it declines.
    refusal: String,
}

impl Decoder for ChatDecoder {
    fn event(&mut self, event: &Event, out: &mut Vec<Fragment>) -> Result<Decoded, StreamError> {
        let data = event.data.trim();
        if data == "[DONE]" {
            return Ok(Decoded::Done);
        }
        if data.is_empty() || data == "null" {
            return Ok(Decoded::More);
        }
        let Some(fields) = Fields::parse(data) else {
            if matches!(event.name.as_str(), "ping" | "heartbeat" | "keepalive" | "keep-alive") {
                return Ok(Decoded::More);
            }
            return Err(match json::document(data).and_then(json::value) {
                Some(value) if event.name == "error" => StreamError::Provider(ProviderError::read(&value)),
                _ => StreamError::Unreadable(data.to_owned()),
            });
        };
        let read = self.chunk(&fields, "delta", out);
        if event.name == "error" || is_error(&fields) {
            return Err(StreamError::Provider(read_error(data)));
        }
        read.map(|()| Decoded::More)
    }

    fn stray(&mut self, line: &str) -> Result<(), StreamError> {
        // Gateways write errors as a field of their own, or as a bare line of JSON.
        if let Some(text) = line.strip_prefix("error:") {
            let text = text.trim();
            let value = json::document(text).and_then(json::value);
            let error = value.map_or_else(
                || ProviderError::text(text),
                |value| ProviderError::find(&value).unwrap_or_else(|| ProviderError::read(&value)),
            );
            return Err(StreamError::Provider(error));
        }
        match Fields::parse(line) {
            Some(fields) if is_error(&fields) => Err(StreamError::Provider(read_error(line))),
            Some(_) | None => Ok(()),
        }
    }

    fn whole(&mut self, body: &str, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        let fields = Fields::parse(body).ok_or_else(|| StreamError::Unreadable(body.to_owned()))?;
        if is_error(&fields) {
            return Err(StreamError::Provider(read_error(body)));
        }
        if fields.items("choices").is_empty() {
            return Err(StreamError::Unreadable(body.to_owned()));
        }
        self.chunk(&fields, "message", out)
    }

    fn kept(&self) -> usize {
        self.details.bytes + self.refusal.len()
    }

    fn token(&mut self) -> Option<ReasoningToken> {
        let details = std::mem::take(&mut self.details.entries);
        (!details.is_empty()).then(|| ReasoningToken { wire: WIRE.to_owned(), data: details.into() })
    }

    fn refusal(&self) -> Option<&str> {
        (!self.refusal.is_empty()).then_some(self.refusal.as_str())
    }
}

impl ChatDecoder {
    fn chunk(&mut self, fields: &Fields<'_>, part: &str, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        if let Some(usage) = fields.object("usage")
            && let Some(usage) = read_usage(&usage)?
        {
            out.push(Fragment::Usage(usage));
        }
        for choice in fields.items("choices").into_iter().filter_map(Fields::of) {
            // One answer was asked for; a choice without a number is that one.
            if choice.index("index").unwrap_or(0) != 0 {
                continue;
            }
            // Some servers stream whole messages, some answer whole with a delta.
            if let Some(delta) =
                choice.object(part).or_else(|| choice.object("delta")).or_else(|| choice.object("message"))
            {
                self.delta(&delta, out)?;
            }
            match choice.string("finish_reason").as_deref() {
                // Some servers write an empty string where `null` belongs.
                None | Some("") => {}
                Some(reason @ ("error" | "insufficient_system_resource")) => {
                    let message = format!("the response ended with finish reason `{reason}`");
                    return Err(StreamError::Provider(ProviderError::text(&message)));
                }
                Some(reason) => out.push(Fragment::Finish(finish_reason(reason))),
            }
        }
        Ok(())
    }

    fn delta(&mut self, delta: &Fields<'_>, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        self.reasoning(delta, out)?;
        if let Some(content) = delta.get("content") {
            match json::piece(content) {
                Some(text) if text.is_empty() => {}
                Some(text) => out.push(Fragment::Text(text)),
                None => content_parts(list_or_null("content", content)?, out),
            }
        }
        if let Some(refusal) = delta.string("refusal") {
            self.refusal.push_str(&refusal);
        }
        if let Some(calls) = delta.get("tool_calls") {
            list_or_null("tool_calls", calls)?;
        }
        let calls: Vec<_> =
            delta.items("tool_calls").into_iter().filter_map(Fields::of).map(|c| read_call(&c)).collect();
        if !calls.is_empty() {
            out.push(Fragment::Calls(calls));
        }
        Ok(())
    }

    /// Reads reasoning from the first field that has any: gateways repeat the same text in several.
    fn reasoning(&mut self, delta: &Fields<'_>, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        let details: Vec<Value> = delta.items("reasoning_details").into_iter().filter_map(json::value).collect();
        let text = ["reasoning_content", "reasoning"]
            .into_iter()
            .filter_map(|name| delta.piece(name))
            .find(|piece| !piece.is_empty());
        match text {
            Some(text) => out.push(Fragment::Reasoning(text)),
            None => {
                let texts =
                    details.iter().filter_map(|entry| entry.get("text").or_else(|| entry.get("summary"))?.as_str());
                let text: String = texts.collect();
                if !text.is_empty() {
                    out.push(Fragment::Reasoning(Piece::from(text.as_str())));
                }
            }
        }
        details.into_iter().try_for_each(|detail| self.details.merge(detail))
    }
}

/// A field of the envelope that is a list or nothing; anything else is no response.
fn list_or_null<'a>(name: &str, value: &'a RawValue) -> Result<&'a RawValue, StreamError> {
    match value.get().as_bytes().first() {
        Some(b'[' | b'n') => Ok(value),
        Some(_) | None => Err(StreamError::Unreadable(format!("`{name}` is neither a list nor null: {}", value.get()))),
    }
}

/// Mistral's form of content: a list of parts, some of them reasoning.
fn content_parts(content: &RawValue, out: &mut Vec<Fragment>) {
    for part in json::items(content).into_iter().filter_map(Fields::of) {
        if let Some(text) = part.piece("text") {
            out.push(Fragment::Text(text));
        } else if let Some(thinking) = part.get("thinking") {
            match json::piece(thinking) {
                Some(text) => out.push(Fragment::Reasoning(text)),
                None => out.extend(
                    json::items(thinking)
                        .into_iter()
                        .filter_map(|part| Fields::of(part)?.piece("text"))
                        .map(Fragment::Reasoning),
                ),
            }
        }
    }
}

fn read_call(entry: &Fields<'_>) -> CallFragment {
    let function = entry.object("function");
    let function = function.as_ref();
    let arguments = match function.and_then(|function| function.get("arguments")) {
        None => ArgumentPiece::None,
        Some(raw) => match json::piece(raw) {
            Some(piece) => ArgumentPiece::Text(piece),
            None => ArgumentPiece::Value(raw.get().to_owned()),
        },
    };
    CallFragment {
        index: entry.index("index"),
        id: entry.string("id"),
        name: function.and_then(|function| function.string("name")),
        arguments,
    }
}

/// Entries of `reasoning_details`, merged.
#[derive(Debug, Default)]
struct Details {
    entries: Vec<Value>,
    /// Where the entries with an index stand: a fragment is compared with each of them.
    numbered: Vec<usize>,
    /// About what came takes in memory.
    bytes: usize,
}

impl Details {
    /// Merges a fragment into the entry of the same type and index: texts grow, the rest (signature, format, id) is
    /// taken over. One without an index is an entry of its own.
    fn merge(&mut self, fragment: Value) -> Result<(), StreamError> {
        self.bytes = self.bytes.saturating_add(weight(&fragment));
        let Value::Object(fragment) = fragment else { return Ok(()) };
        if fragment.contains_key("index") {
            let same = |entry: &Value| {
                let equal_or_absent = |name: &str| match (entry.get(name), fragment.get(name)) {
                    (Some(a), Some(b)) => a == b,
                    (None, _) | (_, None) => true,
                };
                entry.get("index") == fragment.get("index") && equal_or_absent("type")
            };
            let place = self.numbered.iter().find(|place| self.entries.get(**place).is_some_and(same));
            if let Some(Value::Object(entry)) = place.and_then(|place| self.entries.get_mut(*place)) {
                merge_fields(entry, fragment);
                return Ok(());
            }
            if self.numbered.len() == MAX_NUMBERED_DETAILS {
                return Err(StreamError::TooMany("1024 numbered reasoning details"));
            }
            self.numbered.push(self.entries.len());
        }
        self.entries.push(Value::Object(fragment));
        Ok(())
    }
}

/// About what a value takes in memory. An object of one field takes as much as one of eleven.
fn weight(value: &Value) -> usize {
    const VALUE: usize = size_of::<Value>();
    const NODE: usize = 11 * (size_of::<String>() + VALUE);
    VALUE
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(weight).sum(),
            Value::Object(fields) => {
                let nodes = fields.len().div_ceil(11) * NODE;
                nodes + fields.iter().map(|(name, value)| name.len() + weight(value)).sum::<usize>()
            }
        }
}

fn merge_fields(entry: &mut Map<String, Value>, fragment: Map<String, Value>) {
    for (name, value) in fragment {
        match (name.as_str(), entry.get_mut(&name), value) {
            (_, _, Value::Null) => {}
            ("text" | "summary" | "data", Some(Value::String(text)), Value::String(more)) => {
                if name != "data" || *text != more {
                    text.push_str(&more);
                }
            }
            (_, _, value) => {
                entry.insert(name, value);
            }
        }
    }
}

fn read_usage(usage: &Fields<'_>) -> Result<Option<TokenUsage>, StreamError> {
    let count = |fields: &Fields<'_>, name: &str| {
        fields.value(name).map(|value| TokenUsage::count(name, &value)).transpose().map_err(StreamError::Usage)
    };
    let detail = |fields: &str, name: &str| match usage.object(fields) {
        Some(details) => Ok(count(&details, name)?.unwrap_or(0)),
        None => Ok(0),
    };
    let (input, output) = (count(usage, "prompt_tokens")?, count(usage, "completion_tokens")?);
    if input.is_none() && output.is_none() {
        return Ok(None);
    }
    Ok(Some(TokenUsage {
        input_tokens: input.unwrap_or(0),
        output_tokens: output.unwrap_or(0),
        cached_input_tokens: detail("prompt_tokens_details", "cached_tokens")?,
        reasoning_tokens: detail("completion_tokens_details", "reasoning_tokens")?,
    }))
}

fn finish_reason(reason: &str) -> FinishReason {
    match reason {
        "stop" | "end_turn" | "stop_sequence" | "eos" | "eos_token" => FinishReason::Stop,
        "tool_calls" | "function_call" | "tool_use" => FinishReason::ToolCalls,
        "length" | "max_tokens" | "model_length" => FinishReason::Length,
        "content_filter" => FinishReason::ContentFilter,
        _ => FinishReason::Unspecified,
    }
}

/// Whether a chunk or body is an error: it has one, it is called one, or it is a message in place of choices.
fn is_error(fields: &Fields<'_>) -> bool {
    let named = |name: &str| fields.string(name).as_deref() == Some("error");
    let is_set = |raw: &RawValue| !matches!(raw.get(), "false" | "\"\"" | "{}" | "[]");
    fields.get("error").is_some_and(is_set)
        || named("object")
        || named("type")
        || (fields.get("choices").is_none() && (fields.get("message").is_some() || fields.get("detail").is_some()))
}

fn read_error(text: &str) -> ProviderError {
    let value = json::document(text).and_then(json::value);
    value.as_ref().and_then(ProviderError::find).unwrap_or_else(|| ProviderError::text(text))
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
