//! A place in a trace that spans several programs: W3C Trace Context, level 1.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The header that carries it.
pub const TRACEPARENT: &str = "traceparent";

/// The header that carries what tracing systems add to it.
pub const TRACESTATE: &str = "tracestate";

/// Most characters of a `tracestate` that is taken over; the standard asks for at least as many.
const MAX_STATE: usize = 512;

/// A span of another program, or of this one, that work is done for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Headers", into = "Headers")]
pub struct TraceContext {
    /// The whole trace; never 0.
    pub trace_id: u128,
    /// The span; never 0.
    pub span_id: u64,
    /// Bit 0: whether the caller records the trace.
    pub flags: u8,
    /// What tracing systems added, as it came.
    pub state: Option<String>,
}

/// The form in which it is sent and stored.
#[derive(Serialize, Deserialize)]
struct Headers {
    traceparent: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tracestate: Option<String>,
}

/// Text that is no `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a traceparent: 00-TRACE-SPAN-FLAGS with 32, 16 and 2 hexadecimal digits in lower case, not all zero")]
pub struct InvalidTraceparent;

impl TraceContext {
    /// Adds a `tracestate`. One that cannot be passed on is left out: it says nothing that the trace needs.
    #[must_use]
    pub fn with_state(mut self, state: &str) -> Self {
        let state = state.trim();
        let passes = !state.is_empty()
            && state.len() <= MAX_STATE
            && state.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ' || byte == b'\t');
        self.state = passes.then(|| state.to_owned());
        self
    }
}

/// The value of the header `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

impl FromStr for TraceContext {
    type Err = InvalidTraceparent;

    /// Later versions may add fields, which are not read.
    fn from_str(text: &str) -> Result<Self, InvalidTraceparent> {
        let mut fields = text.split('-');
        let mut field = |digits: usize| {
            let field = fields.next().filter(|field| field.len() == digits)?;
            let is_hex = field.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            is_hex.then(|| u128::from_str_radix(field, 16).ok()).flatten()
        };
        let (Some(version), Some(trace_id), Some(span_id), Some(flags)) = (field(2), field(32), field(16), field(2))
        else {
            return Err(InvalidTraceparent);
        };
        let is_last = fields.next().is_none();
        let (Ok(span_id), Ok(flags)) = (u64::try_from(span_id), u8::try_from(flags)) else {
            return Err(InvalidTraceparent);
        };
        if version == 0xff || (version == 0 && !is_last) || trace_id == 0 || span_id == 0 {
            return Err(InvalidTraceparent);
        }
        Ok(Self { trace_id, span_id, flags, state: None })
    }
}

impl TryFrom<Headers> for TraceContext {
    type Error = InvalidTraceparent;

    fn try_from(headers: Headers) -> Result<Self, InvalidTraceparent> {
        let context: Self = headers.traceparent.parse()?;
        Ok(match headers.tracestate {
            Some(state) => context.with_state(&state),
            None => context,
        })
    }
}

impl From<TraceContext> for Headers {
    fn from(context: TraceContext) -> Self {
        Self { traceparent: context.to_string(), tracestate: context.state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_reads_back_as_it_was() {
        let context: TraceContext = GOOD.parse().unwrap();
        assert_eq!(context.to_string(), GOOD);
        assert_eq!((context.span_id, context.flags), (0xb7ad_6b71_6920_3331, 1));
        let stored = serde_json::to_value(context.clone().with_state(" a=1,b=2 ")).unwrap();
        assert_eq!(stored, serde_json::json!({"traceparent": GOOD, "tracestate": "a=1,b=2"}));
        assert_eq!(serde_json::from_value::<TraceContext>(stored).unwrap(), context.with_state("a=1,b=2"));
    }

    #[test]
    fn what_the_standard_forbids_is_none() {
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(bad.parse::<TraceContext>(), Err(InvalidTraceparent), "{bad}");
        }
        // A later version is read as far as it is known.
        let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
        assert_eq!(later.parse::<TraceContext>().unwrap().to_string(), GOOD);
    }

    #[test]
    fn a_state_that_cannot_be_sent_is_left_out() {
        let context: TraceContext = GOOD.parse().unwrap();
        for bad in ["", " ", "a=\r\nx: y", "a=é", &"a".repeat(MAX_STATE + 1)] {
            assert_eq!(context.clone().with_state(bad).state, None, "{bad:?}");
        }
    }
}
