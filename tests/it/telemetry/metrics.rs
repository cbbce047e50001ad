//! The metrics, as a scraper and as a collector get them, and the page that lists them.

use std::collections::{BTreeMap, BTreeSet};

use hames::config::{Env, ProviderKind, TelemetryConfig};
use hames::domain::{Effect, EventKind, FailureClass, ModelFailure};
use hames::provider::Endpoint;
use hames::provider::retry::Policy;
use hames::telemetry::metric::{Kind, METRICS, Metric, Unit};
use hames::telemetry::{FLUSH, Telemetry};
use opentelemetry_proto::tonic::metrics::v1::AggregationTemporality;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use prometheus_parse::{Sample, Scrape, Value};
use serde_json::json;

use super::{CANARIES, KEY, Watched, coder, conversation};
use crate::support::app::{PATIENCE, Setup, TestApp};
use crate::support::collector::{Collector, Manner, attributes};
use crate::support::stage::{call, stage_model, stage_tool};
use crate::support::upstream::Upstream;

const PAGE: &str = include_str!("../../../docs/metrics.md");

/// Lets a service do everything that is counted, and gives what it then shows.
async fn everything(setup: Setup) -> (TestApp, String) {
    let mut setup = setup;
    let (model, prompter) = stage_model();
    let brief = std::time::Duration::from_millis(1);
    let retry = Policy { max_retries: 1, base: brief, cap: brief };
    setup.providers = vec![("stage".to_owned(), Endpoint { retry, ..Endpoint::new(model, ProviderKind::Scripted) })];
    let (tool, mut calls) = stage_tool("wait", Effect::ReadOnly, true);
    let app = setup.tool(tool).start().await;
    let mut stream = app.client.create_and_stream(&json!({"agent": "test", "input": "canary-prompt"})).await.unwrap();
    prompter.asked().await.end(Err(ModelFailure::new(FailureClass::RateLimited, "wait"))).await;
    let asked = prompter.asked().await;
    asked.text("hm").await;
    let during = app.client.get("/metrics").await.text;
    for line in ["hames_sse_readers 1", "hames_runs_active 1", "hames_runs_queued 0"] {
        assert!(during.lines().any(|found| found == line), "{line}: {during}");
    }
    let made_up = call("c2", "canary_tool_made_up", json!({}));
    asked.call(vec![call("c1", "wait", json!({"a": "canary-argument"})), made_up]).await;
    calls.recv().await.unwrap().returns("canary-result");
    prompter.asked().await.answer("canary-answer").await;
    while stream.next().await.is_some() {}
    drop(stream);
    assert_eq!(app.client.get("/runs/canary-path").await.status, 404);
    assert_eq!(app.client.get("/canary-path").await.status, 404);
    let brew = reqwest::Method::from_bytes(b"CANARYBREW").unwrap();
    assert_eq!(app.client.send(app.client.request(brew, "/runs")).await.status, 405);
    // What is held by the task of the run and by the connection of the reader goes after the end of the stream.
    let settled = async {
        loop {
            let answer = app.client.get("/metrics").await;
            let is_idle = |name: &str| answer.text.lines().any(|line| line == format!("{name} 0"));
            if is_idle("hames_sse_readers") && is_idle("hames_runs_active") {
                return answer;
            }
            tokio::task::yield_now().await;
        }
    };
    let answer = tokio::time::timeout(PATIENCE, settled).await.expect("the service does not come to rest");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    (app, answer.text)
}

fn scrape(text: &str) -> Scrape {
    // The parser takes a brace in the value of a label for the end of all labels.
    let text = text.replace("{id}", ":id");
    let scrape = Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap();
    let lines = |sample: &Sample| match &sample.value {
        Value::Histogram(buckets) => buckets.len(),
        Value::Counter(_) | Value::Gauge(_) | Value::Untyped(_) | Value::Summary(_) => 1,
    };
    let read: usize = scrape.samples.iter().map(lines).sum();
    assert_eq!(read, text.lines().filter(|line| !line.starts_with('#')).count(), "lines that cannot be read: {text}");
    scrape
}

