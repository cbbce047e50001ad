//! The message being written: its text so far, kept so that any reader can have the part it has not seen.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::cursor::{Cursor, Within};
use super::frame::{self, Channel, MessageName};
use crate::domain::Seq;

/// Most bytes kept of one message, text and reasoning together. What is written beyond is not streamed; the
/// durable message delivers it.
pub(super) const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// Size of the shared blocks a text is kept in.
const BLOCK_BYTES: usize = 16 * 1024;

/// Bytes of a delta that are rendered at once.
const CHUNK_BYTES: usize = 32 * 1024;

/// Bookkeeping of one change from text to reasoning, counted against [`MAX_MESSAGE_BYTES`].
const MARK_BYTES: usize = size_of::<Mark>();

/// A place in a message, in Unicode scalar values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) text: usize,
    pub(super) reasoning: usize,
}

/// Reasoning up to `reasoning` was written when the text had `text` scalar values.
#[derive(Clone, Copy, Debug)]
struct Mark {
    text: usize,
    reasoning: usize,
}

/// A durable event that was published while the message was being written, and what had been written before it.
#[derive(Clone, Copy, Debug)]
struct Stop {
    seq: Seq,
    place: Place,
}

/// A message that is being written.
#[derive(Debug)]
pub(super) struct OpenMessage {
    /// Which message of the live run this is, from 1; no two have the same.
    pub(super) epoch: u64,
    /// Step and attempt.
    pub(super) name: MessageName,
    /// The newest durable event when it was begun.
    pub(super) opened_at: Seq,
    text: Text,
    reasoning: Text,
    marks: Vec<Mark>,
    stops: Vec<Stop>,
    full: bool,
}

/// Whether a fragment was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    /// Kept; it runs from the first place to the second.
    Kept(Place, Place),
    /// The message is full since this fragment.
    NowFull,
    /// The message was full before, or the fragment is empty.
    Nothing,
}

impl OpenMessage {
    pub(super) fn new(epoch: u64, name: MessageName, opened_at: Seq) -> Self {
        Self {
            epoch,
            name,
            opened_at,
            text: Text::default(),
            reasoning: Text::default(),
            marks: Vec::new(),
            stops: Vec::new(),
            full: false,
        }
    }

    /// What has been written.
    pub(super) fn end(&self) -> Place {
        Place { text: self.text.chars, reasoning: self.reasoning.chars }
    }

    /// Adds a fragment.
    pub(super) fn push(&mut self, channel: Channel, fragment: &str) -> Pushed {
        if self.full || fragment.is_empty() {
            return Pushed::Nothing;
        }
        if self.bytes() + fragment.len() + MARK_BYTES > MAX_MESSAGE_BYTES {
            self.full = true;
            return Pushed::NowFull;
        }
        let from = self.end();
        match channel {
            Channel::Text => self.text.push(fragment),
            Channel::Reasoning => {
                self.reasoning.push(fragment);
                let reasoning = self.reasoning.chars;
                match self.marks.last_mut() {
                    Some(mark) if mark.text == from.text => mark.reasoning = reasoning,
                    Some(_) | None => self.marks.push(Mark { text: from.text, reasoning }),
                }
            }
        }
        Pushed::Kept(from, self.end())
    }

    /// Notes that a durable event is published now, after what has been written so far.
    pub(super) fn stop(&mut self, seq: Seq) {
        self.stops.push(Stop { seq, place: self.end() });
    }

    /// What a reader has seen that has seen exactly the events up to `seq` (at or after `opened_at`).
    pub(super) fn place_after(&self, seq: Seq) -> Place {
        let passed = self.stops.partition_point(|stop| stop.seq <= seq);
        passed.checked_sub(1).and_then(|last| self.stops.get(last)).map(|stop| stop.place).unwrap_or_default()
    }

    /// What comes before the next event after `seq`: all that is written when there is no such event.
    pub(super) fn place_before_next(&self, seq: Seq) -> Place {
        let passed = self.stops.partition_point(|stop| stop.seq <= seq);
        self.stops.get(passed).map_or_else(|| self.end(), |stop| stop.place)
    }

    /// Where a cursor at or after `opened_at` stands; `None` when that much has not been written.
    pub(super) fn locate(&self, cursor: Cursor) -> Option<Place> {
        let place = match cursor.within() {
            Within::Event => self.place_after(cursor.seq()),
            Within::Text(text) => Place { text, reasoning: self.reasoning_before(text) },
            Within::Both { text, reasoning } => Place { text, reasoning },
        };
        let end = self.end();
        (place.text <= end.text && place.reasoning <= end.reasoning).then_some(place)
    }

