//! Errors as callers see them: `application/problem+json` (RFC 9457). The one place with status codes of errors.

use std::fmt;
use std::time::Duration;

use axum::Json;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::{FieldError, text};
use crate::event::SubscribeError;
use crate::run::{AnswerProblem, CreateError, OutsideError};
use crate::store::StoreError;

/// The content type of a problem.
pub(super) const PROBLEM_JSON: &str = "application/problem+json";

/// How long to wait before trying again when the store or the server is on its way back.
const SOON: Duration = Duration::from_secs(5);

/// Most characters of a caller's own text that an error repeats.
const MAX_SHOWN: usize = 64;

/// What went wrong, as a stable code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum ProblemCode {
    /// The body is not JSON (RFC 8259) in UTF-8, has a key twice, or is nested too deep.
    InvalidJson,
    /// The body is JSON and not a valid request; `errors` names each field.
    InvalidRequest,
    /// A query parameter is unknown, given twice, or has a value it cannot have.
    InvalidQuery,
    /// The cursor is not one of this run's.
    InvalidCursor,
    /// A header is missing, malformed, or asks for something this server does not do.
    InvalidHeader,
    /// The `Host` is not a name of this machine (protection against DNS rebinding).
    HostNotAllowed,
    /// A page of another origin made the request.
    OriginNotAllowed,
    /// No run has this id.
    RunNotFound,
    /// No route has this path.
    RouteNotFound,
    /// The run was there and its data is erased.
    RunErased,
    /// The run is in a state that does not allow this.
    RunConflict,
    /// A call does not wait for this answer; none of the answers was taken.
    CallConflict,
    /// Another run of the thread has not ended.
    ThreadBusy,
    /// The first request with this `Idempotency-Key` is still being answered.
    KeyInUse,
    /// The `Idempotency-Key` was used for another request.
    KeyReused,
    /// The path exists and does not take this method; `Allow` lists those it takes.
    MethodNotAllowed,
    /// The body did not arrive in time.
    BodyTimeout,
    /// The body is larger than this server accepts.
    BodyTooLarge,
    /// The body is not `application/json`, or is encoded.
    UnsupportedMediaType,
    /// The headers are more or larger than this server accepts.
    HeadersTooLarge,
    /// The server is at fault; its log says more, under the request's id.
    InternalError,
    /// Too many runs are waiting already, or too much of bodies is being read.
    Overloaded,
    /// The server is stopping.
    Stopping,
    /// The database does not answer.
    StoreUnavailable,
}

impl ProblemCode {
    /// All of them.
    pub(super) const ALL: [Self; 24] = [
        Self::InvalidJson,
        Self::InvalidRequest,
        Self::InvalidQuery,
        Self::InvalidCursor,
        Self::InvalidHeader,
        Self::HostNotAllowed,
        Self::OriginNotAllowed,
        Self::RunNotFound,
        Self::RouteNotFound,
        Self::RunErased,
        Self::RunConflict,
        Self::CallConflict,
        Self::ThreadBusy,
        Self::KeyInUse,
        Self::KeyReused,
        Self::MethodNotAllowed,
        Self::BodyTimeout,
        Self::BodyTooLarge,
        Self::UnsupportedMediaType,
        Self::HeadersTooLarge,
        Self::InternalError,
        Self::Overloaded,
        Self::Stopping,
        Self::StoreUnavailable,
    ];

