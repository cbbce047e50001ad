//! Settings: plain data, defaults, and what each key means. `load` fills them from a file and the environment.

mod builtin;
mod check;
mod env;
mod load;
mod otlp;
mod problem;
mod provider;
mod store_url;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;

use crate::domain::{Effect, ModelRef, OnUnknown};
use otlp::OTLP_HEADERS;

pub use builtin::{DEMO, DEMO_FILES, DEMO_SCRIPT};
pub use env::Env;
pub use load::{Loaded, load, read};
pub use otlp::{OtlpEndpoint, OtlpEndpointError, OtlpHeaders};
pub use problem::{Origin, Problem, Problems};
pub use provider::{
    BaseUrl, BaseUrlError, DEFAULT_CONTEXT_WINDOW, DEFAULT_MAX_RETRIES, OpenaiChatConfig, ProviderConfig, ProviderKind,
    ReasoningField, ScriptSource, WireConfig,
};
pub use store_url::StoreUrl;

/// Everything that can be configured.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The listener.
    pub server: ServerConfig,
    /// The database.
    pub store: StoreConfig,
    /// Scheduling.
    pub run: RunConfig,
    /// How long runs are kept after their end.
    pub retention: RetentionConfig,
    /// Ceilings for what a caller may ask.
    pub limits: CeilingConfig,
    /// Where logs go and how much.
    pub log: LogConfig,
    /// What is exported, and where to.
    pub telemetry: TelemetryConfig,
    /// Model endpoints by name.
    pub providers: BTreeMap<String, ProviderConfig>,
    /// Agents by name.
    pub agents: BTreeMap<String, AgentConfig>,
    /// Directories by name.
    pub workspaces: BTreeMap<String, WorkspaceConfig>,
    /// Commands by name; the model names one and never writes one.
    pub commands: BTreeMap<String, CommandConfig>,
    /// The keys that a file or the environment gave, dotted.
    #[serde(skip)]
    given: BTreeSet<String>,
}

impl Config {
    /// Whether a file or the environment gave this key (`log.level`); else it holds its default.
    pub fn is_given(&self, key: &str) -> bool {
        self.given.contains(key)
    }
}

/// The listener.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Address and port.
    pub bind: SocketAddr,
    /// Whether addresses that other machines can reach are accepted although nothing asks who is calling.
    pub allow_unauthenticated: bool,
    /// Names, beside those of this machine, that requests may be addressed to.
    pub hosts: Vec<String>,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Most open connections.
    pub max_connections: usize,
    /// Most time for a request's headers to arrive, in milliseconds.
    pub header_timeout_ms: u64,
    /// Most time for a request's body to arrive, in milliseconds.
    pub body_timeout_ms: u64,
    /// Most time without a byte taken by the client, in milliseconds.
    pub write_timeout_ms: u64,
    /// Time between keep-alive comments on an event stream, in milliseconds.
    pub keep_alive_ms: u64,
}

/// The database.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// `sqlite:PATH` or `postgres://USER:PASSWORD@HOST:PORT/DATABASE`.
    pub url: StoreUrl,
    /// Whether an accepted run survives a power cut.
    pub durability: Durability,
    /// Most connections to Postgres; SQLite has its own.
    pub max_connections: u32,
}

/// How hard a commit is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Flushed to the disk before it counts.
    #[default]
    Full,
    /// Survives a crash of the process, not of the machine.
    Process,
}

/// Scheduling.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Most runs at work at the same time.
    pub max_concurrent: usize,
    /// Most runs waiting for a slot; more are refused with 503.
    pub max_queued: usize,
    /// How long runs at work go on when the server stops, in milliseconds; those not done by then are let go.
    pub drain_ms: u64,
    /// Which occurrence of the same call in a run counts as a repeat.
    pub repeat_limit: u32,
    /// Where runs without a configured workspace get their own empty directory.
    pub scratch_dir: PathBuf,
    /// The agent of a request that names none.
    pub default_agent: String,
}

/// How long runs are kept after their end.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionConfig {
    /// Days; a conversation is kept until its newest run is that old. Absent: for ever.
    pub finished_days: Option<u32>,
}

/// Ceilings for what a caller may ask.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CeilingConfig {
    /// Highest `limits.max_steps`.
    pub max_steps: u32,
    /// Highest `limits.max_tool_calls`.
    pub max_tool_calls: u32,
    /// Highest `limits.max_tokens`.
    pub max_tokens: u64,
    /// Highest `limits.timeout_ms`.
    pub timeout_ms: u64,
    /// Highest `limits.model_timeout_ms`.
    pub model_timeout_ms: u64,
    /// Highest `limits.tool_timeout_ms`.
    pub tool_timeout_ms: u64,
    /// Highest `limits.wait_timeout_ms`.
    pub wait_timeout_ms: u64,
    /// Highest `context.max_tool_result_chars`.
    pub max_tool_result_chars: usize,
}

/// Where logs go and how much.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// `error`, `warn`, `info`, `debug`, `trace`, or directives such as `info,hames::run=debug`.
    pub level: String,
    /// One line of JSON or of text per record, on standard error.
    pub format: LogFormat,
}

/// The form of log records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

