//! Tests of event streams from a reader's side: bytes are parsed as a browser does, and compared with the log.

use std::collections::BTreeMap;

use futures_util::{FutureExt, StreamExt};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::bus::{Activity, ExecutingCall};
use super::super::fake::{self, FakeStore};
use super::super::live::{MAX_DELTA_BYTES, MAX_TAIL_BYTES};
use super::super::message::MAX_MESSAGE_BYTES;
use super::*;
use crate::domain::{
    Arguments, AssistantMessage, Delta, Effect, EncodedBody, End, EventBody, FailureClass, FinishReason, Message, Part,
    RunStatus, RunView, Timestamp,
};

const RUN: RunId = RunId::new(uuid::Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_00ab));
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// A dispatched event of a stream, as WHATWG HTML defines dispatch.
#[derive(Clone, Debug, PartialEq)]
struct Frame {
    event: String,
    data: String,
    /// The id this very frame carried.
    id: Option<String>,
}

impl Frame {
    fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap()
    }
}

/// A parser by the letter of WHATWG HTML, "Interpreting an event stream", for LF-terminated input.
#[derive(Default)]
struct Parser {
    line: Vec<u8>,
    event: String,
    data: String,
    id: Option<String>,
    retry: Option<u64>,
    comments: usize,
}

impl Parser {
    fn feed(&mut self, bytes: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        for byte in bytes {
            assert_ne!(*byte, b'\r', "a carriage return ends a line too");
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = String::from_utf8(std::mem::take(&mut self.line)).unwrap();
            if line.is_empty() {
                let (event, data) = (std::mem::take(&mut self.event), std::mem::take(&mut self.data));
                let id = self.id.take();
                match data.strip_suffix('\n') {
                    Some(data) => frames.push(Frame { event, data: data.to_owned(), id }),
                    None => assert_eq!((event.as_str(), id), ("", None), "a frame without data is not dispatched"),
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "" => self.comments += 1,
                "event" => self.event = value.to_owned(),
                "data" => self.data.extend([value, "\n"]),
                "id" => self.id = Some(value.to_owned()),
                "retry" => self.retry = Some(value.parse().unwrap()),
                other => panic!("unknown field {other}"),
            }
        }
        frames
    }
}

/// A driver and what it has written.
struct World {
    store: Arc<FakeStore>,
    bus: Bus,
    live: Arc<LiveRun>,
    streams: Streams,
    run: Run,
    /// Text and reasoning by step and attempt.
    written: BTreeMap<(u32, u32), [String; 2]>,
    open: Option<(u32, u32)>,
    unpublished: Vec<Event>,
}

impl World {
    fn new() -> Self {
        let run = fake::run(RUN);
        let store = Arc::new(FakeStore::new(run.clone()));
        let bus = Bus::new();
        Self {
            live: bus.live(RUN),
            streams: Streams::new(store.clone(), bus.clone(), KEEP_ALIVE),
            written: BTreeMap::new(),
            open: None,
            unpublished: Vec::new(),
            store,
            bus,
            run,
        }
    }

    /// The first half of a driver's step: the commit.
    fn commit(&mut self, bodies: &[EventBody]) {
        self.live.committing();
        let mut events = Vec::new();
        for body in bodies {
            self.run.last_seq += 1;
            events.push(Event {
                run: RUN,
                seq: self.run.last_seq,
                time: Timestamp::from_millis(i64::try_from(self.run.last_seq).unwrap()),
                body: EncodedBody::new(body).unwrap(),
            });
        }
        self.store.commit(&events, &self.run);
        self.unpublished.extend(events);
    }

    /// The second half.
    fn publish(&mut self, activity: Activity) {
        self.open = match activity {
            Activity::Writing { step, attempt } => Some((step, attempt)),
            Activity::Idle | Activity::Executing(_) | Activity::Ended => None,
        };
        self.live.publish(&std::mem::take(&mut self.unpublished), &self.run, activity);
    }

    fn step(&mut self, bodies: &[EventBody], activity: Activity) {
        self.commit(bodies);
        self.publish(activity);
    }

    fn write(&mut self, channel: usize, fragment: &str) {
        let open = self.open.unwrap();
        self.written.entry(open).or_default()[channel].push_str(fragment);
        self.live.delta(if channel == 0 { Delta::Text(fragment) } else { Delta::Reasoning(fragment) });
    }

    fn message(&self) -> EventBody {
        let (step, attempt) = self.open.unwrap();
        let text = self.written.get(&(step, attempt)).map(|written| written[0].clone()).unwrap_or_default();
        message(step, &text)
    }

    fn end(&mut self) {
        self.commit_end();
        self.publish(Activity::Ended);
    }

    fn commit_end(&mut self) {
        let finish_reason = FinishReason::Stop;
        self.run.status = RunStatus::Finished {
            started_at: None,
            deadline_at: None,
            finished_at: Timestamp::from_millis(9),
            end: End::Completed { answer: "done".into(), finish_reason },
        };
        let run = serde_json::to_value(RunView::from(&self.run)).unwrap();
        self.commit(&[EventBody::RunEnd { run, duration_ms: 1 }]);
    }

    /// The process dies: what was being written is gone, the log stays.
    fn restart(&mut self) {
        let lost = std::mem::replace(&mut self.bus, Bus::new());
        self.live = self.bus.live(RUN);
        assert_eq!(lost.len(), 0, "a reader was left behind");
        self.streams = Streams::new(self.store.clone(), self.bus.clone(), KEEP_ALIVE);
        self.unpublished.clear();
        self.open = None;
    }

