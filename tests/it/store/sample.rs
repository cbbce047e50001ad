//! Runs and events to store.

use std::collections::BTreeMap;

use hames::domain::{
    Arguments, AssistantMessage, ContextPolicy, ContextStrategy, EncodedBody, End, EndStatus, EventBody, FinishReason,
    Generation, Limits, Message, OnBusy, OnRepeat, OutcomeKind, ParallelTools, Part, Pause, PendingCall, PendingKind,
    Run, RunError, RunId, RunSpec, RunStatus, Seq, TenantId, Timestamp, ToolCall, ToolMessage, Usage,
};
use hames::store::{KeyUse, NewRun, StepCommit};
use uuid::Uuid;

/// The id of the `number`-th run; ids sort by number.
pub(crate) fn id(number: u32) -> RunId {
    RunId::new(Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + u128::from(number)))
}

pub(crate) fn tenant() -> TenantId {
    TenantId::new("acme")
}

pub(crate) const fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(1_796_055_430_000 + millis)
}

pub(crate) fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// A queued run of tenant `acme` with one `run_queued` event.
pub(crate) fn queued(number: u32) -> NewRun {
    let model = "local/hub/some-model".parse().unwrap();
    let limits = Limits { max_tokens: u64::MAX, timeout_ms: 60_000, ..Limits::default() };
    let metadata = labels(&[("team", "blue")]);
    NewRun {
        run: Run {
            id: id(number),
            tenant: tenant(),
            generation: 0,
            status: RunStatus::Queued { paused: None },
            agent: "coder".to_owned(),
            model,
            thread: None,
            continues: None,
            limits,
            metadata: metadata.clone(),
            steps: 0,
            tool_calls: 0,
            usage: Usage::default(),
            created_at: at(i64::from(number)),
            cancel_requested_at: None,
            last_seq: 0,
            crashes: 0,
        },
        spec: RunSpec {
            agent: "coder".to_owned(),
            input: vec![Message::user(format!("task {number}"))],
            instructions: Some("Work.".to_owned()),
            model: "local/hub/some-model".parse().unwrap(),
            max_output_tokens: Some(512),
            tools: vec!["fs.read".parse().unwrap(), "run_command".parse().unwrap()],
            client_tools: Vec::new(),
            approval: Vec::new(),
            limits,
            context: ContextPolicy {
                strategy: ContextStrategy::Trim,
                max_tokens: 100_000,
                max_tool_result_chars: 8_000,
            },
            on_repeat: OnRepeat::Warn,
            repeat_limit: 4,
            parallel_tools: ParallelTools::ReadOnly,
            workspace: None,
            metadata,
            trace: Some(TRACE.parse().unwrap()),
        },
        state: None,
        events: vec![body(&EventBody::RunQueued {})],
        on_busy: OnBusy::Reject,
        key: None,
    }
}

