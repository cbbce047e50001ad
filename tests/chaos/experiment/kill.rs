//! SIGKILL at random moments while a steady stream of runs is at work.

use std::time::Duration;

use clap::Args as ClapArgs;
use tokio::time::{Instant, sleep};

use super::{Figures, PATIENCE, conclude_within};
use crate::check::Violation;
use crate::dice::Dice;
use crate::load::{Flow, Load};
use crate::report::Report;
use crate::sandbox::{Sandbox, Store};

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// Runs in all, at least: the stream flows until the last kill.
    #[arg(long, default_value_t = 200)]
    pub(crate) runs: usize,
    /// How many times the server is killed.
    #[arg(long, default_value_t = 500)]
    pub(crate) kills: usize,
    /// Runs at the same time.
    #[arg(long, default_value_t = 50)]
    pub(crate) live: usize,
    /// What the moments follow from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// sqlite, postgres (an instance of its own) or postgres:URL.
    #[arg(long, default_value = "sqlite")]
    pub(crate) store: Store,
    /// The least time between two kills, and the most, in milliseconds. A run that gets no further in five such times, in
    /// three of them apart from others, is taken for one that ends processes.
    #[arg(long, num_args = 2, default_values_t = [250, 900])]
    pub(crate) between_ms: Vec<u64>,
    /// How long the model waits before each piece, in milliseconds.
    #[arg(long, default_value_t = 5)]
    pub(crate) delay_ms: u64,
    /// A bug that the server is started with; needs the feature `failpoints`.
    #[arg(long)]
    pub(crate) bug: Option<String>,
    /// When clients give up, in seconds.
    #[arg(long, default_value_t = 1_800)]
    pub(crate) patience: u64,
    /// Leaves database, ledger and log behind.
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Does it and reports; the violations are also handed back.
pub(crate) async fn run(args: &Args, report: &mut Report) -> Vec<Violation> {
    let (figures, violations) = observe(args).await;
    let again = format!(
        "kill --runs {} --kills {} --live {} --seed {} --store {} --delay-ms {} --between-ms {} {}",
        args.runs, args.kills, args.live, args.seed, args.store, args.delay_ms, args.between_ms[0], args.between_ms[1]
    );
    report.add(&format!("kill {} seed {}", args.store, args.seed), &figures, &violations, &again);
    violations
}

/// Does it and says what was seen.
pub(crate) async fn observe(args: &Args) -> (Figures, Vec<Violation>) {
    let began = Instant::now();
    let mut sandbox = Sandbox::new(&args.store).await;
    let variables: Vec<(&str, &str)> = args.bug.iter().map(|bug| ("HAMES_BUG", bug.as_str())).collect();
    assert!(variables.is_empty() || cfg!(feature = "failpoints"), "a bug needs the feature `failpoints`");
    sandbox.server.start(&variables).await;
    assert!(sandbox.server.ended().is_none(), "the server does not start: {}", sandbox.server.log_end());
    let flow = Flow {
        name: format!("k{}", args.seed),
        runs: args.runs,
        live: args.live,
        delay: Duration::from_millis(args.delay_ms),
        until: Instant::now() + Duration::from_secs(args.patience),
    };
    let load = Load::start(sandbox.client(), flow);
    let mut dice = Dice::new(args.seed);
    for _ in 0..args.kills {
        sleep(Duration::from_millis(dice.within(args.between_ms[0]..args.between_ms[1]))).await;
        sandbox.server.kill();
        sandbox.note_generations();
        sandbox.server.start(&variables).await;
        assert!(sandbox.server.ended().is_none(), "the server does not start: {}", sandbox.server.log_end());
    }
    let ended_under_fire = load.ended();
    let log = load.finish().await;
    let mut figures: Figures = vec![
        ("kills", args.kills.to_string()),
        ("ended under fire", ended_under_fire.to_string()),
        ("slowest start", format!("{} ms", sandbox.server.slowest_start.as_millis())),
    ];
    let patience = PATIENCE.min(Duration::from_secs(args.patience));
    let violations = conclude_within(patience, &sandbox, log, &mut figures).await;
    figures.push(("took", format!("{} s", began.elapsed().as_secs())));
    if args.keep {
        println!("left behind: {}", sandbox.keep().display());
    }
    (figures, violations)
}
