//! From a request to a spec: names resolved, defaults filled in, every bound checked. A caller narrows what the
//! agent and the server allow and never widens it.

use std::collections::BTreeMap;

use super::agent::{Agent, Agents};
use crate::config::{CeilingConfig, RunConfig};
use crate::domain::{
    AssistantMessage, ClientTool, ClientToolKind, ContextPolicy, FieldError, InputMessage, InputRole, Limits,
    LimitsPatch, Message, ModelRef, OnBusy, Part, Run, RunId, RunInput, RunPatch, RunRequest, RunSpec, TextOrParts,
    TextPart, ToolChoice, ToolName, ToolSpec, TraceContext, UserMessage,
};
use crate::provider::Catalog;
use crate::tool::registry::Registry;
use crate::tool::schema::ArgumentSchema;

/// Least `context.max_tool_result_chars`: below it the marker of a cut would crowd out the result.
const MIN_TOOL_RESULT_CHARS: usize = 200;
const DEFAULT_TOOL_RESULT_CHARS: usize = 8_000;
/// Most entries of `tools`; each may be a pattern that has to be compiled.
const MAX_TOOL_PATTERNS: usize = 128;
/// Most characters of the name of a thread.
const MAX_THREAD: usize = 128;
const MAX_METADATA: usize = 32;
const MAX_METADATA_KEY: usize = 64;
const MAX_METADATA_VALUE: usize = 512;

/// A request that can be accepted.
pub(super) struct Resolved {
    pub(super) spec: RunSpec,
    /// The conversation it belongs to.
    pub(super) thread: Option<String>,
    /// The run it names as the one to continue.
    pub(super) continues: Option<RunId>,
    pub(super) on_busy: OnBusy,
}

impl Resolved {
    /// Whether no other run has a say in when it begins.
    pub(super) const fn is_alone(&self) -> bool {
        self.thread.is_none() && self.continues.is_none()
    }
}

/// Resolves a request that is a part of a trace, or of none. Every problem is reported, not only the first.
pub(super) fn resolve(
    request: RunRequest,
    trace: Option<TraceContext>,
    agents: &Agents,
    registry: &Registry,
    catalog: &Catalog,
    run: &RunConfig,
    ceilings: &CeilingConfig,
) -> Result<Resolved, Vec<FieldError>> {
    let mut errors = Vec::new();
    check_thread(&request, &mut errors);
    let input = read_input(request.input, &mut errors);
    let limits = read_limits(&request.limits, default_limits(ceilings), LEAST, ceilings, &mut errors);
    check_metadata(&request.metadata, &mut errors);
    check_text("$.instructions", request.instructions.as_deref().unwrap_or_default(), &mut errors);

    let Some((name, agent)) = find_agent(request.agent.as_deref(), agents, &mut errors) else { return Err(errors) };
    let model = choose_model(request.model.as_deref(), name, agent, &mut errors);
    let tools = choose_tools(request.tools.as_deref(), name, agent, registry, &mut errors);
    let client_tools = client_tools(request.tools.as_deref(), &tools, &mut errors);
    let approval = choose_approval(&request.approval, &tools, registry, &mut errors);
    let workspace = choose_workspace(request.workspace, name, agent, &mut errors);

    let endpoint = model.as_ref().and_then(|model| catalog.get(&model.provider));
    let max_output_tokens = endpoint.and_then(|endpoint| endpoint.max_output_tokens);
    let window = endpoint
        .map_or(u64::MAX, |endpoint| endpoint.context_window.saturating_sub(u64::from(max_output_tokens.unwrap_or(0))));
    let max_tokens = match request.context.max_tokens {
        None => window,
        Some(asked) => bounded("$.context.max_tokens", asked, 1, window, "the model's window", &mut errors),
    };
    let max_tool_result_chars = match request.context.max_tool_result_chars {
        None => DEFAULT_TOOL_RESULT_CHARS.min(ceilings.max_tool_result_chars),
        Some(asked) => bounded(
            "$.context.max_tool_result_chars",
            asked,
            MIN_TOOL_RESULT_CHARS,
            ceilings.max_tool_result_chars,
            "the server's ceiling",
            &mut errors,
        ),
    };
    match model {
        Some(model) if errors.is_empty() => {
            let (thread, continues, on_busy) = (request.thread, request.previous_run, request.on_busy);
            let spec = RunSpec {
                agent: name.to_owned(),
                input,
                instructions: request.instructions.or_else(|| agent.instructions.clone()),
                model,
                max_output_tokens,
                tools,
                client_tools,
                approval,
                limits,
                context: ContextPolicy { strategy: request.context.strategy, max_tokens, max_tool_result_chars },
                on_repeat: request.on_repeat,
                repeat_limit: run.repeat_limit,
                parallel_tools: request.parallel_tools,
                workspace,
                metadata: request.metadata,
                trace,
            };
            Ok(Resolved { spec, thread, continues, on_busy })
        }
        Some(_) | None => Err(errors),
    }
}

