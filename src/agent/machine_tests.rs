//! The machine step by step, on seeded batches, and in random worlds.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::Checked;
use super::*;
use crate::domain::{
    Arguments, ContextPolicy, ContextStrategy, Effect, FinishReason, Gate, Limits, OnRepeat, OnUnknown, OutcomeKind,
    ParallelTools, TokenUsage, ToolCall, ToolOutcome,
};

/// `read` and `look` only read, `write` changes things, `poll` may be repeated; nothing else exists.
pub(in crate::agent) struct Tools;

impl Toolbox for Tools {
    fn check(&self, call: &ToolCall) -> Checked {
        let ready = |effect, pollable| match &call.arguments {
            Arguments::Object(object) if object.contains_key("refuse") => Checked::Invalid("no".into()),
            Arguments::Object(_) => Checked::Ready { effect, pollable, gate: gate(&call.name) },
            Arguments::Malformed(raw) => Checked::Invalid(format!("arguments must be one JSON object, not {raw}")),
        };
        match call.name.as_str() {
            "read" | "look" => ready(Effect::ReadOnly, false),
            "poll" => ready(Effect::ReadOnly, true),
            "write" | "guarded" | "ask" | "held" | "fatal" => ready(Effect::SideEffect, false),
            "put" => ready(Effect::Idempotent, false),
            other => Checked::Invalid(format!("there is no tool `{other}`")),
        }
    }

    fn on_unknown(&self, call: &ToolCall) -> OnUnknown {
        match call.name.as_str() {
            "held" => OnUnknown::Hold,
            "fatal" => OnUnknown::Fail,
            _ => OnUnknown::Tell,
        }
    }
}

fn gate(name: &str) -> Gate {
    match name {
        "guarded" => Gate::Approval,
        "ask" => Gate::Client,
        _ => Gate::Open,
    }
}

pub(in crate::agent) fn spec(limits: Limits) -> RunSpec {
    RunSpec {
        agent: "a".into(),
        input: vec![Message::user("do it")],
        instructions: None,
        model: "p/m".parse().unwrap(),
        max_output_tokens: None,
        tools: Vec::new(),
        client_tools: Vec::new(),
        approval: Vec::new(),
        limits,
        context: ContextPolicy { strategy: ContextStrategy::Trim, max_tokens: 100_000, max_tool_result_chars: 8_000 },
        on_repeat: OnRepeat::Warn,
        repeat_limit: 4,
        parallel_tools: ParallelTools::ReadOnly,
        workspace: None,
        metadata: BTreeMap::new(),
        trace: None,
    }
}

pub(in crate::agent) fn call(id: &str, name: &str, raw: &str) -> ToolCall {
    ToolCall { id: id.into(), name: name.into(), arguments: Arguments::parse(raw) }
}

pub(in crate::agent) fn turn(text: &str, tool_calls: Vec<ToolCall>) -> Observation {
    let content = if text.is_empty() { Vec::new() } else { vec![Part::Text { text: text.into() }] };
    let finish = if tool_calls.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls };
    Observation::ModelTurn { turn: ModelTurn { content, tool_calls, finish, usage: None }, duration_ms: 1 }
}

pub(in crate::agent) fn done(id: &str, content: &str) -> ToolOutcome {
    ToolOutcome { call_id: id.into(), kind: OutcomeKind::Result, content: content.into(), duration_ms: 1 }
}

pub(in crate::agent) fn outcomes(outcomes: Vec<ToolOutcome>) -> Observation {
    Observation::ToolOutcomes { outcomes, fatal: None }
}

pub(in crate::agent) fn interrupt(cause: Interrupt) -> Observation {
    Observation::Interrupt { cause, partial: Vec::new(), outcomes: Vec::new() }
}

pub(in crate::agent) fn start(spec: RunSpec) -> Machine {
    started(spec).0
}

fn started(spec: RunSpec) -> (Machine, Transition) {
    let mut machine = Machine::new(spec, 0, Vec::new()).unwrap();
    assert_eq!(machine.step(), Step::Start);
    let transition = machine.observe(Observation::Start, &Tools).unwrap();
    (machine, transition)
}

fn kinds(transition: &Transition) -> Vec<&'static str> {
    transition.events.iter().map(|event| event.kind().as_str()).collect()
}

