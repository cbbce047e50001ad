//! Experiments that hold hames to its guarantees while processes die: `make chaos`, `make chaos-short`.
//!
//! Four kinds of processes on loopback: the server, under faults; a scripted model, in this program; a ledger, this
//! program started again as the executable of the commands, which writes down that a call has started before it does
//! anything else; and clients, which log every answer and every frame they get. After an experiment the checker
//! reads all of it, and what the server tells, and names every guarantee that does not hold ([`check`]).

#![expect(clippy::panic, clippy::unwrap_used, reason = "an experiment that cannot go on stops")]
#![expect(clippy::disallowed_methods, reason = "tasks end with the program, and faults come in real time")]

mod check;
mod client;
mod dice;
mod evidence;
mod experiment;
mod ledger;
mod load;
mod model;
mod postgres;
mod report;
mod sandbox;
mod server;
mod sse;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use report::Report;

/// Experiments with a server whose processes die.
#[derive(Parser)]
#[command(name = "chaos")]
struct Args {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Subcommand)]
enum Experiment {
    /// The checker finds each hand-made violation, and none where there is none.
    Checker,
    /// SIGKILL at random moments under load. Without kills it is a plain load.
    Kill(experiment::kill::Args),
    /// The process aborts at every commit of a run, before and after.
    Commits(experiment::commits::Args),
    /// SIGTERM again and again under load.
    Sigterm(experiment::sigterm::Args),
    /// One outage of Postgres under load.
    Outage(experiment::outage::Args),
    /// Postgres is restarted again and again under load, then stays away for a while.
    PgRestart(experiment::outage::RestartArgs),
    /// A server is paused for longer than its lease, another one takes over, and it wakes among runs of the other.
    Pause(experiment::pause::Args),
    /// Each server that is broken on purpose is found out.
    Prove(experiment::prove::Args),
    /// A short form of the others.
    Short(experiment::short::Args),
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    // Before anything else: what the ledger does first is its entry.
    if args.get(1).is_some_and(|arg| arg == "ledger") {
        return ledger::enter(&args[2..]);
    }
    let Args { experiment } = Args::parse();
    rustls::crypto::ring::default_provider().install_default().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let mut report = Report::default();
    runtime.block_on(async {
        match experiment {
            Experiment::Checker => check::samples::prove(&mut report),
            Experiment::Kill(args) => drop(experiment::kill::run(&args, &mut report).await),
            Experiment::Commits(args) => experiment::commits::run(&args, &mut report).await,
            Experiment::Sigterm(args) => experiment::sigterm::run(&args, &mut report).await,
            Experiment::Outage(args) => experiment::outage::once(&args, &mut report).await,
            Experiment::PgRestart(args) => experiment::outage::restarts(&args, &mut report).await,
            Experiment::Pause(args) => experiment::pause::run(&args, &mut report).await,
            Experiment::Prove(args) => experiment::prove::run(&args, &mut report).await,
            Experiment::Short(args) => experiment::short::run(&args, &mut report).await,
        }
    });
    report.close()
}
