//! A server as the command line sees it: creates, follows and ends runs over HTTP.

use std::time::Duration;

use anyhow::{Context as _, bail};
use futures_util::{StreamExt as _, TryStreamExt as _};
use reqwest::header::{ACCEPT, HeaderName};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use sse_stream::SseByteStream;

use super::feed::{Blocks, Frame, Heard, StreamError};
use super::output;
use super::render::{FinalRun, duration};
use crate::domain::{FieldError, RunId, RunRequest};
use crate::tls::client_builder;

const CONNECT: Duration = Duration::from_secs(10);

/// A stream carries a comment every 15 seconds; one that is silent for so long is dead.
const SILENCE: Duration = Duration::from_secs(45);

/// Connections in a row that may bring nothing before a stream is given up.
const MAX_FAILURES: u32 = 10;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Reads the address of a server.
pub(super) fn parse_url(text: &str) -> Result<Url, String> {
    let has_scheme = ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
    if !has_scheme {
        return Err("must begin with http:// or https://, as in http://127.0.0.1:8080".to_owned());
    }
    Url::parse(text).map_err(|error| error.to_string())
}

/// A server.
#[derive(Clone)]
pub(super) struct Remote {
    client: Client,
    base: Url,
}

/// The part of a run that is needed here.
#[derive(Deserialize)]
struct Created {
    id: RunId,
}

/// The answer of `GET /readyz`.
#[derive(Deserialize)]
struct Ready {
    status: String,
}

/// What a server says when it refuses (RFC 9457).
#[derive(Default, Deserialize)]
#[serde(default)]
struct Problem {
    title: String,
    detail: String,
    errors: Vec<FieldError>,
}

impl Remote {
    pub(super) fn new(base: Url) -> anyhow::Result<Self> {
        let builder = client_builder(base.scheme())?;
        let client = builder.connect_timeout(CONNECT).read_timeout(SILENCE).build()?;
        Ok(Self { client, base })
    }

    /// Creates a run.
    pub(super) async fn create(&self, request: &RunRequest) -> anyhow::Result<RunId> {
        let response = self.client.post(self.url("runs")).json(request).send().await;
        let response = accepted(self.reached(response)?).await?;
        let created: Created = response.json().await.context("the server did not answer with a run")?;
        Ok(created.id)
    }

    /// A run as it stands.
    pub(super) async fn get(&self, run: RunId) -> anyhow::Result<FinalRun> {
        let response = self.client.get(self.url(&format!("runs/{run}"))).send().await;
        let response = accepted(self.reached(response)?).await?;
        response.json().await.context("the server did not answer with a run")
    }

    /// Whether the server accepts runs; an error when it does not, or is not one of ours.
    pub(super) async fn ready(&self) -> anyhow::Result<()> {
        let response = self.client.get(self.url("readyz")).send().await;
        let response = accepted(self.reached(response)?).await?;
        let ready: Ready = response.json().await.with_context(|| format!("{} is not a hames server", self.base))?;
        anyhow::ensure!(ready.status == "ready", "{} is {}, not ready", self.base, output::said(&ready.status));
        Ok(())
    }

    /// Asks a run to end.
    pub(super) async fn cancel(&self, run: RunId) -> anyhow::Result<()> {
        let response = self.client.delete(self.url(&format!("runs/{run}"))).send().await;
        accepted(self.reached(response)?).await?;
        Ok(())
    }

    /// Follows a run, from its first event or from after a cursor.
    pub(super) fn follow(&self, run: RunId, after: Option<String>) -> RemoteFeed {
        RemoteFeed {
            remote: self.clone(),
            run,
            cursor: after,
            open: None,
            reached: false,
            attempts: 0,
            failures: 0,
            retry: Duration::from_secs(1),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.base.as_str().trim_end_matches('/'))
    }

    fn reached<T>(&self, result: reqwest::Result<T>) -> anyhow::Result<T> {
        result.map_err(reqwest::Error::without_url).with_context(|| format!("{} cannot be reached", self.base))
    }
}

/// The events of a run on a server. Connects again, after the last frame, when the connection breaks.
pub(super) struct RemoteFeed {
    remote: Remote,
    run: RunId,
    cursor: Option<String>,
    open: Option<Blocks>,
    /// Whether the server ever answered. One that never did is more likely misnamed than away.
    reached: bool,
    /// Attempts to connect since the stream was last open.
    attempts: u32,
    failures: u32,
    retry: Duration,
}

impl RemoteFeed {
    /// Of a server that has answered before.
    pub(super) fn known(mut self) -> Self {
        self.reached = true;
        self
    }

