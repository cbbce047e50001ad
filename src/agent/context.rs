//! What the model gets to see: the first user message and as many of the newest rounds as fit.

use std::sync::Arc;

use super::transcript::{Entry, Transcript};
use crate::domain::Message;

/// A part of a transcript that is sent: the first user message, then everything from `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Position of the first message of the kept tail.
    pub from: usize,
    /// Position of the first user message when it stands before the tail.
    pub anchor: Option<usize>,
    /// How many messages the model does not see.
    pub dropped: usize,
    /// Estimated tokens of the request, instructions and schemas included.
    pub tokens: u64,
}

/// Not even the first user message and the newest round fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the shortest useful request needs about {needed} tokens; the context has room for {room}")]
pub struct ContextLimit {
    /// Estimated tokens of that request.
    pub needed: u64,
    /// Tokens there are.
    pub room: u64,
}

/// Selects what is sent. `head_tokens` is the cost of instructions and tool schemas, `room` the tokens of the whole
/// request. Rounds and user messages are kept or dropped whole, newest first, without holes after the first user
/// message. Work is proportional to what is kept.
pub fn select(transcript: &Transcript, head_tokens: u64, room: u64) -> Result<Selection, ContextLimit> {
    let units = transcript.units();
    let first_user = units.iter().position(|unit| {
        let message = transcript.entries().get(unit.range.start).map(|entry| entry.message.as_ref());
        matches!(message, Some(Message::User(_)))
    });
    let anchor = first_user.and_then(|index| units.get(index).map(|unit| (index, unit)));
    let anchor_tokens = anchor.map_or(0, |(_, unit)| unit.tokens);

    let mut tokens = head_tokens + anchor_tokens;
    let mut kept_from = units.len();
    for (index, unit) in units.iter().enumerate().rev() {
        let more = if first_user == Some(index) { 0 } else { unit.tokens };
        let newest = index + 1 == units.len();
        if tokens + more > room {
            if newest {
                return Err(ContextLimit { needed: tokens + more, room });
            }
            break;
        }
        tokens += more;
        kept_from = index;
    }
    if tokens > room {
        return Err(ContextLimit { needed: tokens, room });
    }
    let from = units.get(kept_from).map_or(transcript.len(), |unit| unit.range.start);
    let anchor = anchor.filter(|(index, _)| *index < kept_from).map(|(_, unit)| unit.range.start);
    Ok(Selection { from, anchor, dropped: from - usize::from(anchor.is_some()), tokens })
}

impl Selection {
    /// The messages that are sent, in order.
    pub fn messages(&self, transcript: &Transcript) -> Vec<Arc<Message>> {
        let entries = transcript.entries();
        let anchor = self.anchor.and_then(|at| entries.get(at));
        let tail = entries.get(self.from..).unwrap_or_default();
        anchor.into_iter().chain(tail).map(|entry: &Entry| Arc::clone(&entry.message)).collect()
    }
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
