//! A fake model server on a loopback socket: plays responses byte for byte, records what it was asked and when
//! its peer hung up, and refuses chat requests that a real server would refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hames::domain::Timestamp;
use hames::time::{Clock, SystemClock};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// What the server does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// Answers.
    Response(Response),
    /// Reads the request and says nothing, not even a status.
    Silence,
}

/// An answer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Response {
    /// The status.
    pub(crate) status: u16,
    /// The headers. `{{http_date:+2s}}` in a value is that long after now, as an HTTP date.
    #[serde(default)]
    pub(crate) headers: BTreeMap<String, String>,
    /// The body, piece by piece.
    pub(crate) chunks: Vec<Chunk>,
    /// What follows the last piece.
    #[serde(default)]
    pub(crate) end: End,
    /// How a piece is written.
    #[serde(skip)]
    pub(crate) pace: Pace,
}

/// A piece of a body.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Chunk {
    /// Text. `{{tool_name:0}}` is the name of the request's first tool,
    /// `{{tool_name_by_description:X}}` that of the tool described as X.
    Text(String),
    /// Bytes that need not be text.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A pause with the connection open.
    Sleep {
        /// How long.
        sleep_ms: u64,
    },
}

/// What follows the last piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// The body ends as it should.
    #[default]
    Close,
    /// The connection is reset.
    Abort,
    /// Nothing, until the peer hangs up.
    Open,
}

/// How a piece is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pace {
    /// At once.
    #[default]
    Whole,
    /// Each byte on its own.
    Bytes,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The path and query.
    pub(crate) target: String,
    /// The headers, names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    /// The body.
    pub(crate) body: Value,
}

/// The peer hung up before a response was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HangUp {
    /// Which request, from 0.
    pub(crate) request: usize,
    /// When it was noticed.
    pub(crate) at: Instant,
}

/// What happened so far.
#[derive(Clone, Debug, Default)]
struct Record {
    requests: Vec<Request>,
    hang_ups: Vec<HangUp>,
    rejections: Vec<String>,
}

/// The server. Dropping it ends its connections, and fails the test if it refused a request by itself and nobody took
/// note of that.
pub(crate) struct Upstream {
    base_url: String,
    shared: Arc<Shared>,
    record: watch::Receiver<Record>,
    _tasks: JoinSet<()>,
}

struct Shared {
    replies: Vec<Reply>,
    clock: Arc<dyn Clock>,
    record: watch::Sender<Record>,
}

impl Upstream {
    /// Starts a server that gives these replies in turn, the last one again and again.
    pub(crate) async fn start(replies: Vec<Reply>) -> Self {
        Self::start_at(replies, Arc::new(SystemClock)).await
    }

    /// The same, with the clock that dates in headers are told from.
    pub(crate) async fn start_at(replies: Vec<Reply>, clock: Arc<dyn Clock>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let base_url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let (sender, record) = watch::channel(Record::default());
        let shared = Arc::new(Shared { replies, clock, record: sender });
        let kept = Arc::clone(&shared);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let shared = Arc::clone(&shared);
                // An error is the peer's hanging up, which was recorded.
                connections.spawn(async move { shared.serve(socket).await.unwrap_or(()) });
            }
        });
        Self { base_url, shared: kept, record, _tasks: tasks }
    }

    /// The base URL, with the version.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The requests it took, in order.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.record.borrow().requests.clone()
    }

    /// What was wrong with the requests it refused by itself, for a test that tells it in its own words.
    pub(crate) fn take_rejections(&self) -> Vec<String> {
        let mut taken = Vec::new();
        self.shared.record.send_modify(|record| taken = std::mem::take(&mut record.rejections));
        taken
    }

    /// Waits for that many requests.
    pub(crate) async fn wait_for_requests(&self, count: usize) {
        let mut record = self.record.clone();
        record.wait_for(|record| record.requests.len() >= count).await.expect("the server runs");
    }

    /// Waits until the peer hung up in the middle of that many responses.
    pub(crate) async fn wait_for_hang_ups(&self, count: usize) -> Vec<HangUp> {
        let mut record = self.record.clone();
        let record = record.wait_for(|record| record.hang_ups.len() >= count).await.expect("the server runs");
        record.hang_ups.clone()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let rejections = self.take_rejections();
            assert!(rejections.is_empty(), "the model server refused requests: {rejections:#?}");
        }
    }
}

