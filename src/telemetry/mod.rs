//! What the service tells of itself: log records, traces, metrics.
//!
//! - `log`: records of `tracing` on standard error, as text or as JSON, each with the id of the run it belongs to.
//! - [`trace`]: the spans of runs, model calls, tool calls and requests, by the conventions of OpenTelemetry.
//! - [`metric`]: the instruments, one for each row of a table; read by `GET /metrics` and by the collector.
//! - `export`: sends spans and metrics to a collector over OTLP, when one is configured; `queue` holds spans until then,
//!   `send` is the protocol.
//!
//! Nothing here waits for a collector: a span that finds no room is counted and dropped. Nothing is global but the
//! subscriber of `tracing`, which [`Telemetry::start`] installs for the program; metrics are handed to whoever records
//! them, so that two services in one process have their own.

mod content;
mod export;
mod log;
pub mod metric;
mod names;
mod process;
mod queue;
mod send;
mod table;
pub mod trace;

use std::io;
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, SpanLimits};
use tracing::Subscriber;
use tracing_subscriber::filter::{LevelFilter, ParseError, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{Layer as _, Registry};

use crate::config::{LogConfig, TelemetryConfig};
use crate::domain::text::panic_text;
use export::Exporter;
use names::{SCHEMA_URL, SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION};

pub use log::{FIELDS, request_log_context, run_log_context};
pub use metric::Metrics;
pub use trace::Capture;

/// How long a program that ends waits for a collector to take what is left.
pub const FLUSH: Duration = Duration::from_secs(2);

/// The name of the instrumentation in what is exported.
const SCOPE: &str = "hames";

/// Why telemetry cannot start or cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `log.level` is not a filter; checked settings have none such.
    #[error("log.level is not a filter: {0}")]
    Filter(#[from] ParseError),
    /// Something else in the process took the global subscriber first.
    #[error("logging was started twice: {0}")]
    Started(#[from] tracing::subscriber::SetGlobalDefaultError),
    /// TLS for the collector does not work.
    #[error("TLS for telemetry.otlp_endpoint cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The client for the collector cannot be built.
    #[error("the HTTP client for telemetry.otlp_endpoint cannot be set up: {0}")]
    Client(#[from] reqwest::Error),
    /// The metrics cannot be read together.
    #[error("the metrics cannot be set up: {0}")]
    Metrics(#[from] opentelemetry_sdk::error::OTelSdkError),
    /// The metrics cannot be written as text.
    #[error("the metrics cannot be written: {0}")]
    Exposition(#[from] prometheus::Error),
}

/// What a program needs to tell of itself. Made once; [`Telemetry::shutdown`] sends what is left.
pub struct Telemetry {
    metrics: Metrics,
    tracer: Option<SdkTracer>,
    exporter: Option<Exporter>,
}

impl Telemetry {
    /// Sets everything up, and begins to export when a collector is configured; connects to it only when there is
    /// something to send. `instance` tells this process from others of the same service.
    ///
    /// Must be called inside a tokio runtime.
    pub fn new(config: &TelemetryConfig, instance: &str) -> Result<Self, TelemetryError> {
        let resource = Resource::builder_empty()
            .with_attributes([
                KeyValue::new(SERVICE_NAME, config.service_name.clone()),
                KeyValue::new(SERVICE_VERSION, env!("CARGO_PKG_VERSION")),
                KeyValue::new(SERVICE_INSTANCE_ID, instance.to_owned()),
            ])
            .build();
        let metrics = Metrics::new(resource.clone(), config.otlp_endpoint.is_some())?;
        let Some(endpoint) = &config.otlp_endpoint else {
            return Ok(Self { metrics, tracer: None, exporter: None });
        };
        let (exporter, queue) = Exporter::start(endpoint, config, &resource, &metrics)?;
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.trace_ratio)));
        let provider = SdkTracerProvider::builder()
            .with_sampler(sampler)
            // Else the SDK would take them from the environment.
            .with_span_limits(SpanLimits::default())
            .with_resource(resource)
            .with_span_processor(queue)
            .build();
        let scope = InstrumentationScope::builder(SCOPE)
            .with_version(env!("CARGO_PKG_VERSION"))
            .with_schema_url(SCHEMA_URL)
            .build();
        // The tracer holds its provider.
        Ok(Self { metrics, tracer: Some(provider.tracer_with_scope(scope)), exporter: Some(exporter) })
    }

    /// The instruments of this program's service.
    pub const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Logs and traces for the whole process, the log to standard error. Panics are records like all others.
    pub fn start(&self, log: &LogConfig) -> Result<(), TelemetryError> {
        tracing::subscriber::set_global_default(self.subscriber(log, io::stderr)?)?;
        std::panic::set_hook(Box::new(|panic| {
            let text = panic_text(panic.payload());
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            tracing::error!(panic = text, place, "panic");
        }));
        Ok(())
    }

    /// What [`Telemetry::start`] starts, with another place for the log.
    pub fn subscriber<W>(
        &self,
        config: &LogConfig,
        out: W,
    ) -> Result<impl Subscriber + Send + Sync + use<W>, TelemetryError>
    where
        W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
    {
        let spans = self.tracer.clone().map(|tracer| {
            let ours = filter_fn(trace::is_exported).with_max_level_hint(LevelFilter::INFO);
            // Spans are held and never entered, and say nothing of the code they come from.
            tracing_opentelemetry::layer()
                .with_tracer(tracer)
                .with_context_activation(false)
                .with_tracked_inactivity(false)
                .with_location(false)
                .with_threads(false)
                .with_level(false)
                .with_target(false)
                .with_filter(ours)
        });
        Ok(Registry::default().with(log::layer(config, out)?).with(spans))
    }

    /// Sends what is left, for `most` at most; what a collector has not taken by then is lost, and said.
    pub async fn shutdown(self, most: Duration) {
        if let Some(exporter) = self.exporter {
            exporter.shutdown(most).await;
        }
    }
}