    /// What comes next; `None` when the server says that none follows. Nothing is lost when it is dropped waiting.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<Heard>> {
        loop {
            let Some(blocks) = &mut self.open else {
                if self.failures > 0 {
                    tokio::time::sleep(delay(self.retry, self.failures)).await;
                }
                // Counted before the attempt: it may be dropped half-way.
                self.failures += 1;
                self.attempts += 1;
                match self.connect().await {
                    Ok(Some(blocks)) => (self.open, self.attempts) = (Some(blocks), 0),
                    Ok(None) => return Ok(None),
                    Err(Attempt::Final(error)) => return Err(error),
                    Err(Attempt::Again(error)) if self.failures >= MAX_FAILURES => {
                        return Err(error.context(format!("gave up after {MAX_FAILURES} attempts")));
                    }
                    Err(Attempt::Again(error)) => {
                        tracing::debug!("the event stream cannot be opened: {}", output::told(&error));
                        let wait = u64::try_from(delay(self.retry, self.failures).as_millis()).unwrap_or(u64::MAX);
                        return Ok(Some(Heard::Trouble(format!(
                            "{error}; attempt {} follows in {}",
                            self.attempts + 1,
                            duration(wait)
                        ))));
                    }
                }
                continue;
            };
            match blocks.next().await {
                Some(Ok(block)) => {
                    if let Some(millis) = block.retry {
                        self.retry = Duration::from_millis(millis);
                    }
                    let Some(frame) = Frame::new(block) else { continue };
                    if let Some(id) = &frame.id {
                        self.cursor = Some(id.clone());
                        // A server that only ever sends snapshots makes no progress.
                        self.failures = 0;
                    }
                    return Ok(Some(Heard::Frame(frame)));
                }
                Some(Err(error)) => {
                    tracing::debug!("the event stream broke: {error}");
                    self.open = None;
                }
                // Servers close streams when they stop, and after the last event: 204 then tells which.
                None => self.open = None,
            }
            if self.failures >= MAX_FAILURES {
                bail!("the event stream of {} broke {MAX_FAILURES} times without a new event", self.run);
            }
            self.failures = self.failures.max(1);
        }
    }

    async fn connect(&mut self) -> Result<Option<Blocks>, Attempt> {
        let url = self.remote.url(&format!("runs/{}/events", self.run));
        let mut request = self.remote.client.get(url).header(ACCEPT, "text/event-stream");
        if let Some(cursor) = &self.cursor {
            request = request.header(LAST_EVENT_ID, cursor);
        }
        let response = match self.remote.reached(request.send().await) {
            Ok(response) => response,
            Err(error) if self.reached => return Err(Attempt::Again(error.context("not reachable"))),
            Err(error) => return Err(Attempt::Final(error)),
        };
        self.reached = true;
        let status = response.status();
        if status == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        match accepted(response).await {
            Ok(response) => {
                let bytes = response.bytes_stream().map_err(StreamError::Connection);
                Ok(Some(SseByteStream::new(bytes.boxed())))
            }
            Err(error) if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Err(Attempt::Again(error))
            }
            Err(error) => Err(Attempt::Final(error)),
        }
    }
}

/// A connection that came to nothing.
enum Attempt {
    /// Another one may do better.
    Again(anyhow::Error),
    /// Another one will not.
    Final(anyhow::Error),
}

/// Twice as long for each failure in a row, at most ten seconds.
fn delay(first: Duration, failures: u32) -> Duration {
    const MOST: Duration = Duration::from_secs(10);
    first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MOST)
}

/// The response if it is a success, else what the server says against it.
async fn accepted(response: Response) -> anyhow::Result<Response> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = response.bytes().await.unwrap_or_default();
    let Problem { title, detail, errors } = serde_json::from_slice(&body).unwrap_or_default();
    let mut message = format!("the server answered {status}");
    // The detail of ours is the first field at fault, which is listed with the others.
    let listed = errors.first().is_some_and(|first| detail.starts_with(&format!("{}: {}", first.path, first.message)));
    for text in [Some(title), Some(detail).filter(|_| !listed)].into_iter().flatten().filter(|text| !text.is_empty()) {
        message.push_str(": ");
        message.push_str(&output::said(&text));
    }
    message.push_str(&output::fields(&errors));
    bail!(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_ten_seconds() {
        let second = Duration::from_secs(1);
        let waits: Vec<_> = (1..=6).map(|failures| delay(second, failures).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
        assert_eq!(delay(Duration::from_millis(u64::MAX), 99).as_secs(), 10);
    }

    #[test]
    fn paths_follow_the_address() {
        for base in ["http://h:1", "http://h:1/"] {
            assert_eq!(Remote::new(parse_url(base).unwrap()).unwrap().url("runs"), "http://h:1/runs");
        }
        let below = Remote::new(parse_url("https://h/hames/").unwrap()).unwrap();
        assert_eq!(below.url("runs"), "https://h/hames/runs");
        for bad in ["ftp://h", "localhost:8080", "127.0.0.1:8080", ""] {
            assert!(parse_url(bad).unwrap_err().starts_with("must begin with http:// or https://"), "{bad}");
        }
        assert!(parse_url("http://").is_err());
    }
}
