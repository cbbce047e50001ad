//! Frames of an event stream, as they came.

use memchr::memmem;

/// One frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Its id; `None` for a snapshot and other frames that do not move the reader.
    pub(crate) id: Option<String>,
    /// Its type.
    pub(crate) event: String,
    /// Its data lines, joined.
    pub(crate) data: String,
}

/// Takes frames out of bytes, whatever pieces they come in. What no blank line ended is not a frame.
#[derive(Default)]
pub(crate) struct Decoder(Vec<u8>);

impl Decoder {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Frame> {
        self.0.extend_from_slice(bytes);
        let mut frames = Vec::new();
        while let Some(end) = memmem::find(&self.0, b"\n\n") {
            let block: Vec<u8> = self.0.drain(..end + 2).collect();
            frames.extend(frame(&String::from_utf8(block).unwrap()));
        }
        frames
    }
}

/// Reads a block; `None` when it holds comments only.
fn frame(block: &str) -> Option<Frame> {
    let mut frame = Frame::default();
    let mut data: Vec<&str> = Vec::new();
    for line in block.lines() {
        match line.split_once(':').map(|(field, value)| (field, value.strip_prefix(' ').unwrap_or(value))) {
            Some(("id", id)) => frame.id = Some(id.to_owned()),
            Some(("event", event)) => event.clone_into(&mut frame.event),
            Some(("data", line)) => data.push(line),
            Some(_) | None => {}
        }
    }
    frame.data = data.join("\n");
    (!data.is_empty()).then_some(frame)
}