impl Response {
    /// A stream of events, a piece for each text.
    pub(crate) fn events<T: Into<String>>(chunks: impl IntoIterator<Item = T>) -> Self {
        let headers = BTreeMap::from([("content-type".to_owned(), "text/event-stream".to_owned())]);
        let chunks = chunks.into_iter().map(|text| Chunk::Text(text.into())).collect();
        Self { status: 200, headers, chunks, end: End::Close, pace: Pace::Whole }
    }

    /// A JSON document.
    pub(crate) fn json(status: u16, body: &Value) -> Self {
        let headers = BTreeMap::from([("content-type".to_owned(), "application/json".to_owned())]);
        Self { status, headers, chunks: vec![Chunk::Text(body.to_string())], end: End::Close, pace: Pace::Whole }
    }

    /// The same with another header.
    pub(crate) fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The same with another end.
    pub(crate) fn with_end(mut self, end: End) -> Self {
        self.end = end;
        self
    }
}

impl From<Response> for Reply {
    fn from(response: Response) -> Self {
        Self::Response(response)
    }
}

impl Shared {
    async fn serve(&self, mut socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        while let Some(request) = read_request(&mut socket).await? {
            let problems = problems(&request);
            if let Some(problem) = problems.first() {
                let body = json!({"error": {"message": problem, "type": "invalid_request_error", "code": null}});
                self.record.send_modify(|record| record.rejections.extend(problems.clone()));
                self.respond(&mut socket, &Response::json(400, &body), &request).await?;
                continue;
            }
            let number = self.record.borrow().requests.len();
            self.record.send_modify(|record| record.requests.push(request.clone()));
            let reply = self.replies.get(number).or(self.replies.last());
            let played = match reply {
                Some(Reply::Response(response)) => self.respond(&mut socket, response, &request).await,
                Some(Reply::Silence) | None => until_hang_up(&mut socket).await,
            };
            if let Err(error) = played {
                let hang_up = HangUp { request: number, at: Instant::now() };
                self.record.send_modify(|record| record.hang_ups.push(hang_up));
                return Err(error);
            }
            if matches!(reply, Some(Reply::Response(Response { end: End::Abort, .. }))) {
                return socket.set_zero_linger();
            }
        }
        Ok(())
    }

    /// Plays a response. An error means that the peer hung up.
    async fn respond(&self, socket: &mut TcpStream, response: &Response, request: &Request) -> io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Status\r\ntransfer-encoding: chunked\r\n", response.status);
        for (name, value) in &response.headers {
            head.push_str(&format!("{name}: {}\r\n", self.fill_in_dates(value)));
        }
        head.push_str("\r\n");
        socket.write_all(head.as_bytes()).await?;
        for chunk in &response.chunks {
            let bytes = match chunk {
                Chunk::Text(text) => fill_in_names(text, &request.body).into_bytes(),
                Chunk::Bytes { bytes } => bytes.clone(),
                Chunk::Sleep { sleep_ms } => {
                    tokio::select! {
                        () = sleep(Duration::from_millis(*sleep_ms)) => continue,
                        hang_up = until_hang_up(socket) => return hang_up,
                    }
                }
            };
            let size = match response.pace {
                Pace::Whole => bytes.len().max(1),
                Pace::Bytes => 1,
            };
            for piece in bytes.chunks(size) {
                let mut framed = format!("{:x}\r\n", piece.len()).into_bytes();
                framed.extend_from_slice(piece);
                framed.extend_from_slice(b"\r\n");
                socket.write_all(&framed).await?;
            }
        }
        match response.end {
            End::Close => socket.write_all(b"0\r\n\r\n").await,
            End::Abort => Ok(()),
            End::Open => until_hang_up(socket).await,
        }
    }

    fn fill_in_dates(&self, value: &str) -> String {
        let Some(offset) = value.strip_prefix("{{http_date:").and_then(|rest| rest.strip_suffix("s}}")) else {
            return value.to_owned();
        };
        let seconds: i64 = offset.parse().expect("a number of seconds");
        let now = self.clock.now().as_millis() + seconds * 1000;
        let since_epoch = Timestamp::from_millis(now).since(Timestamp::from_millis(0));
        let date: SystemTime = UNIX_EPOCH + since_epoch;
        httpdate::fmt_http_date(date)
    }
}

