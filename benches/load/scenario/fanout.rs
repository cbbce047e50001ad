use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::Incoming;
use tokio::task::JoinSet;

use super::request;
use crate::client::Client;
use crate::figure::{Report, Samples};
use crate::model::{Model, nanos};
use crate::server::{Kind, Server, settle};

const ROUNDS: usize = 3;

/// Readers of a crowd, and how many more stop reading.
#[derive(Clone, Copy)]
struct Crowd {
    runs: usize,
    readers: usize,
    stalled: usize,
    /// Words of a run, microseconds between them, and bytes of each.
    words: usize,
    every_us: usize,
    bytes: usize,
}

/// What a crowd saw.
struct Seen {
    p99_ms: f64,
    cpu_us_per_token: f64,
}

/// One run and a thousand readers, of small words and of large ones, and many runs with some readers each.
const SMALL: Crowd = Crowd { runs: 1, readers: 1_000, stalled: 0, words: 80, every_us: 50_000, bytes: 0 };
const LARGE: Crowd = Crowd { words: 60, every_us: 80_000, bytes: 4_096, ..SMALL };
const MANY: Crowd = Crowd { runs: 200, readers: 10, words: 20, every_us: 200_000, ..SMALL };

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut cpu = Samples::default();
    let mut delay = Samples::default();
    for _ in 0..ROUNDS {
        let floor = watch("floor, 1 run with 1,000 readers", Kind::Floor, model, SMALL).await;
        let hames = watch("hames, 1 run with 1,000 readers", Kind::Hames, model, SMALL).await;
        cpu.push(hames.cpu_us_per_token / floor.cpu_us_per_token);
        let without = watch("hames, 1 run with 1,000 readers of 4 KiB", Kind::Hames, model, LARGE).await;
        let beside = Crowd { stalled: 200, ..LARGE };
        let beside = watch("hames, the same beside 200 that stall", Kind::Hames, model, beside).await;
        delay.push(beside.p99_ms / without.p99_ms);
    }
    watch("hames, 200 runs with 10 readers each", Kind::Hames, model, MANY).await;
    let name = "CPU to bring a token to one of 1,000 readers, multiple of the floor's";
    report.at_most(name, cpu.median(), 1.5, None);
    report.at_most("p99 for 1,000 readers beside 200 that stall, multiple of without", delay.median(), 1.25, None);
}

/// Gathers a crowd, lets the model speak to it, and says what it saw.
async fn watch(name: &str, kind: Kind, model: &Model, crowd: Crowd) -> Seen {
    let server = Server::start(kind, model);
    let mut client = server.client().await;
    let mut readers = JoinSet::new();
    let mut stalled = Vec::new();
    model.open_gate(false);
    let speaks = request(&format!("paced.{}.{}.{}", crowd.words, crowd.every_us, crowd.bytes));
    for _ in 0..crowd.runs {
        let run = client.create(&speaks).await;
        for _ in 0..crowd.readers {
            let mut reader = server.client().await;
            let follow = reader.follow(&run).await;
            readers.spawn(async move {
                let mut delays = Samples::default();
                follow.words(|sent| delays.push(nanos().saturating_sub(sent) as f64 / 1e6)).await;
                drop(reader);
                delays
            });
        }
        for _ in 0..crowd.stalled {
            stalled.push(Stalled::connect(&server, &run).await);
        }
    }
    let cpu = server.cpu_seconds();
    model.open_gate(true);
    let mut delays = Samples::default();
    while let Some(reader) = readers.join_next().await {
        delays.extend(reader.unwrap());
    }
    let cpu_us_per_token = (server.cpu_seconds() - cpu) * 1e6 / delays.len() as f64;
    assert_eq!(delays.len(), crowd.runs * crowd.readers * crowd.words, "every token is seen once");
    if crowd.stalled > 0 {
        settle().await;
        // The run is over, and the server still has something for each of them that it cannot get rid of.
        let held = sse_readers(&mut client).await;
        assert_eq!(held, crowd.stalled, "readers that were to stall took everything");
    }
    println!(
        "  {name}: {} tokens, p50 {:.1} ms, p99 {:.1} ms, {cpu_us_per_token:.1} µs CPU for each",
        delays.len(),
        delays.median(),
        delays.quantile(0.99),
    );
    drop(stalled);
    Seen { p99_ms: delays.quantile(0.99), cpu_us_per_token }
}

/// A reader that asks for a stream and never reads it.
struct Stalled {
    _client: Client,
    _unread: hyper::Response<Incoming>,
}

impl Stalled {
    async fn connect(server: &Server, run: &str) -> Self {
        let mut client = Client::connect_narrow(server.address).await.unwrap();
        let path = format!("/runs/{run}/events");
        let unread = client.send(Method::GET, &path, "text/event-stream", &Bytes::new()).await;
        Self { _client: client, _unread: unread }
    }
}

/// How many event streams the server has open.
async fn sse_readers(client: &mut Client) -> usize {
    let answer = client.send(Method::GET, "/metrics", "text/plain", &Bytes::new()).await;
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    let text = std::str::from_utf8(&text).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("hames_sse_readers ")).unwrap();
    line.parse().unwrap()
}
