//! The parts that every run goes through, each by itself, with what they allocate: `make bench-micro`.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot go on stops")]

use std::collections::BTreeMap;
use std::sync::Arc;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use hames::agent::{Checked, Machine, Observation, Toolbox, Transcript, select};
use hames::config::StoreConfig;
use hames::domain::{
    Arguments, AssistantMessage, ContextPolicy, ContextStrategy, Delta, Effect, EncodedBody, ErrorMark, Event,
    EventBody, FinishReason, Gate, Limits, Message, ModelRequest, ModelTurn, OnBusy, OnRepeat, OnUnknown, OutcomeKind,
    ParallelTools, Part, Run, RunId, RunSpec, RunStatus, TenantId, Timestamp, ToolCall, ToolMessage, ToolOutcome,
    ToolSpec, Usage,
};
use hames::event::{Activity, Bus};
use hames::provider::DeltaSink;
use hames::provider::accumulator::Accumulator;
use hames::provider::client::Reader;
use hames::provider::conversation::Conversation;
use hames::provider::names::NameMap;
use hames::provider::openai_chat::{ChatDecoder, ChatEncoder, Dialect, LimitField, UsageRequest, body};
use hames::store::{NewRun, StepCommit, Store};
use serde_json::json;
use uuid::Uuid;

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler<mimalloc::MiMalloc> = divan::AllocProfiler::new(mimalloc::MiMalloc);

fn main() {
    divan::main();
}

/// Takes fragments and keeps none.
struct Discard;

impl DeltaSink for Discard {
    fn delta(&mut self, delta: Delta<'_>) {
        divan::black_box(delta);
    }
}

/// Knows one tool.
struct Tools;

impl Toolbox for Tools {
    fn check(&self, _call: &ToolCall) -> Checked {
        Checked::Ready { effect: Effect::ReadOnly, pollable: false, gate: Gate::Open }
    }

    fn on_unknown(&self, _call: &ToolCall) -> OnUnknown {
        OnUnknown::Tell
    }
}

fn run_id(number: u128) -> RunId {
    RunId::new(Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + number))
}

fn spec() -> RunSpec {
    RunSpec {
        agent: "default".into(),
        input: vec![Message::user("Read all of them.")],
        instructions: Some("Work.".into()),
        model: "local/model".parse().unwrap(),
        max_output_tokens: None,
        tools: vec!["read_file".parse().unwrap()],
        client_tools: Vec::new(),
        approval: Vec::new(),
        limits: Limits { max_steps: 100_000, max_tool_calls: 100_000, max_tokens: u64::MAX, ..Limits::default() },
        context: ContextPolicy {
            strategy: ContextStrategy::Trim,
            max_tokens: 100_000_000,
            max_tool_result_chars: 8_000,
        },
        on_repeat: OnRepeat::Warn,
        repeat_limit: 4,
        parallel_tools: ParallelTools::ReadOnly,
        workspace: None,
        metadata: BTreeMap::new(),
        trace: None,
    }
}

fn call(round: usize) -> ToolCall {
    let arguments = Arguments::parse(&json!({"path": format!("f{round}.txt")}).to_string());
    ToolCall { id: format!("call_{round}"), name: "read_file".into(), arguments }
}

/// The messages of so many rounds of one call, after the input.
fn rounds(count: usize) -> Vec<Message> {
    let round = |round: usize| {
        let asked = AssistantMessage { content: Vec::new(), tool_calls: vec![call(round)], incomplete: false };
        let answered = ToolMessage {
            call_id: format!("call_{round}"),
            name: "read_file".into(),
            content: "some text ".repeat(20),
            outcome: OutcomeKind::Result,
            is_error: ErrorMark,
        };
        [Message::Assistant(asked), Message::Tool(answered)]
    };
    (0..count).flat_map(round).collect()
}