    /// The deltas that take a reader from `at` to `to`: at most one of text, with the reasoning that was written
    /// before its end ahead of it and the rest of the reasoning behind it, so that each id says what was seen.
    pub(super) fn rest(&self, seq: Seq, at: &mut Place, to: Place) -> VecDeque<Rest> {
        let mut rest = VecDeque::new();
        if to.text > at.text {
            let before = self.reasoning_before(to.text).min(to.reasoning);
            self.rest_of_reasoning(seq, at, before, &mut rest);
            let id = Cursor::in_text(seq, to.text);
            let head = frame::delta_head(Channel::Text, self.name, id, at.text);
            rest.push_back(Rest::new(head, self.text.slice(at.text, to.text)));
            at.text = to.text;
        }
        self.rest_of_reasoning(seq, at, to.reasoning, &mut rest);
        rest
    }

    fn rest_of_reasoning(&self, seq: Seq, at: &mut Place, to: usize, rest: &mut VecDeque<Rest>) {
        if to > at.reasoning {
            let id = Cursor::in_reasoning(seq, at.text, to);
            let head = frame::delta_head(Channel::Reasoning, self.name, id, at.reasoning);
            rest.push_back(Rest::new(head, self.reasoning.slice(at.reasoning, to)));
            at.reasoning = to;
        }
    }

    /// The reasoning that was written before the text went beyond what precedes this offset.
    fn reasoning_before(&self, text: usize) -> usize {
        let passed = self.marks.partition_point(|mark| mark.text < text);
        passed.checked_sub(1).and_then(|last| self.marks.get(last)).map_or(0, |mark| mark.reasoning)
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.text.bytes + self.reasoning.bytes + self.marks.len() * MARK_BYTES
    }
}

/// An append-only text in blocks that readers share.
#[derive(Debug, Default)]
struct Text {
    blocks: Vec<Block>,
    /// What follows the last block; shorter than a block.
    tail: String,
    tail_chars: usize,
    chars: usize,
    bytes: usize,
}

/// A finished part of a text.
#[derive(Debug)]
struct Block {
    /// Scalar values before it.
    start: usize,
    chars: usize,
    text: Arc<str>,
}

impl Text {
    fn push(&mut self, mut fragment: &str) {
        self.bytes += fragment.len();
        while !fragment.is_empty() {
            let room = BLOCK_BYTES.saturating_sub(self.tail.len());
            let (now, later) = fragment.split_at(fragment.floor_char_boundary(room));
            if now.is_empty() {
                self.finish_block();
                continue;
            }
            let chars = now.chars().count();
            self.tail.push_str(now);
            self.tail_chars += chars;
            self.chars += chars;
            fragment = later;
        }
    }

    fn finish_block(&mut self) {
        let start = self.chars - self.tail_chars;
        self.blocks.push(Block { start, chars: self.tail_chars, text: self.tail.as_str().into() });
        self.tail.clear();
        self.tail_chars = 0;
    }

    /// The text between two offsets. Blocks are shared; only the unfinished one is copied.
    fn slice(&self, from: usize, to: usize) -> VecDeque<Piece> {
        let first = self.blocks.partition_point(|block| block.start + block.chars <= from);
        let mut pieces: VecDeque<_> = self
            .blocks
            .iter()
            .skip(first)
            .take_while(|block| block.start < to)
            .map(|block| Piece {
                text: Arc::clone(&block.text),
                range: byte_range(&block.text, block.chars, from.saturating_sub(block.start)..to - block.start),
            })
            .collect();
        let tail_start = self.chars - self.tail_chars;
        if to > tail_start {
            let range = byte_range(&self.tail, self.tail_chars, from.saturating_sub(tail_start)..to - tail_start);
            let text: Arc<str> = self.tail.get(range).unwrap_or_default().into();
            pieces.push_back(Piece { range: 0..text.len(), text });
        }
        pieces
    }
}

/// Offsets in scalar values as offsets in bytes; beyond the end is the end.
fn byte_range(text: &str, chars: usize, range: Range<usize>) -> Range<usize> {
    let byte = |offset: usize| match offset {
        0 => 0,
        offset if offset >= chars => text.len(),
        offset => text.char_indices().nth(offset).map_or(text.len(), |(byte, _)| byte),
    };
    byte(range.start)..byte(range.end)
}

/// A part of a shared text.
#[derive(Debug)]
struct Piece {
    text: Arc<str>,
    range: Range<usize>,
}

/// One delta that is rendered bit by bit, so that a reader never holds more than a chunk of it.
#[derive(Debug)]
pub(super) struct Rest {
    head: String,
    pieces: VecDeque<Piece>,
}

impl Rest {
    fn new(head: String, pieces: VecDeque<Piece>) -> Self {
        Self { head, pieces }
    }

