//! `run_command`: runs a command that the operator has configured, and no other.
//!
//! The model names a preset; program and arguments stand in the configuration and never pass a shell. The command
//! runs under a supervisor process (see [`super::supervise`]) that ends its whole process tree when it is over,
//! when it takes too long, when the call is cancelled, when its future is dropped, and when the server dies.

use std::collections::BTreeMap;
use std::env::{join_paths, split_paths};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use rustix::fs::{Access, access};
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::capture::Captured;
use super::process::Marks;
use super::session::{Ended, Session, Start};
use super::supervise::{CommandHost, Report};
use super::takeover::Left;
use super::{Tool, ToolCtx, ToolError, time_to_return};
use crate::config::CommandConfig;
use crate::domain::{Effect, OnUnknown, ToolName, ToolSpec};

/// The name of the tool.
const NAME: &str = "run_command";

/// Where programs are looked up when the server has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Variables of the server's environment that every command gets.
const ALWAYS: [&str; 3] = ["PATH", "LANG", "TZ"];

/// A command that cannot be offered. Each names its key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// A bare name that no directory of `PATH` has.
    #[error("commands.{name}.executable: no program `{}` in PATH ({path}); give its absolute path", executable.display())]
    NotFound {
        /// The preset.
        name: String,
        /// What was looked for.
        executable: PathBuf,
        /// Where.
        path: String,
    },
    /// A path at which there is no program.
    #[error("commands.{name}.executable: `{}` {problem}; expected the absolute path of a program, or a bare name \
             to look up in PATH", executable.display())]
    Executable {
        /// The preset.
        name: String,
        /// The configured value.
        executable: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// A command, ready to run.
#[derive(Debug)]
struct Preset {
    executable: PathBuf,
    args: Vec<String>,
    timeout: Duration,
    effect: Effect,
    on_unknown: OnUnknown,
    pollable: bool,
    max_output_bytes: usize,
    /// The whole environment but for the variables that name the run, the call and the workspace.
    environment: BTreeMap<OsString, OsString>,
}

/// How long a command may take, and why no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    /// Its own timeout.
    Command(Duration),
    /// The time of the call is nearly over.
    Call {
        /// The part of it that the command may use.
        time: Duration,
        /// All of it.
        call: Duration,
    },
}

impl Limit {
    /// The smaller of a command's own timeout and what the call leaves it.
    fn of(command: Duration, call: Duration) -> Self {
        let time = time_to_return(call);
        if command <= time { Self::Command(command) } else { Self::Call { time, call } }
    }

    const fn time(self) -> Duration {
        match self {
            Self::Command(time) | Self::Call { time, .. } => time,
        }
    }

    fn timed_out(self) -> String {
        let text = format!("timed out after {} ms and was killed", self.time().as_millis());
        match self {
            Self::Command(_) => text,
            Self::Call { call, .. } => {
                format!("{text}: a tool call of this run may take {} ms in all", call.as_millis())
            }
        }
    }
}

/// Whether a command did what it is for.
#[derive(Clone, Copy)]
enum Verdict {
    Success,
    Failure,
}

/// The tool `run_command`.
#[derive(Debug)]
pub struct CommandTool {
    spec: ToolSpec,
    presets: BTreeMap<String, Preset>,
    host: CommandHost,
    /// Sees to commands whose calls were dropped.
    let_go: TaskTracker,
}

