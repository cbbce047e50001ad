//! The conversation of a run in memory: append-only, well formed by construction, each message counted once.

use std::ops::Range;
use std::sync::Arc;

use super::tokens::estimate_message;
use crate::domain::{AssistantMessage, Message, ToolMessage};

/// A message and what it costs to send.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// The message.
    pub(super) message: Arc<Message>,
    /// Estimated tokens.
    pub(super) tokens: u64,
}

/// What is kept or dropped as a whole: a user message, or an assistant message with all its results (a round).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Unit {
    /// Positions of its messages.
    pub(super) range: Range<usize>,
    /// Estimated tokens of them all.
    pub(super) tokens: u64,
}

/// The messages of a run, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transcript {
    entries: Vec<Entry>,
    units: Vec<Unit>,
}

/// Why a list of messages is not a transcript.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllFormed {
    /// A result answers no open call.
    #[error("a tool result answers call `{0}`, which is not open")]
    Orphan(String),
    /// A call has no result before the next message.
    #[error("call `{0}` has no result")]
    Unanswered(String),
    /// Two calls of one message share an id.
    #[error("call id `{0}` occurs twice in one message")]
    DuplicateCall(String),
}

impl Transcript {
    /// Reads a conversation; the calls of its last message may still be open.
    pub fn from_messages(messages: impl IntoIterator<Item = Message>) -> Result<Self, IllFormed> {
        let mut transcript = Self::default();
        for message in messages {
            transcript.push(message)?;
        }
        Ok(transcript)
    }

    /// Appends a message.
    pub fn push(&mut self, message: Message) -> Result<(), IllFormed> {
        match &message {
            Message::User(_) => self.all_answered()?,
            Message::Assistant(assistant) => {
                self.all_answered()?;
                no_duplicate_ids(assistant)?;
            }
            Message::Tool(result) => self.answers_an_open_call(result)?,
        }
        let (position, tokens) = (self.entries.len(), estimate_message(&message));
        match (&message, self.units.last_mut()) {
            (Message::Tool(_), Some(round)) => {
                round.range.end = position + 1;
                round.tokens += tokens;
            }
            (Message::User(_) | Message::Assistant(_) | Message::Tool(_), _) => {
                self.units.push(Unit { range: position..position + 1, tokens });
            }
        }
        self.entries.push(Entry { message: Arc::new(message), tokens });
        Ok(())
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing was said yet.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The messages, in order.
    pub fn messages(&self) -> impl DoubleEndedIterator<Item = &Arc<Message>> {
        self.entries.iter().map(|entry| &entry.message)
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The newest assistant message, when nothing but its results follows it.
    pub fn last_round(&self) -> Option<&AssistantMessage> {
        let round = self.units.last()?;
        match self.entries.get(round.range.start)?.message.as_ref() {
            Message::Assistant(assistant) => Some(assistant),
            Message::User(_) | Message::Tool(_) => None,
        }
    }

    /// The result of a call of the newest round.
    fn has_result(&self, call_id: &str) -> bool {
        self.units.last().is_some_and(|round| {
            self.entries.get(round.range.clone()).into_iter().flatten().any(|entry| match entry.message.as_ref() {
                Message::Tool(result) => result.call_id == call_id,
                Message::User(_) | Message::Assistant(_) => false,
            })
        })
    }

    fn all_answered(&self) -> Result<(), IllFormed> {
        let calls = self.last_round().map_or(&[][..], |round| &round.tool_calls);
        match calls.iter().find(|call| !self.has_result(&call.id)) {
            Some(call) => Err(IllFormed::Unanswered(call.id.clone())),
            None => Ok(()),
        }
    }

    fn answers_an_open_call(&self, result: &ToolMessage) -> Result<(), IllFormed> {
        let asked =
            self.last_round().is_some_and(|round| round.tool_calls.iter().any(|call| call.id == result.call_id));
        if asked && !self.has_result(&result.call_id) { Ok(()) } else { Err(IllFormed::Orphan(result.call_id.clone())) }
    }
}

fn no_duplicate_ids(message: &AssistantMessage) -> Result<(), IllFormed> {
    for (index, call) in message.tool_calls.iter().enumerate() {
        if message.tool_calls.iter().take(index).any(|earlier| earlier.id == call.id) {
            return Err(IllFormed::DuplicateCall(call.id.clone()));
        }
    }
    Ok(())
}
