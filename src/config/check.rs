//! The checks that look across keys, or at the machine: names that refer, numbers in range, files that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use secrecy::SecretString;
use tracing_subscriber::EnvFilter;

use super::load::{Broken, Sources};
use super::problem::{Problem, meant};
use super::provider::ProviderSection;
use super::{
    AgentConfig, CommandConfig, Config, Env, ProviderConfig, ProviderKind, ScriptSource, TelemetryConfig, WireConfig,
    WorkspaceConfig,
};
use crate::domain::ModelRef;

/// Longest time that can be set: 30 days. Clocks overflow far beyond it.
const MAX_MS: u64 = 30 * 24 * 60 * 60 * 1_000;
/// More than any server of Postgres is set up for.
const MAX_CONNECTIONS: u32 = 1_000;

/// The providers of their sections, with their keys from the environment. Those that cannot be made are broken.
pub(super) fn providers(
    sections: &BTreeMap<String, ProviderSection>,
    env: &Env,
    sources: &Sources,
    broken: &mut Broken,
    problems: &mut Vec<Problem>,
) -> BTreeMap<String, ProviderConfig> {
    let mut checker = Checker { sources, broken, problems };
    let mut providers = BTreeMap::new();
    for (name, section) in sections {
        match checker.provider(name, section, env) {
            Some(provider) => drop(providers.insert(name.clone(), provider)),
            None => drop(checker.broken.insert(("providers".to_owned(), name.clone()))),
        }
    }
    providers
}

/// Checks the rest of the settings.
pub(super) fn check(
    config: &Config,
    sections: &BTreeMap<String, ProviderSection>,
    sources: &Sources,
    broken: &mut Broken,
    problems: &mut Vec<Problem>,
) {
    let mut checker = Checker { sources, broken, problems };
    checker.sections(config);
    for (name, workspace) in &config.workspaces {
        checker.workspace(name, workspace);
    }
    for (name, command) in &config.commands {
        // A section that makes no provider has a key all the same.
        let written =
            sections.iter().filter_map(|(name, section)| Some((name.as_str(), section.api_key_env.as_deref()?)));
        let used =
            config.providers.iter().filter_map(|(name, provider)| Some((name.as_str(), provider.api_key_env()?)));
        checker.command(name, command, written.chain(used));
        if let Some(index) = command.env.iter().position(|variable| *variable == config.telemetry.otlp_headers_env) {
            let message = "holds headers for the collector (telemetry.otlp_headers_env); commands never get it";
            checker.problem(&["commands", name, "env", &index.to_string()], message);
        }
    }
    for (name, agent) in &config.agents {
        checker.agent(name, agent, config);
    }
    checker.default_agent(config);
}

struct Checker<'a> {
    sources: &'a Sources,
    broken: &'a mut Broken,
    problems: &'a mut Vec<Problem>,
}

