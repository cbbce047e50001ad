//! Tolerant reading of JSON that providers send: fields of unexpected type, lone halves of surrogate pairs.
//!
//! Gateways that count in UTF-16 units cut a character beyond U+FFFF into two string escapes, one in each
//! chunk. A Rust string cannot hold such a half, so strings that stream in pieces are read as [`Piece`]
//! (WTF-8) and joined by a [`Rejoiner`].

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::{Deserializer as _, Error, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// A piece of a streamed string in WTF-8: UTF-8 that may hold lone surrogates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece(Vec<u8>);

impl From<&str> for Piece {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

impl Piece {
    /// Its bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Joins the pieces of one streamed string and the surrogate pairs that were cut between them.
#[derive(Debug, Default)]
pub struct Rejoiner {
    /// A leading half whose other half may come with the next piece.
    pending: Option<u16>,
}

impl Rejoiner {
    /// The text of the next piece. A half without its partner becomes U+FFFD.
    pub fn push(&mut self, piece: Piece) -> String {
        let bytes = if self.pending.is_some() {
            piece.0
        } else {
            match String::from_utf8(piece.0) {
                Ok(text) => return text,
                Err(error) => error.into_bytes(),
            }
        };
        let mut out = String::with_capacity(bytes.len() + 3);
        let mut rest = bytes.as_slice();
        // In UTF-8 the byte 0xED is never followed by 0xA0 or more; in WTF-8 that is a surrogate.
        while let Some(at) = rest.windows(3).position(|w| matches!(w, [0xED, 0xA0..=0xBF, _])) {
            let (plain, tail) = rest.split_at(at);
            let (surrogate, after) = tail.split_at(3);
            self.plain(plain, &mut out);
            if let [_, high, low] = surrogate {
                self.half(0xD000 | (u16::from(high & 0x3F) << 6) | u16::from(low & 0x3F), &mut out);
            }
            rest = after;
        }
        self.plain(rest, &mut out);
        out
    }

    /// What is left when the string ends: nothing, or U+FFFD for a half that stayed alone.
    pub fn finish(&mut self) -> Option<char> {
        self.pending.take().map(|_| char::REPLACEMENT_CHARACTER)
    }

    fn plain(&mut self, bytes: &[u8], out: &mut String) {
        if !bytes.is_empty() {
            out.extend(self.finish());
            out.push_str(&String::from_utf8_lossy(bytes));
        }
    }

    fn half(&mut self, unit: u16, out: &mut String) {
        if (0xD800..0xDC00).contains(&unit) {
            out.extend(self.finish());
            self.pending = Some(unit);
        } else {
            let units = self.pending.take().into_iter().chain([unit]);
            out.extend(char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)));
        }
    }
}

/// The items of a list; none when it is anything else.
pub fn items(raw: &RawValue) -> Vec<&RawValue> {
    serde_json::from_str(raw.get()).unwrap_or_default()
}

/// A string, lone surrogates kept; `None` when it is anything else.
pub fn piece(raw: &RawValue) -> Option<Piece> {
    struct Bytes;
    impl Visitor<'_> for Bytes {
        type Value = Piece;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a string")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Piece, E> {
            Ok(Piece(bytes.to_vec()))
        }
    }
    if !raw.get().starts_with('"') {
        return None;
    }
    serde_json::Deserializer::from_str(raw.get()).deserialize_bytes(Bytes).ok()
}

/// A string, halves of surrogate pairs replaced; `None` when it is anything else.
pub fn text(raw: &RawValue) -> Option<Cow<'_, str>> {
    let inside = raw.get().strip_prefix('"')?.strip_suffix('"')?;
    if !inside.contains('\\') {
        return Some(Cow::Borrowed(inside));
    }
    let mut joiner = Rejoiner::default();
    let mut text = joiner.push(piece(raw)?);
    text.extend(joiner.finish());
    Some(Cow::Owned(text))
}

/// A whole number, zero or more; `None` when it is anything else.
pub fn index(raw: &RawValue) -> Option<u64> {
    raw.get().parse().ok()
}

/// Any value; halves of surrogate pairs become U+FFFD. `None` when it is nested too deeply to read.
pub fn value(raw: &RawValue) -> Option<Value> {
    serde_json::from_str(raw.get()).or_else(|_| serde_json::from_str(&without_halves(raw.get()))).ok()
}

