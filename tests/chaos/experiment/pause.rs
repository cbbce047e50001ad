//! A server is stopped in the middle of what it does, for longer than its lease; another one takes its runs over; then
//! the first one wakes and goes on with what it takes for its own. Nothing of that may be stored.

use std::time::Duration;

use clap::Args as ClapArgs;
use tokio::time::{Instant, sleep};

use super::{Figures, PATIENCE, conclude_within};
use crate::check::Violation;
use crate::dice::Dice;
use crate::load::{Flow, Load};
use crate::report::Report;
use crate::sandbox::{Sandbox, Store};

/// Time until the other server has taken everything over: the lease of 10 s, and a look at it each second.
const TAKEN_OVER: Duration = Duration::from_secs(13);
/// How long the first one is awake among what is no longer its own.
const AWAKE: Duration = Duration::from_secs(3);

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// How many pauses.
    #[arg(long, default_value_t = 10)]
    pub(crate) rounds: usize,
    /// Runs at the same time.
    #[arg(long, default_value_t = 50)]
    pub(crate) live: usize,
    /// What the moments follow from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// A bug that the servers are started with; needs the feature `failpoints`.
    #[arg(long)]
    pub(crate) bug: Option<String>,
}

/// Does it and reports.
pub(crate) async fn run(args: &Args, report: &mut Report) {
    let (figures, violations) = observe(args).await;
    let again = format!("pause --rounds {} --live {} --seed {}", args.rounds, args.live, args.seed);
    report.add(&format!("pause seed {}", args.seed), &figures, &violations, &again);
}

/// Does it and says what was seen.
pub(crate) async fn observe(args: &Args) -> (Figures, Vec<Violation>) {
    let began = Instant::now();
    let mut sandbox = Sandbox::new(&Store::OwnPostgres).await;
    let variables: Vec<(&str, &str)> = args.bug.iter().map(|bug| ("HAMES_BUG", bug.as_str())).collect();
    sandbox.server.start(&variables).await;
    let client = sandbox.client();
    let flow = Flow {
        name: format!("s{}", args.seed),
        runs: args.live,
        live: args.live,
        // So that runs are still at work with the other server when the first one wakes.
        delay: Duration::from_millis(150),
        until: Instant::now() + Duration::from_secs(1_800),
    };
    let load = Load::start(client.clone(), flow);
    let mut dice = Dice::new(args.seed);
    for _ in 0..args.rounds {
        sleep(Duration::from_millis(dice.within(500..2_000))).await;
        let mut other = sandbox.server.beside();
        sandbox.server.pause();
        other.start(&variables).await;
        assert!(other.ended().is_none(), "the other server does not start: {}", other.log_end());
        client.turn_to(other.address);
        sleep(TAKEN_OVER).await;
        sandbox.note_generations();
        sandbox.server.go_on();
        sleep(AWAKE).await;
        // The readers that it left without a word since go to the other one.
        sandbox.server.kill();
        sandbox.server = other;
        sandbox.note_generations();
    }
    let log = load.finish().await;
    let mut figures: Figures = vec![("pauses", args.rounds.to_string())];
    // What a server without a fence has broken may never end.
    let patience = if args.bug.is_some() { Duration::from_secs(10) } else { PATIENCE };
    let violations = conclude_within(patience, &sandbox, log, &mut figures).await;
    figures.push(("took", format!("{} s", began.elapsed().as_secs())));
    (figures, violations)
}
