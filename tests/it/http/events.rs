//! Streams and pages of events.

use hames::domain::Effect;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::served::Served;
use crate::support::app::{PATIENCE, Setup};
use crate::support::sse::SseClient;
use crate::support::stage::{call, stage_tool};

#[tokio::test]
async fn a_new_run_can_be_followed_on_the_connection_that_made_it() {
    let app = Served::start().await;
    let mut stream = app.client.create_and_stream(&json!({"input": "a"})).await.unwrap();
    assert!(stream.header("location").unwrap().starts_with("/runs/run_"));
    let (snapshot, first) = (stream.next().await.unwrap(), stream.next().await.unwrap());
    assert_eq!((snapshot.event.as_str(), snapshot.id), ("snapshot", None));
    assert_eq!((first.event.as_str(), first.seq()), ("run_queued", Some(1)));
    app.stop().await;
}

// tower-rs/tower-http#420: an encoder holds small events back until it has enough. Here nothing goes on before what
// happened last has arrived.
#[tokio::test]
async fn each_event_of_a_slow_run_arrives_before_the_next_one_is_made() {
    let (setup, model) = Setup::stage();
    let (tool, mut called) = stage_tool("slow", Effect::ReadOnly, true);
    let app = setup.tool(tool).start().await;
    let run = app.create(json!({"limits": {"max_tool_calls": 2}})).await.id;
    let asked = model.asked().await;
    let path = format!("/runs/{run}/events");
    let request = app.client.request(Method::GET, &path).header("accept-encoding", "gzip, br, zstd");
    let mut stream = app.client.follow(request).await.unwrap();
    assert_eq!(stream.header("content-encoding"), None);

    arrive(&mut stream, &["snapshot", "run_queued", "run_start", "model_start"]).await;
    asked.text("a").await;
    arrive(&mut stream, &["text_delta"]).await;
    asked.reasoning("r").await;
    arrive(&mut stream, &["reasoning_delta"]).await;
    asked.text("b").await;
    arrive(&mut stream, &["text_delta"]).await;
    asked.call(vec![call("c1", "slow", json!({}))]).await;
    arrive(&mut stream, &["model_end", "message", "tool_start"]).await;
    called.recv().await.unwrap().returns("done");
    arrive(&mut stream, &["tool_end", "model_start"]).await;
    model.asked().await.answer("end").await;
    arrive(&mut stream, &["model_end", "message", "run_end"]).await;
    assert_eq!(stream.next().await, None);
    app.finish().await;
}

/// Waits for these frames, which have to come in this order.
async fn arrive(stream: &mut SseClient, events: &[&str]) {
    for event in events {
        let frame = timeout(PATIENCE, stream.next()).await.unwrap_or_else(|_| panic!("{event} is held back")).unwrap();
        assert_eq!(frame.event, *event, "{frame:?}");
    }
}

// aegra/aegra#323: a closed stream is a closed stream, and no word about the run.
#[tokio::test]
async fn closing_a_stream_does_not_touch_the_run() {
    let app = Served::start().await;
    let mut stream = app.client.create_and_stream(&json!({"input": "wait"})).await.unwrap();
    while stream.last_id().is_empty() {
        stream.next().await.unwrap();
    }
    let id = app.client.get("/runs").await.body["data"][0]["id"].as_str().unwrap().to_owned();
    drop(stream);
    let run = app.client.get(&format!("/runs/{id}")).await.body;
    assert_eq!(run["cancel_requested_at"], Value::Null);
    app.stop().await;
}

// aegra/aegra#472, google/adk-python#4216: an ended run has an end, also for who comes back.
#[tokio::test]
async fn a_stream_ends_with_the_run_and_cannot_be_resumed_past_it() {
    let app = Served::start().await;
    let path = format!("/runs/{}/events", app.finished_run().await);
    let frames = app.client.stream(&path, None).await.unwrap().rest().await;
    let end = frames.last().unwrap();
    assert_eq!(end.event, "run_end");
    let numbers: Vec<u64> = frames.iter().filter_map(|frame| frame.seq()).collect();
    assert_eq!(numbers, (1..=end.seq().unwrap()).collect::<Vec<_>>());

    let past = app.client.stream(&path, end.id.as_deref()).await.err().unwrap();
    assert_eq!((past.status, past.text.as_str()), (204, ""));
    let beyond = (end.seq().unwrap() + 1).to_string();
    for cursor in ["-1", "x", "1.", "99999999999999999999999", &beyond] {
        let refused = app.client.stream(&path, Some(cursor)).await.err().unwrap();
        refused.problem(400, "invalid_cursor");
        let refused = app.client.stream(&format!("{path}?after={cursor}"), None).await.err().unwrap();
        refused.problem(400, "invalid_cursor");
        app.client.get(&format!("{path}?after={cursor}")).await.problem(400, "invalid_cursor");
    }
    app.client.stream(&format!("{path}?limit=5"), None).await.err().unwrap().problem(400, "invalid_query");
    app.stop().await;
}

#[tokio::test]
async fn a_dropped_stream_goes_on_where_it_was() {
    let app = Served::start().await;
    let path = format!("/runs/{}/events", app.finished_run().await);
    let whole: Vec<_> = app.client.stream(&path, None).await.unwrap().rest().await;
    let whole: Vec<_> = whole.into_iter().filter(|frame| frame.seq().is_some()).collect();
    for cut in 1..whole.len() {
        let mut stream = app.client.stream(&path, None).await.unwrap();
        let mut seen = Vec::new();
        while seen.len() < cut {
            seen.extend(stream.next().await.filter(|frame| frame.seq().is_some()));
        }
        let rest = stream.reconnect().await.unwrap().rest().await;
        seen.extend(rest.into_iter().filter(|frame| frame.seq().is_some()));
        assert_eq!(seen, whole, "cut after {cut}");
    }
    app.stop().await;
}

#[tokio::test]
async fn pages_hold_the_same_events_as_the_stream() {
    let app = Served::start().await;
    let path = format!("/runs/{}/events", app.finished_run().await);
    let stream = app.client.stream(&path, None).await.unwrap().rest().await;
    let stream: Vec<Value> = stream.iter().filter(|frame| frame.seq().is_some()).map(|frame| frame.json()).collect();
    let whole = app.client.get(&path).await.body;
    assert_eq!(whole, json!({"data": stream, "next_after": null}));
    let (mut seen, mut after) = (Vec::new(), 0);
    loop {
        let page = app.client.get(&format!("{path}?limit=1&after={after}")).await.body;
        seen.extend(page["data"].as_array().unwrap().clone());
        let Some(next) = page["next_after"].as_u64() else { break };
        after = next;
    }
    assert_eq!(seen, stream);
    let end = app.client.get(&format!("{path}?after={}", stream.len())).await.body;
    assert_eq!(end, json!({"data": [], "next_after": null}));
    app.stop().await;
}

#[tokio::test]
async fn streams_outlive_the_stop_until_nothing_more_is_committed() {
    let app = Served::start().await;
    let path = format!("/runs/{}/events", app.waiting_run().await);
    let mut stream = app.client.stream(&path, None).await.unwrap();
    stream.next().await.unwrap();
    app.stop_softly();
    app.stop_hard();
    let rest = stream.rest().await;
    assert_eq!(rest.last().unwrap().event, "model_start");
    app.stop().await;
}