/// A response of a model as bytes: so many words in an event each.
fn stream(words: usize) -> String {
    let word =
        |_| format!("data: {}\n\n", json!({"id": "c", "choices": [{"index": 0, "delta": {"content": "word "}}]}));
    let end = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]});
    (0..words).map(word).collect::<String>() + &format!("data: {end}\n\ndata: [DONE]\n\n")
}

#[divan::bench(args = [10, 1_000])]
fn read_a_response(bencher: Bencher<'_, '_>, words: usize) {
    let bytes = stream(words);
    bencher.counter(BytesCount::of_str(&bytes)).bench(|| {
        let accumulator = Accumulator::new(1, NameMap::default());
        let mut reader = Reader::new(Some("text/event-stream"), ChatDecoder::default(), accumulator);
        reader.push(bytes.as_bytes(), &mut Discard).unwrap();
        reader.done(&mut Discard).unwrap()
    });
}

/// A whole round: a turn with a call, its outcome, and the state that is stored.
fn round(machine: &mut Machine, round: usize) -> String {
    let turn =
        ModelTurn { content: Vec::new(), tool_calls: vec![call(round)], finish: FinishReason::ToolCalls, usage: None };
    machine.observe(Observation::ModelTurn { turn, duration_ms: 1 }, &Tools).unwrap();
    let outcome = ToolOutcome {
        call_id: format!("call_{round}"),
        kind: OutcomeKind::Result,
        content: "some text ".repeat(20),
        duration_ms: 1,
    };
    machine.observe(Observation::ToolOutcomes { outcomes: vec![outcome], fatal: None }, &Tools).unwrap();
    serde_json::to_string(machine.state()).unwrap()
}

/// One round of a machine that has so many behind it.
#[divan::bench(args = [10, 200])]
fn machine_round(bencher: Bencher<'_, '_>, before: usize) {
    let mut machine = Machine::new(spec(), 100, Vec::new()).unwrap();
    machine.observe(Observation::Start, &Tools).unwrap();
    (1..=before).for_each(|number| drop(round(&mut machine, number)));
    bencher.with_inputs(|| machine.clone()).bench_values(|mut machine| (round(&mut machine, before + 1), machine));
}

#[divan::bench(args = [10, 200, 2_000])]
fn select_context(bencher: Bencher<'_, '_>, count: usize) {
    let messages = std::iter::once(Message::user("Read all of them.")).chain(rounds(count));
    let transcript = Transcript::from_messages(messages).unwrap();
    // Room for about fifty rounds.
    bencher.bench(|| select(&transcript, 100, 4_000).unwrap());
}

/// The request of the next round, whose earlier ones were sent before.
#[divan::bench(args = [10, 200])]
fn write_a_request(bencher: Bencher<'_, '_>, count: usize) {
    let dialect = Dialect { reasoning_field: None, usage: UsageRequest::Asked, limit: LimitField::MaxTokens };
    let tools: Arc<[ToolSpec]> = Arc::new([ToolSpec {
        name: "read_file".parse().unwrap(),
        description: "Reads a file.".into(),
        parameters: json!({"type": "object", "properties": {"path": {"type": "string"}}}),
    }]);
    let names = NameMap::new(["read_file"]);
    let encoder = ChatEncoder { names: &names, dialect: &dialect };
    let mut messages: Vec<Arc<Message>> = vec![Arc::new(Message::user("Read all of them."))];
    messages.extend(rounds(count).into_iter().map(Arc::new));
    let request = |messages: &[Arc<Message>]| ModelRequest {
        run: run_id(0),
        step: 1,
        attempt: 1,
        model: "model".into(),
        instructions: Some("Work.".into()),
        messages: messages.to_vec(),
        tools: Arc::clone(&tools),
        max_output_tokens: None,
        trace: None,
    };
    let (before, now) = (request(&messages[..messages.len() - 2]), request(&messages));
    bencher
        .with_inputs(|| {
            let mut conversation = Conversation::default();
            conversation.bring_up_to(&before, 0, &encoder).unwrap();
            conversation
        })
        .bench_values(|mut conversation| {
            conversation.bring_up_to(&now, 0, &encoder).unwrap();
            body(&now, &conversation, &dialect).unwrap()
        });
}

