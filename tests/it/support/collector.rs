//! A collector on a loopback socket: decodes what it is sent, or misbehaves in one way.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as SpanStatus;
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What the collector does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Takes it.
    Takes,
    /// Takes it, and says that it left out so many spans or values.
    LeavesOut(i64),
    /// Answers with this status.
    Answers(u16),
    /// Reads it and never answers.
    Hangs,
}

/// What it was sent.
#[derive(Clone, Debug, Default)]
struct Record {
    raw: Vec<Vec<u8>>,
    headers: Vec<HeaderMap>,
    traces: Vec<ExportTraceServiceRequest>,
    metrics: Vec<ExportMetricsServiceRequest>,
}

/// The collector.
pub(crate) struct Collector {
    pub(crate) endpoint: String,
    record: watch::Receiver<Record>,
    _tasks: JoinSet<()>,
}

/// A span as a reader of traces sees it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) kind: SpanKind,
    pub(crate) trace: String,
    pub(crate) id: String,
    pub(crate) parent: String,
    pub(crate) attributes: BTreeMap<String, Value>,
    pub(crate) is_error: bool,
}

impl Seen {
    /// Its place in its trace, as a header tells it.
    pub(crate) fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.trace, self.id)
    }

    pub(crate) fn get(&self, key: &str) -> Value {
        self.attributes.get(key).cloned().unwrap_or_default()
    }
}

struct Shared {
    manner: Manner,
    record: watch::Sender<Record>,
}

impl Collector {
    pub(crate) async fn start(manner: Manner) -> Self {
        let (sender, record) = watch::channel(Record::default());
        let shared = Arc::new(Shared { manner, record: sender });
        let router = Router::new().route("/v1/{signal}", post(take)).with_state(shared);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { endpoint, record, _tasks: tasks }
    }

    /// Every span it has, in the order in which they ended.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        let record = self.record.borrow();
        let resources = record.traces.iter().flat_map(|request| &request.resource_spans);
        let spans = resources.flat_map(|resource| &resource.scope_spans).flat_map(|scope| &scope.spans);
        spans
            .map(|span| Seen {
                name: span.name.clone(),
                kind: span.kind(),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                attributes: attributes(&span.attributes),
                is_error: span.status.as_ref().is_some_and(|status| status.code() == SpanStatus::Error),
            })
            .collect()
    }

    /// The one span of this name.
    #[track_caller]
    pub(crate) fn span(&self, name: &str) -> Seen {
        let mut found = self.named(name);
        assert_eq!(found.len(), 1, "{name}: {:#?}", self.spans());
        found.remove(0)
    }

    pub(crate) fn named(&self, name: &str) -> Vec<Seen> {
        self.spans().into_iter().filter(|span| span.name == name).collect()
    }

    /// Whose telemetry it is: the attributes of each resource.
    pub(crate) fn resources(&self) -> Vec<BTreeMap<String, Value>> {
        let record = self.record.borrow();
        let traces = record.traces.iter().flat_map(|request| &request.resource_spans).map(|spans| &spans.resource);
        let metrics = record.metrics.iter().flat_map(|request| &request.resource_metrics).map(|all| &all.resource);
        traces.chain(metrics).flatten().map(|resource| attributes(&resource.attributes)).collect()
    }

    /// The metrics of the newest export, by name.
    pub(crate) fn metrics(&self) -> BTreeMap<String, Metric> {
        let record = self.record.borrow();
        let newest = record.metrics.last().into_iter().flat_map(|request| &request.resource_metrics);
        let metrics = newest.flat_map(|all| &all.scope_metrics).flat_map(|scope| &scope.metrics);
        metrics.map(|metric| (metric.name.clone(), metric.clone())).collect()
    }

    /// Every byte it was sent, headers too.
    pub(crate) fn everything(&self) -> String {
        let record = self.record.borrow();
        let bodies: Vec<_> = record.raw.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        format!("{:?} {}", record.headers, bodies.concat())
    }

    /// The headers of every request.
    pub(crate) fn headers(&self) -> Vec<HeaderMap> {
        self.record.borrow().headers.clone()
    }

    /// Waits until it was sent so many requests.
    pub(crate) async fn requests(&self, count: usize) {
        self.record.clone().wait_for(|record| record.raw.len() >= count).await.unwrap();
    }
}

async fn take(
    State(shared): State<Arc<Shared>>,
    Path(signal): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, Vec<u8>) {
    let is_traces = signal == "traces";
    shared.record.send_modify(|record| {
        record.raw.push(body.to_vec());
        record.headers.push(headers);
        if is_traces {
            record.traces.push(ExportTraceServiceRequest::decode(body.clone()).expect("a request for traces"));
        } else {
            record.metrics.push(ExportMetricsServiceRequest::decode(body).expect("a request for metrics"));
        }
    });
    match shared.manner {
        Manner::Takes => (StatusCode::OK, Vec::new()),
        Manner::LeavesOut(rejected_spans) if is_traces => {
            let partial = ExportTracePartialSuccess { rejected_spans, error_message: "no".to_owned() };
            (StatusCode::OK, ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec())
        }
        Manner::LeavesOut(rejected_data_points) => {
            let partial = ExportMetricsPartialSuccess { rejected_data_points, error_message: "never".to_owned() };
            (StatusCode::OK, ExportMetricsServiceResponse { partial_success: Some(partial) }.encode_to_vec())
        }
        Manner::Answers(status) => (StatusCode::from_u16(status).unwrap(), Vec::new()),
        Manner::Hangs => std::future::pending().await,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn attributes(all: &[KeyValue]) -> BTreeMap<String, Value> {
    let read: BTreeMap<_, _> = all.iter().map(|pair| (pair.key.clone(), value(pair.value.as_ref()))).collect();
    assert_eq!(read.len(), all.len(), "an attribute stands twice: {all:?}");
    read
}

fn value(any: Option<&AnyValue>) -> Value {
    match any.and_then(|any| any.value.as_ref()) {
        Some(Any::StringValue(text)) => json!(text),
        Some(Any::BoolValue(truth)) => json!(truth),
        Some(Any::IntValue(number)) => json!(number),
        Some(Any::DoubleValue(number)) => json!(number),
        Some(Any::ArrayValue(items)) => items.values.iter().map(|item| value(Some(item))).collect(),
        other => panic!("{other:?}"),
    }
}