impl CommandTool {
    /// Makes the tool from the section `commands`; `None`: no command is configured, so there is no tool. What can be
    /// told from the settings alone has been checked when they were read; here the machine is asked.
    ///
    /// `environment` is the server's; a command sees `PATH`, `LANG`, `TZ` and what its `env` names of it.
    /// `host` is the program that supervises.
    ///
    /// # Errors
    /// Every preset that cannot work, each with its key.
    pub fn new(
        presets: &BTreeMap<String, CommandConfig>,
        environment: &BTreeMap<OsString, OsString>,
        host: CommandHost,
    ) -> Result<Option<Self>, Vec<CommandError>> {
        let mut errors = Vec::new();
        let mut ready = BTreeMap::new();
        for (name, config) in presets {
            match Preset::new(name, config, environment) {
                Ok(preset) => {
                    ready.insert(name.clone(), preset);
                }
                Err(error) => errors.push(error),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        if ready.is_empty() {
            return Ok(None);
        }
        let Ok(name) = NAME.parse::<ToolName>() else { return Ok(None) };
        let spec = ToolSpec { name, description: describe(presets, &ready), parameters: parameters(&ready) };
        Ok(Some(Self { spec, presets: ready, host, let_go: TaskTracker::new() }))
    }

    fn preset(&self, arguments: &Map<String, Value>) -> Option<(&str, &Preset)> {
        let name = arguments.get("command")?.as_str()?;
        self.presets.get_key_value(name).map(|(name, preset)| (name.as_str(), preset))
    }
}

impl Preset {
    fn new(
        name: &str,
        config: &CommandConfig,
        environment: &BTreeMap<OsString, OsString>,
    ) -> Result<Self, CommandError> {
        let path = absolute_path_entries(environment.get(OsStr::new("PATH")));
        let wanted = ALWAYS.iter().copied().chain(config.env.iter().map(String::as_str)).map(OsString::from);
        let mut passed: BTreeMap<OsString, OsString> =
            wanted.filter_map(|key| environment.get_key_value(&key)).map(|(k, v)| (k.clone(), v.clone())).collect();
        passed.insert("PATH".into(), path.clone());
        Ok(Self {
            executable: resolve(name, &config.executable, &path)?,
            args: config.args.clone(),
            timeout: Duration::from_millis(config.timeout_ms),
            effect: config.effect,
            on_unknown: config.on_unknown,
            pollable: config.pollable,
            max_output_bytes: config.max_output_bytes,
            environment: passed,
        })
    }

    /// What the command sees: nothing but this.
    fn environment(&self, ctx: &ToolCtx, marks: &Marks) -> BTreeMap<OsString, OsString> {
        // A preset that names HOME wants the server's.
        let mut environment =
            BTreeMap::from([(OsString::from("HOME"), ctx.workspace.root_path().as_os_str().to_owned())]);
        environment.extend(self.environment.clone());
        environment.extend(marks.variables());
        environment
    }
}

/// The absolute directories of a `PATH`. A relative or empty entry would mean the workspace, where the model can put
/// a program of its own.
fn absolute_path_entries(path: Option<&OsString>) -> OsString {
    let entries = path.map(|path| split_paths(path).filter(|entry| entry.is_absolute()).collect::<Vec<_>>());
    match entries.map(join_paths) {
        Some(Ok(joined)) if !joined.is_empty() => joined,
        Some(Ok(_) | Err(_)) | None => DEFAULT_PATH.into(),
    }
}

/// Finds the program of a preset. Links stay as they are: many programs act by the name they are called.
fn resolve(name: &str, executable: &Path, path: &OsStr) -> Result<PathBuf, CommandError> {
    let is_program = |candidate: &Path| candidate.is_file() && access(candidate, Access::EXEC_OK).is_ok();
    let wrong =
        |problem| Err(CommandError::Executable { name: name.to_owned(), executable: executable.to_owned(), problem });
    if executable.as_os_str().as_encoded_bytes().contains(&0) {
        return wrong("contains a NUL character");
    }
    if executable.is_absolute() {
        return match (executable.exists(), is_program(executable)) {
            (_, true) => Ok(executable.to_owned()),
            (true, false) => wrong("is not an executable file"),
            (false, false) => wrong("does not exist"),
        };
    }
    if executable.components().count() != 1 || executable.file_name() != Some(executable.as_os_str()) {
        return wrong("is a relative path");
    }
    split_paths(path).map(|directory| directory.join(executable)).find(|candidate| is_program(candidate)).ok_or_else(
        || CommandError::NotFound {
            name: name.to_owned(),
            executable: executable.to_owned(),
            path: path.display().to_string(),
        },
    )
}

/// The arguments: the name of a preset.
fn parameters(presets: &BTreeMap<String, Preset>) -> Value {
    json!({
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "enum": presets.keys().collect::<Vec<_>>(),
                "description": "The name of the command to run."
            }
        },
        "required": ["command"],
        "additionalProperties": false
    })
}

