//! `hames check`: are the settings good?

use std::fmt::Write as _;
use std::io::Write;

use super::{ConfigArgs, Exit, output};
use crate::app;
use crate::config::{self, Config, Env, ScriptSource, WireConfig};
use crate::domain::text::printable;

pub(super) fn check(args: &ConfigArgs, env: &Env, out: &mut (dyn Write + Send)) -> anyhow::Result<Exit> {
    match config::load(args.config.as_deref(), env) {
        Ok(config) => match app::verify(&config, env) {
            problems if problems.is_empty() => {
                output::print(out, &printable(&summary(&config)?, &['\n']))?;
                Ok(Exit::SUCCESS)
            }
            problems => bad(out, &problems.join("\n")),
        },
        Err(problems) => bad(out, &problems.to_string()),
    }
}

fn bad(out: &mut (dyn Write + Send), problems: &str) -> anyhow::Result<Exit> {
    output::print(out, &format!("{}\n", printable(problems, &['\n'])))?;
    Ok(Exit::FAILURE)
}

/// What the settings come to.
fn summary(config: &Config) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    writeln!(out, "listens on {}, stores in {}", config.server.bind, config.store.url)?;
    for (name, provider) in &config.providers {
        let place = match &provider.wire {
            WireConfig::OpenaiChat(chat) => {
                format!("{}{}", chat.base_url, if chat.api_key.is_some() { ", with a key" } else { "" })
            }
            WireConfig::Scripted(ScriptSource::File(script)) => format!("plays {}", script.display()),
            WireConfig::Scripted(ScriptSource::Demo) => "plays the built-in demonstration".to_owned(),
        };
        writeln!(out, "provider {name}: {place}")?;
    }
    for (name, agent) in &config.agents {
        let default = if *name == config.run.default_agent { " (default)" } else { "" };
        let tools = if agent.tools.is_empty() { "none".to_owned() } else { agent.tools.join(", ") };
        let workspace = agent.workspace.as_deref().unwrap_or("a fresh directory");
        writeln!(out, "agent {name}{default}: {}, tools: {tools}, works in: {workspace}", agent.model)?;
    }
    for (name, workspace) in &config.workspaces {
        let access = if workspace.writable { "writable" } else { "read only" };
        writeln!(out, "workspace {name}: {}, {access}", workspace.path.display())?;
    }
    for (name, command) in &config.commands {
        writeln!(out, "command {name}: {} {}", command.executable.display(), command.args.join(" "))?;
    }
    out.push_str("no problems\n");
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(config: Option<&str>, env: &Env) -> (u8, String) {
        let mut out = Vec::new();
        let args = ConfigArgs { config: config.map(Into::into) };
        let code = match check(&args, env, &mut out).unwrap() {
            Exit::Code(code) => code,
            Exit::Signal(signal) => panic!("{signal:?}"),
        };
        (code, String::from_utf8(out).unwrap())
    }

    #[test]
    fn good_settings_are_summed_up_without_their_keys() {
        let env = Env::from_iter([("OPENAI_API_KEY", "sk-canary")]);
        let expected = "listens on 127.0.0.1:8080, stores in sqlite:hames.db\n\
            provider demo: plays the built-in demonstration\n\
            provider openai: https://api.openai.com/v1, with a key\n\
            agent default (default): openai/gpt-5-mini, tools: list_dir, read_file, search_files, write_file, \
            edit_file, works in: a fresh directory\n\
            agent demo: demo/script, tools: list_dir, read_file, works in: a fresh directory\n\
            no problems\n";
        assert_eq!(checked(None, &env), (0, expected.to_owned()));
    }

    #[test]
    fn every_problem_is_printed_and_the_exit_code_says_so() {
        let env = Env::from_iter([("HAMES_RUN__MAX_QUEUED", "0"), ("HAMES_LOG__LEVEL", "lo\u{1b}ud")]);
        let expected = "environment variable HAMES_RUN__MAX_QUEUED: run.max_queued: is 0; expected at least 1\n\
            environment variable HAMES_LOG__LEVEL: log.level: \"lo\\u{1b}ud\" is not a level; expected error, warn, \
            info, debug or trace, or directives such as `info,hames::run=debug`\n";
        assert_eq!(checked(None, &env), (1, expected.to_owned()));
    }

    #[test]
    fn names_that_lead_nowhere_are_found_without_starting() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("hames.toml");
        let settings = "[agents.one]\nmodel = \"demo/script\"\ntools = [\"raed_file\"]\n\
            [agents.two]\nmodel = \"demo/script\"\ntools = [\"no*thing\"]\n\
            [providers.demo]\nkind = \"scripted\"\n";
        std::fs::write(&file, settings).unwrap();
        let (code, printed) = checked(file.to_str(), &Env::default());
        assert_eq!(code, 1);
        for part in ["agents.one.tools: no tool is named `raed_file`; did you mean `read_file`?", "agents.two.tools:"] {
            assert!(printed.contains(part), "{printed}");
        }
        let settings = "[agents.one]\nmodel = \"demo/script\"\n[providers.demo]\nkind = \"scripted\"\n\
            [commands.test]\nexecutable = \"no-such-program\"\n";
        std::fs::write(&file, settings).unwrap();
        let (code, printed) = checked(file.to_str(), &Env::from_iter([("PATH", "/usr/bin")]));
        assert!(code == 1 && printed.contains("commands.test") && printed.contains("no-such-program"), "{printed}");
    }
}