fn running(machine: &Machine) -> Vec<String> {
    match machine.step() {
        Step::RunTools(calls) => calls.into_iter().map(|call| call.id).collect(),
        Step::Start | Step::CallModel(_) | Step::Wait | Step::Resume | Step::Finish(_) => Vec::new(),
    }
}

fn ending(machine: &Machine) -> (RunStatus, Option<String>) {
    match machine.step() {
        Step::Finish(End::Completed { answer, .. }) => (RunStatus::Completed, Some(answer)),
        Step::Finish(End::Stopped { status, partial, .. }) => (RunStatus::Stopped(status), partial),
        other => panic!("not finished: {other:?}"),
    }
}

#[derive(Debug, PartialEq)]
enum RunStatus {
    Completed,
    Stopped(EndStatus),
}

/// The transcript after the input, as role and text.
fn said(machine: &Machine) -> Vec<Value> {
    machine.transcript().messages().skip(1).map(|message| serde_json::to_value(message.as_ref()).unwrap()).collect()
}

#[test]
fn an_answer_ends_the_run() {
    let (mut machine, transition) = started(spec(Limits::default()));
    assert_eq!(kinds(&transition), ["run_start", "model_start"]);
    let transition = machine.observe(turn("hello", Vec::new()), &Tools).unwrap();
    assert_eq!(kinds(&transition), ["model_end", "message"]);
    assert_eq!(ending(&machine), (RunStatus::Completed, Some("hello".into())));
    assert!(machine.observe(turn("again", Vec::new()), &Tools).is_err());
}

#[test]
fn a_run_cancelled_before_it_started_never_started() {
    let mut machine = Machine::new(spec(Limits::default()), 0, Vec::new()).unwrap();
    assert_eq!(kinds(&machine.observe(interrupt(Interrupt::Cancel), &Tools).unwrap()), ["cancel_requested"]);
    assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::Aborted), None));
    assert!(machine.observe(Observation::Start, &Tools).is_err());
}

#[test]
fn neighbouring_reads_overlap_and_writes_run_alone() {
    let mut machine = start(spec(Limits::default()));
    let batch = vec![
        call("r1", "read", r#"{"n":1}"#),
        call("r2", "read", r#"{"n":2}"#),
        call("w1", "write", "{}"),
        call("r3", "read", r#"{"n":3}"#),
    ];
    let transition = machine.observe(turn("let me see", batch), &Tools).unwrap();
    assert_eq!(kinds(&transition), ["model_end", "message", "tool_start", "tool_start"]);
    assert_eq!(running(&machine), ["r1", "r2"]);
    assert_eq!(kinds(&machine.observe(outcomes(vec![done("r2", "two")]), &Tools).unwrap()), ["tool_end"]);
    assert_eq!(running(&machine), ["r1"]);
    // The start of what follows is recorded with the outcome that makes way for it.
    let transition = machine.observe(outcomes(vec![done("r1", "one")]), &Tools).unwrap();
    assert_eq!(kinds(&transition), ["tool_end", "tool_start"]);
    assert_eq!(running(&machine), ["w1"]);
    machine.observe(outcomes(vec![done("w1", "ok")]), &Tools).unwrap();
    let transition = machine.observe(outcomes(vec![done("r3", "three")]), &Tools).unwrap();
    assert_eq!(kinds(&transition), ["tool_end", "model_start"]);
    let Step::CallModel(next) = machine.step() else { panic!() };
    assert_eq!((next.step, next.attempt, next.messages.len()), (2, 1, 6));
}

#[test]
fn parallel_never_runs_one_call_at_a_time() {
    let mut machine = start(RunSpec { parallel_tools: ParallelTools::Never, ..spec(Limits::default()) });
    let batch = vec![call("a", "read", "{}"), call("b", "look", "{}")];
    machine.observe(turn("", batch), &Tools).unwrap();
    assert_eq!(running(&machine), ["a"]);
}

#[test]
fn unknown_tools_and_bad_arguments_are_answered_and_use_up_the_budget() {
    let mut machine = start(spec(Limits { max_tool_calls: 3, ..Limits::default() }));
    let batch = vec![call("a", "nope", "{}"), call("b", "read", "\"Oslo\""), call("c", "read", "{}")];
    let transition = machine.observe(turn("", batch), &Tools).unwrap();
    assert_eq!(kinds(&transition), ["model_end", "message", "tool_end", "tool_end", "tool_start"]);
    machine.observe(outcomes(vec![done("c", "fine")]), &Tools).unwrap();
    assert_eq!(machine.state().tool_calls, 3);
    let results: Vec<_> = said(&machine)[1..].iter().map(|m| (m["call_id"].clone(), m["outcome"].clone())).collect();
    assert_eq!(results, [(json!("a"), json!("error")), (json!("b"), json!("error")), (json!("c"), json!("result"))]);
    machine.observe(turn("more", vec![call("d", "look", "{}")]), &Tools).unwrap();
    assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::ToolLimit), Some("more".into())));
    assert_eq!(said(&machine).len(), 4, "the refused batch is not recorded");
}