/// The value of a sample that is no histogram.
#[track_caller]
fn value(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let matches = |sample: &&Sample| {
        sample.metric == name && labels.iter().all(|(label, value)| sample.labels.get(label) == Some(value))
    };
    let scrape = scrape(text);
    let sample = scrape.samples.iter().find(matches).unwrap_or_else(|| panic!("{name} {labels:?}: {text}"));
    match sample.value {
        Value::Counter(value) | Value::Gauge(value) | Value::Untyped(value) => value,
        Value::Histogram(_) | Value::Summary(_) => panic!("{name}"),
    }
}

#[tokio::test]
async fn what_is_exposed_is_what_the_table_says() {
    let (setup, _) = Setup::stage();
    let (app, text) = everything(setup).await;
    let mut types = BTreeMap::new();
    let mut helps = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            assert_eq!(types.insert(name, kind), None, "{name} has two types");
        } else if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            assert_eq!(helps.insert(name, help), None, "{name} has two helps");
        }
    }
    let names: BTreeMap<_, _> = METRICS.iter().map(|metric| (metric.exposed_name(), *metric)).collect();
    assert_eq!(names.len(), METRICS.len(), "a name stands twice");
    let shown = |of: fn(&Metric) -> &'static str| -> BTreeMap<&str, &str> {
        names.iter().map(|(name, metric)| (name.as_str(), of(metric))).collect()
    };
    assert_eq!(types, shown(Metric::exposed_kind));
    assert_eq!(helps, shown(|metric| metric.help));

    // The text is read by somebody else's parser; each sample has the labels of its metric.
    let scrape = scrape(&text);
    let mut seen = BTreeSet::new();
    for sample in &scrape.samples {
        let name = ["_sum", "_count"]
            .iter()
            .find_map(|end| sample.metric.strip_suffix(end).filter(|name| names.contains_key(*name)))
            .unwrap_or(&sample.metric);
        let metric = names.get(name).unwrap_or_else(|| panic!("{name} is not in the table"));
        seen.insert(name.to_owned());
        let labels: BTreeSet<_> = sample.labels.keys().map(String::as_str).filter(|label| *label != "le").collect();
        assert_eq!(labels, metric.labels.iter().copied().collect(), "{name}");
        if let Value::Histogram(buckets) = &sample.value {
            assert!(buckets.last().unwrap().less_than.is_infinite(), "{name}");
            assert!(buckets.windows(2).all(|pair| pair[0].count <= pair[1].count), "{name}");
        }
    }
    assert_eq!(seen, names.keys().cloned().collect(), "metrics without a sample");
    assert!(!text.contains("canary") && !text.contains("CANARY"), "a label holds what somebody wrote: {text}");

    for (name, labels, expected) in [
        ("hames_runs_ended_total", &[("agent", "test"), ("status", "completed")][..], 1.0),
        ("hames_run_duration_seconds_count", &[("agent", "test"), ("status", "completed")], 1.0),
        ("hames_step_duration_seconds_count", &[("agent", "test")], 2.0),
        ("hames_tool_duration_seconds_count", &[("tool", "wait"), ("outcome", "result")], 1.0),
        ("hames_model_call_duration_seconds_count", &[("outcome", "rate_limited"), ("model", "m")], 1.0),
        ("hames_model_call_duration_seconds_count", &[("outcome", "ok"), ("provider", "stage")], 2.0),
        ("hames_model_time_to_first_token_seconds_count", &[("provider", "stage")], 1.0),
        ("hames_model_retries_total", &[("class", "rate_limited")], 1.0),
        ("hames_tokens_total", &[("kind", "input")], 20.0),
        ("hames_tokens_total", &[("kind", "output")], 10.0),
        ("hames_sse_readers", &[], 0.0),
        ("hames_runs_active", &[], 0.0),
        ("hames_http_requests_total", &[("method", "POST"), ("route", "/runs"), ("status", "200")], 1.0),
        ("hames_http_requests_total", &[("method", "GET"), ("route", "/runs/:id"), ("status", "404")], 1.0),
        ("hames_http_requests_total", &[("method", "GET"), ("route", "unmatched"), ("status", "404")], 1.0),
        ("hames_http_requests_total", &[("method", "_OTHER"), ("status", "405")], 1.0),
        ("hames_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1.0),
    ] {
        assert_eq!(value(&text, name, labels), expected, "{name} {labels:?}");
    }
    let commits = value(&text, "hames_store_commit_duration_seconds_count", &[]);
    assert!(commits >= 5.0 && value(&text, "hames_store_commit_writes_sum", &[]) >= commits);
    assert!(value(&text, "process_resident_memory_bytes", &[]) > 1_000_000.0);
    assert!(value(&text, "process_start_time_seconds", &[]) > 1_600_000_000.0);
    app.finish().await;
}

