//! The whole service while its database is away.

use std::time::Duration;

use hames::domain::{Effect, RunStatusName};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::database::{Empty, config, need_postgres};
use super::proxy::Proxy;
use crate::support::app::Setup;
use crate::support::client::Answer;
use crate::support::stage::{call, stage_tool};

/// What a caller is told, in time.
async fn refused(answer: impl Future<Output = Answer>) {
    let begun = Instant::now();
    answer.await.problem(503, "store_unavailable");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

/// While the database is away callers are told so at once and no tool starts; when it is back runs go on, and none has
/// failed for it. The way it is away differs: connections are refused, or nothing answers.
#[tokio::test]
async fn callers_are_told_at_once_and_runs_wait_until_it_is_back() {
    need_postgres!();
    for silent in [false, true] {
        let (database, proxy) = (Empty::create().await, Proxy::start().await);
        let (mut setup, model) = Setup::stage();
        let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
        setup.store = Some(config(&proxy.options(database.options())));
        let app = setup.tool(tool).start().await;
        let asks = app.create(json!({})).await;
        let answering = model.asked().await;
        let works = app.create(json!({})).await;
        model.asked().await.call(vec![call("a", "work", json!({}))]).await;
        let working = calls.recv().await.unwrap();

        if silent {
            proxy.silence()
        } else {
            proxy.take_down()
        }
        refused(app.client.post("/runs", &json!({"agent": "test", "input": "x"}))).await;
        app.client.get(&format!("/runs/{}", asks.id)).await.problem(503, "store_unavailable");
        refused(app.client.delete(&format!("/runs/{}", asks.id))).await;
        let ready = app.client.get("/readyz").await;
        assert_eq!(ready.status, 503, "{}", ready.text);
        assert_eq!(app.client.get("/healthz").await.status, 200);
        answering.call(vec![call("b", "work", json!({}))]).await;
        working.returns("done");
        sleep(Duration::from_millis(500)).await;
        assert!(calls.try_recv().is_err(), "a call starts once its intent is stored");
        assert!(model.is_quiet().await);
        assert_eq!(app.supervisor.active(), 2);

        proxy.mend();
        let back = Instant::now();
        calls.recv().await.unwrap().returns("done as well");
        for _ in 0..2 {
            model.asked().await.answer("fine").await;
        }
        for run in [asks, works] {
            assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);
        }
        assert!(back.elapsed() < Duration::from_secs(5), "{:?}", back.elapsed());
        let new = app.create(json!({})).await;
        model.asked().await.answer("new").await;
        assert_eq!(app.ended(new.id).await.generation, 1);
        app.finish().await;
    }
}
