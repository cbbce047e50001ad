//! Cancel and deadline, wherever they meet a run: nothing new starts, what was heard is kept, every call is answered.

use std::time::Duration;

use hames::domain::{Effect, FailureClass, Message, ModelFailure, OutcomeKind, Run, RunStatusName, RunView};
use serde_json::{Value, json};

use crate::support::app::{Setup, TestApp};
use crate::support::stage::{Asked, call, stage_tool};

/// Long enough for a test to get where it wants to be, short enough to wait for.
const DEADLINE_MS: u64 = 3_000;

#[derive(Clone, Copy, Debug)]
enum Cause {
    Cancel,
    Deadline,
}

const CAUSES: [Cause; 2] = [Cause::Cancel, Cause::Deadline];

impl Cause {
    async fn create(self, app: &TestApp) -> Run {
        match self {
            Self::Cancel => app.create(json!({})).await,
            Self::Deadline => app.create(json!({"limits": {"timeout_ms": DEADLINE_MS}})).await,
        }
    }

    /// Lets it happen and gives the ended run.
    async fn happens(self, app: &TestApp, run: &Run) -> Value {
        if let Self::Cancel = self {
            let answer = app.supervisor.cancel(&app.tenant(), run.id).await.unwrap().unwrap();
            assert!(answer.cancel_requested_at.is_some());
        }
        let ended = app.ended(run.id).await;
        let (status, last) = match self {
            Self::Cancel => (RunStatusName::Aborted, vec!["cancel_requested"]),
            Self::Deadline => (RunStatusName::Timeout, vec![]),
        };
        assert_eq!(ended.status.name(), status);
        let kinds = app.kinds(run.id).await;
        assert_eq!(kinds.iter().filter(|kind| **kind == "run_end").count(), 1);
        for kind in last {
            assert!(kinds.contains(&kind), "{kinds:?}");
        }
        serde_json::to_value(RunView::from(&ended)).unwrap()
    }
}

async fn tool_results(app: &TestApp, run: &Run) -> Vec<(String, OutcomeKind, String)> {
    let messages = app.transcript(run.id).await;
    messages
        .into_iter()
        .filter_map(|message| match message {
            Message::Tool(result) => Some((result.call_id, result.outcome, result.content)),
            Message::User(_) | Message::Assistant(_) => None,
        })
        .collect()
}

#[tokio::test]
async fn in_the_queue_it_never_starts() {
    let (setup, model) = Setup::stage();
    let app = setup.toml("[run]\nmax_concurrent = 1\n").start().await;
    let first = app.create(json!({})).await;
    let held = model.asked().await;
    let queued = app.create(json!({})).await;
    assert_eq!(queued.status.name(), RunStatusName::Queued);
    let view = Cause::Cancel.happens(&app, &queued).await;
    assert_eq!((&view["started_at"], &view["partial"], &view["steps"]), (&json!(null), &json!(null), &json!(0)));
    assert_eq!(app.kinds(queued.id).await, ["run_queued", "cancel_requested", "run_end"]);
    held.answer("done").await;
    app.ended(first.id).await;
    assert!(model.is_quiet().await, "the cancelled run never called the model");
    app.finish().await;
}

async fn let_go(asked: &Asked) {
    tokio::time::timeout(Duration::from_secs(10), asked.dropped()).await.expect("the model call goes on");
}

#[tokio::test]
async fn while_the_model_is_silent() {
    for cause in CAUSES {
        let (setup, model) = Setup::stage();
        let app = setup.start().await;
        let run = cause.create(&app).await;
        let asked = model.asked().await;
        let view = cause.happens(&app, &run).await;
        let_go(&asked).await;
        assert_eq!(view["partial"], json!(null));
        app.finish().await;
    }
}

