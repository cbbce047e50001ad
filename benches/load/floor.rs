//! The floor: the least that accepts a run, makes it durable before it says so, calls the model, and streams what
//! happens. No loop, no decisions, no tools, no limits, no resume, nothing is read of what the model says. For one run of
//! two model calls it makes the four commits that the promises need, of as many rows and bytes as hames has to write:
//! accepted, first turn with the start of its call, outcome, last turn.

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
use sqlx::sqlite::{SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{Arguments, ConnectOptions, Encode, Sqlite, SqliteConnection, Type};
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
    step: &'static Step,
    done: oneshot::Sender<()>,
}

/// What a step writes: the number of its first event, and of each event its kind and the bytes of its body.
struct Step {
    status: &'static str,
    /// Bytes of what the run was accepted as.
    spec: Option<usize>,
    first: i64,
    events: &'static [(&'static str, usize)],
}

/// The steps of a run of two model calls and one tool call, as hames stores them.
const STEPS: [Step; 4] = [
    Step {
        status: "running",
        spec: Some(491),
        first: 1,
        events: &[("run_queued", 21), ("run_start", 60), ("model_start", 43)],
    },
    Step {
        status: "running",
        spec: None,
        first: 4,
        events: &[("model_end", 179), ("message", 154), ("tool_start", 122)],
    },
    Step { status: "running", spec: None, first: 7, events: &[("tool_end", 186), ("model_start", 43)] },
    Step {
        status: "completed",
        spec: None,
        first: 9,
        events: &[("model_end", 173), ("message", 116), ("run_end", 728)],
    },
];

/// As many bytes as needed.
const FILLING: [u8; 1024] = [b'.'; 1024];

/// Serves until it is killed; says on standard error where.
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
    eprintln!("{}", json!({"message": "listening", "address": listener.local_addr().unwrap().to_string()}));
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
    let schema = "CREATE TABLE runs (id TEXT PRIMARY KEY, status TEXT, seq INTEGER) STRICT;
                  CREATE TABLE specs (run TEXT PRIMARY KEY, spec BLOB) STRICT, WITHOUT ROWID;
                  CREATE TABLE events (run TEXT, seq INTEGER, kind TEXT, body BLOB, PRIMARY KEY (run, seq))
                  STRICT, WITHOUT ROWID;";
    sqlx::raw_sql(schema).execute(&mut connection).await.unwrap();
    connection
}

/// Commits what waits as one transaction, again and again: a lone write in one trip to the thread of the database, a
/// larger group as rows of few statements, whose numbers of rows are powers of two so that they are prepared once.
async fn write(mut connection: SqliteConnection, mut writes: mpsc::Receiver<Write>) {
    let mut group = Vec::with_capacity(MAX_GROUP);
    while writes.recv_many(&mut group, MAX_GROUP).await > 0 {
        let specs: Vec<_> = group.iter().filter_map(|write| Some((&write.run, write.step.spec?))).collect();
        let events: Vec<_> = group
            .iter()
            .flat_map(|write| (write.step.first..).zip(write.step.events).map(|(seq, event)| (&write.run, seq, event)))
            .collect();
        let mut trip = Trip::default();
        trip.add("BEGIN IMMEDIATE");
        for rows in portions(&group) {
            for write in rows {
                trip.bind(&write.run).bind(write.step.status).bind(write.step.first);
            }
            let places = places("(?, ?, ?)", rows.len());
            trip.add(&format!(
                "INSERT INTO runs (id, status, seq) VALUES {places} \
                 ON CONFLICT (id) DO UPDATE SET status = excluded.status, seq = excluded.seq"
            ));
            trip.go_unless(group.len() == 1, &mut connection).await;
        }
        for rows in portions(&specs) {
            for (run, bytes) in rows {
                trip.bind(*run).bind(&FILLING[..*bytes]);
            }
            trip.add(&format!("INSERT INTO specs (run, spec) VALUES {}", places("(?, ?)", rows.len())));
            trip.go_unless(group.len() == 1, &mut connection).await;
        }
        for rows in portions(&events) {
            for (run, seq, (kind, bytes)) in rows {
                trip.bind(*run).bind(*seq).bind(*kind).bind(&FILLING[..*bytes]);
            }
            trip.add(&format!(
                "INSERT INTO events (run, seq, kind, body) VALUES {}",
                places("(?, ?, ?, ?)", rows.len())
            ));
            trip.go_unless(group.len() == 1, &mut connection).await;
        }
        trip.add("COMMIT");
        trip.go_unless(false, &mut connection).await;
        group.drain(..).for_each(|write| write.done.send(()).unwrap());
    }
}

/// Statements on their way to the thread of the database.
#[derive(Default)]
struct Trip {
    sql: String,
    values: SqliteArguments,
}

impl Trip {
    fn bind<'q, T: Encode<'q, Sqlite> + Type<Sqlite>>(&mut self, value: T) -> &mut Self {
        self.values.add(value).unwrap();
        self
    }

    fn add(&mut self, sql: &str) {
        self.sql.push_str(sql);
        self.sql.push_str("; ");
    }

    /// Goes there with what was added, unless more is to come along.
    async fn go_unless(&mut self, more: bool, connection: &mut SqliteConnection) {
        if !more {
            let Self { sql, values } = std::mem::take(self);
            sqlx::query_with(sqlx::AssertSqlSafe(sql), values).execute(connection).await.unwrap();
        }
    }
}

/// Cuts rows into portions of a power of two.
fn portions<T>(rows: &[T]) -> impl Iterator<Item = &[T]> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let (portion, rest) = left.split_at(1 << left.len().min(64).checked_ilog2()?);
        left = rest;
        Some(portion)
    })
}

fn places(row: &str, rows: usize) -> String {
    vec![row; rows].join(", ")
}

impl Floor {
    async fn commit(&self, run: &str, step: usize) {
        let (done, committed) = oneshot::channel();
        self.writer.send(Write { run: run.to_owned(), step: &STEPS[step], done }).await.unwrap();
        committed.await.unwrap();
    }

    /// Two calls of the model around one tool, or a single one.
    async fn drive(&self, run: &str, feed: &Feed, asked: &Value) {
        let mut messages = json!([{"role": "user", "content": asked["input"]}]);
        self.call(&messages, feed).await;
        if asked["input"] == "do:tool" {
            self.commit(run, 1).await;
            let tool = json!({"role": "tool", "tool_call_id": "call_1", "content": "hello"});
            messages.as_array_mut().unwrap().push(tool);
            self.commit(run, 2).await;
            self.call(&messages, feed).await;
        }
        self.commit(run, 3).await;
        feed.say("event: run_end\ndata: {\"status\":\"completed\"}\n\n".into(), true);
    }

    /// Calls the model and passes on what it says as it comes.
    async fn call(&self, messages: &Value, feed: &Feed) {
        let body = json!({"model": "model", "messages": messages, "stream": true}).to_string();
        let request = self.model.post(&self.model_url).header(CONTENT_TYPE, "application/json").body(body);
        let mut answer = request.send().await.unwrap().bytes_stream();
        while let Some(piece) = answer.next().await {
            feed.say(piece.unwrap(), false);
        }
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
    floor.commit(&run, 0).await;
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
        let new = match feed.frames.lock().unwrap().get(at..count) {
            Some([one]) => one.clone(),
            Some(several) => Bytes::from(several.concat()),
            None => Bytes::new(),
        };
        if new.is_empty() {
            floor.runs.lock().unwrap().remove(&run);
            return None;
        }
        Some((Ok::<_, Infallible>(new), (floor, run, feed, changes, count)))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(frames)).into_response()
}
