//! A reader's place in a stream, as it travels in SSE ids, `Last-Event-ID` and `?after=`.

use std::fmt;
use std::str::FromStr;

use crate::domain::Seq;
use crate::domain::text::shown;

/// What a reader has seen: all durable events up to a number, and possibly a part of the message that is being
/// written after it.
///
/// * `SEQ`: up to this event; of an open message, what was written before this event. `0` is the very start.
/// * `SEQ.OFFSET`: besides, this many Unicode scalar values of the visible text, and the reasoning before them.
/// * `SEQ.OFFSET.ROFFSET`: besides, this many Unicode scalar values of the reasoning, neither more nor less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    seq: Seq,
    within: Within,
}

/// The place inside the message being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Within {
    /// Right after the event.
    #[default]
    Event,
    /// After this much text.
    Text(usize),
    /// After this much text and this much reasoning.
    Both {
        /// Of the visible text.
        text: usize,
        /// Of the reasoning.
        reasoning: usize,
    },
}

/// The text is not a cursor; it is held as the message repeats it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a cursor; expected `SEQ`, `SEQ.OFFSET` or `SEQ.OFFSET.ROFFSET` in whole numbers, such as `12` or \
     `12.340`; `0` reads from the start"
)]
pub struct InvalidCursor(pub String);

/// Most of a bad cursor that the error repeats, in Unicode scalar values.
const MAX_SHOWN: usize = 64;

impl Cursor {
    /// Before the first event.
    pub const START: Self = Self::after(0);

    /// Right after an event.
    pub const fn after(seq: Seq) -> Self {
        Self { seq, within: Within::Event }
    }

    /// After this many Unicode scalar values of the text written since the event.
    pub const fn in_text(seq: Seq, text: usize) -> Self {
        Self { seq, within: Within::Text(text) }
    }

    /// After this much text and this much reasoning written since the event, in Unicode scalar values.
    pub const fn in_reasoning(seq: Seq, text: usize, reasoning: usize) -> Self {
        Self { seq, within: Within::Both { text, reasoning } }
    }

    /// The number of the last durable event seen.
    pub const fn seq(self) -> Seq {
        self.seq
    }

    pub(super) const fn within(self) -> Within {
        self.within
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.within {
            Within::Event => write!(f, "{}", self.seq),
            Within::Text(text) => write!(f, "{}.{text}", self.seq),
            Within::Both { text, reasoning } => write!(f, "{}.{text}.{reasoning}", self.seq),
        }
    }
}

impl FromStr for Cursor {
    type Err = InvalidCursor;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidCursor(shown(text, MAX_SHOWN));
        let mut parts = text.split('.');
        let seq = parts.next().and_then(number).ok_or_else(invalid)?;
        let within = match (parts.next(), parts.next(), parts.next()) {
            (None, _, _) => Within::Event,
            (Some(text), None, _) => Within::Text(number(text).ok_or_else(invalid)?),
            (Some(text), Some(reasoning), None) => Within::Both {
                text: number(text).ok_or_else(invalid)?,
                reasoning: number(reasoning).ok_or_else(invalid)?,
            },
            (Some(_), Some(_), Some(_)) => return Err(invalid()),
        };
        Ok(Self { seq, within })
    }
}

/// Decimal digits only: the standard parser would take a plus sign too.
fn number<N: FromStr>(text: &str) -> Option<N> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_read_back_what_they_print() {
        for (text, cursor) in [
            ("0", Cursor::START),
            ("12", Cursor::after(12)),
            ("12.0", Cursor::in_text(12, 0)),
            ("12.340", Cursor::in_text(12, 340)),
            ("12.0.7", Cursor::in_reasoning(12, 0, 7)),
            ("18446744073709551615", Cursor::after(u64::MAX)),
        ] {
            assert_eq!(text.parse(), Ok(cursor));
            assert_eq!(cursor.to_string(), text);
        }
    }

    #[test]
    fn anything_else_is_refused_with_its_value_and_the_expected_form() {
        // aegra/aegra#472: a client library that sends -1 gets an answer, not a stream without end.
        for text in [
            "",
            "-1",
            "+1",
            " 1",
            "1 ",
            "1.",
            ".1",
            "1..2",
            "1.2.3.4",
            "1.2.",
            "0x1",
            "1e3",
            "18446744073709551616",
            "١",
        ] {
            let error = text.parse::<Cursor>().unwrap_err();
            assert_eq!(error, InvalidCursor(text.into()));
            assert!(error.to_string().contains(&format!("`{text}`")) && error.to_string().contains("`12.340`"));
        }
        let long = "x".repeat(10_000).parse::<Cursor>().unwrap_err();
        assert_eq!(long, InvalidCursor(format!("{}…", "x".repeat(64))));
        assert_eq!("1\u{1b}".parse::<Cursor>(), Err(InvalidCursor("1\\u{1b}".into())));
    }
}