#[test]
fn a_cut_off_response_runs_none_of_its_calls() {
    let mut machine = start(spec(Limits::default()));
    let turn = ModelTurn {
        content: Vec::new(),
        tool_calls: vec![call("a", "write", r#"{"path":"a"}"#), call("b", "write", r#"{"path":"b","content":"li"#)],
        finish: FinishReason::Length,
        usage: None,
    };
    let transition = machine.observe(Observation::ModelTurn { turn, duration_ms: 0 }, &Tools).unwrap();
    assert_eq!(kinds(&transition), ["model_end", "message", "tool_end", "tool_end", "model_start"]);
    assert!(said(&machine)[1..].iter().all(|message| message["outcome"] == "refused"));
}

#[test]
fn a_broken_envelope_is_a_model_error_without_a_trace() {
    for calls in [
        vec![call("", "read", "{}")],
        vec![call("a", "", "{}")],
        vec![call("a", "read", "{}"), call("a", "write", "{}")],
        Vec::new(),
    ] {
        let mut machine = start(spec(Limits::default()));
        let transition = machine.observe(turn("", calls), &Tools).unwrap();
        assert_eq!(kinds(&transition), ["model_error"]);
        assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::ModelError), None));
        assert_eq!(said(&machine), Vec::<Value>::new());
        assert_eq!(machine.state().steps, 0);
    }
}

#[test]
fn usage_that_overflows_is_a_model_error() {
    let mut machine = start(spec(Limits { max_tokens: u64::MAX, ..Limits::default() }));
    let usage = Some(TokenUsage { input_tokens: u64::MAX, ..TokenUsage::default() });
    let Observation::ModelTurn { turn, .. } = turn("", vec![call("a", "nope", "{}")]) else { panic!() };
    let turn = ModelTurn { usage, ..turn };
    machine.observe(Observation::ModelTurn { turn: turn.clone(), duration_ms: 0 }, &Tools).unwrap();
    if let Step::CallModel(_) = machine.step() {
        machine.observe(Observation::ModelTurn { turn, duration_ms: 0 }, &Tools).unwrap();
        assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::ModelError));
    } else {
        assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::TokenLimit));
    }
}

/// One round of one call with its result.
fn round(machine: &mut Machine, id: &str, name: &str, raw: &str) {
    machine.observe(turn("", vec![call(id, name, raw)]), &Tools).unwrap();
    if running(machine) == [id] {
        machine.observe(outcomes(vec![done(id, &format!("result of {id}"))]), &Tools).unwrap();
    }
}

#[test]
fn the_same_round_twice_is_warned_of_and_the_next_repeat_ends_the_run() {
    let mut machine = start(spec(Limits::default()));
    round(&mut machine, "a", "read", r#"{"x":1,"y":2}"#);
    round(&mut machine, "b", "read", r#"{ "y": 2, "x": 1 }"#);
    let last = said(&machine).pop().unwrap();
    assert_eq!((last["outcome"].clone(), last["is_error"].clone()), (json!("refused"), json!(true)));
    assert!(last["content"].as_str().unwrap().ends_with("The earlier result was:\nresult of a"), "{last}");
    assert_eq!(machine.state().tool_calls, 2);
    round(&mut machine, "c", "look", "{}");
    round(&mut machine, "d", "look", "{}");
    assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::RepeatLimit));
    assert_eq!(said(&machine).len(), 6, "the repeat that ended the run is not recorded");
}

