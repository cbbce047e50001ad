//! How a command ends, and the exit code that says so.

use std::process::ExitCode;

use crate::domain::RunStatusName;
use crate::shutdown::Signal;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// By itself.
    Code(Code),
    /// A signal that waits for nothing.
    Signal(Signal),
}

/// The exit codes. The help of `run` and `tail` is made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// As wished.
    Done = 0,
    /// hames could not do it.
    Failed = 1,
    /// The command line is wrong; clap's code.
    Usage = 2,
    /// The run stopped early.
    Early = 3,
    /// The run ended as `model_error`.
    ModelError = 4,
    /// The run ended as `internal_error`.
    InternalError = 5,
}

impl Code {
    const ALL: [Self; 6] = [Self::Done, Self::Failed, Self::Usage, Self::Early, Self::ModelError, Self::InternalError];

    const fn meaning(self) -> &'static str {
        match self {
            Self::Done => "the run completed",
            Self::Failed => "hames could not do it: settings, network, a refused request",
            Self::Usage => "the command line is wrong",
            Self::Early => "the run stopped early: a limit, its time, repeats, an abort",
            Self::ModelError => "the run ended as model_error",
            Self::InternalError => "the run ended as internal_error",
        }
    }

    /// The code for how a run ended.
    pub(super) const fn of(status: RunStatusName) -> Self {
        match status {
            RunStatusName::Completed => Self::Done,
            RunStatusName::StepLimit
            | RunStatusName::ToolLimit
            | RunStatusName::TokenLimit
            | RunStatusName::ContextLimit
            | RunStatusName::RepeatLimit
            | RunStatusName::Timeout
            | RunStatusName::Aborted => Self::Early,
            RunStatusName::ModelError => Self::ModelError,
            RunStatusName::InternalError | RunStatusName::Queued | RunStatusName::Running | RunStatusName::Waiting => {
                Self::InternalError
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Code(code) => Self::from(code as u8),
            Exit::Signal(signal) => Self::from(signal.exit_code()),
        }
    }
}

/// The table, as it stands below the help of a command that shows a run.
pub(super) fn table() -> String {
    let lines = Code::ALL.map(|code| format!("  {:<5} {}\n", code as u8, code.meaning()));
    format!("Exit codes:\n{}  128+N signal N ended hames (130 Ctrl-C, 143 SIGTERM)", lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_holds_every_code_once() {
        let expected = "Exit codes:\n  \
            0     the run completed\n  \
            1     hames could not do it: settings, network, a refused request\n  \
            2     the command line is wrong\n  \
            3     the run stopped early: a limit, its time, repeats, an abort\n  \
            4     the run ended as model_error\n  \
            5     the run ended as internal_error\n  \
            128+N signal N ended hames (130 Ctrl-C, 143 SIGTERM)";
        assert_eq!(table(), expected);
        for signal in [Signal::Interrupt, Signal::Terminate] {
            assert!(expected.contains(&format!("{} ", signal.exit_code())));
        }
    }
}
