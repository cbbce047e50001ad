//! The process aborts at the N-th commit of a run, before and after it, for every N.

use std::time::Duration;

use clap::Args as ClapArgs;
use tokio::time::{Instant, sleep};

use super::{Figures, conclude};
use crate::load::{Flow, Load};
use crate::report::Report;
use crate::sandbox::{Sandbox, Store};

/// How often the process is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// sqlite, postgres (an instance of its own) or postgres:URL.
    #[arg(long, default_value = "sqlite")]
    pub(crate) store: Store,
    /// The first commit.
    #[arg(long, default_value_t = 1)]
    pub(crate) from: u32,
    /// Every how manieth commit.
    #[arg(long, default_value_t = 1)]
    pub(crate) stride: u32,
    /// The last commit; without it, the last of the run.
    #[arg(long)]
    pub(crate) to: Option<u32>,
}

/// Does it and reports.
pub(crate) async fn run(args: &Args, report: &mut Report) {
    if !cfg!(feature = "failpoints") {
        panic!("`commits` needs the feature `failpoints`");
    }
    let began = Instant::now();
    let (mut crashes, mut violations, mut number) = (0, Vec::new(), args.from);
    let again = format!("commits --store {} --from {number} --to {number}", args.store);
    let mut failed = None;
    while args.to.is_none_or(|to| number <= to) {
        let mut fired = false;
        for side in ["before", "after"] {
            let (aborted, found) = crash_at(&args.store, &format!("commit:{side}:{number}")).await;
            fired |= aborted;
            crashes += u32::from(aborted);
            if !found.is_empty() {
                failed.get_or_insert(number);
                println!("  commit:{side}:{number}: {} violations", found.len());
            }
            violations.extend(found);
        }
        if !fired {
            break;
        }
        number += args.stride;
    }
    let figures: Figures = vec![
        ("crashes", crashes.to_string()),
        ("last commit", (number - 1).to_string()),
        ("took", format!("{} s", began.elapsed().as_secs())),
    ];
    let again = failed.map_or(again, |at| format!("commits --store {} --from {at} --to {at}", args.store));
    report.add(&format!("commits {}", args.store), &figures, &violations, &again);
}

/// One run whose server aborts there, and what does not hold afterwards. Whether it aborted.
async fn crash_at(store: &Store, point: &str) -> (bool, Vec<crate::check::Violation>) {
    let mut sandbox = Sandbox::new(store).await;
    sandbox.server.start(&[("HAMES_FAILPOINT", point)]).await;
    let mut aborted = sandbox.server.ended().is_some();
    if aborted {
        sandbox.server.start_well().await;
    }
    let until = Instant::now() + Duration::from_secs(60);
    let flow = Flow { name: "c".to_owned(), runs: 1, live: 1, delay: Duration::ZERO, until };
    let load = Load::start(sandbox.client(), flow);
    // One run is made whatever the flag says; it only must not be followed by another.
    let finishing = tokio::spawn(load.finish());
    while !finishing.is_finished() {
        if sandbox.server.ended().is_some() {
            aborted = true;
            sandbox.note_generations();
            sandbox.server.start_well().await;
        }
        sleep(LOOK).await;
    }
    // The commit may be the last one of the run.
    sleep(LOOK).await;
    if sandbox.server.ended().is_some() {
        aborted = true;
        sandbox.server.start_well().await;
    }
    let log = finishing.await.unwrap();
    // The rest of the experiment is without faults.
    sandbox.server.kill();
    sandbox.server.start_well().await;
    let violations = conclude(&sandbox, log, &mut Figures::new()).await;
    (aborted, violations)
}
