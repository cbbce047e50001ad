//! `Idempotency-Key`: what is asked for again is done once, and answered as it was.

use std::sync::Arc;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::client::Answer;
use crate::support::stage::call;

async fn post(app: &TestApp, path: &str, key: &str, body: &Value) -> Answer {
    app.client.send(app.client.request(Method::POST, path).header("idempotency-key", key).json(body)).await
}

fn input(text: &str) -> Value {
    json!({"agent": "test", "input": text})
}

#[tokio::test(flavor = "multi_thread")]
async fn racing_requests_with_one_key_make_one_run() {
    let (setup, model) = Setup::stage();
    let app = Arc::new(setup.start().await);
    let attempts = (0..64).map(|_| {
        let app = Arc::clone(&app);
        async move {
            loop {
                let answer = post(&app, "/runs", "\"k\"", &input("a")).await;
                if answer.status != 409 {
                    return answer;
                }
                answer.problem(409, "key_in_use");
                assert_eq!(answer.header("retry-after"), Some("1"));
                tokio::task::yield_now().await;
            }
        }
    });
    let answers = join_all(attempts).await;
    assert!(answers.iter().all(|answer| (answer.status, &answer.text) == (202, &answers[0].text)));
    let firsts = answers.iter().filter(|answer| answer.header("idempotency-replayed").is_none()).count();
    assert_eq!((firsts, app.client.count_runs().await), (1, 1));
    model.asked().await.answer("done").await;
    app.ended(answers[0].id().parse().unwrap()).await;
    Arc::into_inner(app).unwrap().finish().await;
}

#[tokio::test]
async fn an_answer_is_given_again_after_a_restart_and_only_to_the_same_request() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let first = post(&app, "/runs", "k", &input("a")).await;
    model.asked().await.answer("done").await;
    app.ended(first.id().parse().unwrap()).await;
    app.finish().await;

    let app = setup.start().await;
    let again = post(&app, "/runs", "k", &input("a")).await;
    assert_eq!((again.status, &again.text), (202, &first.text));
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(again.header("location"), first.header("location"));
    post(&app, "/runs", "k", &input("b")).await.problem(422, "key_reused");
    let elsewhere = format!("/runs/{}/messages", first.id());
    post(&app, &elsewhere, "k", &json!({"content": "a"})).await.problem(422, "key_reused");
    // Who wants to wait, or to follow, gets the same run.
    let request = app.client.request(Method::POST, "/runs").header("idempotency-key", "k").header("prefer", "wait=5");
    let ended = app.client.send(request.json(&input("a"))).await;
    assert_eq!((ended.status, &ended.body["status"]), (200, &json!("completed")));
    assert_eq!(ended.header("idempotency-replayed"), Some("true"));
    assert_eq!(app.client.count_runs().await, 1);
    // It goes with its run.
    assert_eq!(app.client.delete(&format!("/runs/{}?purge=true", first.id())).await.status, 204);
    let fresh = post(&app, "/runs", "k", &input("a")).await;
    assert_ne!(fresh.id(), first.id());
    model.asked().await.answer("done").await;
    app.ended(fresh.id().parse().unwrap()).await;
    app.finish().await;
}

// ietf-wg-httpapi/idempotency#2: what a key means after its first request failed.
#[tokio::test]
async fn a_request_that_failed_keeps_nothing_under_its_key() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    post(&app, "/runs", "k", &json!({"agent": "nobody", "input": "a"})).await.problem(400, "invalid_request");
    let run = post(&app, "/runs", "k", &input("a")).await;
    assert_eq!((run.status, run.header("idempotency-replayed")), (202, None));
    model.asked().await.answer("done").await;
    app.ended(run.id().parse().unwrap()).await;
    app.finish().await;
}

#[tokio::test]
async fn answers_and_messages_are_taken_once() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let tool = json!({"type": "client", "name": "ask", "parameters": {"type": "object"}});
    let run = app.client.post("/runs", &json!({"agent": "test", "input": "a", "tools": [tool]})).await.id();
    model.asked().await.call(vec![call("c", "ask", json!({}))]).await;
    app.client.get(&format!("/runs/{run}?wait=10")).await;
    let (path, body) = (format!("/runs/{run}/tool_results"), json!({"results": [{"call_id": "c", "content": "x"}]}));
    let taken = post(&app, &path, "r", &body).await;
    assert_eq!(taken.status, 200, "{}", taken.text);
    let asked = model.asked().await;
    let again = post(&app, &path, "r", &body).await;
    assert_eq!((again.status, &again.text), (200, &taken.text));
    let path = format!("/runs/{run}/messages");
    for replayed in [None, Some("true")] {
        let said = post(&app, &path, "m", &json!({"content": "once"})).await;
        assert_eq!((said.status, said.header("idempotency-replayed")), (202, replayed));
    }
    asked.answer("first").await;
    let asked = model.asked().await;
    let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
    assert_eq!(sent, ["a", "", "x", "first", "once"]);
    asked.answer("done").await;
    app.ended(run.parse().unwrap()).await;
    app.finish().await;
}
