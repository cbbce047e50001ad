//! A model behind a chat completions endpoint, in this process, so that its clock is the clock of the load.
//!
//! What it does is what the first message of the conversation says: see [`Behaviour`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::stream;
use memchr::memmem;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

/// The model's endpoint.
pub(crate) struct Model {
    address: SocketAddr,
    state: Arc<Seen>,
}

/// What the model saw.
#[derive(Default)]
pub(crate) struct Seen {
    /// Streams that are open.
    open: Mutex<usize>,
    changed: Notify,
    /// When the stream of a held request with a mark was closed by its reader.
    closed: Mutex<HashMap<String, Instant>>,
    /// Each request of a `rounds` conversation.
    requests: Mutex<Vec<Request>>,
    /// Whether `paced` streams may begin.
    gate: watch::Sender<bool>,
    /// How many `paced` streams there were.
    paced: AtomicU32,
}

/// One request of a `rounds` conversation.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) arrived: Instant,
    pub(crate) bytes: usize,
    /// When the whole answer was handed to the connection.
    pub(crate) answered: Instant,
}

/// What a conversation that begins with `do:` and this asks for.
enum Behaviour {
    /// `tool`: calls `read_file` once, then answers in a few words.
    Tool,
    /// `hold.MARK`: says one word and then nothing for ever.
    Hold { mark: String },
    /// `paced.COUNT.MICROSECONDS.BYTES`: once the gate is open, so many words of this size, one in each interval, each
    /// with the time it was sent. Streams begin one after the other within an interval.
    Paced { count: u32, every: Duration, bytes: usize },
    /// `rounds.COUNT`: calls `read_file` in so many rounds, then answers.
    Rounds { count: usize },
}

impl Behaviour {
    fn of(body: &[u8]) -> Self {
        let asked = memmem::find(body, b"\"do:").and_then(|at| body.get(at + 4..)).unwrap_or_default();
        let asked = &asked[..memchr::memchr(b'"', asked).unwrap_or_default()];
        let mut words = std::str::from_utf8(asked).unwrap_or_default().split('.');
        let name = words.next();
        let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        match name {
            Some("tool") => Self::Tool,
            Some("hold") => Self::Hold { mark: words.next().unwrap_or_default().to_owned() },
            Some("paced") => {
                Self::Paced { count: number(), every: Duration::from_micros(number().into()), bytes: number() as usize }
            }
            Some("rounds") => Self::Rounds { count: number() as usize },
            name => panic!("no behaviour `{name:?}`"),
        }
    }
}

impl Model {
    pub(crate) async fn start() -> Self {
        let state = Arc::new(Seen::default());
        let routes = Router::new().route("/v1/chat/completions", post(complete)).with_state(Arc::clone(&state));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = axum::serve::ListenerExt::tap_io(listener, |stream| stream.set_nodelay(true).unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { address, state }
    }

    pub(crate) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Waits until so many streams are open.
    pub(crate) async fn open_streams(&self, count: usize) {
        loop {
            let changed = self.state.changed.notified();
            if *self.state.open.lock().unwrap() == count {
                return;
            }
            drop(tokio::time::timeout(Duration::from_millis(100), changed).await);
        }
    }

    /// Waits until the stream of this mark is closed, and says when that was.
    pub(crate) async fn closed(&self, mark: &str) -> Instant {
        loop {
            let changed = self.state.changed.notified();
            if let Some(at) = self.state.closed.lock().unwrap().remove(mark) {
                return at;
            }
            drop(tokio::time::timeout(Duration::from_millis(100), changed).await);
        }
    }

    /// Lets `paced` streams begin, or holds those that come from now on.
    pub(crate) fn open_gate(&self, open: bool) {
        self.state.gate.send_replace(open);
    }

    /// The requests of `rounds` models since the last time.
    pub(crate) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.requests.lock().unwrap())
    }
}

/// Nanoseconds of the clock that all processes of the machine share.
pub(crate) fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

