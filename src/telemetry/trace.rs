//! The spans that are exported: runs, model calls, tool calls, HTTP requests.
//!
//! Names and attributes are those of the OpenTelemetry semantic conventions, version 1.41.0: "GenAI agent and framework
//! spans" and "generative client AI spans" (both in development), and "HTTP spans" (stable). What the conventions have
//! no name for starts with `hames.`.
//!
//! Spans are held by who does the work and never entered, so they cost the futures of a run nothing. Without a
//! collector no layer wants them, and each is an empty handle.

use opentelemetry::trace::{SpanContext, SpanId, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, Context, StringValue, Value};
use tracing::{Metadata, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::content;
use super::names::{
    ERROR_TYPE, GEN_AI_AGENT_NAME, GEN_AI_OPERATION_NAME, GEN_AI_PROVIDER_NAME, GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_REQUEST_MODEL, GEN_AI_REQUEST_STREAM, GEN_AI_RESPONSE_FINISH_REASONS, GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK,
    GEN_AI_TOOL_CALL_ID, GEN_AI_TOOL_NAME, GEN_AI_TOOL_TYPE, GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS,
    GEN_AI_USAGE_INPUT_TOKENS, GEN_AI_USAGE_OUTPUT_TOKENS, GEN_AI_USAGE_REASONING_OUTPUT_TOKENS, HTTP_REQUEST_METHOD,
    HTTP_RESPONSE_STATUS_CODE, HTTP_ROUTE, SERVER_ADDRESS, SERVER_PORT, URL_PATH, URL_SCHEME,
};
use crate::config::ProviderKind;
use crate::domain::{
    End, FailureClass, FinishReason, Message, ModelRequest, ModelTurn, Run, RunId, RunSpec, RunStatus, RunStatusName,
    ToolOutcome, ToolSpec, TraceContext,
};

/// The target of spans that are exported.
const EXPORTED: &str = "hames::exported";

/// `gen_ai.operation.name` and the first word of the name of the span of a run.
const INVOKE_AGENT: &str = "invoke_agent";
/// The same for one attempt at a model call.
const CHAT: &str = "chat";
/// The same for a tool call.
const EXECUTE_TOOL: &str = "execute_tool";

/// The run.
const RUN: &str = "hames.run.id";
/// How it ended.
const RUN_STATUS: &str = "hames.run.status";
/// The name of the configured provider.
const CONFIGURED_PROVIDER: &str = "hames.provider";
/// Which response of the run, from 1.
const STEP: &str = "hames.step";
/// Which attempt at it, from 1.
const ATTEMPT: &str = "hames.attempt";
/// How a tool call ended.
const TOOL_OUTCOME: &str = "hames.tool.outcome";

/// An error whose class is not known.
const OTHER: &str = "_OTHER";

/// The class of what was cut off since its run had to end.
const INTERRUPTED: &str = "interrupted";

/// Whether spans carry what was said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Capture {
    /// Names, numbers and ids only.
    #[default]
    Nothing,
    /// Prompts, answers, and arguments and results of tools too.
    Content,
}

impl Capture {
    /// What the setting `telemetry.capture_content` says.
    pub const fn of(capture_content: bool) -> Self {
        if capture_content { Self::Content } else { Self::Nothing }
    }
}

/// Whether a span or record is one of those that are exported, and not for the log.
pub(super) fn is_exported(metadata: &Metadata<'_>) -> bool {
    metadata.target() == EXPORTED
}

/// The span of a run, from the moment a worker has it to its end.
pub struct AgentSpan {
    span: Span,
    /// The caller's place, for when nothing is exported.
    caller: Option<TraceContext>,
    ended: bool,
}

