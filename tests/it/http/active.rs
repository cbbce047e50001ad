//! What callers do to an active run: they answer it, speak to it, change its bounds, and erase it once it is over.

use std::sync::Arc;

use futures_util::future::join_all;
use hames::domain::{Effect, EventKind};
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::client::Answer;
use crate::support::stage::{Prompter, call, stage_tool};

fn ask_user() -> Value {
    json!({"type": "client", "name": "ask_user", "description": "Asks the user.",
           "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}})
}

fn request(fields: Value) -> Value {
    let mut request = json!({"agent": "test", "input": "do it"});
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    request
}

/// A run that waits for the answers to these calls.
async fn waiting(app: &TestApp, model: &Prompter, fields: Value, calls: &[(&str, &str, Value)]) -> String {
    let run = app.client.post("/runs", &request(fields)).await.id();
    let calls = calls.iter().map(|(id, name, arguments)| call(id, name, arguments.clone())).collect();
    model.asked().await.call(calls).await;
    let answer = app.client.get(&format!("/runs/{run}?wait=10")).await;
    assert_eq!((answer.status, &answer.body["status"]), (200, &json!("waiting")), "{}", answer.text);
    run
}

async fn results(app: &TestApp, run: &str, results: Value) -> Answer {
    app.client.post(&format!("/runs/{run}/tool_results"), &json!({"results": results})).await
}

async fn decide(app: &TestApp, run: &str, decisions: Value) -> Answer {
    app.client.post(&format!("/runs/{run}/approvals"), &json!({"decisions": decisions})).await
}

async fn settled(app: &TestApp, run: &str) -> Value {
    app.client.get(&format!("/runs/{run}?wait=10")).await.body
}

#[tokio::test]
async fn a_tool_of_the_caller_waits_outside_of_the_process_and_goes_on_in_the_next() {
    let (setup, model) = Setup::stage();
    let setup = setup.toml("[run]\nmax_concurrent = 1\n");
    let app = setup.start().await;
    let run = waiting(&app, &model, json!({"tools": [ask_user()]}), &[("c", "ask_user", json!({"q": "?"}))]).await;
    let told = app.client.get(&format!("/runs/{run}")).await.body;
    let pending = json!([{"call_id": "c", "name": "ask_user", "arguments": {"q": "?"}, "kind": "client"}]);
    assert_eq!((&told["pending"], &told["deadline_at"]), (&pending, &json!(null)));
    assert!(told["waiting_until"].is_string());
    // It holds no slot: another run takes the only one.
    let other = app.client.post("/runs", &request(json!({}))).await.id();
    model.asked().await.answer("other").await;
    assert_eq!(settled(&app, &other).await["status"], "completed");
    assert_eq!((app.supervisor.active(), app.bus.len()), (0, 0));
    app.finish().await;

    let app = setup.start().await;
    assert_eq!(app.client.get(&format!("/runs/{run}")).await.body, told);
    let answered = results(&app, &run, json!([{"call_id": "c", "content": [{"type": "text", "text": "blue"}]}])).await;
    assert_eq!((answered.status, &answered.body["pending"]), (200, &json!([])), "{}", answered.text);
    let asked = model.asked().await;
    // The turn that was paused is there once, with its one result.
    let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
    assert_eq!(sent, ["do it", "", "blue"]);
    asked.answer("You like blue.").await;
    assert_eq!(settled(&app, &run).await["answer"], "You like blue.");
    let kinds = app.kinds(run.parse().unwrap()).await;
    let after = kinds.iter().skip_while(|kind| **kind != "waiting").cloned().collect::<Vec<_>>();
    assert_eq!(after, ["waiting", "tool_end", "resumed", "model_start", "model_end", "message", "run_end"]);
    app.finish().await;
}

// letta-ai/lettabot#479: a result under the wrong id was swallowed.
#[tokio::test]
async fn answers_that_do_not_fit_change_nothing_and_say_what_would() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
    let app = setup.tool(tool).start().await;
    let fields = json!({"tools": ["work", ask_user()], "approval": ["work"]});
    let batch = [("c", "ask_user", json!({"q": "?"})), ("w", "work", json!({"n": 1}))];
    let run = waiting(&app, &model, fields, &batch).await;
    let before = app.client.get(&format!("/runs/{run}")).await.body;
    let unknown =
        results(&app, &run, json!([{"call_id": "c", "content": "x"}, {"call_id": "d", "content": "y"}])).await;
    assert!(unknown.problem(409, "call_conflict").contains("`d` does not wait for an answer"), "{}", unknown.text);
    results(&app, &run, json!([{"call_id": "w", "content": "x"}])).await.problem(409, "call_conflict");
    decide(&app, &run, json!([{"call_id": "c", "decision": "approve"}])).await.problem(409, "call_conflict");
    results(&app, &run, json!([])).await.problem(400, "invalid_request");
    decide(&app, &run, json!([{"call_id": "w", "decision": "edit"}])).await.problem(400, "invalid_request");
    assert_eq!(app.client.get(&format!("/runs/{run}")).await.body, before);

    // A part of the answers leaves the rest; it can be given again, and not be changed.
    for _ in 0..2 {
        let taken = results(&app, &run, json!([{"call_id": "c", "content": "x"}])).await;
        assert_eq!((taken.status, &taken.body["pending"][0]["call_id"]), (200, &json!("w")), "{}", taken.text);
    }
    let late = results(&app, &run, json!([{"call_id": "c", "content": "other"}])).await;
    assert!(late.problem(409, "call_conflict").contains("these do: w"), "{}", late.text);
    let edit = json!([{"call_id": "w", "decision": "edit", "arguments": {"n": 2}}]);
    assert_eq!(decide(&app, &run, edit).await.status, 200);
    let called = calls.recv().await.unwrap();
    assert_eq!(Value::from(called.arguments.clone()), json!({"n": 2}));
    results(&app, &run, json!([{"call_id": "w", "content": "x"}])).await.problem(409, "run_conflict");
    called.returns("done");
    model.asked().await.answer("fine").await;
    assert_eq!(settled(&app, &run).await["status"], "completed");
    decide(&app, &run, json!([{"call_id": "w", "decision": "approve"}])).await.problem(409, "run_conflict");
    let again = results(&app, &run, json!([{"call_id": "c", "content": "x"}])).await;
    assert_eq!((again.status, &again.body["status"]), (200, &json!("completed")));
    results(&app, &run, json!([{"call_id": "c", "content": "x", "is_error": true}])).await.problem(409, "run_conflict");
    let results = app.transcript(run.parse().unwrap()).await.into_iter().filter(|message| message.text() == "x");
    assert_eq!(results.count(), 1);
    app.finish().await;
}

// aegra/aegra#253: two resumes at the same time both executed.
#[tokio::test(flavor = "multi_thread")]
async fn of_answers_at_the_same_time_one_wins() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
    let app = Arc::new(setup.tool(tool).start().await);
    let fields = json!({"tools": ["work"], "approval": ["work"]});
    let run = waiting(&app, &model, fields, &[("w", "work", json!({}))]).await;
    let attempts = (0..16).map(|_| {
        let (app, run) = (Arc::clone(&app), run.clone());
        async move { decide(&app, &run, json!([{"call_id": "w", "decision": "approve"}])).await }
    });
    let answers = join_all(attempts).await;
    let won = answers.iter().filter(|answer| answer.status == 200).count();
    assert_eq!(won, 1);
    assert!(answers.iter().all(|answer| [200, 409].contains(&answer.status)));
    calls.recv().await.unwrap().returns("once");
    model.asked().await.answer("fine").await;
    settled(&app, &run).await;
    assert!(calls.try_recv().is_err(), "the call runs once");
    Arc::into_inner(app).unwrap().finish().await;
}

