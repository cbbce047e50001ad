//! Postgres goes away under load and comes back: no run is lost, and none fails of it.

use std::time::Duration;

use clap::Args as ClapArgs;
use tokio::time::{Instant, sleep};

use super::{Figures, conclude};
use crate::check::{Invariant, Violation};
use crate::dice::Dice;
use crate::load::{Flow, Load};
use crate::report::Report;
use crate::sandbox::{Sandbox, Store};

/// Most time until runs move again once the database is back.
const MOVES: Duration = Duration::from_secs(5);
/// How often it is looked whether they do.
const LOOK: Duration = Duration::from_millis(50);

/// One outage.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// How long Postgres stays away, in seconds.
    #[arg(long, default_value_t = 60)]
    pub(crate) seconds: u64,
    /// Runs at the same time.
    #[arg(long, default_value_t = 50)]
    pub(crate) live: usize,
}

/// Many restarts, then one outage.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct RestartArgs {
    /// How many restarts.
    #[arg(long, default_value_t = 30)]
    pub(crate) restarts: usize,
    /// Least and most time between two of them, in seconds.
    #[arg(long, default_values_t = [5, 40], num_args = 2)]
    pub(crate) between: Vec<u64>,
    /// How long the outage at the end lasts, in seconds.
    #[arg(long, default_value_t = 60)]
    pub(crate) outage: u64,
    /// What the moments follow from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Runs at the same time.
    #[arg(long, default_value_t = 50)]
    pub(crate) live: usize,
}

/// One outage.
pub(crate) async fn once(args: &Args, report: &mut Report) {
    let restarts = RestartArgs { restarts: 0, between: vec![1, 2], outage: args.seconds, seed: 1, live: args.live };
    let again = format!("outage --seconds {} --live {}", args.seconds, args.live);
    go(&restarts, &format!("outage {} s", args.seconds), &again, report).await;
}

/// Many restarts, then one outage.
pub(crate) async fn restarts(args: &RestartArgs, report: &mut Report) {
    let again = format!(
        "pg-restart --restarts {} --between {} {} --outage {} --seed {} --live {}",
        args.restarts, args.between[0], args.between[1], args.outage, args.seed, args.live
    );
    go(args, &format!("pg-restart seed {}", args.seed), &again, report).await;
}

async fn go(args: &RestartArgs, name: &str, again: &str, report: &mut Report) {
    let began = Instant::now();
    let mut sandbox = Sandbox::new(&Store::OwnPostgres).await;
    sandbox.server.start_well().await;
    let flow = Flow {
        name: format!("p{}", args.seed),
        runs: args.live,
        live: args.live,
        delay: Duration::from_millis(5),
        until: Instant::now() + Duration::from_secs(3_600),
    };
    let load = Load::start(sandbox.client(), flow);
    let mut dice = Dice::new(args.seed);
    let (mut violations, mut slowest) = (Vec::new(), Duration::ZERO);
    for number in 0..=args.restarts {
        let wait = dice.within(args.between[0] * 1_000..args.between[1] * 1_000);
        sleep(Duration::from_millis(wait)).await;
        let mode = if dice.within(0..2) == 0 { "fast" } else { "immediate" };
        let postgres = sandbox.postgres.as_ref().unwrap();
        postgres.stop(mode);
        if number == args.restarts {
            sleep(Duration::from_secs(args.outage)).await;
        }
        postgres.begin();
        let (back, ended) = (Instant::now(), load.ended());
        while load.ended() == ended && back.elapsed() < MOVES * 2 {
            sleep(LOOK).await;
        }
        slowest = slowest.max(back.elapsed());
        if back.elapsed() > MOVES {
            let shown = format!("no run moved for {:?} after Postgres was back ({mode}, {number})", back.elapsed());
            violations.push(Violation { invariant: Invariant::I10, shown });
        }
        assert!(sandbox.server.ended().is_none(), "the server ended in an outage: {}", sandbox.server.log_end());
        sandbox.note_generations();
    }
    let log = load.finish().await;
    let mut figures: Figures = vec![
        ("restarts", args.restarts.to_string()),
        ("outage", format!("{} s", args.outage)),
        ("moves after", format!("{} ms", slowest.as_millis())),
    ];
    violations.extend(conclude(&sandbox, log, &mut figures).await);
    figures.push(("took", format!("{} s", began.elapsed().as_secs())));
    report.add(name, &figures, &violations, again);
}
