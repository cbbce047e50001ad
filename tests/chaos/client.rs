//! A client that gives up nothing: it asks again until it is answered, follows its run over every lost connection, and
//! logs all it is told.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::header::ACCEPT;
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::evidence::{Acknowledged, Connection, Event, Reader, Record};
use crate::model;
use crate::sse::Decoder;

/// How long to wait before a request is made again.
const AGAIN: Duration = Duration::from_millis(50);
/// Most silence on a stream; keep-alives come more often.
const SILENCE: Duration = Duration::from_secs(40);
/// Most time for an answer.
const ANSWER: Duration = Duration::from_secs(60);

/// What clients were told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    pub(crate) acknowledged: Vec<Acknowledged>,
    pub(crate) readers: Vec<Reader>,
    /// Answers to `POST /runs`, by status.
    pub(crate) answers: BTreeMap<u16, usize>,
    /// Clients that gave up, and what they were doing.
    pub(crate) gave_up: Vec<String>,
}

impl Log {
    pub(crate) fn add(&mut self, other: Self) {
        self.acknowledged.extend(other.acknowledged);
        self.readers.extend(other.readers);
        self.gave_up.extend(other.gave_up);
        for (status, count) in other.answers {
            *self.answers.entry(status).or_default() += count;
        }
    }
}

/// Talks to one server at a time. Clones talk to the same one.
#[derive(Clone)]
pub(crate) struct Client {
    server: Arc<Mutex<SocketAddr>>,
    http: reqwest::Client,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { server: Arc::new(Mutex::new(address)), http }
    }

    /// Asks another server from now on. What is under way stays where it is.
    pub(crate) fn turn_to(&self, address: SocketAddr) {
        *self.server.lock().unwrap() = address;
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.lock().unwrap())
    }

    /// Makes a run and follows it to its end.
    pub(crate) async fn live_through(&self, key: &str, delay: Duration, until: Instant) -> Log {
        let mut log = Log::default();
        match self.create(key, delay, until, &mut log).await {
            Some(run) => {
                let reader = self.follow(&run, until, &mut log).await;
                log.readers.push(reader);
            }
            None => log.gave_up.push(format!("POST /runs of {key} was never acknowledged")),
        }
        log
    }

    async fn create(&self, key: &str, delay: Duration, until: Instant, log: &mut Log) -> Option<String> {
        loop {
            let body = json!({
                "input": model::input(key, delay), "metadata": {"key": key}, "on_repeat": "allow",
                "limits": {"timeout_ms": 1_800_000},
            });
            let request = self.http.post(self.url("/runs")).json(&body).timeout(ANSWER);
            let request = request.header("idempotency-key", key);
            if let Ok(answer) = request.send().await {
                let status = answer.status();
                *log.answers.entry(status.as_u16()).or_default() += 1;
                let is_accepted = [StatusCode::ACCEPTED, StatusCode::CREATED, StatusCode::OK].contains(&status);
                let run = answer.text().await.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
                if let (true, Some(run)) = (is_accepted, run) {
                    let run = run["id"].as_str().unwrap().to_owned();
                    log.acknowledged.push(Acknowledged { run: run.clone(), key: key.to_owned() });
                    return Some(run);
                }
            }
            if Instant::now() >= until {
                return None;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Reads a run's stream to its end, over as many connections as it takes.
    async fn follow(&self, run: &str, until: Instant, log: &mut Log) -> Reader {
        let mut reader = Reader { run: run.to_owned(), connections: Vec::new() };
        let mut cursor: Option<String> = None;
        while Instant::now() < until {
            let mut request = self.http.get(self.url(&format!("/runs/{run}/events")));
            request = request.header(ACCEPT, "text/event-stream");
            if let Some(cursor) = &cursor {
                request = request.header("last-event-id", cursor);
            }
            if let Ok(Ok(answer)) = tokio::time::timeout(ANSWER, request.send()).await {
                let status = answer.status().as_u16();
                let mut connection =
                    Connection { cursor: cursor.clone(), status, refusal: String::new(), frames: Vec::new() };
                let mut ended = status == 204;
                if status == 200 {
                    // Keep-alives can come for ever.
                    let reading = read(answer, &mut connection, &mut cursor);
                    ended = tokio::time::timeout_at(until, reading).await.unwrap_or(false);
                } else {
                    connection.refusal = answer.text().await.unwrap_or_default();
                }
                reader.connections.push(connection);
                // A refusal is a finding; to ask again would only repeat it.
                if ended || (400..500).contains(&status) {
                    return reader;
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
        log.gave_up.push(format!("{run} did not end; its reader is at {cursor:?}"));
        reader
    }

    /// Everything the server tells of all of its runs.
    pub(crate) async fn read_all(&self) -> BTreeMap<String, Record> {
        let mut runs = BTreeMap::new();
        let mut cursor = String::new();
        loop {
            let page: Value = self.json(&format!("/runs?limit=200{cursor}")).await;
            for run in page["data"].as_array().unwrap() {
                let id = run["id"].as_str().unwrap();
                runs.insert(id.to_owned(), self.record(id).await);
            }
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return runs,
            }
        }
    }

    async fn record(&self, id: &str) -> Record {
        let run: Value = self.json(&format!("/runs/{id}")).await;
        let messages: Value = self.json(&format!("/runs/{id}/messages")).await;
        let mut events = Vec::new();
        let mut after = 0;
        loop {
            let text = self.text(&format!("/runs/{id}/events?limit=200&after={after}")).await;
            let page: Page<'_> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{id}: {error}: {text}"));
            events.extend(page.data.iter().map(|raw| Event::new(raw.get())));
            match page.next_after {
                Some(next) => after = next,
                None => break,
            }
        }
        Record {
            key: run["metadata"]["key"].as_str().unwrap_or_default().to_owned(),
            messages: messages["data"].as_array().cloned().unwrap_or_default(),
            run,
            events,
        }
    }

    /// The run with what is asked of it now; for waiting.
    pub(crate) async fn unfinished(&self) -> Option<usize> {
        let path = "/runs?status=queued&status=running&limit=200";
        let answer = self.http.get(self.url(path)).timeout(ANSWER).send().await.ok()?;
        let page: Value = answer.json().await.ok()?;
        Some(page["data"].as_array()?.len())
    }

    async fn text(&self, path: &str) -> String {
        let answer = self.http.get(self.url(path)).send().await.unwrap();
        answer.text().await.unwrap()
    }

    async fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.text(path).await).unwrap()
    }
}

/// A page of events, each with its bytes.
#[derive(Deserialize)]
struct Page<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
    next_after: Option<u64>,
}

/// Reads a connection to its end; whether the run has ended with it.
async fn read(mut answer: Response, connection: &mut Connection, cursor: &mut Option<String>) -> bool {
    let mut decoder = Decoder::default();
    while let Ok(Ok(Some(bytes))) = tokio::time::timeout(SILENCE, answer.chunk()).await {
        for frame in decoder.push(&bytes) {
            if let Some(id) = &frame.id {
                *cursor = Some(id.clone());
            }
            let ended = frame.event == "run_end";
            connection.frames.push(frame);
            if ended {
                // What comes after the end is a finding too.
                while let Ok(Ok(Some(bytes))) = tokio::time::timeout(AGAIN, answer.chunk()).await {
                    connection.frames.extend(decoder.push(&bytes));
                }
                return true;
            }
        }
    }
    false
}