#[tokio::test]
async fn a_wait_ends_by_itself_or_by_a_cancel() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let short = json!({"tools": [ask_user()], "limits": {"wait_timeout_ms": 1}});
    let run = app.client.post("/runs", &request(short)).await.id();
    model.asked().await.call(vec![call("c", "ask_user", json!({"q": "?"}))]).await;
    let ended = app.ended(run.parse().unwrap()).await;
    let ended = serde_json::to_value(hames::domain::RunView::from(&ended)).unwrap();
    assert_eq!((&ended["status"], &ended["error"]["code"]), (&json!("timeout"), &json!("wait_expired")));

    let fields = json!({"tools": [ask_user()]});
    let run = waiting(&app, &model, fields, &[("c", "ask_user", json!({"q": "?"}))]).await;
    assert_eq!(app.client.delete(&format!("/runs/{run}")).await.body["status"], "aborted");
    app.finish().await;
}

#[tokio::test]
async fn a_message_enters_before_the_next_model_call_and_keeps_a_run_from_its_end() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.client.post("/runs", &request(json!({}))).await.id();
    let asked = model.asked().await;
    let said = app.client.post(&format!("/runs/{run}/messages"), &json!({"content": "and quickly"})).await;
    assert_eq!((said.status, &said.body["status"]), (202, &json!("running")));
    // It was about to be completed.
    asked.answer("slowly").await;
    let asked = model.asked().await;
    let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
    assert_eq!(sent, ["do it", "slowly", "and quickly"]);
    asked.answer("done").await;
    assert_eq!(settled(&app, &run).await["answer"], "done");
    app.client
        .post(&format!("/runs/{run}/messages"), &json!({"content": "too late"}))
        .await
        .problem(409, "run_conflict");
    app.client.post(&format!("/runs/{run}/messages"), &json!({"content": " "})).await.problem(400, "invalid_request");
    app.finish().await;
}