/// Reads one JSON document as it is, without interpreting it.
pub fn document(text: &str) -> Option<&RawValue> {
    <&RawValue>::deserialize(&mut serde_json::Deserializer::from_str(text.trim()))
        .ok()
        .filter(|raw| raw.get().len() == text.trim().len())
}

/// Rewrites escapes of lone surrogates in JSON text to the escape of U+FFFD.
fn without_halves(json: &str) -> String {
    const REPLACEMENT: &str = "\\ufffd";
    let mut out = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        let (plain, escape) = rest.split_at(at);
        out.push_str(plain);
        let first = unit(escape);
        let second = escape.get(6..).and_then(unit);
        let (text, taken) = match (first, second) {
            (Some(0xD800..0xDC00), Some(0xDC00..0xE000)) => (escape.get(..12), 12),
            (Some(0xD800..0xE000), _) => (Some(REPLACEMENT), 6),
            (Some(_), _) => (escape.get(..6), 6),
            // `\\`, `\"` and their like: two characters, the second of which may be a backslash.
            (None, _) => {
                let length = 1 + escape.chars().nth(1).map_or(0, char::len_utf8);
                (escape.get(..length), length)
            }
        };
        out.push_str(text.unwrap_or_default());
        rest = escape.get(taken..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

/// The UTF-16 unit of a `\uXXXX` escape at the start of `text`.
fn unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn join(jsons: &[&str]) -> String {
        let mut joiner = Rejoiner::default();
        let mut out = String::new();
        for json in jsons {
            let raw = document(json).unwrap();
            out.push_str(&joiner.push(piece(raw).unwrap()));
        }
        out.extend(joiner.finish());
        out
    }

    #[test]
    fn halves_of_a_surrogate_pair_are_rejoined() {
        for (pieces, expected) in [
            (&[r#""Hi \ud83d""#, r#""\ude00 there""#] as &[_], "Hi \u{1F600} there"),
            (&[r#""\ud83d""#, r#""""#, r#""\ude00""#], "\u{1F600}"),
            (&[r#""\ud83d\ude00""#], "\u{1F600}"),
            (&[r#""a\ud83d""#, r#""b""#], "a\u{FFFD}b"),
            (&[r#""a\ude00b""#], "a\u{FFFD}b"),
            (&[r#""\ud83d\ud83d""#, r#""\ude00""#], "\u{FFFD}\u{1F600}"),
            (&[r#""end\ud83d""#], "end\u{FFFD}"),
            (&[r#""日本\n""#, r#""é""#], "日本\né"),
        ] {
            assert_eq!(join(pieces), expected, "{pieces:?}");
        }
    }

    #[test]
    fn values_survive_lone_halves_and_literal_backslashes() {
        let raw = document(r#"{"a":"x\ud83d","b":"\ude00y","c":"\\ud83d","d":"\ud83d\ude00","e":"\"\u0041"}"#).unwrap();
        assert_eq!(
            value(raw).unwrap(),
            json!({"a": "x\u{FFFD}", "b": "\u{FFFD}y", "c": "\\ud83d", "d": "\u{1F600}", "e": "\"A"})
        );
    }

    #[test]
    fn strings_and_indexes_are_read_as_such_or_not_at_all() {
        for (raw, expected) in [
            (r#""t""#, Some("t")),
            (r#""""#, Some("")),
            (r#""\u0074\ud83d""#, Some("t\u{FFFD}")),
            ("1", None),
            ("{}", None),
        ] {
            assert_eq!(text(document(raw).unwrap()).as_deref(), expected, "{raw}");
        }
        for (raw, expected) in [("3", Some(3)), ("-1", None), ("1.0", None), (r#""1""#, None)] {
            assert_eq!(index(document(raw).unwrap()), expected, "{raw}");
        }
    }

    proptest! {
        #[test]
        fn any_cut_of_the_utf16_units_gives_the_text_back(text in "\\PC{0,20}", cut in 0usize..40) {
            let units: Vec<u16> = text.encode_utf16().collect();
            let (head, tail) = units.split_at(cut.min(units.len()));
            let escaped = |units: &[u16]| {
                let body: String = units.iter().map(|unit| format!("\\u{unit:04x}")).collect();
                format!("\"{body}\"")
            };
            prop_assert_eq!(join(&[&escaped(head), &escaped(tail)]), text);
        }
    }
}