fn find_agent<'a>(
    asked: Option<&'a str>,
    agents: &'a Agents,
    errors: &mut Vec<FieldError>,
) -> Option<(&'a str, &'a Agent)> {
    let known = || agents.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let Some(name) = asked.or_else(|| agents.default_name()) else {
        let message = format!("no agent is named and the server has no default agent; there are {}", known());
        errors.push(FieldError::new("$.agent", message));
        return None;
    };
    let agent = agents.get(name);
    if agent.is_none() {
        errors.push(FieldError::new("$.agent", format!("there is no agent `{name}`; there are {}", known())));
    }
    Some((name, agent?))
}

fn choose_model(asked: Option<&str>, name: &str, agent: &Agent, errors: &mut Vec<FieldError>) -> Option<ModelRef> {
    let Some(asked) = asked else { return agent.models.first().cloned() };
    let found = agent.models.iter().find(|model| model.to_string() == asked);
    if found.is_none() {
        let allowed = agent.models.iter().map(|model| format!("`{model}`")).collect::<Vec<_>>().join(", ");
        let message = format!("agent `{name}` does not allow the model `{asked}`; it allows {allowed}");
        errors.push(FieldError::new("$.model", message));
    }
    found.cloned()
}

fn choose_tools(
    asked: Option<&[ToolChoice]>,
    name: &str,
    agent: &Agent,
    registry: &Registry,
    errors: &mut Vec<FieldError>,
) -> Vec<ToolName> {
    let Some(asked) = asked else { return agent.tools.clone() };
    if asked.len() > MAX_TOOL_PATTERNS {
        let message = format!("{} entries are given; at most {MAX_TOOL_PATTERNS} are allowed", asked.len());
        errors.push(FieldError::new("$.tools", message));
        return Vec::new();
    }
    let named = asked.iter().enumerate().filter_map(|(index, choice)| match choice {
        ToolChoice::Named(pattern) => Some((index, pattern)),
        ToolChoice::Client(_) => None,
    });
    if !asked.is_empty() && named.clone().next().is_none() {
        return agent.tools.clone();
    }
    let mut chosen = Vec::new();
    for (index, pattern) in named {
        let path = format!("$.tools[{index}]");
        match registry.select(std::slice::from_ref(pattern)) {
            Err(unknown) => errors.push(FieldError::new(path, unknown.to_string())),
            Ok(names) => {
                let allowed: Vec<_> = names.into_iter().filter(|tool| agent.tools.contains(tool)).collect();
                if allowed.is_empty() {
                    let message = format!("agent `{name}` does not have the tool `{pattern}`");
                    errors.push(FieldError::new(path, message));
                }
                chosen.extend(allowed);
            }
        }
    }
    agent.tools.iter().filter(|tool| chosen.contains(tool)).cloned().collect()
}

/// The tools that the caller executes.
fn client_tools(asked: Option<&[ToolChoice]>, own: &[ToolName], errors: &mut Vec<FieldError>) -> Vec<ToolSpec> {
    let mut tools: Vec<ToolSpec> = Vec::new();
    for (index, choice) in asked.unwrap_or_default().iter().enumerate() {
        let ToolChoice::Client(tool) = choice else { continue };
        if own.contains(&tool.name) || tools.iter().any(|other| other.name == tool.name) {
            let message = format!("two tools of the run are named `{}`; names must be unique", tool.name);
            errors.push(FieldError::new(format!("$.tools[{index}].name"), message));
        }
        if let Err(error) = ArgumentSchema::compile(&tool.parameters) {
            errors.push(FieldError::new(format!("$.tools[{index}].parameters"), error.to_string()));
        }
        check_text(&format!("$.tools[{index}].description"), &tool.description, errors);
        let ClientTool { kind: ClientToolKind::Client, name, description, parameters } = tool.clone();
        tools.push(ToolSpec { name, description, parameters });
    }
    tools
}

fn choose_approval(
    asked: &[String],
    tools: &[ToolName],
    registry: &Registry,
    errors: &mut Vec<FieldError>,
) -> Vec<ToolName> {
    if asked.len() > MAX_TOOL_PATTERNS {
        let message = format!("{} entries are given; at most {MAX_TOOL_PATTERNS} are allowed", asked.len());
        errors.push(FieldError::new("$.approval", message));
        return Vec::new();
    }
    let mut chosen = Vec::new();
    for (index, pattern) in asked.iter().enumerate() {
        let path = format!("$.approval[{index}]");
        match registry.select(std::slice::from_ref(pattern)) {
            Err(unknown) => errors.push(FieldError::new(path, unknown.to_string())),
            Ok(names) => {
                let of_run: Vec<_> = names.into_iter().filter(|name| tools.contains(name)).collect();
                if of_run.is_empty() {
                    errors.push(FieldError::new(path, format!("the run does not have the tool `{pattern}`")));
                }
                chosen.extend(of_run);
            }
        }
    }
    tools.iter().filter(|tool| chosen.contains(tool)).cloned().collect()
}

