//! The supervisor of a command: a process between the server and the command that ends the whole process tree.
//!
//! The program runs itself again, twice: `__supervise` starts `__exec`, which becomes the command.
//!
//! - The supervisor's standard input is a Unix socket to the server, the control channel. End of stream there,
//!   by a drop or by any death of the server, means: kill the tree now. A byte means: stop politely. When
//!   the tree is gone the supervisor writes one report as a line of JSON and exits.
//! - It is the subreaper of the tree, so a process that detaches itself becomes its child and not that of
//!   init. It has one thread, so the parent-death signal of the command, which follows the thread that started
//!   it, fires when the supervisor dies and never before.
//! - Polite means SIGTERM to every descendant, then half a second, then SIGKILL until nobody is left. What the command
//!   leaves behind when it ends by itself is stopped the same way.
//!
//! A command runs as the server's user, so a hostile one can stop or kill its supervisor. The server then kills the
//! command itself (see `takeover`): all of it below a supervisor that was stopped; below one that was killed, the
//! command and what it detached with its environment unchanged. Nobody does that when the server is dead.

use std::ffi::{OsStr, OsString};
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getpid, getppid, pidfd_open,
    set_child_subreaper, set_dumpable_behavior, set_parent_process_death_signal, setrlimit, setsid, umask, wait,
};
use rustix::thread::set_no_new_privs;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::process::{process_table, signal_descendants};

/// The first argument that makes the program a supervisor; then follow the working directory, the program,
/// and its arguments.
const SUPERVISE: &str = "__supervise";

/// The first argument that makes the program become the command; then follow the process id of the supervisor, the
/// working directory, the program, and its arguments.
const EXEC: &str = "__exec";

/// The running program, found even when its file was replaced or removed.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Time between SIGTERM and SIGKILL.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// How often an ending tree is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How often orphans of a running tree are reaped.
const REAP: Duration = Duration::from_secs(1);

/// Which executable to run as the supervisor, and with which first argument.
#[derive(Clone, Debug)]
pub struct CommandHost {
    /// A program whose `main` calls [`run_if_requested`].
    pub executable: PathBuf,
    /// What makes it supervise.
    pub first_argument: OsString,
}

impl CommandHost {
    /// The running program itself, as it was started: also after its file was replaced by another version.
    pub fn this_program() -> Self {
        Self::program(THIS_PROGRAM)
    }

    /// Another program built with this library.
    pub fn program(executable: impl Into<PathBuf>) -> Self {
        Self { executable: executable.into(), first_argument: SUPERVISE.into() }
    }
}

/// What the supervisor tells when the tree is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Report {
    /// The command exited.
    Exited {
        /// Its exit code.
        code: i32,
        /// How many processes it left behind, which were then ended.
        left_behind: usize,
    },
    /// A signal ended the command.
    Signalled {
        /// The signal's number.
        signal: i32,
        /// How many processes it left behind, which were then ended.
        left_behind: usize,
    },
    /// The supervisor failed; whatever it had started is dead.
    Failed {
        /// Why, for a reader.
        reason: String,
    },
    /// The command never ran.
    NotStarted {
        /// Why, for a reader.
        reason: String,
    },
}

/// Why a supervisor could not do its work.
#[derive(Debug, thiserror::Error)]
enum SuperviseError {
    #[error("`{SUPERVISE}` needs a working directory and a program; this argument is for hames itself")]
    Arguments,
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
}

/// Names the operation that failed.
fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> SuperviseError {
    move |source| SuperviseError::System { what, source: source.into() }
}

/// Runs the process as a supervisor or as a command if `args` (the program's name first) ask for it; `None`: they
/// do not. Has to come before anything that starts a thread.
pub fn run_if_requested(mut args: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let verb = args.nth(1)?;
    if verb == SUPERVISE {
        Some(supervise(args.collect()))
    } else if verb == EXEC {
        Some(become_command(args.collect()))
    } else {
        None
    }
}

