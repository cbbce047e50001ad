use tokio::task::JoinSet;

use super::request;
use crate::figure::{Report, Samples};
use crate::model::{Model, nanos};
use crate::server::{Kind, Server};

const ROUNDS: usize = 3;
const STREAMS: usize = 64;
/// Words of each stream, and microseconds between them.
const WORDS: usize = 200;
const EVERY_US: usize = 20_000;

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut p99: [Samples; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (at, kind) in Kind::BOTH.into_iter().enumerate() {
            let server = Server::start(kind, model);
            let mut delays = Samples::default();
            let mut followers = JoinSet::new();
            model.open_gate(false);
            for _ in 0..STREAMS {
                let mut client = server.client().await;
                let run = client.create(&request(&format!("paced.{WORDS}.{EVERY_US}.0"))).await;
                let follow = client.follow(&run).await;
                followers.spawn(async move {
                    let mut delays = Samples::default();
                    follow.words(|sent| delays.push(nanos().saturating_sub(sent) as f64 / 1e6)).await;
                    drop(client);
                    delays
                });
            }
            let cpu = server.cpu_seconds();
            model.open_gate(true);
            while let Some(follower) = followers.join_next().await {
                delays.extend(follower.unwrap());
            }
            assert_eq!(delays.len(), STREAMS * WORDS, "every token is seen once");
            println!(
                "  {}: {} tokens, p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, {:.1} µs CPU per token",
                kind.name(),
                delays.len(),
                delays.median(),
                delays.quantile(0.99),
                delays.quantile(0.999),
                (server.cpu_seconds() - cpu) * 1e6 / delays.len() as f64,
            );
            p99[at].push(delays.quantile(0.99));
        }
    }
    let [mut floor, mut hames] = p99;
    report.at_most("delay of a token at 64 streams, p99, ms", hames.median(), 3.0, Some(floor.median()));
}
