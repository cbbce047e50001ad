//! What a run tells of itself while it is at work: its spans, and the numbers that are counted with them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::services::Services;
use crate::agent::Machine;
use crate::domain::{FailureClass, ModelRequest, ModelTurn, Run, RunSpec, RunStatus, ToolOutcome, TraceContext};
use crate::provider::Endpoint;
use crate::telemetry::metric::{ModelLabels, ModelOutcome};
use crate::telemetry::trace::{AgentSpan, ChatSpan, ChatTarget, ToolSpan};
use crate::telemetry::{Capture, Metrics};
use crate::tool::Tool;
use crate::tool::executor::ReadyCall;

/// Watches a run from the moment a worker has it.
pub(super) struct Watch {
    span: AgentSpan,
    /// When the step in progress began.
    step: Option<Instant>,
    metrics: Metrics,
    capture: Capture,
}

impl Watch {
    /// Begins.
    pub(super) fn begin(services: &Services, run: &Run, machine: &Machine) -> Self {
        let spec = machine.spec();
        let kind = services.catalog.get(&spec.model.provider).map(|endpoint| endpoint.kind);
        let span = AgentSpan::begin(run.id, spec, machine.input(), kind, services.capture);
        Self { span, step: None, metrics: services.metrics.clone(), capture: services.capture }
    }

    /// A step begins; the one before it has ended.
    pub(super) fn step(&mut self, agent: &str) {
        if let Some(begun) = self.step.replace(Instant::now()) {
            self.metrics.step(agent, begun.elapsed());
        }
    }

    /// An attempt at a model call begins.
    pub(super) fn model_call<'a>(
        &'a self,
        request: &ModelRequest,
        spec: &'a RunSpec,
        endpoint: &Endpoint,
    ) -> ModelWatch<'a> {
        let provider = spec.model.provider.as_str();
        let address = endpoint.address.as_ref().map(|(host, port)| (host.as_str(), *port));
        let target = ChatTarget { provider, kind: endpoint.kind, address };
        ModelWatch {
            span: Some(ChatSpan::begin(&self.span, request, target, self.capture)),
            begun: Instant::now(),
            heard: false,
            labels: ModelLabels { provider, model: &spec.model.model },
            watch: self,
        }
    }

    /// A failed attempt is followed by another, which begins now.
    pub(super) fn retry(&self, provider: &str, class: FailureClass) {
        self.metrics.retry(provider, class);
    }

    /// Tool calls begin.
    pub(super) fn tools(&self, calls: &[ReadyCall]) -> ToolWatch {
        let open = calls
            .iter()
            .map(|call| {
                let span = ToolSpan::begin(&self.span, call.tool.spec(), &call.id, &call.arguments, self.capture);
                (call.id.clone(), Arc::clone(&call.tool), span)
            })
            .collect();
        ToolWatch { open, metrics: self.metrics.clone(), capture: self.capture }
    }

    /// The run has ended, `ran_for` after its start.
    pub(super) fn ended(&mut self, run: &Run, ran_for: Duration) {
        if let Some(begun) = self.step.take() {
            self.metrics.step(&run.agent, begun.elapsed());
        }
        let took = match run.status {
            RunStatus::Finished { started_at: Some(_), .. } => Some(ran_for),
            RunStatus::Finished { started_at: None, .. }
            | RunStatus::Queued { .. }
            | RunStatus::Running { .. }
            | RunStatus::Waiting { .. } => None,
        };
        self.metrics.run_ended(&run.agent, run.status.name(), took);
        self.span.end(run, self.capture);
    }
}

/// Watches one attempt at a model call. One that is dropped before it ended was interrupted.
pub(super) struct ModelWatch<'a> {
    /// `None` once the attempt has ended.
    span: Option<ChatSpan>,
    begun: Instant,
    heard: bool,
    labels: ModelLabels<'a>,
    watch: &'a Watch,
}

impl ModelWatch<'_> {
    /// The span that the provider works for.
    pub(super) fn context(&self) -> Option<TraceContext> {
        self.span.as_ref().and_then(ChatSpan::context)
    }

    /// A piece of the answer came.
    pub(super) fn heard(&mut self) {
        if !self.heard {
            self.heard = true;
            let after = self.begun.elapsed();
            self.watch.metrics.first_token(self.labels, after);
            if let Some(span) = &self.span {
                span.first_chunk(after.as_secs_f64());
            }
        }
    }

    /// The attempt gave a turn.
    pub(super) fn answered(mut self, turn: &ModelTurn) {
        if let Some(span) = self.end(ModelOutcome::Answered) {
            span.answered(turn, self.watch.capture);
        }
        if let Some(usage) = turn.usage {
            self.watch.metrics.tokens(self.labels, usage);
        }
    }

    /// The attempt failed.
    pub(super) fn failed(mut self, class: FailureClass) {
        if let Some(span) = self.end(ModelOutcome::Failed(class)) {
            span.failed(class);
        }
    }

    /// Counts the attempt, once.
    fn end(&mut self, outcome: ModelOutcome) -> Option<ChatSpan> {
        let span = self.span.take()?;
        self.watch.metrics.model_call(self.labels, outcome, self.begun.elapsed());
        Some(span)
    }
}

impl Drop for ModelWatch<'_> {
    fn drop(&mut self) {
        if let Some(span) = self.end(ModelOutcome::Interrupted) {
            span.interrupted();
        }
    }
}

/// Watches the tool calls of a group.
pub(super) struct ToolWatch {
    /// Those that have not ended, by id.
    open: Vec<(String, Arc<dyn Tool>, ToolSpan)>,
    metrics: Metrics,
    capture: Capture,
}

impl ToolWatch {
    /// A call ended.
    pub(super) fn ended(&mut self, outcome: &ToolOutcome) {
        let Some(at) = self.open.iter().position(|(id, ..)| *id == outcome.call_id) else { return };
        let (_, tool, span) = self.open.swap_remove(at);
        let took = Duration::from_millis(outcome.duration_ms);
        self.metrics.tool_call(tool.spec().name.as_str(), outcome.kind, took);
        span.end(outcome, self.capture);
    }
}
