//! Spans that wait to be sent, and the count of those that never are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use opentelemetry::{KeyValue, Value};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Most spans that wait to be sent.
const QUEUE: usize = 2_048;
/// Most bytes they may take together, those being sent included. Only spans with content come near it.
const QUEUE_BYTES: usize = 64 * 1024 * 1024;

/// Why a collector does not have a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DropReason {
    /// There was no room for it.
    QueueFull,
    /// It could not be sent.
    ExportFailed,
    /// The collector left it out.
    Rejected,
}

impl DropReason {
    /// The spelling in labels.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::ExportFailed => "export_failed",
            Self::Rejected => "rejected",
        }
    }
}

/// Counts of spans by the reason why they were dropped.
pub(super) type DropCounts = [(DropReason, u64); 3];

/// How many spans no collector has, since the process started.
#[derive(Debug, Default)]
pub(super) struct DroppedSpans {
    queue_full: AtomicU64,
    export_failed: AtomicU64,
    rejected: AtomicU64,
}

impl DroppedSpans {
    /// So many more.
    pub(super) fn add(&self, reason: DropReason, count: u64) {
        self.counter(reason).fetch_add(count, Ordering::Relaxed);
    }

    /// How many, by reason.
    pub(super) fn counts(&self) -> DropCounts {
        [DropReason::QueueFull, DropReason::ExportFailed, DropReason::Rejected]
            .map(|reason| (reason, self.counter(reason).load(Ordering::Relaxed)))
    }

    /// How many.
    pub(super) fn total(&self) -> u64 {
        self.counts().iter().map(|(_, count)| count).sum()
    }

    const fn counter(&self, reason: DropReason) -> &AtomicU64 {
        match reason {
            DropReason::QueueFull => &self.queue_full,
            DropReason::ExportFailed => &self.export_failed,
            DropReason::Rejected => &self.rejected,
        }
    }
}

/// A span that waits to be sent, with its part of the room.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) span: SpanData,
    pub(super) room: OwnedSemaphorePermit,
}

/// Where spans go when they end. Never waits and never logs: it is called wherever a span is dropped.
#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<Waiting>,
    room: Arc<Semaphore>,
    dropped: Arc<DroppedSpans>,
    /// Spans that are neither sent nor lost.
    pending: Arc<AtomicU64>,
}

impl SpanQueue {
    /// A queue, and its end that is read.
    pub(super) fn new(dropped: Arc<DroppedSpans>, pending: Arc<AtomicU64>) -> (Self, mpsc::Receiver<Waiting>) {
        let (spans, receiver) = mpsc::channel(QUEUE);
        (Self { spans, room: Arc::new(Semaphore::new(QUEUE_BYTES)), dropped, pending }, receiver)
    }

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

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _span: &mut Span, _cx: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && !self.push(span) {
            self.dropped.add(DropReason::QueueFull, 1);
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
