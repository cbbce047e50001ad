//! What a caller prefers: the `Accept` (RFC 9110 §12.5.1) and `Prefer` (RFC 7240) headers.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::header::ACCEPT;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

/// The longest wait for a run to end, in seconds.
pub(super) const MAX_WAIT_SECONDS: u64 = 300;

/// The content type of an event stream.
pub(super) const EVENT_STREAM: &str = "text/event-stream";

/// The form of an answer that is offered as JSON and as an event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `application/json`, also for callers that accept neither (RFC 9110 lets a server disregard `Accept`).
    Json,
    /// `text/event-stream`, for callers that ask for it by name and do not prefer JSON.
    EventStream,
}

impl<S: Sync> FromRequestParts<S> for Form {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.headers))
    }
}

impl Form {
    /// What the `Accept` headers ask for. Of two forms with the same weight the one named first wins.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut form = Self::Json;
        let mut best = 0;
        for range in list_members(headers, ACCEPT.as_str()) {
            let mut parameters = range.split(';').map(str::trim);
            let named = match parameters.next() {
                Some(name) if name.eq_ignore_ascii_case(EVENT_STREAM) => Self::EventStream,
                Some(name) if name.eq_ignore_ascii_case("application/json") => Self::Json,
                Some(_) | None => continue,
            };
            let weight = parameters.find_map(quality).unwrap_or(1000);
            if weight > best {
                (form, best) = (named, weight);
            }
        }
        form
    }
}

/// A quality value in thousandths; `None` when the parameter is none.
fn quality(parameter: &str) -> Option<u32> {
    let value = parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q="))?;
    let value: f64 = value.trim().parse().ok()?;
    (0.0..=1.0).contains(&value).then_some((value * 1000.0) as u32)
}

/// How long the caller wants an answer to be held back, by `Prefer: wait=N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefer {
    /// Answer at once.
    Nothing,
    /// Answer once the run has ended, at most after this many seconds.
    Wait {
        /// From 0 to [`MAX_WAIT_SECONDS`]; more is cut to it.
        seconds: u64,
    },
}

impl<S: Sync> FromRequestParts<S> for Prefer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.headers))
    }
}

impl Prefer {
    /// What the `Prefer` headers ask for. A preference is a wish: what is not understood is left out of
    /// account (RFC 7240 §2), and of several waits the first counts.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        for preference in list_members(headers, "prefer") {
            let preference = preference.split(';').next().unwrap_or_default();
            let Some((name, value)) = preference.split_once('=') else { continue };
            if !name.trim().eq_ignore_ascii_case("wait") {
                continue;
            }
            let value = value.trim();
            let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
            if value.is_empty() || !value.bytes().all(|byte| byte.is_ascii_digit()) {
                return Self::Nothing;
            }
            // Only a number too large for its type fails here.
            let seconds = value.parse().unwrap_or(u64::MAX).min(MAX_WAIT_SECONDS);
            return Self::Wait { seconds };
        }
        Self::Nothing
    }

    /// How long to wait, and what to say in `Preference-Applied`.
    pub(super) fn wait(self) -> Option<(Duration, HeaderValue)> {
        match self {
            Self::Nothing => None,
            Self::Wait { seconds } => {
                let applied = HeaderValue::try_from(format!("wait={seconds}")).ok()?;
                Some((Duration::from_secs(seconds), applied))
            }
        }
    }
}

/// The members of a header that is a comma-separated list; commas inside quoted strings do not separate.
fn list_members<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = &'a str> {
    headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok()).flat_map(|value| {
        let mut quoted = false;
        value
            .split(move |c| {
                quoted ^= c == '"';
                c == ',' && !quoted
            })
            .map(str::trim)
    })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    fn headers(name: &'static str, values: &[&str]) -> HeaderMap {
        let entry = |value: &&str| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        values.iter().map(entry).collect()
    }

    #[test]
    fn an_event_stream_is_sent_to_who_asks_for_it() {
        for (accept, form) in [
            (&[][..], Form::Json),
            (&["*/*"], Form::Json),
            (&["text/html,application/xhtml+xml,*/*;q=0.8"], Form::Json),
            (&["text/*"], Form::Json),
            (&["text/event-stream"], Form::EventStream),
            (&["Text/Event-Stream; charset=utf-8"], Form::EventStream),
            (&["text/event-stream, */*"], Form::EventStream),
            (&["*/*", "text/event-stream;q=0.5"], Form::EventStream),
            (&["application/json, text/event-stream"], Form::Json),
            (&["text/event-stream, application/json"], Form::EventStream),
            (&["application/json;q=0.9", "text/event-stream"], Form::EventStream),
            (&["text/event-stream;q=0.1, application/json;q=0.2"], Form::Json),
            (&["text/event-stream;q=0"], Form::Json),
            (&["text/event-stream;q=nonsense"], Form::EventStream),
        ] {
            assert_eq!(Form::of(&headers("accept", accept)), form, "{accept:?}");
        }
    }

    #[test]
    fn a_wait_is_read_as_rfc_7240_has_it() {
        let wait = |seconds| Prefer::Wait { seconds };
        for (prefer, expected) in [
            (&[][..], Prefer::Nothing),
            (&["wait=10"], wait(10)),
            (&["WAIT = 10"], wait(10)),
            (&["wait=\"10\""], wait(10)),
            (&["wait=0"], wait(0)),
            (&["respond-async, wait=10; x=y"], wait(10)),
            (&["respond-async", "wait=10"], wait(10)),
            (&["foo=\"a, wait=3\", wait=10"], wait(10)),
            (&["wait=10, wait=20"], wait(10)),
            (&["wait=301"], wait(300)),
            (&["wait=99999999999999999999999"], wait(300)),
            (&["wait"], Prefer::Nothing),
            (&["wait="], Prefer::Nothing),
            (&["wait=-1"], Prefer::Nothing),
            (&["wait=1.5"], Prefer::Nothing),
            (&["wait=ten"], Prefer::Nothing),
            (&["waiting=10"], Prefer::Nothing),
        ] {
            assert_eq!(Prefer::of(&headers("prefer", prefer)), expected, "{prefer:?}");
        }
        let (held, applied) = wait(10).wait().unwrap();
        assert_eq!((held, applied.to_str().unwrap()), (Duration::from_secs(10), "wait=10"));
    }
}