#[test]
fn one_call_four_times_in_a_run_is_a_repeat() {
    let mut machine = start(spec(Limits { max_steps: 20, ..Limits::default() }));
    for (id, other) in [("a", "1"), ("b", "2"), ("c", "3")] {
        round(&mut machine, id, "read", "{}");
        round(&mut machine, &format!("{id}_"), "look", &format!("{{\"n\":{other}}}"));
    }
    round(&mut machine, "d", "read", "{}");
    assert_eq!(said(&machine).pop().unwrap()["outcome"], "refused");
}

#[test]
fn stop_ends_at_the_second_round_and_allow_and_pollable_never() {
    let mut machine = start(RunSpec { on_repeat: OnRepeat::Stop, ..spec(Limits::default()) });
    round(&mut machine, "a", "nope", "{bad");
    round(&mut machine, "b", "nope", "{bad");
    assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::RepeatLimit));

    for (on_repeat, name) in [(OnRepeat::Allow, "read"), (OnRepeat::Stop, "poll")] {
        let mut machine = start(RunSpec { on_repeat, ..spec(Limits::default()) });
        for id in ["a", "b", "c", "d", "e", "f"] {
            round(&mut machine, id, name, "{}");
            assert_eq!(said(&machine).pop().unwrap()["outcome"], "result");
        }
    }
}

#[test]
fn steps_end_after_the_last_batch_has_run() {
    let mut machine = start(spec(Limits { max_steps: 2, ..Limits::default() }));
    round(&mut machine, "a", "read", "{}");
    machine.observe(turn("one more", vec![call("b", "write", "{}")]), &Tools).unwrap();
    assert_eq!(running(&machine), ["b"]);
    machine.observe(outcomes(vec![done("b", "ok")]), &Tools).unwrap();
    assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::StepLimit), Some("one more".into())));
}

#[test]
fn tokens_are_checked_before_each_call_with_the_estimate_of_the_next_request() {
    let usage = Some(TokenUsage { input_tokens: 400, output_tokens: 100, ..TokenUsage::default() });
    for (max_tokens, may_go_on) in [(500, false), (700, true)] {
        let mut machine = start(spec(Limits { max_tokens, ..Limits::default() }));
        let Observation::ModelTurn { turn, .. } = turn("", vec![call("a", "nope", "{}")]) else { panic!() };
        let turn = ModelTurn { usage, ..turn };
        let transition = machine.observe(Observation::ModelTurn { turn, duration_ms: 0 }, &Tools).unwrap();
        assert_eq!(matches!(machine.step(), Step::CallModel(_)), may_go_on);
        assert_eq!(kinds(&transition).contains(&"model_start"), may_go_on);
    }
    let mut machine = start(spec(Limits { max_tokens: 3, ..Limits::default() }));
    assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::TokenLimit));
    assert!(machine.observe(interrupt(Interrupt::Cancel), &Tools).is_err());
}

#[test]
fn a_limit_is_warned_of_once() {
    let mut machine = start(spec(Limits { max_tool_calls: 5, ..Limits::default() }));
    let mut warnings = 0;
    for n in 0..5 {
        let observed = machine.observe(turn("", vec![call("x", "nope", &format!("{{\"n\":{n}}}"))]), &Tools).unwrap();
        warnings += kinds(&observed).iter().filter(|kind| **kind == "limit_warning").count();
        assert_eq!(warnings, usize::from(n >= 3));
    }
}

#[test]
fn a_retry_is_recorded_and_replaces_the_attempt() {
    let mut machine = start(spec(Limits::default()));
    let failure = ModelFailure::new(FailureClass::Unavailable, "503");
    let transition = machine
        .observe(Observation::ModelRetry { failure: failure.clone(), partial: Vec::new(), delay_ms: 500 }, &Tools)
        .unwrap();
    assert_eq!(kinds(&transition), ["model_retry"]);
    let Step::CallModel(next) = machine.step() else { panic!() };
    assert_eq!((next.step, next.attempt), (1, 2));
    let failed =
        Observation::ModelFailed { failure, duration_ms: 3, partial: vec![Part::Text { text: "half an ans".into() }] };
    let transition = machine.observe(failed, &Tools).unwrap();
    assert_eq!(kinds(&transition), ["model_error", "message"]);
    assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::ModelError), Some("half an ans".into())));
    assert_eq!(
        said(&machine),
        [json!({"role": "assistant", "content": [{"type": "text", "text": "half an ans"}], "incomplete": true})]
    );
}

