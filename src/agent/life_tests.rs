//! A run's life as others see it: it waits, is answered, is steered, loses its worker at any point, and goes on.

use std::collections::HashMap;

use proptest::prelude::*;
use serde_json::json;

use super::machine::tests::{Tools, call, done, interrupt, outcomes, spec, start, turn};
use super::*;
use crate::domain::{
    Arguments, End, EndStatus, EventBody, InboxItem, Limits, Message, OutcomeKind, Part, PendingCall, PendingKind,
    RunSpec,
};

/// The machine as the next process has it.
fn restored(machine: &Machine, spec: &RunSpec) -> Machine {
    let state = serde_json::from_str(&serde_json::to_string(machine.state()).unwrap()).unwrap();
    let messages = machine.transcript().messages().skip(1).map(|message| (**message).clone()).collect();
    Machine::restore(spec.clone(), 0, Vec::new(), state, messages, &Tools).unwrap()
}

fn waiting(machine: &Machine) -> Vec<PendingCall> {
    assert_eq!(machine.step(), Step::Wait);
    match machine.doing() {
        Doing::Waiting(calls) => calls,
        Doing::Nothing | Doing::Calling { .. } | Doing::Running(_) | Doing::Answered | Doing::Over(_) => panic!(),
    }
}

fn running(machine: &Machine) -> Vec<(String, String)> {
    match machine.step() {
        Step::RunTools(calls) => calls.into_iter().map(|call| (call.id, call.arguments.canonical())).collect(),
        other => panic!("{other:?}"),
    }
}

fn outcome_of(machine: &Machine, call_id: &str) -> Option<(OutcomeKind, String)> {
    machine.transcript().messages().find_map(|message| match &**message {
        Message::Tool(result) if result.call_id == call_id => Some((result.outcome, result.content.clone())),
        Message::Tool(_) | Message::User(_) | Message::Assistant(_) => None,
    })
}

fn kinds(events: &[EventBody]) -> Vec<&'static str> {
    events.iter().map(|event| event.kind().as_str()).collect()
}

fn result(call_id: &str, content: &str) -> Answer {
    Answer::Result { call_id: call_id.into(), content: content.into(), is_error: false }
}

