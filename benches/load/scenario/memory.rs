use super::request;
use crate::figure::{Report, Samples};
use crate::model::Model;
use crate::server::{Kind, Server, settle};

/// Runs that are held at the same time.
const RUNS: usize = 2_000;
const ROUNDS: usize = 3;

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut figures: [Samples; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (at, kind) in Kind::BOTH.into_iter().enumerate() {
            let server = Server::start_with(kind, model, "[run]\nmax_concurrent = 10000");
            let mut client = server.client().await;
            let run = client.create(&request("tool")).await;
            client.follow(&run).await.finish().await;
            settle().await;
            let before = server.resident_bytes();
            for _ in 0..RUNS {
                client.create(&request("hold")).await;
            }
            model.open_streams(RUNS).await;
            settle().await;
            let kib = (server.resident_bytes() - before) / 1024.0 / RUNS as f64;
            println!("  {}: {before:.0} bytes at rest, {kib:.1} KiB for each of {RUNS} runs", kind.name());
            figures[at].push(kib);
            drop(server);
            model.open_streams(0).await;
        }
    }
    let [mut floor, mut hames] = figures;
    report.at_most("memory of a run that waits for its model, KiB", hames.median(), 80.0, Some(floor.median()));
}
