//! Rendering of server-sent events (WHATWG HTML, "Server-sent events").

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::cursor::Cursor;
use crate::domain::{Event, RunId, RunView};

use super::bus::ExecutingCall;

/// What is sent when nothing happens: a comment, which moves no reader's cursor.
pub(super) const KEEP_ALIVE: Bytes = Bytes::from_static(b":\n\n");

/// The end of a delta whose head was made by [`delta_head`].
pub(super) const DELTA_END: &str = "\"}\n\n";

/// Milliseconds a browser waits before it connects again.
const RETRY_MS: u32 = 1_000;

/// Which text of a message a delta continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// What the model says.
    Text,
    /// What it reasons.
    Reasoning,
}

/// The message a delta belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageName {
    pub(super) run: RunId,
    pub(super) step: u32,
    pub(super) attempt: u32,
}

/// The frame `snapshot`, the first of every subscription: the run as it stands. It has no id.
#[derive(Serialize, ToSchema)]
#[schema(as = Snapshot)]
pub struct Snapshot<'a> {
    /// The run.
    pub(super) run: RunView,
    /// The tool calls that are executing now.
    #[schema(value_type = Vec<ExecutingCall>)]
    pub(super) executing: &'a [ExecutingCall],
    /// The message being written; `null` when there is none.
    pub(super) writing: Option<Writing>,
}

/// The message being written when a snapshot is taken. Its text follows from the reader's cursor on.
#[derive(Serialize, ToSchema)]
#[schema(as = MessageBeingWritten)]
pub struct Writing {
    /// The step it belongs to, from 1.
    pub(super) step: u32,
    /// The attempt, from 1.
    pub(super) attempt: u32,
    /// Unicode scalar values of its visible text so far.
    pub(super) length: usize,
}

/// The frame `text_delta`: a piece of the visible text of the message being written. Its id is `SEQ.OFFSET`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TextDelta {
    /// The run.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    pub run_id: RunId,
    /// The step the message belongs to, from 1.
    pub step: u32,
    /// The attempt, from 1; a later one replaces all deltas of the one before.
    pub attempt: u32,
    /// Where the piece starts in the text, in Unicode scalar values.
    pub offset: usize,
    /// The piece.
    pub text: String,
}

/// The frame `reasoning_delta`: a piece of what the model reasons. Its id is `SEQ.OFFSET.ROFFSET`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReasoningDelta {
    /// The run.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    pub run_id: RunId,
    /// The step the message belongs to, from 1.
    pub step: u32,
    /// The attempt, from 1; a later one replaces all deltas of the one before.
    pub attempt: u32,
    /// Where the piece starts in the reasoning, in Unicode scalar values.
    pub offset: usize,
    /// The piece.
    pub text: String,
}

/// The frame `tool_call_delta`: a piece of a tool call being written. It has no id and is not repeated; the whole call
/// comes with the finished message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolCallDelta {
    /// The run.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    pub run_id: RunId,
    /// The step the message belongs to, from 1.
    pub step: u32,
    /// The attempt, from 1; a later one replaces all deltas of the one before.
    pub attempt: u32,
    /// Which call of the message, from 0.
    pub index: usize,
    /// Its id; empty while it is not known.
    pub call_id: String,
    /// The tool; empty while it is not known.
    pub name: String,
    /// The next piece of its arguments, which are JSON once they are whole.
    pub arguments: String,
}

/// The frame `tool_progress`: what a running tool says of its progress. It has no id and is not repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolProgress {
    /// The run.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    pub run_id: RunId,
    /// The call.
    pub call_id: String,
    /// What it says.
    pub text: String,
}

/// A durable event. Its id is its number.
pub(super) fn durable(event: &Event) -> Bytes {
    let json = event.json();
    let mut out = Vec::with_capacity(json.len() + 64);
    out.extend_from_slice(format!("event: {}\nid: {}\n", event.body.kind.as_str(), event.seq).as_bytes());
    data(&json, &mut out);
    out.into()
}

/// The snapshot, with the reconnection time that applies to the whole stream.
pub(super) fn snapshot(snapshot: &Snapshot<'_>) -> Result<Bytes, serde_json::Error> {
    let mut out = format!("retry: {RETRY_MS}\nevent: snapshot\n").into_bytes();
    data(&serde_json::to_vec(snapshot)?, &mut out);
    Ok(out.into())
}

/// A delta up to and including the opening quote of its text; `id` is the cursor after it and `offset` where its
/// text starts. [`escaped`] text and [`DELTA_END`] follow.
pub(super) fn delta_head(channel: Channel, message: MessageName, id: Cursor, offset: usize) -> String {
    let name = match channel {
        Channel::Text => "text_delta",
        Channel::Reasoning => "reasoning_delta",
    };
    let MessageName { run, step, attempt } = message;
    format!(
        "event: {name}\nid: {id}\ndata: {{\"run_id\":\"{run}\",\"step\":{step},\"attempt\":{attempt},\
         \"offset\":{offset},\"text\":\""
    )
}

/// A whole delta.
pub(super) fn delta(channel: Channel, message: MessageName, id: Cursor, offset: usize, text: &str) -> Bytes {
    let mut out = delta_head(channel, message, id, offset);
    out.push_str(&escaped(text));
    out.push_str(DELTA_END);
    out.into()
}

