//! Folds the fragments of a response into a turn, and passes them on live.
//!
//! Tool calls come in every shape that servers were seen to send: without index, without id, name last,
//! whole, repeated. Which call a fragment belongs to is decided by index, then by id, then by which calls
//! are still open; it is never assumed to be the first.

use serde_json::Value;

use super::DeltaSink;
use super::json::{Piece, Rejoiner};
use super::names::NameMap;
use super::object_scan::ObjectScan;
use crate::domain::{Arguments, Delta, FinishReason, ModelTurn, Part, ReasoningToken, TokenUsage, ToolCall};

/// Most calls of one turn.
pub const MAX_CALLS: usize = 128;
/// Most bytes of one call's arguments.
pub const MAX_ARGUMENT_BYTES: usize = 1024 * 1024;
/// Most bytes that one response may make this process keep: text, reasoning and its tokens, names, ids and arguments
/// of calls together.
pub const MAX_RESPONSE_BYTES: usize = 8 * 1024 * 1024;
/// What a part or a call costs besides its text.
const ITEM_BYTES: usize = 64;

/// A piece of a response in the form all wires share.
#[derive(Clone, Debug, PartialEq)]
pub enum Fragment {
    /// More visible text.
    Text(Piece),
    /// More reasoning.
    Reasoning(Piece),
    /// More of the calls: the entries of one chunk together, since entries of one chunk are different calls.
    Calls(Vec<CallFragment>),
    /// Tokens so far; replaces what was reported before.
    Usage(TokenUsage),
    /// Why the model stopped.
    Finish(FinishReason),
}

/// A piece of a tool call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallFragment {
    /// The provider's number of the call.
    pub index: Option<u64>,
    /// The provider's id of the call.
    pub id: Option<String>,
    /// The tool's name on the wire.
    pub name: Option<String>,
    /// More arguments.
    pub arguments: ArgumentPiece,
}

/// A piece of a call's arguments.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ArgumentPiece {
    /// Nothing: absent or `null`.
    #[default]
    None,
    /// The next part of the JSON text.
    Text(Piece),
    /// A JSON value where a piece of text should be, as JSON.
    Value(String),
}

/// The fragments make no turn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccumulateError {
    /// More than the bound for calls.
    #[error("the response has more than {MAX_CALLS} tool calls")]
    TooManyCalls,
    /// More than the bound for arguments.
    #[error("the arguments of tool call {0} are longer than {MAX_ARGUMENT_BYTES} bytes")]
    ArgumentsTooLong(usize),
    /// More than the bound for everything.
    #[error("the response is larger than {0} bytes")]
    TooLarge(usize),
    /// A call without a name.
    #[error("tool call {0} has no name")]
    NoName(usize),
    /// A call with two names.
    #[error("tool call {number} is named `{first}` and then `{second}`")]
    TwoNames {
        /// Which call, from 1.
        number: usize,
        /// Its name.
        first: String,
        /// The other one.
        second: String,
    },
}

/// What came so far.
#[derive(Debug)]
pub struct Accumulator {
    names: NameMap,
    step: u32,
    content: Vec<Part>,
    /// What everything below takes, and most of it.
    bytes: usize,
    max_bytes: usize,
    /// What the decoder keeps itself.
    aside: usize,
    text_joiner: Rejoiner,
    reasoning_joiner: Rejoiner,
    calls: Vec<Call>,
    finish: Option<FinishReason>,
    usage: Option<TokenUsage>,
}

#[derive(Debug, Default)]
struct Call {
    index: Option<u64>,
    id: String,
    /// As on the wire; may still grow.
    name: String,
    arguments: String,
    scan: ObjectScan,
    joiner: Rejoiner,
    /// `arguments` is an empty object that came as a value: a stand-in for text that follows, or the whole.
    stand_in: bool,
}

impl Accumulator {
    /// Nothing yet. `names` maps tool names back; `step` makes the ids of calls that come without one.
    pub fn new(step: u32, names: NameMap) -> Self {
        Self {
            names,
            step,
            content: Vec::new(),
            bytes: 0,
            max_bytes: MAX_RESPONSE_BYTES,
            aside: 0,
            text_joiner: Rejoiner::default(),
            reasoning_joiner: Rejoiner::default(),
            calls: Vec::new(),
            finish: None,
            usage: None,
        }
    }

    /// The same with another bound than [`MAX_RESPONSE_BYTES`].
    pub fn bounded(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Counts what a decoder keeps of the response outside of its fragments: bytes in all so far.
    pub fn set_aside(&mut self, bytes: usize) -> Result<(), AccumulateError> {
        self.aside = bytes;
        self.charge(0)
    }

    /// Counts what is about to be kept.
    fn charge(&mut self, bytes: usize) -> Result<(), AccumulateError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes.saturating_add(self.aside) > self.max_bytes {
            return Err(AccumulateError::TooLarge(self.max_bytes));
        }
        Ok(())
    }

