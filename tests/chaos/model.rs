//! A model behind a chat completions endpoint. What it says follows from the conversation alone, so that it says the
//! same after a restart: three turns with two calls each, then the answer.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::check::answer;

/// Turns with calls before the answer.
pub(crate) const ROUNDS: usize = 3;

/// The commands, by their effect.
pub(crate) const COMMANDS: [&str; 3] = ["side_effect", "idempotent", "read_only"];

/// The model's endpoint.
pub(crate) struct Model {
    address: SocketAddr,
    refused: Arc<Mutex<Vec<String>>>,
}

/// The input of a run with this key, whose model waits so long before each piece.
pub(crate) fn input(key: &str, delay: Duration) -> String {
    format!("chaos {key} {}", delay.as_millis())
}

impl Model {
    pub(crate) async fn start() -> Self {
        let refused = Arc::<Mutex<Vec<String>>>::default();
        let routes = Router::new().route("/v1/chat/completions", post(complete)).with_state(Arc::clone(&refused));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = axum::serve::ListenerExt::tap_io(listener, |stream| drop(stream.set_nodelay(true)));
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { address, refused }
    }

    pub(crate) fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// What it refused since the last time.
    pub(crate) fn take_refused(&self) -> Vec<String> {
        std::mem::take(&mut self.refused.lock().unwrap())
    }
}

async fn complete(State(refused): State<Arc<Mutex<Vec<String>>>>, Json(body): Json<Value>) -> Response {
    let messages = body["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
    if let Some(problem) = orphan(messages) {
        refused.lock().unwrap().push(format!("{problem}: {body}"));
        return (StatusCode::BAD_REQUEST, problem).into_response();
    }
    let asked = messages.iter().find(|message| message["role"] == "user").map(|message| &message["content"]);
    let words: Vec<&str> = asked.and_then(Value::as_str).unwrap_or_default().split(' ').collect();
    let ["chaos", key, delay] = words[..] else {
        return (StatusCode::BAD_REQUEST, format!("the input is not of this program: {asked:?}")).into_response();
    };
    let delay = Duration::from_millis(delay.parse().unwrap_or(0));
    let round = messages.iter().filter(|message| message["role"] == "assistant").count();
    let events = if round < ROUNDS { calls(key, round) } else { said(&answer(key), round, "stop", Vec::new()) };
    let events = stream::unfold(events.into_iter(), move |mut events| async move {
        let event = events.next()?;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        Some((Ok::<_, Infallible>(event), events))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

/// What is wrong with a conversation whose calls are not answered one by one.
fn orphan(messages: &[Value]) -> Option<String> {
    let mut open: Vec<&str> = Vec::new();
    for message in messages {
        if message["role"] == "tool" {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            let Some(at) = open.iter().position(|call| *call == id) else {
                return Some(format!("the result {id} answers no open call"));
            };
            open.remove(at);
        } else if !open.is_empty() {
            return Some(format!("the calls {open:?} are not answered"));
        }
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        open.extend(calls.filter_map(|call| call["id"].as_str()));
    }
    (!open.is_empty()).then(|| format!("the calls {open:?} are not answered"))
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let choices = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
    format!("data: {}\n\n", json!({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": choices}))
}

/// A turn with two calls. Ids follow from the key and the place, so a turn that is asked for again has the same.
fn calls(key: &str, round: usize) -> Vec<String> {
    let calls = (0..2).map(|at| {
        let command = COMMANDS[(round * 2 + at) % COMMANDS.len()];
        let function = json!({"name": "run_command", "arguments": json!({"command": command}).to_string()});
        let id = format!("{key}-{round}-{at}");
        json!({"tool_calls": [{"index": at, "id": id, "type": "function", "function": function}]})
    });
    said(&format!("Round {round} of {key}: two calls ✓."), round, "tool_calls", calls.collect())
}

/// A text word by word, then further pieces, then the end.
fn said(text: &str, round: usize, finish: &str, pieces: Vec<Value>) -> Vec<String> {
    let usage = json!({"prompt_tokens": 100 + round, "completion_tokens": 10 + round, "total_tokens": 110 + 2 * round});
    std::iter::once(json!({"role": "assistant", "content": ""}))
        .chain(text.split_inclusive(' ').map(|word| json!({"content": word})))
        .chain(pieces)
        .map(|delta| chunk(&delta, None))
        .chain([
            chunk(&json!({}), Some(finish)),
            format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage})),
        ])
        .collect()
}
