//! The server under faults: started, killed, asked to end, started again on the same address.

use std::fs::{self, OpenOptions};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::dice::Dice;

/// Most time until a server answers.
const START: Duration = Duration::from_secs(60);
/// How often something that gives no signal is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// A server. Killed when dropped.
pub(crate) struct Server {
    folder: PathBuf,
    pub(crate) address: SocketAddr,
    child: Option<Child>,
    /// The longest time from a start to the first answer.
    pub(crate) slowest_start: Duration,
}

/// An address nobody listens on, outside of the range from which the system gives ports to connections, so that it is
/// free again after every restart.
pub(crate) fn free_address() -> SocketAddr {
    free_address_but(SocketAddr::from(([127, 0, 0, 1], 0)))
}

/// The same, and another one than that.
fn free_address_but(taken: SocketAddr) -> SocketAddr {
    let mut dice = Dice::new(u64::from(std::process::id()));
    loop {
        let address = SocketAddr::from(([127, 0, 0, 1], dice.within(12_000..30_000) as u16));
        if address != taken && TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

impl Server {
    /// A server over `hames.toml` of a folder. Not started.
    pub(crate) const fn new(folder: PathBuf, address: SocketAddr) -> Self {
        Self { folder, address, child: None, slowest_start: Duration::ZERO }
    }

    /// Another one over the same folder, with an address of its own. Not started.
    pub(crate) fn beside(&self) -> Self {
        Self::new(self.folder.clone(), free_address_but(self.address))
    }

    /// Starts it with further variables, and waits until it listens or has ended.
    pub(crate) async fn start(&mut self, variables: &[(&str, &str)]) {
        let log = OpenOptions::new().append(true).create(true).open(self.folder.join("log")).unwrap();
        let started = Instant::now();
        let child = Command::new(env!("CARGO_BIN_EXE_hames"))
            .args(["serve", "--config", "hames.toml"])
            .current_dir(&self.folder)
            .env("HAMES_SERVER__BIND", self.address.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
        while self.ended().is_none() {
            if tokio::net::TcpStream::connect(self.address).await.is_ok() {
                break;
            }
            assert!(started.elapsed() < START, "the server does not listen: {}", self.log_end());
            tokio::time::sleep(LOOK).await;
        }
        self.slowest_start = self.slowest_start.max(started.elapsed());
    }

    /// Starts it; it has to come up.
    pub(crate) async fn start_well(&mut self) {
        self.start(&[]).await;
        assert!(self.ended().is_none(), "the server does not start: {}", self.log_end());
    }

    /// How it ended by itself, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().unwrap()
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            child.wait().unwrap();
        }
    }

    /// Stops it in the middle of what it does (`kill -STOP`).
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on after a pause.
    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    }

    /// `kill -TERM`; how it ended, and after how long. Killed when it takes longer than `patience`.
    pub(crate) async fn terminate(&mut self, patience: Duration) -> (Option<ExitStatus>, Duration) {
        let started = Instant::now();
        self.signal(Signal::TERM);
        while started.elapsed() < patience {
            if let Some(status) = self.ended() {
                self.child = None;
                return (Some(status), started.elapsed());
            }
            tokio::time::sleep(LOOK).await;
        }
        self.kill();
        (None, started.elapsed())
    }

    /// The end of its log.
    pub(crate) fn log_end(&self) -> String {
        let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
