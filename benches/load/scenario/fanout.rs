use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::request;
use crate::figure::{Report, Samples};
use crate::model::{Model, nanos};
use crate::server::{Kind, Server};

const ROUNDS: usize = 3;

/// Readers of a crowd, and how many more never read. What those are sent stays in the buffers of the kernel, which hold
/// megabytes of a loopback connection; that the server itself holds nothing for a reader is what the tests show.
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
        let beside = watch("hames, the same beside 200 that never read", Kind::Hames, model, beside).await;
        delay.push(beside.p99_ms / without.p99_ms);
    }
    watch("hames, 200 runs with 10 readers each", Kind::Hames, model, MANY).await;
    let name = "CPU to bring a token to one of 1,000 readers, multiple of the floor's";
    report.at_most(name, cpu.median(), 1.5, None);
    report.at_most("p99 for 1,000 readers beside 200 that never read, multiple of without", delay.median(), 1.25, None);
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
            stalled.push(stall(&server, &run).await);
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
    println!(
        "  {name}: {} tokens, p50 {:.1} ms, p99 {:.1} ms, {cpu_us_per_token:.1} µs CPU for each",
        delays.len(),
        delays.median(),
        delays.quantile(0.99),
    );
    drop(stalled);
    Seen { p99_ms: delays.quantile(0.99), cpu_us_per_token }
}

/// A reader that asks for a stream and never reads it, and whose kernel holds next to nothing for it.
async fn stall(server: &Server, run: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    let request = format!("GET /runs/{run}/events HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}