#[tokio::test]
async fn a_retry_counts_once_it_is_made() {
    let (mut setup, _) = Setup::stage();
    let (model, prompter) = stage_model();
    let brief = std::time::Duration::from_millis(1);
    let retry = Policy { max_retries: 1, base: brief, cap: brief };
    setup.providers = vec![("stage".to_owned(), Endpoint { retry, ..Endpoint::new(model, ProviderKind::Scripted) })];
    let app = setup.start().await;
    let busy = |seconds: u64| {
        let retry_after = Some(std::time::Duration::from_secs(seconds));
        Err(ModelFailure { retry_after, ..ModelFailure::new(FailureClass::RateLimited, "wait") })
    };
    let retried = async || app.client.get("/metrics").await.text.contains("hames_model_retries_total{");
    // This one is cancelled while it waits.
    let run = app.create(json!({})).await;
    prompter.asked().await.end(busy(60)).await;
    let waits = async {
        while app.events_of(run.id, EventKind::ModelRetry).await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waits).await.expect("the failure is not told of");
    assert!(!retried().await, "a retry that only waits is counted");
    app.supervisor.cancel(&app.tenant(), run.id).await.unwrap();
    app.ended(run.id).await;
    assert!(!retried().await, "a retry that was not made is counted");

    let run = app.create(json!({})).await;
    prompter.asked().await.end(busy(0)).await;
    prompter.asked().await.answer("done").await;
    app.ended(run.id).await;
    assert!(retried().await);
    app.finish().await;
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    for metric in METRICS {
        let name = metric.exposed_name();
        let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        assert!(is_name && (name.starts_with("hames_") || name.starts_with("process_")), "{name}");
        assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
        let base = name.trim_end_matches("_total");
        assert_eq!(base.ends_with("_seconds"), metric.unit == Unit::Seconds, "{name}");
        assert_eq!(base.ends_with("_bytes"), metric.unit == Unit::Bytes, "{name}");
        assert!(!base.ends_with("_count") && !base.ends_with("_sum") && !base.ends_with("_bucket"), "{name}");
        assert!(metric.help.ends_with('.') && metric.help.len() > 20, "{name}: {}", metric.help);
        if let Kind::Histogram(bounds) = metric.kind {
            assert!(bounds.is_sorted() && !bounds.is_empty(), "{name}");
        }
    }
}

#[test]
fn the_page_lists_every_metric_and_no_other() {
    let row = |metric: &&Metric| {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = labels.join(", ");
        format!("| `{}` | {} | {labels} | {} |", metric.exposed_name(), metric.exposed_kind(), metric.help)
            .replace("|  |", "| |")
    };
    let expected: Vec<_> = METRICS.iter().map(row).collect();
    let found: Vec<_> = PAGE.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(found, expected, "docs/metrics.md should hold:\n{}", expected.join("\n"));
}