/// A piece of a tool call being written. Without id: it is live only.
pub(super) fn tool_call_delta(message: MessageName, index: usize, call_id: &str, name: &str, arguments: &str) -> Bytes {
    let MessageName { run, step, attempt } = message;
    format!(
        "event: tool_call_delta\ndata: {{\"run_id\":\"{run}\",\"step\":{step},\"attempt\":{attempt},\
         \"index\":{index},\"call_id\":\"{}\",\"name\":\"{}\",\"arguments\":\"{}\"}}\n\n",
        escaped(call_id),
        escaped(name),
        escaped(arguments),
    )
    .into()
}

/// Progress of a tool call. Without id: it is live only.
pub(super) fn tool_progress(run: RunId, call_id: &str, text: &str) -> Bytes {
    format!(
        "event: tool_progress\ndata: {{\"run_id\":\"{run}\",\"call_id\":\"{}\",\"text\":\"{}\"}}\n\n",
        escaped(call_id),
        escaped(text),
    )
    .into()
}

/// A text as it stands between the quotes of a JSON string; holds no line break.
pub(super) fn escaped(text: &str) -> String {
    let mut quoted = Value::from(text).to_string();
    quoted.pop();
    quoted.remove(0);
    quoted
}

/// The data of a frame and its end. Our JSON holds no line break; one from elsewhere is white space between
/// tokens and becomes a line of its own, which a reader joins again, so no data can end its frame early.
fn data(json: &[u8], out: &mut Vec<u8>) {
    for line in json.split(|byte| matches!(byte, b'\n' | b'\r')) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.push(b'\n');
    }
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{EncodedBody, EventBody, Timestamp};

    const MESSAGE: MessageName = MessageName { run: RunId::new(uuid::Uuid::nil()), step: 2, attempt: 3 };

    #[test]
    fn frames_have_the_published_form() {
        let body = EncodedBody::new(&EventBody::<Value>::RunQueued {}).unwrap();
        let event = Event { run: MESSAGE.run, seq: 7, time: Timestamp::from_millis(0), body };
        assert_eq!(
            durable(&event),
            "event: run_queued\nid: 7\ndata: {\"run_id\":\"run_00000000000000000000000000000000\",\"seq\":7,\
             \"time\":\"1970-01-01T00:00:00.000Z\",\"type\":\"run_queued\"}\n\n"
        );
        assert_eq!(
            delta(Channel::Text, MESSAGE, Cursor::in_text(7, 4), 1, "a\n\"\u{2028}"),
            "event: text_delta\nid: 7.4\ndata: {\"run_id\":\"run_00000000000000000000000000000000\",\"step\":2,\
             \"attempt\":3,\"offset\":1,\"text\":\"a\\n\\\"\u{2028}\"}\n\n"
        );
        assert_eq!(
            delta(Channel::Reasoning, MESSAGE, Cursor::in_reasoning(7, 0, 1), 0, "r"),
            "event: reasoning_delta\nid: 7.0.1\ndata: {\"run_id\":\"run_00000000000000000000000000000000\",\"step\":2,\
             \"attempt\":3,\"offset\":0,\"text\":\"r\"}\n\n"
        );
        assert_eq!(
            tool_call_delta(MESSAGE, 1, "c\"", "t", "{\"a\":\r"),
            "event: tool_call_delta\ndata: {\"run_id\":\"run_00000000000000000000000000000000\",\"step\":2,\
             \"attempt\":3,\"index\":1,\"call_id\":\"c\\\"\",\"name\":\"t\",\"arguments\":\"{\\\"a\\\":\\r\"}\n\n"
        );
        assert_eq!(
            tool_progress(MESSAGE.run, "c", "50 %"),
            "event: tool_progress\ndata: {\"run_id\":\"run_00000000000000000000000000000000\",\"call_id\":\"c\",\
             \"text\":\"50 %\"}\n\n"
        );
    }

    #[test]
    fn live_frames_are_of_their_published_types() {
        fn same<T: serde::de::DeserializeOwned + Serialize>(frame: &[u8]) {
            let text = std::str::from_utf8(frame).unwrap();
            let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
            assert_eq!(serde_json::to_string(&serde_json::from_str::<T>(data).unwrap()).unwrap(), data);
        }
        same::<TextDelta>(&delta(Channel::Text, MESSAGE, Cursor::in_text(7, 4), 1, "a\n\"\u{2028}"));
        same::<ReasoningDelta>(&delta(Channel::Reasoning, MESSAGE, Cursor::in_reasoning(7, 0, 1), 0, "r"));
        same::<ToolCallDelta>(&tool_call_delta(MESSAGE, 1, "c\"", "t", "{\"a\":\r"));
        same::<ToolProgress>(&tool_progress(MESSAGE.run, "c", "50 %"));
    }

    #[test]
    fn a_line_break_in_stored_json_cannot_end_a_frame() {
        let json = Bytes::from_static(b"{\"type\":\"run_queued\"\n\n,\r\"x\":1}");
        let body = EncodedBody { kind: crate::domain::EventKind::RunQueued, json };
        let event = Event { run: MESSAGE.run, seq: 7, time: Timestamp::from_millis(0), body };
        let frame = durable(&event);
        let text = std::str::from_utf8(&frame).unwrap();
        assert_eq!(text.find("\n\n"), Some(text.len() - 2), "{text}");
        assert!(!text.contains('\r'), "{text}");
    }
}
