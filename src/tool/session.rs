//! The server's side of one running command: starts its supervisor, reads what it prints, and sees to its end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::{ChildStderr, ChildStdout, Command};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::TaskTracker;

use super::ToolCtx;
use super::capture::{Capture, Captured, last_text};
use super::process::Marks;
use super::supervise::{CommandHost, GRACE, Report};
use super::takeover::{Left, Supervisor};

/// Bytes read at a time. Larger than a pipe, so one read empties it.
const READ: usize = 64 * 1024;

/// Most bytes of a live note.
const NOTE_BYTES: usize = 1024;

/// Least time between two live notes.
const NOTE_EVERY: Duration = Duration::from_millis(300);

/// How long a supervisor may take beyond the grace time to end a tree and report; then the server kills the tree
/// itself. Short, because a call that was told to stop has only [`super::executor::WIND_UP`] in all; a supervisor that
/// is merely late loses nothing by it.
const REPORT_BOUND: Duration = Duration::from_millis(100);

/// How long to wait, after the tree is gone, for the end of the pipes and of the supervisor. Bytes in the pipes are
/// there already; only a process outside of the tree that was handed a pipe can hold it open.
const DRAIN_BOUND: Duration = Duration::from_millis(500);

/// Longest report that is read.
const MAX_REPORT: usize = 64 * 1024;

/// A command to start.
pub(super) struct Start<'a> {
    pub(super) host: &'a CommandHost,
    /// Working directory.
    pub(super) directory: &'a Path,
    /// Absolute.
    pub(super) executable: &'a Path,
    pub(super) args: &'a [String],
    /// All of it.
    pub(super) environment: BTreeMap<OsString, OsString>,
    /// What of it names the call.
    pub(super) marks: Marks,
    /// Owns the work on sessions that are dropped.
    pub(super) let_go: &'a TaskTracker,
    /// Per stream.
    pub(super) max_output_bytes: usize,
}

/// A command cannot be started.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("no control channel: {0}")]
    Channel(#[source] io::Error),
    #[error("its supervisor could not be started: {0}")]
    Spawn(#[source] io::Error),
}

/// How a command ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// By itself.
    Reported(Report),
    /// It took longer than allowed and was killed.
    TimedOut,
    /// The call was cancelled and the command killed.
    Cancelled,
    /// The supervisor died without a report; who was found of the command was killed.
    Lost(Left),
    /// The supervisor did not report, and the server could not kill all of the tree.
    Stuck,
}

/// A running command. Dropping it kills the command with everything it started: that closes the control channel.
pub(super) struct Session {
    // Closed before the supervisor is let go.
    control: UnixStream,
    held: Held,
    stdout: Stream<ChildStdout>,
    stderr: Stream<ChildStderr>,
}

/// Where a session is.
#[derive(Clone, Copy)]
enum Phase {
    Running,
    Stopping(Cause),
}

/// Why a command was stopped.
#[derive(Clone, Copy)]
enum Cause {
    Timeout,
    Cancel,
}

impl Cause {
    const fn ended(self) -> Ended {
        match self {
            Self::Timeout => Ended::TimedOut,
            Self::Cancel => Ended::Cancelled,
        }
    }
}

impl Session {
    /// Starts a supervisor that starts the command.
    pub(super) fn start(start: Start<'_>) -> Result<Self, StartError> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(StartError::Channel)?;
        ours.set_nonblocking(true).map_err(StartError::Channel)?;
        let control = UnixStream::from_std(ours).map_err(StartError::Channel)?;
        let mut child = Command::new(&start.host.executable)
            .arg0("hames")
            .arg(&start.host.first_argument)
            .arg(start.directory)
            .arg(start.executable)
            .args(start.args)
            .env_clear()
            .envs(start.environment)
            // The supervisor must not hold a directory that someone wants to remove.
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(StartError::Spawn)?;
        let stdout = Stream::new(child.stdout.take(), start.max_output_bytes);
        let stderr = Stream::new(child.stderr.take(), start.max_output_bytes);
        let supervisor = Some(Supervisor { child, marks: start.marks });
        let held = Held { supervisor, let_go: start.let_go.clone() };
        Ok(Self { control, held, stdout, stderr })
    }

    /// Runs the command to its end, but no longer than `limit` or until the call is cancelled, and returns what it
    /// printed to standard output and standard error.
    pub(super) async fn run(mut self, ctx: &ToolCtx, limit: Duration) -> (Ended, Captured, Captured) {
        let ended = self.wait(ctx, limit).await;
        match ended {
            Ended::Reported(_) | Ended::TimedOut | Ended::Cancelled | Ended::Lost(_) => self.drain().await,
            Ended::Stuck => {}
        }
        (ended, self.stdout.capture.finish(), self.stderr.capture.finish())
    }

