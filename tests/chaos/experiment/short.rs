//! A short form of the experiments, for every change.

use clap::Args as ClapArgs;

use super::{commits, kill, sigterm};
use crate::check::samples;
use crate::report::Report;
use crate::sandbox::Store;

/// What to do.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// The stores.
    #[arg(long, value_delimiter = ',', default_values_t = [Store::Sqlite, Store::OwnPostgres])]
    pub(crate) stores: Vec<Store>,
    /// What the moments follow from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Does all of it.
pub(crate) async fn run(args: &Args, report: &mut Report) {
    samples::prove(report);
    for store in &args.stores {
        let store = store.clone();
        let kills = kill::Args {
            runs: 30,
            kills: 15,
            live: 12,
            seed: args.seed,
            store: store.clone(),
            // Long enough for a small and busy machine to get each run a step further.
            between_ms: vec![1_000, 2_000],
            delay_ms: 5,
            bug: None,
            patience: 120,
            keep: false,
        };
        kill::run(&kills, report).await;
        let signals = sigterm::Args { times: 2, live: 20, store: store.clone(), delay_ms: 20, between_ms: 1_500 };
        sigterm::run(&signals, report).await;
    }
    if cfg!(feature = "failpoints") {
        let every = commits::Args { store: Store::Sqlite, from: 1, stride: 1, to: None };
        commits::run(&every, report).await;
    }
}
