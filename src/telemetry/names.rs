//! The names of the OpenTelemetry semantic conventions that spans and resources use.
//!
//! They are those of version 1.41.0. In 1.42.0 the ones of generative AI are marked as moved to a repository of their own,
//! and the crate `opentelemetry-semantic-conventions` has them as deprecated constants only.

/// The conventions that names and attributes follow.
pub(super) const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.41.0";

/// Resource: the service.
pub(super) const SERVICE_NAME: &str = "service.name";
/// Resource: its version.
pub(super) const SERVICE_VERSION: &str = "service.version";
/// Resource: this process among those of the service.
pub(super) const SERVICE_INSTANCE_ID: &str = "service.instance.id";
/// What is done.
pub(super) const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// Whose conventions the model's server follows.
pub(super) const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// The model that is asked for.
pub(super) const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Most tokens of the answer.
pub(super) const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
/// Whether the answer is streamed: always.
pub(super) const GEN_AI_REQUEST_STREAM: &str = "gen_ai.request.stream";
/// Why the model stopped.
pub(super) const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Time to the first piece of the answer, in seconds.
pub(super) const GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
/// Tokens of the request.
pub(super) const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Tokens of the answer.
pub(super) const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// Those of the request that the provider had at hand.
pub(super) const GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
/// Those of the answer that were reasoning.
pub(super) const GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: &str = "gen_ai.usage.reasoning.output_tokens";
/// The agent.
pub(super) const GEN_AI_AGENT_NAME: &str = "gen_ai.agent.name";
/// The tool.
pub(super) const GEN_AI_TOOL_NAME: &str = "gen_ai.tool.name";
/// The kind of a tool: always `function`.
pub(super) const GEN_AI_TOOL_TYPE: &str = "gen_ai.tool.type";
/// The call.
pub(super) const GEN_AI_TOOL_CALL_ID: &str = "gen_ai.tool.call.id";
/// The class of the error that ended it.
pub(super) const ERROR_TYPE: &str = "error.type";
/// The host that is asked.
pub(super) const SERVER_ADDRESS: &str = "server.address";
/// Its port.
pub(super) const SERVER_PORT: &str = "server.port";
/// The method of a request.
pub(super) const HTTP_REQUEST_METHOD: &str = "http.request.method";
/// The route of a request.
pub(super) const HTTP_ROUTE: &str = "http.route";
/// The status of an answer.
pub(super) const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
/// The path of a request that has a route; other paths are only the caller's text.
pub(super) const URL_PATH: &str = "url.path";
/// The scheme of a request.
pub(super) const URL_SCHEME: &str = "url.scheme";
/// What the model is told.
pub(super) const GEN_AI_INPUT_MESSAGES: &str = "gen_ai.input.messages";
/// What the model says.
pub(super) const GEN_AI_OUTPUT_MESSAGES: &str = "gen_ai.output.messages";
/// The system prompt.
pub(super) const GEN_AI_SYSTEM_INSTRUCTIONS: &str = "gen_ai.system_instructions";
/// The tools it is offered.
pub(super) const GEN_AI_TOOL_DEFINITIONS: &str = "gen_ai.tool.definitions";
/// Arguments of a tool call.
pub(super) const GEN_AI_TOOL_CALL_ARGUMENTS: &str = "gen_ai.tool.call.arguments";
/// Result of a tool call.
pub(super) const GEN_AI_TOOL_CALL_RESULT: &str = "gen_ai.tool.call.result";