/// Keeps other processes of the same user from reading this one's memory and `/proc/PID/environ`, and from tracing
/// it. Commands run as the server's user, so a server that holds secrets calls this first. Processes with
/// CAP_SYS_PTRACE can still read.
pub fn hide_from_other_processes() -> io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// The supervisor, from start to report.
fn supervise(request: Vec<OsString>) -> ExitCode {
    let mut control = match io::stdin().as_fd().try_clone_to_owned() {
        Ok(fd) => UnixStream::from(fd),
        Err(error) => return failed(&error),
    };
    let report = match watch(&control, &request) {
        Ok(report) => report,
        Err(error) => Report::NotStarted { reason: error.to_string() },
    };
    let mut line = match serde_json::to_vec(&report) {
        Ok(line) => line,
        Err(error) => return failed(&error),
    };
    line.push(b'\n');
    match control.write_all(&line) {
        Ok(()) => ExitCode::SUCCESS,
        // The server let go of the call: it does not want to know.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Says on standard error, which the server reads, what went wrong.
fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("hames: the supervisor of the command failed: {error}");
    ExitCode::FAILURE
}

/// Starts the command and returns once no process of its tree is left.
fn watch(control: &UnixStream, request: &[OsString]) -> Result<Report, SuperviseError> {
    if request.len() < 2 {
        return Err(SuperviseError::Arguments);
    }
    prepare_supervisor()?;
    let (leader, mut exec_error) = start(request)?;
    let mut tree = Tree { leader, status: None };
    let followed = follow(control, &mut tree);
    tree.kill()?;
    Ok(match followed.and_then(|left_behind| exec_result(&mut exec_error, tree.status, left_behind)) {
        Ok(report) => report,
        Err(error) => Report::Failed { reason: error.to_string() },
    })
}

/// How far a tree is.
enum Phase {
    /// The command runs.
    Running,
    /// Everybody was asked to end.
    Ending { kill_at: Instant },
}

/// Waits for the end of the tree, or for the moment to kill what is left of it. Returns how many processes the
/// command left behind.
fn follow(control: &UnixStream, tree: &mut Tree) -> Result<usize, SuperviseError> {
    let leader_end = pidfd_open(tree.leader, PidfdFlags::empty()).map_err(system("pidfd_open"))?;
    let mut left_behind = 0;
    let mut phase = Phase::Running;
    while tree.reap()? {
        let limit = match phase {
            Phase::Running if tree.status.is_some() => {
                left_behind = signal_descendants(Signal::TERM).map_err(system("reading /proc"))?;
                phase = end_politely()?;
                LOOK
            }
            Phase::Running => REAP,
            Phase::Ending { kill_at } => {
                let left = kill_at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                LOOK.min(left)
            }
        };
        // A pidfd stays readable after the end, so it is only watched until then.
        let leader_end = tree.status.is_none().then_some(&leader_end);
        match (wait_for_word(control, leader_end, limit)?, &phase) {
            (Word::Gone, _) => break,
            (Word::Stop, Phase::Running) => {
                signal_descendants(Signal::TERM).map_err(system("reading /proc"))?;
                phase = end_politely()?;
            }
            (Word::Stop, Phase::Ending { .. }) | (Word::Nothing, _) => {}
        }
    }
    Ok(left_behind)
}

/// After SIGTERM went out: wakes whoever is stopped, so that they can take it, and starts the grace time.
fn end_politely() -> Result<Phase, SuperviseError> {
    signal_descendants(Signal::CONT).map_err(system("reading /proc"))?;
    Ok(Phase::Ending { kill_at: Instant::now() + GRACE })
}

/// Makes this process fit to supervise.
fn prepare_supervisor() -> Result<(), SuperviseError> {
    // The life of the tree hangs on the control channel alone. A handler, unlike "ignore", is not inherited.
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::CHILD] {
        signal_hook::flag::register(signal.as_raw(), Arc::new(AtomicBool::new(false)))
            .map_err(system("setting a signal handler"))?;
    }
    match setsid() {
        // EPERM: it already leads a process group, because whoever started it saw to that.
        Ok(_) | Err(Errno::PERM) => {}
        Err(error) => return Err(system("setsid")(error)),
    }
    set_child_subreaper(Some(getpid())).map_err(system("becoming a subreaper"))?;
    hide_from_other_processes().map_err(system("hiding from other processes"))?;
    // What the server itself inherited without close-on-exec ends here.
    close_fds::set_fds_cloexec(3, &[]);
    // Without a process table nothing could be ended, so nothing may start.
    process_table().map(drop).map_err(system("reading /proc"))
}

