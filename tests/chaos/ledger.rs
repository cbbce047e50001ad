//! The ledger of side effects: a line for every call that began, on the disk before the call does anything.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// One call that began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) call: String,
    pub(crate) run: String,
    /// `side_effect`, `idempotent` or `read_only`.
    pub(crate) effect: String,
    /// The generation of the worker that started it, where the environment says so.
    pub(crate) generation: Option<u64>,
}

/// The program of a command: `ledger FILE EFFECT MILLISECONDS`.
pub(crate) fn enter(args: &[String]) -> ExitCode {
    let [file, effect, pause] = args else {
        eprintln!("usage: chaos ledger FILE EFFECT MILLISECONDS, not {args:?}");
        return ExitCode::from(2);
    };
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| "-".to_owned());
    let (call, run, generation) = (variable("HAMES_CALL_ID"), variable("HAMES_RUN_ID"), variable("HAMES_GENERATION"));
    let mut ledger = OpenOptions::new().append(true).create(true).open(file).unwrap();
    // One write: lines of processes that append at the same time do not mix.
    ledger.write_all(format!("{call} {run} {effect} {generation}\n").as_bytes()).unwrap();
    ledger.sync_all().unwrap();
    std::thread::sleep(Duration::from_millis(pause.parse().unwrap()));
    println!("did {effect} for {call}");
    ExitCode::SUCCESS
}

/// All entries, in order.
pub(crate) fn read(file: &Path) -> Vec<Start> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let lines = text.lines().map(|line| {
        let [call, run, effect, generation] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{}: `{line}` is not `CALL RUN EFFECT GENERATION`", file.display());
        };
        let [call, run, effect] = [call, run, effect].map(str::to_owned);
        Start { call, run, effect, generation: generation.parse().ok() }
    });
    lines.collect()
}
