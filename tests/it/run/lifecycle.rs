//! From acceptance to the end: what is stored, in which order, and what the model gets to see.

use std::sync::Arc;
use std::time::Duration;

use hames::domain::{Effect, EventKind, FailureClass, ModelFailure, OutcomeKind, RunStatusName, Timestamp};
use hames::time::{Clock, ManualClock};
use hames::tool::ToolError;
use serde_json::json;
use tokio::time::Instant;

use crate::support::app::Setup;
use crate::support::stage::{call, stage_tool};

#[tokio::test]
async fn an_answer_with_a_tool_call_in_between() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("look", Effect::ReadOnly, true);
    let app = setup.tool(tool).start().await;
    let run = app.create(json!({})).await;
    assert_eq!((run.status.name(), run.generation, run.last_seq), (RunStatusName::Running, 1, 3));

    let asked = model.asked().await;
    assert_eq!((asked.request.step, asked.request.attempt, asked.request.messages.len()), (1, 1, 1));
    assert!(asked.request.tools.iter().any(|tool| tool.name.as_str() == "look"));
    asked.text("let me ").await;
    asked.call(vec![call("c1", "look", json!({"at": "it"}))]).await;
    let called = calls.recv().await.unwrap();
    assert_eq!((called.id.as_str(), json!(called.arguments)), ("c1", json!({"at": "it"})));
    // The start of a call is durable before the call.
    assert_eq!(app.events_of(run.id, EventKind::ToolStart).await.len(), 1);
    called.returns("seen");

    let asked = model.asked().await;
    assert_eq!((asked.request.step, asked.request.messages.len()), (2, 3));
    asked.answer("all done").await;
    let ended = app.ended(run.id).await;
    assert_eq!(ended.status.name(), RunStatusName::Completed);
    assert_eq!((ended.steps, ended.tool_calls), (2, 1));
    assert_eq!((ended.usage.input_tokens, ended.usage.output_tokens, ended.usage.model_calls_with_usage), (20, 10, 2));
    assert_eq!(
        app.kinds(run.id).await,
        [
            "run_queued",
            "run_start",
            "model_start",
            "model_end",
            "message",
            "tool_start",
            "tool_end",
            "model_start",
            "model_end",
            "message",
            "run_end"
        ]
    );
    let last = app.events_of(run.id, EventKind::RunEnd).await.pop().unwrap();
    let view = serde_json::to_value(hames::domain::RunView::from(&ended)).unwrap();
    assert_eq!(last["run"], view, "the final event shows the run as stored");
    let roles: Vec<_> = app
        .transcript(run.id)
        .await
        .iter()
        .map(|message| serde_json::to_value(message).unwrap()["role"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    app.finish().await;
}

#[tokio::test]
async fn tool_failures_are_answers_the_model_can_repair() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
    let app = setup.tool(tool).start().await;
    let run = app.create(json!({"limits": {"tool_timeout_ms": 50}})).await;
    let batch = vec![
        call("a", "work", json!({"n": 1})),
        call("b", "nonsense", json!({})),
        call("c", "read_file", json!({"path": 7})),
        call("d", "work", json!({"n": 2})),
    ];
    model.asked().await.call(batch).await;
    calls.recv().await.unwrap().fails(ToolError::Respond("try n = 3".to_owned()));
    let slow = calls.recv().await.unwrap();
    assert_eq!(slow.id, "d");
    let asked = model.asked().await;
    let results: Vec<_> = asked
        .request
        .messages
        .iter()
        .filter_map(|message| match message.as_ref() {
            hames::domain::Message::Tool(result) => {
                Some((result.call_id.as_str(), result.outcome, result.content.as_str()))
            }
            _ => None,
        })
        .collect();
    let kinds: Vec<_> = results.iter().map(|(id, kind, _)| (*id, *kind)).collect();
    // Refused calls are answered at once; the others in the order they ran.
    for expected in
        [("a", OutcomeKind::Error), ("b", OutcomeKind::Error), ("c", OutcomeKind::Error), ("d", OutcomeKind::TimedOut)]
    {
        assert!(kinds.contains(&expected), "{kinds:?}");
    }
    let text = |id: &str| results.iter().find(|(call_id, ..)| *call_id == id).unwrap().2;
    assert_eq!(text("a"), "try n = 3");
    assert!(text("b").contains("No tool is named `nonsense`") && text("b").contains("read_file"), "{}", text("b"));
    assert!(text("c").contains("$.path"), "{}", text("c"));
    asked.answer("ok").await;
    assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);
    app.finish().await;
}

