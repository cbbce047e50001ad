//! A server under load: a process of its own, and what it costs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::model::Model;

/// Which server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hames,
    Floor,
}

impl Kind {
    pub(crate) const BOTH: [Self; 2] = [Self::Floor, Self::Hames];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Hames => "hames",
            Self::Floor => "floor",
        }
    }
}

/// A running server. Killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    /// When the process was started.
    pub(crate) started: Instant,
    _folder: TempDir,
}

/// Ticks of the kernel's accounting of CPU time in a second.
const TICKS: f64 = 100.0;

impl Server {
    /// Starts a server with an empty database, and waits until it listens.
    pub(crate) fn start(kind: Kind, model: &Model) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = match kind {
            Kind::Hames => hames(folder.path(), model),
            Kind::Floor => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.arg("floor").arg(folder.path().join("floor.db")).arg(model.base_url());
                command
            }
        };
        let started = Instant::now();
        let (stdout, stderr) = match kind {
            Kind::Hames => (Stdio::null(), Stdio::piped()),
            Kind::Floor => (Stdio::piped(), Stdio::inherit()),
        };
        let mut child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn().unwrap();
        let address = match kind {
            Kind::Hames => listening(BufReader::new(child.stderr.take().unwrap())),
            Kind::Floor => listening(BufReader::new(child.stdout.take().unwrap())),
        };
        Self { child, address, started, _folder: folder }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    /// CPU time of the process so far, in seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        // utime and stime are the fields 14 and 15 of the line, which begins with two that are cut off here.
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / TICKS
    }

    /// Resident memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn hames(folder: &Path, model: &Model) -> Command {
    let files = folder.join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("hello.txt"), "hello\n").unwrap();
    for number in 1..=400 {
        fs::write(files.join(format!("f{number}.txt")), format!("{number} {}\n", "some text ".repeat(20))).unwrap();
    }
    let settings = format!(
        r#"
[server]
bind = "127.0.0.1:0"
[store]
url = "sqlite:{folder}/hames.db"
[run]
max_concurrent = 20000
scratch_dir = "{folder}/scratch"
[log]
level = "warn,hames::cli=info"
format = "json"
[providers.bench]
kind = "openai_chat"
base_url = "{model}"
[agents.default]
model = "bench/model"
tools = ["read_file"]
workspace = "files"
[workspaces.files]
path = "{files}"
"#,
        folder = folder.display(),
        model = model.base_url(),
        files = files.display(),
    );
    let path = folder.join("hames.toml");
    fs::write(&path, settings).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hames"));
    command.arg("serve").arg("--config").arg(path).current_dir(folder);
    command
}

/// Reads records until one says where the server listens; the rest is passed on.
fn listening(mut records: impl BufRead + Send + 'static) -> SocketAddr {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(records.read_line(&mut line).unwrap() > 0, "the server ended before it listened");
        match serde_json::from_str::<Value>(&line) {
            Ok(record) if record["message"] == "listening" => {
                std::thread::spawn(move || records.lines().map_while(Result::ok).for_each(|line| eprintln!("{line}")));
                return record["address"].as_str().unwrap().parse().unwrap();
            }
            Ok(_) | Err(_) => eprint!("{line}"),
        }
    }
}

/// Waits a moment until a server has settled.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_millis(500)).await;
}