/// Replaces the placeholders of a text by names of the request's tools.
fn fill_in_names(text: &str, body: &Value) -> String {
    let Some((before, rest)) = text.split_once("{{tool_name") else { return text.to_owned() };
    let (key, after) = rest.split_once("}}").expect("a closed placeholder");
    let functions: Vec<&Value> = body["tools"].as_array().into_iter().flatten().map(|tool| &tool["function"]).collect();
    let function = match key.split_once(':').expect("a placeholder with an argument") {
        ("", number) => functions.get(number.parse::<usize>().expect("a number")).copied(),
        (_, description) => functions.iter().copied().find(|function| function["description"] == description),
    };
    let name = function.and_then(|function| function["name"].as_str()).expect("a tool of that kind");
    format!("{before}{name}{}", fill_in_names(after, body))
}

/// Waits until the peer hangs up and says so as an error.
async fn until_hang_up(socket: &mut TcpStream) -> io::Result<()> {
    match socket.read(&mut [0; 16]).await? {
        0 => Err(io::ErrorKind::ConnectionAborted.into()),
        _ => panic!("the peer sent something before the response was over"),
    }
}

/// Reads a request; `None` when the peer has no further one.
async fn read_request(socket: &mut TcpStream) -> io::Result<Option<Request>> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if socket.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
    };
    let mut body = bytes.split_off(head_end + 4);
    let head = String::from_utf8_lossy(&bytes).into_owned();
    let mut lines = head.lines();
    let target = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().expect("a length"));
    while body.len() < length {
        if socket.read_buf(&mut body).await? == 0 {
            return Ok(None);
        }
    }
    let body = serde_json::from_slice(&body).unwrap_or_default();
    Ok(Some(Request { target, headers, body }))
}

/// What a strict server would refuse in a chat request.
pub(crate) fn problems(request: &Request) -> Vec<String> {
    let body = &request.body;
    let mut problems = Vec::new();
    if request.target.split('?').next() != Some("/v1/chat/completions") {
        problems.push(format!("no such path: {}", request.target));
    }
    if !body["model"].is_string() {
        problems.push("`model` is not a string".to_owned());
    }
    let mut names = BTreeSet::new();
    for tool in body["tools"].as_array().into_iter().flatten() {
        let function = &tool["function"];
        let name = function["name"].as_str().unwrap_or_default();
        if !is_function_name(name) {
            problems.push(format!("`{name}` is not a function name"));
        }
        if !names.insert(name) {
            problems.push(format!("two tools are named `{name}`"));
        }
        if function["parameters"]["type"] != "object" || !function["parameters"]["properties"].is_object() {
            problems.push(format!("the parameters of `{name}` are not the schema of an object"));
        }
    }
    problems.extend(message_problems(body["messages"].as_array().map(Vec::as_slice).unwrap_or_default()));
    problems
}

