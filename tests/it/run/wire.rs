//! Runs seen from both ends: a client of the HTTP interface, and the upstream or the processes that do the work.

use std::time::Duration;

use hames::domain::{Message, OutcomeKind, RunStatusName};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::app::{Setup, TestApp};
use crate::support::sse::{Frame, SlowReader};
use crate::support::stage::call;
use crate::support::upstream::{End, Reply, Response, Upstream};
use crate::tool::support::{Sweep, marked, unique};
use crate::tool::tree::{grown, tree_config};

/// How long the model side may be kept after a cancel. Far above what it takes, so that a busy machine does not fail
/// the test; the time itself is measured by hand.
const HANG_UP: Duration = Duration::from_secs(1);

/// How a chunked body ends.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

fn piece(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]}))
}

/// An agent `test` that uses this upstream, with more settings for it.
fn with_upstream(upstream: &Upstream, settings: &str) -> Setup {
    Setup::empty().toml(&format!(
        "[providers.up]\nkind = \"openai_chat\"\nbase_url = {:?}\n{settings}[agents.test]\nmodel = \"up/m\"\n",
        upstream.base_url()
    ))
}

async fn transcript(app: &TestApp, id: &str) -> Value {
    app.client.get(&format!("/runs/{id}/messages")).await.body
}

// tambo-ai/tambo#2236, vllm-project/vllm#9428
#[tokio::test]
async fn a_cancel_in_mid_answer_cuts_the_model_request_and_nothing_is_added_later() {
    let chunks = ["The capital ", "of France"].map(piece);
    let upstream = Upstream::start(vec![Reply::Response(Response::events(chunks).with_end(End::Open))]).await;
    let app = with_upstream(&upstream, "").start().await;
    let mut stream = app.client.create_and_stream(&json!({"input": "x"})).await.unwrap();
    let mut heard = String::new();
    while heard != "The capital of France" {
        let frame = stream.next().await.unwrap();
        if frame.event == "text_delta" {
            heard.push_str(frame.json()["text"].as_str().unwrap());
        }
    }
    let id = app.client.get("/runs").await.body["data"][0]["id"].as_str().unwrap().to_owned();
    let asked = Instant::now();
    assert_eq!(app.client.delete(&format!("/runs/{id}")).await.status, 202);
    let hang_up = upstream.wait_for_hang_ups(1).await[0];
    assert!(hang_up.at - asked < HANG_UP, "the connection stayed for {:?}", hang_up.at - asked);
    let ends: Vec<Frame> = stream.rest().await.into_iter().filter(|frame| frame.event == "run_end").collect();
    assert_eq!(ends.len(), 1);
    let run = &ends[0].json()["run"];
    assert_eq!((run["status"].as_str(), run["partial"].as_str()), (Some("aborted"), Some("The capital of France")));
    let first = transcript(&app, &id).await;
    assert_eq!(first["data"][1]["incomplete"], true);
    assert_eq!(upstream.requests().len(), 1);
    assert_eq!(transcript(&app, &id).await, first);
    app.finish().await;
}

// aegra/aegra#323: the default rule; a reader is no owner.
#[tokio::test]
async fn a_client_that_goes_away_leaves_the_run_at_work_and_can_come_back() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let mut stream = app.client.create_and_stream(&json!({"input": "x"})).await.unwrap();
    let asked = model.asked().await;
    asked.text("first ").await;
    let mut frames = Vec::new();
    while !frames.iter().any(|frame: &Frame| frame.event == "text_delta") {
        frames.push(stream.next().await.unwrap());
    }
    let last = stream.last_id().to_owned();
    assert_eq!(last, "3.6");
    let path = format!("/runs/{}/events", asked.request.run);
    drop(stream);
    asked.text("second").await;
    let mut stream = app.client.stream(&path, Some(&last)).await.unwrap();
    let snapshot = stream.next().await.unwrap();
    assert_eq!(snapshot.json()["writing"], json!({"step": 1, "attempt": 1, "length": 12}));
    let missed = stream.next().await.unwrap();
    assert_eq!((missed.id.as_deref(), missed.json()["text"].as_str()), (Some("3.12"), Some("second")));
    asked.answer("first second").await;
    let rest = stream.rest().await;
    let kinds: Vec<_> = rest.iter().map(|frame| frame.event.as_str()).collect();
    assert_eq!(kinds, ["model_end", "message", "run_end"]);
    app.finish().await;
}

// feder-cr/invisible_playwright_mcp#1263: the same numbers mean the same events in the next process.
#[tokio::test]
async fn a_cursor_outlives_the_process() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    model.asked().await.answer("done").await;
    app.ended(run.id).await;
    let path = format!("/runs/{}/events", run.id);
    let durable = |frames: Vec<Frame>| frames.into_iter().filter(|frame| frame.seq().is_some()).collect::<Vec<_>>();
    let before = durable(app.client.stream(&path, None).await.unwrap().rest().await);
    app.finish().await;

    let app = setup.start().await;
    for seen in 0..before.len() {
        let cursor = before[..seen].last().and_then(|frame| frame.id.clone());
        let rest = durable(app.client.stream(&path, cursor.as_deref()).await.unwrap().rest().await);
        assert_eq!(rest, before[seen..], "after {seen}");
    }
    let end = before.last().and_then(|frame| frame.id.clone());
    assert_eq!(app.client.stream(&path, end.as_deref()).await.err().unwrap().status, 204);
    app.finish().await;
}

