//! What shows of settings only when their parts meet: tools that agents name, programs of commands, scripts,
//! directories. Opens no database and connects to nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{build_catalog, build_registry};
use crate::config::{AgentConfig, Config, Env, Loaded, Problem};
use crate::domain::Effect;
use crate::domain::text::with_causes;
use crate::time::{Clock, SystemClock};
use crate::tool::Registry;
use crate::tool::files::file_tools;
use crate::tool::supervise::CommandHost;
use crate::tool::workspace::Workspace;

/// The only tool that is there for the sake of a section of the settings.
const RUN_COMMAND: &str = "run_command";

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// What keeps the service from starting.
    pub problems: Vec<Problem>,
    /// What is allowed and hardly meant.
    pub hints: Vec<Problem>,
}

/// Verifies what could be read of the settings. Entries that have a problem already are left out, and what refers to
/// them is not blamed for it.
pub fn verify(loaded: &Loaded, env: &Env) -> Findings {
    let mut findings = Findings::default();
    let Some(config) = loaded.config() else { return findings };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    for (name, provider) in sound(loaded, "providers", &config.providers) {
        let one = BTreeMap::from([(name.clone(), provider.clone())]);
        let built = build_catalog(&one, &clock, Vec::new());
        findings.problems.extend(built.err().map(|error| loaded.problem_in(&with_causes(error.as_ref()))));
    }
    for (name, workspace) in sound(loaded, "workspaces", &config.workspaces) {
        if let Err(error) = Workspace::open(workspace) {
            findings.problems.push(loaded.problem(&["workspaces", name, "path"], with_causes(&error)));
        }
    }
    let mut commands = BTreeMap::new();
    for (name, command) in sound(loaded, "commands", &config.commands) {
        let one = BTreeMap::from([(name.clone(), command.clone())]);
        match build_registry(&one, env, CommandHost::this_program(), Vec::new()) {
            Ok(_) => drop(commands.insert(name.clone(), command.clone())),
            Err(error) => findings.problems.push(loaded.problem_in(&with_causes(error.as_ref()))),
        }
    }
    match build_registry(&commands, env, CommandHost::this_program(), Vec::new()) {
        Ok(registry) => {
            // Without its commands the tool is not there, and agents are right to name it.
            let forgiven = registry.get(RUN_COMMAND).is_none() && loaded.mentions("commands");
            for (name, agent) in &config.agents {
                tools(loaded, name, agent, &registry, forgiven, &mut findings.problems);
                findings.hints.extend(useless_writers(loaded, config, name, agent, &registry));
            }
        }
        Err(error) => findings.problems.push(loaded.problem_in(&with_causes(error.as_ref()))),
    }
    findings
}

fn sound<'a, T>(
    loaded: &'a Loaded,
    section: &'static str,
    entries: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a String, &'a T)> {
    entries.iter().filter(move |(name, _)| loaded.is_sound(&[section, name]))
}

fn tools(
    loaded: &Loaded,
    name: &str,
    agent: &AgentConfig,
    registry: &Registry,
    forgiven: bool,
    problems: &mut Vec<Problem>,
) {
    for (index, pattern) in agent.tools.iter().enumerate() {
        let place = index.to_string();
        let path = ["agents", name, "tools", &place];
        if !loaded.is_sound(&path) || (forgiven && (pattern == RUN_COMMAND || pattern.contains('*'))) {
            continue;
        }
        if let Err(unknown) = registry.select(std::slice::from_ref(pattern)) {
            problems.push(loaded.problem(&path, with_causes(&unknown)));
        }
    }
}

/// File tools of an agent that can only refuse: none of its workspaces may be changed.
fn useless_writers(
    loaded: &Loaded,
    config: &Config,
    name: &str,
    agent: &AgentConfig,
    registry: &Registry,
) -> Option<Problem> {
    let own = agent.workspace.as_ref()?;
    let mut workspaces = std::iter::once(own).chain(&agent.workspaces);
    if !workspaces.all(|workspace| config.workspaces.get(workspace).is_some_and(|workspace| !workspace.writable)) {
        return None;
    }
    let chosen = registry.select(&agent.tools).ok()?;
    let writers: Vec<String> = file_tools()
        .iter()
        .filter(|tool| tool.effect(&serde_json::Map::new()) != Effect::ReadOnly)
        .map(|tool| tool.spec().name.clone())
        .filter(|tool| chosen.contains(tool))
        .map(|tool| format!("`{tool}`"))
        .collect();
    let message = format!(
        "{} can only refuse, since workspace `{own}` is read only; set workspaces.{own}.writable = true, or leave \
         them out",
        writers.join(" and ")
    );
    (!writers.is_empty()).then(|| loaded.problem(&["agents", name, "tools"], message))
}