/// What is said while a run waits is kept for when it goes on, in this process or in the next one.
#[tokio::test]
async fn what_is_said_to_a_waiting_run_is_heard_when_it_goes_on() {
    let (setup, model) = Setup::stage();
    for restarted in [false, true] {
        let mut app = setup.start().await;
        let fields = json!({"tools": [ask_user()], "limits": {"max_steps": 1}});
        let run = waiting(&app, &model, fields, &[("c", "ask_user", json!({"q": "?"}))]).await;
        let path = format!("/runs/{run}");
        for word in ["first", "second"] {
            assert_eq!(app.client.post(&format!("{path}/messages"), &json!({"content": word})).await.status, 202);
        }
        let raise = app.client.request(Method::PATCH, &path).json(&json!({"limits": {"max_steps": 2}}));
        assert_eq!(app.client.send(raise).await.body["limits"]["max_steps"], 2);
        if restarted {
            app.die().await;
            app = setup.start().await;
        }
        assert_eq!(results(&app, &run, json!([{"call_id": "c", "content": "blue"}])).await.status, 200);
        let asked = model.asked().await;
        let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
        assert_eq!(sent, ["do it", "", "blue", "first", "second"]);
        asked.answer("done").await;
        let ended = settled(&app, &run).await;
        assert_eq!((&ended["status"], &ended["answer"]), (&json!("completed"), &json!("done")), "{ended}");
        assert_eq!(app.kinds(run.parse().unwrap()).await.iter().filter(|kind| **kind == "resumed").count(), 1);
        app.finish().await;
    }
}

/// Each of them is told that it was taken, so each of them counts.
#[tokio::test(flavor = "multi_thread")]
async fn limits_that_are_raised_at_the_same_time_are_all_raised() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.client.post("/runs", &request(json!({}))).await.id();
    let asked = model.asked().await;
    let path = format!("/runs/{run}");
    let bodies = [json!({"max_steps": 50}), json!({"max_tool_calls": 60}), json!({"max_tokens": 70_000})];
    let raises = bodies
        .iter()
        .map(|limits| app.client.send(app.client.request(Method::PATCH, &path).json(&json!({"limits": limits}))));
    assert!(join_all(raises).await.iter().all(|answer| answer.status == 200));
    let labels = app.client.request(Method::PATCH, &path).json(&json!({"metadata": {"late": "yes"}}));
    assert_eq!(app.client.send(labels).await.status, 200);
    // However it ends, what it tells last is what is stored.
    assert_eq!(app.client.delete(&path).await.status, 202);
    asked.dropped().await;
    let ended = settled(&app, &run).await;
    let told = app.events_of(run.parse().unwrap(), EventKind::RunEnd).await.pop().unwrap();
    assert_eq!((&told["run"], &ended["status"]), (&ended, &json!("aborted")));
    assert_eq!(ended["metadata"], json!({"late": "yes"}));
    let limits = ended["limits"].clone();
    let raised = ["max_steps", "max_tool_calls", "max_tokens"].map(|name| limits[name].clone());
    assert_eq!(raised, [json!(50), json!(60), json!(70_000)]);
    app.finish().await;
}

