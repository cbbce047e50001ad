//! What the next start finds: interrupted and queued runs go on, what cannot is ended once, what is too old goes.

use std::sync::Arc;
use std::time::Duration;

use hames::domain::{Effect, OutcomeKind, RunStatusName, RunView, Timestamp};
use hames::time::{Clock, ManualClock};
use serde_json::json;
use sqlx::Connection;

use crate::support::app::{PATIENCE, Setup, own_metrics};
use crate::support::stage::{call, stage_tool};

#[tokio::test]
async fn interrupted_runs_go_on_from_their_last_commit() {
    let (setup, model) = Setup::stage();
    let (side, mut side_calls) = stage_tool("work", Effect::SideEffect, true);
    let (safe, mut safe_calls) = stage_tool("look", Effect::ReadOnly, true);
    let setup = setup.tool(side).tool(safe).toml("[run]\nmax_concurrent = 3\n");
    let app = setup.start().await;
    let in_tool = app.create(json!({})).await;
    let batch = vec![call("a", "work", json!({"n": 1})), call("b", "work", json!({"n": 2}))];
    model.asked().await.call(batch).await;
    let running = side_calls.recv().await.unwrap();
    let in_look = app.create(json!({})).await;
    model.asked().await.call(vec![call("l", "look", json!({}))]).await;
    let looking = safe_calls.recv().await.unwrap();
    let in_answer = app.create(json!({})).await;
    let asked = model.asked().await;
    asked.text("half").await;
    let queued = app.create(json!({})).await;
    assert_eq!(queued.status.name(), RunStatusName::Queued);
    let before = app.events(in_tool.id).await;
    app.die().await;
    drop((running, looking, asked));

    let app = setup.start().await;
    // A call that changed something is not repeated, and its outcome is what is known of it; one that never started does.
    let second = side_calls.recv().await.unwrap();
    assert_eq!(second.id, "b");
    second.returns("ok");
    safe_calls.recv().await.unwrap().returns("seen");
    for _ in 0..3 {
        let asked = model.asked().await;
        let expected = if asked.request.run == in_answer.id { (1, 2) } else { (2, 1) };
        assert_eq!((asked.request.step, asked.request.attempt), expected);
        asked.answer("done").await;
    }
    for run in [&in_tool, &in_look, &in_answer] {
        let ended = app.ended(run.id).await;
        assert_eq!(ended.status.name(), RunStatusName::Completed, "{ended:?}");
        assert_eq!((ended.generation, ended.crashes), (2, 0));
    }
    let after = app.events(in_tool.id).await;
    assert_eq!(after[..before.len()], before, "what was published stays as it was");
    assert_eq!(app.kinds(in_tool.id).await[before.len()], "recovered");
    let results: Vec<_> = app
        .transcript(in_tool.id)
        .await
        .into_iter()
        .filter_map(|message| match message {
            hames::domain::Message::Tool(result) => Some((result.call_id, result.outcome)),
            _ => None,
        })
        .collect();
    assert_eq!(results, [("a".to_owned(), OutcomeKind::OutcomeUnknown), ("b".to_owned(), OutcomeKind::Result)]);

    let asked = model.asked().await;
    assert_eq!(asked.request.run, queued.id);
    asked.answer("late but done").await;
    assert_eq!(app.ended(queued.id).await.status.name(), RunStatusName::Completed);
    assert!(side_calls.try_recv().is_err(), "no call runs twice");
    app.finish().await;
}

/// A stop that leaves a run between two steps is no crash: no attempt is told of that was never made.
#[tokio::test]
async fn a_run_that_was_brought_to_rest_goes_on_as_if_nothing_had_been() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
    let setup = setup.tool(tool);
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    model.asked().await.call(vec![call("a", "work", json!({}))]).await;
    let working = calls.recv().await.unwrap();
    app.supervisor.stop();
    working.returns("done");
    app.hand_over().await;

    let app = setup.start().await;
    let asked = model.asked().await;
    assert_eq!((asked.request.step, asked.request.attempt), (2, 1));
    asked.answer("fine").await;
    let ended = app.ended(run.id).await;
    assert_eq!((ended.status.name(), ended.crashes, ended.generation), (RunStatusName::Completed, 0, 2));
    assert!(!app.kinds(run.id).await.contains(&"recovered"));
    app.finish().await;
}

