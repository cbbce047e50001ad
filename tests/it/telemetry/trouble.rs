//! Collectors that are gone, refuse, or never answer: runs do not notice, and the end of the program does not wait.

use std::collections::BTreeMap;

use hames::config::TelemetryConfig;
use hames::domain::RunStatusName;
use hames::telemetry::FLUSH;
use hames::telemetry::trace::RequestSpan;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::{TRACEPARENT, Watched, coder, conversation};
use crate::support::app::PATIENCE;
use crate::support::collector::{Collector, Manner};
use crate::support::upstream::Upstream;

/// How many spans the queue takes.
const QUEUE: u64 = 2_048;

/// How a test waits for the end of telemetry.
#[derive(Clone, Copy)]
enum Patience {
    /// As long as it takes.
    Real,
    /// Nothing comes, so its time passes at once.
    None,
}

/// Runs the usual conversation and gives its result, and how many spans were lost for this reason.
async fn run_with(watched: Watched, reason: &str, patience: Patience) -> (serde_json::Value, u64) {
    let upstream = Upstream::start(conversation()).await;
    let app = watched.watch(coder(&upstream)).start().await;
    let request = app.client.request(reqwest::Method::POST, "/runs").header("traceparent", TRACEPARENT);
    let run = app.client.send(request.json(&json!({"agent": "coder", "input": "x"}))).await.id();
    assert_eq!(app.ended(run.parse().unwrap()).await.status.name(), RunStatusName::Completed);
    let messages = app.client.get(&format!("/runs/{run}/messages")).await.body;
    app.finish().await;
    let metrics = watched.telemetry.metrics().clone();
    match patience {
        Patience::Real => {}
        Patience::None => tokio::time::pause(),
    }
    let ended = tokio::time::timeout(PATIENCE, watched.telemetry.shutdown(FLUSH)).await;
    ended.expect("the shutdown does not end");
    match patience {
        Patience::Real => {}
        Patience::None => tokio::time::resume(),
    }
    (messages, lost(&metrics.exposition().unwrap(), reason))
}

#[track_caller]
fn lost(exposition: &str, reason: &str) -> u64 {
    let start = format!("hames_telemetry_spans_dropped_total{{reason=\"{reason}\"}} ");
    let line = exposition.lines().find_map(|line| line.strip_prefix(&start));
    line.unwrap_or_else(|| panic!("{reason}: {exposition}")).parse().unwrap()
}

#[tokio::test]
async fn a_collector_in_trouble_changes_nothing_in_a_run() {
    let good = Collector::start(Manner::Takes).await;
    let expected = run_with(Watched::exporting(&good.endpoint, false), "export_failed", Patience::Real).await;
    assert_eq!(expected.1, 0);
    let spans = u64::try_from(good.spans().len()).unwrap();

    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let watched = Watched::exporting(&refusing, false);
    let log = watched.log.clone();
    assert_eq!(run_with(watched, "export_failed", Patience::Real).await, (expected.0.clone(), spans));
    let warnings: Vec<_> = log.records().into_iter().filter(|record| record["level"] == "WARN").collect();
    let (of_spans, of_metrics): (Vec<_>, Vec<_>) = warnings.iter().partition(|record| !record["lost"].is_null());
    // A run that takes longer than spans are gathered has a first export that fails, and a last one.
    assert!((1..=2).contains(&of_spans.len()) && of_metrics.len() == 1, "{warnings:#?}");
    assert_eq!(of_spans.last().unwrap()["lost"], spans, "{warnings:#?}");
    for record in warnings {
        let error = record["error"].as_str().unwrap();
        assert!(error.starts_with("it cannot be reached: ") && error.contains("refused"), "{error}");
    }

    for (manner, patience) in [
        (Manner::Answers(500), Patience::Real),
        (Manner::Answers(503), Patience::Real),
        (Manner::Hangs, Patience::None),
    ] {
        let bad = Collector::start(manner).await;
        let found = run_with(Watched::exporting(&bad.endpoint, false), "export_failed", patience).await;
        assert_eq!(found, (expected.0.clone(), spans), "{manner:?}");
    }
}