/// The time a run has is what was asked for, wherever it was raised.
#[tokio::test]
async fn a_timeout_that_is_raised_in_the_queue_counts_once() {
    let (setup, model) = Setup::stage();
    let setup = setup.toml("[run]\nmax_concurrent = 1\n");
    let app = setup.start().await;
    let first = app.client.post("/runs", &request(json!({}))).await.id();
    let asked = model.asked().await;
    let run = app.client.post("/runs", &request(json!({"limits": {"timeout_ms": 60_000}}))).await.id();
    let path = format!("/runs/{run}");
    let raise = app.client.request(Method::PATCH, &path).json(&json!({"limits": {"timeout_ms": 120_000}}));
    assert_eq!(app.client.send(raise).await.status, 200);
    asked.answer("first").await;
    settled(&app, &first).await;
    model.asked().await.answer("second").await;
    let ended = settled(&app, &run).await;
    let time = |name: &str| ended[name].as_str().unwrap().parse::<jiff::Timestamp>().unwrap().as_millisecond();
    assert_eq!(time("deadline_at") - time("started_at"), 120_000);
    app.finish().await;
}

#[tokio::test]
async fn limits_of_an_active_run_are_raised_and_never_lowered() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::ReadOnly, true);
    let app = setup.tool(tool).start().await;
    let fields = json!({"limits": {"max_steps": 1}, "tools": ["work"], "metadata": {"a": "1"}});
    let run = app.client.post("/runs", &request(fields)).await.id();
    model.asked().await.call(vec![call("w", "work", json!({}))]).await;
    let called = calls.recv().await.unwrap();
    let path = format!("/runs/{run}");
    let before = app.client.get(&path).await.body;
    let patch = async |body: Value| app.client.send(app.client.request(Method::PATCH, &path).json(&body)).await;
    patch(json!({"limits": {"max_steps": 0}})).await.problem(400, "invalid_request");
    patch(json!({"limits": {"max_steps": 100_000}})).await.problem(400, "invalid_request");
    patch(json!({"limit": {}})).await.problem(400, "invalid_request");
    let raised = patch(json!({"limits": {"max_steps": 2, "timeout_ms": 600_000}, "metadata": {"b": "2"}})).await;
    assert_eq!((raised.status, &raised.body["limits"]["max_steps"]), (200, &json!(2)), "{}", raised.text);
    assert_eq!(app.client.get("/runs?metadata.b=2").await.body["data"][0]["id"], json!(run));
    assert_eq!(app.client.get("/runs?metadata.a=1").await.body["data"], json!([]));
    called.returns("x");
    // The step that would have been one too many.
    let asked = model.asked().await;
    assert_ne!(app.client.get(&path).await.body["deadline_at"], before["deadline_at"]);
    asked.answer("done").await;
    let ended = settled(&app, &run).await;
    assert_eq!((&ended["status"], &ended["metadata"]), (&json!("completed"), &json!({"b": "2"})));
    patch(json!({"limits": {"max_steps": 3}})).await.problem(409, "run_conflict");
    app.finish().await;
}

