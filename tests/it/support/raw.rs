//! Requests byte by byte, for what no client library would send.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What came back before the server closed the connection.
#[derive(Debug)]
pub(crate) struct RawAnswer {
    pub(crate) head: String,
    pub(crate) body: String,
}

impl RawAnswer {
    /// The status of the answer; zero when there was none.
    pub(crate) fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> Option<String> {
        let body: Value = serde_json::from_str(&self.body).ok()?;
        Some(body["code"].as_str()?.to_owned())
    }
}

/// Sends bytes and reads until the server closes. The request should ask for that (`Connection: close`).
pub(crate) async fn exchange(addr: SocketAddr, request: &[u8]) -> RawAnswer {
    let mut socket = TcpStream::connect(addr).await.unwrap();
    let (mut reader, mut writer) = socket.split();
    let mut answer = Vec::new();
    // A server that refuses what it has not read whole may stop reading; what counts is what it answers.
    let (_, read) = tokio::join!(writer.write_all(request), reader.read_to_end(&mut answer));
    read.unwrap();
    let text = String::from_utf8(answer).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    RawAnswer { head: head.to_owned(), body: body.to_owned() }
}

/// A GET with further header lines, each ended by CRLF.
pub(crate) fn get(addr: SocketAddr, path: &str, lines: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n{lines}\r\n").into_bytes()
}
