//! What the parts that every step goes through allocate: the same at the two-hundredth round as at the tenth, since
//! each message is encoded and counted once. Figures of time are in `benches/`; these do not depend on the machine.

use std::collections::BTreeMap;
use std::sync::Arc;

use allocation_counter::measure;
use hames::agent::{Checked, Machine, Observation, Toolbox, Transcript, select};
use hames::domain::{
    Arguments, AssistantMessage, ContextPolicy, ContextStrategy, Delta, Effect, ErrorMark, FinishReason, Gate, Limits,
    Message, ModelRequest, ModelTurn, OnRepeat, OnUnknown, OutcomeKind, ParallelTools, RunSpec, ToolCall, ToolMessage,
    ToolOutcome,
};
use hames::event::{Activity, Bus};
use hames::provider::DeltaSink;
use hames::provider::accumulator::Accumulator;
use hames::provider::client::Reader;
use hames::provider::conversation::Conversation;
use hames::provider::names::NameMap;
use hames::provider::openai_chat::{ChatDecoder, ChatEncoder, Dialect, LimitField, UsageRequest, body};
use serde_json::json;

use crate::store::sample::{id, running};

/// Rounds of which the cost is compared.
const ROUNDS: [usize; 2] = [10, 200];

/// Knows every tool.
struct Tools;

impl Toolbox for Tools {
    fn check(&self, _call: &ToolCall) -> Checked {
        Checked::Ready { effect: Effect::ReadOnly, pollable: false, gate: Gate::Open }
    }

    fn on_unknown(&self, _: &ToolCall) -> OnUnknown {
        OnUnknown::Tell
    }
}

fn call(round: usize) -> ToolCall {
    let arguments = Arguments::parse(&json!({"path": format!("f{round:03}.txt")}).to_string());
    ToolCall { id: format!("call_{round:03}"), name: "read_file".into(), arguments }
}

fn conversation(rounds: usize) -> Vec<Message> {
    let round = |round: usize| {
        let asked = AssistantMessage { content: Vec::new(), tool_calls: vec![call(round)], incomplete: false };
        let answered = ToolMessage {
            call_id: format!("call_{round:03}"),
            name: "read_file".into(),
            content: "some text ".repeat(20),
            outcome: OutcomeKind::Result,
            is_error: ErrorMark,
        };
        [Message::Assistant(asked), Message::Tool(answered)]
    };
    std::iter::once(Message::user("Read all of them.")).chain((1..=rounds).flat_map(round)).collect()
}

#[test]
fn a_request_costs_what_is_new_in_it() {
    let dialect = Dialect { reasoning_field: None, usage: UsageRequest::Asked, limit: LimitField::MaxTokens };
    let names = NameMap::new(["read_file"]);
    let encoder = ChatEncoder { names: &names, dialect: &dialect };
    let [early, late] = ROUNDS.map(|rounds| {
        let messages: Vec<_> = conversation(rounds).into_iter().map(Arc::new).collect();
        let request = |messages: &[Arc<Message>]| ModelRequest {
            run: id(1),
            step: 1,
            attempt: 1,
            model: "m".into(),
            instructions: Some("Work.".into()),
            messages: messages.to_vec(),
            tools: Arc::new([]),
            max_output_tokens: None,
            trace: None,
        };
        let (before, now) = (request(&messages[..messages.len() - 2]), request(&messages));
        let mut conversation = Conversation::default();
        conversation.bring_up_to(&before, 0, &encoder).unwrap();
        measure(|| {
            conversation.bring_up_to(&now, 0, &encoder).unwrap();
            drop(body(&now, &conversation, &dialect).unwrap());
        })
    });
    // A list of twenty times the length grows a few times more often.
    assert!(late.count_total <= early.count_total + 8, "{early:?} {late:?}");
    assert!(early.count_total < 60, "{early:?}");
}

