//! Clients of event streams: one that reads as WHATWG HTML says and can resume, one that reads as slowly as it likes.

use std::net::SocketAddr;

use reqwest::Response;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::client::{Answer, ApiClient};

/// One event as dispatched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// The id its block set; `None` when it set none and the last one stays.
    pub(crate) id: Option<String>,
    /// The type; `message` when the block has none.
    pub(crate) event: String,
    /// The data lines, joined.
    pub(crate) data: String,
}

impl Frame {
    /// The data as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap()
    }

    /// The number of a durable event; `None` for snapshots and fragments.
    pub(crate) fn seq(&self) -> Option<u64> {
        self.id.as_ref()?.parse().ok()
    }
}

/// Decodes an event stream, whatever pieces it comes in.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    line: Vec<u8>,
    after_cr: bool,
    begun: bool,
    id: Option<String>,
    event: String,
    data: Option<String>,
    /// Comment lines so far.
    pub(crate) comments: usize,
    /// The last `retry`, in milliseconds.
    pub(crate) retry: Option<u64>,
    /// What a browser would send as `Last-Event-ID`.
    pub(crate) last_id: String,
}

impl Decoder {
    /// Takes the next piece and gives the events it completes.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        for &byte in bytes {
            let ends_crlf = std::mem::replace(&mut self.after_cr, byte == b'\r') && byte == b'\n';
            match byte {
                _ if ends_crlf => {}
                b'\r' | b'\n' => frames.extend(self.end_line()),
                other => self.line.push(other),
            }
        }
        frames
    }

    fn end_line(&mut self) -> Option<Frame> {
        let line = String::from_utf8(std::mem::take(&mut self.line)).expect("a stream is UTF-8");
        let line = if std::mem::replace(&mut self.begun, true) { &line } else { line.trim_start_matches('\u{feff}') };
        if line.is_empty() {
            return self.dispatch();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => self.comments += 1,
            "event" => self.event = value.to_owned(),
            "data" => match &mut self.data {
                Some(data) => data.extend(["\n", value]),
                None => self.data = Some(value.to_owned()),
            },
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            "retry" => self.retry = value.parse().ok().or(self.retry),
            _ => {}
        }
        None
    }

    fn dispatch(&mut self) -> Option<Frame> {
        let id = self.id.take();
        if let Some(id) = &id {
            self.last_id.clone_from(id);
        }
        let event = std::mem::take(&mut self.event);
        let data = self.data.take()?;
        Some(Frame { id, event: if event.is_empty() { "message".to_owned() } else { event }, data })
    }
}

/// Follows a run and checks every frame against the contract.
pub(crate) struct SseClient {
    client: ApiClient,
    path: String,
    response: Response,
    decoder: Decoder,
    ready: std::collections::VecDeque<Frame>,
    /// The id of the last frame that was given out and had one.
    last_id: String,
}

impl SseClient {
    pub(crate) fn new(client: ApiClient, path: &str, last_id: &str, response: Response) -> Self {
        let decoder = Decoder { last_id: last_id.to_owned(), ..Decoder::default() };
        let last_id = last_id.to_owned();
        Self { client, path: path.to_owned(), response, decoder, ready: Default::default(), last_id }
    }

    /// The next event; `None` when the server ended the stream.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        while self.ready.is_empty() {
            let bytes = self.response.chunk().await.unwrap()?;
            self.ready.extend(self.decoder.push(&bytes));
        }
        let frame = self.ready.pop_front()?;
        if let Some(id) = &frame.id {
            self.last_id.clone_from(id);
        }
        let contract = self.client.contract();
        contract.check_schema("frame", "StreamData", &frame.json());
        let schema = match frame.event.as_str() {
            "snapshot" => "Snapshot",
            "text_delta" => "TextDelta",
            "reasoning_delta" => "ReasoningDelta",
            "tool_call_delta" => "ToolCallDelta",
            "tool_progress" => "ToolProgress",
            _ => "Event",
        };
        contract.check_schema(&frame.event, schema, &frame.json());
        assert_eq!(frame.seq().is_some(), schema == "Event", "{frame:?}");
        Some(frame)
    }

    /// Every event until the server ends the stream.
    pub(crate) async fn rest(mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }

    /// The path of the stream.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// What a browser that has handled the frames given out would send as `Last-Event-ID` now.
    pub(crate) fn last_id(&self) -> &str {
        &self.last_id
    }

    /// The answer's headers.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).map(|value| value.to_str().unwrap())
    }

    /// Drops the connection and connects again where this one stood.
    pub(crate) async fn reconnect(self) -> Result<Self, Box<Answer>> {
        let Self { client, path, response, last_id, .. } = self;
        drop(response);
        let id = Some(last_id.as_str()).filter(|id| !id.is_empty());
        client.stream(&path, id).await
    }
}

/// Reads a stream over a bare socket with a small window, as slowly as it likes or not at all.
pub(crate) struct SlowReader {
    socket: TcpStream,
}

impl SlowReader {
    /// Asks for the stream and reads nothing of it. The kernel keeps at most about twice `window` bytes of it.
    pub(crate) async fn open(addr: SocketAddr, path: &str, window: u32) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(window).unwrap();
        let mut socket = socket.connect(addr).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nAccept: text/event-stream\r\n\r\n");
        socket.write_all(request.as_bytes()).await.unwrap();
        Self { socket }
    }

    /// Reads at most `max` bytes; empty when the server closed the connection.
    pub(crate) async fn read(&mut self, max: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; max];
        let count = self.socket.read(&mut bytes).await?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

mod tests {
    use super::*;

    fn frame(id: Option<&str>, event: &str, data: &str) -> Frame {
        Frame { id: id.map(str::to_owned), event: event.to_owned(), data: data.to_owned() }
    }

    #[test]
    fn the_decoder_follows_the_standard_in_any_pieces() {
        let stream = "\u{feff}: hello\n\nevent: a\r\ndata:1\r\ndata: 2\r\nid: 7\r\n\r\ndata\n\nid\nretry: 5x\nretry: 1000\n\
                      \nid: x\0\ndata:  é\rdata\r\rdata: lost";
        let expected = [frame(Some("7"), "a", "1\n2"), frame(None, "message", ""), frame(None, "message", " é\n")];
        for size in 1..stream.len() {
            let mut decoder = Decoder::default();
            let frames: Vec<Frame> = stream.as_bytes().chunks(size).flat_map(|piece| decoder.push(piece)).collect();
            assert_eq!(frames, expected, "pieces of {size}");
            assert_eq!((decoder.comments, decoder.retry, decoder.last_id.as_str()), (1, Some(1000), ""));
        }
    }
}
