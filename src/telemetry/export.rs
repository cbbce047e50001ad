//! Sends spans and metrics to a collector: OTLP over HTTP with protobuf, as the OpenTelemetry protocol 1.x says.
//!
//! The encoding is `opentelemetry-proto`'s. The sending is our own: `opentelemetry-otlp` and the batch processor of the
//! SDK read the environment by themselves, block threads, and do not tell how many spans they lost. Here two tasks send,
//! one for spans and one for metrics. Between them and the work there is a bounded queue that is never waited for, so a
//! collector that is slow, silent, gone or refusing costs spans, which are counted, and nothing else.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry::{KeyValue, Value};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use prost::Message as _;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, StatusCode, Url};
use secrecy::ExposeSecret as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Metrics, TelemetryError};
use crate::config::{OtlpEndpoint, TelemetryConfig};
use crate::tls::client_config;

/// Most spans that wait to be sent.
const QUEUE: usize = 2_048;
/// Most bytes they may take together, those being sent included. Only spans with content come near it.
const QUEUE_BYTES: usize = 64 * 1024 * 1024;
/// Most spans of one request.
const BATCH: usize = 512;
/// A request with so many bytes takes no further span.
const BATCH_BYTES: usize = 2 * 1024 * 1024;
/// How long a span waits for others to be sent with it.
const GATHER: Duration = Duration::from_secs(5);
/// Most attempts to send the same spans or metrics.
const ATTEMPTS: u32 = 3;
/// Wait before the second attempt; each later one is twice as long.
const BACKOFF: Duration = Duration::from_secs(1);
/// Time between records that tell of losses.
const SAY: Duration = Duration::from_secs(60);
/// Most bytes read of an answer.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// What no collector has, since the process started.
#[derive(Debug, Default)]
pub(super) struct Losses {
    queue_full: AtomicU64,
    export_failed: AtomicU64,
    rejected: AtomicU64,
}

impl Losses {
    /// Spans lost, by reason.
    pub(super) fn counts(&self) -> [(&'static str, u64); 3] {
        [
            ("queue_full", self.queue_full.load(Ordering::Relaxed)),
            ("export_failed", self.export_failed.load(Ordering::Relaxed)),
            ("rejected", self.rejected.load(Ordering::Relaxed)),
        ]
    }

    fn total(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }
}

/// A span that waits to be sent, with its part of the room.
#[derive(Debug)]
struct Waiting {
    span: SpanData,
    room: OwnedSemaphorePermit,
}

/// Where spans go when they end. Never waits and never logs: it is called wherever a span is dropped.
#[derive(Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<Waiting>,
    room: Arc<Semaphore>,
    losses: Arc<Losses>,
    /// Spans that are neither sent nor lost.
    pending: Arc<AtomicU64>,
}

impl Queue {
    /// Whether there was a place.
    fn push(&self, span: SpanData) -> bool {
        let bytes = u32::try_from(size(&span)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).try_acquire_many_owned(bytes);
        self.pending.fetch_add(1, Ordering::Relaxed);
        let waits = room.is_ok_and(|room| self.spans.try_send(Waiting { span, room }).is_ok());
        if !waits {
            self.pending.fetch_sub(1, Ordering::Relaxed);
        }
        waits
    }
}

/// About how many bytes a span takes.
fn size(span: &SpanData) -> usize {
    let texts = span.attributes.iter().map(|attribute| match &attribute.value {
        Value::String(text) => text.as_str().len(),
        // Numbers, and lists that are as short; the type may grow, and what it grows by is not used here.
        other => size_of_val(other),
    });
    size_of::<SpanData>() + span.attributes.len() * size_of::<KeyValue>() + texts.sum::<usize>()
}