/// The manual of the tool.
fn describe(configs: &BTreeMap<String, CommandConfig>, presets: &BTreeMap<String, Preset>) -> String {
    let mut text = "Runs one of the commands listed below, in the workspace directory, and returns its exit code and \
        what it printed. Only these commands exist, with exactly these arguments: there is no shell, nothing can be \
        added, and the command gets no input (its standard input is empty). To read, write or search files, use the \
        file tools instead.\n\
        \n\
        The result starts with one fact per line: `exit code: N` (or `killed by signal: N (NAME)`, or `timed out after N ms \
        and was killed`), `duration: N ms`, `stdout: N bytes`, `stderr: N bytes`; then comes the output after the lines \
        `--- stdout ---` and `--- stderr ---`. Exit code 0 is success; everything else is reported as an error in the same \
        form, with the output up to then. Of long output the beginning and the end are kept, and a line in the middle \
        says how many bytes are left out. Line ends are shown as newlines, other control characters as symbols \
        such as ␀ and ␛, bytes that are not UTF-8 as \u{fffd}.\n\
        \n\
        A command that exceeds its timeout is stopped with everything it has started: SIGTERM, then SIGKILL half a second \
        later. The timeout is the one named below, or a little less than the time this run allows for one tool call if \
        that is shorter; the first line of the result then says so. Processes that a command leaves in the background when it ends are stopped the same way, so nothing can \
        be kept running from one call to the next.\n\
        \n\
        Commands:"
        .to_owned();
    for (name, preset) in presets {
        let config = configs.get(name);
        let purpose = config.and_then(|config| config.description.as_deref()).unwrap_or("(no description)");
        let program = config.map_or(preset.executable.as_path(), |config| config.executable.as_path());
        let argv = std::iter::once(program.display().to_string()).chain(preset.args.iter().cloned());
        let effect = match preset.effect {
            Effect::ReadOnly => "changes nothing",
            Effect::Idempotent => "running it twice is the same as once",
            Effect::SideEffect => "can change things",
        };
        let argv = argv.map(|arg| quoted(&arg)).collect::<Vec<_>>().join(" ");
        let polled = if preset.pollable { "; may be called again and again" } else { "" };
        let timeout = preset.timeout.as_millis();
        text.push_str(&format!("\n- `{name}`: {purpose}\n  runs: {argv}\n  timeout: {timeout} ms; {effect}{polled}"));
    }
    text
}

/// An argument so that its ends can be seen.
fn quoted(arg: &str) -> String {
    let is_plain = !arg.is_empty() && arg.chars().all(|c| c.is_alphanumeric() || "-_./=:,+@%".contains(c));
    if is_plain { arg.to_owned() } else { format!("{arg:?}") }
}

#[async_trait]
impl Tool for CommandTool {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn effect(&self, arguments: &Map<String, Value>) -> Effect {
        let strength = |effect: &Effect| match effect {
            Effect::ReadOnly => 0,
            Effect::Idempotent => 1,
            Effect::SideEffect => 2,
        };
        match self.preset(arguments) {
            Some((_, preset)) => preset.effect,
            None => self.presets.values().map(|p| p.effect).max_by_key(strength).unwrap_or(Effect::SideEffect),
        }
    }

    fn on_unknown(&self, arguments: &Map<String, Value>) -> OnUnknown {
        self.preset(arguments).map(|(_, preset)| preset.on_unknown).unwrap_or_default()
    }

    fn is_pollable(&self, arguments: &Map<String, Value>) -> bool {
        self.preset(arguments).is_some_and(|(_, preset)| preset.pollable)
    }