    async fn subscribe(&self, cursor: &str) -> Result<Subscribed, SubscribeError> {
        self.streams.subscribe(&TenantId::local(), RUN, cursor.parse().unwrap()).await
    }

    async fn open_stream(&self, cursor: &str) -> Subscription {
        match self.subscribe(cursor).await.unwrap() {
            Subscribed::Stream(subscription) => subscription,
            Subscribed::Past => panic!("{cursor} is past the end"),
        }
    }
}

fn message(step: u32, text: &str) -> EventBody {
    let content = vec![Part::Text { text: text.to_owned() }];
    let message = AssistantMessage { content, tool_calls: Vec::new(), incomplete: false };
    EventBody::Message { step, message: Message::Assistant(message) }
}

fn writing(step: u32, attempt: u32) -> Activity {
    Activity::Writing { step, attempt }
}

/// Everything a subscription has to give now.
fn drain(subscription: &mut Subscription) -> Vec<Frame> {
    let mut parser = Parser::default();
    let mut frames = Vec::new();
    while let Some(Some(bytes)) = subscription.next().now_or_never().map(Result::unwrap) {
        frames.extend(parser.feed(&bytes));
    }
    assert!(parser.line.is_empty() && parser.data.is_empty(), "a frame is cut off");
    frames
}

/// Text of a frame as `(event, id, offset, text)`.
fn delta(frame: &Frame) -> (String, String, u64, String) {
    let json = frame.json();
    let text = json["text"].as_str().unwrap().to_owned();
    (frame.event.clone(), frame.id.clone().unwrap(), json["offset"].as_u64().unwrap(), text)
}

/// A client that keeps only what a browser keeps: its last id, and what it was told.
#[derive(Default)]
struct Client {
    subscription: Option<Subscription>,
    parser: Parser,
    frames: usize,
    last_id: String,
    durable: Vec<String>,
    texts: BTreeMap<(u32, u32), [String; 2]>,
    past: bool,
}

impl Client {
    async fn connect(&mut self, world: &World) {
        self.subscription = None;
        let cursor = if self.last_id.is_empty() { "0" } else { &self.last_id };
        match world.subscribe(cursor).await.unwrap() {
            Subscribed::Stream(subscription) => self.subscription = Some(subscription),
            Subscribed::Past => self.past = true,
        }
        (self.parser, self.frames) = (Parser::default(), 0);
    }

    /// Reads up to `most` pieces; `true` when there was nothing more.
    fn read(&mut self, most: usize, written: &BTreeMap<(u32, u32), [String; 2]>) -> bool {
        let Some(subscription) = &mut self.subscription else { return true };
        for _ in 0..most {
            match subscription.next().now_or_never() {
                None => return true,
                Some(bytes) => match bytes.unwrap() {
                    None => {
                        assert!(self.durable.last().unwrap().contains("\"type\":\"run_end\""));
                        self.past = true;
                        return true;
                    }
                    Some(bytes) => {
                        for frame in self.parser.feed(&bytes) {
                            self.frames += 1;
                            Self::see(&mut self.last_id, &mut self.durable, &mut self.texts, self.frames, &frame);
                        }
                    }
                },
            }
        }
        for (key, texts) in &self.texts {
            for (seen, written) in texts.iter().zip(&written[key]) {
                assert!(written.starts_with(seen.as_str()), "{key:?}: {seen:?} is no prefix of {written:?}");
            }
        }
        false
    }