/// Starts the process that becomes the command; [`Tree::reap`] waits for it. The pipe tells why it could not; it is empty when it could.
fn start(request: &[OsString]) -> Result<(Pid, PipeReader), SuperviseError> {
    let (ours, theirs) = io::pipe().map_err(system("making a pipe"))?;
    let child = Command::new(THIS_PROGRAM)
        .arg0("hames")
        .arg(EXEC)
        .arg(getpid().as_raw_nonzero().to_string())
        .args(request)
        .stdin(Stdio::from(theirs))
        .spawn()
        .map_err(system("starting the process of the command"))?;
    Ok((Pid::from_child(&child), ours))
}

/// What the server said.
enum Word {
    /// Nothing yet.
    Nothing,
    /// Stop politely.
    Stop,
    /// It is gone.
    Gone,
}

/// Waits for the server, for the end of the command, or for the time to pass.
fn wait_for_word(control: &UnixStream, leader_end: Option<&OwnedFd>, wait: Duration) -> Result<Word, SuperviseError> {
    let mut fds = vec![PollFd::new(control, PollFlags::IN)];
    fds.extend(leader_end.map(|fd| PollFd::new(fd, PollFlags::IN)));
    pause(&mut fds, wait)?;
    if fds.first().is_none_or(|fd| fd.revents().is_empty()) {
        return Ok(Word::Nothing);
    }
    match (&mut &*control).read(&mut [0; 64]) {
        Ok(0) => Ok(Word::Gone),
        Ok(_) => Ok(Word::Stop),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Word::Nothing),
        // A connection that was reset has nobody at the other end.
        Err(_) => Ok(Word::Gone),
    }
}

/// Sleeps until something can be read, a signal comes, or the time has passed.
fn pause(fds: &mut [PollFd<'_>], wait: Duration) -> Result<(), SuperviseError> {
    let timeout = Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(system("poll")(error)),
    }
}

/// Turns what is known of the command into the report.
fn exec_result(
    exec_error: &mut PipeReader,
    status: Option<WaitStatus>,
    left_behind: usize,
) -> Result<Report, SuperviseError> {
    // Everybody who could hold the other end is dead, so this does not block.
    let mut reason = String::new();
    exec_error.read_to_string(&mut reason).map_err(system("reading why the command did not start"))?;
    if !reason.is_empty() {
        return Ok(Report::NotStarted { reason });
    }
    match status.map(|status| (status.exit_status(), status.terminating_signal())) {
        Some((Some(code), _)) => Ok(Report::Exited { code, left_behind }),
        Some((None, Some(signal))) => Ok(Report::Signalled { signal, left_behind }),
        Some((None, None)) | None => {
            let source = io::Error::other("the kernel reported neither an exit code nor a signal");
            Err(SuperviseError::System { what: "waiting for the command", source })
        }
    }
}

/// The processes below this one.
struct Tree {
    leader: Pid,
    status: Option<WaitStatus>,
}

