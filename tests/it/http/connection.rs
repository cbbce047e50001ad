//! Connections: large heads, slow clients, too many of them, and the end of the server.

use hames::config::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::served::Served;
use crate::support::raw::{exchange, get};
use crate::support::sse::SlowReader;

// open-metadata/OpenMetadata#23080, tower-rs/tower-http#461
#[tokio::test]
async fn large_heads_are_refused_above_the_documented_limit() {
    let app = Served::start().await;
    let kib = |n: usize| "x".repeat(n * 1024);
    let lines = |n: usize| (0..n).map(|n| format!("x-{n}: y\r\n")).collect::<String>();
    // Two lines (Host, Connection) are there already.
    for (name, request, status, code) in [
        ("7 KiB", format!("cookie: {}\r\n", kib(7)), 200, None),
        ("20 KiB", format!("baggage: {}\r\n", kib(20)), 200, None),
        ("98 lines", lines(98), 200, None),
        ("99 lines", lines(99), 431, Some("headers_too_large")),
        ("200 lines", lines(198), 431, Some("headers_too_large")),
        ("1000 lines", lines(1000), 431, None),
        ("40 KiB", format!("cookie: {}\r\n", kib(40)), 431, Some("headers_too_large")),
        ("300 KiB", format!("cookie: {}\r\n", kib(300)), 431, None),
        ("100 KiB of Last-Event-ID", format!("last-event-id: {}\r\n", "9".repeat(100 * 1024)), 431, None),
    ] {
        let answer = exchange(app.addr, &get(app.addr, "/healthz", &request)).await;
        assert_eq!((answer.status(), answer.code().as_deref()), (status, code), "{name}: {answer:?}");
        assert!(!answer.body.contains("xxxx") && !answer.head.contains("xxxx"), "{name}");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_slow_head_is_not_waited_for() {
    let app = Served::with(ServerConfig { header_timeout_ms: 50, ..ServerConfig::default() }).await;
    for begun in ["", "P", "PRI * HTTP/2.0\r\n", "GET /healthz HTTP/1.1\r\nHost: localhost\r\n"] {
        let mut socket = TcpStream::connect(app.addr).await.unwrap();
        socket.write_all(begun.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"", "{begun:?}");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_slow_body_is_not_waited_for() {
    let app = Served::with(ServerConfig { body_timeout_ms: 50, ..ServerConfig::default() }).await;
    let head = format!(
        "POST /runs HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\
         Connection: close\r\n\r\n{{",
        app.addr
    );
    let answer = exchange(app.addr, head.as_bytes()).await;
    assert_eq!((answer.status(), answer.code().as_deref()), (408, Some("body_timeout")));
    assert_eq!(app.client.count_runs().await, 0);
    app.stop().await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_gives_its_place_to_another() {
    let config = ServerConfig {
        max_connections: 1,
        write_timeout_ms: 100,
        max_body_bytes: 64 * 1024 * 1024,
        ..ServerConfig::default()
    };
    let app = Served::with(config).await;
    let body = format!(r#"{{"input":"{}"}}"#, "a".repeat(48 * 1024 * 1024));
    let request = format!(
        "POST /runs HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        app.addr,
        body.len()
    );
    let created = exchange(app.addr, request.as_bytes()).await;
    let run: serde_json::Value = serde_json::from_str(&created.body).unwrap();
    let path = format!("/runs/{}/messages", run["id"].as_str().unwrap());

    let mut idle = SlowReader::open(app.addr, &path, 4096).await;
    // There is one place: this is answered only once the idle client has lost it.
    let answer = exchange(app.addr, &get(app.addr, "/healthz", "")).await;
    assert_eq!(answer.status(), 200);
    let mut taken = 0;
    while let Ok(bytes) = idle.read(1024 * 1024).await {
        if bytes.is_empty() {
            break;
        }
        taken += bytes.len();
    }
    assert!(taken < body.len(), "it got everything");
    app.stop().await;
}

#[tokio::test]
async fn a_server_that_stops_takes_no_new_clients_and_ends_idle_connections() {
    // Long enough that only the stop can end the idle connection.
    let app = Served::with(ServerConfig { header_timeout_ms: 3_600_000, ..ServerConfig::default() }).await;
    let mut idle = TcpStream::connect(app.addr).await.unwrap();
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", app.addr);
    idle.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    idle.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 200");
    app.stop_softly();
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
    drop(idle);
    let addr = app.addr;
    app.stop().await;
    assert!(TcpStream::connect(addr).await.is_err());
}

#[tokio::test]
async fn http2_is_spoken_to_who_speaks_it() {
    let app = Served::start().await;
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let get = |path: &str| client.get(format!("http://{}{path}", app.addr)).send();
    let answer = get("/healthz").await.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, 200));
    let long = client.get(format!("http://{}/healthz", app.addr)).header("cookie", "x".repeat(40 * 1024)).send();
    assert_eq!(long.await.unwrap().status().as_u16(), 431);
    drop(client);
    app.stop().await;
}
