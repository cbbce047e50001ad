//! `Idempotency-Key`: a change that is asked for again with the same key is made once, and answered as it was.
//!
//! The answer is kept in the same transaction as the change, so there is no moment at which one is there without the
//! other. A request that failed changed nothing and keeps nothing: it can be repeated with its key.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use super::problem::{Problem, ProblemCode, shown};
use super::state::HttpState;
use crate::domain::{TenantId, Timestamp};
use crate::store::{KeptAnswer, KeyUse};

/// The header that a caller sends.
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header of an answer that is given again.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Longest key.
const MAX_KEY: usize = 255;

/// The key of a request; `None` when it has none.
pub(super) fn key(parts: &Parts, body: &[u8], now: Timestamp) -> Result<Option<KeyUse>, Problem> {
    let mut given = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = given.next() else { return Ok(None) };
    let invalid = |detail: &str| Err(Problem::new(ProblemCode::InvalidHeader, format!("`Idempotency-Key` {detail}.")));
    if given.next().is_some() {
        return invalid("is given more than once");
    }
    let text = value.to_str().unwrap_or_default();
    // A structured field string has quotes (RFC 8941); most clients send none.
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    if text.is_empty() || text.len() > MAX_KEY || !text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
        return invalid("is not one; expected 1 to 255 visible ASCII characters");
    }
    let mut hash = Sha256::new();
    for piece in [parts.method.as_str().as_bytes(), b" ", parts.uri.path().as_bytes(), b"\n", body] {
        hash.update(piece);
    }
    let fingerprint = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Some(KeyUse { key: text.to_owned(), fingerprint, at: now }))
}

type Keys = Mutex<HashSet<(TenantId, String)>>;

/// The keys whose first request is being answered in this process.
#[derive(Debug, Default)]
pub(super) struct Flights(Arc<Keys>);

/// A request that is the first of its key, while it is answered.
pub(super) struct Flight {
    keys: Arc<Keys>,
    entry: (TenantId, String),
}

impl Drop for Flight {
    fn drop(&mut self) {
        lock(&self.keys).remove(&self.entry);
    }
}

fn lock(keys: &Keys) -> MutexGuard<'_, HashSet<(TenantId, String)>> {
    // Each change is one call, so a panic elsewhere leaves nothing half-changed.
    keys.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What to do about a request.
pub(super) enum Attempt {
    /// Make the change; hold this until it is answered.
    First(Option<Flight>),
    /// Answer as before.
    Again(KeptAnswer),
}

/// Finds out whether a request was answered before.
pub(super) async fn attempt(state: &HttpState, tenant: &TenantId, key: Option<&KeyUse>) -> Result<Attempt, Problem> {
    let Some(key) = key else { return Ok(Attempt::First(None)) };
    let entry = (tenant.clone(), key.key.clone());
    if !lock(&state.flights().0).insert(entry.clone()) {
        let detail = format!(
            "The first request with the `Idempotency-Key` `{}` is still being answered; try again in a second.",
            shown(&key.key)
        );
        return Err(Problem::new(ProblemCode::KeyInUse, detail).with_retry_after(Duration::from_secs(1)));
    }
    let flight = Flight { keys: Arc::clone(&state.flights().0), entry };
    match state.parts().store.kept_answer(tenant, &key.key, key.at).await? {
        Some(kept) => Ok(Attempt::Again(same(kept, key)?)),
        None => Ok(Attempt::First(Some(flight))),
    }
}

/// The answer to give again, if it is to the same request.
pub(super) fn same(kept: KeptAnswer, key: &KeyUse) -> Result<KeptAnswer, Problem> {
    if kept.fingerprint == key.fingerprint {
        return Ok(kept);
    }
    let detail = format!(
        "The `Idempotency-Key` `{}` was used for another request: its method, path or body differed; use a new key.",
        shown(&key.key)
    );
    Err(Problem::new(ProblemCode::KeyReused, detail))
}

/// The kept answer, as it was given.
pub(super) fn replay(kept: KeptAnswer, status: StatusCode) -> Response {
    let mut response = (status, Body::from(kept.answer)).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    mark(&mut response);
    response
}

/// Says that an answer is given again.
pub(super) fn mark(response: &mut Response) {
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
}
