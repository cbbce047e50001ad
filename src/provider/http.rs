//! A provider behind HTTP, whatever its wire: connection, headers, status, and what may be said of them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Response, StatusCode, Url};
use secrecy::{ExposeSecret, SecretString};
use tokio::time::timeout;

use super::accumulator::Accumulator;
use super::client::{Decoder, Reader, read, silent};
use super::conversation::Conversation;
use super::error::{ProviderError, retry_after};
use super::names::NameMap;
use super::{DeltaSink, Provider, json};
use crate::domain::text::with_causes;
use crate::domain::{FailureClass, ModelFailure, ModelRequest, ModelTurn, TRACEPARENT, TRACESTATE, TraceContext};
use crate::time::Clock;
use crate::tls::client_builder;

/// Most bytes read of an error's body.
const MAX_ERROR_BODY_BYTES: usize = 64 * 1024;

/// One provider's way to write requests and responses. No IO, no policy.
pub trait Wire: Send + Sync + 'static {
    /// What differs between servers of this wire and is learnt from their refusals.
    type Dialect: Clone + PartialEq + fmt::Debug + Send;
    /// Reads one response.
    type Decoder: Decoder;

    /// The path below the base URL.
    fn path(&self) -> &'static str;
    /// What is assumed of a server at first.
    fn dialect(&self) -> Self::Dialect;
    /// How tool names are spelt in this request and its response.
    fn names(&self, request: &ModelRequest) -> NameMap;
    /// The request's body; what is new in it is added to the conversation.
    fn encode(
        &self,
        request: &ModelRequest,
        names: &NameMap,
        learnt: &Learnt<Self::Dialect>,
        conversation: &mut Conversation,
    ) -> Result<Vec<u8>, serde_json::Error>;
    /// A reader for one response.
    fn decoder(&self) -> Self::Decoder;
    /// What to assume from now on when the server refused a request written with `used`, if that may help.
    fn adapt(&self, used: &Self::Dialect, status: u16, error: &ProviderError, body: &str) -> Option<Self::Dialect>;
}

/// What is known of a server.
#[derive(Clone, Debug)]
pub struct Learnt<D> {
    /// What it takes.
    pub dialect: D,
    /// How often it corrected us.
    pub version: u64,
}

/// Where a provider is and how patient to be with it.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// The base URL; `http` or `https`.
    pub base_url: Url,
    /// Sent as `Authorization: Bearer`, never shown.
    pub api_key: Option<SecretString>,
    /// Most time for a connection.
    pub connect_timeout: Duration,
    /// Most time without a byte from the provider.
    pub idle_timeout: Duration,
}

/// The client cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The TLS library or the system's certificates do not work.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The HTTP client cannot be built.
    #[error("the HTTP client cannot be set up: {0}")]
    Client(#[from] reqwest::Error),
    /// The base URL cannot carry a path.
    #[error("the base URL has no path to add to; expected one such as https://api.example/v1")]
    BaseUrl,
    /// The key cannot be part of a header.
    #[error("the API key holds characters that no HTTP header can carry; look for line breaks in it")]
    Key,
}

/// A provider behind HTTP.
pub struct HttpProvider<W: Wire> {
    wire: W,
    learnt: Mutex<Learnt<W::Dialect>>,
    client: Client,
    url: Url,
    headers: HeaderMap,
    api_key: Option<SecretString>,
    idle_timeout: Duration,
    clock: Arc<dyn Clock>,
}

