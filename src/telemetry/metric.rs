//! The metrics, read two ways: by `GET /metrics` in the text form of Prometheus, and by a collector over OTLP.
//!
//! Both read the same instruments of OpenTelemetry's SDK. The text is made by `opentelemetry-prometheus`, which the
//! OpenTelemetry project maintains with the SDK and releases with each of its versions.
//!
//! What each of them is stands in the table [`METRICS`].

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::metrics::{Counter, Histogram, Meter, MeterProvider as _, UpDownCounter};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::reader::MetricReader;
use opentelemetry_sdk::metrics::{InstrumentKind, ManualReader, Pipeline, SdkMeterProvider, Temporality};
use prometheus::TextEncoder;

use super::queue::DroppedSpans;
use super::table::{
    AGENT, BUILD, CLASS, COMMIT_DURATION, COMMIT_WRITES, EXPORT_LOST, FIRST_TOKEN, HTTP_DURATION, HTTP_REQUESTS, KIND,
    METHOD, MODEL, MODEL_DURATION, OUTCOME, PROVIDER, REASON, RETRIES, ROUTE, RUN_DURATION, RUNS_ACTIVE, RUNS_ENDED,
    RUNS_QUEUED, SSE_READERS, STATUS, STEP_DURATION, TOKENS, TOOL, TOOL_DURATION, VERSION,
};
pub use super::table::{Bounds, Kind, METRICS, Metric, Unit};
use super::{SCOPE, TelemetryError, process};
use crate::domain::{FailureClass, OutcomeKind, RunStatusName, TokenUsage};

/// The media type of the text form of Prometheus.
pub const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Metric {
    fn counter(&self, meter: &Meter) -> Counter<u64> {
        meter.u64_counter(self.name).with_unit(self.unit()).with_description(self.help).build()
    }

    fn up_down_counter(&self, meter: &Meter) -> UpDownCounter<i64> {
        meter.i64_up_down_counter(self.name).with_unit(self.unit()).with_description(self.help).build()
    }

    fn histogram(&self, meter: &Meter) -> Histogram<f64> {
        let builder = meter.f64_histogram(self.name).with_unit(self.unit()).with_description(self.help);
        builder.with_boundaries(self.bounds()).build()
    }

    /// A gauge whose value is asked for when somebody reads; `None` leaves it out.
    pub(super) fn observed(&self, meter: &Meter, value: impl Fn() -> Option<u64> + Send + Sync + 'static) {
        meter
            .u64_observable_gauge(self.name)
            .with_unit(self.unit())
            .with_description(self.help)
            .with_callback(move |observer| {
                if let Some(value) = value() {
                    observer.observe(value, &[]);
                }
            })
            .build();
    }
}

/// How many runs there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunCounts {
    /// At work in this process.
    pub active: usize,
    /// Waiting for a slot.
    pub queued: usize,
}

/// The instruments of one service. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    // Held for its readers.
    _provider: SdkMeterProvider,
    registry: prometheus::Registry,
    /// That of the exporter; every reader costs as much again with each value that is recorded.
    reader: Option<PushReader>,
    meter: Meter,
    dropped: Arc<DroppedSpans>,
    runs_ended: Counter<u64>,
    run_duration: Histogram<f64>,
    step_duration: Histogram<f64>,
    tool_duration: Histogram<f64>,
    model_duration: Histogram<f64>,
    first_token: Histogram<f64>,
    tokens: Counter<u64>,
    retries: Counter<u64>,
    sse_readers: UpDownCounter<i64>,
    commit_duration: Histogram<f64>,
    commit_writes: Histogram<f64>,
    http_requests: Counter<u64>,
    http_duration: Histogram<f64>,
}

