//! The checker is worth something only when it finds what is broken: servers with a bug, each of which has to be found.

use clap::Args as ClapArgs;

use super::{kill, pause};
use crate::check::{Invariant, Violation};
use crate::report::Report;
use crate::sandbox::Store;

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// These bugs only.
    #[arg(long, value_delimiter = ',')]
    pub(crate) bugs: Vec<String>,
    /// sqlite, postgres (an instance of its own) or postgres:URL.
    #[arg(long, default_value = "sqlite")]
    pub(crate) store: Store,
}

/// What shows a bug.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// So many kills; none where plain runs are enough.
    Kills(usize),
    /// A pause, on Postgres.
    Pause,
}

use Fault::{Kills, Pause};

/// A bug, the guarantees it breaks (one of them has to be named), and what shows it.
const BUGS: [(&str, &[Invariant], Fault); 12] = [
    ("lose_run", &[Invariant::I1], Kills(0)),
    ("publish_before_commit", &[Invariant::I5], Kills(4)),
    ("intent_after_start", &[Invariant::I5, Invariant::I6], Kills(6)),
    ("forget_outcome", &[Invariant::I7], Kills(0)),
    ("two_outcomes", &[Invariant::I7], Kills(0)),
    ("double_end", &[Invariant::I3], Kills(0)),
    ("late_event", &[Invariant::I3], Kills(0)),
    ("drop_event", &[Invariant::I9], Kills(0)),
    ("renumber", &[Invariant::I5], Kills(0)),
    ("resume_off_by_one", &[Invariant::I5], Kills(4)),
    ("usage_twice", &[Invariant::I9], Kills(0)),
    ("no_fence", &[Invariant::I3, Invariant::I7, Invariant::I8], Pause),
];

/// Does it and reports.
pub(crate) async fn run(args: &Args, report: &mut Report) {
    if !cfg!(feature = "failpoints") {
        panic!("`prove` needs the feature `failpoints`");
    }
    let wanted = |bug: &str| args.bugs.is_empty() || args.bugs.iter().any(|wanted| wanted == bug);
    for (bug, broken, fault) in BUGS.into_iter().filter(|(bug, ..)| wanted(bug)) {
        let found = observe(bug, fault, &args.store).await;
        let example = found.iter().find(|violation| broken.contains(&violation.invariant));
        let mut names: Vec<String> = found.iter().map(|violation| format!("{:?}", violation.invariant)).collect();
        names.sort();
        names.dedup();
        let figures = [("violations", found.len().to_string()), ("of", names.join(" "))];
        if let Some(example) = example {
            println!("  {}", example.to_string().chars().take(300).collect::<String>());
        }
        let missed = Violation { invariant: broken[0], shown: format!("the server with {bug} was not found out") };
        let missed: Vec<Violation> = example.is_none().then_some(missed).into_iter().collect();
        report.add(&format!("prove {bug}"), &figures, &missed, &format!("prove --bugs {bug}"));
    }
}

/// What the checker finds of a server with a bug.
async fn observe(bug: &str, fault: Fault, store: &Store) -> Vec<Violation> {
    let bug = Some(bug.to_owned());
    let kills = match fault {
        Kills(kills) => kills,
        Pause => return pause::observe(&pause::Args { rounds: 1, live: 20, seed: 1, bug }).await.1,
    };
    let (runs, live) = if kills == 0 { (12, 12) } else { (20, 20) };
    let args = kill::Args {
        runs,
        kills,
        live,
        seed: 1,
        store: store.clone(),
        between_ms: vec![250, 900],
        delay_ms: 10,
        bug,
        patience: 6,
        keep: false,
    };
    kill::observe(&args).await.1
}
