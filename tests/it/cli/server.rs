//! A server that plays event streams connection by connection and refuses a client that resumes wrongly.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::PATIENCE;

pub(super) const RUN: &str = "run_019000000000700080000000000000ab";

/// What the server does.
#[derive(Default)]
pub(super) struct Script {
    /// Connections to the event stream, in order.
    pub(super) connections: Vec<Connection>,
    /// What `POST /runs` answers with 400.
    pub(super) refusal: Option<Value>,
    /// What is never answered.
    pub(super) silence: Silence,
}

/// A request that is taken and never answered.
#[derive(Clone, Copy, Default, PartialEq)]
pub(super) enum Silence {
    /// None.
    #[default]
    Never,
    /// `POST /runs`.
    OnCreate,
    /// `DELETE /runs/{id}`.
    OnDelete,
}

/// One connection to the event stream.
pub(super) struct Connection {
    /// The `Last-Event-ID` it must come with.
    after: Option<&'static str>,
    answer: Answer,
}

enum Answer {
    /// Nothing follows: 204.
    Past,
    /// Text, and the end of the connection.
    Closed(String),
    /// Text, and, once the run was deleted or the server released, more text and the end.
    Open(String, String),
}

impl Connection {
    pub(super) fn past(after: Option<&'static str>) -> Self {
        Self { after, answer: Answer::Past }
    }

    pub(super) fn closed(after: Option<&'static str>, text: String) -> Self {
        Self { after, answer: Answer::Closed(text) }
    }

    pub(super) fn open(after: Option<&'static str>, first: String, then: String) -> Self {
        Self { after, answer: Answer::Open(first, then) }
    }
}

/// The frame of an event.
pub(super) fn event(seq: u64, body: Value) -> String {
    let kind = body["type"].as_str().unwrap().to_owned();
    format!("event: {kind}\nid: {seq}\ndata: {body}\n\n")
}

/// The frame of a delta after an event; its id is where its text ends.
pub(super) fn delta(seq: u64, offset: usize, text: &str) -> String {
    let end = offset + text.chars().count();
    let data = json!({"run_id": RUN, "step": 1, "attempt": 1, "offset": offset, "text": text});
    format!("event: text_delta\nid: {seq}.{end}\ndata: {data}\n\n")
}

/// A finished run.
pub(super) fn run(status: &str) -> Value {
    json!({
        "id": RUN, "status": status, "error": null, "steps": 1, "tool_calls": 0,
        "usage": {"input_tokens": 3, "output_tokens": 2, "cached_input_tokens": 0, "reasoning_tokens": 0,
                  "model_calls": 1, "model_calls_with_usage": 1},
    })
}

/// A server on a free port; gone when dropped.
pub(super) struct Server {
    pub(super) url: String,
    shared: Arc<Shared>,
    creations: watch::Receiver<usize>,
    deletions: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

struct Shared {
    connections: Mutex<VecDeque<Connection>>,
    requests: Mutex<Vec<Value>>,
    refusal: Option<Value>,
    silence: Silence,
    creations: watch::Sender<usize>,
    deletions: watch::Sender<usize>,
    released: watch::Sender<bool>,
}

impl Server {
    /// The bodies of `POST /runs`.
    pub(super) fn seen(&self) -> Vec<Value> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// How often the run was deleted.
    pub(super) fn deletions(&self) -> usize {
        *self.deletions.borrow()
    }

    /// Waits until a run was asked for.
    pub(super) async fn creation(&mut self) {
        timeout(PATIENCE, self.creations.wait_for(|count| *count > 0)).await.unwrap().unwrap();
    }

    /// Waits until the run was deleted.
    pub(super) async fn deletion(&mut self) {
        timeout(PATIENCE, self.deletions.wait_for(|count| *count > 0)).await.unwrap().unwrap();
    }

    /// Lets open connections go on.
    pub(super) fn release(&mut self) {
        self.shared.released.send_replace(true);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) async fn server(script: Script) -> Server {
    let (creations, created) = watch::channel(0);
    let (deletions, deleted) = watch::channel(0);
    let shared = Arc::new(Shared {
        connections: Mutex::new(script.connections.into()),
        requests: Mutex::default(),
        refusal: script.refusal,
        silence: script.silence,
        creations,
        deletions,
        released: watch::Sender::new(false),
    });
    let router = Router::new()
        .route("/runs", post(create))
        .route("/runs/{id}", get(show).delete(delete))
        .route("/runs/{id}/events", get(events))
        .with_state(shared.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    #[expect(clippy::disallowed_methods, reason = "the handle is aborted when the server is dropped")]
    let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    Server { url, shared, creations: created, deletions: deleted, task }
}

async fn create(State(shared): State<Arc<Shared>>, Json(body): Json<Value>) -> Response {
    shared.requests.lock().unwrap().push(body);
    shared.creations.send_modify(|count| *count += 1);
    if shared.silence == Silence::OnCreate {
        std::future::pending::<()>().await;
    }
    match &shared.refusal {
        Some(problem) => {
            let kind = [(header::CONTENT_TYPE, "application/problem+json")];
            (StatusCode::BAD_REQUEST, kind, problem.to_string()).into_response()
        }
        None => (StatusCode::ACCEPTED, Json(json!({"id": RUN, "status": "queued"}))).into_response(),
    }
}

async fn show(Path(id): Path<String>) -> Json<Value> {
    assert_eq!(id, RUN);
    Json(run("model_error"))
}

async fn delete(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> StatusCode {
    assert_eq!(id, RUN);
    shared.deletions.send_modify(|count| *count += 1);
    if shared.silence == Silence::OnDelete {
        std::future::pending::<()>().await;
    }
    shared.released.send_replace(true);
    StatusCode::ACCEPTED
}

async fn events(State(shared): State<Arc<Shared>>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    assert_eq!(id, RUN);
    let Some(connection) = shared.connections.lock().unwrap().pop_front() else {
        return (StatusCode::BAD_REQUEST, "one connection too many").into_response();
    };
    let after = headers.get("last-event-id").map(|value| value.to_str().unwrap());
    if after != connection.after || headers.get(header::ACCEPT).is_none_or(|value| value != "text/event-stream") {
        return (StatusCode::BAD_REQUEST, "resumed wrongly").into_response();
    }
    let body = match connection.answer {
        Answer::Past => return StatusCode::NO_CONTENT.into_response(),
        Answer::Closed(text) => Body::from(text),
        Answer::Open(first, then) => {
            let mut released = shared.released.subscribe();
            let rest = async move {
                released.wait_for(|released| *released).await.unwrap();
                Ok::<_, std::convert::Infallible>(Bytes::from(then))
            };
            let first = futures_util::stream::iter([Ok(Bytes::from(first))]);
            Body::from_stream(futures_util::StreamExt::chain(first, futures_util::stream::once(rest)))
        }
    };
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}