#[tokio::test]
async fn in_mid_answer_the_text_so_far_is_kept() {
    for cause in CAUSES {
        let (setup, model) = Setup::stage();
        let app = setup.start().await;
        let run = cause.create(&app).await;
        let asked = model.asked().await;
        asked.reasoning("hm").await;
        asked.text("The capital ").await;
        asked.text("of").await;
        let view = cause.happens(&app, &run).await;
        let_go(&asked).await;
        assert_eq!(view["partial"], "The capital of");
        let last = serde_json::to_value(app.transcript(run.id).await.pop().unwrap()).unwrap();
        assert_eq!(
            last,
            json!({"role": "assistant", "incomplete": true,
                   "content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "The capital of"}]})
        );
        app.finish().await;
    }
}

#[tokio::test]
async fn while_it_waits_to_try_the_model_again() {
    for cause in CAUSES {
        let (setup, model) = Setup::stage();
        let app = setup.start().await;
        let run = cause.create(&app).await;
        let failure = ModelFailure {
            retry_after: Some(Duration::from_millis(DEADLINE_MS / 2)),
            ..ModelFailure::new(FailureClass::RateLimited, "slow down")
        };
        model.asked().await.end(Err(failure.clone())).await;
        if let Cause::Deadline = cause {
            // The second wait would pass the deadline, so the failure stands.
            let asked = model.asked().await;
            asked.end(Err(ModelFailure { retry_after: Some(Duration::from_secs(60)), ..failure })).await;
            assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::ModelError);
        } else {
            let view = cause.happens(&app, &run).await;
            assert_eq!(view["steps"], 0);
        }
        app.finish().await;
    }
}

#[tokio::test]
async fn in_a_tool_that_obeys_and_in_one_that_does_not() {
    for cause in CAUSES {
        for obeys in [true, false] {
            let (setup, model) = Setup::stage();
            let (quick, mut quick_calls) = stage_tool("quick", Effect::ReadOnly, true);
            let (slow, mut slow_calls) = stage_tool("slow", Effect::ReadOnly, obeys);
            let (never, mut never_calls) = stage_tool("never", Effect::SideEffect, true);
            let app = setup.tool(quick).tool(slow).tool(never).start().await;
            let run = cause.create(&app).await;
            let batch =
                vec![call("a", "quick", json!({})), call("b", "slow", json!({})), call("c", "never", json!({}))];
            model.asked().await.call(batch).await;
            quick_calls.recv().await.unwrap().returns("real result");
            let running = slow_calls.recv().await.unwrap();
            while app.transcript(run.id).await.len() < 3 {
                tokio::task::yield_now().await;
            }
            cause.happens(&app, &run).await;
            drop(running);
            let results = tool_results(&app, &run).await;
            assert_eq!(results[0], ("a".to_owned(), OutcomeKind::Result, "real result".to_owned()));
            assert_eq!((results[1].0.as_str(), results[1].1), ("b", OutcomeKind::Aborted));
            assert!(!results[1].2.contains("before this call was started"), "{results:?}");
            assert_eq!((results[2].0.as_str(), results[2].1), ("c", OutcomeKind::Aborted));
            assert!(results[2].2.contains("before this call was started"), "{results:?}");
            assert!(never_calls.is_empty() && never_calls.try_recv().is_err());
            app.finish().await;
        }
    }
}

#[tokio::test]
async fn asking_again_and_asking_too_late_change_nothing() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    let run = app.create(json!({})).await;
    let asked = model.asked().await;
    let first = app.supervisor.cancel(&app.tenant(), run.id).await.unwrap().unwrap();
    let second = app.supervisor.cancel(&app.tenant(), run.id).await.unwrap().unwrap();
    assert_eq!(first.cancel_requested_at, second.cancel_requested_at);
    let_go(&asked).await;
    let ended = app.ended(run.id).await;
    let third = app.supervisor.cancel(&app.tenant(), run.id).await.unwrap().unwrap();
    assert_eq!(third, ended);

    let done = app.create(json!({})).await;
    model.asked().await.answer("done").await;
    let done = app.ended(done.id).await;
    assert_eq!(app.supervisor.cancel(&app.tenant(), done.id).await.unwrap().unwrap(), done);
    let nobody = hames::domain::RunId::new(uuid::Uuid::nil());
    assert_eq!(app.supervisor.cancel(&app.tenant(), nobody).await.unwrap(), None);
    app.finish().await;
}

/// Cancel and completion race; whoever wins, there is one ending and the final event shows the run as stored.
#[tokio::test]
async fn a_cancel_that_races_the_answer_leaves_one_ending() {
    let (setup, model) = Setup::stage();
    let app = setup.start().await;
    for _ in 0..100 {
        let run = app.create(json!({})).await;
        let asked = model.asked().await;
        let tenant = app.tenant();
        let (_, cancelled) = tokio::join!(
            async {
                // The cancel may have been first.
                asked.try_text("x").await && asked.try_answer("done").await
            },
            app.supervisor.cancel(&tenant, run.id)
        );
        assert!(cancelled.unwrap().is_some());
        let ended = app.ended(run.id).await;
        let mut ends = app.events_of(run.id, hames::domain::EventKind::RunEnd).await;
        assert_eq!(ends.len(), 1);
        assert_eq!(ends.pop().unwrap()["run"], serde_json::to_value(RunView::from(&ended)).unwrap());
    }
    app.finish().await;
}
