//! Many runs at once, more than there is room for, and a reader that cannot keep up.

use futures_util::future::join_all;
use hames::domain::{RunStatusName, TenantId};
use hames::run::{Caller, CreateError};
use serde_json::json;

use crate::support::app::Setup;

const SCRIPT: &str = r#"{"turns": [
    {"text": "looking", "tool_calls": [{"name": "list_dir", "arguments": {"path": "."}}]},
    {"text": "done", "usage": {"input_tokens": 3, "output_tokens": 2}}
]}"#;

fn scripted() -> Setup {
    let setup = Setup::empty();
    let script = setup.path("script.json");
    std::fs::write(&script, SCRIPT).unwrap();
    setup.toml(&format!(
        "[providers.script]\nkind = \"scripted\"\nscript = {script:?}\n\
         [agents.test]\nmodel = \"script/m\"\ntools = [\"list_dir\"]\n"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_runs_at_once() {
    let app = scripted().start().await;
    let runs = join_all((0..64).map(|_| app.create(json!({})))).await;
    for run in &runs {
        let ended = app.ended(run.id).await;
        assert_eq!(ended.status.name(), RunStatusName::Completed);
        assert_eq!(
            (ended.steps, ended.tool_calls, ended.usage.model_calls, ended.usage.model_calls_with_usage),
            (2, 1, 2, 1)
        );
        assert_eq!(app.kinds(run.id).await.len(), 11);
    }
    app.finish().await;
}

#[tokio::test]
async fn beyond_its_places_the_server_refuses_and_the_queue_keeps_its_order() {
    let (setup, model) = Setup::stage();
    let app = setup.toml("[run]\nmax_concurrent = 1\nmax_queued = 3\n").start().await;
    let mut runs = Vec::new();
    for _ in 0..4 {
        runs.push(app.create(json!({})).await);
    }
    assert_eq!(runs[0].status.name(), RunStatusName::Running);
    assert!(runs[1..].iter().all(|run| run.status.name() == RunStatusName::Queued));
    let request = serde_json::from_value(json!({"agent": "test", "input": "x"})).unwrap();
    let refused = app.supervisor.create(Caller::untraced(TenantId::local()), request, None).await;
    assert!(matches!(refused, Err(CreateError::Overloaded { .. })), "{refused:?}");
    let listed = app.store.list_runs(&app.tenant(), &hames::store::RunFilter::default(), None, 100).await.unwrap();
    assert_eq!(listed.len(), 4, "a refused request leaves nothing behind");
    for run in &runs {
        let asked = model.asked().await;
        assert_eq!(asked.request.run, run.id, "first come, first served");
        asked.answer("done").await;
        assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);
    }
    app.finish().await;
}

#[tokio::test]
async fn a_place_in_the_queue_is_free_again_after_a_cancel() {
    let (setup, model) = Setup::stage();
    let app = setup.toml("[run]\nmax_concurrent = 1\nmax_queued = 1\n").start().await;
    let held = app.create(json!({})).await;
    let asked = model.asked().await;
    for _ in 0..5 {
        let queued = app.create(json!({})).await;
        app.supervisor.cancel(&app.tenant(), queued.id).await.unwrap().unwrap();
        assert_eq!(app.ended(queued.id).await.status.name(), RunStatusName::Aborted);
    }
    asked.answer("done").await;
    app.ended(held.id).await;
    app.finish().await;
}

/// Slots become free at the moment when those that wait for them are cancelled: asked for is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_meets_a_run_between_queue_and_work_is_not_lost() {
    const EACH: usize = 16;
    let (setup, model) = Setup::stage();
    let app = setup.toml(&format!("[run]\nmax_concurrent = {EACH}\n")).start().await;
    for _ in 0..5 {
        let held = join_all((0..EACH).map(|_| app.create(json!({})))).await;
        let mut asked = Vec::new();
        for _ in &held {
            asked.push(model.asked().await);
        }
        let waiting = join_all((0..EACH).map(|_| app.create(json!({})))).await;
        let tenant = app.tenant();
        let let_go = join_all(asked.into_iter().map(|asked| asked.answer("done")));
        let cancels = join_all(waiting.iter().map(|run| app.supervisor.cancel(&tenant, run.id)));
        let (_, cancelled) = tokio::join!(let_go, cancels);
        assert!(cancelled.into_iter().all(|run| run.unwrap().unwrap().cancel_requested_at.is_some()));
        for run in &waiting {
            assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Aborted);
        }
        for run in &held {
            assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Completed);
        }
        // Calls that had begun before their cancel was asked for were let go.
        model.forget().await;
    }
    app.finish().await;
}

/// A caller that goes away in the middle of a request takes nothing with it.
#[tokio::test]
async fn requests_outlive_their_callers() {
    let (setup, model) = Setup::stage();
    let app = setup.toml("[run]\nmax_concurrent = 1\n").start().await;
    let held = app.create(json!({})).await;
    let asked = model.asked().await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        let run = app.create(json!({})).await;
        let tenant = app.tenant();
        let mut cancel = Box::pin(app.supervisor.cancel(&tenant, run.id));
        // Once around, and gone.
        assert!(futures_util::poll!(&mut cancel).is_pending());
        drop(cancel);
        waiting.push(run);
    }
    for run in waiting {
        assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::Aborted);
    }
    asked.answer("done").await;
    app.ended(held.id).await;
    app.finish().await;
}