impl<W: Wire> HttpProvider<W> {
    /// Sets up the client; connects to nothing yet. The clock reads dates in `retry-after`.
    pub fn new(wire: W, settings: HttpSettings, clock: Arc<dyn Clock>) -> Result<Self, SetupError> {
        let mut url = settings.base_url;
        url.path_segments_mut().map_err(|()| SetupError::BaseUrl)?.pop_if_empty().extend(wire.path().split('/'));
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        if let Some(key) = &settings.api_key {
            let mut value =
                HeaderValue::from_str(&format!("Bearer {}", key.expose_secret())).map_err(|_| SetupError::Key)?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = client_builder(url.scheme())?.connect_timeout(settings.connect_timeout).build()?;
        let learnt = Mutex::new(Learnt { dialect: wire.dialect(), version: 0 });
        Ok(Self {
            wire,
            learnt,
            client,
            url,
            headers,
            api_key: settings.api_key,
            idle_timeout: settings.idle_timeout,
            clock,
        })
    }

    async fn attempt(
        &self,
        request: &ModelRequest,
        conversation: &mut Conversation,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, ModelFailure> {
        let names = self.wire.names(request);
        let response = self.send(request, conversation, &names).await?;
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let accumulator = Accumulator::new(request.step, names);
        let reader = Reader::new(content_type, self.wire.decoder(), accumulator);
        let bytes = response.bytes_stream().map(|piece| piece.map_err(|error| with_causes(&error.without_url())));
        read(bytes, self.idle_timeout, reader, sink).await
    }

    /// Sends the request, again where a refusal taught something about the server.
    async fn send(
        &self,
        request: &ModelRequest,
        conversation: &mut Conversation,
        names: &NameMap,
    ) -> Result<Response, ModelFailure> {
        let mut headers = self.headers.clone();
        if let Some(trace) = &request.trace {
            insert_trace(&mut headers, trace);
        }
        loop {
            let learnt = self.learnt().clone();
            let body = self.wire.encode(request, names, &learnt, conversation).map_err(|error| {
                ModelFailure::new(FailureClass::InvalidRequest, format!("the request cannot be written: {error}"))
            })?;
            let sending = self.client.post(self.url.clone()).headers(headers.clone()).body(body).send();
            let response = match timeout(self.idle_timeout, sending).await {
                Ok(Ok(response)) => response,
                Ok(Err(error)) => return Err(self.unreachable(error)),
                Err(_) => return Err(silent(self.idle_timeout)),
            };
            if response.status().is_success() {
                return Ok(response);
            }
            let status = response.status();
            let headers = response.headers().clone();
            let body = error_body(response, self.idle_timeout).await;
            let value = json::document(&body).and_then(json::value);
            let error = value.as_ref().and_then(ProviderError::find).unwrap_or_else(|| ProviderError::text(&body));
            // Each correction leaves the dialect it corrects for good, so this ends.
            match self.wire.adapt(&learnt.dialect, status.as_u16(), &error, &body) {
                Some(better) if better != learnt.dialect => {
                    tracing::info!(
                        host = self.url.host_str(), %status, refused = ?learnt.dialect, from_now_on = ?better,
                        "the provider refused an option; it is asked without it"
                    );
                    let mut learnt = self.learnt();
                    *learnt = Learnt { dialect: better, version: learnt.version + 1 };
                }
                Some(_) | None => return Err(self.refused(status, &headers, &error)),
            }
        }
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt<W::Dialect>> {
        // Each change is one assignment, so a panic elsewhere leaves nothing half-changed.
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, status: StatusCode, headers: &HeaderMap, error: &ProviderError) -> ModelFailure {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let own = error.class_of_status(status.as_u16());
        // The header is how OpenAI and its SDKs overrule the status.
        let (class, note) = match (header("x-should-retry"), own) {
            (Some("true"), class) if !class.is_transient() => {
                (FailureClass::Unavailable, "; it asks for another attempt")
            }
            (Some("false"), FailureClass::RateLimited) => (FailureClass::QuotaExhausted, "; it asks not to try again"),
            (Some("false"), class) if class.is_transient() => (FailureClass::Refused, "; it asks not to try again"),
            (_, class) => (class, ""),
        };
        ModelFailure {
            class,
            message: format!("answered {status}: {}{note}", error.excerpt()),
            retry_after: retry_after(header("retry-after-ms"), header("retry-after"), self.clock.now()),
        }
    }

    fn unreachable(&self, error: reqwest::Error) -> ModelFailure {
        let error = error.without_url();
        let class = if error.is_timeout() { FailureClass::TimedOut } else { FailureClass::Unavailable };
        let hint = if error.is_connect() { "; is it running, and is providers.NAME.base_url its address?" } else { "" };
        ModelFailure::new(class, format!("could not be asked: {}{hint}", with_causes(&error)))
    }

    /// Puts the provider's name before a message and makes sure that the key is not in it.
    fn present(&self, mut failure: ModelFailure) -> ModelFailure {
        if let Some(key) = self.api_key.as_ref().map(ExposeSecret::expose_secret).filter(|key| !key.is_empty()) {
            failure.message = failure.message.replace(key, "[key]");
        }
        let port = self.url.port().map(|port| format!(":{port}")).unwrap_or_default();
        failure.message = format!("{}{port}: {}", self.url.host_str().unwrap_or_default(), failure.message);
        failure
    }
}

#[async_trait]
impl<W: Wire> Provider for HttpProvider<W> {
    async fn call(
        &self,
        request: &ModelRequest,
        conversation: &mut Conversation,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, ModelFailure> {
        self.attempt(request, conversation, sink).await.map_err(|failure| self.present(failure))
    }
}

/// Tells the provider which span it works for.
fn insert_trace(headers: &mut HeaderMap, trace: &TraceContext) {
    let value = |text: &str| HeaderValue::from_str(text).ok();
    if let Some(parent) = value(&trace.to_string()) {
        headers.insert(TRACEPARENT, parent);
        if let Some(state) = trace.state.as_deref().and_then(value) {
            headers.insert(TRACESTATE, state);
        }
    }
}

/// As much of an error's body as is worth reading; what cannot be read in time is left out.
async fn error_body(mut response: Response, idle: Duration) -> String {
    let mut body = Vec::new();
    while body.len() < MAX_ERROR_BODY_BYTES {
        match timeout(idle, response.chunk()).await {
            Ok(Ok(Some(piece))) => body.extend_from_slice(&piece),
            Ok(Ok(None) | Err(_)) | Err(_) => break,
        }
    }
    body.truncate(MAX_ERROR_BODY_BYTES);
    String::from_utf8_lossy(&body).into_owned()
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
