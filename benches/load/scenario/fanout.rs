use bytes::Bytes;
use hyper::Method;
use tokio::task::JoinSet;

use super::request;
use super::tokens::stamps;
use crate::client::Client;
use crate::figure::{Report, Samples};
use crate::model::{Model, nanos};
use crate::server::{Kind, Server};

/// Readers of a crowd, and how many of them stop reading.
struct Crowd {
    runs: usize,
    readers: usize,
    stalled: usize,
    /// Words of a run, and microseconds between them.
    words: usize,
    every_us: usize,
}

/// What a crowd saw.
struct Seen {
    delays: Samples,
    cpu_us_per_token: f64,
}

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let one = Crowd { runs: 1, readers: 1_000, stalled: 0, words: 100, every_us: 50_000 };
    let mut floor = watch(Kind::Floor, model, &one).await;
    let mut alone = watch(Kind::Hames, model, &one).await;
    let mut beside = watch(Kind::Hames, model, &Crowd { stalled: 200, ..one }).await;
    let mut many =
        watch(Kind::Hames, model, &Crowd { runs: 200, readers: 10, stalled: 0, words: 50, every_us: 200_000 }).await;
    for (name, seen) in [
        ("floor, 1 run with 1,000 readers", &mut floor),
        ("hames, 1 run with 1,000 readers", &mut alone),
        ("hames, with 200 more that stall", &mut beside),
        ("hames, 200 runs with 10 readers each", &mut many),
    ] {
        println!(
            "  {name}: {} tokens seen, p50 {:.1} ms, p99 {:.1} ms, {:.1} µs CPU for each",
            seen.delays.len(),
            seen.delays.median(),
            seen.delays.quantile(0.99),
            seen.cpu_us_per_token,
        );
    }
    report.at_most(
        "CPU to bring a token to one of 1,000 readers, multiple of the floor's",
        alone.cpu_us_per_token / floor.cpu_us_per_token,
        1.5,
        None,
    );
    report.at_most(
        "p99 for 1,000 readers beside 200 that stall, multiple of without",
        beside.delays.quantile(0.99) / alone.delays.quantile(0.99),
        1.25,
        None,
    );
}

async fn watch(kind: Kind, model: &Model, crowd: &Crowd) -> Seen {
    let server = Server::start(kind, model);
    let mut client = server.client().await;
    let mut readers = JoinSet::new();
    let mut stalled = Vec::new();
    // Everybody is there before the first words that count.
    let speaks = request(&format!("paced.{}.{}", crowd.words, crowd.every_us));
    let cpu = server.cpu_seconds();
    for _ in 0..crowd.runs {
        let run = client.create(&speaks).await;
        for _ in 0..crowd.readers {
            let mut reader = server.client().await;
            let mut follow = reader.follow(&run).await;
            readers.spawn(async move {
                let mut delays = Samples::default();
                while let Some(bytes) = follow.next().await {
                    let now = nanos();
                    stamps(&bytes).for_each(|sent| delays.push(now.saturating_sub(sent) as f64 / 1e6));
                }
                drop(reader);
                delays
            });
        }
        for _ in 0..crowd.stalled {
            stalled.push(stall(&server, &run).await);
        }
    }
    let mut delays = Samples::default();
    while let Some(reader) = readers.join_next().await {
        delays.extend(reader.unwrap());
    }
    let cpu_us_per_token = (server.cpu_seconds() - cpu) * 1e6 / delays.len() as f64;
    drop(stalled);
    Seen { delays, cpu_us_per_token }
}

/// A reader that asks for a stream and never reads it.
async fn stall(server: &Server, run: &str) -> Client {
    let mut reader = server.client().await;
    let path = format!("/runs/{run}/events");
    let answer = reader.send(Method::GET, &path, "text/event-stream", &Bytes::new()).await;
    std::mem::forget(answer);
    reader
}