    /// The published spelling.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::InvalidRequest => "invalid_request",
            Self::InvalidQuery => "invalid_query",
            Self::InvalidCursor => "invalid_cursor",
            Self::InvalidHeader => "invalid_header",
            Self::HostNotAllowed => "host_not_allowed",
            Self::OriginNotAllowed => "origin_not_allowed",
            Self::RunNotFound => "run_not_found",
            Self::RouteNotFound => "route_not_found",
            Self::RunErased => "run_erased",
            Self::RunConflict => "run_conflict",
            Self::CallConflict => "call_conflict",
            Self::ThreadBusy => "thread_busy",
            Self::KeyInUse => "key_in_use",
            Self::KeyReused => "key_reused",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::BodyTimeout => "body_timeout",
            Self::BodyTooLarge => "body_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::HeadersTooLarge => "headers_too_large",
            Self::InternalError => "internal_error",
            Self::Overloaded => "overloaded",
            Self::Stopping => "stopping",
            Self::StoreUnavailable => "store_unavailable",
        }
    }

    /// The status it is answered with.
    pub(super) const fn status(self) -> StatusCode {
        match self {
            Self::InvalidJson
            | Self::InvalidRequest
            | Self::InvalidQuery
            | Self::InvalidCursor
            | Self::InvalidHeader => StatusCode::BAD_REQUEST,
            Self::HostNotAllowed | Self::OriginNotAllowed => StatusCode::FORBIDDEN,
            Self::RunNotFound | Self::RouteNotFound => StatusCode::NOT_FOUND,
            Self::RunErased => StatusCode::GONE,
            Self::RunConflict | Self::CallConflict | Self::ThreadBusy | Self::KeyInUse => StatusCode::CONFLICT,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Overloaded | Self::Stopping | Self::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// A short, stable summary.
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::InvalidJson => "The body is not valid JSON",
            Self::InvalidRequest => "The request is not valid",
            Self::InvalidQuery => "A query parameter is not valid",
            Self::InvalidCursor => "The cursor is not valid",
            Self::InvalidHeader => "A header is not valid",
            Self::HostNotAllowed => "The host is not allowed",
            Self::OriginNotAllowed => "The origin is not allowed",
            Self::RunNotFound => "No such run",
            Self::RouteNotFound => "No such route",
            Self::RunErased => "The run is erased",
            Self::RunConflict => "The run's state does not allow this",
            Self::CallConflict => "A call does not wait for this",
            Self::ThreadBusy => "The thread is busy",
            Self::KeyInUse => "The key is in use",
            Self::KeyReused => "The key was used for another request",
            Self::MethodNotAllowed => "The method is not allowed",
            Self::BodyTimeout => "The body came too slowly",
            Self::BodyTooLarge => "The body is too large",
            Self::UnsupportedMediaType => "The body's type is not supported",
            Self::HeadersTooLarge => "The headers are too large",
            Self::InternalError => "The server failed",
            Self::Overloaded => "The server is at capacity",
            Self::Stopping => "The server is stopping",
            Self::StoreUnavailable => "The database is unavailable",
        }
    }
}

/// An error on its way to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    code: ProblemCode,
    detail: String,
    errors: Vec<FieldError>,
    retry_after: Option<Duration>,
}

/// An error (RFC 9457). `code` is stable and made for programs; `detail` is made for people and may change.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemBody {
    /// A URI reference that names the kind of problem: `/problems/` and the code.
    #[serde(rename = "type")]
    #[schema(example = "/problems/run_not_found")]
    kind: String,
    /// A short summary, the same for every problem of this kind.
    #[schema(example = "No such run")]
    title: &'static str,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599, example = 404)]
    status: u16,
    /// What happened this time: the thing, the value, what was expected.
    #[schema(
        example = "There is no run with this id; an id is what `POST /runs` gave: `run_` and 32 hexadecimal digits."
    )]
    detail: String,
    /// The kind of problem.
    code: ProblemCode,
    /// What is at fault, where it can be named: `$` and a path in the body, `?` and a query parameter.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    errors: Vec<FieldError>,
}

impl Problem {
    /// A problem with its own words.
    pub(super) fn new(code: ProblemCode, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), errors: Vec::new(), retry_after: None }
    }

    /// A problem of one field, which is also the detail.
    pub(super) fn field(code: ProblemCode, error: FieldError) -> Self {
        Self::fields(code, vec![error])
    }

    /// A problem of several fields; the first one is the detail.
    pub(super) fn fields(code: ProblemCode, errors: Vec<FieldError>) -> Self {
        let detail = match errors.as_slice() {
            [] => code.title().to_owned(),
            [only] => format!("{}: {}", only.path, only.message),
            [first, rest @ ..] => format!("{}: {} (and {} more)", first.path, first.message, rest.len()),
        };
        Self { code, detail, errors, retry_after: None }
    }

    /// The same answer for a run that does not exist, that is another tenant's, and for a text that is no id.
    pub(super) fn run_not_found() -> Self {
        Self::new(
            ProblemCode::RunNotFound,
            "There is no run with this id; an id is what `POST /runs` gave: `run_` and 32 hexadecimal digits.",
        )
    }

    /// The run was there.
    pub(super) fn run_erased() -> Self {
        Self::new(ProblemCode::RunErased, "This run's data is erased; nothing of it is held any more.")
    }

    /// The server is at fault. What happened is logged by the caller of this and never told.
    pub(super) fn internal() -> Self {
        Self::new(
            ProblemCode::InternalError,
            "The server failed to answer. Its log says more, under this request's id.",
        )
    }

    /// The server is stopping.
    pub(super) fn stopping() -> Self {
        Self::new(ProblemCode::Stopping, "The server is stopping and accepts nothing new. Try again soon.")
            .with_retry_after(SOON)
    }

    /// The bodies being read take all the room there is for them.
    pub(super) fn bodies_overload() -> Self {
        let detail = "The bodies this server is reading take as much memory as it has for them. Nothing was created.";
        Self::new(ProblemCode::Overloaded, detail).with_retry_after(SOON)
    }

    /// Tells when to try again.
    pub(super) fn with_retry_after(mut self, retry_after: Duration) -> Self {
        self.retry_after = Some(retry_after);
        self
    }
}

