//! The table of all metrics: name, kind, unit, labels, meaning. `docs/metrics.md` is this, written for a reader.
//!
//! Labels hold names that the settings know, and words of ours, never what a model or a caller wrote: there are only as
//! many time series as the settings make.

use super::process;

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by size; the bounds of its buckets.
    Histogram(&'static Bounds),
}

/// Upper bounds of buckets, in the unit of the metric.
pub type Bounds = [f64];

/// What a metric counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
}

/// A metric: everything that is said of it.
#[derive(Debug)]
pub struct Metric {
    /// Its name at a collector.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// What it counts in.
    pub unit: Unit,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

/// Things inside the process.
const SHORT: &Bounds =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Things that models and tools do.
const LONG: &Bounds =
    &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0];

/// Writes of one transaction; the store takes up to 256.
const GROUPS: &Bounds = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

pub(super) const AGENT: &str = "agent";
pub(super) const STATUS: &str = "status";
pub(super) const PROVIDER: &str = "provider";
pub(super) const MODEL: &str = "model";
pub(super) const OUTCOME: &str = "outcome";
pub(super) const CLASS: &str = "class";
pub(super) const KIND: &str = "kind";
pub(super) const TOOL: &str = "tool";
pub(super) const METHOD: &str = "method";
pub(super) const ROUTE: &str = "route";
pub(super) const REASON: &str = "reason";
pub(super) const VERSION: &str = "version";

pub(super) const RUNS_ENDED: Metric = Metric {
    name: "hames.runs.ended",
    kind: Kind::Counter,
    unit: Unit::Count,
    labels: &[AGENT, STATUS],
    help: "Runs that ended, by their terminal status; not those whose stored state could not be read.",
};
pub(super) const RUN_DURATION: Metric = Metric {
    name: "hames.run.duration",
    kind: Kind::Histogram(LONG),
    unit: Unit::Seconds,
    labels: &[AGENT, STATUS],
    help: "Time from the start of a run to its end; time in the queue is not counted.",
};
pub(super) const RUNS_ACTIVE: Metric = Metric {
    name: "hames.runs.active",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[],
    help: "Runs at work in this process.",
};
pub(super) const RUNS_QUEUED: Metric = Metric {
    name: "hames.runs.queued",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[],
    help: "Runs that wait for a slot.",
};
pub(super) const STEP_DURATION: Metric = Metric {
    name: "hames.step.duration",
    kind: Kind::Histogram(LONG),
    unit: Unit::Seconds,
    labels: &[AGENT],
    help: "Time of a step: one model response with all attempts at it, and the tool calls it asked for.",
};
pub(super) const TOOL_DURATION: Metric = Metric {
    name: "hames.tool.duration",
    kind: Kind::Histogram(LONG),
    unit: Unit::Seconds,
    labels: &[TOOL, OUTCOME],
    help: "Time of a tool call that was executed, in whole milliseconds, by outcome as in the events of a run.",
};
pub(super) const MODEL_DURATION: Metric = Metric {
    name: "hames.model.call.duration",
    kind: Kind::Histogram(LONG),
    unit: Unit::Seconds,
    labels: &[PROVIDER, MODEL, OUTCOME],
    help: "Time of one attempt at a model call; the outcome is ok, interrupted, or the class of the failure.",
};
pub(super) const FIRST_TOKEN: Metric = Metric {
    name: "hames.model.time_to_first_token",
    kind: Kind::Histogram(LONG),
    unit: Unit::Seconds,
    labels: &[PROVIDER, MODEL],
    help: "Time from asking a model to the first piece of its answer: text, reasoning or a tool call.",
};
pub(super) const TOKENS: Metric = Metric {
    name: "hames.tokens",
    kind: Kind::Counter,
    unit: Unit::Count,
    labels: &[PROVIDER, MODEL, KIND],
    help: "Tokens as providers reported them; cached_input is a part of input, and reasoning a part of output.",
};
pub(super) const RETRIES: Metric = Metric {
    name: "hames.model.retries",
    kind: Kind::Counter,
    unit: Unit::Count,
    labels: &[PROVIDER, CLASS],
    help: "Attempts at model calls that failed and were followed by another, by the class of the failure.",
};
pub(super) const SSE_READERS: Metric = Metric {
    name: "hames.sse.readers",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[],
    help: "Event streams that are open.",
};
pub(super) const COMMIT_DURATION: Metric = Metric {
    name: "hames.store.commit.duration",
    kind: Kind::Histogram(SHORT),
    unit: Unit::Seconds,
    labels: &[],
    help: "Time of a transaction that was committed, its flush to the disk included.",
};
pub(super) const COMMIT_WRITES: Metric = Metric {
    name: "hames.store.commit.writes",
    kind: Kind::Histogram(GROUPS),
    unit: Unit::Count,
    labels: &[],
    help: "Writes that were committed in one transaction.",
};
pub(super) const HTTP_REQUESTS: Metric = Metric {
    name: "hames.http.requests",
    kind: Kind::Counter,
    unit: Unit::Count,
    labels: &[METHOD, ROUTE, STATUS],
    help: "Requests that were answered; a route that does not exist is `unmatched`.",
};
pub(super) const HTTP_DURATION: Metric = Metric {
    name: "hames.http.request.duration",
    kind: Kind::Histogram(SHORT),
    unit: Unit::Seconds,
    labels: &[METHOD, ROUTE],
    help: "Time from the head of a request to the head of its answer; waits that were asked for are part of it.",
};
pub(super) const EXPORT_LOST: Metric = Metric {
    name: "hames.telemetry.spans.dropped",
    kind: Kind::Counter,
    unit: Unit::Count,
    labels: &[REASON],
    help: "Spans that no collector has: the queue was full, an export failed, or the collector rejected them.",
};
pub(super) const BUILD: Metric = Metric {
    name: "hames.build.info",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[VERSION],
    help: "Always 1; the label tells the version.",
};