#[tokio::test]
async fn what_a_collector_leaves_out_is_counted() {
    let picky = Collector::start(Manner::LeavesOut(2)).await;
    let watched = Watched::exporting(&picky.endpoint, false);
    let log = watched.log.clone();
    RequestSpan::begin("GET", None, None, None).answered(200);
    let metrics = watched.telemetry.metrics().clone();
    watched.telemetry.shutdown(FLUSH).await;
    assert_eq!(lost(&metrics.exposition().unwrap(), "rejected"), 2);
    // In the collector's words, and in no others.
    let said = log.records().into_iter().map(|record| (record["lost"].clone(), record["reason"].clone()));
    let said: BTreeMap<_, _> = said.map(|(lost, reason)| (reason.to_string(), lost)).collect();
    assert_eq!(said, BTreeMap::from([("\"never\"".to_owned(), json!(2)), ("\"no\"".to_owned(), json!(2))]));
}

#[tokio::test]
async fn a_loss_that_was_not_told_of_is_told_of_in_the_end() {
    let collector = Collector::start(Manner::Answers(500)).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    // A full batch goes at once.
    for _ in 0..512 {
        RequestSpan::begin("GET", None, None, None).answered(200);
    }
    let told = async {
        while watched.log.records().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, told).await.expect("the loss is not told of");
    RequestSpan::begin("GET", None, None, None).answered(200);
    watched.telemetry.shutdown(FLUSH).await;
    let lost = watched.log.records().into_iter().map(|record| record["lost"].clone()).filter(|lost| !lost.is_null());
    assert_eq!(lost.collect::<Vec<_>>(), [json!(512), json!(513)]);
}

#[tokio::test]
async fn spans_are_sent_while_the_program_goes_on() {
    let collector = Collector::start(Manner::Takes).await;
    let config = TelemetryConfig {
        otlp_endpoint: Some(collector.endpoint.parse().unwrap()),
        metrics_interval_ms: 1,
        ..TelemetryConfig::default()
    };
    let watched = Watched::new(&config, "info");
    collector.requests(2).await;
    // A full batch does not wait for more.
    for _ in 0..512 {
        RequestSpan::begin("GET", None, None, None).answered(200);
    }
    tokio::time::timeout(PATIENCE, async {
        while collector.spans().len() < 512 {
            collector.requests(collector.headers().len() + 1).await;
        }
    })
    .await
    .expect("the spans do not come");
    watched.telemetry.shutdown(FLUSH).await;
}

#[tokio::test(start_paused = true)]
async fn the_end_waits_for_a_silent_collector_no_longer_than_it_may() {
    // The kernel accepts connections here, and nobody else does.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let watched = Watched::exporting(&format!("http://{}", silent.local_addr().unwrap()), false);
    RequestSpan::begin("GET", None, None, None).answered(200);
    let metrics = watched.telemetry.metrics().clone();
    let start = Instant::now();
    watched.telemetry.shutdown(FLUSH).await;
    assert_eq!(start.elapsed(), FLUSH);
    assert_eq!(lost(&metrics.exposition().unwrap(), "export_failed"), 1);
    let said: Vec<_> = watched.log.records().iter().map(|record| record["lost"].clone()).collect();
    assert_eq!(said, [json!(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_full_drops_and_counts() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let watched = Watched::exporting(&format!("http://{}", silent.local_addr().unwrap()), false);
    // The task that sends gets no turn in between.
    for _ in 0..QUEUE + 100 {
        RequestSpan::begin("GET", None, None, None).answered(200);
    }
    let metrics = watched.telemetry.metrics().clone();
    assert_eq!(lost(&metrics.exposition().unwrap(), "queue_full"), 100);
    watched.telemetry.shutdown(FLUSH).await;
    let exposition = metrics.exposition().unwrap();
    assert_eq!(lost(&exposition, "queue_full") + lost(&exposition, "export_failed"), QUEUE + 100);
}
