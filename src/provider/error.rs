//! What a provider's error means: its status, its code and its words become a class of failure.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;

use crate::domain::{FailureClass, Timestamp, text};

/// Longest excerpt of a provider's own words in a message, in characters.
const MAX_EXCERPT_CHARS: usize = 500;
/// The longest wait a provider can ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(120);

/// An error as a provider words it, in a body or inside a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProviderError {
    /// Its own code; a number or a word, as text.
    pub code: Option<String>,
    /// Its own type.
    pub kind: Option<String>,
    /// Its words; may be empty.
    pub message: String,
}

impl ProviderError {
    /// Finds the error in a JSON document of any of the usual forms: `{"error": {…}}`, `{"error": "…"}`,
    /// `{"message": …}`, `{"detail": …}`, and a list of one of them.
    pub fn find(value: &Value) -> Option<Self> {
        match value {
            Value::Array(items) => items.first().and_then(Self::find),
            Value::Object(fields) => match fields.get("error") {
                Some(Value::Null | Value::Bool(false)) | None => ["message", "detail"]
                    .iter()
                    .find_map(|name| fields.get(*name))
                    .map(|message| Self { message: words(message), ..Self::coded(value) }),
                Some(Value::String(title)) => {
                    let message = fields.get("message").and_then(Value::as_str).unwrap_or(title);
                    Some(Self { message: message.to_owned(), ..Self::coded(value) })
                }
                Some(error) => Some(Self::read(error)),
            },
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
        }
    }

    /// Reads the error object itself, or the text in its place.
    pub fn read(error: &Value) -> Self {
        match error.get("message").or_else(|| error.get("detail")) {
            Some(message) => Self { message: words(message), ..Self::coded(error) },
            None => Self { message: words(error), ..Self::coded(error) },
        }
    }

    /// An error of which only the words are known.
    pub fn text(message: &str) -> Self {
        Self { message: message.to_owned(), ..Self::default() }
    }

    fn coded(value: &Value) -> Self {
        let field = |name: &str| match value.get(name)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
        };
        Self { code: field("code").or_else(|| field("status")), kind: field("type"), message: String::new() }
    }

    /// The class of an error that came with an HTTP status.
    ///
    /// An exhausted balance is told by its code, never by the word quota: others use it for limits that pass.
    pub fn class_of_status(&self, status: u16) -> FailureClass {
        match status {
            401 | 403 => FailureClass::Authentication,
            402 => FailureClass::QuotaExhausted,
            429 if self.is_quota() => FailureClass::QuotaExhausted,
            429 => FailureClass::RateLimited,
            408 | 409 | 500.. => FailureClass::Unavailable,
            413 => FailureClass::ContextTooLong,
            _ if self.is_context_length() => FailureClass::ContextTooLong,
            _ => FailureClass::InvalidRequest,
        }
    }

    /// The class of an error inside a stream that began well. Without a known code it is the provider's
    /// own trouble, which may pass.
    pub fn class_in_stream(&self) -> FailureClass {
        let status = self.code.as_deref().and_then(|code| code.parse::<u16>().ok());
        if let Some(status @ 400..600) = status {
            return self.class_of_status(status);
        }
        if self.is_quota() {
            return FailureClass::QuotaExhausted;
        }
        if self.is_context_length() {
            return FailureClass::ContextTooLong;
        }
        let known = |word: Option<&String>| match word?.to_ascii_lowercase().as_str() {
            "rate_limit_exceeded" | "rate_limit_error" | "rate_limit" | "too_many_requests" => {
                Some(FailureClass::RateLimited)
            }
            "invalid_request_error"
            | "invalid_request"
            | "invalid_prompt"
            | "bad_request"
            | "badrequesterror"
            | "model_not_found" => Some(FailureClass::InvalidRequest),
            "authentication_error" | "invalid_api_key" | "permission_error" | "permission_denied" => {
                Some(FailureClass::Authentication)
            }
            "content_filter" | "content_policy_violation" | "responsibleaipolicyviolation" => {
                Some(FailureClass::Refused)
            }
            _ => None,
        };
        known(self.code.as_ref()).or_else(|| known(self.kind.as_ref())).unwrap_or(FailureClass::Unavailable)
    }

    /// Its words, shortened, with the code when that says more.
    pub fn excerpt(&self) -> String {
        let words = excerpt(&self.message);
        match self.code.as_deref().or(self.kind.as_deref()) {
            Some(code) if words.is_empty() => code.to_owned(),
            Some(code) if !words.contains(code) => format!("{words} ({code})"),
            Some(_) | None if words.is_empty() => "no message".to_owned(),
            Some(_) | None => words,
        }
    }

    fn is_quota(&self) -> bool {
        [&self.code, &self.kind].into_iter().flatten().any(|word| {
            matches!(word.as_str(), "insufficient_quota" | "billing_hard_limit_reached" | "insufficient_balance")
        })
    }

    fn is_context_length(&self) -> bool {
        const CODES: [&str; 3] = ["context_length_exceeded", "exceed_context_size_error", "context_window_exceeded"];
        const WORDS: [&str; 6] = [
            "maximum context length",
            "context length exceeded",
            "exceeds the context window",
            "exceeds the available context size",
            "exceeds the model's context",
            "prompt is too long",
        ];
        let coded = [&self.code, &self.kind].into_iter().flatten().any(|word| CODES.contains(&word.as_str()));
        let message = self.message.to_ascii_lowercase();
        coded || WORDS.iter().any(|words| message.contains(words))
    }
}

/// A text on one line, at most 500 characters of it.
pub fn excerpt(words: &str) -> String {
    text::excerpt(words, MAX_EXCERPT_CHARS)
}

/// How long a provider asks to wait: `retry-after-ms`, then `retry-after` in seconds or as an HTTP date
/// (RFC 9110 §10.2.3). A date that has passed means now; the longest wait is two minutes.
pub fn retry_after(millis: Option<&str>, after: Option<&str>, now: Timestamp) -> Option<Duration> {
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    let wait = |seconds: f64| Duration::from_secs_f64(seconds.min(MAX_RETRY_AFTER.as_secs_f64()));
    if let Some(millis) = millis.and_then(number) {
        return Some(wait(millis / 1000.0));
    }
    let after = after?;
    if let Some(seconds) = number(after) {
        return Some(wait(seconds));
    }
    let date = httpdate::parse_http_date(after.trim()).ok()?;
    let now = UNIX_EPOCH + now.since(Timestamp::from_millis(0));
    Some(date.duration_since(now).unwrap_or(Duration::ZERO).min(MAX_RETRY_AFTER))
}

fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