#[tokio::test]
async fn a_failing_provider_is_tried_again_and_then_named() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    for attempt in 1..=3 {
        let asked = model.asked().await;
        assert_eq!((asked.request.step, asked.request.attempt), (1, attempt));
        asked.text(&format!("attempt {attempt}")).await;
        let failure = ModelFailure {
            retry_after: Some(Duration::from_millis(1)),
            ..ModelFailure::new(FailureClass::Unavailable, "503 from upstream")
        };
        asked.end(Err(failure)).await;
    }
    let ended = app.ended(run.id).await;
    assert_eq!(
        app.kinds(run.id).await,
        ["run_queued", "run_start", "model_start", "model_retry", "model_retry", "model_error", "message", "run_end"]
    );
    let view = serde_json::to_value(hames::domain::RunView::from(&ended)).unwrap();
    assert_eq!(view["status"], "model_error");
    assert_eq!(
        view["error"],
        json!({"code": "provider_unavailable", "message": "503 from upstream", "retryable": true})
    );
    assert_eq!(view["partial"], "attempt 3");
    app.finish().await;
}

#[tokio::test]
async fn panics_and_fatal_tools_end_their_own_run_only() {
    let (setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("work", Effect::SideEffect, true);
    let app = setup.tool(tool).start().await;
    let bystander = app.create(json!({})).await;
    let held = model.asked().await;

    let provider_panics = app.create(json!({})).await;
    model.asked().await.panic().await;
    let tool_panics = app.create(json!({})).await;
    model.asked().await.call(vec![call("a", "work", json!({}))]).await;
    calls.recv().await.unwrap().panics();
    let fatal = app.create(json!({})).await;
    model.asked().await.call(vec![call("b", "work", json!({}))]).await;
    calls.recv().await.unwrap().fails(ToolError::Fatal("the disk is gone".to_owned()));

    for (run, code) in [(&provider_panics, "panicked"), (&tool_panics, "tool_failed"), (&fatal, "tool_failed")] {
        let view = serde_json::to_value(hames::domain::RunView::from(&app.ended(run.id).await)).unwrap();
        assert_eq!((view["status"].as_str(), view["error"]["code"].as_str()), (Some("internal_error"), Some(code)));
        assert_eq!(app.kinds(run.id).await.last(), Some(&"run_end"));
    }
    held.answer("unharmed").await;
    assert_eq!(app.ended(bystander.id).await.status.name(), RunStatusName::Completed);
    app.finish().await;
}

// rune-org/rune#417: the machine's clock steps back during a run.
#[tokio::test]
async fn a_clock_that_steps_back_makes_no_time_go_back() {
    let (mut setup, model) = Setup::stage();
    let (tool, mut calls) = stage_tool("look", Effect::ReadOnly, true);
    let start = Timestamp::from_millis(1_796_000_000_000);
    let clock = Arc::new(ManualClock::new(start));
    setup.clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let app = setup.tool(tool).start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    let begun = Instant::now();
    clock.advance(Duration::from_secs(3_600));
    while begun.elapsed() < Duration::from_millis(20) {
        tokio::task::yield_now().await;
    }
    asked.call(vec![call("a", "look", json!({}))]).await;
    let called = calls.recv().await.unwrap();
    clock.set(Timestamp::from_millis(start.as_millis() - 10_000));
    called.returns("seen");
    model.asked().await.answer("done").await;
    let ended = app.ended(run.id).await;
    let events = app.events(run.id).await;
    assert!(events.is_sorted_by_key(|event| event.time), "{events:?}");
    let view = serde_json::to_value(hames::domain::RunView::from(&ended)).unwrap();
    assert_eq!(view["finished_at"], start.plus(Duration::from_secs(3_600)).to_string());
    // Measured, and not computed from the times above: those say an hour, or less than nothing.
    let took = app.events_of(run.id, EventKind::RunEnd).await.pop().unwrap()["duration_ms"].as_u64().unwrap();
    assert!((20..3_600_000).contains(&took), "{took}");
    app.finish().await;
}

// co-l/openfox#226: the bound on a whole attempt holds while bytes flow, too.
#[tokio::test]
async fn a_model_call_ends_with_its_timeout_and_only_a_silent_one_is_made_again() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({"limits": {"model_timeout_ms": 100}})).await;
    let silent = model.asked().await;
    silent.dropped().await;
    let talking = model.asked().await;
    assert_eq!(talking.request.attempt, 2);
    talking.text("once upon a").await;
    talking.dropped().await;
    let view = serde_json::to_value(hames::domain::RunView::from(&app.ended(run.id).await)).unwrap();
    assert_eq!((view["status"].as_str(), view["error"]["code"].as_str()), (Some("model_error"), Some("model_timeout")));
    assert_eq!(view["partial"], "once upon a");
    assert!(model.is_quiet().await, "a response that is only long is not asked for again");
    app.finish().await;
}
