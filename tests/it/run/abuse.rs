//! What goes wrong elsewhere under rough handling: floods, readers and callers that go away.

use std::time::Duration;

use futures_util::future::join_all;
use hames::domain::{Effect, EventKind, RunStatusName};
use serde_json::{Value, json};
use sqlx::{Connection, Row};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::support::app::Setup;
use crate::support::sse::SlowReader;
use crate::support::stage::{call, stage_tool};

// MoonshotAI/kimi-code#1285: a flood is the business of its own call.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_output_leaves_other_runs_and_readers_alone() {
    let (setup, model) = Setup::stage();
    let flood = "[commands.flood]\nexecutable = \"yes\"\ntimeout_ms = 2000\n";
    let app = setup.toml(flood).start().await;
    let mut stream = app.client.create_and_stream(&json!({"input": "flood"})).await.unwrap();
    let asked = model.asked().await;
    let flooding = asked.request.run;
    asked.call(vec![call("f", "run_command", json!({"command": "flood"}))]).await;
    while stream.next().await.unwrap().event != "tool_start" {}
    for _ in 0..5 {
        let other = app.create(json!({})).await;
        model.asked().await.answer("done").await;
        assert_eq!(app.ended(other.id).await.status.name(), RunStatusName::Completed);
    }
    let mut notes = 0;
    let end = loop {
        let frame = stream.next().await.unwrap();
        match frame.event.as_str() {
            "tool_progress" => {
                notes += 1;
                assert!(frame.data.len() < 4096, "{} bytes", frame.data.len());
            }
            "tool_end" => break frame.json(),
            other => panic!("{other}"),
        }
    };
    assert!(notes < 100, "{notes} notes");
    assert!(end["content"].as_str().unwrap().contains("timed out"), "{end}");
    model.asked().await.answer("done").await;
    assert_eq!(app.ended(flooding).await.status.name(), RunStatusName::Completed);
    app.finish().await;
}

// nicobailon/pi-mcp-adapter#160: what a database holds of one result, in every column of every table.
#[tokio::test]
async fn a_result_is_in_the_database_once() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("look", Effect::ReadOnly, true);
    let setup = setup.tool(tool);
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    model.asked().await.call(vec![call("a", "look", json!({}))]).await;
    calls.recv().await.unwrap().returns(&format!("{}ERROR: real cause", "x".repeat(300 * 1024)));
    model.asked().await.answer("done").await;
    app.ended(run.id).await;
    app.finish().await;

    let url = format!("sqlite:{}", setup.path("hames.db").display());
    let mut database = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let mut holders = Vec::new();
    for table in ["runs", "run_specs", "run_events", "run_metadata"] {
        let columns = sqlx::query(sqlx::AssertSqlSafe(format!("SELECT name FROM pragma_table_info('{table}')")))
            .fetch_all(&mut database)
            .await
            .unwrap();
        for column in columns {
            let column: String = column.get("name");
            let count = format!("SELECT COUNT(*) AS n FROM {table} WHERE instr({column}, 'ERROR: real cause') > 0");
            let row = sqlx::query(sqlx::AssertSqlSafe(count)).fetch_one(&mut database).await.unwrap();
            holders.extend(std::iter::repeat_n(format!("{table}.{column}"), row.get::<i64, _>("n") as usize));
        }
    }
    assert_eq!(holders, ["run_events.body"]);
}

// transact-rs/sqlx#3241: callers that go away in the middle leave no connection of the pool behind.
#[tokio::test]
async fn callers_that_vanish_use_nothing_up() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    for round in 0..20 {
        let vanish = (0..20).map(|n| async move {
            let mut socket = TcpStream::connect(app.addr).await.unwrap();
            let path =
                [format!("/runs/{}", run.id), format!("/runs/{}?wait=60", run.id), "/runs".to_owned()][n % 3].clone();
            let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", app.addr);
            socket.write_all(request.as_bytes()).await.unwrap();
        });
        join_all(vanish).await;
        let answer = tokio::time::timeout(Duration::from_secs(10), app.client.get(&format!("/runs/{}", run.id))).await;
        assert_eq!(answer.expect("nothing is left to read with").status, 200, "round {round}");
    }
    asked.answer("done").await;
    app.ended(run.id).await;
    app.finish().await;
}

// The connection ends about when its request is read: what it asks for is done all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_whose_caller_hangs_up_at_once_counts() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    for _ in 0..20 {
        let run = app.create(json!({})).await;
        let asked = model.asked().await;
        let mut socket = std::net::TcpStream::connect(app.addr).unwrap();
        let request = format!("DELETE /runs/{} HTTP/1.1\r\nHost: {}\r\n\r\n", run.id, app.addr);
        std::io::Write::write_all(&mut socket, request.as_bytes()).unwrap();
        drop(socket);
        assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Aborted);
        drop(asked);
    }
    app.finish().await;
}

// anomalyco/opencode#19423, OpenCTI-Platform/opencti#13908: many readers that do not read, on events that are stored.
#[tokio::test(flavor = "multi_thread")]
async fn many_stalled_readers_hold_up_neither_the_run_nor_a_good_reader_and_can_resume() {
    const ROUNDS: usize = 30;
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("look", Effect::ReadOnly, true);
    let app = setup.tool(tool).start().await;
    let limits = json!({"limits": {"max_steps": 100, "max_tool_calls": 100, "max_tokens": 2_000_000},
                        "context": {"max_tool_result_chars": 100_000}});
    let run = app.create(limits).await;
    let path = format!("/runs/{}/events", run.id);
    let stalled = join_all((0..20).map(|_| SlowReader::open(app.addr, &path, 4096))).await;
    let good = app.client.stream(&path, None).await.unwrap();
    let working = async {
        for round in 0..ROUNDS {
            model.asked().await.call(vec![call(&format!("c{round}"), "look", json!({"round": round}))]).await;
            calls.recv().await.unwrap().returns(&"x".repeat(100_000));
        }
        model.asked().await.answer("done").await;
    };
    let ((), frames) = tokio::join!(working, good.rest());
    assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);
    let durable: Vec<Value> = frames.iter().filter(|frame| frame.seq().is_some()).map(|frame| frame.json()).collect();
    let log: Vec<Value> =
        app.events(run.id).await.iter().map(|event| serde_json::from_slice(&event.json()).unwrap()).collect();
    assert_eq!(durable, log);
    assert_eq!(app.events_of(run.id, EventKind::ToolEnd).await.len(), ROUNDS);
    // Whoever was stalled gets the rest on the same connection or, cut off, from where it was.
    drop(stalled);
    let half = log[log.len() / 2]["seq"].to_string();
    let rest = app.client.stream(&path, Some(&half)).await.unwrap().rest().await;
    let rest: Vec<Value> = rest.iter().filter(|frame| frame.seq().is_some()).map(|frame| frame.json()).collect();
    assert_eq!(rest, log[log.len() / 2 + 1..]);
    app.finish().await;
}
