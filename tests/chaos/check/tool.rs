//! Tool calls: what was started, and how each ended.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Found, Invariant};
use crate::evidence::{Evidence, Record};

/// Call ids that a message holds.
fn calls(message: &Value) -> impl Iterator<Item = &str> {
    message["tool_calls"].as_array().into_iter().flatten().filter_map(|call| call["id"].as_str())
}

/// I6: at most one start of a call that may not be repeated, and none without a committed intent.
pub(super) fn starts(evidence: &Evidence, found: &mut Found) {
    let mut counts: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for start in &evidence.ledger {
        if start.effect == "side_effect" {
            *counts.entry((&start.run, &start.call)).or_default() += 1;
        }
        let Some(record) = evidence.runs.get(&start.run) else {
            found.note(Invariant::I6, format!("{start:?} is of a run that does not exist"));
            continue;
        };
        let intent = |kind: &str, call: &Value| kind == "tool_start" && *call == start.call;
        let committed = record.events.iter().any(|event| intent(event.kind(), &event.json["call_id"]));
        found.expect(committed, Invariant::I6, || format!("{start:?} has no tool_start in the log"));
    }
    for ((run, call), count) in counts {
        found.expect(count <= 1, Invariant::I6, || format!("{run}: the side effect {call} started {count} times"));
    }
}

/// I7: every call of a message has exactly one tool_end before the model is called for a later step.
pub(super) fn outcomes(id: &str, record: &Record, found: &mut Found) {
    let mut open: BTreeSet<String> = BTreeSet::new();
    let mut step_of_open = Value::Null;
    for event in &record.events {
        match event.kind() {
            "message" => {
                open.extend(calls(&event.json["message"]).map(str::to_owned));
                step_of_open = event.json["step"].clone();
            }
            "tool_end" => {
                let call = event.json["call_id"].as_str().unwrap_or_default();
                found.expect(open.remove(call), Invariant::I7, || {
                    format!("{id}: {call} has an outcome that answers no open call: {}", event.raw)
                });
            }
            "model_start" => {
                let later = event.json["step"].as_u64() > step_of_open.as_u64();
                found.expect(open.is_empty() || !later, Invariant::I7, || {
                    format!("{id}: the calls {open:?} have no outcome at {}", event.raw)
                });
            }
            _ => {}
        }
    }
    found.expect(open.is_empty(), Invariant::I7, || format!("{id}: the calls {open:?} never got an outcome"));
}

/// I7: the transcript answers every call exactly once before the next message of the model.
pub(super) fn transcript(id: &str, record: &Record, found: &mut Found) {
    let mut open: BTreeSet<&str> = BTreeSet::new();
    for message in &record.messages {
        match message["role"].as_str() {
            Some("assistant") => {
                found.expect(open.is_empty(), Invariant::I7, || {
                    format!("{id}: the transcript leaves {open:?} unanswered before {message}")
                });
                open = calls(message).collect();
            }
            Some("tool") => {
                let call = message["call_id"].as_str().unwrap_or_default();
                found.expect(open.remove(call), Invariant::I7, || {
                    format!("{id}: an orphan in the transcript: {message}")
                });
            }
            _ => {}
        }
    }
    found.expect(open.is_empty(), Invariant::I7, || format!("{id}: the transcript ends with {open:?} unanswered"));
}