/// What is exported over OTLP, and where to. `GET /metrics` needs none of it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// The base URL of a collector that speaks OTLP over HTTP; `None`: nothing is exported. When no setting names one,
    /// it is the variable `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub otlp_endpoint: Option<OtlpEndpoint>,
    /// The variable that holds headers for the collector, `NAME=VALUE,NAME=VALUE`. The default one need not be
    /// set.
    pub otlp_headers_env: String,
    /// The headers, read from that variable when the settings are loaded; never from the file.
    #[serde(skip)]
    pub otlp_headers: OtlpHeaders,
    /// Most time for one export, in milliseconds.
    pub otlp_timeout_ms: u64,
    /// Time between exports of metrics, in milliseconds.
    pub metrics_interval_ms: u64,
    /// The part of traces that is exported, from 0 to 1, of those whose caller has not decided.
    pub trace_ratio: f64,
    /// Whether spans carry prompts, answers, and arguments and results of tools.
    pub capture_content: bool,
    /// `service.name` of what is exported.
    pub service_name: String,
}

/// An agent: a model, instructions, and what it may use.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentConfig {
    /// Its model, `provider/model`.
    pub model: ModelRef,
    /// Other models a request may choose.
    #[serde(default)]
    pub models: Vec<ModelRef>,
    /// The system prompt.
    #[serde(default)]
    pub instructions: Option<String>,
    /// Its tools, by name or pattern.
    #[serde(default)]
    pub tools: Vec<String>,
    /// Its workspace; absent: a fresh, empty one for each run.
    #[serde(default)]
    pub workspace: Option<String>,
    /// Other workspaces a request may choose.
    #[serde(default)]
    pub workspaces: Vec<String>,
    /// What it is for; shown in `GET /agents`.
    #[serde(default)]
    pub description: Option<String>,
}

/// A directory that file tools and commands work in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkspaceConfig {
    /// Where it is.
    pub path: PathBuf,
    /// Whether tools may change it.
    #[serde(default)]
    pub writable: bool,
    /// Largest file a tool may write, in bytes.
    #[serde(default = "default_max_file_bytes")]
    pub max_file_bytes: u64,
    /// Most files and directories it may hold before writes of new files are refused.
    #[serde(default = "default_max_files")]
    pub max_files: u64,
}

impl WorkspaceConfig {
    /// A directory that tools read and do not change.
    pub const fn at(path: PathBuf) -> Self {
        Self { path, writable: false, max_file_bytes: default_max_file_bytes(), max_files: default_max_files() }
    }
}

const fn default_max_file_bytes() -> u64 {
    10 * 1024 * 1024
}

const fn default_max_files() -> u64 {
    10_000
}

/// A command the model can name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandConfig {
    /// The program: a path, or a name looked up in `path`.
    pub executable: PathBuf,
    /// Its arguments, as they are.
    #[serde(default)]
    pub args: Vec<String>,
    /// What it is for; the model reads this.
    #[serde(default)]
    pub description: Option<String>,
    /// Most time, in milliseconds; the run's `tool_timeout_ms` applies as well.
    #[serde(default = "default_command_timeout_ms")]
    pub timeout_ms: u64,
    /// What it can change.
    #[serde(default = "default_command_effect")]
    pub effect: Effect,
    /// What becomes of a call with side effects when a crash hid its outcome.
    #[serde(default)]
    pub on_unknown: OnUnknown,
    /// Variables of the server's environment it gets; `PATH`, `LANG` and `TZ` are always passed.
    #[serde(default)]
    pub env: Vec<String>,
    /// Most bytes kept of each output stream; the middle of longer ones is left out.
    #[serde(default = "default_max_output_bytes")]
    pub max_output_bytes: usize,
    /// Whether calling it again and again is how it is used.
    #[serde(default)]
    pub pollable: bool,
}

const fn default_command_timeout_ms() -> u64 {
    60_000
}

const fn default_command_effect() -> Effect {
    Effect::SideEffect
}

const fn default_max_output_bytes() -> usize {
    64 * 1024
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 8080)),
            allow_unauthenticated: false,
            hosts: Vec::new(),
            max_body_bytes: 4 * 1024 * 1024,
            max_connections: 20_000,
            header_timeout_ms: 5_000,
            body_timeout_ms: 30_000,
            write_timeout_ms: 30_000,
            keep_alive_ms: 15_000,
        }
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { url: "sqlite:hames.db".into(), durability: Durability::Full, max_connections: 16 }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            max_concurrent: 1_000,
            max_queued: 10_000,
            drain_ms: 25_000,
            repeat_limit: 4,
            scratch_dir: PathBuf::from("hames-scratch"),
            default_agent: "default".to_owned(),
        }
    }
}

impl Default for CeilingConfig {
    fn default() -> Self {
        Self {
            max_steps: 200,
            max_tool_calls: 1_000,
            max_tokens: 2_000_000,
            timeout_ms: 3_600_000,
            model_timeout_ms: 600_000,
            tool_timeout_ms: 600_000,
            wait_timeout_ms: 604_800_000,
            max_tool_result_chars: 200_000,
        }
    }
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            otlp_endpoint: None,
            otlp_headers_env: OTLP_HEADERS.to_owned(),
            otlp_headers: OtlpHeaders::default(),
            otlp_timeout_ms: 10_000,
            metrics_interval_ms: 60_000,
            trace_ratio: 1.0,
            capture_content: false,
            service_name: "hames".to_owned(),
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}
