//! How much work a run may do, and how much it did.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// The bounds of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Most model responses.
    pub max_steps: u32,
    /// Most tool calls, refused and failed ones included.
    pub max_tool_calls: u32,
    /// Most tokens, input and output of all model calls together.
    pub max_tokens: u64,
    /// The whole run, in milliseconds from its start.
    pub timeout_ms: u64,
    /// One attempt at one model call, in milliseconds.
    pub model_timeout_ms: u64,
    /// One tool call, in milliseconds.
    pub tool_timeout_ms: u64,
    /// One wait for an answer from outside, in milliseconds.
    #[serde(default = "default_wait_timeout_ms")]
    pub wait_timeout_ms: u64,
}

/// A day: whoever answers is a person, or waits for one.
const fn default_wait_timeout_ms() -> u64 {
    86_400_000
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_steps: 10,
            max_tool_calls: 30,
            max_tokens: 50_000,
            timeout_ms: 300_000,
            model_timeout_ms: 60_000,
            tool_timeout_ms: 30_000,
            wait_timeout_ms: default_wait_timeout_ms(),
        }
    }
}

impl Limits {
    /// These, raised to those where they are lower.
    pub fn raised_to(self, other: Self) -> Self {
        Self {
            max_steps: self.max_steps.max(other.max_steps),
            max_tool_calls: self.max_tool_calls.max(other.max_tool_calls),
            max_tokens: self.max_tokens.max(other.max_tokens),
            timeout_ms: self.timeout_ms.max(other.timeout_ms),
            model_timeout_ms: self.model_timeout_ms.max(other.model_timeout_ms),
            tool_timeout_ms: self.tool_timeout_ms.max(other.tool_timeout_ms),
            wait_timeout_ms: self.wait_timeout_ms.max(other.wait_timeout_ms),
        }
    }
}

/// Tokens of one model call as its provider reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenUsage {
    /// Tokens of the request, cached ones included.
    pub input_tokens: u64,
    /// Tokens of the response, reasoning included.
    pub output_tokens: u64,
    /// The part of `input_tokens` that was read from the provider's cache.
    pub cached_input_tokens: u64,
    /// The part of `output_tokens` that was reasoning.
    pub reasoning_tokens: u64,
}

/// Totals of a run. Zero tokens with `model_calls_with_usage` = 0 means unknown, not free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Sum over the calls that reported usage.
    pub input_tokens: u64,
    /// Sum over the calls that reported usage.
    pub output_tokens: u64,
    /// Sum over the calls that reported usage.
    pub cached_input_tokens: u64,
    /// Sum over the calls that reported usage.
    pub reasoning_tokens: u64,
    /// Finished model calls.
    pub model_calls: u32,
    /// Those of them that reported usage.
    pub model_calls_with_usage: u32,
}

/// A token count that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUsage {
    /// Negative, fractional, not a number, or too large.
    #[error("usage field `{field}` is {value}; expected a whole number of tokens, zero or more")]
    Count {
        /// The provider's name of the count.
        field: String,
        /// What it said.
        value: String,
    },
    /// The total does not fit 64 bits.
    #[error("the sum of `{field}` overflows")]
    Overflow {
        /// Which total.
        field: &'static str,
    },
}

/// Highest count of one report that is taken for real (JSON numbers are exact up to here).
const MAX_COUNT: u64 = 1 << 53;

impl TokenUsage {
    /// Reads one count. `null` and absence are the caller's business; everything that is not a whole
    /// number from 0 to 2^53 is an error and never a silent zero.
    pub fn count(field: &str, value: &Value) -> Result<u64, InvalidUsage> {
        let whole = value.as_u64().or_else(|| {
            // Some servers write whole counts as floats (12.0).
            let float = value.as_f64()?;
            (float.fract() == 0.0 && (0.0..=MAX_COUNT as f64).contains(&float)).then_some(float as u64)
        });
        whole
            .filter(|count| *count <= MAX_COUNT)
            .ok_or_else(|| InvalidUsage::Count { field: field.to_owned(), value: value.to_string() })
    }
}

impl Usage {
    /// Adds one finished model call.
    pub fn plus(self, call: Option<TokenUsage>) -> Result<Self, InvalidUsage> {
        let model_calls = self.model_calls.saturating_add(1);
        let Some(call) = call else { return Ok(Self { model_calls, ..self }) };
        let sum = |field, a: u64, b: u64| a.checked_add(b).ok_or(InvalidUsage::Overflow { field });
        Ok(Self {
            input_tokens: sum("input_tokens", self.input_tokens, call.input_tokens)?,
            output_tokens: sum("output_tokens", self.output_tokens, call.output_tokens)?,
            cached_input_tokens: sum("cached_input_tokens", self.cached_input_tokens, call.cached_input_tokens)?,
            reasoning_tokens: sum("reasoning_tokens", self.reasoning_tokens, call.reasoning_tokens)?,
            model_calls,
            model_calls_with_usage: self.model_calls_with_usage.saturating_add(1),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_are_whole_and_not_negative() {
        assert_eq!(TokenUsage::count("n", &json!(0)), Ok(0));
        assert_eq!(TokenUsage::count("n", &json!(12.0)), Ok(12));
        for bad in [json!(-1), json!(1.5), json!("7"), json!(1e300), json!(u64::MAX), json!({}), json!(true)] {
            assert!(TokenUsage::count("n", &bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn totals_know_how_many_calls_reported() {
        let call = TokenUsage { input_tokens: 5, output_tokens: 2, ..TokenUsage::default() };
        let total = Usage::default().plus(Some(call)).unwrap().plus(None).unwrap();
        assert_eq!(
            total,
            Usage { input_tokens: 5, output_tokens: 2, model_calls: 2, model_calls_with_usage: 1, ..Usage::default() }
        );
        let full = Usage { input_tokens: u64::MAX, ..Usage::default() };
        assert_eq!(full.plus(Some(call)), Err(InvalidUsage::Overflow { field: "input_tokens" }));
    }
}
