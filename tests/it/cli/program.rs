//! A start of the built program, with an empty environment.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use super::PATIENCE;

/// What is to be started.
pub(crate) struct Program {
    command: Command,
    input: Option<String>,
    end: End,
}

/// What follows the input.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// Its end.
    Closed,
    /// Nothing; more might come.
    Open,
}

/// A started program. Killed when dropped.
pub(crate) struct Running {
    child: Child,
    /// Kept open.
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: ChildStderr,
    read: [String; 2],
}

/// How it ended.
pub(crate) struct Finished {
    /// `None` after a signal that it did not take.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Program {
    pub(crate) fn new<'a>(args: impl IntoIterator<Item = &'a str>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hames"));
        command.args(args).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        Self { command, input: None, end: End::Open }
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn current_dir(mut self, directory: impl AsRef<Path>) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Gives it a text on standard input, which stays open.
    pub(crate) fn input(mut self, text: &str) -> Self {
        self.command.stdin(Stdio::piped());
        self.input = Some(text.to_owned());
        self
    }

    /// Ends standard input after the text.
    pub(crate) fn closed(mut self) -> Self {
        self.end = End::Closed;
        self
    }

    /// Starts it and waits until it took the input, but for what a pipe holds.
    pub(crate) async fn start(mut self) -> Running {
        let mut child = self.command.spawn().unwrap();
        let stdout = child.stdout.take();
        let stderr = child.stderr.take().unwrap();
        let mut stdin = child.stdin.take();
        if let (Some(pipe), Some(text)) = (&mut stdin, &self.input) {
            pipe.write_all(text.as_bytes()).await.unwrap();
        }
        if self.end == End::Closed {
            stdin = None;
        }
        Running { child, stdin, stdout, stderr, read: Default::default() }
    }

    pub(crate) async fn finish(self) -> Finished {
        self.start().await.finish().await
    }
}

impl Running {
    /// Waits until it has printed this.
    pub(crate) async fn wait_for(&mut self, text: &str) {
        let stdout = self.stdout.as_mut().unwrap();
        wait_for(stdout, &mut self.read[0], text).await;
    }

    /// Waits until it has printed this on standard error.
    pub(crate) async fn wait_for_stderr(&mut self, text: &str) {
        wait_for(&mut self.stderr, &mut self.read[1], text).await;
    }

    /// What it has printed on standard error, as far as it was waited for.
    pub(crate) fn stderr(&self) -> &str {
        &self.read[1]
    }

    /// Reads no more of what it prints.
    pub(crate) fn close_stdout(&mut self) {
        self.stdout = None;
    }

    pub(crate) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    pub(crate) async fn finish(mut self) -> Finished {
        let [mut stdout, mut stderr] = self.read;
        let mut rest = (Vec::new(), Vec::new());
        let all = async {
            let out = async {
                if let Some(mut pipe) = self.stdout {
                    pipe.read_to_end(&mut rest.0).await.unwrap();
                }
            };
            let (status, (), _) = tokio::join!(self.child.wait(), out, self.stderr.read_to_end(&mut rest.1));
            status.unwrap()
        };
        let status = timeout(PATIENCE, all).await.expect("the program does not end");
        stdout.push_str(std::str::from_utf8(&rest.0).unwrap());
        stderr.push_str(std::str::from_utf8(&rest.1).unwrap());
        drop(self.stdin);
        Finished { code: status.code(), stdout, stderr }
    }
}

async fn wait_for(pipe: &mut (impl tokio::io::AsyncRead + Unpin), read: &mut String, text: &str) {
    let all = async {
        let mut buffer = [0; 4096];
        while !read.contains(text) {
            let count = pipe.read(&mut buffer).await.unwrap();
            assert_ne!(count, 0, "the output ended without {text:?}: {read}");
            read.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
    };
    timeout(PATIENCE, all).await.expect("the program does not print what it should");
}
