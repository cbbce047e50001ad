//! What hames knows of a tool and of the end of a call.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A tool's name: 1–128 of `A-Z a-z 0-9 _ - . /`, starting with a letter. Each provider wire maps it,
/// uniquely and back, to what the provider accepts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, ToSchema)]
#[schema(value_type = String, pattern = "^[A-Za-z][A-Za-z0-9_./-]{0,127}$")]
pub struct ToolName(Arc<str>);

/// The text is not a tool name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a tool name; expected 1 to 128 of A-Z a-z 0-9 _ - . / starting with a letter")]
pub struct InvalidToolName(pub String);

impl ToolName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ToolName {
    type Err = InvalidToolName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let valid = text.len() <= 128
            && text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte));
        if valid { Ok(Self(text.into())) } else { Err(InvalidToolName(text.to_owned())) }
    }
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ToolName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What a model is told of a tool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolSpec {
    /// The name the model calls it by.
    pub name: ToolName,
    /// The manual: what it does, its limits, how it fails, what to use instead.
    pub description: String,
    /// JSON Schema (2020-12) of the arguments, always of an object.
    #[schema(value_type = Object)]
    pub parameters: Value,
}

/// What a tool can change. Decides what may overlap and what may run again after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Changes nothing; calls may overlap and be repeated.
    ReadOnly,
    /// Running it twice with the same call id is the same as running it once.
    Idempotent,
    /// Anything else; never run again when its outcome is unknown.
    SideEffect,
}

/// What becomes of a call that was started when a crash hid its outcome. Only for calls that are never run again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknown {
    /// The model is told and decides.
    #[default]
    Tell,
    /// The run waits until somebody says what came of it.
    Hold,
    /// The run ends as `internal_error`.
    Fail,
}

/// What has to come from outside before a call has its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Nothing: hames runs it.
    Open,
    /// Somebody has to allow it, then hames runs it.
    Approval,
    /// The caller executes it.
    Client,
}

/// How a call ended. Every call has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutcomeKind {
    /// It returned a result.
    Result,
    /// It failed, or its arguments were invalid, or no such tool exists; the model may repair it.
    Error,
    /// The harness did not run it: a repeat, a cut-off response.
    Refused,
    /// It did not finish within its timeout.
    TimedOut,
    /// The run ended while it was running or before it started.
    Aborted,
    /// It was started, and a crash hid what came of it.
    OutcomeUnknown,
}

impl OutcomeKind {
    /// The spelling in the JSON form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Result => "result",
            Self::Error => "error",
            Self::Refused => "refused",
            Self::TimedOut => "timed_out",
            Self::Aborted => "aborted",
            Self::OutcomeUnknown => "outcome_unknown",
        }
    }

    /// Whether the model is told that the call failed.
    pub const fn is_error(self) -> bool {
        match self {
            Self::Result => false,
            Self::Error | Self::Refused | Self::TimedOut | Self::Aborted | Self::OutcomeUnknown => true,
        }
    }
}

/// Stands where the JSON form has `is_error` beside `outcome`: it holds nothing, since the one follows from the other.
/// What holds it writes [`OutcomeKind::is_error`] there, and does not look at it when it is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorMark;

impl<'de> Deserialize<'de> for ErrorMark {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// The end of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolOutcome {
    /// The call.
    pub call_id: String,
    /// How it ended.
    pub kind: OutcomeKind,
    /// What the model reads; not yet cut to `max_tool_result_chars`.
    pub content: String,
    /// Milliseconds from start to end, by a monotonic clock; zero when it never started.
    pub duration_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_spelt_as_in_json() {
        for spelling in ["result", "error", "refused", "timed_out", "aborted", "outcome_unknown"] {
            let kind: OutcomeKind = serde_json::from_value(spelling.into()).unwrap();
            assert_eq!(kind.as_str(), spelling);
        }
    }

    #[test]
    fn names_follow_the_rule() {
        let longest = "a".repeat(128);
        for good in ["a", "fs.read/file", "Mcp_x-1", longest.as_str()] {
            assert_eq!(good.parse::<ToolName>().unwrap().as_str(), good);
        }
        let too_long = "a".repeat(129);
        for bad in ["", "1a", "_a", "a b", "a\0", "é", "a:b", too_long.as_str()] {
            assert!(bad.parse::<ToolName>().is_err(), "{bad}");
        }
    }
}