async fn complete(State(seen): State<Arc<Seen>>, body: Bytes) -> Response {
    let arrived = Instant::now();
    match Behaviour::of(&body) {
        Behaviour::Tool if memmem::find(&body, br#""role":"tool""#).is_some() => whole(answer("The file says hello.")),
        Behaviour::Tool => whole(call(1, "hello.txt")),
        Behaviour::Hold { mark } => held(seen, mark),
        Behaviour::Paced { count, every, bytes } => paced(&seen, count, every, bytes),
        Behaviour::Rounds { count } => {
            let round = memmem::find_iter(&body, br#""role":"tool""#).count() + 1;
            let answer = if round > count { answer("Done.") } else { call(round, &format!("f{round}.txt")) };
            let request = Request { arrived, bytes: body.len(), answered: Instant::now() };
            seen.requests.lock().unwrap().push(request);
            whole(answer)
        }
    }
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let choices = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
    format!("data: {}\n\n", json!({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": choices}))
}

fn end(finish: &str) -> String {
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 120, "completion_tokens": 12, "total_tokens": 132}});
    format!("{}data: {usage}\n\ndata: [DONE]\n\n", chunk(&json!({}), Some(finish)))
}

fn answer(text: &str) -> Vec<String> {
    let words = text.split_inclusive(' ').map(|word| chunk(&json!({"content": word}), None));
    std::iter::once(chunk(&json!({"role": "assistant", "content": ""}), None))
        .chain(words)
        .chain([end("stop")])
        .collect()
}

fn call(number: usize, path: &str) -> Vec<String> {
    let head = json!({"role": "assistant", "tool_calls": [{"index": 0, "id": format!("call_{number}"), "type": "function",
        "function": {"name": "read_file", "arguments": ""}}]});
    let piece = |text: String| json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]});
    let pieces = [piece(r#"{"path":"#.to_owned()), piece(format!(r#""{path}"}}"#))];
    std::iter::once(head).chain(pieces).map(|delta| chunk(&delta, None)).chain([end("tool_calls")]).collect()
}

const EVENT_STREAM: [(axum::http::HeaderName, &str); 1] = [(CONTENT_TYPE, "text/event-stream")];

/// All events at once: a model without delay.
fn whole(events: Vec<String>) -> Response {
    (EVENT_STREAM, Body::from_stream(stream::iter(events.into_iter().map(Ok::<_, Infallible>)))).into_response()
}

/// One word, and then nothing until the reader goes away.
fn held(seen: Arc<Seen>, mark: String) -> Response {
    *seen.open.lock().unwrap() += 1;
    seen.changed.notify_waiters();
    let held = Held { seen, mark };
    let events = stream::unfold((held, false), |(held, said)| async move {
        if said {
            std::future::pending::<()>().await;
        }
        Some((Ok::<_, Infallible>(chunk(&json!({"role": "assistant", "content": "Well"}), None)), (held, true)))
    });
    (EVENT_STREAM, Body::from_stream(events)).into_response()
}

/// Notes when its stream is closed.
struct Held {
    seen: Arc<Seen>,
    mark: String,
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.seen.open.lock().unwrap() -= 1;
        self.seen.closed.lock().unwrap().insert(std::mem::take(&mut self.mark), Instant::now());
        self.seen.changed.notify_waiters();
    }
}

/// Words that say when they were sent: `@NANOSECONDS `, filled up to their size.
fn paced(seen: &Seen, count: u32, every: Duration, bytes: usize) -> Response {
    let gate = seen.gate.subscribe();
    // Streams that begin in the same instant would wait for each other at every word.
    let phase = every * (seen.paced.fetch_add(1, Ordering::Relaxed) % 64) / 64;
    let filling = ".".repeat(bytes);
    let events = stream::unfold((0, None), move |(at, start)| {
        let (mut gate, filling) = (gate.clone(), filling.clone());
        async move {
            if at > count {
                return None;
            }
            let start = match start {
                Some(start) => start,
                None => {
                    gate.wait_for(|open| *open).await.ok()?;
                    tokio::time::Instant::now() + phase
                }
            };
            tokio::time::sleep_until(start + every * at).await;
            let event = match at == count {
                false => chunk(&json!({"content": format!("@{} {filling}", nanos())}), None),
                true => end("stop"),
            };
            Some((Ok::<_, Infallible>(event), (at + 1, Some(start))))
        }
    });
    (EVENT_STREAM, Body::from_stream(events)).into_response()
}
