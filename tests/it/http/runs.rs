//! Creating, listing, reading and stopping runs.

use reqwest::Method;
use serde_json::{Value, json};

use super::served::Served;

#[tokio::test]
async fn a_run_is_accepted_with_its_place() {
    let app = Served::start().await;
    let answer = app.client.post("/runs", &json!({"input": "a", "metadata": {"k": "v"}})).await;
    assert_eq!((answer.status, answer.header("preference-applied")), (202, None));
    assert_eq!(answer.header("location").unwrap(), format!("/runs/{}", answer.id()));
    assert_eq!(answer.body["metadata"], json!({"k": "v"}));
    assert_eq!(app.client.get(&format!("/runs/{}", answer.id())).await.id(), answer.id());
    app.stop().await;
}

// langchain-ai/langgraph#3660: whether a client waits changes when it is answered, not what can be asked.
#[tokio::test]
async fn a_wait_ends_with_the_run_or_with_its_time() {
    let app = Served::start().await;
    let request = app.client.request(Method::POST, "/runs").header("prefer", "respond-async, wait=0");
    let answer = app.client.send(request.json(&json!({"input": "a"}))).await;
    assert_eq!((answer.status, answer.header("preference-applied")), (202, Some("wait=0")));
    for prefer in ["wait=soon", "wait=-1", "return=minimal"] {
        let request = app.client.request(Method::POST, "/runs").header("prefer", prefer);
        let answer = app.client.send(request.json(&json!({"input": "a"}))).await;
        assert_eq!((answer.status, answer.header("preference-applied")), (202, None), "{prefer}");
    }
    let ended = app.finished_run().await;
    let answer = app.client.get(&format!("/runs/{ended}?wait=300")).await;
    assert_eq!((answer.status, answer.body["status"].as_str()), (200, Some("completed")));
    for wait in ["301", "-1", "x", ""] {
        app.client.get(&format!("/runs/{ended}?wait={wait}")).await.problem(400, "invalid_query");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_stop_is_accepted_once_and_again_and_leaves_an_ended_run_alone() {
    let app = Served::start().await;
    let run = format!("/runs/{}", app.waiting_run().await);
    let first = app.client.delete(&run).await;
    assert_eq!(first.status, 202);
    assert!(first.body["cancel_requested_at"].is_string());
    let again = app.client.delete(&run).await;
    assert_eq!(again.body["cancel_requested_at"], first.body["cancel_requested_at"]);

    let ended = format!("/runs/{}", app.finished_run().await);
    let before = app.client.get(&ended).await.body;
    let answer = app.client.delete(&ended).await;
    assert_eq!((answer.status, answer.body), (200, before));
    app.client.delete(&format!("{ended}?purge=yes")).await.problem(400, "invalid_query");
    app.stop().await;
}

#[tokio::test]
async fn pages_hold_every_run_once_newest_first() {
    let app = Served::start().await;
    let mut ids = Vec::new();
    for number in 0..7 {
        let request = json!({"input": "a", "metadata": {"number": number.to_string(), "all": "x"}});
        ids.push(app.client.post("/runs", &request).await.id());
    }
    // Ids sort by time of acceptance; within one millisecond they sort by themselves.
    ids.sort_unstable_by(|one, other| other.cmp(one));
    for limit in [1, 2, 3, 7, 8] {
        let (mut seen, mut path) = (Vec::new(), format!("/runs?limit={limit}&metadata.all=x"));
        loop {
            let page = app.client.get(&path).await.body;
            let runs = page["data"].as_array().unwrap();
            assert!(runs.len() <= limit);
            seen.extend(runs.iter().map(|run| run["id"].as_str().unwrap().to_owned()));
            // A run that comes meanwhile does not shift the pages.
            app.client.post("/runs", &json!({"input": "later"})).await;
            let Some(next) = page["next_cursor"].as_str() else { break };
            path = format!("/runs?limit={limit}&metadata.all=x&cursor={next}");
        }
        assert_eq!(seen, ids, "{limit}");
    }
    let found = app.client.get("/runs?metadata.number=3&metadata.all=x").await.body;
    assert_eq!(found["data"].as_array().unwrap().len(), 1);
    assert_eq!(found["data"][0]["metadata"]["number"], "3");
    assert_eq!(found["next_cursor"], Value::Null);
    for none in ["metadata.number=3&metadata.all=y", "agent=nobody", "status=completed,aborted&metadata.all=x"] {
        assert_eq!(
            app.client.get(&format!("/runs?{none}")).await.body,
            json!({"data": [], "next_cursor": null}),
            "{none}"
        );
    }
    app.stop().await;
}

#[tokio::test]
async fn the_transcript_starts_with_the_input() {
    let app = Served::start().await;
    let id = app.client.post("/runs", &json!({"input": "hé\u{1}"})).await.id();
    let messages = app.client.get(&format!("/runs/{id}/messages")).await.body;
    assert_eq!(messages["data"][0], json!({"role": "user", "content": [{"type": "text", "text": "hé\u{1}"}]}));
    app.stop().await;
}

// rune-org/rune#417: a time without an offset is a different time elsewhere.
#[tokio::test]
async fn every_time_says_that_it_is_utc() {
    let app = Served::start().await;
    let run = app.client.get(&format!("/runs/{}", app.finished_run().await)).await.body;
    for field in ["created_at", "started_at", "deadline_at", "finished_at"] {
        let time = run[field].as_str().unwrap();
        assert!(time.len() == 24 && time.ends_with('Z'), "{field}: {time}");
    }
    app.stop().await;
}

// A request that would be refused is not read: what is wrong with its body does not matter.
#[tokio::test]
async fn a_full_server_refuses_before_it_reads() {
    let app = Served::configured("[run]\nmax_concurrent = 1\nmax_queued = 1\n").await;
    let running = app.waiting_run().await;
    assert_eq!(app.client.post("/runs", &json!({"input": "a"})).await.status, 202);
    let refused = app.client.post_raw("/runs", "nonsense").await;
    refused.problem(503, "overloaded");
    assert_eq!(refused.header("retry-after"), Some("5"));
    assert_eq!(app.client.count_runs().await, 2);
    app.client.delete(&format!("/runs/{running}")).await;
    app.stop().await;
}