/// For tests, which look inside.
#[cfg(test)]
impl Problem {
    /// The code.
    pub(super) const fn code(&self) -> ProblemCode {
        self.code
    }

    /// The words.
    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    /// The fields at fault.
    pub(super) fn errors(&self) -> &[FieldError] {
        &self.errors
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.code.status();
        let body = ProblemBody {
            kind: format!("/problems/{}", self.code.as_str()),
            title: self.code.title(),
            status: status.as_u16(),
            detail: self.detail,
            code: self.code,
            errors: self.errors,
        };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        if let Some(wait) = self.retry_after {
            // Whole seconds, rounded up: asked to wait 1.5 s, nobody should come back after 1.
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        response
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match &error {
            StoreError::Unavailable(_) => {
                tracing::warn!(error = %error, "the database is unavailable");
                Self::new(ProblemCode::StoreUnavailable, "The database does not answer. Try again soon.")
                    .with_retry_after(SOON)
            }
            // This process is about to end; another one may serve the repetition.
            StoreError::Failed(_) => {
                tracing::error!(error = %error, "the database failed");
                Self::new(ProblemCode::StoreUnavailable, "The database failed; this server has to be started again.")
                    .with_retry_after(SOON)
            }
            StoreError::ThreadBusy { run } => {
                let detail = format!(
                    "{run} has not ended. Wait for its end, or say `on_busy`: `queue` or `interrupt`. Nothing was created."
                );
                Self::new(ProblemCode::ThreadBusy, detail)
            }
            StoreError::NoPredecessor { run } => {
                let message = format!("there is no run {run} to continue");
                Self::field(ProblemCode::InvalidRequest, FieldError::new("$.previous_run", message))
            }
            StoreError::Fenced { .. }
            | StoreError::Unread { .. }
            | StoreError::KeyTaken(_)
            | StoreError::CancelRequested { .. }
            | StoreError::Corrupt { .. }
            | StoreError::Unusable(_) => {
                tracing::error!(error = %error, "a request met something that must not be");
                Self::internal()
            }
        }
    }
}

impl From<CreateError> for Problem {
    fn from(error: CreateError) -> Self {
        match error {
            CreateError::Invalid(errors) => Self::fields(ProblemCode::InvalidRequest, errors),
            CreateError::Overloaded { retry_after } => {
                let detail = "As many runs are waiting as this server accepts. Nothing was created.";
                Self::new(ProblemCode::Overloaded, detail).with_retry_after(retry_after)
            }
            CreateError::Stopping => Self::stopping(),
            CreateError::Store(error) => error.into(),
            CreateError::Internal(reason) => {
                tracing::error!(reason, "a run could not be created");
                Self::internal()
            }
        }
    }
}

impl From<OutsideError> for Problem {
    fn from(error: OutsideError) -> Self {
        let detail = error.to_string();
        match error {
            OutsideError::Unknown => Self::run_not_found(),
            OutsideError::NotWaiting(_) | OutsideError::Ended(_) | OutsideError::Raced => {
                Self::new(ProblemCode::RunConflict, format!("Nothing was changed: {detail}."))
            }
            OutsideError::Answer(AnswerProblem::NotPending { .. } | AnswerProblem::WrongKind { .. }) => {
                Self::new(ProblemCode::CallConflict, format!("No answer was taken: {detail}."))
            }
            OutsideError::Answer(AnswerProblem::Twice(_) | AnswerProblem::Arguments { .. }) => {
                Self::new(ProblemCode::InvalidRequest, format!("No answer was taken: {detail}."))
            }
            OutsideError::Invalid(errors) => Self::fields(ProblemCode::InvalidRequest, errors),
            OutsideError::Store(error) => error.into(),
            OutsideError::Internal(reason) => {
                tracing::error!(reason, "a change to a run failed");
                Self::internal()
            }
        }
    }
}

impl From<SubscribeError> for Problem {
    fn from(error: SubscribeError) -> Self {
        match error {
            SubscribeError::NotFound => Self::run_not_found(),
            SubscribeError::BeyondEnd { last_seq } => Self::beyond_end(last_seq),
            SubscribeError::Store(error) => error.into(),
        }
    }
}

impl Problem {
    /// A cursor that lies beyond the newest event.
    pub(super) fn beyond_end(last_seq: u64) -> Self {
        let detail = format!(
            "The cursor lies beyond the end of this run's log, whose newest event has the number {last_seq}; give the \
                 `id` of an event that this run's stream has sent, or none."
        );
        Self::new(ProblemCode::InvalidCursor, detail)
    }
}

/// A caller's text as an error may repeat it: short, on one line, no control characters.
pub(super) fn shown(given: &str) -> String {
    text::shown(given, MAX_SHOWN)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;

    async fn answer(problem: Problem) -> (u16, Option<String>, String, Value) {
        let response = problem.into_response();
        let header = |name| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        let (status, retry, kind) = (response.status().as_u16(), header(RETRY_AFTER), header(CONTENT_TYPE).unwrap());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, retry, kind, serde_json::from_slice(&bytes).unwrap())
    }

