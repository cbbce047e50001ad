//! What there is without a file: an agent that needs no key, and one for each key that is found.

use std::path::PathBuf;

use super::{AgentConfig, Config, Env, ProviderConfig, ProviderKind, WorkspaceConfig};
use crate::domain::ModelRef;

/// Plays the built-in demonstration: the script of a `scripted` provider that names none.
pub const DEMO_SCRIPT: &str = include_str!("demo.json");

/// The name of the built-in provider, agent and workspace.
pub const DEMO: &str = "demo";

/// The files of the demonstration's workspace: path and content.
pub const DEMO_FILES: [(&str, &str); 3] = [
    ("README.md", include_str!("demo/README.md")),
    ("notes/plan.txt", include_str!("demo/plan.txt")),
    ("notes/stock.csv", include_str!("demo/stock.csv")),
];

const OPENAI_KEY: &str = "OPENAI_API_KEY";
const OPENAI: &str = "openai";
const OPENAI_MODEL: &str = "gpt-5-mini";
const DEFAULT_AGENT: &str = "default";

/// Adds the built-in providers and agents whose names are still free.
pub(super) fn fill(config: &mut Config, env: &Env) {
    config.providers.entry(DEMO.to_owned()).or_insert_with(|| provider(ProviderKind::Scripted));
    config.agents.entry(DEMO.to_owned()).or_insert_with(|| AgentConfig {
        model: ModelRef { provider: DEMO.to_owned(), model: "script".to_owned() },
        models: Vec::new(),
        instructions: None,
        tools: vec!["list_dir".to_owned(), "read_file".to_owned()],
        workspace: None,
        workspaces: Vec::new(),
        description: Some("Plays a fixed script over the files of its workspace; needs no key.".to_owned()),
    });
    if env.get(OPENAI_KEY).is_some_and(|key| !key.is_empty()) {
        config.providers.entry(OPENAI.to_owned()).or_insert_with(|| ProviderConfig {
            base_url: Some("https://api.openai.com/v1".to_owned()),
            api_key_env: Some(OPENAI_KEY.to_owned()),
            ..provider(ProviderKind::OpenaiChat)
        });
        config.agents.entry(DEFAULT_AGENT.to_owned()).or_insert_with(|| AgentConfig {
            model: ModelRef { provider: OPENAI.to_owned(), model: OPENAI_MODEL.to_owned() },
            models: Vec::new(),
            instructions: None,
            tools: ["list_dir", "read_file", "search_files", "write_file", "edit_file"].map(str::to_owned).to_vec(),
            workspace: None,
            workspaces: Vec::new(),
            description: Some("Works on files in an empty directory of its own.".to_owned()),
        });
    }
    if !config.agents.contains_key(&config.run.default_agent) && config.run.default_agent == DEFAULT_AGENT {
        config.run.default_agent = DEMO.to_owned();
    }
}

impl Config {
    /// Lets the agent `demo` work in `directory`, which holds the [`DEMO_FILES`].
    pub fn with_demo_workspace(mut self, directory: PathBuf) -> Self {
        self.workspaces.insert(DEMO.to_owned(), WorkspaceConfig::at(directory));
        if let Some(agent) = self.agents.get_mut(DEMO) {
            agent.workspace = Some(DEMO.to_owned());
        }
        self
    }
}

fn provider(kind: ProviderKind) -> ProviderConfig {
    ProviderConfig {
        kind,
        base_url: None,
        api_key_env: None,
        api_key: None,
        models: Vec::new(),
        context_window: super::default_context_window(),
        max_output_tokens: None,
        connect_timeout_ms: super::default_connect_timeout_ms(),
        idle_timeout_ms: super::default_idle_timeout_ms(),
        max_retries: super::default_max_retries(),
        reasoning_field: None,
        script: None,
    }
}
