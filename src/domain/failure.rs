//! Why a model call failed, and why a run ended the way it did.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What kind of failure a model call met; decides whether another attempt makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The provider could not be reached, or failed on its side (5xx, 408, 409, 529).
    Unavailable,
    /// Too many requests for now (429 that will pass).
    RateLimited,
    /// The account has no balance or quota left; waiting does not help.
    QuotaExhausted,
    /// No answer, or no next piece of it, in time.
    TimedOut,
    /// The stream ended before the provider said it was done.
    Truncated,
    /// The response came whole and held nothing: no text, no call.
    Empty,
    /// What came breaks the provider's own protocol.
    Protocol,
    /// The request is larger than the model's window.
    ContextTooLong,
    /// The provider or the model declined.
    Refused,
    /// The key is missing, wrong, or not allowed.
    Authentication,
    /// The provider found the request invalid.
    InvalidRequest,
}

impl FailureClass {
    /// The stable code, as in `error.code` of a run.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Unavailable => "provider_unavailable",
            Self::RateLimited => "rate_limited",
            Self::QuotaExhausted => "quota_exhausted",
            Self::TimedOut => "model_timeout",
            Self::Truncated => "response_truncated",
            Self::Empty => "response_empty",
            Self::Protocol => "protocol_error",
            Self::ContextTooLong => "context_too_long",
            Self::Refused => "refused",
            Self::Authentication => "authentication_failed",
            Self::InvalidRequest => "invalid_request",
        }
    }

    /// Whether the same request may succeed later.
    pub const fn is_transient(self) -> bool {
        match self {
            Self::Unavailable | Self::RateLimited | Self::TimedOut | Self::Truncated | Self::Empty => true,
            Self::QuotaExhausted
            | Self::Protocol
            | Self::ContextTooLong
            | Self::Refused
            | Self::Authentication
            | Self::InvalidRequest => false,
        }
    }
}

/// A model call that gave no turn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ModelFailure {
    /// What kind.
    pub class: FailureClass,
    /// What happened, for a reader: names the provider, the status, the provider's own words (shortened).
    pub message: String,
    /// How long the provider asks to wait before another attempt.
    pub retry_after: Option<Duration>,
}

impl ModelFailure {
    /// A failure without a wish of the provider for the time of a retry.
    pub fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), retry_after: None }
    }
}

/// Why a run did not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunError {
    /// A stable, documented code.
    pub code: String,
    /// One sentence for a person: what happened, the value, what was allowed.
    pub message: String,
    /// Whether a new run of the same request may end better.
    pub retryable: bool,
}

impl From<ModelFailure> for RunError {
    fn from(failure: ModelFailure) -> Self {
        Self {
            code: failure.class.code().to_owned(),
            message: failure.message,
            retryable: failure.class.is_transient(),
        }
    }
}
