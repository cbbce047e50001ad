use tokio::task::JoinSet;

use super::request;
use crate::figure::{Report, Samples};
use crate::model::{Model, nanos};
use crate::server::{Kind, Server};

const STREAMS: usize = 64;
/// Words of each stream, and microseconds between them.
const WORDS: usize = 200;
const EVERY_US: usize = 20_000;

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut delays: [Samples; 2] = Default::default();
    for (at, kind) in Kind::BOTH.into_iter().enumerate() {
        let server = Server::start(kind, model);
        let cpu = server.cpu_seconds();
        let mut followers = JoinSet::new();
        for _ in 0..STREAMS {
            let mut client = server.client().await;
            followers.spawn(async move {
                let run = client.create(&request(&format!("paced.{WORDS}.{EVERY_US}"))).await;
                let mut follow = client.follow(&run).await;
                let mut delays = Samples::default();
                while let Some(bytes) = follow.next().await {
                    let now = nanos();
                    stamps(&bytes).for_each(|sent| delays.push(now.saturating_sub(sent) as f64 / 1e6));
                }
                delays
            });
        }
        while let Some(follower) = followers.join_next().await {
            delays[at].extend(follower.unwrap());
        }
        println!(
            "  {}: {} tokens seen, p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, {:.1} µs CPU per token",
            kind.name(),
            delays[at].len(),
            delays[at].median(),
            delays[at].quantile(0.99),
            delays[at].quantile(0.999),
            (server.cpu_seconds() - cpu) * 1e6 / (STREAMS * WORDS) as f64,
        );
    }
    let [mut floor, mut hames] = delays;
    report.at_most("delay of a token at 64 streams, p99, ms", hames.quantile(0.99), 3.0, Some(floor.quantile(0.99)));
}

/// When the words of a piece of a stream were sent. Durable events, which hold them all again, are left out.
pub(super) fn stamps(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    let fresh = text
        .split("\n\n")
        .filter(|frame| !["message", "run_end"].iter().any(|kind| frame.contains(&format!("event: {kind}"))));
    fresh.flat_map(|frame| frame.split('@').skip(1)).filter_map(|word| word.split_once(' ')?.0.parse().ok())
}
