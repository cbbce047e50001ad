//! The checker: which guarantees the evidence of an experiment breaks.

mod log;
pub(crate) mod samples;
mod stream;
mod tool;

use std::collections::BTreeMap;
use std::fmt;

use crate::evidence::{Evidence, Record};

/// What has to hold after every experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Invariant {
    /// Every acknowledged run exists.
    I1,
    /// There is at most one run for a key.
    I2,
    /// A run has exactly one terminal status, that of its last event.
    I3,
    /// Events are numbered 1, 2, 3, …
    I4,
    /// What a client was sent is a contiguous piece of the log, byte for byte, and deltas add up to their message.
    I5,
    /// A call that is not idempotent started at most once, and no call started before its intent was committed.
    I6,
    /// A call has exactly one outcome, before the model is called for a later step.
    I7,
    /// The generation of a run never falls.
    I8,
    /// The usage of a run is the sum of that of its model calls.
    I9,
    /// Once the faults have stopped all runs end, and new ones complete.
    I10,
    /// A run completes with the answer its model gives, whatever happened on the way.
    Completed,
}

/// A guarantee that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    /// What shows it.
    pub(crate) shown: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.invariant, self.shown)
    }
}

/// Collects violations.
#[derive(Default)]
struct Found(Vec<Violation>);

impl Found {
    fn note(&mut self, invariant: Invariant, shown: impl Into<String>) {
        self.0.push(Violation { invariant, shown: shown.into() });
    }

    /// Notes it unless the condition holds.
    fn expect(&mut self, holds: bool, invariant: Invariant, shown: impl FnOnce() -> String) {
        if !holds {
            self.note(invariant, shown());
        }
    }
}

/// The answer that the model of a run with this key gives in the end.
pub(crate) fn answer(key: &str) -> String {
    format!("All of {key} is done.")
}

/// Everything that does not hold.
pub(crate) fn check(evidence: &Evidence) -> Vec<Violation> {
    let mut found = Found::default();
    existence(evidence, &mut found);
    for (id, record) in &evidence.runs {
        log::numbers(id, record, &mut found);
        log::ending(id, record, &mut found);
        log::usage(id, record, &mut found);
        tool::outcomes(id, record, &mut found);
        tool::transcript(id, record, &mut found);
        completion(id, record, &mut found);
    }
    for reader in &evidence.readers {
        stream::frames(reader, evidence.runs.get(&reader.run), &mut found);
        stream::deltas(reader, &mut found);
    }
    tool::starts(evidence, &mut found);
    for (id, seen) in &evidence.generations {
        let falls = seen.windows(2).any(|pair| pair[1] < pair[0]);
        found.expect(!falls, Invariant::I8, || format!("{id}: its generations were {seen:?}"));
    }
    for refused in &evidence.refused_by_model {
        found.note(Invariant::I7, format!("the model was sent what it cannot take: {refused}"));
    }
    found.0
}

fn existence(evidence: &Evidence, found: &mut Found) {
    let mut by_key: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (id, record) in &evidence.runs {
        by_key.entry(&record.key).or_default().push(id);
    }
    for acknowledged in &evidence.acknowledged {
        let id = &acknowledged.run;
        found.expect(evidence.runs.contains_key(id), Invariant::I1, || {
            format!("{id} (key {}) was acknowledged and does not exist", acknowledged.key)
        });
        // Two acknowledgements of one key name one run, also where one of them is lost.
        let runs = by_key.entry(&acknowledged.key).or_default();
        if !runs.contains(&id.as_str()) {
            runs.push(id);
        }
    }
    for (key, runs) in by_key {
        found.expect(runs.len() <= 1, Invariant::I2, || format!("the key {key} has {} runs: {runs:?}", runs.len()));
    }
}

fn completion(id: &str, record: &Record, found: &mut Found) {
    let (status, given) = (&record.run["status"], &record.run["answer"]);
    found.expect(*status == "completed" && *given == answer(&record.key), Invariant::Completed, || {
        let expected = answer(&record.key);
        format!("{id}: status {status}, answer {given}, error {}; expected `{expected}`", record.run["error"])
    });
}