    /// Reads output until the supervisor reports.
    async fn wait(&mut self, ctx: &ToolCtx, limit: Duration) -> Ended {
        let mut phase = Phase::Running;
        let mut report = Vec::new();
        let mut notes = Notes { recent: Vec::new(), next_at: Instant::now() };
        let mut time_is_up = pin!(sleep_until(Instant::now() + limit));
        loop {
            let next_note = notes.next_at;
            // In this order: a flood of output must not hold up the end, the cancel, the timer.
            tokio::select! {
                biased;
                read = self.control.read_buf(&mut report) => {
                    if let Err(error) = &read {
                        tracing::warn!(%error, "reading the report on a command failed");
                    }
                    let is_end = !matches!(read, Ok(1..)) || report.len() > MAX_REPORT;
                    if !is_end && !report.ends_with(b"\n") {
                        continue;
                    }
                    return match (serde_json::from_slice::<Report>(&report), phase) {
                        (Ok(report @ (Report::NotStarted { .. } | Report::Failed { .. })), _)
                        | (Ok(report), Phase::Running) => Ended::Reported(report),
                        (Ok(_), Phase::Stopping(cause)) => cause.ended(),
                        (Err(_), _) => Ended::Lost(self.take_over().await),
                    };
                }
                () = ctx.cancel.cancelled(), if matches!(phase, Phase::Running) => {
                    phase = Phase::Stopping(Cause::Cancel);
                    self.stop().await;
                    time_is_up.as_mut().reset(Instant::now() + GRACE + REPORT_BOUND);
                }
                () = time_is_up.as_mut() => match phase {
                    Phase::Running => {
                        phase = Phase::Stopping(Cause::Timeout);
                        self.stop().await;
                        time_is_up.as_mut().reset(Instant::now() + GRACE + REPORT_BOUND);
                    }
                    Phase::Stopping(cause) => {
                        tracing::warn!(call_id = ctx.call_id, "a supervisor does not report; its command is killed");
                        return match self.take_over().await {
                            Left::Nobody => cause.ended(),
                            Left::Somebody => Ended::Stuck,
                        };
                    }
                },
                () = sleep_until(next_note), if !notes.recent.is_empty() => notes.send(ctx),
                (stream, length) = read_either(&mut self.stdout, &mut self.stderr) => {
                    let buffer = match stream {
                        Source::Stdout => &self.stdout.buffer,
                        Source::Stderr => &self.stderr.buffer,
                    };
                    notes.push(buffer.get(..length).unwrap_or_default());
                }
            }
        }
    }

    /// Asks the supervisor to stop the command politely. One byte always fits; if the supervisor is gone,
    /// the next read says so.
    async fn stop(&mut self) {
        if let Err(error) = self.control.write_all(b"s").await {
            tracing::debug!(%error, "a supervisor was gone when it was asked to stop");
        }
    }

    async fn take_over(&mut self) -> Left {
        match &mut self.held.supervisor {
            Some(supervisor) => supervisor.take_over().await,
            None => Left::Nobody,
        }
    }

    /// Takes what is left in the pipes, and the exit of the supervisor.
    async fn drain(&mut self) {
        let bound = Instant::now() + DRAIN_BOUND;
        while self.stdout.pipe.is_some() || self.stderr.pipe.is_some() {
            if timeout_at(bound, read_either(&mut self.stdout, &mut self.stderr)).await.is_err() {
                tracing::warn!("a process outside of a command's tree holds its output open; the rest is not read");
                break;
            }
        }
        let Some(supervisor) = &mut self.held.supervisor else { return };
        match timeout_at(bound, supervisor.child.wait()).await {
            Ok(Ok(_)) => self.held.supervisor = None,
            Ok(Err(error)) => tracing::warn!(%error, "waiting for a supervisor failed"),
            Err(_) => tracing::warn!("a supervisor reported and does not exit"),
        }
    }
}

/// The supervisor of a session.
struct Held {
    /// `None` after its end.
    supervisor: Option<Supervisor>,
    let_go: TaskTracker,
}

impl Drop for Held {
    /// A supervisor that the command has stopped cannot see that it was let go.
    fn drop(&mut self) {
        let Some(supervisor) = self.supervisor.take() else { return };
        match Handle::try_current() {
            Ok(runtime) => drop(self.let_go.spawn_on(supervisor.see_off(), &runtime)),
            Err(error) => tracing::debug!(%error, "nothing is left that could wait for a supervisor"),
        }
    }
}

/// One output stream.
struct Stream<R> {
    /// `None` after its end.
    pipe: Option<R>,
    buffer: Box<[u8]>,
    capture: Capture,
}

/// Which stream was read.
#[derive(Clone, Copy)]
enum Source {
    Stdout,
    Stderr,
}

impl<R: AsyncRead + Unpin> Stream<R> {
    fn new(pipe: Option<R>, limit: usize) -> Self {
        Self { pipe, buffer: vec![0; READ].into_boxed_slice(), capture: Capture::new(limit) }
    }

    /// Reads once and returns how many bytes of `buffer` are new. Never ready after the end of the stream. Nothing
    /// is lost when the future is dropped.
    async fn read(&mut self) -> usize {
        let Some(pipe) = &mut self.pipe else { return pending().await };
        let length = match pipe.read(&mut self.buffer).await {
            Ok(length) => length,
            Err(error) => {
                tracing::warn!(%error, "reading the output of a command failed; the rest is not read");
                0
            }
        };
        if length == 0 {
            self.pipe = None;
        }
        self.capture.push(self.buffer.get(..length).unwrap_or_default());
        length
    }
}

/// Reads whichever stream has something, each as often as the other when both have.
async fn read_either(stdout: &mut Stream<ChildStdout>, stderr: &mut Stream<ChildStderr>) -> (Source, usize) {
    tokio::select! {
        length = stdout.read() => (Source::Stdout, length),
        length = stderr.read() => (Source::Stderr, length),
    }
}

/// Live notes: the latest output, seldom and short.
struct Notes {
    /// The last bytes since the last note.
    recent: Vec<u8>,
    next_at: Instant,
}

impl Notes {
    fn push(&mut self, bytes: &[u8]) {
        let bytes = bytes.get(bytes.len().saturating_sub(NOTE_BYTES)..).unwrap_or_default();
        let too_many = (self.recent.len() + bytes.len()).saturating_sub(NOTE_BYTES);
        self.recent.drain(..too_many);
        self.recent.extend_from_slice(bytes);
    }

    fn send(&mut self, ctx: &ToolCtx) {
        ctx.progress.progress(&ctx.call_id, &last_text(&self.recent, NOTE_BYTES));
        self.recent.clear();
        self.next_at = Instant::now() + NOTE_EVERY;
    }
}