    fn see(
        last_id: &mut String,
        durable: &mut Vec<String>,
        texts: &mut BTreeMap<(u32, u32), [String; 2]>,
        nth: usize,
        frame: &Frame,
    ) {
        let json = frame.json();
        assert_eq!(frame.event == "snapshot", nth == 1, "the snapshot comes first and once");
        if let Some(id) = &frame.id {
            last_id.clone_from(id);
        }
        match frame.event.as_str() {
            "snapshot" | "tool_call_delta" | "tool_progress" => assert_eq!(frame.id, None),
            "text_delta" | "reasoning_delta" => {
                let number = |field: &str| u32::try_from(json[field].as_u64().unwrap()).unwrap();
                let key = (number("step"), number("attempt"));
                let channel = usize::from(frame.event == "reasoning_delta");
                let seen = &mut texts.entry(key).or_default()[channel];
                let text = json["text"].as_str().unwrap();
                assert_eq!(json["offset"], seen.chars().count(), "{key:?} {text:?} after {seen:?}");
                assert!(!text.is_empty());
                seen.push_str(text);
                let parts: Vec<u64> = last_id.split('.').map(|part| part.parse().unwrap()).collect();
                assert_eq!(parts[0], durable.len() as u64);
                assert_eq!(parts[1 + channel], seen.chars().count() as u64);
            }
            kind => {
                assert_eq!(json["type"], kind);
                assert_eq!(json["seq"], durable.len() + 1, "a gap or a repeat");
                assert_eq!(*last_id, json["seq"].to_string());
                durable.push(frame.data.clone());
            }
        }
    }
}

/// What may happen, in any order; what does not fit the moment does nothing.
#[derive(Clone, Debug)]
enum Act {
    Event,
    EventCommittedEarly { reads: usize },
    OpenMessage,
    Text(String),
    Reasoning(String),
    ToolCall,
    Retry,
    EventWhileWriting,
    CloseMessage,
    Tools,
    Progress,
    Restart,
    Read(usize),
    ReadAll,
    Reconnect,
}

fn act() -> impl Strategy<Value = Act> {
    let text = prop_oneof![
        "[a-z \n\"\\\\]{1,8}",
        "[🦀👩‍🚀é\u{301}\u{2028}\u{2029}\u{0}\r]{1,5}",
        Just(String::new()),
        "[a-z]{4}".prop_map(|text| text.repeat(9_000)),
    ];
    let text = text.boxed();
    prop_oneof![
        2 => Just(Act::Event),
        1 => (0..4_usize).prop_map(|reads| Act::EventCommittedEarly { reads }),
        4 => Just(Act::OpenMessage),
        12 => text.clone().prop_map(Act::Text),
        6 => text.prop_map(Act::Reasoning),
        2 => Just(Act::ToolCall),
        1 => Just(Act::Retry),
        2 => Just(Act::EventWhileWriting),
        2 => Just(Act::CloseMessage),
        1 => Just(Act::Tools),
        1 => Just(Act::Progress),
        1 => Just(Act::Restart),
        10 => (1..4_usize).prop_map(Act::Read),
        3 => Just(Act::ReadAll),
        6 => Just(Act::Reconnect),
    ]
}

async fn play(acts: Vec<Act>) {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    let mut client = Client::default();
    client.connect(&world).await;
    let (mut step, mut attempt) = (0, 1);
    for act in acts {
        match (act, world.open) {
            (Act::Event, None) => world.step(&[EventBody::CancelRequested {}], Activity::Idle),
            (Act::EventCommittedEarly { reads }, open) => {
                // A reader may come between a commit and its publication, and a safety look may find it there.
                let looks = reads == 3 && client.read(usize::MAX, &world.written);
                world.commit(&[EventBody::CancelRequested {}]);
                client.read(reads, &world.written);
                if let Some(subscription) = client.subscription.as_mut().filter(|_| looks) {
                    assert!(subscription.look().await.unwrap());
                    client.read(1, &world.written);
                }
                world.publish(open.map_or(Activity::Idle, |(step, attempt)| writing(step, attempt)));
            }
            (Act::OpenMessage, None) => {
                (step, attempt) = (step + 1, 1);
                world.step(&[EventBody::ModelStart { step, attempt }], writing(step, attempt));
            }
            (Act::Text(text), Some(_)) => world.write(0, &text),
            (Act::Reasoning(text), Some(_)) => world.write(1, &text),
            (Act::ToolCall, Some(_)) => {
                world.live.delta(Delta::ToolCall { index: 0, id: "c", name: "t", arguments: "{\"a\n" });
            }
            (Act::Retry, Some(_)) => {
                attempt += 1;
                let (reason, message, delay_ms) = (FailureClass::Truncated, "cut".into(), 0);
                let retry = EventBody::ModelRetry { step, attempt, reason, message, delay_ms };
                world.step(&[retry], writing(step, attempt));
            }
            (Act::EventWhileWriting, Some(_)) => {
                world.step(&[EventBody::CancelRequested {}], writing(step, attempt));
            }
            (Act::CloseMessage, Some(_)) => {
                let message = world.message();
                world.step(&[message], Activity::Idle);
            }
            (Act::Tools, None) => {
                let calls = vec![ExecutingCall { call_id: "c".into(), name: "t".into() }];
                let (call_id, name) = ("c".to_owned(), "t".to_owned());
                let (arguments, effect) = (Arguments::parse(""), Effect::ReadOnly);
                let start = EventBody::ToolStart { step, call_id, name, arguments, effect };
                world.step(&[start], Activity::Executing(calls));
            }
            (Act::Progress, _) => world.live.progress("c", "half"),
            (Act::Restart, _) => {
                client.subscription = None;
                world.restart();
                client.connect(&world).await;
                client.read(1, &world.written);
                world.step(&[EventBody::CancelRequested {}], Activity::Idle);
            }
            (Act::Read(most), _) => drop(client.read(most, &world.written)),
            (Act::ReadAll, open) => {
                while !client.read(100, &world.written) {}
                assert_eq!(client.durable.len(), usize::try_from(world.run.last_seq).unwrap());
                if let Some((open, written)) = open.and_then(|open| Some((open, world.written.get(&open)?))) {
                    let seen = client.texts.get(&open).cloned().unwrap_or_default();
                    assert_eq!(seen, *written);
                }
            }
            (Act::Reconnect, _) => client.connect(&world).await,
            (Act::Event | Act::OpenMessage | Act::Tools, Some(_))
            | (
                Act::Text(_)
                | Act::Reasoning(_)
                | Act::ToolCall
                | Act::Retry
                | Act::EventWhileWriting
                | Act::CloseMessage,
                None,
            ) => {}
        }
    }
    if world.open.is_some() {
        let message = world.message();
        world.step(&[message], Activity::Idle);
    }
    world.end();
    while !client.read(100, &world.written) {}
    assert!(client.past, "the end of the stream");
    let log: Vec<_> = world.store.log().iter().map(|event| String::from_utf8(event.json().to_vec()).unwrap()).collect();
    assert_eq!(client.durable, log);
    client.connect(&world).await;
    assert!(client.subscription.is_none(), "nothing after the end");
    let bus = world.bus.clone();
    drop(world);
    assert_eq!(bus.len(), 0, "a live run is left behind");
}

fn run_paused(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(test);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// Whatever is written, whenever a reader comes, goes and comes back: it gets the log, once, in order, to the
    /// byte, and of each message a beginning, once; all of it when it has read all there is.
    #[test]
    fn replay_and_live_together_are_the_log(acts in prop::collection::vec(act(), 0..120)) {
        run_paused(play(acts));
    }
}

/// T16, RS-02: the same number is the same bytes, from every cursor, while the run lives and after a restart.
#[tokio::test(start_paused = true)]
async fn every_cursor_of_a_stream_of_200_events_continues_exactly_after_it() {
    let mut world = World::new();
    let mut reader = world.open_stream("0").await;
    let mut frames = drain(&mut reader);
    for step in 1..=66 {
        world.step(&[EventBody::ModelStart { step, attempt: 1 }], writing(step, 1));
        frames.extend(drain(&mut reader));
        world.write(1, "hm");
        world.write(0, "👩‍🚀é");
        world.write(0, "\u{301}!");
        frames.extend(drain(&mut reader));
        let message = world.message();
        world.step(&[message, EventBody::CancelRequested {}], Activity::Idle);
        frames.extend(drain(&mut reader));
    }
    world.step(&[EventBody::CancelRequested {}], Activity::Idle);
    world.end();
    frames.extend(drain(&mut reader));
    drop(reader);
    let durable: Vec<_> = frames.iter().filter(|frame| frame.json()["seq"].is_u64()).cloned().collect();
    assert_eq!(durable.len(), 200);
    assert_eq!(frames.len(), 1 + 200 + 66 * 3, "every frame of a reader that keeps up");
    for restarted in [false, true] {
        if restarted {
            world.restart();
        }
        for (index, id) in frames.iter().enumerate().filter_map(|(index, frame)| Some((index, frame.id.clone()?))) {
            let expected: Vec<_> =
                frames[index + 1..].iter().filter(|frame| frame.json()["seq"].is_u64()).cloned().collect();
            match world.subscribe(&id).await.unwrap() {
                Subscribed::Past => assert_eq!((id.as_str(), expected.len()), ("200", 0)),
                Subscribed::Stream(mut subscription) => {
                    let got = drain(&mut subscription);
                    assert_eq!(got[0].event, "snapshot");
                    assert_eq!(got[1..], expected, "after {id}");
                    assert_eq!(subscription.next().await.unwrap(), None);
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn every_offset_of_an_open_message_gets_its_rest_as_one_delta() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    world.step(&[EventBody::ModelStart { step: 1, attempt: 2 }], writing(1, 2));
    world.write(1, "mull");
    world.write(0, "ab👩‍🚀");
    world.write(1, "over");
    world.write(0, "e\u{301}\u{2028}\n.");
    world.write(1, "!");
    let text: Vec<char> = "ab👩‍🚀e\u{301}\u{2028}\n.".chars().collect();
    let reasoning: Vec<char> = "mullover!".chars().collect();
    let name = |event: &str, id: String, from: usize, text: &[char]| {
        (event.to_owned(), id, from as u64, text.iter().collect::<String>())
    };
    for offset in 0..=text.len() {
        let cursor = format!("2.{offset}");
        let mut subscription = world.open_stream(&cursor).await;
        let frames = drain(&mut subscription);
        let snapshot = json!({"run": RunView::from(&world.run), "executing": [],
                              "writing": {"step": 1, "attempt": 2, "length": text.len()}});
        assert_eq!((frames[0].event.as_str(), frames[0].id.as_ref(), frames[0].json()), ("snapshot", None, snapshot));
        // Reasoning before the offset counts as seen.
        let seen = [0, 4, 4, 4, 4, 4].get(offset).copied().unwrap_or(8);
        let mut expected = Vec::new();
        if offset < text.len() {
            if seen < 8 {
                expected.push(name("reasoning_delta", format!("2.{offset}.8"), seen, &reasoning[seen..8]));
            }
            expected.push(name("text_delta", format!("2.{}", text.len()), offset, &text[offset..]));
        }
        expected.push(name("reasoning_delta", format!("2.{}.9", text.len()), 8, &reasoning[8..]));
        assert_eq!(frames[1..].iter().map(delta).collect::<Vec<_>>(), expected, "from {cursor}");

        world.live.delta(Delta::Text(""));
        assert_eq!(drain(&mut subscription), [], "nothing twice");
    }
    // The plain number of the event before is the start of the message.
    assert_eq!(drain(&mut world.open_stream("2").await)[1..], drain(&mut world.open_stream("2.0").await)[1..]);
    // With the own offset of the reasoning nothing is guessed.
    for roffset in 0..=reasoning.len() {
        let frames = drain(&mut world.open_stream(&format!("2.{}.{roffset}", text.len())).await);
        let rest: Vec<_> = frames[1..].iter().map(|frame| (delta(frame).2, delta(frame).3)).collect();
        let expected = (roffset < 9).then(|| (roffset as u64, reasoning[roffset..].iter().collect()));
        assert_eq!(rest, expected.into_iter().collect::<Vec<_>>());
    }
    for beyond in ["3", "3.0", &format!("2.{}", text.len() + 1), "2.0.10", "2.18446744073709551615"] {
        let error = world.subscribe(beyond).await.err();
        assert!(matches!(error, Some(SubscribeError::BeyondEnd { last_seq: 2 })), "{beyond}: {error:?}");
    }
    // An offset in a message that is over is ignored.
    let frames = drain(&mut world.open_stream("1.999").await);
    assert_eq!(frames[1].event, "model_start");
}

#[tokio::test(start_paused = true)]
async fn an_event_in_the_middle_of_a_message_keeps_its_place_between_the_words() {
    // The long one fits no buffer, so that all who are late read it and what is before it in the log.
    for length in [10, 2 * MAX_TAIL_BYTES] {
        let event = EventBody::ModelError {
            step: 1,
            attempt: 1,
            duration_ms: 0,
            reason: FailureClass::Truncated,
            message: "x".repeat(length),
        };
        let mut world = World::new();
        world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
        let mut keeping_up = world.open_stream("0").await;
        let mut late = world.open_stream("0").await;
        let mut followed = drain(&mut keeping_up);
        world.write(0, "one ");
        followed.extend(drain(&mut keeping_up));
        world.step(&[event], writing(1, 1));
        world.write(0, "two");
        followed.extend(drain(&mut keeping_up));
        let ids = ["1", "1.4", "2", "2.7"];
        assert_eq!(followed.iter().filter_map(|frame| frame.id.as_deref()).collect::<Vec<_>>(), ids);
        assert!(drain(&mut late) == followed, "one order for all");
        for (index, id) in ids.iter().enumerate() {
            let got = drain(&mut world.open_stream(id).await);
            assert!(got[1..] == followed[index + 2..], "after {id}");
        }
        assert_eq!(drain(&mut world.open_stream("1.2").await).get(1).map(delta).unwrap().3, "e ");
        assert_eq!(drain(&mut world.open_stream("2.1").await).get(1).map(delta).unwrap().3, "ne two");
    }
}

#[tokio::test(start_paused = true)]
async fn ids_never_go_back_for_a_reader_that_is_ahead_of_the_publication() {
    let mut world = World::new();
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    world.write(0, "one");
    let mut reader = world.open_stream("0").await;
    drain(&mut reader);
    world.commit(&[EventBody::CancelRequested {}]);
    assert!(reader.look().await.unwrap());
    assert_eq!(drain(&mut reader)[0].id.as_deref(), Some("2"));
    world.write(0, " two");
    assert_eq!(drain(&mut reader), []);
    world.publish(writing(1, 1));
    let frames = drain(&mut reader);
    assert_eq!(frames.iter().map(delta).collect::<Vec<_>>(), [("text_delta".into(), "2.7".into(), 3, " two".into())]);

    // What a change overtakes is read again, in its place.
    world.commit(&[EventBody::CancelRequested {}]);
    world.write(0, "!");
    assert!(reader.look().await.unwrap());
    assert_eq!(drain(&mut reader).iter().map(delta).map(|delta| delta.1).collect::<Vec<_>>(), ["2.8"]);
}

/// dust-tt/dust#25944: a retried response replaces what the attempt before wrote.
#[tokio::test(start_paused = true)]
async fn a_cursor_inside_an_abandoned_attempt_continues_with_the_next_one() {
    let mut world = World::new();
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    world.write(0, "wrong words");
    let (reason, message, delay_ms) = (FailureClass::Truncated, "cut".into(), 0);
    world.step(&[EventBody::ModelRetry { step: 1, attempt: 2, reason, message, delay_ms }], writing(1, 2));
    world.write(0, "right");
    let frames = drain(&mut world.open_stream("1.11").await);
    assert_eq!(frames[1].event, "model_retry");
    assert_eq!(frames[2].json()["attempt"], 2);
    assert_eq!(delta(&frames[2]), ("text_delta".into(), "2.5".into(), 0, "right".into()));
    assert_eq!(frames.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_snapshot_shows_what_executes_and_a_cancel_that_was_just_asked_for() {
    let mut world = World::new();
    let calls = vec![ExecutingCall { call_id: "c1".into(), name: "read_file".into() }];
    world.step(&[EventBody::RunQueued {}], Activity::Executing(calls));
    world.live.cancel_requested(Timestamp::from_millis(5));
    let frames = drain(&mut world.open_stream("1").await);
    let mut run = RunView::from(&world.run);
    run.cancel_requested_at = Some(Timestamp::from_millis(5));
    let executing = json!([{"call_id": "c1", "name": "read_file"}]);
    assert_eq!(frames[0].json(), json!({"run": run, "executing": executing, "writing": null}));
    assert_eq!(frames.len(), 1);

    // Its driver publishes before it hears of it.
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], Activity::Idle);
    let frames = drain(&mut world.open_stream("2").await);
    assert_eq!(frames[0].json()["run"]["cancel_requested_at"], json!(run.cancel_requested_at));
}

/// An event and a fragment are rendered once, whoever reads them.
#[tokio::test(start_paused = true)]
async fn readers_that_keep_up_share_the_bytes() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    let mut readers = Vec::new();
    for _ in 0..3 {
        let mut reader = world.open_stream("1").await;
        drain(&mut reader);
        readers.push(reader);
    }
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    world.write(0, "shared");
    let mut seen = Vec::new();
    for reader in &mut readers {
        let event = reader.next().await.unwrap().unwrap();
        let fragment = reader.next().await.unwrap().unwrap();
        seen.push((event.as_ptr(), fragment.as_ptr()));
    }
    assert!(seen.iter().all(|pointers| *pointers == seen[0]), "{seen:?}");
}

/// What the store has told already is never older in a snapshot.
#[tokio::test(start_paused = true)]
async fn a_run_that_is_being_committed_is_read_from_the_store() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    world.commit_end();
    let told = world.store.run(&TenantId::local(), RUN).await.unwrap().unwrap();
    assert!(told.status.is_finished());
    let frames = drain(&mut world.open_stream("0").await);
    assert_eq!(frames[0].json()["run"]["status"], told.status.name().as_str());
}

/// A driver that is gone leaves a run whose end only the store knows.
#[tokio::test(start_paused = true)]
async fn a_run_that_its_driver_let_go_of_is_read_from_the_store() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    world.live.let_go();
    world.store.set_down(true);
    let asked = world.streams.subscribe(&TenantId::local(), RUN, Cursor::after(0)).await;
    assert!(matches!(asked, Err(SubscribeError::Store(_))));
}

/// A run that is driven here is known here: to follow it, the store is not asked, by anybody but its own tenant.
#[tokio::test(start_paused = true)]
async fn a_run_that_is_driven_here_is_followed_without_the_store() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    world.store.set_down(true);
    assert_eq!(drain(&mut world.open_stream("0").await).len(), 2);
    for (tenant, cursor) in [(TenantId::local(), Cursor::after(2)), (TenantId::new("other"), Cursor::after(0))] {
        let asked = world.streams.subscribe(&tenant, RUN, cursor).await;
        assert!(matches!(asked, Err(SubscribeError::Store(_))), "{tenant:?}");
    }
}

/// The snapshot never shows an older state than the cursor's event left.
#[tokio::test(start_paused = true)]
async fn a_subscription_between_commit_and_publication_waits_for_the_latter() {
    let mut world = World::new();
    let calls = vec![ExecutingCall { call_id: "c1".into(), name: "t".into() }];
    world.step(&[EventBody::RunQueued {}], Activity::Executing(calls));
    world.commit(&[EventBody::CancelRequested {}]);
    let streams = world.streams.clone();
    let tenant = TenantId::local();
    let mut subscribing = Box::pin(streams.subscribe(&tenant, RUN, Cursor::after(2)));
    assert!(subscribing.as_mut().now_or_never().is_none());
    world.publish(Activity::Idle);
    let Subscribed::Stream(mut subscription) = subscribing.await.unwrap() else { panic!("not past") };
    assert_eq!(drain(&mut subscription)[0].json()["executing"], json!([]));

    // A publication that never comes delays the answer and does not prevent it.
    world.commit(&[EventBody::CancelRequested {}]);
    let mut subscription = world.open_stream("1").await;
    let frames = drain(&mut subscription);
    assert_eq!((frames.len(), frames[1].json()["seq"].as_u64()), (2, Some(2)));
    let mut parser = Parser::default();
    let late = subscription.next().await.unwrap().unwrap();
    assert_eq!(parser.feed(&late)[0].json()["seq"], 3, "found by the look at the log");
}

/// SL-01, RS-05: 100,000 deltas for a reader that does not read cost it nothing and make no hole.
#[tokio::test(start_paused = true)]
async fn a_slow_reader_of_100000_deltas_holds_no_queue_and_gets_one_delta() {
    let mut world = World::new();
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    let mut slow = world.open_stream("0").await;
    let mut good = world.open_stream("0").await;
    assert_eq!(drain(&mut slow).len(), 2);
    drain(&mut good);
    let mut seen = String::new();
    for index in 0..100_000 {
        world.live.delta(Delta::Text(if index % 2 == 0 { "token " } else { "🦀" }));
        if index % 100 == 0 {
            seen.extend(drain(&mut good).iter().map(|frame| delta(frame).3));
        }
    }
    seen.extend(drain(&mut good).iter().map(|frame| delta(frame).3));
    let text = "token 🦀".repeat(50_000);
    assert!(seen == text, "the other reader is not disturbed");
    assert!(world.live.held_bytes() < MAX_MESSAGE_BYTES + MAX_TAIL_BYTES + 2 * MAX_DELTA_BYTES);
    assert_eq!(slow.held_bytes(), 0);

    let mut pieces = Vec::new();
    while let Some(bytes) = slow.next().now_or_never() {
        pieces.push(bytes.unwrap().unwrap());
        assert!(slow.held_bytes() <= 32 * 1024, "{}", slow.held_bytes());
    }
    assert!(pieces.len() > 10 && pieces.iter().all(|piece| piece.len() < 128 * 1024));
    let frames = Parser::default().feed(&pieces.concat());
    assert_eq!(frames.len(), 1);
    let (event, id, offset, got) = delta(&frames[0]);
    assert_eq!((event.as_str(), id.as_str(), offset), ("text_delta", "1.350000", 0));
    assert!(got == text);

    // A reader stopped inside that long frame still gets the whole of it, and the end (SL-03).
    let mut stalled = world.open_stream("1").await;
    let mut pieces = vec![stalled.next().await.unwrap().unwrap(), stalled.next().await.unwrap().unwrap()];
    world.written.insert((1, 1), [text.clone(), String::new()]);
    let message = world.message();
    world.step(&[message], Activity::Idle);
    world.end();
    while let Some(bytes) = stalled.next().await.unwrap() {
        pieces.push(bytes);
    }
    let frames = Parser::default().feed(&pieces.concat());
    let events: Vec<_> = frames.iter().map(|frame| frame.event.as_str()).collect();
    assert_eq!(events, ["snapshot", "text_delta", "message", "run_end"]);
    assert!(delta(&frames[1]).3 == text);
}

/// T13: what is rendered once is shared by all who keep up, and by all who replay what is recent.
#[tokio::test(start_paused = true)]
async fn a_thousand_readers_share_each_frame() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    let mut readers = Vec::new();
    for _ in 0..1_000 {
        let mut reader = world.open_stream("0").await;
        reader.next().await.unwrap();
        readers.push(reader);
    }
    let mut shared = async || {
        let first = readers[0].next().await.unwrap().unwrap();
        for reader in &mut readers[1..] {
            let frame = reader.next().await.unwrap().unwrap();
            assert_eq!((frame.as_ptr(), frame.len()), (first.as_ptr(), first.len()));
        }
        let event = Parser::default().feed(&first).remove(0).event;
        for reader in &mut readers {
            let next = reader.next().now_or_never().map(Result::unwrap);
            assert_eq!(next, if event == "run_end" { Some(None) } else { None });
        }
        event
    };
    assert_eq!(shared().await, "run_queued");
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    assert_eq!(shared().await, "model_start");
    world.write(0, "words");
    assert_eq!(shared().await, "text_delta");
    world.live.delta(Delta::ToolCall { index: 0, id: "c", name: "t", arguments: "{" });
    assert_eq!(shared().await, "tool_call_delta");
    world.live.progress("c", "half");
    assert_eq!(shared().await, "tool_progress");
    world.end();
    assert_eq!(shared().await, "run_end");
    assert_eq!(world.store.pages().0, 0, "nobody had to read the log");
}

