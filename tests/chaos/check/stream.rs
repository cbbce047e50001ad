//! What a reader was sent, held against the log.

use std::collections::HashMap;

use serde_json::Value;

use super::{Found, Invariant};
use crate::evidence::{Reader, Record, text_of};
use crate::sse::Frame;

/// The number of a durable frame.
fn seq(frame: &Frame) -> Option<u64> {
    frame.id.as_ref()?.parse().ok()
}

/// The number a cursor starts with; 0 without one.
fn base(cursor: Option<&str>) -> u64 {
    cursor.and_then(|cursor| cursor.split('.').next()?.parse().ok()).unwrap_or(0)
}

/// I5: durable frames continue where the cursor is, one by one, over all connections, with the bytes of the log.
pub(super) fn frames(reader: &Reader, record: Option<&Record>, found: &mut Found) {
    let id = &reader.run;
    let mut last = 0;
    for (number, connection) in reader.connections.iter().enumerate() {
        let at = || format!("{id}, connection {} from {:?}", number + 1, connection.cursor);
        if (400..500).contains(&connection.status) {
            found.note(Invariant::I5, format!("{}: refused with {}: {}", at(), connection.status, connection.refusal));
            continue;
        }
        last = last.max(base(connection.cursor.as_deref()));
        if let Some(first) = connection.frames.first() {
            found.expect(first.event == "snapshot" && first.id.is_none(), Invariant::I5, || {
                format!("{}: begins with {first:?} and not with a snapshot", at())
            });
        }
        for frame in &connection.frames {
            let Some(seq) = seq(frame) else { continue };
            found.expect(seq == last + 1, Invariant::I5, || format!("{}: after event {last} came {frame:?}", at()));
            last = seq;
            let Some(record) = record else { continue };
            let stored = record.events.get(usize::try_from(seq).unwrap_or(0).wrapping_sub(1));
            let raw = stored.map_or("", |event| event.raw.as_str());
            found.expect(raw == frame.data, Invariant::I5, || {
                format!("{}: event {seq} was sent as {} and is stored as {raw:?}", at(), frame.data)
            });
            found.expect(stored.is_none_or(|event| event.kind() == frame.event), Invariant::I5, || {
                format!("{}: {frame:?} has another type than its event", at())
            });
        }
    }
}

/// A message that a reader puts together.
struct Message {
    text: String,
    /// The connection its last piece came on.
    connection: usize,
}

/// I5: the pieces of an attempt follow each other without a hole, and add up to the message it became.
pub(super) fn deltas(reader: &Reader, found: &mut Found) {
    let id = &reader.run;
    let mut open: HashMap<(u64, u64), Message> = HashMap::new();
    let mut ended: Option<(u64, u64)> = None;
    for (number, connection) in reader.connections.iter().enumerate() {
        for frame in &connection.frames {
            let json = || serde_json::from_str::<Value>(&frame.data).unwrap_or_default();
            let name = |json: &Value| {
                (json["step"].as_u64().unwrap_or_default(), json["attempt"].as_u64().unwrap_or_default())
            };
            match frame.event.as_str() {
                "text_delta" => {
                    let json = json();
                    let text = json["text"].as_str().unwrap_or_default();
                    let message =
                        open.entry(name(&json)).or_insert(Message { text: String::new(), connection: number });
                    let have = message.text.chars().count();
                    found.expect(json["offset"] == have, Invariant::I5, || {
                        format!("{id}, connection {}: has {have} characters and got {frame:?}", number + 1)
                    });
                    message.text.push_str(text);
                    message.connection = number;
                    let reached = json["offset"].as_u64().unwrap_or_default() + text.chars().count() as u64;
                    let within = frame.id.as_deref().and_then(|id| id.split('.').nth(1)?.parse::<u64>().ok());
                    found.expect(within == Some(reached), Invariant::I5, || {
                        format!("{id}: the delta {frame:?} reaches {reached} and has another id")
                    });
                }
                "model_end" => ended = Some(name(&json())),
                "message" => {
                    let json = json();
                    let text = text_of(&json["message"]);
                    let Some(message) = ended.take().and_then(|name| open.remove(&name)) else { continue };
                    // Who was cut off in the middle gets the rest with the message.
                    let fits = if message.connection == number {
                        text == message.text
                    } else {
                        text.starts_with(&message.text)
                    };
                    found.expect(fits, Invariant::I5, || {
                        format!("{id}: the deltas add up to {:?}, the message is {text:?}", message.text)
                    });
                }
                _ => {}
            }
        }
    }
}
