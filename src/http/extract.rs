//! What handlers take from a request: whose it is, which run it names, its body.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::body;
use super::idempotency;
use super::problem::{Problem, ProblemCode, shown};
use super::room::Held;
use super::state::HttpState;
use crate::domain::{RunId, TenantId, TraceContext};
use crate::run::Caller;
use crate::store::KeyUse;

/// Whose request it is. A server without keys serves its own machine, which is one tenant.
pub(super) struct Tenant(pub(super) TenantId);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Problem;

    async fn from_request_parts(_: &mut Parts, _: &S) -> Result<Self, Problem> {
        Ok(Self(TenantId::local()))
    }
}

/// The run a path names. What is no id gets the answer of an id that does not exist.
pub(super) struct RunPath(pub(super) RunId);

impl<S: Send + Sync> FromRequestParts<S> for RunPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let text = Path::<String>::from_request_parts(parts, state).await.map_err(|_| Problem::run_not_found())?;
        text.parse().map(Self).map_err(|_| Problem::run_not_found())
    }
}

/// Whose request for a run it is, when there is room for one more. Asked before the body is read: a request that
/// would be refused costs nothing.
pub(super) struct Admitted(pub(super) Caller);

impl FromRequestParts<HttpState> for Admitted {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, Problem> {
        let Tenant(tenant) = Tenant::from_request_parts(parts, state).await?;
        state.parts().supervisor.has_room()?;
        // Put there by `watch::begin`.
        let trace = parts.extensions.get::<TraceContext>().cloned();
        Ok(Self(Caller { tenant, trace }))
    }
}

/// A JSON body, read under the server's limits of size, time and memory.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<HttpState> for JsonBody<T> {
    type Rejection = Rejection;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, Rejection> {
        read_body(request, state, |_, bytes| Ok(Self(body::decode(bytes)?))).await
    }
}

/// A JSON body of a change that may be made under an `Idempotency-Key`.
pub(super) struct KeyedBody<T> {
    /// The body.
    pub(super) body: T,
    /// The key, if the request has one.
    pub(super) key: Option<KeyUse>,
}

impl<T: DeserializeOwned> FromRequest<HttpState> for KeyedBody<T> {
    type Rejection = Rejection;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, Rejection> {
        read_body(request, state, |parts, bytes| {
            let now = state.parts().clock.now();
            Ok(Self { key: idempotency::key(parts, bytes, now)?, body: body::decode(bytes)? })
        })
        .await
    }
}

async fn read_body<T>(
    request: Request,
    state: &HttpState,
    read: impl FnOnce(&Parts, &[u8]) -> Result<T, Problem>,
) -> Result<T, Rejection> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers)?;
    let server = &state.parts().server;
    let time = Duration::from_millis(server.body_timeout_ms);
    let mut held = state.bodies().begin();
    let bytes = collect(&parts.headers, body, server.max_body_bytes, time, &mut held).await?;
    Ok(read(&parts, &bytes)?)
}

/// Why a body was not taken.
#[derive(Debug)]
pub(super) enum Rejection {
    /// A problem as it is.
    Problem(Problem),
    /// An encoded body; the answer names the encodings that are taken (RFC 9110 §12.5.3).
    Encoded(Problem),
}

impl From<Problem> for Rejection {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        match self {
            Self::Problem(problem) => problem.into_response(),
            Self::Encoded(problem) => {
                let mut response = problem.into_response();
                response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
                response
            }
        }
    }
}

/// Encoded bodies are refused, since a small one can unpack to any size. Requiring the JSON type keeps forms of
/// other sites out: a browser sends those without asking first.
fn check_type(headers: &HeaderMap) -> Result<(), Rejection> {
    if let Some(encoding) = headers.get(CONTENT_ENCODING) {
        let encoding = shown(&String::from_utf8_lossy(encoding.as_bytes()));
        let detail = format!("The body has the content encoding `{encoding}`; send it without any.");
        return Err(Rejection::Encoded(Problem::new(ProblemCode::UnsupportedMediaType, detail)));
    }
    let unsupported = |detail: String| Err(Problem::new(ProblemCode::UnsupportedMediaType, detail).into());
    let Some(given) = headers.get(CONTENT_TYPE) else {
        return unsupported("The request has no content type; expected `application/json`.".to_owned());
    };
    let given = String::from_utf8_lossy(given.as_bytes());
    let mut parts = given.split(';').map(str::trim);
    let is_json = parts.next().is_some_and(|essence| essence.eq_ignore_ascii_case("application/json"));
    let is_utf8 = parts.filter_map(|parameter| parameter.split_once('=')).all(|(name, value)| {
        !name.eq_ignore_ascii_case("charset") || value.trim_matches('"').eq_ignore_ascii_case("utf-8")
    });
    if is_json && is_utf8 {
        Ok(())
    } else {
        unsupported(format!("The body has the content type `{}`; expected `application/json`.", shown(&given)))
    }
}

/// Reads a body to its end, and never holds more of it than `limit` and than there is room for.
async fn collect(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    time: Duration,
    held: &mut Held<'_>,
) -> Result<Vec<u8>, Problem> {
    let too_large = || {
        let detail =
            format!("The body is larger than the {limit} bytes this server accepts (`server.max_body_bytes`).");
        Problem::new(ProblemCode::BodyTooLarge, detail)
    };
    let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| usize::try_from(length).map_or(true, |length| length > limit)) {
        return Err(too_large());
    }
    let mut body = Limited::new(body, limit);
    let read = async {
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                if error.is::<LengthLimitError>() {
                    return too_large();
                }
                tracing::debug!(error = %error, "a body broke off");
                Problem::new(ProblemCode::InvalidJson, "The body broke off before its end.")
            })?;
            // Trailers are no part of the body.
            let Ok(piece) = frame.into_data() else { continue };
            held.grow(piece.len())?;
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    };
    tokio::time::timeout(time, read).await.unwrap_or_else(|_| {
        let detail = format!("The body did not arrive within {} ms.", time.as_millis());
        Err(Problem::new(ProblemCode::BodyTimeout, detail))
    })
}

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
