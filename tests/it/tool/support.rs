//! A workspace, a `run_command` over the real program, and a look at the process table.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hames::config::{CommandConfig, WorkspaceConfig};
use hames::domain::RunId;
use hames::time::{Clock, Ids, SystemClock};
use hames::tool::command::CommandTool;
use hames::tool::supervise::CommandHost;
use hames::tool::workspace::Workspace;
use hames::tool::{ProgressSink, Tool, ToolCtx, ToolError};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, json};
use tempfile::TempDir;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a condition may take that has to come true. Long, because a failure is all that waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// The notes of calls.
#[derive(Default)]
pub(crate) struct Notes(pub(crate) Mutex<Vec<String>>);

impl ProgressSink for Notes {
    fn progress(&self, _call_id: &str, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

/// A tool, its workspace and one call's context.
pub(crate) struct Bench {
    pub(crate) directory: Arc<TempDir>,
    pub(crate) tool: CommandTool,
    pub(crate) ctx: ToolCtx,
    pub(crate) notes: Arc<Notes>,
}

/// A preset that runs a shell script.
pub(crate) fn script(text: &str) -> CommandConfig {
    preset("sh", &["-c", text])
}

/// A preset with the defaults of the configuration.
pub(crate) fn preset(executable: &str, args: &[&str]) -> CommandConfig {
    serde_json::from_value(json!({ "executable": executable, "args": args })).unwrap()
}

/// The program under test as supervisor.
pub(crate) fn host() -> CommandHost {
    CommandHost::program(env!("CARGO_BIN_EXE_hames"))
}

/// An environment of a server.
pub(crate) fn environment(pairs: &[(&str, &str)]) -> BTreeMap<OsString, OsString> {
    let path = ("PATH", "/usr/local/bin:/usr/bin:/bin");
    [path].iter().chain(pairs).map(|(key, value)| (key.into(), value.into())).collect()
}

/// The context of a call in `directory`.
pub(crate) fn context(directory: &Path, call_id: &str, notes: Arc<Notes>) -> ToolCtx {
    ToolCtx {
        run: RunId::new(Ids::default().next(SystemClock.now())),
        call_id: call_id.to_owned(),
        workspace: Arc::new(Workspace::open(&WorkspaceConfig::at(directory.to_owned())).unwrap()),
        timeout: Duration::from_secs(3_600),
        cancel: CancellationToken::new(),
        progress: notes,
    }
}

impl Bench {
    /// A tool with one preset, `it`.
    pub(crate) fn new(config: CommandConfig) -> Self {
        Self::with(config, &environment(&[]))
    }

    pub(crate) fn with(config: CommandConfig, environment: &BTreeMap<OsString, OsString>) -> Self {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let notes = Arc::new(Notes::default());
        let tool = CommandTool::new(&BTreeMap::from([("it".to_owned(), config)]), environment, host());
        let ctx = context(directory.path(), &unique("call"), notes.clone());
        Self { directory, tool: tool.unwrap().unwrap(), ctx, notes }
    }

    pub(crate) async fn run(&self) -> Result<String, ToolError> {
        let arguments = Map::from_iter([("command".to_owned(), json!("it"))]);
        self.tool.call(&self.ctx, &arguments).await
    }
}

/// The text of a failed call.
pub(crate) fn failure(result: Result<String, ToolError>) -> String {
    match result {
        Err(ToolError::Respond(text)) => text,
        Err(ToolError::Fatal(text)) => panic!("fatal: {text}"),
        Ok(text) => panic!("not a failure: {text}"),
    }
}

/// The result without the line that differs from run to run.
pub(crate) fn without_duration(text: &str) -> String {
    let (before, rest) = text.split_once("\nduration: ").unwrap_or_else(|| panic!("no duration in {text}"));
    let (duration, after) = rest.split_once('\n').unwrap();
    assert!(duration.strip_suffix(" ms").is_some_and(|number| number.parse::<u64>().is_ok()), "{duration}");
    format!("{before}\n{after}")
}

/// A text that no other process has.
pub(crate) fn unique(name: &str) -> String {
    format!("{name}-{}", Ids::default().next(SystemClock.now()))
}

/// Waits until a condition holds; panics with `what` when it never does.
pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The processes that carry a marker in their arguments or their environment. Ended ones carry nothing.
pub(crate) fn marked(marker: &str) -> Vec<i32> {
    let carries = |pid: i32, file: &str| {
        // A process may end while it is looked at.
        let content = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        content.windows(marker.len()).any(|window| window == marker.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.filter(|&pid| carries(pid, "cmdline") || carries(pid, "environ")).collect()
}

/// Kills whoever carries the marker when a test ends, however it ends.
pub(crate) struct Sweep(pub(crate) String);

impl Drop for Sweep {
    fn drop(&mut self) {
        for pid in marked(&self.0) {
            // One that has just ended is what is wanted.
            let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
        }
    }
}
