//! `hames serve` as a process of its own, to be killed and started again on what it left.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::client::ApiClient;

/// What the processes share: settings, a script for the model, a workspace, and what they store.
pub(crate) struct Site {
    directory: TempDir,
}

/// One process. Killed when dropped.
pub(crate) struct Server {
    process: Child,
    pub(crate) client: ApiClient,
}

impl Site {
    /// An agent `a` with every tool, whose model says `turns`, in a workspace `w`. `toml` are further settings.
    pub(crate) fn new(toml: &str, turns: &Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let settings = format!(
            "[server]\nbind = \"127.0.0.1:0\"\n[providers.s]\nkind = \"scripted\"\nscript = \"s.json\"\n\
             [agents.a]\nmodel = \"s/m\"\ntools = [\"*\"]\nworkspace = \"w\"\n\
             [workspaces.w]\npath = \"work\"\nwritable = true\n{toml}"
        );
        std::fs::create_dir(directory.path().join("work")).unwrap();
        std::fs::write(directory.path().join("hames.toml"), settings).unwrap();
        std::fs::write(directory.path().join("s.json"), serde_json::json!({"turns": turns}).to_string()).unwrap();
        Self { directory }
    }

    /// A path below the directory of the processes.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The lines of a file of the workspace; none when it is not there.
    pub(crate) fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("work").join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Starts a process and waits until it serves.
    pub(crate) fn start(&self) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_hames"))
            .args(["serve", "--config", "hames.toml"])
            .current_dir(self.directory.path())
            .env("HAMES_LOG__LEVEL", "info")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines
            .find_map(|line| line.unwrap().split_once("listening address=").map(|(_, rest)| rest.trim().to_owned()))
            .expect("the server does not start");
        // The log is read on, so that the server never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Server { process, client: ApiClient::new(address.parse().unwrap()) }
    }
}

impl Server {
    /// Ends it without a word.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self) {
        let pid = i32::try_from(self.process.id()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    }

    /// Waits until it has ended.
    pub(crate) fn ended(mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }

    /// Waits until a run has so many events of a kind.
    pub(crate) async fn events(&self, run: &str, kind: &str, count: usize) -> Vec<Value> {
        loop {
            let page = self.client.get(&format!("/runs/{run}/events?limit=200")).await.body;
            let events = page["data"].as_array().unwrap().iter().filter(|event| event["type"] == kind);
            let events: Vec<Value> = events.cloned().collect();
            if events.len() >= count {
                return events;
            }
            tokio::task::yield_now().await;
        }
    }

    /// The run once it has ended or waits.
    pub(crate) async fn at_rest(&self, run: &str) -> Value {
        self.client.get(&format!("/runs/{run}?wait=30")).await.body
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already dead is what it should be.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