    /// Takes one fragment.
    pub fn push(&mut self, fragment: Fragment, sink: &mut dyn DeltaSink) -> Result<(), AccumulateError> {
        match fragment {
            Fragment::Text(piece) => {
                let text = self.text_joiner.push(piece);
                self.append(Kind::Text, &text, sink)?;
            }
            Fragment::Reasoning(piece) => {
                let text = self.reasoning_joiner.push(piece);
                self.append(Kind::Reasoning, &text, sink)?;
            }
            Fragment::Calls(entries) => self.push_calls(entries, sink)?,
            Fragment::Usage(usage) => self.usage = Some(usage),
            Fragment::Finish(reason) => self.finish = Some(reason),
        }
        Ok(())
    }

    /// Why the model stopped, as far as it said.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The turn. `token` is attached to its reasoning.
    pub fn finish(
        mut self,
        token: Option<ReasoningToken>,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, AccumulateError> {
        for (kind, last) in [(Kind::Reasoning, self.reasoning_joiner.finish()), (Kind::Text, self.text_joiner.finish())]
        {
            if let Some(last) = last {
                self.append(kind, last.encode_utf8(&mut [0; 4]), sink)?;
            }
        }
        if token.is_some() {
            let last = self.content.iter_mut().rev().find_map(|part| match part {
                Part::Reasoning { token, .. } => Some(token),
                Part::Text { .. } => None,
            });
            match last {
                Some(slot) => *slot = token,
                None => self.content.insert(0, Part::Reasoning { text: String::new(), token }),
            }
        }
        if self.calls.iter().all(|call| call.index.is_some()) {
            self.calls.sort_by_key(|call| call.index);
        }
        let mut tool_calls = Vec::with_capacity(self.calls.len());
        for number in 0..self.calls.len() {
            let id = self.id_of(number);
            let Some(call) = self.calls.get_mut(number) else { break };
            call.arguments.extend(call.joiner.finish());
            if call.name.is_empty() {
                return Err(AccumulateError::NoName(number + 1));
            }
            let name = self.names.from_wire(&call.name).to_owned();
            tool_calls.push(ToolCall { id, name, arguments: Arguments::parse(&call.arguments) });
        }
        // Servers end turns with calls as `stop` and turns without as `tool_calls`; the calls decide.
        let finish = match (self.finish.unwrap_or(FinishReason::Unspecified), tool_calls.is_empty()) {
            (FinishReason::Stop | FinishReason::Unspecified, false) => FinishReason::ToolCalls,
            (FinishReason::ToolCalls, true) => FinishReason::Unspecified,
            (reason, _) => reason,
        };
        Ok(ModelTurn { content: self.content, tool_calls, finish, usage: self.usage })
    }

    fn append(&mut self, kind: Kind, more: &str, sink: &mut dyn DeltaSink) -> Result<(), AccumulateError> {
        if more.is_empty() {
            return Ok(());
        }
        let continues = matches!(
            (kind, self.content.last()),
            (Kind::Text, Some(Part::Text { .. })) | (Kind::Reasoning, Some(Part::Reasoning { .. }))
        );
        self.charge(more.len() + if continues { 0 } else { ITEM_BYTES })?;
        match (kind, self.content.last_mut()) {
            (Kind::Text, Some(Part::Text { text })) | (Kind::Reasoning, Some(Part::Reasoning { text, .. })) => {
                text.push_str(more);
            }
            (Kind::Text, _) => self.content.push(Part::Text { text: more.to_owned() }),
            (Kind::Reasoning, _) => self.content.push(Part::Reasoning { text: more.to_owned(), token: None }),
        }
        sink.delta(match kind {
            Kind::Text => Delta::Text(more),
            Kind::Reasoning => Delta::Reasoning(more),
        });
        Ok(())
    }

    fn push_calls(&mut self, entries: Vec<CallFragment>, sink: &mut dyn DeltaSink) -> Result<(), AccumulateError> {
        let count = entries.len();
        // Calls this chunk already touched: a later entry without index and id is another call.
        let mut touched = Vec::new();
        for (position, mut entry) in entries.into_iter().enumerate() {
            entry.id = entry.id.filter(|id| !id.is_empty());
            // A gateway writes the word null for an absent name.
            entry.name = entry.name.filter(|name| !name.is_empty() && name != "null");
            let nothing = match &entry.arguments {
                ArgumentPiece::None => true,
                ArgumentPiece::Text(piece) => piece.is_empty(),
                ArgumentPiece::Value(_) => false,
            };
            if entry.id.is_none() && entry.name.is_none() && nothing {
                continue;
            }
            let at_position = (count > 1 && count == self.calls.len()).then_some(position);
            let slot = match self.slot(&entry, at_position, &touched) {
                Some(slot) => slot,
                None if self.calls.len() >= MAX_CALLS => return Err(AccumulateError::TooManyCalls),
                None => {
                    self.charge(ITEM_BYTES)?;
                    self.calls.push(Call { index: entry.index, ..Call::default() });
                    self.calls.len() - 1
                }
            };
            if position + 1 < count {
                touched.push(slot);
            }
            self.extend(slot, entry, sink)?;
        }
        Ok(())
    }

    /// The call an entry continues; `None` when it begins a new one.
    fn slot(&self, entry: &CallFragment, at_position: Option<usize>, touched: &[usize]) -> Option<usize> {
        // The newest of that number: a server that numbers every call 0 begins another one when the last
        // is complete and both id and name are new.
        let numbered =
            self.calls.iter().enumerate().rev().find(|(_, call)| call.index.is_some() && call.index == entry.index);
        if let Some((slot, call)) = numbered {
            let other_id = entry.id.as_ref().is_some_and(|id| !call.id.is_empty() && *id != call.id);
            let begins_another = other_id && entry.name.is_some() && call.scan.is_complete();
            return (!begins_another).then_some(slot);
        }
        // A number that is new can still be that of a call which had none so far.
        let candidate = |call: &Call| entry.index.is_none() || call.index.is_none();
        if let Some(id) = &entry.id {
            return self.calls.iter().rposition(|call| candidate(call) && call.id == *id).or_else(|| {
                // Arguments came first, and here are their id and name.
                let last = self.calls.len().checked_sub(1)?;
                let call = self.calls.get(last)?;
                let waits = call.index.is_none() && call.id.is_empty() && call.name.is_empty();
                (waits && !touched.contains(&last)).then_some(last)
            });
        }
        let mut open = self.calls.iter().enumerate().filter(|(slot, call)| {
            candidate(call) && !touched.contains(slot) && !call.scan.is_complete() && may_continue(call, entry)
        });
        match (open.next(), open.next()) {
            (None, _) => None,
            (Some((slot, _)), None) => Some(slot),
            (Some(_), Some(_)) => at_position,
        }
    }

    fn extend(&mut self, slot: usize, entry: CallFragment, sink: &mut dyn DeltaSink) -> Result<(), AccumulateError> {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let arguments = match &entry.arguments {
            ArgumentPiece::None => 0,
            ArgumentPiece::Text(piece) => piece.len(),
            ArgumentPiece::Value(json) => json.len(),
        };
        self.charge(text(&entry.id) + text(&entry.name) + arguments)?;
        let Some(call) = self.calls.get_mut(slot) else { return Ok(()) };
        if call.index.is_none() {
            call.index = entry.index;
        }
        if let (true, Some(id)) = (call.id.is_empty(), entry.id) {
            call.id = id;
        }
        if let Some(name) = entry.name {
            if call.name.is_empty() || name.starts_with(&call.name) {
                call.name = name;
            } else if call.arguments.is_empty() {
                call.name.push_str(&name);
            } else {
                return Err(AccumulateError::TwoNames { number: slot + 1, first: call.name.clone(), second: name });
            }
        }
        let more = match entry.arguments {
            ArgumentPiece::None => String::new(),
            ArgumentPiece::Text(piece) => call.joiner.push(piece),
            ArgumentPiece::Value(json) => json,
        };
        let more = call.accept(more);
        if call.arguments.len() > MAX_ARGUMENT_BYTES {
            return Err(AccumulateError::ArgumentsTooLong(slot + 1));
        }
        sink.delta(Delta::ToolCall {
            index: slot,
            id: &call.id,
            name: self.names.from_wire(&call.name),
            arguments: &more,
        });
        Ok(())
    }

    /// The provider's id of a call, or one of ours that no other call of the turn has.
    fn id_of(&self, number: usize) -> String {
        match self.calls.get(number) {
            Some(call) if !call.id.is_empty() => call.id.clone(),
            Some(_) | None => {
                let mut id = format!("call_{}_{}", self.step, number + 1);
                while self.calls.iter().any(|call| call.id == id) {
                    id.push('x');
                }
                id
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Text,
    Reasoning,
}

/// Whether an entry without index and id can be the next piece of this open call.
fn may_continue(call: &Call, entry: &CallFragment) -> bool {
    match &entry.name {
        None => true,
        Some(name) => call.name.is_empty() || call.name == *name,
    }
}

impl Call {
    /// Adds a piece of arguments and gives back what is new of it.
    fn accept(&mut self, more: String) -> String {
        // A server that sends the whole call again at the end adds nothing.
        if more.is_empty() || (self.scan.is_complete() && more == self.arguments) {
            return String::new();
        }
        if self.stand_in {
            self.arguments.clear();
            self.scan = ObjectScan::default();
        }
        self.stand_in = self.arguments.is_empty() && is_empty_object(&more);
        self.scan.feed(&more);
        self.arguments.push_str(&more);
        more
    }
}

fn is_empty_object(json: &str) -> bool {
    matches!(serde_json::from_str(json), Ok(Value::Object(object)) if object.is_empty())
}

#[cfg(test)]
#[path = "accumulator_tests.rs"]
mod tests;