impl AgentSpan {
    /// Begins below the caller's span, or as a trace of its own where the caller has none.
    /// `input` is what the caller said.
    pub fn begin<'m>(
        run: RunId,
        spec: &RunSpec,
        input: impl Iterator<Item = &'m Message>,
        kind: Option<ProviderKind>,
        capture: Capture,
    ) -> Self {
        let agent = &spec.agent;
        let span = tracing::info_span!(target: EXPORTED, parent: None, "invoke_agent",
            otel.name = %Name(INVOKE_AGENT, agent), otel.kind = "internal");
        if !span.is_disabled() {
            set_caller(&span, spec.trace.as_ref());
            span.set_attribute(GEN_AI_OPERATION_NAME, INVOKE_AGENT);
            span.set_attribute(GEN_AI_AGENT_NAME, agent.clone());
            span.set_attribute(GEN_AI_PROVIDER_NAME, provider_name(kind));
            span.set_attribute(GEN_AI_REQUEST_MODEL, spec.model.model.clone());
            span.set_attribute(CONFIGURED_PROVIDER, spec.model.provider.clone());
            span.set_attribute(RUN, run.to_string());
            match capture {
                Capture::Nothing => {}
                Capture::Content => content::of_agent(&span, spec, input),
            }
        }
        Self { span, caller: spec.trace.clone(), ended: false }
    }

    /// Ends with the run, which has ended.
    pub fn end(&mut self, run: &Run, capture: Capture) {
        self.ended = true;
        if self.span.is_disabled() {
            return;
        }
        let span = &self.span;
        set_count(span, GEN_AI_USAGE_INPUT_TOKENS, run.usage.input_tokens);
        set_count(span, GEN_AI_USAGE_OUTPUT_TOKENS, run.usage.output_tokens);
        span.set_attribute(RUN_STATUS, run.status.name().as_str());
        let RunStatus::Finished { end, .. } = &run.status else { return };
        match end {
            End::Completed { answer, finish_reason } => {
                set_finish(span, *finish_reason);
                match capture {
                    Capture::Nothing => {}
                    Capture::Content => content::of_answer(span, answer, *finish_reason),
                }
            }
            End::Stopped { status, error, .. } => match status.name() {
                RunStatusName::ModelError | RunStatusName::InternalError => set_error(span, error.code.clone()),
                // A run that met one of its limits, that of time included, or was stopped did what was asked of it.
                RunStatusName::StepLimit
                | RunStatusName::ToolLimit
                | RunStatusName::TokenLimit
                | RunStatusName::ContextLimit
                | RunStatusName::RepeatLimit
                | RunStatusName::Timeout
                | RunStatusName::Aborted
                | RunStatusName::Queued
                | RunStatusName::Running
                | RunStatusName::Waiting
                | RunStatusName::Completed => {}
            },
        }
    }
}

impl Drop for AgentSpan {
    /// A run whose task panicked or was let go has no end here.
    fn drop(&mut self) {
        if !self.ended && !self.span.is_disabled() {
            set_error(&self.span, OTHER);
        }
    }
}

/// The span of one attempt at a model call.
pub struct ChatSpan {
    span: Span,
    caller: Option<TraceContext>,
}

/// The model that a span's call goes to.
#[derive(Clone, Copy, Debug)]
pub struct ChatTarget<'a> {
    /// The name of the configured provider.
    pub provider: &'a str,
    /// Which wire it speaks.
    pub kind: ProviderKind,
    /// Its host and port, where it has one.
    pub address: Option<(&'a str, u16)>,
}

impl ChatSpan {
    /// Begins below the run's span.
    pub fn begin(agent: &AgentSpan, request: &ModelRequest, target: ChatTarget<'_>, capture: Capture) -> Self {
        let span = tracing::info_span!(target: EXPORTED, parent: &agent.span, "chat",
            otel.name = %Name(CHAT, &request.model), otel.kind = "client");
        if !span.is_disabled() {
            span.set_attribute(GEN_AI_OPERATION_NAME, CHAT);
            span.set_attribute(GEN_AI_PROVIDER_NAME, provider_name(Some(target.kind)));
            span.set_attribute(GEN_AI_REQUEST_MODEL, request.model.clone());
            span.set_attribute(GEN_AI_REQUEST_STREAM, true);
            span.set_attribute(CONFIGURED_PROVIDER, target.provider.to_owned());
            span.set_attribute(STEP, i64::from(request.step));
            span.set_attribute(ATTEMPT, i64::from(request.attempt));
            if let Some(most) = request.max_output_tokens {
                span.set_attribute(GEN_AI_REQUEST_MAX_TOKENS, i64::from(most));
            }
            if let Some((host, port)) = target.address {
                span.set_attribute(SERVER_ADDRESS, host.to_owned());
                span.set_attribute(SERVER_PORT, i64::from(port));
            }
            match capture {
                Capture::Nothing => {}
                Capture::Content => content::of_request(&span, request),
            }
        }
        Self { span, caller: agent.caller.clone() }
    }

