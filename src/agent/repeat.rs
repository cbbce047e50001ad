//! Noticing that a model goes in circles.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::domain::ToolCall;

/// A call's name and canonical arguments (raw ones when they are malformed), hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct CallKey(u64);

impl CallKey {
    pub(super) fn of(call: &ToolCall) -> Self {
        // DefaultHasher::new has fixed keys, so a restored run sees the same repeats.
        let mut hasher = DefaultHasher::new();
        call.name.hash(&mut hasher);
        call.arguments.canonical().hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// What was called so far. Rebuilt from the transcript, so it is never stored.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Repeats {
    /// The occurrence that counts as a repeat.
    limit: u32,
    /// Occurrences of each call, with the id of its first one.
    seen: HashMap<CallKey, Seen>,
    /// The calls of the round before, sorted.
    last_round: Vec<CallKey>,
}

#[derive(Clone, Debug, PartialEq)]
struct Seen {
    times: u32,
    /// Step and id of the first occurrence, whose result answers the later ones.
    first: (usize, String),
}

/// One call of a batch as the check sees it.
pub(super) struct Candidate<'a> {
    pub(super) call: &'a ToolCall,
    /// Repeating it is how it is used; it is left out of the check.
    pub(super) pollable: bool,
}

impl Repeats {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit: limit.max(2), seen: HashMap::new(), last_round: Vec::new() }
    }

    /// Which calls of a batch are repeats: all of them when the batch equals the one before, else those that
    /// reach the limit. `true` stands for a repeat.
    pub(super) fn check(&self, batch: &[Candidate<'_>]) -> Vec<bool> {
        let round = sorted_keys(batch);
        let same_round = !round.is_empty() && round == self.last_round;
        let mut times: HashMap<CallKey, u32> = HashMap::new();
        batch
            .iter()
            .map(|candidate| {
                if candidate.pollable {
                    return false;
                }
                let key = CallKey::of(candidate.call);
                let before = self.seen.get(&key).map_or(0, |seen| seen.times);
                let now = times.entry(key).or_insert(before);
                *now = now.saturating_add(1);
                same_round || *now >= self.limit
            })
            .collect()
    }

    /// Takes a batch into account; `position` is that of its assistant message in the transcript.
    pub(super) fn record(&mut self, batch: &[Candidate<'_>], position: usize) {
        self.last_round = sorted_keys(batch);
        for candidate in batch {
            let seen = self
                .seen
                .entry(CallKey::of(candidate.call))
                .or_insert_with(|| Seen { times: 0, first: (position, candidate.call.id.clone()) });
            seen.times = seen.times.saturating_add(1);
        }
    }

    /// Where the first occurrence of a call stands: position of its assistant message, and its call id.
    pub(super) fn first(&self, call: &ToolCall) -> Option<(usize, &str)> {
        self.seen.get(&CallKey::of(call)).map(|seen| (seen.first.0, seen.first.1.as_str()))
    }
}

fn sorted_keys(batch: &[Candidate<'_>]) -> Vec<CallKey> {
    let mut keys: Vec<_> =
        batch.iter().filter(|candidate| !candidate.pollable).map(|candidate| CallKey::of(candidate.call)).collect();
    keys.sort_unstable();
    keys
}
