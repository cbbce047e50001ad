//! Requests to a collector: OTLP over HTTP, with the attempts that the protocol asks for.

use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, StatusCode, Url};
use secrecy::ExposeSecret as _;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::TelemetryError;
use crate::config::{OtlpEndpoint, TelemetryConfig};
use crate::tls::client_builder;

/// Most attempts to send the same spans or metrics.
const ATTEMPTS: u32 = 3;
/// Wait before the second attempt, unless the collector says how long; each later one is twice as long.
const BACKOFF: Duration = Duration::from_secs(1);
/// A collector that asks for a longer wait is not asked again with the same.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Most bytes read of an answer.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// The client for a collector, with its headers.
pub(super) fn client(endpoint: &OtlpEndpoint, config: &TelemetryConfig) -> Result<Client, TelemetryError> {
    let mut headers = HeaderMap::new();
    for (name, value) in config.otlp_headers.iter() {
        // Both were checked when the settings were loaded.
        if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::from_str(value.expose_secret())) {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    let builder = client_builder(endpoint.scheme())?;
    Ok(builder.timeout(Duration::from_millis(config.otlp_timeout_ms)).default_headers(headers).build()?)
}

/// Why a collector did not take something.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// It could not be reached, or did not answer in time.
    #[error("it cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// It refused.
    #[error("it answered {status}")]
    Refused {
        /// Its answer.
        status: StatusCode,
        /// How long it asks to wait before another attempt.
        retry_after: Option<Duration>,
    },
}

impl SendError {
    /// How long to wait before the next attempt, after so many; `None` where none is to be made. What the protocol says
    /// ("Failures", "Retryable response codes", "OTLP/HTTP throttling").
    fn wait(&self, attempts: u32) -> Option<Duration> {
        if attempts >= ATTEMPTS {
            return None;
        }
        let backoff = BACKOFF.saturating_mul(1 << attempts.saturating_sub(1));
        match self {
            Self::Unreachable(_) => Some(backoff),
            Self::Refused { status, retry_after } => match status.as_u16() {
                429 | 502 | 503 | 504 => Some(retry_after.unwrap_or(backoff)).filter(|wait| *wait <= MAX_WAIT),
                _ => None,
            },
        }
    }
}

/// Reads `retry-after` as seconds. A date is as good as no wish: collectors do not send any.
fn retry_after(text: &str) -> Option<Duration> {
    text.trim().parse().ok().map(Duration::from_secs)
}

/// The way to one address of a collector.
pub(super) struct Sender {
    pub(super) client: Client,
    pub(super) url: Url,
    /// Fires when the program ends.
    pub(super) closing: CancellationToken,
}

impl Sender {
    /// Sends a message and gives the answer; tries again where that may help, but not once the program is ending.
    pub(super) async fn send(&self, message: Vec<u8>) -> Result<Vec<u8>, SendError> {
        let message = bytes::Bytes::from(message);
        let mut attempt = 1;
        loop {
            let error = match self.attempt(message.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let Some(wait) = error.wait(attempt).filter(|_| !self.closing.is_cancelled()) else { return Err(error) };
            if self.closing.run_until_cancelled(sleep(wait)).await.is_none() {
                return Err(error);
            }
            attempt += 1;
        }
    }

    async fn attempt(&self, message: bytes::Bytes) -> Result<Vec<u8>, SendError> {
        let sent = self.client.post(self.url.clone()).body(message).send().await;
        let mut response = sent.map_err(|error| SendError::Unreachable(error.without_url()))?;
        if !response.status().is_success() {
            let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| retry_after(value.to_str().ok()?));
            return Err(SendError::Refused { status: response.status(), retry_after });
        }
        let mut answer = Vec::new();
        while answer.len() < MAX_ANSWER_BYTES {
            match response.chunk().await {
                Ok(Some(piece)) => answer.extend_from_slice(&piece),
                // The status counts; the rest only says how much of it was taken.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_follow_what_the_collector_asks_for() {
        let refused = |status: u16, after: Option<&str>| SendError::Refused {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after: after.and_then(retry_after),
        };
        let seconds = |error: &SendError, attempts| error.wait(attempts).map(|wait| wait.as_secs());
        for (error, expected) in [
            (refused(503, None), [Some(1), Some(2), None]),
            (refused(503, Some("7")), [Some(7), Some(7), None]),
            (refused(429, Some(" 0 ")), [Some(0), Some(0), None]),
            (refused(429, Some("61")), [None; 3]),
            (refused(502, Some("Wed, 21 Oct 2026 07:28:00 GMT")), [Some(1), Some(2), None]),
            (refused(400, Some("1")), [None; 3]),
            (refused(500, None), [None; 3]),
        ] {
            assert_eq!([1, 2, 3].map(|attempts| seconds(&error, attempts)), expected, "{error:?}");
        }
    }
}