impl SpanProcessor for Queue {
    fn on_start(&self, _span: &mut Span, _cx: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && !self.push(span) {
            self.losses.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The sending task does it.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    /// The exporter does it.
    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The tasks that send.
pub(super) struct Exporter {
    tasks: JoinSet<()>,
    closing: CancellationToken,
    losses: Arc<Losses>,
    /// Spans that are neither sent nor lost; lost when the tasks are cut.
    pending: Arc<AtomicU64>,
}

impl Exporter {
    /// Starts the tasks. Connects to nothing yet.
    pub(super) fn start(
        endpoint: &OtlpEndpoint,
        config: &TelemetryConfig,
        resource: &Resource,
        metrics: &Metrics,
    ) -> Result<(Self, Queue), TelemetryError> {
        let (spans, receiver) = mpsc::channel(QUEUE);
        let losses = metrics.losses();
        let pending = Arc::new(AtomicU64::new(0));
        let closing = CancellationToken::new();
        let client = client(endpoint, config)?;
        let sender = |path| Sender { client: client.clone(), url: endpoint.signal(path), closing: closing.clone() };
        let mut tasks = JoinSet::new();
        let traces = Traces {
            spans: receiver,
            resource: resource.into(),
            sender: sender("v1/traces"),
            losses: Arc::clone(&losses),
            pending: Arc::clone(&pending),
            told: Told::default(),
            said: 0,
            error: None,
        };
        tasks.spawn(traces.run());
        let every = Duration::from_millis(config.metrics_interval_ms);
        let readings = Readings { metrics: metrics.clone(), sender: sender("v1/metrics"), told: Told::default() };
        tasks.spawn(readings.run(every));
        let room = Arc::new(Semaphore::new(QUEUE_BYTES));
        let queue = Queue { spans, room, losses: Arc::clone(&losses), pending: Arc::clone(&pending) };
        Ok((Self { tasks, closing, losses, pending }, queue))
    }

    /// Sends what is left, for `most` at most.
    pub(super) async fn shutdown(mut self, most: Duration) {
        self.closing.cancel();
        let ended = timeout(most, async { while self.tasks.join_next().await.is_some() {} }).await;
        if ended.is_err() {
            self.tasks.shutdown().await;
            self.losses.export_failed.fetch_add(self.pending.load(Ordering::Relaxed), Ordering::Relaxed);
            let (lost, limit_ms) = (self.losses.total(), millis(most));
            tracing::warn!(lost, limit_ms, "the collector did not take everything in time; the rest is lost");
        }
    }
}

fn client(endpoint: &OtlpEndpoint, config: &TelemetryConfig) -> Result<Client, TelemetryError> {
    let mut headers = HeaderMap::new();
    for (name, value) in config.otlp_headers.iter() {
        // Both were checked when the settings were loaded.
        if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::from_str(value.expose_secret())) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    // Proxies of the environment are not for telemetry, and a redirect would carry the headers elsewhere.
    Ok(Client::builder()
        .tls_backend_preconfigured(client_config(endpoint.signal("").scheme())?)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .timeout(Duration::from_millis(config.otlp_timeout_ms))
        .user_agent(concat!("hames/", env!("CARGO_PKG_VERSION")))
        .default_headers(headers)
        .build()?)
}

/// Why a collector did not take something.
#[derive(Debug, thiserror::Error)]
enum SendError {
    /// It could not be reached, or did not answer in time.
    #[error("{0}")]
    Unreachable(String),
    /// It refused.
    #[error("it answered {0}")]
    Refused(StatusCode),
}

impl SendError {
    fn unreachable(error: reqwest::Error) -> Self {
        let error = error.without_url();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        Self::Unreachable(text)
    }

    /// What the protocol says about another attempt ("Failures", "Retryable response codes").
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }
}

/// The way to one address of a collector.
struct Sender {
    client: Client,
    url: Url,
    closing: CancellationToken,
}

impl Sender {
    /// Sends a message and gives the answer; tries again where that may help, but not once the program is ending.
    async fn send(&self, message: Vec<u8>) -> Result<Vec<u8>, SendError> {
        let message = bytes::Bytes::from(message);
        let mut attempt = 1;
        loop {
            let error = match self.attempt(message.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if attempt >= ATTEMPTS || !error.may_pass() || self.closing.is_cancelled() {
                return Err(error);
            }
            let wait = BACKOFF.saturating_mul(1 << (attempt - 1));
            if self.closing.run_until_cancelled(sleep(wait)).await.is_none() {
                return Err(error);
            }
            attempt += 1;
        }
    }

    async fn attempt(&self, message: bytes::Bytes) -> Result<Vec<u8>, SendError> {
        let sent = self.client.post(self.url.clone()).body(message).send().await;
        let mut response = sent.map_err(SendError::unreachable)?;
        if !response.status().is_success() {
            return Err(SendError::Refused(response.status()));
        }
        let mut answer = Vec::new();
        while answer.len() < MAX_ANSWER_BYTES {
            match response.chunk().await {
                Ok(Some(piece)) => answer.extend_from_slice(&piece),
                // The status counts; the rest only says how much of it was taken.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(answer)
    }
}

/// Tells of trouble once in a while, and not with every failure.
#[derive(Default)]
struct Told(Option<Instant>);

impl Told {
    /// Whether it is time to say something again.
    fn is_due(&mut self) -> bool {
        let due = self.0.is_none_or(|at| at.elapsed() >= SAY);
        if due {
            self.0 = Some(Instant::now());
        }
        due
    }
}

/// Spans of one request.
struct Batch {
    spans: Vec<SpanData>,
    /// What they take of the queue's room, until they are sent.
    room: OwnedSemaphorePermit,
}

impl Batch {
    fn of(first: Waiting) -> Self {
        Self { spans: vec![first.span], room: first.room }
    }

    fn push(&mut self, waiting: Waiting) {
        self.spans.push(waiting.span);
        self.room.merge(waiting.room);
    }

    fn is_full(&self) -> bool {
        self.spans.len() >= BATCH || self.room.num_permits() >= BATCH_BYTES
    }
}

/// Sends spans.
struct Traces {
    spans: mpsc::Receiver<Waiting>,
    resource: ResourceAttributesWithSchema,
    sender: Sender,
    losses: Arc<Losses>,
    pending: Arc<AtomicU64>,
    told: Told,
    /// The losses that were told of.
    said: u64,
    /// Why the last export failed, untold.
    error: Option<SendError>,
}

impl Traces {
    async fn run(mut self) {
        let closing = self.sender.closing.clone();
        while let Some(Some(first)) = closing.run_until_cancelled(self.spans.recv()).await {
            let mut batch = Batch::of(first);
            let gathering = async {
                while !batch.is_full()
                    && let Some(span) = self.spans.recv().await
                {
                    batch.push(span);
                }
            };
            // Full or not, it goes when its time is over or the program ends.
            tokio::select! {
                biased;
                () = closing.cancelled() => {}
                () = gathering => {}
                () = sleep(GATHER) => {}
            }
            self.export(batch).await;
        }
        while let Ok(first) = self.spans.try_recv() {
            let mut batch = Batch::of(first);
            while !batch.is_full()
                && let Ok(span) = self.spans.try_recv()
            {
                batch.push(span);
            }
            self.export(batch).await;
        }
    }

    async fn export(&mut self, batch: Batch) {
        let Batch { spans, room } = batch;
        let count = as_u64(spans.len());
        let resource_spans = group_spans_by_resource_and_scope(spans, &self.resource);
        let sent = self.sender.send(ExportTraceServiceRequest { resource_spans }.encode_to_vec()).await;
        drop(room);
        self.pending.fetch_sub(count, Ordering::Relaxed);
        match sent {
            Ok(answer) => {
                let rejected = ExportTraceServiceResponse::decode(answer.as_slice())
                    .ok()
                    .and_then(|answer| u64::try_from(answer.partial_success?.rejected_spans).ok())
                    .unwrap_or(0);
                self.losses.rejected.fetch_add(rejected, Ordering::Relaxed);
            }
            Err(error) => {
                self.losses.export_failed.fetch_add(count, Ordering::Relaxed);
                self.error = Some(error);
            }
        }
        self.tell();
    }

    /// Says how many were lost since the start of the program, and why the last of them.
    fn tell(&mut self) {
        let lost = self.losses.total();
        if lost > self.said && self.told.is_due() {
            self.said = lost;
            match self.error.take() {
                Some(error) => tracing::warn!(lost, %error, "spans could not be exported to telemetry.otlp_endpoint"),
                None => tracing::warn!(lost, "spans were dropped: they came faster than they could be exported"),
            }
        }
    }
}

/// Sends metrics.
struct Readings {
    metrics: Metrics,
    sender: Sender,
    told: Told,
}

impl Readings {
    async fn run(mut self, every: Duration) {
        let mut ticks = interval(every);
        // The first tick is at once.
        ticks.tick().await;
        let closing = self.sender.closing.clone();
        while closing.run_until_cancelled(ticks.tick()).await.is_some() {
            self.export().await;
            ticks.reset();
        }
        self.export().await;
    }

    async fn export(&mut self) {
        let collected = match self.metrics.collect() {
            Ok(collected) => collected,
            Err(error) => return tracing::error!(%error, "the metrics cannot be read"),
        };
        let message = ExportMetricsServiceRequest::from(&collected).encode_to_vec();
        if let Err(error) = self.sender.send(message).await
            && self.told.is_due()
        {
            tracing::warn!(%error, "metrics cannot be exported (telemetry.otlp_endpoint)");
        }
    }
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