#[tokio::test]
async fn an_erased_run_leaves_nothing_behind_but_that_it_was_there() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let canary = "canary-of-an-erased-run";
    let create = app.client.request(Method::POST, "/runs").header("idempotency-key", "k");
    let run = app.client.send(create.json(&request(json!({"input": canary, "metadata": {"m": canary}})))).await.id();
    let path = format!("/runs/{run}");
    let asked = model.asked().await;
    app.client.delete(&format!("{path}?purge=true")).await.problem(409, "run_conflict");
    asked.answer(canary).await;
    settled(&app, &run).await;
    for _ in 0..2 {
        assert_eq!(app.client.delete(&format!("{path}?purge=true")).await.status, 204);
    }
    for path in [path.clone(), format!("{path}/events"), format!("{path}/events?after=2"), format!("{path}/messages")] {
        app.client.get(&path).await.problem(410, "run_erased");
    }
    let stream = app.client.stream(&format!("{path}/events"), Some("2")).await.err().unwrap();
    stream.problem(410, "run_erased");
    app.client.delete(&path).await.problem(410, "run_erased");
    app.client.get("/runs/run_019000000000700080000000000000ab").await.problem(404, "run_not_found");
    assert_eq!(app.client.count_runs().await, 0);
    app.finish().await;
    for file in ["hames.db", "hames.db-wal"] {
        let bytes = std::fs::read(setup.path(file)).unwrap_or_default();
        assert!(!bytes.windows(canary.len()).any(|window| window == canary.as_bytes()), "{file}");
    }
}

#[tokio::test]
async fn runs_of_a_thread_share_a_conversation_and_take_turns() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let say = |input: &str, on_busy: &str| request(json!({"input": input, "thread": "t", "on_busy": on_busy}));
    let first = app.client.post("/runs", &say("one", "reject")).await.id();
    let asked = model.asked().await;
    app.client.post("/runs", &say("too early", "reject")).await.problem(409, "thread_busy");
    let second = app.client.post("/runs", &say("two", "queue")).await;
    assert_eq!((&second.body["status"], &second.body["previous_run"]), (&json!("queued"), &json!(first)));
    // Others are not held up.
    let other = app.client.post("/runs", &request(json!({}))).await.id();
    model.asked().await.answer("other").await;
    assert_eq!(settled(&app, &other).await["status"], "completed");
    assert_eq!(app.client.get(&format!("/runs/{}", second.id())).await.body["status"], "queued");
    asked.answer("1").await;
    let asked = model.asked().await;
    let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
    assert_eq!(sent, ["one", "1", "two"]);

    let third = app.client.post("/runs", &say("three", "interrupt")).await.id();
    assert_eq!(settled(&app, &second.id()).await["status"], "aborted");
    let asked = model.asked().await;
    assert_eq!(asked.request.messages.last().unwrap().text(), "three");
    asked.answer("3").await;
    settled(&app, &third).await;
    let listed = app.client.get("/runs?thread=t").await.body;
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|run| run["id"].clone()).collect();
    assert_eq!(ids, [json!(third), json!(second.id()), json!(first)]);
    let messages = app.client.get(&format!("/runs/{third}/messages")).await.body;
    assert_eq!(messages["data"].as_array().unwrap().len(), 5, "{messages}");

    let next = app.client.post("/runs", &request(json!({"input": "four", "previous_run": first}))).await.id();
    let asked = model.asked().await;
    let sent: Vec<_> = asked.request.messages.iter().map(|message| message.text()).collect();
    assert_eq!(sent, ["one", "1", "four"]);
    asked.answer("4").await;
    settled(&app, &next).await;
    app.finish().await;
}

/// A run that waits is as busy as any: its question is not lost to a new run.
#[tokio::test]
async fn a_waiting_run_keeps_its_thread() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let fields = json!({"tools": [ask_user()], "thread": "t"});
    let run = waiting(&app, &model, fields, &[("c", "ask_user", json!({"q": "?"}))]).await;
    app.client.post("/runs", &request(json!({"thread": "t"}))).await.problem(409, "thread_busy");
    let queued = app.client.post("/runs", &request(json!({"thread": "t", "on_busy": "queue"}))).await.id();
    assert_eq!(results(&app, &run, json!([{"call_id": "c", "content": "x"}])).await.status, 200);
    model.asked().await.answer("first").await;
    assert_eq!(settled(&app, &run).await["status"], "completed");
    model.asked().await.answer("second").await;
    assert_eq!(settled(&app, &queued).await["status"], "completed");
    app.finish().await;
}
