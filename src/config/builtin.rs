//! What there is without a file: an agent that needs no key, and one for each key that is found.

use std::path::PathBuf;

use super::check::api_key;
use super::load::Broken;
use super::problem::{Origin, Problem};
use super::{AgentConfig, Config, Env, OpenaiChatConfig, ProviderConfig, ScriptSource, WireConfig, WorkspaceConfig};
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
const OPENAI_URL: &str = "https://api.openai.com/v1";
const OPENAI: &str = "openai";
const OPENAI_MODEL: &str = "gpt-5-mini";
const DEFAULT_AGENT: &str = "default";

/// Adds the built-in providers and agents whose names are still free.
pub(super) fn fill(config: &mut Config, env: &Env, broken: &mut Broken, problems: &mut Vec<Problem>) {
    let entry = |name: &str| ("providers".to_owned(), name.to_owned());
    if !config.providers.contains_key(DEMO) && !broken.contains(&entry(DEMO)) {
        let demo = ProviderConfig::new(WireConfig::Scripted(ScriptSource::Demo));
        config.providers.insert(DEMO.to_owned(), demo);
    }
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
        if !config.providers.contains_key(OPENAI) && !broken.contains(&entry(OPENAI)) {
            match openai(env, problems) {
                Some(openai) => drop(config.providers.insert(OPENAI.to_owned(), openai)),
                None => drop(broken.insert(entry(OPENAI))),
            }
        }
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

/// The provider of a key that was found; a key that cannot be one is a problem.
fn openai(env: &Env, problems: &mut Vec<Problem>) -> Option<ProviderConfig> {
    let key = ["providers", OPENAI, "api_key_env"].join(".");
    let mut problem = |message| problems.push(Problem { origin: Origin::BuiltIn, key: key.clone(), message });
    let chat = OpenaiChatConfig {
        api_key_env: Some(OPENAI_KEY.to_owned()),
        api_key: Some(api_key(env, OPENAI_KEY).map_err(&mut problem).ok()?),
        ..OpenaiChatConfig::at(OPENAI_URL.parse().ok()?)
    };
    Some(ProviderConfig::new(WireConfig::OpenaiChat(chat)))
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
