//! An incremental decoder of server-sent event streams: bytes in, frames out, no IO.
//!
//! Follows the parsing rules of the WHATWG HTML standard, §9.2.6, with two deviations that providers make
//! necessary: an event at the end of the stream counts even when no blank line closes it, and lines with an
//! unknown field name are shown instead of dropped, since gateways write errors there.
//!
//! The published crates were looked at first. `eventsource-stream` drops comments, so they cannot count as
//! activity, forgets the last unclosed event, refuses invalid UTF-8 and has no bound on a line or an event.

use std::mem;
use std::sync::Arc;

/// Longest line, in bytes.
pub const MAX_LINE_BYTES: usize = 1024 * 1024;
/// Largest event, in bytes of data.
pub const MAX_EVENT_BYTES: usize = 4 * 1024 * 1024;

/// Something complete in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// An event with data.
    Event(Event),
    /// A comment, usually a sign of life.
    Comment,
    /// A line whose field name the standard does not know, whole.
    Stray(String),
}

/// A dispatched event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The `event` field; empty when there was none, which means `message`.
    pub name: String,
    /// The `data` lines, joined by line feeds; never empty.
    pub data: String,
    /// The last `id` seen in the stream so far. Shared: it is as long as a line may be, and part of every event after.
    pub id: Arc<str>,
}

/// The stream is larger than anything that is taken for real.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// A line does not end.
    #[error("a line of the event stream is longer than {MAX_LINE_BYTES} bytes")]
    LineTooLong,
    /// The data of one event does not end.
    #[error("an event of the event stream has more than {MAX_EVENT_BYTES} bytes")]
    EventTooLarge,
}

/// The state between two pieces of a stream.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The start of a line whose end has not come.
    line: Vec<u8>,
    /// The last byte was a CR: an LF right after it belongs to the same line end.
    after_cr: bool,
    /// A first line was read, so no byte order mark can follow.
    started: bool,
    name: String,
    data: Option<String>,
    id: Arc<str>,
}

impl Decoder {
    /// Takes the next bytes and appends what they complete to `out`.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut Vec<Frame>) -> Result<(), SseError> {
        while !bytes.is_empty() {
            if mem::take(&mut self.after_cr)
                && let Some(rest) = bytes.strip_prefix(b"\n")
            {
                bytes = rest;
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (head, tail) = bytes.split_at(end.unwrap_or(bytes.len()));
            if self.line.len() + head.len() > MAX_LINE_BYTES {
                return Err(SseError::LineTooLong);
            }
            self.line.extend_from_slice(head);
            let Some((line_end, rest)) = tail.split_first() else { break };
            self.after_cr = *line_end == b'\r';
            bytes = rest;
            self.end_line(out)?;
        }
        Ok(())
    }

    /// Ends the stream: a line without its end and an event without its blank line count.
    pub fn finish(&mut self, out: &mut Vec<Frame>) -> Result<(), SseError> {
        if !self.line.is_empty() {
            self.end_line(out)?;
        }
        self.dispatch(out);
        Ok(())
    }

    fn end_line(&mut self, out: &mut Vec<Frame>) -> Result<(), SseError> {
        let mut line = mem::take(&mut self.line);
        if !mem::replace(&mut self.started, true) && line.starts_with(b"\xEF\xBB\xBF") {
            line.drain(..3);
        }
        if line.is_empty() {
            self.dispatch(out);
        } else {
            self.field(&String::from_utf8_lossy(&line), out)?;
        }
        line.clear();
        self.line = line;
        Ok(())
    }

    fn field(&mut self, line: &str, out: &mut Vec<Frame>) -> Result<(), SseError> {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => out.push(Frame::Comment),
            "data" => {
                let data = match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data
                    }
                    none => none.insert(String::new()),
                };
                data.push_str(value);
                if data.len() > MAX_EVENT_BYTES {
                    return Err(SseError::EventTooLarge);
                }
            }
            "event" => value.clone_into(&mut self.name),
            "id" if value.contains('\0') => {}
            "id" => self.id = value.into(),
            // When to connect again: a response of a model cannot be resumed.
            "retry" => {}
            _ => out.push(Frame::Stray(line.to_owned())),
        }
        Ok(())
    }

    fn dispatch(&mut self, out: &mut Vec<Frame>) {
        let name = mem::take(&mut self.name);
        if let Some(data) = self.data.take().filter(|data| !data.is_empty()) {
            out.push(Frame::Event(Event { name, data, id: Arc::clone(&self.id) }));
        }
    }
}

#[cfg(test)]
#[path = "sse_tests.rs"]
mod tests;