fn message_problems(messages: &[Value]) -> Vec<String> {
    let mut problems = Vec::new();
    if messages.is_empty() {
        problems.push("`messages` is empty".to_owned());
    }
    let mut open: BTreeSet<&str> = BTreeSet::new();
    let mut answered: BTreeSet<&str> = BTreeSet::new();
    for (at, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if role == "tool" {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            if !open.remove(id) {
                let what = if answered.contains(id) { "a second result" } else { "a result without its call" };
                problems.push(format!("messages[{at}]: {what}: `{id}`"));
            }
            answered.insert(id);
        } else if let Some(id) = open.first() {
            problems.push(format!("messages[{at}]: the call `{id}` has no result"));
            open.clear();
        }
        let calls = message["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
        let content_fits = message["content"].is_string()
            || (role == "assistant" && !calls.is_empty() && message["content"].is_null());
        match role {
            "system" if at == 0 => {}
            "user" | "tool" => {}
            "assistant" => answered.clear(),
            other => problems.push(format!("messages[{at}]: role `{other}` is not taken here")),
        }
        if !content_fits {
            problems.push(format!("messages[{at}]: the content of this {role} message is not a string"));
        }
        if message.get("tool_calls").is_some() && (calls.is_empty() || role != "assistant") {
            problems.push(format!("messages[{at}]: `tool_calls` has no place here"));
        }
        for call in calls {
            let id = call["id"].as_str().unwrap_or_default();
            let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
            if id.is_empty() || !open.insert(id) {
                problems.push(format!("messages[{at}]: the call id `{id}` is empty or used twice"));
            }
            if !is_function_name(call["function"]["name"].as_str().unwrap_or_default()) {
                problems.push(format!("messages[{at}]: the call `{id}` has no function name"));
            }
            if !matches!(serde_json::from_str(arguments), Ok(Value::Object(_))) {
                problems.push(format!("messages[{at}]: the arguments of `{id}` are not an object: {arguments}"));
            }
        }
    }
    if let Some(id) = open.first() {
        problems.push(format!("the call `{id}` has no result"));
    }
    problems
}

fn is_function_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

#[tokio::test]
#[should_panic(expected = "the model server refused requests")]
async fn a_refused_request_that_nobody_takes_note_of_fails_its_test() {
    let upstream = Upstream::start(vec![Reply::Silence]).await;
    let mut socket = TcpStream::connect(upstream.base_url["http://".len()..].split('/').next().unwrap()).await.unwrap();
    socket.write_all(b"POST /v1/nowhere HTTP/1.1\r\nconnection: close\r\n\r\n").await.unwrap();
    // The first bytes of the answer come after the note.
    assert_ne!(socket.read(&mut [0; 64]).await.unwrap(), 0);
}

#[test]
fn ill_formed_requests_are_noticed() {
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "t", "arguments": arguments}});
    let calls = |calls: &[Value]| json!({"role": "assistant", "content": null, "tool_calls": calls});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "r"});
    let user = json!({"role": "user", "content": "hi"});
    let good = [user.clone(), calls(&[call("a", "{}"), call("b", "{}")]), result("b"), result("a"), user.clone()];
    assert_eq!(message_problems(&good), [""; 0]);
    for (messages, expected) in [
        (vec![], "`messages` is empty"),
        (vec![result("a")], "messages[0]: a result without its call: `a`"),
        (vec![calls(&[call("a", "{}")])], "the call `a` has no result"),
        (vec![calls(&[call("a", "{}")]), user.clone()], "messages[1]: the call `a` has no result"),
        (vec![calls(&[call("a", "{}")]), result("a"), result("a")], "messages[2]: a second result: `a`"),
        (
            vec![calls(&[call("a", "{}"), call("a", "{}")]), result("a")],
            "messages[0]: the call id `a` is empty or used twice",
        ),
        (
            vec![calls(&[call("a", "{\"x\":")]), result("a")],
            "messages[0]: the arguments of `a` are not an object: {\"x\":",
        ),
        (
            vec![json!({"role": "assistant", "content": null})],
            "messages[0]: the content of this assistant message is not a string",
        ),
    ] {
        assert_eq!(message_problems(&messages), [expected]);
    }
}
