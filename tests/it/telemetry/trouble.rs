//! Collectors that are gone, refuse, or never answer: runs do not notice, and the end of the program does not wait.

use hames::config::TelemetryConfig;
use hames::domain::RunStatusName;
use hames::telemetry::FLUSH;
use hames::telemetry::trace::RequestSpan;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::collector::{Collector, Manner};
use super::{TRACEPARENT, Watched, coder, conversation};
use crate::support::app::PATIENCE;
use crate::support::upstream::Upstream;

/// How many spans the queue takes.
const QUEUE: u64 = 2_048;

/// Runs the usual conversation and gives its result, and how many spans were lost for this reason.
async fn run_with(watched: Watched, reason: &str) -> (serde_json::Value, u64) {
    let upstream = Upstream::start(conversation()).await;
    let app = watched.watch(coder(&upstream)).start().await;
    let request = app.client.request(reqwest::Method::POST, "/runs").header("traceparent", TRACEPARENT);
    let run = app.client.send(request.json(&json!({"agent": "coder", "input": "x"}))).await.id();
    assert_eq!(app.ended(run.parse().unwrap()).await.status.name(), RunStatusName::Completed);
    let messages = app.client.get(&format!("/runs/{run}/messages")).await.body;
    app.finish().await;
    let metrics = watched.telemetry.metrics().clone();
    tokio::time::timeout(PATIENCE, watched.telemetry.shutdown()).await.expect("the shutdown does not end");
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
    let expected = run_with(Watched::exporting(&good.endpoint, false), "export_failed").await;
    assert_eq!(expected.1, 0);
    let spans = u64::try_from(good.spans().len()).unwrap();

    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let watched = Watched::exporting(&refusing, false);
    let log = watched.log.clone();
    assert_eq!(run_with(watched, "export_failed").await, (expected.0.clone(), spans));
    let warnings: Vec<_> = log.records().into_iter().filter(|record| record["level"] == "WARN").collect();
    // One tells of spans and one of metrics, however many there were.
    assert_eq!(warnings.len(), 2, "{warnings:#?}");
    assert!(warnings.iter().any(|record| record["lost"] == spans), "{warnings:#?}");

    for manner in [Manner::Answers(500), Manner::Answers(503), Manner::Hangs] {
        let bad = Collector::start(manner).await;
        let found = run_with(Watched::exporting(&bad.endpoint, false), "export_failed").await;
        assert_eq!(found, (expected.0.clone(), spans), "{manner:?}");
    }
}

#[tokio::test]
async fn what_a_collector_leaves_out_is_counted() {
    let picky = Collector::start(Manner::LeavesOut(2)).await;
    let (_, rejected) = run_with(Watched::exporting(&picky.endpoint, false), "rejected").await;
    assert_eq!(rejected, 2);
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
    watched.telemetry.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn the_end_waits_for_a_silent_collector_no_longer_than_it_may() {
    // The kernel accepts connections here, and nobody else does.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let watched = Watched::exporting(&format!("http://{}", silent.local_addr().unwrap()), false);
    RequestSpan::begin("GET", None, None, None).answered(200);
    let metrics = watched.telemetry.metrics().clone();
    let start = Instant::now();
    watched.telemetry.shutdown().await;
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
    watched.telemetry.shutdown().await;
    let exposition = metrics.exposition().unwrap();
    assert_eq!(lost(&exposition, "queue_full") + lost(&exposition, "export_failed"), QUEUE + 100);
}
