//! Sends spans and metrics to a collector: OTLP over HTTP with protobuf, as the OpenTelemetry protocol 1.x says.
//!
//! The encoding is `opentelemetry-proto`'s. The sending is our own: `opentelemetry-otlp` and the batch processor of the
//! SDK read the environment by themselves, block threads, and do not tell how many spans they lost. Here two tasks send,
//! one for spans and one for metrics. Between them and the work there is a bounded queue that is never waited for, so a
//! collector that is slow, silent, gone or refusing costs spans, which are counted, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::metrics::v1::{ExportMetricsServiceRequest, ExportMetricsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanData;
use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::queue::{DropCounts, DropReason, DroppedSpans, SpanQueue, Waiting};
use super::send::{SendError, Sender, client};
use super::{Metrics, TelemetryError};
use crate::config::{OtlpEndpoint, TelemetryConfig};
use crate::domain::text::{excerpt, with_causes};

/// Most spans of one request.
const BATCH: usize = 512;
/// A request with so many bytes takes no further span.
const BATCH_BYTES: usize = 2 * 1024 * 1024;
/// How long a span waits for others to be sent with it.
const GATHER: Duration = Duration::from_secs(5);
/// Most characters of what a collector says that are repeated.
const MAX_OBJECTION: usize = 200;
/// Time between records that tell of losses.
const TELL: Duration = Duration::from_secs(60);
/// The tasks that send.
pub(super) struct Exporter {
    tasks: JoinSet<()>,
    closing: CancellationToken,
    dropped: Arc<DroppedSpans>,
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
    ) -> Result<(Self, SpanQueue), TelemetryError> {
        let dropped = metrics.dropped_spans();
        let pending = Arc::new(AtomicU64::new(0));
        let (queue, spans) = SpanQueue::new(Arc::clone(&dropped), Arc::clone(&pending));
        let closing = CancellationToken::new();
        let client = client(endpoint, config)?;
        let sender = |path| Sender { client: client.clone(), url: endpoint.signal(path), closing: closing.clone() };
        let mut tasks = JoinSet::new();
        let traces = TraceExport {
            spans,
            resource: resource.into(),
            sender: sender("v1/traces"),
            pending: Arc::clone(&pending),
            throttle: Throttle::default(),
            told: dropped.counts(),
            dropped: Arc::clone(&dropped),
            error: None,
            objection: String::new(),
        };
        tasks.spawn(traces.run());
        let every = Duration::from_millis(config.metrics_interval_ms);
        let sender = sender("v1/metrics");
        tasks.spawn(MetricsExport { metrics: metrics.clone(), sender, throttle: Throttle::default() }.run(every));
        Ok((Self { tasks, closing, dropped, pending }, queue))
    }

    /// Sends what is left, for `most` at most.
    pub(super) async fn shutdown(mut self, most: Duration) {
        self.closing.cancel();
        let ended = timeout(most, async { while self.tasks.join_next().await.is_some() {} }).await;
        if ended.is_err() {
            self.tasks.shutdown().await;
            self.dropped.add(DropReason::ExportFailed, self.pending.load(Ordering::Relaxed));
            let (lost, limit_ms) = (self.dropped.total(), millis(most));
            tracing::warn!(lost, limit_ms, "the collector did not take everything in time; the rest is lost");
        }
    }
}

/// Lets trouble be told of once in a while, and not with every failure.
#[derive(Default)]
struct Throttle(Option<Instant>);

impl Throttle {
    /// Whether it is time to say something again.
    fn is_due(&mut self) -> bool {
        let due = self.0.is_none_or(|at| at.elapsed() >= TELL);
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
struct TraceExport {
    spans: mpsc::Receiver<Waiting>,
    resource: ResourceAttributesWithSchema,
    sender: Sender,
    dropped: Arc<DroppedSpans>,
    pending: Arc<AtomicU64>,
    throttle: Throttle,
    /// The losses that were told of.
    told: DropCounts,
    /// Why the last export failed, untold.
    error: Option<SendError>,
    /// What the collector said when it last left something out, untold.
    objection: String,
}

impl TraceExport {
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
        // What the throttle held back is not heard of later.
        if self.has_news() {
            self.tell();
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
                let answer = ExportTraceServiceResponse::decode(answer.as_slice()).unwrap_or_default();
                if let Some(partial) = answer.partial_success {
                    self.dropped.add(DropReason::Rejected, u64::try_from(partial.rejected_spans).unwrap_or(0));
                    self.objection = partial.error_message;
                }
            }
            Err(error) => {
                self.dropped.add(DropReason::ExportFailed, count);
                self.error = Some(error);
            }
        }
        if self.has_news() && self.throttle.is_due() {
            self.tell();
        }
    }