impl Tree {
    /// Takes the status of every child that has ended. Returns whether any child is left; as this process is
    /// the subreaper, no child means no descendant.
    fn reap(&mut self) -> Result<bool, SuperviseError> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.leader => self.status = Some(status),
                Ok(Some(_)) => {}
                Ok(None) => return Ok(true),
                Err(Errno::CHILD) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(system("waiting for a process")(error)),
            }
        }
    }

    /// Kills whoever is left, again and again until nobody is. It never gives up: the server, which
    /// waits only so long, then says that something is still running.
    fn kill(&mut self) -> Result<(), SuperviseError> {
        let mut has_told = false;
        while self.reap()? {
            // A look that fails is taken again; the reason is told once.
            if let Err(error) = signal_descendants(Signal::KILL)
                && !std::mem::replace(&mut has_told, true)
            {
                failed(&error);
            }
            pause(&mut [], LOOK)?;
        }
        Ok(())
    }
}

/// Why a process could not become the command. The supervisor passes the text on.
#[derive(Debug, thiserror::Error)]
enum ExecError {
    #[error("`{EXEC}` is for hames itself")]
    Arguments,
    #[error("the supervisor died")]
    Orphan,
    #[error("{what} failed: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("the working directory {} cannot be entered: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("{} does not exist, or it is a script and the interpreter in its first line does not", .0.display())]
    Missing(PathBuf),
    #[error("{} is not executable: permission denied", .0.display())]
    NotAllowed(PathBuf),
    #[error("{} could not be executed: {source}", path.display())]
    Other { path: PathBuf, source: io::Error },
}

/// Turns this process into the command. Returns only if that fails.
fn become_command(args: Vec<OsString>) -> ExitCode {
    // A duplicate that closes by itself when the program changes: its end without a word is success.
    let told = io::stdin().as_fd().try_clone_to_owned().and_then(|pipe| {
        let error = match exec(&args) {
            Ok(never) => match never {},
            Err(error) => error,
        };
        let mut pipe = io::PipeWriter::from(pipe);
        pipe.write_all(error.to_string().as_bytes())
    });
    if let Err(error) = told {
        return failed(&error);
    }
    ExitCode::from(127)
}

/// Applies the limits of a command, then executes it.
fn exec(args: &[OsString]) -> Result<std::convert::Infallible, ExecError> {
    let [supervisor, directory, program, args @ ..] = args else { return Err(ExecError::Arguments) };
    let supervisor = std::str::from_utf8(supervisor.as_bytes()).ok().and_then(|pid| pid.parse().ok());
    let supervisor = supervisor.and_then(Pid::from_raw).ok_or(ExecError::Arguments)?;
    let called = |what| move |error: Errno| ExecError::System { what, source: error.into() };

    set_parent_process_death_signal(Some(Signal::KILL)).map_err(called("setting the parent-death signal"))?;
    // If the supervisor died before that took effect, no signal will come.
    if getppid() != Some(supervisor) {
        return Err(ExecError::Orphan);
    }
    setsid().map_err(called("setsid"))?;
    umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(called("setrlimit"))?;
    set_no_new_privs(true).map_err(called("setting no_new_privs"))?;
    std::env::set_current_dir(directory).map_err(|source| ExecError::Directory { path: directory.into(), source })?;

    // As with execvp(3), a script without `#!` is read by /bin/sh; the arguments still pass no shell.
    let source = Command::new(program).args(args).stdin(Stdio::null()).exec();
    Err(exec_error(program, source))
}

/// Words for the ways in which execve(2) fails.
fn exec_error(program: &OsStr, source: io::Error) -> ExecError {
    let path = PathBuf::from(program);
    match source.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => ExecError::Missing(path),
        Some(Errno::ACCESS) => ExecError::NotAllowed(path),
        Some(_) | None => ExecError::Other { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_arguments_are_left_alone() {
        for args in [&["hames"][..], &["hames", "serve"], &["hames", "serve", "__supervise"], &[]] {
            assert!(run_if_requested(args.iter().map(Into::into)).is_none(), "{args:?}");
        }
    }

    #[test]
    fn reports_survive_the_wire() {
        let report = Report::Signalled { signal: 9, left_behind: 2 };
        let line = serde_json::to_string(&report).unwrap();
        assert_eq!(line, r#"{"signalled":{"signal":9,"left_behind":2}}"#);
        assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
    }
}