#[divan::bench]
fn encode_an_event(bencher: Bencher<'_, '_>) {
    let message = Message::Assistant(AssistantMessage {
        content: vec![Part::Text { text: "some text ".repeat(20) }],
        tool_calls: Vec::new(),
        incomplete: false,
    });
    let said: EventBody = EventBody::Message { step: 1, message };
    bencher.bench(|| {
        let body = EncodedBody::new(&said).unwrap();
        Event { run: run_id(0), seq: 7, time: Timestamp::from_millis(0), body }.json()
    });
}

fn run(number: u128) -> Run {
    Run {
        id: run_id(number),
        tenant: TenantId::local(),
        generation: 1,
        status: RunStatus::Running { started_at: Timestamp::from_millis(0), deadline_at: Timestamp::from_millis(1) },
        agent: "default".into(),
        model: "local/model".parse().unwrap(),
        thread: None,
        continues: None,
        limits: Limits::default(),
        metadata: BTreeMap::new(),
        steps: 0,
        tool_calls: 0,
        usage: Usage::default(),
        created_at: Timestamp::from_millis(0),
        cancel_requested_at: None,
        last_seq: 0,
        crashes: 0,
    }
}

/// A fragment of a response on its way into the shared state of a run that nobody watches.
#[divan::bench]
fn publish_a_delta(bencher: Bencher<'_, '_>) {
    let bus = Bus::new();
    bencher
        .counter(ItemsCount::new(100_usize))
        .with_inputs(|| {
            let live = bus.live(run_id(0));
            live.publish(&[], &run(0), Activity::Writing { step: 1, attempt: 1 });
            live
        })
        .bench_values(|live| {
            (0..100).for_each(|_| live.delta(Delta::Text("word ")));
            live
        });
}

/// One durable commit of as many runs at a time, every one flushed to the disk.
#[divan::bench(args = [1, 16, 64], sample_count = 50)]
fn commit_a_step(bencher: Bencher<'_, '_>, runs: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = format!("sqlite:{}", folder.path().join("bench.db").display());
    let store: Arc<dyn Store> = runtime
        .block_on(hames::store::open(
            &StoreConfig { url: url.into(), ..StoreConfig::default() },
            hames::store::WorkerId::new("bench".to_owned()),
            Arc::new(()),
        ))
        .unwrap();
    let create = |number: usize| {
        let new = NewRun {
            run: run(number as u128),
            spec: spec(),
            state: Some("{}".into()),
            events: Vec::new(),
            on_busy: OnBusy::Reject,
            key: None,
        };
        let store = Arc::clone(&store);
        async move { store.create_run(new).await.unwrap() }
    };
    runtime.block_on(futures_util::future::join_all((0..runs).map(create)));
    let events = || {
        let started: EventBody = EventBody::ModelStart { step: 1, attempt: 1 };
        vec![EncodedBody::new(&started).unwrap(); 3]
    };
    let mut after = 0;
    bencher.counter(ItemsCount::new(runs)).bench_local(|| {
        let known = after;
        let commits = (0..runs).map(|number| {
            let run = run(number as u128);
            let commit = StepCommit {
                run: run.id,
                generation: 1,
                after: known,
                time: Timestamp::from_millis(0),
                status: run.status,
                cancel_requested_at: None,
                steps: 1,
                tool_calls: 0,
                usage: Usage::default(),
                crashes: 0,
                inbox_read: 0,
                state: Some("{}".into()),
                events: events(),
                key: None,
            };
            let store = Arc::clone(&store);
            async move { store.commit_step(commit).await.unwrap() }
        });
        after += 3;
        runtime.block_on(futures_util::future::join_all(commits))
    });
    runtime.block_on(store.close());
}