fn check_thread(request: &RunRequest, errors: &mut Vec<FieldError>) {
    if let Some(thread) = &request.thread {
        let length = thread.chars().count();
        if length == 0 || length > MAX_THREAD {
            let message = format!("the thread has {length} characters; 1 to {MAX_THREAD} are allowed");
            errors.push(FieldError::new("$.thread", message));
        }
        check_text("$.thread", thread, errors);
        if request.previous_run.is_some() {
            let message = "a run of a thread continues the newest run of it; leave out `thread` or `previous_run`";
            errors.push(FieldError::new("$.previous_run", message));
        }
    }
}

/// What a patch changes of a run.
pub(super) struct Amendment {
    pub(super) limits: Option<Limits>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
}

/// The limits and labels of a run after a patch. Limits can only be raised.
pub(super) fn raise_limits(
    run: &Run,
    patch: &RunPatch,
    ceilings: &CeilingConfig,
) -> Result<Amendment, Vec<FieldError>> {
    let mut errors = Vec::new();
    if let Some(metadata) = &patch.metadata {
        check_metadata(metadata, &mut errors);
    }
    let raised = read_limits(&patch.limits, run.limits, run.limits, ceilings, &mut errors);
    match errors.is_empty() {
        true => Ok(Amendment { limits: (raised != run.limits).then_some(raised), metadata: patch.metadata.clone() }),
        false => Err(errors),
    }
}

/// The parts of a message of a caller.
pub(crate) fn said_parts(path: &str, content: TextOrParts) -> Result<Vec<Part>, FieldError> {
    let parts = parts(content);
    let mut errors = Vec::new();
    check_said(path, &whole_text(&parts), &mut errors);
    match errors.into_iter().next() {
        Some(error) => Err(error),
        None => Ok(parts),
    }
}

fn choose_workspace(asked: Option<String>, name: &str, agent: &Agent, errors: &mut Vec<FieldError>) -> Option<String> {
    let Some(asked) = asked else { return agent.workspace.clone() };
    if !agent.workspaces.contains(&asked) {
        let allowed = agent.workspaces.iter().map(|workspace| format!("`{workspace}`")).collect::<Vec<_>>().join(", ");
        let allowed = if allowed.is_empty() { "none".to_owned() } else { allowed };
        let message = format!("agent `{name}` does not allow the workspace `{asked}`; it allows {allowed}");
        errors.push(FieldError::new("$.workspace", message));
    }
    Some(asked)
}

fn read_input(input: RunInput, errors: &mut Vec<FieldError>) -> Vec<Message> {
    let messages = match input {
        RunInput::Text(text) => {
            check_said("$.input", &text, errors);
            return vec![Message::user(text)];
        }
        RunInput::Messages(messages) => messages,
    };
    match messages.last() {
        None => errors.push(FieldError::new("$.input", "the list of messages is empty; give at least one")),
        Some(InputMessage { role: InputRole::Assistant, .. }) => {
            errors.push(FieldError::new("$.input", "the last message has the role `assistant`; it has to be `user`"));
        }
        Some(InputMessage { role: InputRole::User, .. }) => {}
    }
    messages.into_iter().enumerate().map(|(index, message)| read_message(index, message, errors)).collect()
}

fn read_message(index: usize, message: InputMessage, errors: &mut Vec<FieldError>) -> Message {
    let path = format!("$.input[{index}].content");
    let content = parts(message.content);
    check_said(&path, &whole_text(&content), errors);
    match message.role {
        InputRole::User => Message::User(UserMessage { content }),
        InputRole::Assistant => {
            Message::Assistant(AssistantMessage { content, tool_calls: Vec::new(), incomplete: false })
        }
    }
}

fn parts(content: TextOrParts) -> Vec<Part> {
    match content {
        TextOrParts::Text(text) => vec![Part::Text { text }],
        TextOrParts::Parts(parts) => parts.into_iter().map(|TextPart::Text { text }| Part::Text { text }).collect(),
    }
}

fn whole_text(parts: &[Part]) -> String {
    parts
        .iter()
        .map(|part| match part {
            Part::Text { text } | Part::Reasoning { text, .. } => text.as_str(),
        })
        .collect()
}

fn check_said(path: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.trim().is_empty() {
        errors.push(FieldError::new(path, "the text is empty; say something"));
    }
    check_text(path, text, errors);
}