impl Metrics {
    /// Instruments with nothing recorded, for `GET /metrics` and, if they are to be exported, for that as well.
    pub(super) fn new(resource: Resource, is_exported: bool) -> Result<Self, TelemetryError> {
        let registry = prometheus::Registry::new();
        let exposed = opentelemetry_prometheus::exporter()
            .with_registry(registry.clone())
            .scope_info_enabled(false)
            .without_target_info()
            .build()?;
        let mut builder = SdkMeterProvider::builder().with_resource(resource).with_reader(exposed);
        let reader = is_exported.then(PushReader::default);
        if let Some(reader) = &reader {
            builder = builder.with_reader(reader.clone());
        }
        let provider = builder.build();
        let meter = provider.meter(SCOPE);
        let dropped: Arc<DroppedSpans> = Arc::default();
        let counted = Arc::clone(&dropped);
        meter
            .u64_observable_counter(EXPORT_LOST.name)
            .with_description(EXPORT_LOST.help)
            .with_callback(move |observer| {
                for (reason, count) in counted.counts() {
                    observer.observe(count, &[KeyValue::new(REASON, reason.as_str())]);
                }
            })
            .build();
        meter
            .u64_observable_gauge(BUILD.name)
            .with_description(BUILD.help)
            .with_callback(|observer| observer.observe(1, &[KeyValue::new(VERSION, env!("CARGO_PKG_VERSION"))]))
            .build();
        process::observe(&meter);
        let sse_readers = SSE_READERS.up_down_counter(&meter);
        sse_readers.add(0, &[]);
        Ok(Self(Arc::new(Inner {
            registry,
            reader,
            dropped,
            runs_ended: RUNS_ENDED.counter(&meter),
            run_duration: RUN_DURATION.histogram(&meter),
            step_duration: STEP_DURATION.histogram(&meter),
            tool_duration: TOOL_DURATION.histogram(&meter),
            model_duration: MODEL_DURATION.histogram(&meter),
            first_token: FIRST_TOKEN.histogram(&meter),
            tokens: TOKENS.counter(&meter),
            retries: RETRIES.counter(&meter),
            sse_readers,
            commit_duration: COMMIT_DURATION.histogram(&meter),
            commit_writes: COMMIT_WRITES.histogram(&meter),
            http_requests: HTTP_REQUESTS.counter(&meter),
            http_duration: HTTP_DURATION.histogram(&meter),
            meter,
            _provider: provider,
        })))
    }

    /// All of them in the text form of Prometheus.
    pub fn exposition(&self) -> Result<String, TelemetryError> {
        Ok(TextEncoder::new().encode_to_string(&self.0.registry.gather())?)
    }

    /// What a collector is sent.
    pub(super) fn collect(&self) -> Result<ResourceMetrics, TelemetryError> {
        let mut collected = ResourceMetrics::default();
        if let Some(reader) = &self.0.reader {
            reader.collect(&mut collected)?;
        }
        Ok(collected)
    }

    /// Counts what is lost on the way to a collector.
    pub(super) fn dropped_spans(&self) -> Arc<DroppedSpans> {
        Arc::clone(&self.0.dropped)
    }

    /// From here on `counts` is asked how many runs there are; it says `None` once nobody knows any more.
    pub fn watch_runs(&self, counts: impl Fn() -> Option<RunCounts> + Send + Sync + 'static) {
        let counts = Arc::new(counts);
        let active = Arc::clone(&counts);
        RUNS_ACTIVE.observed(&self.0.meter, move || active().map(|counts| as_u64(counts.active)));
        RUNS_QUEUED.observed(&self.0.meter, move || counts().map(|counts| as_u64(counts.queued)));
    }

    /// A run ended; `took` is the time since its start, if it had one.
    pub fn run_ended(&self, agent: &str, status: RunStatusName, took: Option<Duration>) {
        let labels = [KeyValue::new(AGENT, agent.to_owned()), KeyValue::new(STATUS, status.as_str())];
        self.0.runs_ended.add(1, &labels);
        if let Some(took) = took {
            self.0.run_duration.record(took.as_secs_f64(), &labels);
        }
    }

    /// A step ended.
    pub fn step(&self, agent: &str, took: Duration) {
        self.0.step_duration.record(took.as_secs_f64(), &[KeyValue::new(AGENT, agent.to_owned())]);
    }

