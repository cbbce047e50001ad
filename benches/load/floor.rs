//! The floor: the least that accepts a run, makes it durable before it says so, calls the model, and streams what
//! happens. No loop, no decisions, no tools, no limits, no resume. For one run of two model calls it makes the four
//! commits that the promises need: accepted, first turn with the start of its call, outcome, last turn.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, SqliteConnection};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};

/// Most writes of one transaction.
const MAX_GROUP: usize = 256;

struct Floor {
    writer: mpsc::Sender<Write>,
    model: reqwest::Client,
    model_url: String,
    runs: Mutex<HashMap<String, Arc<Feed>>>,
}

/// What a run has said so far.
#[derive(Default)]
struct Feed {
    frames: Mutex<Vec<Bytes>>,
    /// How many there are, and whether that is all.
    changed: watch::Sender<(usize, bool)>,
}

/// One durable step of a run.
struct Write {
    run: String,
    seq: i64,
    status: &'static str,
    body: Bytes,
    done: oneshot::Sender<()>,
}

/// Serves until it is killed; says on standard output where.
pub(crate) async fn serve(database: &str, model: &str) {
    // The client wants one, though it is only asked for plain connections.
    rustls::crypto::ring::default_provider().install_default().unwrap();
    let (writer, writes) = mpsc::channel(1024);
    let connection = open(database).await;
    tokio::spawn(write(connection, writes));
    let floor = Floor {
        writer,
        model: reqwest::Client::builder().no_proxy().build().unwrap(),
        model_url: format!("{model}/chat/completions"),
        runs: Mutex::default(),
    };
    let routes =
        Router::new().route("/runs", post(create)).route("/runs/{id}/events", get(events)).with_state(Arc::new(floor));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", json!({"message": "listening", "address": listener.local_addr().unwrap().to_string()}));
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| stream.set_nodelay(true).unwrap());
    axum::serve(listener, routes).await.unwrap();
}

async fn open(database: &str) -> SqliteConnection {
    let mut connection = SqliteConnectOptions::new()
        .filename(database)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .disable_statement_logging()
        .connect()
        .await
        .unwrap();
    let schema = "CREATE TABLE runs (id TEXT PRIMARY KEY, status TEXT NOT NULL, seq INTEGER NOT NULL) WITHOUT ROWID;
                  CREATE TABLE events (run TEXT, seq INTEGER, body BLOB, PRIMARY KEY (run, seq)) WITHOUT ROWID;";
    sqlx::raw_sql(schema).execute(&mut connection).await.unwrap();
    connection
}

/// Commits what waits as one transaction, again and again.
async fn write(mut connection: SqliteConnection, mut writes: mpsc::Receiver<Write>) {
    let mut group = Vec::with_capacity(MAX_GROUP);
    while writes.recv_many(&mut group, MAX_GROUP).await > 0 {
        sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
        for write in &group {
            sqlx::query(
                "INSERT INTO runs (id, status, seq) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (id) DO UPDATE SET status = excluded.status, seq = excluded.seq",
            )
            .bind(&write.run)
            .bind(write.status)
            .bind(write.seq)
            .execute(&mut connection)
            .await
            .unwrap();
            sqlx::query("INSERT INTO events (run, seq, body) VALUES (?, ?, ?)")
                .bind(&write.run)
                .bind(write.seq)
                .bind(&write.body[..])
                .execute(&mut connection)
                .await
                .unwrap();
        }
        sqlx::query("COMMIT").execute(&mut connection).await.unwrap();
        group.drain(..).for_each(|write| write.done.send(()).unwrap());
    }
}

impl Floor {
    async fn commit(&self, run: &str, seq: i64, status: &'static str, body: Bytes) {
        let (done, committed) = oneshot::channel();
        self.writer.send(Write { run: run.to_owned(), seq, status, body, done }).await.unwrap();
        committed.await.unwrap();
    }

    /// Two calls of the model around one tool, or a single one.
    async fn drive(&self, run: &str, feed: &Feed, asked: &Value) {
        let mut messages = json!([{"role": "user", "content": asked["input"]}]);
        let answer = self.call(&messages, feed).await;
        if asked["input"] == "do:tool" {
            self.commit(run, 2, "running", answer).await;
            let tool = json!({"role": "tool", "tool_call_id": "call_1", "content": "hello"});
            messages.as_array_mut().unwrap().push(tool);
            self.commit(run, 3, "running", Bytes::from_static(b"hello")).await;
            let answer = self.call(&messages, feed).await;
            self.commit(run, 4, "completed", answer).await;
        } else {
            self.commit(run, 2, "completed", answer).await;
        }
        feed.say("event: run_end\ndata: {\"status\":\"completed\"}\n\n".into(), true);
    }

    /// Calls the model and passes on what it says as it comes.
    async fn call(&self, messages: &Value, feed: &Feed) -> Bytes {
        let body = json!({"model": "model", "messages": messages, "stream": true}).to_string();
        let request = self.model.post(&self.model_url).header(CONTENT_TYPE, "application/json").body(body);
        let mut answer = request.send().await.unwrap().bytes_stream();
        let mut whole = Vec::new();
        while let Some(piece) = answer.next().await {
            let piece = piece.unwrap();
            whole.extend_from_slice(&piece);
            feed.say(piece, false);
        }
        whole.into()
    }
}

impl Feed {
    fn say(&self, frame: Bytes, last: bool) {
        let mut frames = self.frames.lock().unwrap();
        frames.push(frame);
        self.changed.send_replace((frames.len(), last));
    }
}

async fn create(State(floor): State<Arc<Floor>>, body: Bytes) -> Response {
    let Ok(asked) = serde_json::from_slice::<Value>(&body) else { return StatusCode::BAD_REQUEST.into_response() };
    let run = format!("run_{}", uuid::Uuid::now_v7().simple());
    floor.commit(&run, 1, "running", body).await;
    let feed = Arc::new(Feed::default());
    floor.runs.lock().unwrap().insert(run.clone(), Arc::clone(&feed));
    let answer = json!({"id": run, "status": "running"}).to_string();
    tokio::spawn(async move { floor.drive(&run, &feed, &asked).await });
    (StatusCode::ACCEPTED, [(CONTENT_TYPE, "application/json")], answer).into_response()
}

async fn events(State(floor): State<Arc<Floor>>, Path(run): Path<String>) -> Response {
    // A run is kept until somebody has followed it to its end.
    let Some(feed) = floor.runs.lock().unwrap().get(&run).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let changes = feed.changed.subscribe();
    let frames = stream::unfold((floor, run, feed, changes, 0), |(floor, run, feed, mut changes, at)| async move {
        let (count, _) = *changes.wait_for(|(count, last)| *count > at || *last).await.ok()?;
        let new = feed.frames.lock().unwrap().get(at..count).map(<[Bytes]>::concat)?;
        if new.is_empty() {
            floor.runs.lock().unwrap().remove(&run);
            return None;
        }
        Some((Ok::<_, Infallible>(Bytes::from(new)), (floor, run, feed, changes, count)))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(frames)).into_response()
}