/// A run that waits for the end of another one is not looked for again and again, and holds up nobody.
#[tokio::test]
async fn a_run_that_waits_for_another_one_costs_nothing() {
    let (mut setup, model) = Setup::stage();
    let metrics = own_metrics();
    setup.metrics = Some(metrics.clone());
    let app = setup.start().await;
    let first = app.create(json!({"thread": "t"})).await;
    let asked = model.asked().await;
    let second = app.create(json!({"thread": "t", "on_busy": "queue"})).await;
    let commits = || {
        let text = metrics.exposition().unwrap();
        let line =
            text.lines().find(|line| line.starts_with("hames_store_commit_duration_seconds_count")).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let before = commits();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(commits() - before < 20.0, "{} transactions in two idle seconds", commits() - before);
    let other = app.create(json!({})).await;
    assert_eq!(other.status.name(), RunStatusName::Running, "it need not go through the queue");
    model.asked().await.answer("other").await;
    app.ended(other.id).await;
    asked.answer("1").await;
    app.ended(first.id).await;
    model.asked().await.answer("2").await;
    app.ended(second.id).await;
    app.finish().await;
}

/// What `DELETE` stores is the truth: whoever takes the run next finds it.
#[tokio::test]
async fn a_stored_cancel_holds_in_the_next_process() {
    let (setup, model) = Setup::stage();
    let setup = setup.toml("[run]\nmax_concurrent = 1\n");
    let app = setup.start().await;
    let running = app.create(json!({})).await;
    let asked = model.asked().await;
    let queued = app.create(json!({})).await;
    for run in [&running, &queued] {
        // The store is told, and the process ends before anybody in it is.
        app.store.request_cancel(&app.tenant(), run.id, run.created_at).await.unwrap().unwrap();
    }
    app.die().await;
    drop(asked);

    let app = setup.start().await;
    for run in [&running, &queued] {
        let ended = app.ended(run.id).await;
        assert_eq!(ended.status.name(), RunStatusName::Aborted, "{ended:?}");
        assert_eq!(ended.cancel_requested_at, Some(run.created_at));
    }
    assert!(model.is_quiet().await, "no model was called for them");
    app.finish().await;
}

#[tokio::test]
async fn a_run_whose_state_does_not_read_is_ended_once() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    app.die().await;
    drop(asked);
    let url = format!("sqlite:{}", setup.path("hames.db").display());
    let mut database = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::query("UPDATE runs SET state = '{}'").execute(&mut database).await.unwrap();
    database.close().await.unwrap();
    for _ in 0..2 {
        let app = setup.start().await;
        let view = serde_json::to_value(RunView::from(&app.ended(run.id).await)).unwrap();
        assert_eq!(view["error"]["code"], "stored_run_unreadable", "{view}");
        assert_eq!(app.kinds(run.id).await, ["run_queued", "run_start", "model_start", "run_end"]);
        app.finish().await;
    }
}

/// A process can die between the end of a run and the removal of its workspace.
#[tokio::test]
async fn what_ended_runs_left_on_the_disk_is_removed_by_the_next_start() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    model.asked().await.answer("done").await;
    app.ended(run.id).await;
    app.finish().await;

    let scratch = setup.scratch();
    let unknown = scratch.join("run_019000000000700080000000000000ab");
    for left in [scratch.join(run.id.to_string()), unknown.clone(), scratch.join("notes")] {
        std::fs::create_dir_all(left.join("some")).unwrap();
    }
    let app = setup.start().await;
    let mut left: Vec<_> = std::fs::read_dir(&scratch).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["notes", "run_019000000000700080000000000000ab"], "only what is known to have ended goes");
    for kept in [unknown, scratch.join("notes")] {
        std::fs::remove_dir_all(kept).unwrap();
    }
    app.finish().await;
}

/// What was over for long goes, everything else stays; a reader of what went is told so.
#[tokio::test]
async fn runs_that_ended_long_ago_are_erased_and_others_are_not() {
    let (mut setup, model) = Setup::stage();
    let start = Timestamp::from_millis(1_796_000_000_000);
    let clock = Arc::new(ManualClock::new(start));
    setup.clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let ask = json!([{"type": "client", "name": "ask", "parameters": {"type": "object"}}]);
    let setup = setup.toml("[retention]\nfinished_days = 2\n");
    let app = setup.start().await;
    let old = app.create(json!({})).await;
    model.asked().await.answer("old").await;
    app.ended(old.id).await;
    let waits = app.create(json!({"tools": ask, "limits": {"wait_timeout_ms": 604_800_000}})).await;
    model.asked().await.call(vec![call("a", "ask", json!({}))]).await;
    let wait = format!("/runs/{}?wait=30", waits.id);
    assert_eq!(app.client.get(&wait).await.body["status"], "waiting");
    clock.advance(Duration::from_secs(2 * 86_400 - 60));
    let young = app.create(json!({})).await;
    model.asked().await.answer("young").await;
    app.ended(young.id).await;
    app.finish().await;

    // One start a minute before the time is over, one a minute after it.
    for (later, status) in [(0, 200), (120, 410)] {
        clock.advance(Duration::from_secs(later));
        let app = setup.start().await;
        let path = format!("/runs/{}", old.id);
        let erased = async { while app.client.get(&path).await.status != status {} };
        tokio::time::timeout(PATIENCE, erased).await.expect("it is not erased");
        for kept in [&young, &waits] {
            assert_eq!(app.client.get(&format!("/runs/{}", kept.id)).await.status, 200);
        }
        if status == 410 {
            app.client.get(&format!("{path}/events?after=3")).await.problem(410, "run_erased");
            let stream = app.client.stream(&format!("{path}/events"), Some("3")).await;
            stream.err().unwrap().problem(410, "run_erased");
            assert_eq!(app.client.get("/runs").await.body["data"].as_array().unwrap().len(), 2);
        }
        app.finish().await;
    }
}