/// SL-03: a reader that was away for the end gets all of it from the log, a bounded page at a time.
#[tokio::test(start_paused = true)]
async fn a_reader_far_behind_reads_the_log_in_small_pages_up_to_the_end() {
    let mut world = World::new();
    let mut slow = world.open_stream("0").await;
    for step in 0..600 {
        world.step(&[message(step, &"x".repeat(8 * 1024))], Activity::Idle);
    }
    world.step(&[message(600, &"y".repeat(2 * MAX_TAIL_BYTES))], Activity::Idle);
    world.end();
    assert!(world.live.held_bytes() <= 2 * MAX_TAIL_BYTES + MAX_DELTA_BYTES, "{}", world.live.held_bytes());
    let mut parser = Parser::default();
    let mut frames = Vec::new();
    let mut most = 0;
    while let Some(bytes) = slow.next().await.unwrap() {
        frames.extend(parser.feed(&bytes));
        most = most.max(slow.held_bytes());
    }
    let got: Vec<_> = frames[1..].iter().map(|frame| frame.data.clone()).collect();
    let log: Vec<_> = world.store.log().iter().map(|event| String::from_utf8(event.json().to_vec()).unwrap()).collect();
    assert!(got == log);
    assert!(most <= PAGE_BYTES, "{most}");
    let (pages, largest) = world.store.pages();
    assert!(pages < 100 && largest <= 16 * 9 * 1024 + 2 * MAX_TAIL_BYTES, "{pages} pages, the largest of {largest}");
    assert_eq!(parser.retry, Some(1_000));
}