/// No provider and not every database takes U+0000, so it is refused where it comes in.
fn check_text(path: &str, text: &str, errors: &mut Vec<FieldError>) {
    if text.contains('\0') {
        errors.push(FieldError::new(path, "the text holds the character U+0000; leave it out"));
    }
}

fn check_metadata(metadata: &BTreeMap<String, String>, errors: &mut Vec<FieldError>) {
    if metadata.len() > MAX_METADATA {
        let message = format!("{} labels are given; at most {MAX_METADATA} are allowed", metadata.len());
        errors.push(FieldError::new("$.metadata", message));
    }
    for (key, value) in metadata {
        let path = format!("$.metadata.{key}");
        let length = key.chars().count();
        if key.is_empty() || length > MAX_METADATA_KEY {
            let message = format!("the key has {length} characters; 1 to {MAX_METADATA_KEY} are allowed");
            errors.push(FieldError::new(&path, message));
        }
        let length = value.chars().count();
        if length > MAX_METADATA_VALUE {
            let message = format!("the value has {length} characters; at most {MAX_METADATA_VALUE} are allowed");
            errors.push(FieldError::new(&path, message));
        }
        check_text(&path, key, errors);
        check_text(&path, value, errors);
    }
}

/// Limits from `patch`, none below `least`; what it leaves out is as in `default`.
fn read_limits(
    patch: &LimitsPatch,
    default: Limits,
    least: Limits,
    ceilings: &CeilingConfig,
    errors: &mut Vec<FieldError>,
) -> Limits {
    let mut limit = |name: &str, asked: Option<u64>, default: u64, least: u64, ceiling: u64| match asked {
        None => default,
        Some(asked) => bounded(&format!("$.limits.{name}"), asked, least, ceiling, "the server's ceiling", errors),
    };
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Limits {
        max_steps: small(limit(
            "max_steps",
            patch.max_steps.map(u64::from),
            default.max_steps.into(),
            least.max_steps.into(),
            ceilings.max_steps.into(),
        )),
        max_tool_calls: small(limit(
            "max_tool_calls",
            patch.max_tool_calls.map(u64::from),
            default.max_tool_calls.into(),
            least.max_tool_calls.into(),
            ceilings.max_tool_calls.into(),
        )),
        max_tokens: limit("max_tokens", patch.max_tokens, default.max_tokens, least.max_tokens, ceilings.max_tokens),
        timeout_ms: limit("timeout_ms", patch.timeout_ms, default.timeout_ms, least.timeout_ms, ceilings.timeout_ms),
        model_timeout_ms: limit(
            "model_timeout_ms",
            patch.model_timeout_ms,
            default.model_timeout_ms,
            least.model_timeout_ms,
            ceilings.model_timeout_ms,
        ),
        tool_timeout_ms: limit(
            "tool_timeout_ms",
            patch.tool_timeout_ms,
            default.tool_timeout_ms,
            least.tool_timeout_ms,
            ceilings.tool_timeout_ms,
        ),
        wait_timeout_ms: limit(
            "wait_timeout_ms",
            patch.wait_timeout_ms,
            default.wait_timeout_ms,
            least.wait_timeout_ms,
            ceilings.wait_timeout_ms,
        ),
    }
}

/// The default limits, none above its ceiling.
fn default_limits(ceilings: &CeilingConfig) -> Limits {
    let limits = Limits::default();
    Limits {
        max_steps: limits.max_steps.min(ceilings.max_steps),
        max_tool_calls: limits.max_tool_calls.min(ceilings.max_tool_calls),
        max_tokens: limits.max_tokens.min(ceilings.max_tokens),
        timeout_ms: limits.timeout_ms.min(ceilings.timeout_ms),
        model_timeout_ms: limits.model_timeout_ms.min(ceilings.model_timeout_ms),
        tool_timeout_ms: limits.tool_timeout_ms.min(ceilings.tool_timeout_ms),
        wait_timeout_ms: limits.wait_timeout_ms.min(ceilings.wait_timeout_ms),
    }
}

/// The lowest limits a run can be asked for with.
const LEAST: Limits = Limits {
    max_steps: 1,
    max_tool_calls: 0,
    max_tokens: 1,
    timeout_ms: 1,
    model_timeout_ms: 1,
    tool_timeout_ms: 1,
    wait_timeout_ms: 1,
};

fn bounded<T: PartialOrd + std::fmt::Display>(
    path: &str,
    asked: T,
    least: T,
    most: T,
    bound: &str,
    errors: &mut Vec<FieldError>,
) -> T {
    if asked < least {
        errors.push(FieldError::new(path, format!("{asked} is too small; at least {least} is needed")));
    } else if asked > most {
        errors.push(FieldError::new(path, format!("{asked} is above {bound} of {most}")));
    }
    asked
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
