//! The configured agents, with every name in them resolved.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::{AgentConfig, WorkspaceConfig};
use crate::domain::{ModelRef, ToolName};
use crate::provider::Catalog;
use crate::tool::registry::{Registry, UnknownTool};
use crate::tool::workspace::{Workspace, WorkspaceError};

/// What an agent may use and what it uses unless told otherwise.
#[derive(Clone, Debug)]
pub struct Agent {
    /// What it is for.
    pub description: Option<String>,
    /// The system prompt.
    pub instructions: Option<String>,
    /// The models a run may use; the first one is the default.
    pub models: Vec<ModelRef>,
    /// Its tools, in the order they are shown to the model.
    pub tools: Vec<ToolName>,
    /// The workspace of a run that names none; `None` is a fresh, empty one.
    pub workspace: Option<String>,
    /// Every configured workspace a run may name.
    pub workspaces: Vec<String>,
}

/// All agents and workspaces.
#[derive(Debug)]
pub struct Agents {
    default: String,
    agents: BTreeMap<String, Agent>,
    workspaces: BTreeMap<String, Arc<Workspace>>,
}

/// An agent or a workspace cannot be used as configured.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// `agents.NAME.tools` names a tool that does not exist.
    #[error("agents.{agent}.tools: {source}")]
    Tool {
        /// The agent.
        agent: String,
        /// Which tool, and what there is.
        source: UnknownTool,
    },
    /// An agent names a provider that is not configured.
    #[error("agents.{agent}: model `{model}` names the provider `{}`, which is not configured", model.provider)]
    Provider {
        /// The agent.
        agent: String,
        /// The model.
        model: ModelRef,
    },
    /// An agent names a workspace that is not configured.
    #[error("agents.{agent}: workspace `{workspace}` is not configured")]
    Workspace {
        /// The agent.
        agent: String,
        /// The workspace.
        workspace: String,
    },
    /// A workspace's directory cannot be opened.
    #[error("workspaces.{name}: {source}")]
    Open {
        /// The workspace.
        name: String,
        /// Why.
        source: WorkspaceError,
    },
}

impl Agents {
    /// Resolves the names in the agents' settings.
    ///
    /// # Errors
    /// Everything that cannot be used, not only the first.
    pub fn new(
        default: &str,
        agents: &BTreeMap<String, AgentConfig>,
        workspaces: &BTreeMap<String, WorkspaceConfig>,
        registry: &Registry,
        catalog: &Catalog,
    ) -> Result<Self, Vec<AgentError>> {
        let mut errors = Vec::new();
        let mut opened = BTreeMap::new();
        for (name, config) in workspaces {
            match Workspace::open(config) {
                Ok(workspace) => drop(opened.insert(name.clone(), Arc::new(workspace))),
                Err(source) => errors.push(AgentError::Open { name: name.clone(), source }),
            }
        }
        let mut resolved = BTreeMap::new();
        for (name, config) in agents {
            match resolve_agent(name, config, workspaces, registry, catalog) {
                Ok(agent) => drop(resolved.insert(name.clone(), agent)),
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() {
            Ok(Self { default: default.to_owned(), agents: resolved, workspaces: opened })
        } else {
            Err(errors)
        }
    }

    /// An agent by name.
    pub fn get(&self, name: &str) -> Option<&Agent> {
        self.agents.get(name)
    }

    /// The agent of a request that names none: the configured default, or the only one there is.
    pub fn default_name(&self) -> Option<&str> {
        let only = || self.agents.keys().next().filter(|_| self.agents.len() == 1);
        self.agents.get_key_value(&self.default).map(|(name, _)| name).or_else(only).map(String::as_str)
    }

    /// All agents, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Agent)> {
        self.agents.iter().map(|(name, agent)| (name.as_str(), agent))
    }

    /// A configured workspace.
    pub fn workspace(&self, name: &str) -> Option<&Arc<Workspace>> {
        self.workspaces.get(name)
    }
}

fn resolve_agent(
    name: &str,
    config: &AgentConfig,
    workspaces: &BTreeMap<String, WorkspaceConfig>,
    registry: &Registry,
    catalog: &Catalog,
) -> Result<Agent, AgentError> {
    let tools = registry.select(&config.tools).map_err(|source| AgentError::Tool { agent: name.to_owned(), source })?;
    let mut models = vec![config.model.clone()];
    models.extend(config.models.iter().filter(|model| **model != config.model).cloned());
    if let Some(model) = models.iter().find(|model| catalog.get(&model.provider).is_none()) {
        return Err(AgentError::Provider { agent: name.to_owned(), model: model.clone() });
    }
    let mut allowed: Vec<String> = config.workspace.iter().chain(&config.workspaces).cloned().collect();
    allowed.dedup();
    if let Some(unknown) = allowed.iter().find(|workspace| !workspaces.contains_key(*workspace)) {
        return Err(AgentError::Workspace { agent: name.to_owned(), workspace: unknown.clone() });
    }
    Ok(Agent {
        description: config.description.clone(),
        instructions: config.instructions.clone(),
        models,
        tools,
        workspace: config.workspace.clone(),
        workspaces: allowed,
    })
}