impl Checker<'_> {
    fn problem(&mut self, path: &[&str], message: impl Into<String>) {
        self.problems.push(Problem { origin: self.sources.origin(path), key: path.join("."), message: message.into() });
    }

    /// A count that has to be at least one.
    fn positive(&mut self, path: &[&str], value: u64) {
        if value == 0 {
            self.problem(path, "is 0; expected at least 1");
        }
    }

    /// A time of at least one millisecond and at most 30 days.
    fn time(&mut self, path: &[&str], millis: u64) {
        if millis == 0 || millis > MAX_MS {
            self.problem(path, format!("is {millis}; expected milliseconds from 1 to {MAX_MS} (30 days)"));
        }
    }

    fn sections(&mut self, config: &Config) {
        let Config {
            server,
            store,
            run,
            retention,
            limits,
            log,
            telemetry,
            providers: _,
            agents: _,
            workspaces: _,
            commands: _,
            given: _,
        } = config;
        if !server.bind.ip().is_loopback() && !server.allow_unauthenticated {
            let message = format!(
                "{} can be reached from other machines, and there are no API keys yet that would protect it; use a \
                 loopback address such as 127.0.0.1:{}, or, where something else keeps others out, set \
                 server.allow_unauthenticated = true",
                server.bind,
                server.bind.port()
            );
            self.problem(&["server", "bind"], message);
        }
        for (index, host) in server.hosts.iter().enumerate() {
            if host.is_empty() || host.contains(['/', '@', '*']) || host.chars().any(char::is_whitespace) {
                let message = format!("{host:?} is not a host; expected a name or an address, without port");
                self.problem(&["server", "hosts", &index.to_string()], message);
            }
        }
        self.positive(&["server", "max_body_bytes"], as_u64(server.max_body_bytes));
        self.positive(&["server", "max_connections"], as_u64(server.max_connections));
        self.time(&["server", "header_timeout_ms"], server.header_timeout_ms);
        self.time(&["server", "body_timeout_ms"], server.body_timeout_ms);
        self.time(&["server", "write_timeout_ms"], server.write_timeout_ms);
        self.time(&["server", "keep_alive_ms"], server.keep_alive_ms);
        match store.url.expose().split_once(':') {
            Some(("sqlite", path)) if !path.is_empty() && !path.contains(":memory:") => self.database_folder(path),
            Some(("sqlite", _)) => self.problem(&["store", "url"], "names no file; expected `sqlite:PATH`"),
            Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => {}
            // The value is not repeated: database addresses often hold a password.
            Some(_) | None => self.problem(
                &["store", "url"],
                "is no address of a database; expected `sqlite:PATH` or `postgres://USER:PASSWORD@HOST:PORT/DATABASE`",
            ),
        }
        if store.max_connections == 0 || store.max_connections > MAX_CONNECTIONS {
            let message = format!("is {}; expected from 1 to {MAX_CONNECTIONS}", store.max_connections);
            self.problem(&["store", "max_connections"], message);
        }
        self.positive(&["run", "max_concurrent"], as_u64(run.max_concurrent));
        self.positive(&["run", "max_queued"], as_u64(run.max_queued));
        self.time(&["run", "drain_ms"], run.drain_ms);
        if run.repeat_limit < 2 {
            let message = format!("is {}; expected at least 2, since one call repeats nothing", run.repeat_limit);
            self.problem(&["run", "repeat_limit"], message);
        }
        if run.scratch_dir.as_os_str().is_empty() {
            self.problem(&["run", "scratch_dir"], "is empty; expected a directory, which is made when it is missing");
        }
        if retention.finished_days == Some(0) {
            self.problem(
                &["retention", "finished_days"],
                "is 0; expected at least 1, or leave it out to keep all runs",
            );
        }
        self.positive(&["limits", "max_steps"], limits.max_steps.into());
        self.positive(&["limits", "max_tool_calls"], limits.max_tool_calls.into());
        self.positive(&["limits", "max_tokens"], limits.max_tokens);
        self.time(&["limits", "timeout_ms"], limits.timeout_ms);
        self.time(&["limits", "model_timeout_ms"], limits.model_timeout_ms);
        self.time(&["limits", "tool_timeout_ms"], limits.tool_timeout_ms);
        self.time(&["limits", "wait_timeout_ms"], limits.wait_timeout_ms);
        self.positive(&["limits", "max_tool_result_chars"], as_u64(limits.max_tool_result_chars));
        if !is_log_level(&log.level) {
            let message = format!(
                "{:?} is not a level; expected error, warn, info, debug or trace, or directives such as \
                 `info,hames::run=debug`",
                log.level
            );
            self.problem(&["log", "level"], message);
        }
        self.telemetry(telemetry);
    }

    fn telemetry(&mut self, telemetry: &TelemetryConfig) {
        self.time(&["telemetry", "otlp_timeout_ms"], telemetry.otlp_timeout_ms);
        self.time(&["telemetry", "metrics_interval_ms"], telemetry.metrics_interval_ms);
        if !(0.0..=1.0).contains(&telemetry.trace_ratio) {
            let message = format!("is {}; expected a number from 0 to 1", telemetry.trace_ratio);
            self.problem(&["telemetry", "trace_ratio"], message);
        }
        if telemetry.service_name.is_empty() {
            self.problem(&["telemetry", "service_name"], "is empty; expected a name");
        }
        let variable = &telemetry.otlp_headers_env;
        if variable.is_empty() || variable.contains(['=', '\0']) {
            self.problem(&["telemetry", "otlp_headers_env"], format!("{variable:?} is not the name of a variable"));
        }
    }

    /// The database file is made when it is missing; its directory is not.
    fn database_folder(&mut self, path: &str) {
        let path = Path::new(path.strip_prefix("//").unwrap_or(path));
        let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return };
        let message = match folder.metadata() {
            Ok(metadata) if metadata.is_dir() => return,
            Ok(_) => format!("lies in {}, which is not a directory", folder.display()),
            Err(error) => format!("lies in {}, which cannot be used: {error}; make the directory", folder.display()),
        };
        self.problem(&["store", "url"], message);
    }

    fn provider(&mut self, name: &str, section: &ProviderSection, env: &Env) -> Option<ProviderConfig> {
        self.name(&["providers", name], name);
        let mut provider =
            section.clone().read(name, &mut |key, message| self.problem(&["providers", name, key], message));
        match (section.kind, &section.api_key_env) {
            (ProviderKind::OpenaiChat, Some(variable)) => match (api_key(env, variable), &mut provider) {
                (Ok(key), Some(ProviderConfig { wire: WireConfig::OpenaiChat(chat), .. })) => chat.api_key = Some(key),
                (Ok(_), Some(ProviderConfig { wire: WireConfig::Scripted(_), .. }) | None) => {}
                (Err(message), _) => self.problem(&["providers", name, "api_key_env"], message),
            },
            (ProviderKind::OpenaiChat, None) | (ProviderKind::Scripted, _) => {}
        }
        if let Some(ProviderConfig { wire: WireConfig::Scripted(ScriptSource::File(script)), .. }) = &provider {
            self.file(&["providers", name, "script"], script);
        }
        for (index, model) in section.models.iter().enumerate() {
            if model.is_empty() {
                self.problem(&["providers", name, "models", &index.to_string()], "is empty; expected a model's name");
            }
        }
        self.unique(&["providers", name, "models"], section.models.iter().cloned());
        let window = section.context_window;
        self.positive(&["providers", name, "context_window"], window);
        if let Some(most) = section.max_output_tokens
            && (most == 0 || u64::from(most) >= window)
        {
            let message = format!("is {most}; expected at least 1 and less than context_window ({window})");
            self.problem(&["providers", name, "max_output_tokens"], message);
        }
        for (key, time) in
            [("connect_timeout_ms", section.connect_timeout_ms), ("idle_timeout_ms", section.idle_timeout_ms)]
        {
            if let (ProviderKind::OpenaiChat, Some(time)) = (section.kind, time) {
                self.time(&["providers", name, key], time);
            }
        }
        if section.max_retries > 20 {
            let message = format!("is {}; expected at most 20", section.max_retries);
            self.problem(&["providers", name, "max_retries"], message);
        }
        provider
    }

    fn workspace(&mut self, name: &str, workspace: &WorkspaceConfig) {
        self.name(&["workspaces", name], name);
        let path = &workspace.path;
        let message = match path.metadata() {
            Ok(metadata) if metadata.is_dir() => None,
            Ok(_) => Some(format!("{} is not a directory", path.display())),
            Err(error) => Some(format!("{} cannot be used: {error}; expected a directory that exists", path.display())),
        };
        if let Some(message) = message {
            self.problem(&["workspaces", name, "path"], message);
        }
        self.positive(&["workspaces", name, "max_file_bytes"], workspace.max_file_bytes);
        self.positive(&["workspaces", name, "max_files"], workspace.max_files);
    }

    /// `keys` are the providers and the variables that hold their keys.
    fn command<'k>(
        &mut self,
        name: &str,
        command: &CommandConfig,
        keys: impl Iterator<Item = (&'k str, &'k str)> + Clone,
    ) {
        self.name(&["commands", name], name);
        if command.executable.as_os_str().is_empty() {
            self.problem(&["commands", name, "executable"], "is empty; expected a path, or a name to look up in PATH");
        }
        for (index, arg) in command.args.iter().enumerate() {
            if arg.contains('\0') {
                self.problem(&["commands", name, "args", &index.to_string()], "holds a NUL, which no argument can");
            }
        }
        self.time(&["commands", name, "timeout_ms"], command.timeout_ms);
        self.positive(&["commands", name, "max_output_bytes"], as_u64(command.max_output_bytes));
        for (index, variable) in command.env.iter().enumerate() {
            let index = index.to_string();
            let path = ["commands", name, "env", &index];
            if variable.is_empty() || variable.contains(['=', '\0']) {
                self.problem(&path, format!("{variable:?} is not the name of a variable"));
            }
            let owner = keys.clone().find(|(_, key)| key == variable);
            if let Some((provider, _)) = owner {
                let message = format!("{variable} holds the key of provider `{provider}`; commands never get it");
                self.problem(&path, message);
            }
        }
        self.unique(&["commands", name, "env"], command.env.iter().cloned());
    }

    fn agent(&mut self, name: &str, agent: &AgentConfig, config: &Config) {
        self.name(&["agents", name], name);
        self.model(&["agents", name, "model"], &agent.model, config);
        for (index, model) in agent.models.iter().enumerate() {
            self.model(&["agents", name, "models", &index.to_string()], model, config);
        }
        self.unique(&["agents", name, "models"], agent.models.iter().map(ModelRef::to_string));
        for (index, pattern) in agent.tools.iter().enumerate() {
            if !is_tool_pattern(pattern) {
                let message = format!(
                    "{pattern:?} is neither a tool nor a pattern; expected 1 to 128 of A-Z a-z 0-9 _ - . / and *, \
                     starting with a letter or *"
                );
                self.problem(&["agents", name, "tools", &index.to_string()], message);
            }
        }
        self.unique(&["agents", name, "tools"], agent.tools.iter().cloned());
        if let Some(workspace) = &agent.workspace {
            self.workspace_name(&["agents", name, "workspace"], workspace, config);
        }
        for (index, workspace) in agent.workspaces.iter().enumerate() {
            self.workspace_name(&["agents", name, "workspaces", &index.to_string()], workspace, config);
        }
        self.unique(&["agents", name, "workspaces"], agent.workspaces.iter().cloned());
    }

    fn default_agent(&mut self, config: &Config) {
        if config.agents.is_empty() && !self.broken.iter().any(|(section, _)| section == "agents") {
            let message = "there is none; add an [agents.NAME] section with a `model`";
            self.problem(&["agents"], message);
            return;
        }
        let name = &config.run.default_agent;
        let given = self.sources.has(&["run", "default_agent"]);
        if given && !config.agents.contains_key(name) && !self.is_broken("agents", name) {
            let message = format!("no agent `{name}`; {}", meant(name, config.agents.keys().map(String::as_str)));
            self.problem(&["run", "default_agent"], message);
        }
    }

    fn model(&mut self, path: &[&str], model: &ModelRef, config: &Config) {
        let name = &model.provider;
        if !config.providers.contains_key(name) && !self.is_broken("providers", name) {
            let known = meant(name, config.providers.keys().map(String::as_str));
            self.problem(path, format!("`{model}` names the provider `{name}`, which does not exist; {known}"));
        }
    }

    fn workspace_name(&mut self, path: &[&str], name: &str, config: &Config) {
        if !config.workspaces.contains_key(name) && !self.is_broken("workspaces", name) {
            let known = meant(name, config.workspaces.keys().map(String::as_str));
            self.problem(path, format!("no workspace `{name}`; {known}"));
        }
    }

    fn is_broken(&self, section: &str, name: &str) -> bool {
        self.broken.contains(&(section.to_owned(), name.to_owned()))
    }

    fn name(&mut self, path: &[&str], name: &str) {
        let valid = name.len() <= 64
            && name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        if !valid {
            let message = "is not a name; expected 1 to 64 of A-Z a-z 0-9 _ - starting with a letter";
            self.problem(path, message);
        }
    }

    fn file(&mut self, path: &[&str], file: &Path) {
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => self.problem(path, format!("{} is not a file", file.display())),
            Err(error) => self.problem(path, format!("{} cannot be read: {error}", file.display())),
        }
    }

    fn unique(&mut self, path: &[&str], items: impl Iterator<Item = String>) {
        let mut seen = BTreeSet::new();
        for item in items {
            if seen.contains(&item) {
                self.problem(path, format!("lists `{item}` twice"));
            }
            seen.insert(item);
        }
    }
}

/// The key that a variable holds, or what is wrong with it.
pub(super) fn api_key(env: &Env, variable: &str) -> Result<SecretString, String> {
    match env.get(variable).filter(|value| !value.is_empty()).map(|value| value.to_str()) {
        None => Err(format!(
            "names the variable {variable:?}, which is not set; set it, or take this key out when the provider wants \
             none"
        )),
        Some(Some(key)) if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(SecretString::from(key)),
        Some(Some(_) | None) => Err(format!(
            "names the variable {variable:?}, which holds white space or other characters that no key has (a line end, \
             perhaps)"
        )),
    }
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn is_tool_pattern(text: &str) -> bool {
    text.len() <= 128
        && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '*')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./*".contains(&byte))
}

/// The filter's own parser takes any word for a target; a misspelt level must not silence the log.
fn is_log_level(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let plain = |directive: &str| directive.contains('=') || LEVELS.contains(&directive.trim());
    !text.is_empty() && text.split(',').all(plain) && EnvFilter::try_new(text).is_ok()
}