#[tokio::test(start_paused = true)]
async fn a_response_beyond_the_cap_stops_streaming_and_arrives_whole_with_its_message() {
    let mut world = World::new();
    world.step(&[EventBody::ModelStart { step: 1, attempt: 1 }], writing(1, 1));
    let mut reader = world.open_stream("1").await;
    let part = "x".repeat(100_000);
    for _ in 0..20 {
        world.write(0, &part);
    }
    let message = world.message();
    let frames = drain(&mut reader);
    assert_eq!(delta(&frames[1]).1, "1.1000000");
    world.step(&[message], Activity::Idle);
    let frames = drain(&mut reader);
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].json()["message"]["content"][0]["text"].as_str().unwrap().len(), 2_000_000);
}

/// aegra/aegra#472, google/adk-python#4216: an ended stream ends, and past it there is nothing.
#[tokio::test(start_paused = true)]
async fn a_finished_run_replays_and_ends_in_any_process() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    world.end();
    for restarted in [false, true] {
        if restarted {
            world.restart();
        }
        assert!(matches!(world.subscribe("2").await, Ok(Subscribed::Past)));
        assert!(matches!(world.subscribe("2.5").await, Ok(Subscribed::Past)));
        assert!(matches!(world.subscribe("3").await, Err(SubscribeError::BeyondEnd { last_seq: 2 })));
        let pieces: Vec<_> = world.open_stream("1").await.into_stream().map(Result::unwrap).collect().await;
        let frames = Parser::default().feed(&pieces.concat());
        assert_eq!(frames.iter().map(|frame| frame.event.as_str()).collect::<Vec<_>>(), ["snapshot", "run_end"]);
        assert_eq!(frames[0].json()["run"]["status"], "completed");
        assert_eq!(frames[0].json()["run"], frames[1].json()["run"]);
    }
    let other = TenantId::new("other");
    let denied = world.streams.subscribe(&other, RUN, Cursor::START).await;
    assert!(matches!(denied, Err(SubscribeError::NotFound)));
    let absent = world.streams.subscribe(&TenantId::local(), RunId::new(uuid::Uuid::nil()), Cursor::START).await;
    assert!(matches!(absent, Err(SubscribeError::NotFound)));
}