    #[tokio::test]
    async fn a_problem_has_its_whole_published_form() {
        let errors = vec![FieldError::new("$.a", "is bad"), FieldError::new("$.b", "too")];
        let problem: Problem = CreateError::Invalid(errors).into();
        assert_eq!(
            answer(problem).await,
            (
                400,
                None,
                PROBLEM_JSON.to_owned(),
                json!({"type": "/problems/invalid_request", "title": "The request is not valid", "status": 400,
                       "detail": "$.a: is bad (and 1 more)", "code": "invalid_request",
                       "errors": [{"path": "$.a", "message": "is bad"}, {"path": "$.b", "message": "too"}]})
            )
        );
        assert_eq!(
            answer(Problem::run_not_found()).await.3,
            json!({"type": "/problems/run_not_found", "title": "No such run", "status": 404,
                   "detail": "There is no run with this id; an id is what `POST /runs` gave: `run_` and 32 hexadecimal digits.", "code": "run_not_found"})
        );
    }

    #[tokio::test]
    async fn overload_says_when_to_come_back_in_whole_seconds_rounded_up() {
        for (millis, seconds) in [(0, "1"), (999, "1"), (1000, "1"), (1500, "2")] {
            let problem: Problem = CreateError::Overloaded { retry_after: Duration::from_millis(millis) }.into();
            let (status, retry, ..) = answer(problem).await;
            assert_eq!((status, retry.as_deref()), (503, Some(seconds)), "{millis} ms");
        }
        let failed = StoreError::Failed("canary: /var/lib/x".into());
        for problem in [CreateError::Stopping.into(), StoreError::Unavailable("gone".into()).into(), failed.into()] {
            let (status, retry, _, body) = answer(problem).await;
            assert_eq!((status, retry.as_deref()), (503, Some("5")));
            assert!(!body.to_string().contains("canary"), "{body}");
        }
    }

    #[tokio::test]
    async fn inner_failures_are_not_told() {
        for problem in [
            Problem::from(CreateError::Internal("canary".into())),
            SubscribeError::Store(StoreError::Unusable("canary".into())).into(),
        ] {
            let (status, _, _, body) = answer(problem).await;
            assert_eq!(status, 500);
            assert!(!body.to_string().contains("canary"), "{body}");
        }
    }

    #[test]
    fn codes_are_spelt_as_serialised_and_differ() {
        let mut seen = std::collections::HashSet::new();
        for code in ProblemCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert!(seen.insert(code.as_str()), "{code:?}");
            assert!(code.status().is_client_error() || code.status().is_server_error());
        }
    }
}