    /// The next chunk of the frame, and whether it is the last one.
    pub(super) fn chunk(&mut self) -> (Bytes, bool) {
        let mut out = std::mem::take(&mut self.head);
        while out.len() < CHUNK_BYTES {
            let Some(piece) = self.pieces.pop_front() else {
                out.push_str(frame::DELTA_END);
                return (out.into(), true);
            };
            out.push_str(&frame::escaped(piece.text.get(piece.range).unwrap_or_default()));
        }
        (out.into(), false)
    }

    /// Bytes that only this reader holds.
    #[cfg(test)]
    pub(super) fn own_bytes(&self) -> usize {
        let unshared = self.pieces.iter().filter(|piece| Arc::strong_count(&piece.text) == 1);
        self.head.len() + self.pieces.len() * size_of::<Piece>() + unshared.map(|piece| piece.text.len()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::RunId;

    const NAME: MessageName = MessageName { run: RunId::new(uuid::Uuid::nil()), step: 1, attempt: 1 };

    fn text_of(rest: &mut Rest) -> String {
        let mut frame = Vec::new();
        loop {
            let (chunk, last) = rest.chunk();
            frame.extend_from_slice(&chunk);
            if last {
                break;
            }
        }
        let frame = String::from_utf8(frame).unwrap();
        let data = frame.strip_suffix("\n\n").unwrap().split_once("data: ").unwrap().1;
        serde_json::from_str::<serde_json::Value>(data).unwrap()["text"].as_str().unwrap().to_owned()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Blocks are an internal matter: any slice is the slice of the whole text.
        #[test]
        fn a_slice_is_what_stands_between_its_offsets(
            fragments in prop::collection::vec(("[a-z🦀é\u{301}\u{0}\"]{1,6}", 1..4_000_usize), 1..8),
            cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 8),
        ) {
            let mut message = OpenMessage::new(1, NAME, 0);
            let mut whole = String::new();
            for (fragment, times) in fragments {
                let fragment = fragment.repeat(times);
                whole.push_str(&fragment);
                let pushed = message.push(Channel::Text, &fragment);
                prop_assert!(matches!(pushed, Pushed::Kept(..)));
            }
            let chars: Vec<char> = whole.chars().collect();
            prop_assert_eq!(message.end().text, chars.len());
            for (a, b) in cuts {
                let (a, b) = (a.index(chars.len() + 1), b.index(chars.len() + 1));
                let (from, to) = (a.min(b), a.max(b));
                let mut at = Place { text: from, reasoning: 0 };
                let mut rest = message.rest(1, &mut at, Place { text: to, reasoning: 0 });
                prop_assert_eq!(rest.len(), usize::from(to > from));
                let text: String = rest.iter_mut().map(text_of).collect();
                prop_assert_eq!(text, chars[from..to].iter().collect::<String>());
                prop_assert_eq!(at.text, to);
            }
        }
    }

    #[test]
    fn a_text_offset_counts_the_reasoning_before_it_as_seen() {
        let mut message = OpenMessage::new(1, NAME, 4);
        for (channel, fragment) in [
            (Channel::Reasoning, "rr"),
            (Channel::Text, "abc"),
            (Channel::Reasoning, "sss"),
            (Channel::Reasoning, "t"),
            (Channel::Text, "de"),
            (Channel::Reasoning, "u"),
        ] {
            message.push(channel, fragment);
        }
        let located: Vec<_> = (0..=6).map(|offset| message.locate(Cursor::in_text(4, offset))).collect();
        let place = |text, reasoning| Some(Place { text, reasoning });
        assert_eq!(located, [place(0, 0), place(1, 2), place(2, 2), place(3, 2), place(4, 6), place(5, 6), None],);
        assert_eq!(message.locate(Cursor::in_reasoning(4, 5, 7)), place(5, 7));
        assert_eq!(message.locate(Cursor::in_reasoning(4, 5, 8)), None);
    }

    #[test]
    fn a_message_keeps_a_bounded_number_of_bytes_whatever_is_written() {
        for fragments in [["a", "b"], ["🦀🦀🦀🦀", ""], [&"x".repeat(300_000), "y"]] {
            let mut message = OpenMessage::new(1, NAME, 0);
            let mut full = 0;
            for _ in 0..200_000 {
                for (channel, fragment) in [(Channel::Text, fragments[0]), (Channel::Reasoning, fragments[1])] {
                    full += usize::from(message.push(channel, fragment) == Pushed::NowFull);
                }
            }
            assert!(message.bytes() <= MAX_MESSAGE_BYTES, "{}", message.bytes());
            assert!(message.bytes() > MAX_MESSAGE_BYTES / 2, "{}", message.bytes());
            assert_eq!(full, 1, "said once");
        }
    }
}
