//! `hames check`: are the settings good?

use std::fmt::Write as _;
use std::io::Write;

use super::exit::{Code, Exit};
use super::{ConfigArgs, output};
use crate::app::{self, Findings};
use crate::config::{self, Config, Env, ScriptSource, WireConfig};
use crate::domain::text::printable;

pub(super) fn check(args: &ConfigArgs, env: &Env, out: &mut (dyn Write + Send)) -> anyhow::Result<Exit> {
    let loaded = config::read(args.config.as_deref(), env);
    let Findings { problems, hints } = app::verify(&loaded, env);
    let problems = loaded.problems().iter().chain(&problems).map(ToString::to_string);
    let mut lines: Vec<_> = problems.chain(hints.iter().map(|hint| format!("hint: {hint}"))).collect();
    let exit = match loaded.config().filter(|_| lines.len() == hints.len()) {
        Some(config) => {
            lines.insert(0, summary(config)?);
            lines.push("no problems".to_owned());
            Exit::Code(Code::Done)
        }
        None => Exit::Code(Code::Failed),
    };
    output::print(out, &format!("{}\n", printable(&lines.join("\n"), &['\n'])))?;
    Ok(exit)
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
    Ok(out.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(config: Option<&str>, env: &Env) -> (u8, String) {
        let mut out = Vec::new();
        let args = ConfigArgs { config: config.map(Into::into) };
        let code = match check(&args, env, &mut out).unwrap() {
            Exit::Code(code) => code as u8,
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
        let place = file.display();
        for part in [
            format!("{place}: agents.one.tools.0: no tool is named `raed_file`; did you mean `read_file`?"),
            format!("{place}: agents.two.tools.0: "),
        ] {
            assert!(printed.contains(&part), "{printed}");
        }
        let settings = "[agents.one]\nmodel = \"demo/script\"\n[providers.demo]\nkind = \"scripted\"\n\
            [commands.test]\nexecutable = \"no-such-program\"\n";
        std::fs::write(&file, settings).unwrap();
        let (code, printed) = checked(file.to_str(), &Env::from_iter([("PATH", "/usr/bin")]));
        let part = format!("{}: commands.test.executable: no program `no-such-program` in PATH", file.display());
        assert!(code == 1 && printed.starts_with(&part), "{printed}");
    }

    #[test]
    fn problems_of_every_kind_are_found_at_once_and_nothing_is_blamed_for_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("list.json"), r#"{"turns": 5}"#).unwrap();
        std::fs::write(path("one.json"), r#"{"turns": []}"#).unwrap();
        let settings = format!(
            "[server]\nbind = \"nowhere\"\n[store]\nurl = \"sqlite:{}\"\n\
             [providers.list]\nkind = \"scripted\"\nscript = {:?}\n\
             [providers.gone]\nkind = \"scripted\"\nscript = {:?}\n\
             [providers.one]\nkind = \"scripted\"\nscript = {:?}\n\
             [workspaces.gone]\npath = {:?}\n\
             [commands.test]\nexecutable = \"no-such-program\"\n\
             [commands.slow]\nexecutable = \"sh\"\ntimeout_ms = 0\n\
             [agents.a]\nmodel = \"one/m\"\nworkspace = \"gone\"\ntools = [\"run_command\", \"raed_file\", \"read_fiel\"]\n\
             [agents.b]\nmodel = \"gone/m\"\ntools = [\"*\", \"bad tool\"]\n",
            path("missing/h.db").display(),
            path("list.json"),
            path("gone.json"),
            path("one.json"),
            path("gone"),
        );
        let file = path("hames.toml");
        std::fs::write(&file, settings).unwrap();
        let (code, printed) = checked(file.to_str(), &Env::from_iter([("PATH", "/usr/bin:/bin")]));
        let keys: Vec<_> = printed
            .lines()
            .map(|line| line.strip_prefix(&format!("{}: ", file.display())).unwrap_or_else(|| panic!("{line}")))
            .map(|line| line.split_once(": ").unwrap().0)
            .collect();
        let expected = [
            "server.bind",
            "providers.gone.script",
            "store.url",
            "workspaces.gone.path",
            "commands.slow.timeout_ms",
            "agents.b.tools.1",
            "providers.list",
            "commands.test.executable",
            "agents.a.tools.1",
            "agents.a.tools.2",
        ];
        assert_eq!((code, keys), (1, expected.to_vec()), "{printed}");
    }

    #[test]
    fn tools_that_can_only_refuse_are_a_hint_and_no_problem() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("hames.toml");
        let checked = |more: &str, writable: bool| {
            let settings = format!(
                "[providers.demo]\nkind = \"scripted\"\n\
                 [workspaces.repo]\npath = {:?}\n[workspaces.other]\npath = {:?}\nwritable = {writable}\n\
                 [agents.a]\nmodel = \"demo/m\"\ntools = [\"read_file\", \"write_file\", \"edit_file\"]\n{more}",
                directory.path(),
                directory.path(),
            );
            std::fs::write(&file, settings).unwrap();
            checked(file.to_str(), &Env::default())
        };
        let hint = format!(
            "hint: {}: agents.a.tools: `write_file` and `edit_file` can only refuse, since workspace `repo` is read \
             only; set workspaces.repo.writable = true, or leave them out\nno problems\n",
            file.display()
        );
        let (code, printed) = checked("workspace = \"repo\"\nworkspaces = [\"other\"]\n", false);
        assert!(code == 0 && printed.ends_with(&hint), "{printed}");
        for more in ["", "workspace = \"repo\"\nworkspaces = [\"other\"]\n", "workspace = \"other\"\n"] {
            let (code, printed) = checked(more, true);
            assert!(code == 0 && !printed.contains("hint"), "{more}: {printed}");
        }
    }
}