    fn has_news(&self) -> bool {
        self.told != self.dropped.counts() || !self.objection.is_empty()
    }

    /// Says how many were lost since the start of the program, and why, for each reason that has something new.
    fn tell(&mut self) {
        let counts = self.dropped.counts();
        let before = std::mem::replace(&mut self.told, counts);
        let error = self.error.take();
        let objection = excerpt(&std::mem::take(&mut self.objection), MAX_OBJECTION);
        let mut rejected_any = false;
        for ((reason, lost), _) in counts.into_iter().zip(before).filter(|((_, lost), (_, told))| lost > told) {
            match reason {
                DropReason::QueueFull => {
                    tracing::warn!(lost, "spans were dropped: they came faster than they could be exported");
                }
                DropReason::ExportFailed => {
                    let error = error.as_ref().map(|error| with_causes(error)).unwrap_or_default();
                    tracing::warn!(lost, error, "spans could not be exported to telemetry.otlp_endpoint");
                }
                DropReason::Rejected => {
                    rejected_any = true;
                    tracing::warn!(lost, reason = objection, "the collector rejected spans");
                }
            }
        }
        if !rejected_any && !objection.is_empty() {
            tracing::warn!(reason = objection, "the collector took the spans and warns");
        }
    }
}

/// Sends metrics.
struct MetricsExport {
    metrics: Metrics,
    sender: Sender,
    throttle: Throttle,
}

impl MetricsExport {
    async fn run(mut self, every: Duration) {
        let mut ticks = interval(every);
        // The first tick is at once.
        ticks.tick().await;
        let closing = self.sender.closing.clone();
        while closing.run_until_cancelled(ticks.tick()).await.is_some() {
            let trouble = self.export().await;
            if trouble.is_some() && self.throttle.is_due() {
                Self::tell(trouble);
            }
            ticks.reset();
        }
        // What the throttle would hold back now is not heard of later.
        Self::tell(self.export().await);
    }

    /// Sends what there is to read, and gives what went wrong.
    async fn export(&self) -> Option<MetricsTrouble> {
        let collected = match self.metrics.collect() {
            Ok(collected) => collected,
            Err(error) => return Some(MetricsTrouble::Unreadable(error)),
        };
        let message = ExportMetricsServiceRequest::from(&collected).encode_to_vec();
        let answer = match self.sender.send(message).await {
            Ok(answer) => answer,
            Err(error) => return Some(MetricsTrouble::Unsent(error)),
        };
        let partial = ExportMetricsServiceResponse::decode(answer.as_slice()).ok()?.partial_success?;
        let rejected = u64::try_from(partial.rejected_data_points).unwrap_or(0);
        let has_news = rejected > 0 || !partial.error_message.is_empty();
        has_news.then_some(MetricsTrouble::Rejected { rejected, objection: partial.error_message })
    }

    fn tell(trouble: Option<MetricsTrouble>) {
        match trouble {
            None => {}
            Some(MetricsTrouble::Unreadable(error)) => {
                tracing::error!(error = with_causes(&error), "the metrics cannot be read");
            }
            Some(MetricsTrouble::Unsent(error)) => {
                let error = with_causes(&error);
                tracing::warn!(error, "metrics could not be exported to telemetry.otlp_endpoint");
            }
            Some(MetricsTrouble::Rejected { rejected, objection }) => {
                let reason = excerpt(&objection, MAX_OBJECTION);
                tracing::warn!(lost = rejected, reason, "the collector did not take all metrics as they are");
            }
        }
    }
}

/// Why a collector does not have all metrics.
enum MetricsTrouble {
    /// They cannot be read.
    Unreadable(TelemetryError),
    /// They did not reach it.
    Unsent(SendError),
    /// It left out so many values, or took them and objects.
    Rejected { rejected: u64, objection: String },
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