    /// What the provider is told: this span, or the caller's where nothing is exported.
    pub fn context(&self) -> Option<TraceContext> {
        if self.span.is_disabled() { self.caller.clone() } else { context_of(&self.span) }
    }

    /// The first piece of the answer came after so many seconds.
    pub fn first_chunk(&self, seconds: f64) {
        if !self.span.is_disabled() {
            self.span.set_attribute(GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, seconds);
        }
    }

    /// Ends with a turn.
    pub fn answered(self, turn: &ModelTurn, capture: Capture) {
        if self.span.is_disabled() {
            return;
        }
        set_finish(&self.span, turn.finish);
        if let Some(usage) = turn.usage {
            set_count(&self.span, GEN_AI_USAGE_INPUT_TOKENS, usage.input_tokens);
            set_count(&self.span, GEN_AI_USAGE_OUTPUT_TOKENS, usage.output_tokens);
            for (name, count) in [
                (GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, usage.cached_input_tokens),
                (GEN_AI_USAGE_REASONING_OUTPUT_TOKENS, usage.reasoning_tokens),
            ] {
                if count > 0 {
                    set_count(&self.span, name, count);
                }
            }
        }
        match capture {
            Capture::Nothing => {}
            Capture::Content => content::of_turn(&self.span, turn),
        }
    }

    /// Ends with a failure. Its message is not exported: it may repeat what was said.
    pub fn failed(self, class: FailureClass) {
        self.ended_by(class.code());
    }

    /// Ends since the run was told to.
    pub fn interrupted(self) {
        self.ended_by(INTERRUPTED);
    }

    fn ended_by(&self, error: &'static str) {
        if !self.span.is_disabled() {
            set_error(&self.span, error);
        }
    }
}

/// The span of one tool call.
pub struct ToolSpan(Span);

impl ToolSpan {
    /// Begins below the run's span. The tool is a configured one; the id is the model's.
    pub fn begin(
        agent: &AgentSpan,
        tool: &ToolSpec,
        call_id: &str,
        arguments: &serde_json::Map<String, serde_json::Value>,
        capture: Capture,
    ) -> Self {
        let span = tracing::info_span!(target: EXPORTED, parent: &agent.span, "execute_tool",
            otel.name = %Name(EXECUTE_TOOL, tool.name.as_str()), otel.kind = "internal");
        if !span.is_disabled() {
            span.set_attribute(GEN_AI_OPERATION_NAME, EXECUTE_TOOL);
            span.set_attribute(GEN_AI_TOOL_NAME, tool.name.as_str().to_owned());
            span.set_attribute(GEN_AI_TOOL_TYPE, "function");
            if is_plain_id(call_id) {
                span.set_attribute(GEN_AI_TOOL_CALL_ID, call_id.to_owned());
            }
            match capture {
                Capture::Nothing => {}
                Capture::Content => content::of_call(&span, arguments),
            }
        }
        Self(span)
    }

    /// Ends with the call.
    pub fn end(self, outcome: &ToolOutcome, capture: Capture) {
        if self.0.is_disabled() {
            return;
        }
        let kind = outcome.kind.as_str();
        self.0.set_attribute(TOOL_OUTCOME, kind);
        if outcome.kind.is_error() {
            set_error(&self.0, kind);
        }
        match capture {
            Capture::Nothing => {}
            Capture::Content => content::of_outcome(&self.0, outcome),
        }
    }
}

/// The span of an HTTP request, up to the head of its answer.
pub struct RequestSpan(Span);

