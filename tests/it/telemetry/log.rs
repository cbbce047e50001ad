//! The records of a run in the log.

use hames::config::{ProviderKind, TelemetryConfig};
use hames::domain::{Effect, FailureClass, ModelFailure, RunStatusName};
use hames::provider::Endpoint;
use hames::provider::retry::Policy;
use serde_json::json;

use super::Watched;
use crate::support::app::Setup;
use crate::support::stage::{call, stage_model, stage_tool};

#[tokio::test]
async fn every_record_between_the_start_and_the_end_of_a_run_names_it() {
    for level in ["warn,hames=trace", "error", "off,hames::tool=trace"] {
        let watched = Watched::new(&TelemetryConfig::default(), level);
        let (mut setup, _) = Setup::stage();
        let (model, prompter) = stage_model();
        let brief = std::time::Duration::from_millis(1);
        let retry = Policy { max_retries: 1, base: brief, cap: brief };
        let endpoint = Endpoint { retry, ..Endpoint::new(model, ProviderKind::Scripted) };
        setup.providers = vec![("stage".to_owned(), endpoint)];
        let (tool, mut calls) = stage_tool("wait", Effect::ReadOnly, true);
        let app = watched.watch(setup.tool(tool)).start().await;
        let before = watched.log.records().len();
        let run = app.create(json!({})).await;
        prompter.asked().await.end(Err(ModelFailure::new(FailureClass::Unavailable, "away"))).await;
        prompter.asked().await.call(vec![call("c1", "wait", json!({}))]).await;
        calls.recv().await.unwrap().panics();
        assert_eq!(app.ended(run.id).await.status.name(), RunStatusName::InternalError);
        app.supervisor.stop();
        app.supervisor.drained().await;
        let records = watched.log.records();
        let records = &records[before..];
        assert!(!records.is_empty(), "{level}");
        let id = run.id.to_string();
        assert!(records.iter().all(|record| record["run_id"] == id), "{level}: {records:#?}");
        let messages: Vec<_> = records.iter().map(|record| record["message"].as_str().unwrap()).collect();
        if level.starts_with("warn") {
            assert_eq!(messages, ["model call failed", "a tool panicked", "run ended"]);
        } else {
            assert_eq!(messages, ["a tool panicked"]);
        }
        app.finish().await;
    }
}