#[test]
fn an_attempt_that_was_cut_off_is_paid_for() {
    let mut machine = start(spec(Limits { max_tokens: 100, ..Limits::default() }));
    let mut attempts = 1;
    while let Step::CallModel(call) = machine.step() {
        assert_eq!(call.attempt, attempts);
        attempts += 1;
        let failure = ModelFailure::new(FailureClass::Truncated, "cut");
        let partial = vec![Part::Text { text: "x".repeat(100) }];
        machine.observe(Observation::ModelRetry { failure, partial, delay_ms: 1 }, &Tools).unwrap();
    }
    // 6 tokens of request and 25 of response each.
    assert_eq!((ending(&machine).0, attempts), (RunStatus::Stopped(EndStatus::TokenLimit), 5));
}

#[test]
fn an_interrupted_batch_keeps_real_results_and_tells_the_truth_about_the_rest() {
    for one_finished in [true, false] {
        let mut machine = start(spec(Limits::default()));
        let batch = vec![call("a", "read", "{}"), call("b", "look", "{}"), call("c", "write", "{}")];
        machine.observe(turn("", batch), &Tools).unwrap();
        let known = if one_finished { vec![done("a", "real")] } else { Vec::new() };
        let cancel = Observation::Interrupt { cause: Interrupt::Cancel, partial: Vec::new(), outcomes: known };
        let transition = machine.observe(cancel, &Tools).unwrap();
        assert_eq!(kinds(&transition), ["cancel_requested", "tool_end", "tool_end", "tool_end"]);
        let results: Vec<_> = said(&machine)[1..]
            .iter()
            .map(|message| (message["outcome"].as_str().unwrap().to_owned(), message["content"].clone()))
            .collect();
        assert_eq!(results[0].0, if one_finished { "result" } else { "aborted" });
        assert!(results[1].1.as_str().unwrap().contains("may have had"), "{results:?}");
        assert!(results[2].1.as_str().unwrap().contains("before this call was started"), "{results:?}");
        assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::Aborted));
    }
}

#[test]
fn a_call_that_was_running_when_its_process_died_has_an_unknown_outcome() {
    let mut machine = start(spec(Limits::default()));
    machine.observe(turn("", vec![call("a", "write", "{}"), call("b", "write", "{\"n\":1}")]), &Tools).unwrap();
    let error = RunError { code: "process_died".into(), message: "the process died".into(), retryable: true };
    machine.observe(interrupt(Interrupt::WorkerLost(error)), &Tools).unwrap();
    let kinds: Vec<_> = said(&machine)[1..].iter().map(|message| message["outcome"].clone()).collect();
    assert_eq!(kinds, ["outcome_unknown", "aborted"]);
    assert_eq!(ending(&machine).0, RunStatus::Stopped(EndStatus::InternalError));
}

#[test]
fn outcomes_nobody_waits_for_are_refused() {
    let mut machine = start(spec(Limits::default()));
    assert!(machine.observe(outcomes(vec![done("a", "x")]), &Tools).is_err());
    machine.observe(turn("", vec![call("a", "read", "{}"), call("w", "write", "{}")]), &Tools).unwrap();
    for id in ["w", "z"] {
        assert_eq!(
            machine.observe(outcomes(vec![done(id, "x")]), &Tools),
            Err(UnexpectedObservation::Outcome(id.into()))
        );
    }
    machine.observe(outcomes(vec![done("a", "x")]), &Tools).unwrap();
    assert!(machine.observe(outcomes(vec![done("a", "late")]), &Tools).is_err());
}

#[test]
fn long_results_are_cut_in_the_middle_and_stored_once() {
    let mut machine = start(spec(Limits::default()));
    machine.observe(turn("", vec![call("a", "read", "{}")]), &Tools).unwrap();
    let long = format!("{}ERROR: real cause", "x".repeat(300 * 1024));
    let transition = machine.observe(outcomes(vec![done("a", &long)]), &Tools).unwrap();
    let EventBody::ToolEnd { content, .. } = &transition.events[0] else { panic!() };
    assert_eq!(content.chars().count(), 8_000);
    assert!(content.ends_with("ERROR: real cause"));
    assert_eq!(said(&machine)[1]["content"], json!(content));
}

