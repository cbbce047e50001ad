//! Chat completion chunks, and whole answers, as fragments.

use std::borrow::Cow;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::WIRE;
use super::form::{Call, Choice, Chunk, ContentPart, Delta, Usage};
use crate::domain::{FinishReason, ReasoningToken, TokenUsage};
use crate::provider::accumulator::{ArgumentPiece, CallFragment, Fragment};
use crate::provider::client::{Decoded, Decoder, StreamError};
use crate::provider::error::ProviderError;
use crate::provider::json::{self, Piece};
use crate::provider::object::{self, List};
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
        let Some(chunk) = object::parse::<Chunk<'_>>(data) else {
            if matches!(event.name.as_str(), "ping" | "heartbeat" | "keepalive" | "keep-alive") {
                return Ok(Decoded::More);
            }
            return Err(match json::document(data).and_then(json::value) {
                Some(value) if event.name == "error" => StreamError::Provider(ProviderError::read(&value)),
                _ => StreamError::Unreadable(data.to_owned()),
            });
        };
        let is_error = event.name == "error" || chunk.is_error();
        // What it holds besides its error counts.
        let read = self.chunk(chunk, Choice::delta, out);
        if is_error {
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
        match object::parse::<Chunk<'_>>(line) {
            Some(chunk) if chunk.is_error() => Err(StreamError::Provider(read_error(line))),
            Some(_) | None => Ok(()),
        }
    }

    fn whole(&mut self, body: &str, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        let chunk: Chunk<'_> = object::parse(body).ok_or_else(|| StreamError::Unreadable(body.to_owned()))?;
        if chunk.is_error() {
            return Err(StreamError::Provider(read_error(body)));
        }
        match chunk.choices {
            List::Items(Some(_), _) => self.chunk(chunk, Choice::message, out),
            List::Items(None, _) | List::Absent | List::Other(_) => Err(StreamError::Unreadable(body.to_owned())),
        }
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
    /// Reads what `part` finds in each choice.
    fn chunk<'a>(
        &mut self,
        chunk: Chunk<'a>,
        part: fn(&mut Choice<'a>) -> Option<Delta<'a>>,
        out: &mut Vec<Fragment>,
    ) -> Result<(), StreamError> {
        if let Some(usage) = chunk.usage.0
            && let Some(usage) = read_usage(&usage)?
        {
            out.push(Fragment::Usage(usage));
        }
        for mut choice in chunk.choices.into_items() {
            // One answer was asked for; a choice without a number is that one.
            if choice.index.and_then(json::index).unwrap_or(0) != 0 {
                continue;
            }
            if let Some(delta) = part(&mut choice) {
                self.delta(delta, out)?;
            }
            match choice.finish_reason.and_then(json::text).as_deref() {
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

    fn delta(&mut self, delta: Delta<'_>, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        self.reasoning(&delta, out)?;
        if let Some(content) = delta.content {
            match json::piece(content) {
                Some(text) if text.is_empty() => {}
                Some(text) => out.push(Fragment::Text(text)),
                None => content_parts(content, out)?,
            }
        }
        if let Some(refusal) = delta.refusal.and_then(json::text) {
            self.refusal.push_str(&refusal);
        }
        if let List::Other(what) = delta.tool_calls {
            return Err(StreamError::Unreadable(format!("`tool_calls` is neither a list nor null: {what}")));
        }
        let calls: Vec<_> = delta.tool_calls.into_items().map(read_call).collect();
        if !calls.is_empty() {
            out.push(Fragment::Calls(calls));
        }
        Ok(())
    }

    /// Reads reasoning from the first field that has any: gateways repeat the same text in several.
    fn reasoning(&mut self, delta: &Delta<'_>, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
        let details = delta.reasoning_details.map(json::items).unwrap_or_default();
        let details: Vec<Value> = details.into_iter().filter_map(json::value).collect();
        let text = [delta.reasoning_content, delta.reasoning]
            .into_iter()
            .filter_map(|text| json::piece(text?))
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

/// Mistral's form of content: a list of parts, some of them reasoning.
fn content_parts(content: &RawValue, out: &mut Vec<Fragment>) -> Result<(), StreamError> {
    let text = content.get();
    if !text.starts_with('[') {
        return Err(StreamError::Unreadable(format!("`content` is neither text, a list nor null: {text}")));
    }
    let parts = |list| json::items(list).into_iter().filter_map(|part| object::parse::<ContentPart<'_>>(part.get()));
    for part in parts(content) {
        if let Some(text) = part.text.and_then(json::piece) {
            out.push(Fragment::Text(text));
        } else if let Some(thinking) = part.thinking {
            match json::piece(thinking) {
                Some(text) => out.push(Fragment::Reasoning(text)),
                None => out.extend(parts(thinking).filter_map(|part| json::piece(part.text?)).map(Fragment::Reasoning)),
            }
        }
    }
    Ok(())
}

fn read_call(call: Call<'_>) -> CallFragment {
    let function = call.function.0.unwrap_or_default();
    let arguments = match function.arguments {
        None => ArgumentPiece::None,
        Some(raw) => match json::piece(raw) {
            Some(piece) => ArgumentPiece::Text(piece),
            None => ArgumentPiece::Value(raw.get().to_owned()),
        },
    };
    let text = |raw: Option<_>| raw.and_then(json::text).map(Cow::into_owned);
    CallFragment { index: call.index.and_then(json::index), id: text(call.id), name: text(function.name), arguments }
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

fn read_usage(usage: &Usage<'_>) -> Result<Option<TokenUsage>, StreamError> {
    let count = |name: &str, raw: Option<&RawValue>| {
        let value = raw.and_then(json::value);
        value.map(|value| TokenUsage::count(name, &value)).transpose().map_err(StreamError::Usage)
    };
    let input = count("prompt_tokens", usage.prompt_tokens)?;
    let output = count("completion_tokens", usage.completion_tokens)?;
    if input.is_none() && output.is_none() {
        return Ok(None);
    }
    let cached = usage.prompt_tokens_details.0.as_ref().and_then(|details| details.cached_tokens);
    let reasoning = usage.completion_tokens_details.0.as_ref().and_then(|details| details.reasoning_tokens);
    Ok(Some(TokenUsage {
        input_tokens: input.unwrap_or(0),
        output_tokens: output.unwrap_or(0),
        cached_input_tokens: count("cached_tokens", cached)?.unwrap_or(0),
        reasoning_tokens: count("reasoning_tokens", reasoning)?.unwrap_or(0),
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

fn read_error(text: &str) -> ProviderError {
    let value = json::document(text).and_then(json::value);
    value.as_ref().and_then(ProviderError::find).unwrap_or_else(|| ProviderError::text(text))
}

#[cfg(test)]
#[path = "decode_tests.rs"]
mod tests;