#[test]
fn a_mixed_batch_runs_in_order_and_waits_once_for_all_that_comes_from_outside() {
    let spec = spec(Limits::default());
    let mut machine = start(spec.clone());
    let batch = vec![
        call("w", "write", r#"{"n":1}"#),
        call("c", "ask", r#"{"q":"?"}"#),
        call("g", "guarded", r#"{"n":2}"#),
        call("r", "read", "{}"),
    ];
    machine.observe(turn("", batch), &Tools).unwrap();
    assert_eq!(running(&machine), [("w".to_owned(), r#"{"n":1}"#.to_owned())]);
    machine.observe(outcomes(vec![done("w", "written")]), &Tools).unwrap();
    let pending = waiting(&machine);
    assert_eq!(
        pending.iter().map(|call| (call.call_id.as_str(), call.kind)).collect::<Vec<_>>(),
        [("c", PendingKind::Client), ("g", PendingKind::Approval)]
    );

    // A part of the answers leaves the rest pending, also in the next process.
    let events = machine.observe(Observation::Answers(vec![result("c", "blue")]), &Tools).unwrap().events;
    assert_eq!(kinds(&events), ["tool_end"]);
    let mut machine = restored(&machine, &spec);
    assert_eq!(waiting(&machine).len(), 1);
    let edit = Answer::Edit { call_id: "g".into(), arguments: json!({"n": 3}).as_object().unwrap().clone() };
    let events = machine.observe(Observation::Answers(vec![edit]), &Tools).unwrap().events;
    assert_eq!(kinds(&events), ["resumed"]);
    let mut machine = restored(&machine, &spec);
    assert_eq!(machine.step(), Step::Resume);
    let events = machine.observe(Observation::Resumed, &Tools).unwrap().events;
    let EventBody::ToolStart { call_id, arguments, .. } = &events[0] else { panic!("{events:?}") };
    assert_eq!((call_id.as_str(), arguments.canonical().as_str()), ("g", r#"{"n":3}"#));
    let mut machine = restored(&machine, &spec);
    assert_eq!(running(&machine), [("g".to_owned(), r#"{"n":3}"#.to_owned())]);
    machine.observe(outcomes(vec![done("g", "ok")]), &Tools).unwrap();
    machine.observe(outcomes(vec![done("r", "read")]), &Tools).unwrap();
    assert!(matches!(machine.step(), Step::CallModel(ModelCall { step: 2, .. })));
    assert_eq!(outcome_of(&machine, "c"), Some((OutcomeKind::Result, "blue".into())));
}

#[test]
fn an_answer_that_does_not_fit_takes_none_of_those_it_came_with() {
    let mut machine = start(spec(Limits::default()));
    let batch = vec![call("c", "ask", "{}"), call("g", "guarded", "{}")];
    machine.observe(turn("", batch), &Tools).unwrap();
    let before = machine.clone();
    let approve = |id: &str| Answer::Approve { call_id: id.into() };
    for (answers, problem) in [
        (vec![result("c", "x"), result("nope", "y")], "call `nope` does not wait for an answer; these do: g"),
        (vec![result("c", "x"), result("c", "y")], "call `c` is answered twice"),
        (vec![approve("c")], "call `c` waits for the result of the caller's tool: POST it to tool_results"),
        (vec![result("g", "x")], "call `g` waits for an approval: POST approve, edit or deny to approvals"),
    ] {
        let refused = machine.observe(Observation::Answers(answers), &Tools).unwrap_err();
        assert_eq!(refused.to_string(), problem);
        assert_eq!(machine, before);
    }
    machine.observe(Observation::Answers(vec![result("c", "x")]), &Tools).unwrap();
    let late = machine.observe(Observation::Answers(vec![result("c", "again")]), &Tools).unwrap_err();
    assert_eq!(late.to_string(), "call `c` does not wait for an answer; these do: g");
    let deny = Answer::Deny { call_id: "g".into(), message: Some("Too risky.".into()) };
    machine.observe(Observation::Answers(vec![deny]), &Tools).unwrap();
    machine.observe(Observation::Resumed, &Tools).unwrap();
    let refused = "Not executed: the call was denied. Too risky.".to_owned();
    assert_eq!(outcome_of(&machine, "g"), Some((OutcomeKind::Refused, refused)));
    assert!(matches!(machine.step(), Step::CallModel(_)));
}

#[test]
fn a_wait_that_is_over_or_cancelled_ends_the_run_with_every_call_answered() {
    for (cause, status, code) in [
        (Interrupt::WaitExpired, EndStatus::Timeout, "wait_expired"),
        (Interrupt::Cancel, EndStatus::Aborted, "aborted"),
    ] {
        let mut machine = start(spec(Limits::default()));
        machine.observe(turn("", vec![call("c", "ask", "{}"), call("w", "write", "{}")]), &Tools).unwrap();
        machine.observe(interrupt(cause), &Tools).unwrap();
        let Some(End::Stopped { status: ended, error, .. }) = machine.end() else { panic!() };
        assert_eq!((*ended, error.code.as_str()), (status, code));
        for id in ["c", "w"] {
            assert_eq!(outcome_of(&machine, id).unwrap().0, OutcomeKind::Aborted, "{id}");
        }
    }
}

#[test]
fn a_model_call_that_was_cut_off_is_made_again_as_another_attempt() {
    let spec = spec(Limits::default());
    let mut machine = restored(&start(spec.clone()), &spec);
    let events = machine.observe(Observation::TakenOver, &Tools).unwrap().events;
    assert_eq!(kinds(&events), ["recovered", "model_start"]);
    let EventBody::Recovered { abandoned: Some(abandoned), .. } = &events[0] else { panic!("{events:?}") };
    assert_eq!((abandoned.step, abandoned.attempt), (1, 1));
    assert!(abandoned.estimated_tokens > 0);
    assert!(matches!(machine.step(), Step::CallModel(ModelCall { step: 1, attempt: 2, .. })));
    assert_eq!(machine.state().usage.model_calls, 0);
}

#[test]
fn started_calls_are_settled_by_what_they_can_change() {
    let cases = [
        ("read", None, "run again"),
        ("put", None, "run again"),
        ("write", Some(OutcomeKind::OutcomeUnknown), "the model"),
        ("held", None, "wait"),
        ("fatal", Some(OutcomeKind::OutcomeUnknown), "end"),
    ];
    for (tool, outcome, then) in cases {
        let spec = spec(Limits::default());
        let mut machine = start(spec.clone());
        machine.observe(turn("", vec![call("a", tool, "{}")]), &Tools).unwrap();
        let mut machine = restored(&machine, &spec);
        let events = machine.observe(Observation::TakenOver, &Tools).unwrap().events;
        assert_eq!(events[0].kind().as_str(), "recovered", "{tool}");
        assert_eq!(outcome_of(&machine, "a").map(|(kind, _)| kind), outcome, "{tool}");
        match (then, machine.step()) {
            ("run again", Step::RunTools(calls)) => assert_eq!(calls.len(), 1),
            ("the model", Step::CallModel(_)) => {}
            ("wait", Step::Wait) => {
                assert_eq!(waiting(&machine)[0].kind, PendingKind::UnknownOutcome);
                machine.observe(Observation::Answers(vec![result("a", "it was done")]), &Tools).unwrap();
                machine.observe(Observation::Resumed, &Tools).unwrap();
                assert_eq!(outcome_of(&machine, "a"), Some((OutcomeKind::Result, "it was done".into())));
            }
            ("end", Step::Finish(End::Stopped { status: EndStatus::InternalError, error, .. })) => {
                assert_eq!(error.code, "outcome_unknown");
            }
            (_, step) => panic!("{tool}: {step:?}"),
        }
    }
}

#[test]
fn what_is_said_enters_before_the_next_model_call_and_keeps_a_run_from_being_completed() {
    let text = |text: &str| InboxItem::Message { content: vec![Part::Text { text: text.into() }] };
    let spec = spec(Limits::default());
    let mut machine = start(spec.clone());
    machine.observe(turn("", vec![call("r", "read", "{}")]), &Tools).unwrap();
    machine.observe(Observation::Said(vec![text("faster")]), &Tools).unwrap();
    let mut machine = restored(&machine, &spec);
    let events = machine.observe(outcomes(vec![done("r", "x")]), &Tools).unwrap().events;
    assert_eq!(kinds(&events), ["tool_end", "message", "model_start"]);
    machine.observe(turn("done", Vec::new()), &Tools).unwrap();
    let events = machine.observe(Observation::Said(vec![text("one more thing")]), &Tools).unwrap().events;
    assert_eq!(kinds(&events), ["message", "model_start"]);
    let Step::CallModel(next) = machine.step() else { panic!() };
    assert_eq!(next.messages.last().unwrap().text(), "one more thing");
}

#[test]
fn raised_limits_count_from_the_next_decision_on_and_outlive_the_process() {
    let spec = spec(Limits { max_steps: 1, ..Limits::default() });
    let mut machine = start(spec.clone());
    machine.observe(turn("", vec![call("r", "read", "{}")]), &Tools).unwrap();
    let limits = Limits { max_steps: 2, ..Limits::default() };
    machine
        .observe(Observation::Said(vec![InboxItem::Amendment { limits: Some(limits), metadata: None }]), &Tools)
        .unwrap();
    let mut machine = restored(&machine, &spec);
    assert_eq!(machine.limits().max_steps, 2);
    machine.observe(outcomes(vec![done("r", "x")]), &Tools).unwrap();
    assert!(matches!(machine.step(), Step::CallModel(ModelCall { step: 2, .. })));
}

/// What happens to a run.
#[derive(Clone, Debug)]
enum Fate {
    /// The model answers, or calls these tools.
    Model(Vec<usize>),
    /// One call that runs gives this.
    Outcome(usize, OutcomeKind),
    /// One pending call is answered this way.
    Answer(usize, u8),
    /// An outcome of a call that is not running.
    Stale,
    /// A message.
    Said,
    /// The process dies after its last commit.
    Crash,
    Cancel,
    Deadline,
}

const NAMES: [&str; 7] = ["read", "put", "write", "held", "fatal", "guarded", "ask"];

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => prop::collection::vec(0..NAMES.len(), 0..5).prop_map(Fate::Model),
        8 => (any::<usize>(), prop::sample::select(vec![OutcomeKind::Result, OutcomeKind::Error, OutcomeKind::TimedOut]))
            .prop_map(|(at, kind)| Fate::Outcome(at, kind)),
        8 => (any::<usize>(), 0_u8..4).prop_map(|(at, how)| Fate::Answer(at, how)),
        1 => Just(Fate::Stale),
        1 => Just(Fate::Said),
        4 => Just(Fate::Crash),
        1 => prop_oneof![Just(Fate::Cancel), Just(Fate::Deadline)],
    ]
}

fn observed(fate: &Fate, machine: &Machine, serial: usize) -> Option<Observation> {
    let pending = match machine.doing() {
        Doing::Waiting(calls) => calls,
        Doing::Nothing | Doing::Calling { .. } | Doing::Running(_) | Doing::Answered | Doing::Over(_) => Vec::new(),
    };
    match (fate, machine.step()) {
        (_, Step::Resume) => Some(Observation::Resumed),
        (Fate::Model(names), Step::CallModel(_)) => {
            let calls = names.iter().enumerate();
            let calls =
                calls.map(|(n, name)| call(&format!("c{serial}_{n}"), NAMES[*name], &format!("{{\"n\":{serial}}}")));
            Some(turn("words", calls.collect()))
        }
        (Fate::Outcome(at, kind), Step::RunTools(calls)) => {
            let id = &calls[at % calls.len()].id;
            Some(outcomes(vec![crate::domain::ToolOutcome { kind: *kind, ..done(id, "r") }]))
        }
        (Fate::Answer(at, how), Step::Wait) => {
            let PendingCall { call_id, kind, .. } = pending[at % pending.len()].clone();
            Some(Observation::Answers(vec![match (kind, how) {
                (PendingKind::Client | PendingKind::UnknownOutcome, how) => {
                    Answer::Result { call_id, content: "r".into(), is_error: *how == 0 }
                }
                (PendingKind::Approval, 0) => Answer::Deny { call_id, message: None },
                (PendingKind::Approval, 1) => {
                    Answer::Edit { call_id, arguments: json!({"edited": serial}).as_object().unwrap().clone() }
                }
                (PendingKind::Approval, _) => Answer::Approve { call_id },
            }]))
        }
        (Fate::Said, step) if !matches!(step, Step::Finish(_) | Step::Start) => {
            Some(Observation::Said(vec![InboxItem::Message { content: vec![Part::Text { text: "psst".into() }] }]))
        }
        (Fate::Cancel, step) if !matches!(step, Step::Finish(_)) => Some(interrupt(Interrupt::Cancel)),
        (Fate::Deadline, Step::CallModel(_) | Step::RunTools(_)) => Some(interrupt(Interrupt::Deadline)),
        (
            Fate::Model(_)
            | Fate::Outcome(..)
            | Fate::Answer(..)
            | Fate::Stale
            | Fate::Said
            | Fate::Crash
            | Fate::Cancel
            | Fate::Deadline,
            _,
        ) => None,
    }
}

proptest! {
    #[test]
    fn whatever_happens_every_call_is_started_at_most_once_and_ends_exactly_once(
        fates in prop::collection::vec(fate(), 0..80),
    ) {
        let limits = Limits { max_steps: 20, max_tool_calls: 60, max_tokens: u64::MAX, ..Limits::default() };
        let spec = spec(limits);
        let mut machine = start(spec.clone());
        let mut log = Vec::new();
        // How often each call with side effects was handed to a worker that runs it.
        let mut runs: HashMap<String, u32> = HashMap::new();
        let mut attempts = 0;
        for (serial, fate) in fates.iter().enumerate() {
            let before: Vec<String> = match machine.step() {
                Step::RunTools(calls) => calls.into_iter().map(|call| call.id).collect(),
                _ => Vec::new(),
            };
            match fate {
                Fate::Crash => {
                    machine = restored(&machine, &spec);
                    log.extend(machine.observe(Observation::TakenOver, &Tools).unwrap().events);
                }
                Fate::Stale => {
                    let stale = outcomes(vec![done("never", "x")]);
                    let kept = machine.clone();
                    prop_assert!(machine.observe(stale, &Tools).is_err());
                    prop_assert_eq!(&machine, &kept);
                }
                other => {
                    let Some(observation) = observed(other, &machine, serial) else { continue };
                    log.extend(machine.observe(observation, &Tools).unwrap().events);
                }
            }
            if let Step::RunTools(calls) = machine.step() {
                for call in calls {
                    let is_new = matches!(fate, Fate::Crash) || !before.contains(&call.id);
                    *runs.entry(call.id).or_default() += u32::from(is_new);
                }
            }
            if let Step::CallModel(next) = machine.step() {
                prop_assert!((next.step, next.attempt) >= (1, 1));
                attempts = attempts.max(next.attempt);
                let mut sent = Transcript::from_messages(next.messages.iter().map(|m| (**m).clone())).unwrap();
                prop_assert_eq!(sent.push(Message::user("x")), Ok(()), "every call is answered");
            }
            prop_assert_eq!(&restored(&machine, &spec), &machine);
        }
        if !matches!(machine.step(), Step::Finish(_)) {
            log.extend(machine.observe(interrupt(Interrupt::Cancel), &Tools).unwrap().events);
        }
        prop_assert!(machine.observe(interrupt(Interrupt::Cancel), &Tools).is_err(), "an end is final");
        let mut asked: HashMap<String, String> = HashMap::new();
        let (mut started, mut ended): (HashMap<String, u32>, HashMap<String, u32>) = Default::default();
        for event in &log {
            match event {
                EventBody::Message { message: Message::Assistant(message), .. } => {
                    asked.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())));
                }
                EventBody::ToolStart { call_id, .. } => {
                    prop_assert_eq!(ended.get(call_id), None, "a start after its end");
                    *started.entry(call_id.clone()).or_default() += 1;
                }
                EventBody::ToolEnd { call_id, .. } => *ended.entry(call_id.clone()).or_default() += 1,
                _ => {}
            }
        }
        for (id, name) in &asked {
            prop_assert_eq!(ended.get(id), Some(&1), "{} of {}", id, name);
            prop_assert!(started.get(id).copied().unwrap_or_default() <= 1);
            if !matches!(name.as_str(), "read" | "put") {
                prop_assert!(runs.get(id).copied().unwrap_or_default() <= 1, "{} of {} ran twice", id, name);
            }
        }
    }
}

#[test]
fn arguments_that_somebody_edited_have_to_fit() {
    let mut machine = start(spec(Limits::default()));
    machine.observe(turn("", vec![call("g", "guarded", "{}")]), &Tools).unwrap();
    let edited = Answer::Edit { call_id: "g".into(), arguments: json!({"refuse": true}).as_object().unwrap().clone() };
    let refused = machine.observe(Observation::Answers(vec![edited]), &Tools).unwrap_err();
    assert!(refused.to_string().starts_with("the arguments for call `g` cannot be used"), "{refused}");
    assert!(matches!(Arguments::parse("{}"), Arguments::Object(_)));
    assert_eq!(waiting(&machine).len(), 1);
}