/// Budgets 0–8 against batches 0–12: an admitted batch runs whole, a refused one leaves no trace.
#[test]
fn seeded_budget_batches() {
    let mut checked = 0;
    for seed in 0_u32..150 {
        let (budget, size) = (seed % 9, (seed * 7 + seed / 9) % 13);
        let mut machine = start(spec(Limits { max_tool_calls: budget, ..Limits::default() }));
        let batch: Vec<_> = (0..size).map(|n| call(&format!("c{n}"), "write", &format!("{{\"n\":{n}}}"))).collect();
        machine.observe(turn("text", batch), &Tools).unwrap();
        let mut ran = 0;
        while let Step::RunTools(calls) = machine.step() {
            assert_eq!(calls.len(), 1, "side effects run one after the other");
            ran += 1;
            machine.observe(outcomes(vec![done(&calls[0].id, "ok")]), &Tools).unwrap();
        }
        match (size, size <= budget) {
            (0, _) => assert_eq!(ending(&machine), (RunStatus::Completed, Some("text".into()))),
            (_, true) => {
                assert_eq!((ran, machine.state().tool_calls), (size, size));
                assert!(matches!(machine.step(), Step::CallModel(_)));
            }
            (_, false) => {
                assert_eq!((ran, machine.state().tool_calls), (0, 0));
                assert_eq!(ending(&machine), (RunStatus::Stopped(EndStatus::ToolLimit), Some("text".into())));
                assert_eq!(said(&machine), Vec::<Value>::new());
            }
        }
        checked += 1;
    }
    assert_eq!(checked, 150);
}

/// Sixty failing calls of every kind: each is answered as an error the model reads, and the run goes on.
#[test]
fn seeded_tool_failures() {
    for seed in 0_u32..60 {
        let mut machine = start(spec(Limits::default()));
        let kind = [OutcomeKind::Error, OutcomeKind::TimedOut, OutcomeKind::OutcomeUnknown][(seed % 3) as usize];
        let position = seed as usize % 4;
        let batch: Vec<_> = (0..4).map(|n| call(&format!("c{n}"), "write", &format!("{{\"n\":{n}}}"))).collect();
        machine.observe(turn("", batch), &Tools).unwrap();
        for n in 0..4 {
            let kind = if n == position { kind } else { OutcomeKind::Result };
            let outcome = ToolOutcome { kind, ..done(&format!("c{n}"), &format!("seed {seed}")) };
            machine.observe(outcomes(vec![outcome]), &Tools).unwrap();
        }
        let errors: Vec<_> = said(&machine)[1..].iter().map(|message| message["is_error"].clone()).collect();
        assert_eq!(errors, (0..4).map(|n| json!(n == position)).collect::<Vec<_>>());
        machine.observe(turn("done", Vec::new()), &Tools).unwrap();
        assert_eq!(ending(&machine), (RunStatus::Completed, Some("done".into())));
    }
}

/// What a random world does next.
#[derive(Clone, Debug)]
enum Act {
    Say(String),
    Call(Vec<(u8, u8)>, bool),
    Retry,
    Fail,
    /// Answer the running call at this position (modulo), with this kind.
    Answer(usize, u8),
    Cancel,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => "[a-z]{0,5}".prop_map(Act::Say),
        8 => (prop::collection::vec((0_u8..6, 0_u8..3), 1..6), prop::bool::weighted(0.1))
            .prop_map(|(calls, cut)| Act::Call(calls, cut)),
        1 => Just(Act::Retry),
        1 => Just(Act::Fail),
        12 => (any::<usize>(), 0_u8..4).prop_map(|(at, kind)| Act::Answer(at, kind)),
        1 => Just(Act::Cancel),
    ]
}