/// Every metric, as it is documented.
pub const METRICS: [&Metric; 22] = [
    &RUNS_ENDED,
    &RUN_DURATION,
    &RUNS_ACTIVE,
    &RUNS_QUEUED,
    &STEP_DURATION,
    &TOOL_DURATION,
    &MODEL_DURATION,
    &FIRST_TOKEN,
    &TOKENS,
    &RETRIES,
    &SSE_READERS,
    &COMMIT_DURATION,
    &COMMIT_WRITES,
    &HTTP_REQUESTS,
    &HTTP_DURATION,
    &EXPORT_LOST,
    &BUILD,
    &process::CPU,
    &process::MEMORY,
    &process::FILES,
    &process::MAX_FILES,
    &process::START,
];

impl Metric {
    /// Its name in the text form of Prometheus.
    pub fn exposed_name(&self) -> String {
        let unit = match self.unit {
            Unit::Count => "",
            Unit::Seconds => "_seconds",
            Unit::Bytes => "_bytes",
        };
        let total = match self.kind {
            Kind::Counter => "_total",
            Kind::Gauge | Kind::Histogram(_) => "",
        };
        format!("{}{unit}{total}", self.name.replace('.', "_"))
    }

    /// The word for its kind in the text form of Prometheus.
    pub const fn exposed_kind(&self) -> &'static str {
        match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram(_) => "histogram",
        }
    }

    /// Its unit as a collector is told (UCUM).
    pub(super) const fn unit(&self) -> &'static str {
        match self.unit {
            Unit::Count => "",
            Unit::Seconds => "s",
            Unit::Bytes => "By",
        }
    }

    /// The bounds of its buckets.
    pub(super) fn bounds(&self) -> Vec<f64> {
        match self.kind {
            Kind::Histogram(bounds) => bounds.to_vec(),
            Kind::Counter | Kind::Gauge => Vec::new(),
        }
    }
}