/// The caller's place in a trace.
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A run that starts at once, with its first two events.
pub(crate) fn running(number: u32) -> NewRun {
    let mut new = queued(number);
    new.run.generation = 1;
    new.run.status = started(number);
    new.state = Some(r#"{"at":"start"}"#.to_owned());
    new.events.push(body(&EventBody::RunStart { agent: new.run.agent.clone(), model: new.run.model.clone() }));
    new
}

/// The status of [`running`].
pub(crate) fn started(number: u32) -> RunStatus {
    let started_at = at(i64::from(number));
    RunStatus::Running { started_at, deadline_at: started_at.plus(std::time::Duration::from_secs(60)) }
}

/// The first step of a running run of the given generation.
pub(crate) fn step(new: &NewRun, generation: Generation, events: Vec<EncodedBody>) -> StepCommit {
    StepCommit {
        run: new.run.id,
        generation,
        after: new.events.len() as u64,
        time: at(5_000),
        status: new.run.status.clone(),
        cancel_requested_at: None,
        steps: 1,
        tool_calls: 2,
        usage: Usage { input_tokens: u64::MAX, output_tokens: 7, model_calls: 1, ..Usage::default() },
        crashes: 0,
        inbox_read: 0,
        state: Some(r#"{"at":"step 1"}"#.to_owned()),
        events,
        key: None,
    }
}

/// A later step: the newest event before it has the number `after`.
pub(crate) fn later(new: &NewRun, generation: Generation, after: Seq, events: Vec<EncodedBody>) -> StepCommit {
    StepCommit { after, ..step(new, generation, events) }
}

/// A run that goes back to the queue after it was at work, with a second left.
pub(crate) fn parked() -> RunStatus {
    RunStatus::Queued { paused: Some(PAUSE) }
}

/// A run that waits for the result of call `a`.
pub(crate) fn waiting(until: i64) -> RunStatus {
    let call = PendingCall {
        call_id: "a".to_owned(),
        name: "t".to_owned(),
        arguments: Arguments::parse(r#"{"n":1}"#),
        kind: PendingKind::Client,
    };
    RunStatus::Waiting { paused: PAUSE, until: at(until), calls: vec![call] }
}

const PAUSE: Pause = Pause { started_at: at(1), left_ms: 1_000 };

/// The use of a key, for a request that is told by `fingerprint`.
pub(crate) fn key(name: &str, fingerprint: &str, now: i64) -> KeyUse {
    KeyUse { key: name.to_owned(), fingerprint: fingerprint.to_owned(), at: at(now) }
}

/// A queued run of a thread.
pub(crate) fn in_thread(number: u32, thread: &str, on_busy: OnBusy) -> NewRun {
    let mut new = queued(number);
    new.run.thread = Some(thread.to_owned());
    new.on_busy = on_busy;
    new
}

pub(crate) fn completed() -> RunStatus {
    RunStatus::Finished {
        started_at: Some(at(1)),
        deadline_at: Some(at(60_001)),
        finished_at: at(6_000),
        end: End::Completed { answer: "4\u{0}2 😀".to_owned(), finish_reason: FinishReason::Stop },
    }
}

/// Cancelled in the queue.
pub(crate) fn aborted() -> RunStatus {
    RunStatus::Finished {
        started_at: None,
        deadline_at: None,
        finished_at: at(7_000),
        end: End::Stopped {
            status: EndStatus::Aborted,
            partial: Some("so far".to_owned()),
            error: RunError { code: "cancelled".to_owned(), message: "on request".to_owned(), retryable: false },
        },
    }
}

pub(crate) fn body(body: &EventBody) -> EncodedBody {
    EncodedBody::new(body).unwrap()
}

/// A `model_start` event; the number tells them apart.
pub(crate) fn mark(step: u32) -> EncodedBody {
    body(&EventBody::ModelStart { step, attempt: 1 })
}

/// An assistant message that calls tool `t` once for each id.
pub(crate) fn asking(text: &str, ids: &[&str]) -> Message {
    let call = |id: &&str| ToolCall { id: (*id).into(), name: "t".into(), arguments: Arguments::parse(r#"{"n":1}"#) };
    Message::Assistant(AssistantMessage {
        content: vec![Part::Text { text: text.into() }],
        tool_calls: ids.iter().map(call).collect(),
        incomplete: false,
    })
}

pub(crate) fn said(message: Message) -> EncodedBody {
    body(&EventBody::Message { step: 1, message })
}

/// The end of a call, as an event.
pub(crate) fn ended(call_id: &str, content: &str) -> EncodedBody {
    body(&EventBody::ToolEnd {
        step: 1,
        call_id: call_id.into(),
        name: "t".into(),
        outcome: OutcomeKind::Result,
        is_error: hames::domain::ErrorMark,
        content: content.into(),
        duration_ms: 3,
    })
}

/// The end of a call, as its message.
pub(crate) fn result(call_id: &str, content: &str) -> Message {
    Message::Tool(ToolMessage {
        call_id: call_id.into(),
        name: "t".into(),
        content: content.into(),
        outcome: OutcomeKind::Result,
        is_error: hames::domain::ErrorMark,
    })
}
