//! The checker held against evidence made by hand: a run in which everything is right, and the same run with one thing
//! wrong at a time.

use serde_json::{Value, json};

use super::{Invariant, Violation, answer, check};
use crate::evidence::{Acknowledged, Connection, Event, Evidence, Reader, Record};
use crate::ledger::Start;
use crate::report::Report;
use crate::sse::Frame;

const RUN: &str = "run_1";
const KEY: &str = "k-1";

/// What makes good evidence bad, and the guarantee that is then broken.
type Sample = (&'static str, Invariant, fn(&mut Evidence));

const SAMPLES: [Sample; 21] = [
    ("a run is gone", Invariant::I1, |evidence| evidence.runs.clear()),
    ("a key has two runs", Invariant::I2, |evidence| {
        let other = evidence.runs[RUN].clone();
        evidence.runs.insert("run_2".into(), other);
    }),
    ("a key was acknowledged with two runs", Invariant::I2, |evidence| {
        evidence.acknowledged.push(Acknowledged { run: "run_2".into(), key: KEY.into() });
    }),
    ("the run has another status than its end", Invariant::I3, |evidence| record(evidence).run["steps"] = json!(9)),
    ("a run ends twice", Invariant::I3, |evidence| {
        let last = record(evidence).events.last().unwrap().json.clone();
        append(evidence, last);
    }),
    ("an event follows the end", Invariant::I3, |evidence| append(evidence, json!({"type": "cancel_requested"}))),
    ("an event is missing from the log", Invariant::I4, |evidence| drop(record(evidence).events.remove(3))),
    ("a frame has other bytes", Invariant::I5, |evidence| frames(evidence)[2].data.push(' ')),
    ("a frame is missing", Invariant::I5, |evidence| drop(frames(evidence).remove(2))),
    ("a frame comes twice", Invariant::I5, |evidence| {
        let frame = frames(evidence)[2].clone();
        frames(evidence).insert(3, frame);
    }),
    ("a frame was sent that is not stored", Invariant::I5, |evidence| drop(record(evidence).events.pop())),
    ("a cursor is refused", Invariant::I5, |evidence| evidence.readers[0].connections[0].status = 400),
    ("a piece of a message is missing", Invariant::I5, |evidence| {
        let at = frames(evidence).iter().rposition(|frame| frame.event == "text_delta").unwrap();
        frames(evidence).remove(at - 1);
    }),
    ("the pieces add up to something else", Invariant::I5, |evidence| {
        let at = frames(evidence).iter().rposition(|frame| frame.event == "text_delta").unwrap();
        frames(evidence).remove(at);
    }),
    ("a side effect happens twice", Invariant::I6, |evidence| {
        let start = evidence.ledger[0].clone();
        evidence.ledger.push(start);
    }),
    ("a call starts without an intent", Invariant::I6, |evidence| evidence.ledger[0].call = "other".into()),
    ("a call has no outcome", Invariant::I7, |evidence| remove(evidence, "tool_end")),
    ("the transcript has an orphan", Invariant::I7, |evidence| drop(record(evidence).messages.remove(1))),
    ("a generation falls", Invariant::I8, |evidence| drop(evidence.generations.insert(RUN.into(), vec![1, 2, 1]))),
    ("usage is counted twice", Invariant::I9, |evidence| record(evidence).run["usage"]["input_tokens"] = json!(400)),
    ("a run never ends", Invariant::I10, |evidence| record(evidence).run["status"] = json!("running")),
];

/// Checks the checker.
pub(crate) fn prove(report: &mut Report) {
    let clean = check(&good());
    let mut missed: Vec<Violation> = clean;
    for (what, invariant, spoil) in SAMPLES {
        let mut evidence = good();
        spoil(&mut evidence);
        let found = check(&evidence);
        if !found.iter().any(|violation| violation.invariant == invariant) {
            missed.push(Violation { invariant, shown: format!("not found: {what}; found: {found:?}") });
        }
    }
    report.add("checker", &[("samples", SAMPLES.len().to_string())], &missed, "checker");
}

fn record(evidence: &mut Evidence) -> &mut Record {
    evidence.runs.get_mut(RUN).unwrap()
}

fn frames(evidence: &mut Evidence) -> &mut Vec<Frame> {
    &mut evidence.readers[0].connections[1].frames
}

fn event(seq: usize, mut body: Value) -> Event {
    body["run_id"] = json!(RUN);
    body["seq"] = json!(seq);
    Event::new(&body.to_string())
}

fn append(evidence: &mut Evidence, body: Value) {
    let events = &mut record(evidence).events;
    events.push(event(events.len() + 1, body));
}

/// Takes the events of a type out and numbers the rest anew, so that nothing else is wrong.
fn remove(evidence: &mut Evidence, kind: &str) {
    let events = &mut record(evidence).events;
    let rest: Vec<Value> = events.iter().filter(|event| event.kind() != kind).map(|event| event.json.clone()).collect();
    *events = rest.into_iter().zip(1..).map(|(body, seq)| event(seq, body)).collect();
}

/// A run with one call, read over two connections.
fn good() -> Evidence {
    let call = json!({"id": "c", "name": "run_command", "arguments": {"command": "side_effect"}});
    let calling =
        json!({"role": "assistant", "content": [{"type": "text", "text": "I call ✓."}], "tool_calls": [call]});
    let text = answer(KEY);
    let said = json!({"role": "assistant", "content": [{"type": "text", "text": text}]});
    let usage = |input: u64| json!({"input_tokens": input, "output_tokens": 5});
    let run = json!({
        "id": RUN, "status": "completed", "answer": text, "error": null, "steps": 2, "finished_at": "now",
        "usage": {"input_tokens": 201, "output_tokens": 10, "model_calls_with_usage": 2},
    });
    let bodies = [
        json!({"type": "run_queued"}),
        json!({"type": "model_start", "step": 1, "attempt": 1}),
        json!({"type": "model_end", "step": 1, "attempt": 1, "usage": usage(100)}),
        json!({"type": "message", "step": 1, "message": calling}),
        json!({"type": "tool_start", "step": 1, "call_id": "c"}),
        json!({"type": "tool_end", "step": 1, "call_id": "c", "outcome": "result"}),
        json!({"type": "model_start", "step": 2, "attempt": 1}),
        json!({"type": "model_end", "step": 2, "attempt": 1, "usage": usage(101)}),
        json!({"type": "message", "step": 2, "message": said}),
        json!({"type": "run_end", "run": run}),
    ];
    let events: Vec<Event> = bodies.into_iter().zip(1..).map(|(body, seq)| event(seq, body)).collect();
    let durable = |event: &Event| Frame {
        id: Some(event.seq().to_string()),
        event: event.kind().to_owned(),
        data: event.raw.clone(),
    };
    let snapshot = || Frame { id: None, event: "snapshot".into(), data: "{}".into() };
    let delta = |seq: u64, step: u64, offset: usize, text: &str| Frame {
        id: Some(format!("{seq}.{}", offset + text.chars().count())),
        event: "text_delta".into(),
        data: json!({"run_id": RUN, "step": step, "attempt": 1, "offset": offset, "text": text}).to_string(),
    };
    let mut first = vec![snapshot()];
    first.extend(events[..2].iter().map(durable));
    first.push(delta(2, 1, 0, "I "));
    let mut second = vec![snapshot(), delta(2, 1, 2, "call ✓.")];
    second.extend(events[2..7].iter().map(durable));
    second.push(delta(7, 2, 0, &text[..3]));
    second.push(delta(7, 2, 3, &text[3..]));
    second.extend(events[7..].iter().map(durable));
    let connection = |cursor: Option<&str>, frames| Connection {
        cursor: cursor.map(str::to_owned),
        status: 200,
        refusal: String::new(),
        frames,
    };
    let reader =
        Reader { run: RUN.into(), connections: vec![connection(None, first), connection(Some("2.2"), second)] };
    let tool = json!({"role": "tool", "call_id": "c", "content": "done", "is_error": false});
    let user = json!({"role": "user", "content": [{"type": "text", "text": "go"}]});
    let record = Record { key: KEY.into(), run, events, messages: vec![user, calling, tool, said] };
    Evidence {
        acknowledged: vec![Acknowledged { run: RUN.into(), key: KEY.into() }],
        readers: vec![reader],
        runs: [(RUN.to_owned(), record)].into(),
        ledger: vec![Start { call: "c".into(), run: RUN.into(), effect: "side_effect".into(), generation: None }],
        generations: [(RUN.to_owned(), vec![1, 1, 2])].into(),
        refused_by_model: Vec::new(),
    }
}