#[test]
fn a_round_of_the_machine_costs_the_same_at_any_length() {
    let spec = RunSpec {
        agent: "a".into(),
        input: vec![Message::user("Read all of them.")],
        instructions: None,
        model: "p/m".parse().unwrap(),
        max_output_tokens: None,
        tools: Vec::new(),
        client_tools: Vec::new(),
        approval: Vec::new(),
        limits: Limits { max_steps: 1_000, max_tool_calls: 1_000, max_tokens: u64::MAX, ..Limits::default() },
        context: ContextPolicy {
            strategy: ContextStrategy::Trim,
            max_tokens: 10_000_000,
            max_tool_result_chars: 8_000,
        },
        on_repeat: OnRepeat::Warn,
        repeat_limit: 4,
        parallel_tools: ParallelTools::ReadOnly,
        workspace: None,
        metadata: BTreeMap::new(),
        trace: None,
    };
    let mut machine = Machine::new(spec, 100, Vec::new()).unwrap();
    machine.observe(Observation::Start, &Tools).unwrap();
    let costs: Vec<_> = (1..=ROUNDS[1])
        .map(|round| {
            let tool_calls = vec![call(round)];
            let turn = ModelTurn { content: Vec::new(), tool_calls, finish: FinishReason::ToolCalls, usage: None };
            let outcome = ToolOutcome {
                call_id: format!("call_{round:03}"),
                kind: OutcomeKind::Result,
                content: "some text ".repeat(20),
                duration_ms: 1,
            };
            measure(|| {
                machine.observe(Observation::ModelTurn { turn, duration_ms: 1 }, &Tools).unwrap();
                machine.observe(Observation::ToolOutcomes { outcomes: vec![outcome], fatal: None }, &Tools).unwrap();
                drop(serde_json::to_string(machine.state()).unwrap());
            })
            .count_total
        })
        .collect();
    // Lists that double now and then do so in single rounds.
    let of = |rounds: std::ops::Range<usize>| costs[rounds].iter().min().copied().unwrap();
    assert_eq!(of(5..15), of(190..200), "{costs:?}");
}

/// Takes fragments and keeps none.
struct Discard;

impl DeltaSink for Discard {
    fn delta(&mut self, _: Delta<'_>) {}
}

/// Allocations of reading 100 events more like these, which come in a chunk of their own each.
fn allocations_of_events(begin: &str, event: &str) -> u64 {
    let accumulator = Accumulator::new(1, NameMap::default());
    let mut reader = Reader::new(Some("text/event-stream"), ChatDecoder::default(), accumulator);
    reader.push(format!("data: {begin}\n\ndata: {event}\n\n").as_bytes(), &mut Discard).unwrap();
    let event = format!("data: {event}\n\n");
    measure(|| {
        for _ in 0..100 {
            reader.push(event.as_bytes(), &mut Discard).unwrap();
        }
    })
    .count_total
}

#[test]
fn an_event_of_a_response_costs_a_few_allocations() {
    let chunk = |delta: serde_json::Value| {
        json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": null,
            "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}], "usage": null})
        .to_string()
    };
    let call = |call: serde_json::Value| chunk(json!({"tool_calls": [call]}));
    let begin = call(json!({"index": 0, "id": "a", "type": "function", "function": {"name": "t", "arguments": "{"}}));
    let more = call(json!({"index": 0, "function": {"arguments": "[1, 2], "}}));
    // Each event allocates its data and the text it brings; a piece of a call also the list of pieces. What comes
    // together grows a few times more.
    for (event, each) in [(chunk(json!({"content": "word "})), 2), (chunk(json!({"role": "assistant"})), 1), (more, 3)]
    {
        let cost = allocations_of_events(&begin, &event);
        assert!((each * 100..each * 100 + 10).contains(&cost), "{cost}: {event}");
    }
}

#[test]
fn a_context_is_selected_without_an_allocation() {
    let transcript = Transcript::from_messages(conversation(500)).unwrap();
    assert_eq!(measure(|| drop(select(&transcript, 100, 4_000))).count_total, 0);
}

#[test]
fn deltas_that_nobody_watches_cost_no_allocation_each() {
    let bus = Bus::new();
    let run = running(1).run;
    let live = bus.live(run.id);
    live.publish(&[], &run, Activity::Writing { step: 1, attempt: 1 });
    let cost = measure(|| (0..10_000).for_each(|_| live.delta(Delta::Text("word "))));
    assert!(cost.count_total < 50, "{cost:?}");
}
