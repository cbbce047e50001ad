//! A server under load: a process of its own, and what it costs.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
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
    log: PathBuf,
    _folder: TempDir,
}

impl Server {
    /// Starts a server with an empty database, and waits until it listens.
    pub(crate) fn start(kind: Kind, model: &Model) -> Self {
        Self::start_with(kind, model, "")
    }

    /// The same with further settings of hames.
    pub(crate) fn start_with(kind: Kind, model: &Model, settings: &str) -> Self {
        // Beside what is built, which is on a disk; the system's temporary folder may be memory.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = match kind {
            Kind::Hames => hames(folder.path(), model, settings),
            Kind::Floor => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.arg("floor").arg(folder.path().join("floor.db")).arg(model.base_url());
                command
            }
        };
        let log = folder.path().join("log");
        let out = File::create(&log).unwrap();
        let started = Instant::now();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(out).spawn().unwrap();
        let address = listening(&log, &mut child);
        Self { child, address, started, log, _folder: folder }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    /// CPU time of the process so far, in seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        // utime and stime are the fields 14 and 15 of the line, which begins with two that are cut off here.
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap())
            / rustix::param::clock_ticks_per_second() as f64
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
        let log = fs::read_to_string(&self.log).unwrap();
        let bad = |line: &&str| ["\"WARN\"", "\"ERROR\"", "panicked"].iter().any(|word| line.contains(word));
        log.lines().filter(bad).take(10).for_each(|line| eprintln!("  the server said: {line}"));
    }
}

fn hames(folder: &Path, model: &Model, settings: &str) -> Command {
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
[log]
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
{settings}
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

/// Waits for the record that says where the server listens.
fn listening(log: &Path, child: &mut Child) -> SocketAddr {
    loop {
        let text = fs::read_to_string(log).unwrap();
        let records = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(address) = records
            .filter(|record| record["message"] == "listening")
            .find_map(|record| record["address"].as_str().and_then(|address| address.parse().ok()))
        {
            return address;
        }
        assert!(child.try_wait().unwrap().is_none(), "the server ended before it listened: {text}");
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// The share of the machine's time in which no processor had anything to do, since the last call.
#[derive(Default)]
pub(crate) struct Idle {
    idle: u64,
    all: u64,
}

impl Idle {
    pub(crate) fn share(&mut self) -> f64 {
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let times = stat.lines().next().unwrap().split_whitespace().skip(1);
        let times: Vec<u64> = times.map(|time| time.parse().unwrap()).collect();
        // user, nice, system, idle, iowait, …
        let now = Self { idle: times[3] + times[4], all: times.iter().take(8).sum() };
        let share = (now.idle - self.idle) as f64 / (now.all - self.all).max(1) as f64;
        *self = now;
        share
    }
}

/// Waits a moment until a server has settled.
pub(crate) async fn settle() {
    tokio::time::sleep(Duration::from_millis(500)).await;
}