    /// A call of a configured tool ended.
    pub fn tool_call(&self, tool: &str, outcome: OutcomeKind, took: Duration) {
        let labels = [KeyValue::new(TOOL, tool.to_owned()), KeyValue::new(OUTCOME, outcome.as_str())];
        self.0.tool_duration.record(took.as_secs_f64(), &labels);
    }

    /// An attempt at a model call ended.
    pub fn model_call(&self, asked: ModelLabels<'_>, outcome: ModelOutcome, took: Duration) {
        let [provider, model] = asked.labels();
        let labels = [provider, model, KeyValue::new(OUTCOME, outcome.as_str())];
        self.0.model_duration.record(took.as_secs_f64(), &labels);
    }

    /// The first piece of an answer came.
    pub fn first_token(&self, asked: ModelLabels<'_>, after: Duration) {
        self.0.first_token.record(after.as_secs_f64(), &asked.labels());
    }

    /// A provider said what an answer took.
    pub fn tokens(&self, asked: ModelLabels<'_>, usage: TokenUsage) {
        let counts = [
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cached_input", usage.cached_input_tokens),
            ("reasoning", usage.reasoning_tokens),
        ];
        let [provider, model] = asked.labels();
        for (kind, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            self.0.tokens.add(count, &[provider.clone(), model.clone(), KeyValue::new(KIND, kind)]);
        }
    }

    /// A failed attempt is followed by another.
    pub fn retry(&self, provider: &str, class: FailureClass) {
        self.0.retries.add(1, &[KeyValue::new(PROVIDER, provider.to_owned()), KeyValue::new(CLASS, class.code())]);
    }

    /// An event stream was opened; dropping what is returned closes it.
    pub fn sse_reader(&self) -> SseReader {
        self.0.sse_readers.add(1, &[]);
        SseReader(self.clone())
    }

    /// The store committed so many writes in one transaction.
    pub fn committed(&self, writes: usize, took: Duration) {
        self.0.commit_duration.record(took.as_secs_f64(), &[]);
        let writes = u32::try_from(writes).unwrap_or(u32::MAX);
        self.0.commit_writes.record(f64::from(writes), &[]);
    }

    /// A request was answered. `method` and `route` are names of ours.
    pub fn http_request(&self, method: &'static str, route: &str, status: u16, took: Duration) {
        let [method, route] = [KeyValue::new(METHOD, method), KeyValue::new(ROUTE, route.to_owned())];
        self.0.http_duration.record(took.as_secs_f64(), &[method.clone(), route.clone()]);
        self.0.http_requests.add(1, &[method, route, KeyValue::new(STATUS, i64::from(status))]);
    }
}

/// A model, by names of the settings.
#[derive(Clone, Copy, Debug)]
pub struct ModelLabels<'a> {
    /// The name of the configured provider.
    pub provider: &'a str,
    /// The model, one of its agent's.
    pub model: &'a str,
}

impl ModelLabels<'_> {
    fn labels(self) -> [KeyValue; 2] {
        [KeyValue::new(PROVIDER, self.provider.to_owned()), KeyValue::new(MODEL, self.model.to_owned())]
    }
}

/// How an attempt at a model call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelOutcome {
    /// With a turn.
    Answered,
    /// With a failure.
    Failed(FailureClass),
    /// The run was told to end.
    Interrupted,
}

impl ModelOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "ok",
            Self::Failed(class) => class.code(),
            Self::Interrupted => "interrupted",
        }
    }
}

/// An event stream that is open.
pub struct SseReader(Metrics);

impl Drop for SseReader {
    fn drop(&mut self) {
        self.0.0.sse_readers.add(-1, &[]);
    }
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// The reader of the exporter. The SDK takes readers away; this one stays at hand as well.
#[derive(Clone, Debug, Default)]
struct PushReader(Arc<ManualReader>);

impl MetricReader for PushReader {
    fn register_pipeline(&self, pipeline: std::sync::Weak<Pipeline>) {
        self.0.register_pipeline(pipeline);
    }

    fn collect(&self, rm: &mut ResourceMetrics) -> OTelSdkResult {
        self.0.collect(rm)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn temporality(&self, kind: InstrumentKind) -> Temporality {
        self.0.temporality(kind)
    }
}