    async fn call(&self, ctx: &ToolCtx, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let Some((name, preset)) = self.preset(arguments) else {
            let names = self.presets.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            let given = arguments.get("command").unwrap_or(&Value::Null);
            return Err(ToolError::Respond(format!("$.command: there is no command {given}; expected one of {names}")));
        };
        if ctx.cancel.is_cancelled() {
            return Err(ToolError::Respond(format!("`{name}` was not started: the call was cancelled before")));
        }
        let marks = Marks::new(&ctx.run.to_string(), &ctx.call_id);
        let start = Start {
            host: &self.host,
            directory: ctx.workspace.root_path(),
            executable: &preset.executable,
            args: &preset.args,
            environment: preset.environment(ctx, &marks),
            marks,
            let_go: &self.let_go,
            max_output_bytes: preset.max_output_bytes,
        };
        let limit = Limit::of(preset.timeout, ctx.timeout);
        let started = Instant::now();
        let session = Session::start(start).map_err(|error| {
            tracing::error!(run_id = %ctx.run, call_id = ctx.call_id, command = name, %error, "a command could not be started");
            ToolError::Respond(format!("`{name}` did not run: {error}"))
        })?;
        let (ended, stdout, stderr) = session.run(ctx, limit.time()).await;
        let duration = started.elapsed();
        tracing::debug!(run_id = %ctx.run, call_id = ctx.call_id, command = name, ?ended, duration_ms = duration.as_millis(), "a command ended");
        let (verdict, status, left_behind) = match ended {
            Ended::Reported(Report::Exited { code: 0, left_behind }) => {
                (Verdict::Success, "exit code: 0".to_owned(), left_behind)
            }
            Ended::Reported(Report::Exited { code, left_behind }) => {
                (Verdict::Failure, format!("exit code: {code}"), left_behind)
            }
            Ended::Reported(Report::Signalled { signal, left_behind }) => {
                let signal_name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                (Verdict::Failure, format!("killed by signal: {signal} ({signal_name})"), left_behind)
            }
            Ended::Reported(Report::NotStarted { reason }) => {
                return Err(ToolError::Respond(format!("`{name}` did not run: {reason}")));
            }
            Ended::Reported(Report::Failed { reason }) => {
                tracing::error!(run_id = %ctx.run, call_id = ctx.call_id, command = name, reason, "a supervisor failed");
                (Verdict::Failure, format!("killed, because its supervision failed: {reason}"), 0)
            }
            Ended::TimedOut => (Verdict::Failure, limit.timed_out(), 0),
            Ended::Cancelled => {
                (Verdict::Failure, "cancelled: it was started, and killed before it was done".to_owned(), 0)
            }
            Ended::Lost(left) => {
                tracing::error!(run_id = %ctx.run, call_id = ctx.call_id, command = name, "a supervisor died");
                (Verdict::Failure, lost(left).to_owned(), 0)
            }
            Ended::Stuck => {
                tracing::error!(run_id = %ctx.run, call_id = ctx.call_id, command = name, "a command cannot be killed");
                (
                    Verdict::Failure,
                    "could not be stopped: its supervisor did not answer, everything it had started was killed, and \
                     some of that does not end"
                        .to_owned(),
                    0,
                )
            }
        };
        let text = render(&status, duration, left_behind, &stdout, &stderr);
        match verdict {
            Verdict::Success => Ok(text),
            Verdict::Failure => Err(ToolError::Respond(text)),
        }
    }
}

/// What is known of a command whose supervisor died.
const fn lost(left: Left) -> &'static str {
    match left {
        Left::Nobody => {
            "outcome unknown: its supervisor process died, and the command with it; what else it had started was looked \
             for by its environment and killed, so only a process that changed its environment may still be running"
        }
        Left::Somebody => {
            "outcome unknown: its supervisor process died; the command and what it had started were killed, and some of \
             that does not end"
        }
    }
}

/// The result, in the form that the description promises: all facts come before the first byte of
/// output, so output cannot pass for them.
fn render(status: &str, duration: Duration, left_behind: usize, stdout: &Captured, stderr: &Captured) -> String {
    let mut text = format!("{status}\nduration: {} ms\n", duration.as_millis());
    text.push_str(&facts("stdout", stdout));
    text.push_str(&facts("stderr", stderr));
    if left_behind > 0 {
        text.push_str(&format!("left behind: {left_behind} processes, killed\n"));
    }
    for (name, stream) in [("stdout", stdout), ("stderr", stderr)] {
        text.push_str(&format!("--- {name} ---\n{}", stream.text));
        if !text.ends_with('\n') {
            text.push('\n');
        }
    }
    text
}

/// One line on a stream.
fn facts(name: &str, stream: &Captured) -> String {
    let mut line = format!("{name}: {} bytes", stream.total);
    if stream.left_out > 0 {
        line.push_str(&format!(", {} left out of the middle", stream.left_out));
    }
    if stream.invalid > 0 {
        line.push_str(&format!("; note: {} bytes are not UTF-8 and shown as \u{fffd}", stream.invalid));
    }
    if stream.controls > 0 {
        line.push_str(&format!("; note: {} control characters are shown as symbols", stream.controls));
    }
    line.push('\n');
    line
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