// anomalyco/opencode#19423, PerpetualSoftware/pad#1179, cssbruno/GoWDK#537
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_reading_slows_nobody_and_misses_nothing_in_the_end() {
    const DELTAS: usize = 100_000;
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    let path = format!("/runs/{}/events", run.id);
    let mut stalled = SlowReader::open(app.addr, &path, 4096).await;
    let mut good = app.client.stream(&path, None).await.unwrap();
    let whole = "abcdefghi ".repeat(DELTAS / 10);
    let writing = async {
        for index in 0..DELTAS {
            asked.text(&whole[index..=index]).await;
        }
        asked.answer(&whole).await;
    };
    let reading = async {
        let mut text = String::new();
        while let Some(frame) = good.next().await {
            if frame.event == "text_delta" {
                assert_eq!(frame.json()["offset"], text.len(), "no hole and no repeat");
                text.push_str(frame.json()["text"].as_str().unwrap());
            }
        }
        text
    };
    let ((), heard) = tokio::join!(writing, reading);
    // Whoever keeps up hears nearly all of it before the message itself comes.
    assert!(whole.starts_with(&heard) && !heard.is_empty());
    assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);

    // The other one finds what the kernel kept, then what it missed, then the end.
    let mut bytes = Vec::new();
    loop {
        let more = stalled.read(1024 * 1024).await.unwrap();
        bytes.extend_from_slice(&more);
        if more.is_empty() || bytes.ends_with(LAST_CHUNK) {
            break;
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    for kind in ["event: run_queued", "event: model_end", "event: message", "event: run_end"] {
        assert_eq!(text.matches(kind).count(), 1, "{kind}");
    }
    // What nobody could take was never rendered, let alone kept.
    let deltas = text.matches("event: text_delta").count();
    assert!(deltas < DELTAS / 2, "it was sent {deltas} deltas");
    app.finish().await;
}

/// What became of the call of a run that a command tree worked for.
async fn outcome(app: &TestApp, id: &str) -> (OutcomeKind, String) {
    let messages = app.transcript(id.parse().unwrap()).await;
    let results: Vec<_> = messages
        .into_iter()
        .filter_map(|message| match message {
            Message::Tool(result) => Some((result.outcome, result.content)),
            Message::User(_) | Message::Assistant(_) => None,
        })
        .collect();
    let [result] = results.as_slice() else { panic!("{results:?}") };
    result.clone()
}

#[tokio::test]
async fn a_cancel_ends_the_whole_tree_of_a_command() {
    let (setup, model) = Setup::stage();
    let sweep = Sweep(unique("tree"));
    let app = setup.toml(&tree_config(&sweep.0)).start().await;
    let id = app.client.post("/runs", &json!({"input": "x"})).await.id();
    model.asked().await.call(vec![call(&sweep.0, "run_command", json!({"command": "tree"}))]).await;
    grown(&sweep.0).await;
    assert_eq!(app.client.delete(&format!("/runs/{id}")).await.status, 202);
    let run = app.client.get(&format!("/runs/{id}?wait=60")).await.body;
    assert_eq!(run["status"], "aborted");
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the run has ended");
    let (kind, text) = outcome(&app, &id).await;
    assert_eq!(kind, OutcomeKind::Aborted);
    assert!(!text.contains("before this call was started"), "{text}");
    app.finish().await;
}

#[tokio::test]
async fn a_deadline_ends_the_whole_tree_of_a_command() {
    let (setup, model) = Setup::stage();
    let sweep = Sweep(unique("tree"));
    let app = setup.toml(&tree_config(&sweep.0)).start().await;
    let id = app.client.post("/runs", &json!({"input": "x", "limits": {"timeout_ms": 6_000}})).await.id();
    model.asked().await.call(vec![call(&sweep.0, "run_command", json!({"command": "tree"}))]).await;
    grown(&sweep.0).await;
    let run = app.client.get(&format!("/runs/{id}?wait=60")).await.body;
    assert_eq!(run["status"], "timeout");
    assert_eq!(marked(&sweep.0), Vec::<i32>::new(), "nobody is left when the run has ended");
    assert_eq!(outcome(&app, &id).await.0, OutcomeKind::Aborted);
    app.finish().await;
}

// aegra/aegra#323, tower-rs/tower-http#420: bytes flow while nothing happens, and they move no cursor.
#[tokio::test]
async fn silence_is_filled_with_comments() {
    let (mut setup, model) = Setup::stage();
    setup.server = Some(hames::config::ServerConfig { keep_alive_ms: 20, ..hames::config::ServerConfig::default() });
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    let mut reader = SlowReader::open(app.addr, &format!("/runs/{}/events", run.id), 65_536).await;
    let mut text = String::new();
    while text.matches("\n:\n\n").count() < 3 {
        text.push_str(&String::from_utf8(reader.read(65_536).await.unwrap()).unwrap());
    }
    assert!(text.contains("retry: 1000\n"), "{text}");
    assert_eq!(text.lines().rfind(|line| line.starts_with("id: ")), Some("id: 3"));
    asked.answer("done").await;
    app.ended(run.id).await;
    app.finish().await;
}

// co-l/openfox#226: silence is noticed without anything arriving.
#[tokio::test]
async fn a_provider_that_says_nothing_is_given_up() {
    let upstream = Upstream::start(vec![Reply::Response(Response::events([": hello\n\n"]).with_end(End::Open))]).await;
    let app = with_upstream(&upstream, "idle_timeout_ms = 200\nmax_retries = 0\n").start().await;
    let run = app.client.post("/runs", &json!({"input": "x"})).await.id();
    let run = app.client.get(&format!("/runs/{run}?wait=60")).await.body;
    assert_eq!((run["status"].as_str(), run["error"]["code"].as_str()), (Some("model_error"), Some("model_timeout")));
    upstream.wait_for_hang_ups(1).await;
    app.finish().await;
}