#[tokio::test]
async fn a_collector_gets_the_same_metrics() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, _) = Setup::stage();
    let (app, _) = everything(watched.watch(setup)).await;
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;
    let exported = collector.metrics();
    let names: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(exported.keys().map(String::as_str).collect::<BTreeSet<_>>(), names);
    for metric in METRICS {
        let exported = &exported[metric.name];
        assert_eq!(exported.description, metric.help);
        let unit = match metric.unit {
            Unit::Count => "",
            Unit::Seconds => "s",
            Unit::Bytes => "By",
        };
        assert_eq!(exported.unit, unit, "{}", metric.name);
    }
    let Some(Data::Sum(ended)) = &exported["hames.runs.ended"].data else { panic!() };
    assert!(ended.is_monotonic && ended.aggregation_temporality() == AggregationTemporality::Cumulative);
    assert_eq!(json!(attributes(&ended.data_points[0].attributes)), json!({"agent": "test", "status": "completed"}));
    let told = format!("{exported:?}");
    assert!(!told.contains("canary") && !told.contains("CANARY"), "{told}");
}

#[tokio::test]
async fn two_services_in_one_process_count_for_themselves() {
    let (setup, _) = Setup::stage();
    let (busy, text) = everything(setup).await;
    let (setup, _idle_model) = Setup::stage();
    let idle = setup.start().await;
    assert_eq!(value(&text, "hames_runs_ended_total", &[]), 1.0);
    let other = idle.client.get("/metrics").await.text;
    assert!(!other.contains("hames_runs_ended_total") && !other.contains("hames_tokens_total"), "{other}");
    busy.finish().await;
    idle.finish().await;
}

#[tokio::test]
async fn no_key_and_no_content_is_counted() {
    let upstream = Upstream::start(conversation()).await;
    let app = coder(&upstream).start().await;
    let run = app.client.post("/runs", &json!({"agent": "coder", "input": "canary-prompt"})).await.id();
    app.ended(run.parse().unwrap()).await;
    let text = app.client.get("/metrics").await.text;
    for canary in CANARIES {
        assert!(!text.contains(canary), "{canary}");
    }
    app.finish().await;
}

#[tokio::test]
async fn a_collector_gets_its_headers_and_nobody_else_sees_them() {
    let collector = Collector::start(Manner::Takes).await;
    let env = Env::from_iter([
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_HEADERS", &format!("authorization=Bearer%20{KEY}")),
    ]);
    let config = hames::config::load(None, &env).unwrap();
    assert!(!format!("{config:?}").contains(KEY));
    let telemetry = Telemetry::new(&config.telemetry, "test").unwrap();
    assert!(!telemetry.metrics().exposition().unwrap().contains(KEY));
    telemetry.shutdown(FLUSH).await;
    let headers = collector.headers();
    assert!(!headers.is_empty());
    for headers in headers {
        assert_eq!(headers["authorization"], format!("Bearer {KEY}"));
        assert_eq!(headers["content-type"], "application/x-protobuf");
    }
}

#[test]
fn a_setting_wins_over_the_standard_variable() {
    let env = |more: &[(&str, &str)]| {
        Env::from_iter([("OTEL_EXPORTER_OTLP_ENDPOINT", "http://of.env:1")].iter().chain(more).copied())
    };
    let endpoint = |more| {
        let config = hames::config::load(None, &env(more)).map_err(|problems| problems.to_string())?;
        Ok::<_, String>(config.telemetry.otlp_endpoint.map(|endpoint| endpoint.to_string()))
    };
    assert_eq!(endpoint(&[]), Ok(Some("http://of.env:1/".to_owned())));
    let setting = ("HAMES_TELEMETRY__OTLP_ENDPOINT", "http://of.setting:2");
    assert_eq!(endpoint(&[setting]), Ok(Some("http://of.setting:2/".to_owned())));
    assert_eq!(TelemetryConfig::default().otlp_endpoint, None);
    let bad = Env::from_iter([("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")]);
    let problems = hames::config::load(None, &bad).unwrap_err().to_string();
    let expected =
        "environment variable OTEL_EXPORTER_OTLP_ENDPOINT: has the scheme `localhost`; expected http or https";
    assert_eq!(problems, expected);
}
