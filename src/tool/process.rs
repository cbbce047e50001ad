//! The process table of the system: finds everybody below a process, or with certain variables, and signals them.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

/// A row of the process table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pid: i32,
    parent: i32,
    is_dead: bool,
    /// In clock ticks since boot; tells a process from an earlier one of the same number.
    started: u64,
}

impl Process {
    /// Reads `/proc/PID/stat`: the name stands in parentheses and may itself hold any byte.
    /// Source: proc_pid_stat(5), fields 3 (state), 4 (ppid) and 22 (starttime).
    fn parse(pid: i32, stat: &[u8]) -> Option<Self> {
        let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
        let mut fields = std::str::from_utf8(stat.get(after_name..)?).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let started = fields.nth(17)?.parse().ok()?;
        Some(Self { pid, parent, is_dead: matches!(state, "Z" | "X"), started })
    }

    /// The process with this number, if there is one.
    fn find(pid: i32) -> Option<Self> {
        // A process may end between two looks; that is no error.
        Self::parse(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }
}

/// Sends a signal to every living descendant of this process; see [`signal_below`].
pub(super) fn signal_descendants(signal: Signal) -> io::Result<usize> {
    signal_below(getpid().as_raw_nonzero().get(), signal)
}

/// Sends a signal to every living descendant of a process and returns how many there were. Processes that start
/// meanwhile are missed: callers repeat until nobody is left.
pub(super) fn signal_below(root: i32, signal: Signal) -> io::Result<usize> {
    let mut found = 0;
    for process in descendants(&process_table()?, root) {
        if !process.is_dead && send(process, signal) {
            found += 1;
        }
    }
    Ok(found)
}

/// The variables that every process of a call carries from its start.
#[derive(Clone, Debug)]
pub(super) struct Marks([(&'static str, String); 2]);

impl Marks {
    /// The marks of a call. Its id comes from a model's provider; a variable cannot hold NUL.
    pub(super) fn new(run: &str, call: &str) -> Self {
        Self([("HAMES_RUN_ID", run.to_owned()), ("HAMES_CALL_ID", call.replace('\0', "\u{fffd}"))])
    }

    /// As the environment of a process has them.
    pub(super) fn variables(&self) -> [(OsString, OsString); 2] {
        self.0.clone().map(|(name, value)| (name.into(), value.into()))
    }

    /// Whether a process with this environment, as `/proc/PID/environ` has it, is of the call.
    fn are_in(&self, environ: &[u8]) -> bool {
        self.0.iter().all(|(name, value)| {
            let mark = format!("{name}={value}");
            environ.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
        })
    }
}

/// Kills every living process that carries the marks, but not this one, and returns how many there were. One that has
/// changed its environment is missed, and one whose environment may not be read: another user's, or one that hides it.
pub(super) fn kill_marked(marks: &Marks) -> io::Result<usize> {
    let own = getpid().as_raw_nonzero().get();
    // A process may end between two looks; that is no error.
    let is_marked =
        |pid: i32| std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environ| marks.are_in(&environ));
    let mut found = 0;
    // One after the other: what was listed long before it is looked at may have forked and be gone.
    for process in processes()? {
        let process = process?;
        if process.pid != own && !process.is_dead && is_marked(process.pid) && send(process, Signal::KILL) {
            found += 1;
        }
    }
    Ok(found)
}

/// Every process that can be seen.
pub(super) fn process_table() -> io::Result<Vec<Process>> {
    processes()?.collect()
}

/// Every process that can be seen, read as the iterator goes.
fn processes() -> io::Result<impl Iterator<Item = io::Result<Process>>> {
    Ok(std::fs::read_dir("/proc")?.filter_map(|entry| match entry {
        Ok(entry) => entry.file_name().to_str()?.parse().ok().and_then(Process::find).map(Ok),
        Err(error) => Some(Err(error)),
    }))
}

/// Everybody below `root`, parents before children.
fn descendants(table: &[Process], root: i32) -> Vec<Process> {
    let mut children = HashMap::<i32, Vec<Process>>::new();
    for process in table {
        children.entry(process.parent).or_default().push(*process);
    }
    let mut found = children.remove(&root).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let below = children.remove(&process.pid).unwrap_or_default();
        found.extend(below);
        next += 1;
    }
    found
}

/// Signals exactly this process: its number may have gone to another one, so it is pinned, looked at again, and
/// then signalled. Returns whether another look is needed: not when the system refuses the signal; but when the process
/// is gone already, since it may have forked before.
fn send(process: Process, signal: Signal) -> bool {
    let Some(pid) = Pid::from_raw(process.pid) else { return false };
    let pinned = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pinned) => pinned,
        Err(error) => return error == Errno::SRCH,
    };
    let is_same = Process::find(process.pid).is_some_and(|now| now.started == process.started);
    !is_same || pidfd_send_signal(pinned, signal).map_or_else(|error| error == Errno::SRCH, |()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32) -> Process {
        Process { pid, parent, is_dead: false, started: 1 }
    }

    #[test]
    fn stat_is_read_past_any_name() {
        let stat = b"7 (a) S 9 (b) Z 3 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 2 3";
        assert_eq!(Process::parse(7, stat), Some(Process { pid: 7, parent: 3, is_dead: true, started: 12345 }));
        for bad in [b"".as_slice(), b"7 (a", b"7 (a) S", b"7 (a) S x", b"7 (\xff) S 3 7"] {
            assert_eq!(Process::parse(7, bad), None, "{bad:?}");
        }
        let own = Process::find(std::process::id().cast_signed()).unwrap();
        assert_eq!(Some(own.parent), rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()));
    }

    #[test]
    fn one_that_is_gone_when_it_is_signalled_calls_for_another_look() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let seen = Process::find(child.id().cast_signed()).unwrap();
        assert!(send(seen, Signal::KILL));
        child.wait().unwrap();
        assert!(send(seen, Signal::KILL));
        assert!(send(Process { started: 0, ..Process::find(getpid().as_raw_nonzero().get()).unwrap() }, Signal::KILL));
    }

    #[test]
    fn a_process_is_of_a_call_by_both_variables_and_wholly() {
        let marks = Marks::new("r", "a\0=b\nc");
        let environ = |call: &str| format!("PATH=/bin\0HAMES_RUN_ID=r\0HAMES_CALL_ID={call}\0");
        assert!(marks.are_in(environ("a\u{fffd}=b\nc").as_bytes()));
        for other in ["a\u{fffd}=b\nc2", "a", ""] {
            assert!(!marks.are_in(environ(other).as_bytes()), "{other}");
        }
        for other in ["", "HAMES_RUN_ID=r\0", "XHAMES_RUN_ID=r\0HAMES_CALL_ID=a\u{fffd}=b\nc\0"] {
            assert!(!marks.are_in(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn descendants_are_found_at_any_depth_and_no_one_else() {
        let table = [process(5, 4), process(2, 1), process(3, 2), process(9, 1), process(4, 3), process(6, 2)];
        let pids: Vec<i32> = descendants(&table, 2).iter().map(|process| process.pid).collect();
        assert_eq!(pids, [3, 6, 4, 5]);
        assert_eq!(descendants(&table, 7), []);
    }
}