impl RequestSpan {
    /// Begins below the caller's span. `path` is that of a request that has a route.
    pub fn begin(method: &str, route: Option<&str>, path: Option<&str>, caller: Option<&TraceContext>) -> Self {
        let name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}"));
        let span = tracing::info_span!(target: EXPORTED, parent: None, "http", otel.name = %name, otel.kind = "server");
        if !span.is_disabled() {
            set_caller(&span, caller);
            span.set_attribute(HTTP_REQUEST_METHOD, method.to_owned());
            span.set_attribute(URL_SCHEME, "http");
            if let Some(route) = route {
                span.set_attribute(HTTP_ROUTE, route.to_owned());
            }
            if let Some(path) = path {
                span.set_attribute(URL_PATH, path.to_owned());
            }
        }
        Self(span)
    }

    /// No span, for requests that are not worth one.
    pub const fn none() -> Self {
        Self(Span::none())
    }

    /// Its place in the trace; `None` when it is not exported.
    pub fn context(&self) -> Option<TraceContext> {
        if self.0.is_disabled() { None } else { context_of(&self.0) }
    }

    /// Ends with the head of an answer.
    pub fn answered(self, status: u16) {
        if self.0.is_disabled() {
            return;
        }
        self.0.set_attribute(HTTP_RESPONSE_STATUS_CODE, i64::from(status));
        // What a client did wrong is no error of the server.
        if status >= 500 {
            set_error(&self.0, status.to_string());
        }
    }
}

/// The conventions name the form of the API, whoever serves it.
const fn provider_name(kind: Option<ProviderKind>) -> &'static str {
    match kind {
        Some(ProviderKind::OpenaiChat) => "openai",
        Some(ProviderKind::Scripted) => "scripted",
        None => OTHER,
    }
}

/// `invoke_agent coder`; written only when somebody wants the span.
struct Name<'a>(&'static str, &'a str);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.0, self.1)
    }
}

/// Whether the id of a call is no more than an id. It comes out of the model's response and could hold anything.
fn is_plain_id(id: &str) -> bool {
    const LONGEST: usize = 64;
    id.len() <= LONGEST && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte))
}

fn set_count(span: &Span, name: &'static str, count: u64) {
    span.set_attribute(name, i64::try_from(count).unwrap_or(i64::MAX));
}

fn set_finish(span: &Span, reason: FinishReason) {
    let reasons = vec![StringValue::from(reason.as_str())];
    span.set_attribute(GEN_AI_RESPONSE_FINISH_REASONS, Value::Array(Array::String(reasons)));
}

fn set_error(span: &Span, class: impl Into<StringValue>) {
    span.set_attribute(ERROR_TYPE, Value::String(class.into()));
    span.set_status(Status::error(""));
}

/// Puts a span below its caller's.
fn set_caller(span: &Span, caller: Option<&TraceContext>) {
    let Some(caller) = caller else { return };
    let state = caller.state.as_deref().and_then(|state| state.parse::<TraceState>().ok()).unwrap_or_default();
    let context = SpanContext::new(
        TraceId::from_bytes(caller.trace_id.to_be_bytes()),
        SpanId::from_bytes(caller.span_id.to_be_bytes()),
        TraceFlags::new(caller.flags),
        true,
        state,
    );
    // Fails only for a span that nobody exports, which needs no parent.
    drop(span.set_parent(Context::new().with_remote_span_context(context)));
}

/// A span's place in its trace.
fn context_of(span: &Span) -> Option<TraceContext> {
    let context = span.context();
    let span = context.span();
    let place = span.span_context();
    let state = place.trace_state().header();
    place.is_valid().then(|| {
        let context = TraceContext {
            trace_id: u128::from_be_bytes(place.trace_id().to_bytes()),
            span_id: u64::from_be_bytes(place.span_id().to_bytes()),
            flags: place.trace_flags().to_u8(),
            state: None,
        };
        context.with_state(&state)
    })
}

#[cfg(test)]
mod tests {
    use super::is_plain_id;

    #[test]
    fn only_what_looks_like_an_id_is_exported_as_one() {
        for id in ["call_abc123", "toolu_01A09q90qw", "fc-1.2:3", &"x".repeat(64)] {
            assert!(is_plain_id(id), "{id}");
        }
        for text in ["leaked prompt text: x", "a@example.com", "é", &"x".repeat(65)] {
            assert!(!is_plain_id(text), "{text}");
        }
    }
}
