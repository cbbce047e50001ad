//! A client that costs little: one connection, one request after the other.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// One connection to a server.
pub(crate) struct Client {
    address: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        tokio::spawn(async move { drop(connection.await) });
        Ok(Self { address, sender })
    }

    /// Sends a request, on a new connection when the server closed this one.
    pub(crate) async fn send(&mut self, method: Method, path: &str, accept: &str, body: &Bytes) -> Response<Incoming> {
        if self.sender.ready().await.is_err() {
            *self = Self::connect(self.address).await.unwrap();
        }
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("accept", accept)
            .body(Full::new(body.clone()))
            .unwrap();
        self.sender.send_request(request).await.unwrap()
    }

    /// Creates a run and gives its id.
    pub(crate) async fn create(&mut self, body: &Bytes) -> String {
        let response = self.send(Method::POST, "/runs", "application/json", body).await;
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(status, 202, "{}", String::from_utf8_lossy(&body));
        let run: Value = serde_json::from_slice(&body).unwrap();
        run["id"].as_str().unwrap().to_owned()
    }

    /// Follows a run.
    pub(crate) async fn follow(&mut self, run: &str) -> Follow {
        let path = format!("/runs/{run}/events");
        let response = self.send(Method::GET, &path, "text/event-stream", &Bytes::new()).await;
        assert_eq!(response.status(), 200);
        Follow(response.into_body())
    }
}

/// The events of a run.
pub(crate) struct Follow(Incoming);

impl Follow {
    /// When the words of a `paced` model were sent, as they come; calls `seen` with each.
    pub(crate) async fn words(mut self, mut seen: impl FnMut(u64)) {
        let mut unread = Vec::new();
        while let Some(bytes) = self.next().await {
            unread.extend_from_slice(&bytes);
            let Some(end) = memchr::memmem::rfind(&unread, b"\n\n") else { continue };
            let frames: Vec<u8> = unread.drain(..end + 2).collect();
            let frames = std::str::from_utf8(&frames).unwrap().split("\n\n");
            // Durable events hold all the words again.
            let is_durable =
                |frame: &&str| ["event: message\n", "event: run_end\n"].iter().any(|kind| frame.contains(kind));
            let words = frames.filter(|frame| !is_durable(frame)).flat_map(|frame| frame.split('@').skip(1));
            words.for_each(|word| seen(word.split_once(' ').unwrap().0.parse().unwrap()));
        }
    }

    /// The next bytes; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        while let Some(frame) = self.0.frame().await {
            if let Ok(data) = frame.unwrap().into_data() {
                return Some(data);
            }
        }
        None
    }

    /// Reads to the end and checks that it is a good one.
    pub(crate) async fn finish(mut self) {
        let (mut last, mut good) = (Bytes::new(), false);
        while let Some(bytes) = self.next().await {
            good |= memchr::memmem::find(&bytes, br#""status":"completed""#).is_some();
            last = bytes;
        }
        assert!(good, "a run ended with {}", String::from_utf8_lossy(&last));
    }
}
