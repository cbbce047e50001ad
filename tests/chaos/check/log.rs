//! The log of a run by itself: its numbers, its end, its sums.

use serde_json::Value;

use super::{Found, Invariant};
use crate::evidence::{Event, Record};

/// Statuses that a run still leaves.
const ACTIVE: [&str; 3] = ["queued", "running", "waiting"];

/// I4: numbered 1 to n.
pub(super) fn numbers(id: &str, record: &Record, found: &mut Found) {
    let wrong = record.events.iter().zip(1..).find(|(event, expected)| event.seq() != *expected);
    if let Some((event, expected)) = wrong {
        found.note(Invariant::I4, format!("{id}: where event {expected} belongs stands {}", event.raw));
    }
    found.expect(!record.events.is_empty(), Invariant::I4, || format!("{id}: has no events"));
    let foreign = record.events.iter().find(|event| event.json["run_id"] != id);
    found.expect(foreign.is_none(), Invariant::I4, || format!("{id}: has an event of another run: {foreign:?}"));
}

/// I3: one terminal status, that of the last event, and nothing after it.
pub(super) fn ending(id: &str, record: &Record, found: &mut Found) {
    let status = record.run["status"].as_str().unwrap_or_default();
    if ACTIVE.contains(&status) {
        let last = record.events.last().map(|event| event.raw.as_str());
        return found.note(Invariant::I10, format!("{id}: is still {status} after the end; last event: {last:?}"));
    }
    let ends: Vec<&Event> = record.events.iter().filter(|event| event.kind() == "run_end").collect();
    found.expect(ends.len() == 1, Invariant::I3, || {
        let raw: Vec<&str> = ends.iter().map(|event| event.raw.as_str()).collect();
        format!("{id}: is {status} and has {} run_end events: {raw:?}", ends.len())
    });
    if let (Some(last), false) = (record.events.last(), ends.is_empty()) {
        found.expect(last.kind() == "run_end", Invariant::I3, || format!("{id}: after run_end stands {}", last.raw));
    }
    if let Some(end) = ends.last() {
        found.expect(end.json["run"] == record.run, Invariant::I3, || {
            format!("{id}: run_end says {}, GET says {}", end.json["run"], record.run)
        });
    }
    found.expect(record.run["finished_at"].is_string(), Invariant::I3, || {
        format!("{id}: is {status} without a finished_at: {}", record.run)
    });
}

/// I9: the run's usage is the sum of its model calls'.
pub(super) fn usage(id: &str, record: &Record, found: &mut Found) {
    let ends = || record.events.iter().filter(|event| event.kind() == "model_end");
    for field in ["input_tokens", "output_tokens"] {
        let sum: u64 = ends().filter_map(|event| event.json["usage"][field].as_u64()).sum();
        let told = &record.run["usage"][field];
        found.expect(*told == sum, Invariant::I9, || {
            format!("{id}: {field} is {told}, its model calls add up to {sum}")
        });
    }
    let calls = ends().filter(|event| event.json["usage"] != Value::Null).count();
    let told = &record.run["usage"]["model_calls_with_usage"];
    found.expect(*told == calls, Invariant::I9, || {
        format!("{id}: model_calls_with_usage is {told}, its log has {calls} model calls with usage")
    });
}