/// PB-03: silence is broken by comments, which carry no id.
#[tokio::test(start_paused = true)]
async fn silence_is_filled_with_comments() {
    let mut world = World::new();
    let start = Instant::now();
    let mut reader = world.open_stream("0").await;
    reader.next().await.unwrap();
    for published in [false, true] {
        if published {
            world.step(&[EventBody::RunQueued {}], Activity::Idle);
            assert_eq!(drain(&mut reader).len(), 1);
        }
        for _ in 0..2 {
            let before = Instant::now();
            assert_eq!(reader.next().await.unwrap().unwrap(), ":\n\n");
            assert_eq!(before.elapsed().as_secs(), 15);
        }
    }
    assert_eq!(start.elapsed().as_secs(), 60);
    // A frame puts the next comment off.
    tokio::time::advance(Duration::from_secs(10)).await;
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    drain(&mut reader);
    let before = Instant::now();
    assert_eq!(reader.next().await.unwrap().unwrap(), ":\n\n");
    assert_eq!(before.elapsed().as_secs(), 15);
}

/// agno-agi/agno#7643: a lost wake-up, or a driver that is gone, costs time and nothing else.
#[tokio::test(start_paused = true)]
async fn a_lost_wake_up_costs_latency_only() {
    let mut world = World::new();
    world.commit(&[EventBody::RunQueued {}]);
    let mut reader = world.open_stream("1").await;
    drain(&mut reader);
    world.commit(&[EventBody::CancelRequested {}]);
    let start = Instant::now();
    let bytes = reader.next().await.unwrap().unwrap();
    assert_eq!(Parser::default().feed(&bytes)[0].id.as_deref(), Some("2"));
    assert!(start.elapsed() <= Duration::from_millis(1_001), "{:?}", start.elapsed());

    // Published once and then never again.
    world.publish(Activity::Idle);
    assert!(drain(&mut reader).is_empty());
    world.commit_end();
    let start = Instant::now();
    let bytes = reader.next().await.unwrap().unwrap();
    assert_eq!(Parser::default().feed(&bytes)[0].event, "run_end");
    assert!(start.elapsed() <= KEEP_ALIVE, "{:?}", start.elapsed());
    assert_eq!(reader.next().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_hole_in_the_log_is_an_error_and_never_skipped() {
    let mut world = World::new();
    for _ in 0..3 {
        world.commit(&[EventBody::CancelRequested {}]);
    }
    world.store.lose_event(2);
    let mut reader = world.open_stream("1").await;
    reader.next().await.unwrap();
    let error = reader.next().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "stored data of run run_019000000000700080000000000000ab is unreadable: event 2 is missing from the log; the \
         next one is 3"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stream_outlives_a_failed_read() {
    let mut world = World::new();
    world.commit(&[EventBody::RunQueued {}]);
    let mut reader = world.open_stream("0").await;
    reader.next().await.unwrap();
    world.store.set_down(true);
    assert!(matches!(reader.next().await, Err(StoreError::Unavailable(_))));
    assert!(matches!(world.subscribe("0").await, Err(SubscribeError::Store(StoreError::Unavailable(_)))));
    world.store.set_down(false);
    assert_eq!(drain(&mut reader).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn settled_answers_at_the_end_or_when_the_wait_is_over() {
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    let (streams, tenant) = (world.streams.clone(), TenantId::local());
    let wait = Duration::from_secs(30);

    let start = Instant::now();
    assert_eq!(streams.settled(&tenant, RUN, wait).await.unwrap(), Some(world.run.clone()));
    assert_eq!(start.elapsed().as_secs(), 30);
    assert_eq!(streams.settled(&tenant, RUN, Duration::ZERO).await.unwrap(), Some(world.run.clone()));
    assert_eq!(streams.settled(&TenantId::new("other"), RUN, wait).await.unwrap(), None);

    let start = Instant::now();
    let mut settling = Box::pin(streams.settled(&tenant, RUN, Duration::MAX));
    assert!(settling.as_mut().now_or_never().is_none());
    world.end();
    assert_eq!(settling.await.unwrap(), Some(world.run.clone()));
    world.live.at_rest().await;
    assert_eq!(world.live.run(), Some(world.run.clone()));
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(streams.settled(&tenant, RUN, Duration::MAX).await.unwrap(), Some(world.run.clone()));
}

#[tokio::test(start_paused = true)]
async fn settled_finds_the_end_of_a_run_that_nobody_drives_here() {
    let mut world = World::new();
    world.commit(&[EventBody::RunQueued {}]);
    let (streams, tenant) = (world.streams.clone(), TenantId::local());
    let mut settling = Box::pin(streams.settled(&tenant, RUN, Duration::from_secs(30)));
    assert!(settling.as_mut().now_or_never().is_none());
    world.commit_end();
    let start = Instant::now();
    assert_eq!(settling.await.unwrap(), Some(world.run.clone()));
    assert!(start.elapsed() <= Duration::from_millis(1_001), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_live_run_lasts_as_long_as_its_last_holder() {
    let world = World::new();
    let bus = world.bus.clone();
    assert!(Arc::ptr_eq(&world.live, &bus.live(RUN)));
    assert_eq!(world.live.run(), None);
    let reader = world.open_stream("0").await;
    drop(world);
    assert_eq!(bus.len(), 1);
    drop(reader);
    assert!(bus.is_empty());
    drop(bus.live(RUN));
    assert_eq!(bus.len(), 0);
}

/// The wake-up between a look and the wait is not lost, on real threads.
#[test]
fn a_reader_on_another_thread_gets_everything_without_a_look_at_the_log() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap();
    let mut world = World::new();
    world.step(&[EventBody::RunQueued {}], Activity::Idle);
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let subscription = runtime.block_on(world.open_stream("0"));
        readers.spawn_on(subscription.into_stream().map(Result::unwrap).collect::<Vec<_>>(), runtime.handle());
    }
    for step in 1..=50 {
        world.step(&[EventBody::ModelStart { step, attempt: 1 }], writing(step, 1));
        for _ in 0..20 {
            world.write(0, "word ");
        }
        let message = world.message();
        world.step(&[message], Activity::Idle);
    }
    world.end();
    let log: Vec<_> = world.store.log().iter().map(|event| String::from_utf8(event.json().to_vec()).unwrap()).collect();
    for pieces in runtime.block_on(readers.join_all()) {
        let mut parser = Parser::default();
        let frames = parser.feed(&pieces.concat());
        let durable: Vec<_> =
            frames.iter().filter(|frame| frame.json()["seq"].is_u64()).map(|f| f.data.clone()).collect();
        assert_eq!((durable, parser.comments), (log.clone(), 0));
    }
}