fn observation(act: &Act, step: &Step, serial: usize) -> Option<Observation> {
    match (act, step) {
        (Act::Say(text), Step::CallModel(_)) => Some(turn(text, Vec::new())),
        (Act::Call(calls, cut), Step::CallModel(_)) => {
            let calls = calls
                .iter()
                .enumerate()
                .map(|(n, (name, argument))| {
                    let name = ["read", "look", "poll", "write", "nope", ""][usize::from(*name)];
                    let raw = [r#"{"a":1}"#, r#"{"a":2}"#, "[broken"][usize::from(*argument)];
                    call(&format!("c{serial}_{n}"), name, raw)
                })
                .collect();
            let mut observed = turn("thinking", calls);
            if let Observation::ModelTurn { turn, .. } = &mut observed
                && *cut
            {
                turn.finish = FinishReason::Length;
            }
            Some(observed)
        }
        (Act::Retry, Step::CallModel(_)) => Some(Observation::ModelRetry {
            failure: ModelFailure::new(FailureClass::Unavailable, "x"),
            partial: Vec::new(),
            delay_ms: 1,
        }),
        (Act::Fail, Step::CallModel(_)) => Some(Observation::ModelFailed {
            failure: ModelFailure::new(FailureClass::Protocol, "x"),
            duration_ms: 1,
            partial: vec![Part::Text { text: "part".into() }],
        }),
        (Act::Answer(at, kind), Step::RunTools(calls)) => {
            let kind = [OutcomeKind::Result, OutcomeKind::Error, OutcomeKind::TimedOut, OutcomeKind::Result]
                [usize::from(*kind)];
            let id = &calls[at % calls.len()].id;
            Some(outcomes(vec![ToolOutcome { kind, ..done(id, "r") }]))
        }
        (Act::Cancel, Step::CallModel(_) | Step::RunTools(_)) => Some(interrupt(Interrupt::Cancel)),
        _ => None,
    }
}

proptest! {
    #[test]
    fn any_world_leaves_a_whole_transcript_and_stays_within_budget(
        acts in prop::collection::vec(act(), 0..60),
        (max_steps, max_tool_calls, window) in (1_u32..8, 0_u32..16, 20_u64..400),
        on_repeat in prop::sample::select(vec![OnRepeat::Warn, OnRepeat::Stop, OnRepeat::Allow]),
        parallel_tools in prop::sample::select(vec![ParallelTools::ReadOnly, ParallelTools::Never]),
    ) {
        let limits = Limits { max_steps, max_tool_calls, ..Limits::default() };
        let mut spec = RunSpec { on_repeat, parallel_tools, ..spec(limits) };
        spec.context.max_tokens = window;
        let (mut machine, transition) = started(spec.clone());
        let mut log = transition.events;
        for (serial, act) in acts.iter().enumerate() {
            let step = machine.step();
            let Some(observed) = observation(act, &step, serial) else { continue };
            log.extend(machine.observe(observed, &Tools).unwrap().events);

            // Another process would go on exactly here.
            let state = serde_json::from_str(&serde_json::to_string(machine.state()).unwrap()).unwrap();
            let messages = machine.transcript().messages().skip(1).map(|m| (**m).clone()).collect();
            let restored = Machine::restore(spec.clone(), 0, Vec::new(), state, messages, &Tools).unwrap();
            prop_assert_eq!(&restored, &machine);

            if let Step::CallModel(next) = machine.step() {
                prop_assert!(next.step <= max_steps);
                let sent = Transcript::from_messages(next.messages.iter().map(|m| (**m).clone()));
                prop_assert!(sent.is_ok(), "{:?}", sent);
                let mut sent = sent.unwrap();
                prop_assert_eq!(sent.push(Message::user("x")), Ok(()), "every call is answered");
            }
        }
        prop_assert!(machine.state().steps <= max_steps);
        prop_assert!(machine.state().tool_calls <= max_tool_calls);
        if let Step::RunTools(calls) = machine.step() {
            prop_assert!(!calls.is_empty());
        }
        if let Step::CallModel(_) | Step::RunTools(_) = machine.step() {
            log.extend(machine.observe(interrupt(Interrupt::Deadline), &Tools).unwrap().events);
        }
        // Exactly one outcome per recorded call, one start at most, and none after its outcome.
        let mut open: Vec<&str> = Vec::new();
        let mut started: Vec<&str> = Vec::new();
        for event in &log {
            match event {
                EventBody::Message { message: Message::Assistant(message), .. } => {
                    prop_assert!(open.is_empty());
                    open.extend(message.tool_calls.iter().map(|call| call.id.as_str()));
                }
                EventBody::ToolStart { call_id, .. } => {
                    prop_assert!(open.contains(&call_id.as_str()) && !started.contains(&call_id.as_str()));
                    started.push(call_id);
                }
                EventBody::ToolEnd { call_id, .. } => {
                    let at = open.iter().position(|id| id == call_id);
                    prop_assert!(at.is_some());
                    open.remove(at.unwrap());
                }
                _ => {}
            }
        }
        prop_assert!(open.is_empty());
        prop_assert!(matches!(machine.step(), Step::Finish(_)));
    }
}
