//! Request bodies: strict JSON, and errors that say where and what.
//!
//! A body is read twice. The first pass takes JSON as RFC 8259 has it and refuses what parsers disagree on
//! (a key twice, text after the end, lone surrogates, NUL) or what is out of proportion; it reports line and column. The second pass reads the
//! request's own type and reports the JSON path.

use std::fmt;

use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_path_to_error::{Path, Segment};

use super::problem::{Problem, ProblemCode, shown};
use super::value::Strictly;
use crate::domain::FieldError;
use crate::domain::text::nearest;

/// Most values one body may hold. A value costs up to sixteen times its text in memory, so that a body within its limit
/// of bytes could still take a lot.
const MAX_VALUES: usize = 100_000;

/// Reads a whole body.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let value = parse(bytes)?;
    let mut track = serde_path_to_error::Track::new();
    T::deserialize(serde_path_to_error::Deserializer::new(Strictly(value), &mut track))
        .map_err(|error| Problem::field(ProblemCode::InvalidRequest, field_error(&track.path(), &error.to_string())))
}

fn parse(bytes: &[u8]) -> Result<Value, Problem> {
    let invalid = |detail: String| Problem::new(ProblemCode::InvalidJson, detail);
    let text = std::str::from_utf8(bytes)
        .map_err(|error| invalid(format!("The body is not UTF-8: byte {} is wrong.", error.valid_up_to())))?;
    if text.trim().is_empty() {
        return Err(invalid("The body is empty; expected a JSON object.".to_owned()));
    }
    if text.starts_with('\u{feff}') {
        return Err(invalid("The body starts with a byte order mark, which JSON does not have.".to_owned()));
    }
    let (mut path, mut refused, mut left) = ("$".to_owned(), None, MAX_VALUES);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Strict { path: &mut path, refused: &mut refused, left: &mut left }
        .deserialize(&mut deserializer)
        .and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| match refused {
        Some(field) => Problem::field(ProblemCode::InvalidJson, field),
        None => invalid(syntax_error(&error)),
    })
}

/// Line and column count from 1, in bytes.
fn syntax_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    let what = match what {
        "recursion limit exceeded" => "arrays and objects are nested deeper than 127 levels",
        "trailing characters" => "something follows after the end of the JSON value",
        "lone leading surrogate in hex escape" | "unexpected end of hex escape" => {
            "a \\u escape holds one half of a surrogate pair"
        }
        other => other,
    };
    format!("The body is not valid JSON: {what} at line {} column {}.", error.line(), error.column())
}

fn field_error(path: &Path, message: &str) -> FieldError {
    let path = json_path(path);
    let Some(rest) = message.strip_prefix("unknown field `") else {
        return FieldError::new(path, message);
    };
    // serde's words: unknown field `x`, expected one of `a`, `b` / expected `a` or `b` / there are no fields
    let (given, known) = rest.split_once("`, ").unwrap_or((rest, ""));
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    let at = if path.ends_with(&format!(".{given}")) { path } else { format!("{path}.{}", shown(given)) };
    let message = match nearest(given, known.iter().copied()) {
        Some(meant) => format!("unknown field; did you mean `{meant}`?"),
        None => format!("unknown field; known here: {}", known.join(", ")),
    };
    FieldError::new(at, message)
}

fn json_path(path: &Path) -> String {
    let mut out = "$".to_owned();
    for segment in path {
        match segment {
            Segment::Seq { index } => out.push_str(&format!("[{index}]")),
            Segment::Map { key } => out.push_str(&format!(".{}", shown(key))),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    out
}

/// Reads any JSON value, and refuses a key that occurs twice in its object and NUL in any text.
struct Strict<'a> {
    /// Where the value is.
    path: &'a mut String,
    /// What was refused, and where.
    refused: &'a mut Option<FieldError>,
    /// How many more values there may be.
    left: &'a mut usize,
}

impl Strict<'_> {
    fn inner(&mut self) -> Strict<'_> {
        Strict { path: &mut *self.path, refused: &mut *self.refused, left: &mut *self.left }
    }

    fn refuse<T, E: Error>(self, message: String) -> Result<T, E> {
        let error = E::custom(&message);
        *self.refused = Some(FieldError::new(self.path.clone(), message));
        Err(error)
    }
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.left.checked_sub(1) {
            Some(left) => *self.left = left,
            None => return self.refuse(format!("the body holds more than {MAX_VALUES} values")),
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        if value.contains('\0') {
            return self.refuse("the text contains U+0000, which is not accepted".to_owned());
        }
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        let length = self.path.len();
        loop {
            self.path.push_str(&format!("[{}]", out.len()));
            let item = items.next_element_seed(self.inner())?;
            self.path.truncate(length);
            match item {
                Some(item) => out.push(item),
                None => return Ok(Value::Array(out)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        let length = self.path.len();
        while let Some(key) = entries.next_key::<String>()? {
            if out.contains_key(&key) {
                return self.refuse(format!("the key `{}` occurs twice in one object", shown(&key)));
            }
            if key.contains('\0') {
                return self.refuse("a key contains U+0000, which is not accepted".to_owned());
            }
            self.path.push_str(&format!(".{}", shown(&key)));
            let value = entries.next_value_seed(self.inner())?;
            self.path.truncate(length);
            out.insert(key, value);
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
