//! SIGTERM again and again while a steady stream of runs is at work: no run may fail of it.

use std::time::Duration;

use clap::Args as ClapArgs;
use tokio::time::{Instant, sleep};

use super::{Figures, conclude};
use crate::check::{Invariant, Violation};
use crate::load::{Flow, Load};
use crate::report::Report;
use crate::sandbox::{Sandbox, Store};

/// Most time from the signal to the end.
const EXIT: Duration = Duration::from_secs(30);

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// How many signals.
    #[arg(long, default_value_t = 20)]
    pub(crate) times: usize,
    /// Runs at the same time.
    #[arg(long, default_value_t = 50)]
    pub(crate) live: usize,
    /// sqlite, postgres (an instance of its own) or postgres:URL.
    #[arg(long, default_value = "sqlite")]
    pub(crate) store: Store,
    /// How long the model waits before each piece, in milliseconds.
    #[arg(long, default_value_t = 20)]
    pub(crate) delay_ms: u64,
    /// Time between a start and the next signal, in milliseconds.
    #[arg(long, default_value_t = 1_500)]
    pub(crate) between_ms: u64,
}

/// Does it and reports.
pub(crate) async fn run(args: &Args, report: &mut Report) {
    let began = Instant::now();
    let mut sandbox = Sandbox::new(&args.store).await;
    sandbox.server.start_well().await;
    let flow = Flow {
        name: "t".to_owned(),
        runs: args.live,
        live: args.live,
        delay: Duration::from_millis(args.delay_ms),
        until: Instant::now() + Duration::from_secs(1_800),
    };
    let load = Load::start(sandbox.client(), flow);
    let (mut violations, mut slowest) = (Vec::new(), Duration::ZERO);
    for number in 1..=args.times {
        sleep(Duration::from_millis(args.between_ms)).await;
        let (status, took) = sandbox.server.terminate(EXIT + Duration::from_secs(5)).await;
        slowest = slowest.max(took);
        if took > EXIT || status.is_none_or(|status| !status.success()) {
            let shown = format!(
                "after SIGTERM {number} the server ended with {status:?} after {took:?}, log: {}",
                sandbox.server.log_end()
            );
            violations.push(Violation { invariant: Invariant::I10, shown });
        }
        sandbox.note_generations();
        sandbox.server.start_well().await;
    }
    let log = load.finish().await;
    let mut figures: Figures =
        vec![("signals", args.times.to_string()), ("slowest exit", format!("{} ms", slowest.as_millis()))];
    violations.extend(conclude(&sandbox, log, &mut figures).await);
    figures.push(("took", format!("{} s", began.elapsed().as_secs())));
    let again = format!("sigterm --times {} --live {} --store {}", args.times, args.live, args.store);
    report.add(&format!("sigterm {}", args.store), &figures, &violations, &again);
}
