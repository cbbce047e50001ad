//! Keeps the head and the tail of what a program prints, in bounded memory, and shows it as text.

use std::collections::VecDeque;

use super::utf8::{cut_end, cut_start};

/// What came out of one stream so far: its first and last bytes.
#[derive(Debug)]
pub(super) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    head_limit: usize,
    tail_limit: usize,
    total: u64,
}

/// What a stream printed, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Captured {
    /// Head, a marker where something is missing, tail; without NUL or other control characters but newline and tab.
    pub(super) text: String,
    /// Bytes printed.
    pub(super) total: u64,
    /// Bytes that `text` leaves out of the middle.
    pub(super) left_out: u64,
    /// Bytes that were not UTF-8 and are shown as U+FFFD.
    pub(super) invalid: u64,
    /// Control characters that are shown as symbols.
    pub(super) controls: u64,
}

impl Capture {
    /// Keeps at most `limit` bytes.
    pub(super) const fn new(limit: usize) -> Self {
        let head_limit = limit / 2;
        let tail_limit = limit - head_limit;
        Self { head: Vec::new(), tail: VecDeque::new(), head_limit, tail_limit, total: 0 }
    }

    /// Takes what was printed next.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = (self.head_limit - self.head.len()).min(bytes.len());
        let (to_head, rest) = bytes.split_at(room);
        self.head.extend_from_slice(to_head);
        let rest = rest.get(rest.len().saturating_sub(self.tail_limit)..).unwrap_or_default();
        let too_many = (self.tail.len() + rest.len()).saturating_sub(self.tail_limit);
        self.tail.drain(..too_many);
        self.tail.extend(rest);
    }

    /// Shows what was kept.
    pub(super) fn finish(mut self) -> Captured {
        let mut shown = Captured { text: String::new(), total: self.total, left_out: 0, invalid: 0, controls: 0 };
        let tail = self.tail.make_contiguous();
        let kept = (self.head.len() + tail.len()) as u64;
        if kept == self.total {
            self.head.extend_from_slice(tail);
            shown.show(&self.head);
            return shown;
        }
        let head = without_cut_end(&self.head);
        let tail = without_cut_start(tail);
        shown.left_out = self.total - (head.len() + tail.len()) as u64;
        shown.show(head);
        shown.text.push_str(&format!("\n[… {} bytes left out …]\n", shown.left_out));
        shown.show(tail);
        shown
    }
}

impl Captured {
    fn show(&mut self, bytes: &[u8]) {
        for chunk in bytes.utf8_chunks() {
            let mut chars = chunk.valid().chars().peekable();
            while let Some(c) = chars.next() {
                match c {
                    '\n' | '\t' => self.text.push(c),
                    '\r' if chars.peek() == Some(&'\n') => {}
                    c if c.is_control() => {
                        self.controls += 1;
                        self.text.push_str(&symbol(c));
                    }
                    c => self.text.push(c),
                }
            }
            if !chunk.invalid().is_empty() {
                self.invalid += chunk.invalid().len() as u64;
                self.text.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }
}

/// How a control character is shown: NUL as `␀`, ESC as `␛`; those above ASCII, which have no picture, as `\u{9b}`.
fn symbol(control: char) -> String {
    let code = u32::from(control);
    let picture = match code {
        0x00..=0x1f => char::from_u32(0x2400 + code),
        0x7f => Some('\u{2421}'),
        _ => None,
    };
    picture.map_or_else(|| control.escape_unicode().to_string(), String::from)
}

/// The end of a piece, as text of at most `limit` bytes, for a live note.
pub(super) fn last_text(bytes: &[u8], limit: usize) -> String {
    let mut shown = Captured { text: String::new(), total: 0, left_out: 0, invalid: 0, controls: 0 };
    shown.show(without_cut_start(without_cut_end(bytes)));
    let from = shown.text.ceil_char_boundary(shown.text.len().saturating_sub(limit));
    shown.text.split_off(from)
}

/// Without the start of a character whose rest was cut off.
fn without_cut_end(bytes: &[u8]) -> &[u8] {
    bytes.get(..bytes.len() - cut_end(bytes)).unwrap_or_default()
}

/// Without the rest of a character whose start was cut off.
fn without_cut_start(bytes: &[u8]) -> &[u8] {
    bytes.get(cut_start(bytes)..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn capture(limit: usize, bytes: &[u8]) -> Captured {
        let mut capture = Capture::new(limit);
        capture.push(bytes);
        capture.finish()
    }

    #[test]
    fn what_fits_is_shown_whole() {
        let whole = Captured { text: "héllo\n".to_owned(), total: 7, left_out: 0, invalid: 0, controls: 0 };
        assert_eq!(capture(7, "héllo\n".as_bytes()), whole);
        assert_eq!(capture(8, "héllo\n".as_bytes()), whole);
    }

    #[test]
    fn the_middle_is_left_out_between_characters() {
        // A limit of 7 keeps 3 and 4 bytes: both cuts fall into a character of two bytes.
        let text = "ééééé";
        assert_eq!(
            capture(7, text.as_bytes()),
            Captured {
                text: "é\n[… 4 bytes left out …]\néé".to_owned(),
                total: 10,
                left_out: 4,
                invalid: 0,
                controls: 0,
            }
        );
        assert_eq!(capture(6, text.as_bytes()).text, "é\n[… 6 bytes left out …]\né");
    }

    #[test]
    fn bytes_that_are_not_text_become_text_that_can_be_stored() {
        let shown = capture(100, b"\xff\xfe\x00A\xc3\r\n\x1b[1m\r\xc2\x9b");
        assert_eq!(
            shown,
            Captured {
                text: "\u{fffd}\u{fffd}␀A\u{fffd}\n␛[1m␍\\u{9b}".to_owned(),
                total: 14,
                left_out: 0,
                invalid: 3,
                controls: 4,
            }
        );
    }

    #[test]
    fn a_note_is_the_end_of_what_came() {
        assert_eq!(last_text("aéb".as_bytes(), 3), "éb");
        assert_eq!(last_text("aéb".as_bytes(), 2), "b");
        assert_eq!(last_text(&"é".as_bytes()[1..], 10), "");
        assert_eq!(last_text(b"\x00\xff", 6), "␀\u{fffd}");
    }

    proptest! {
        #[test]
        fn memory_is_bounded_and_every_byte_accounted_for(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            limit in 1_usize..60,
        ) {
            let mut capture = Capture::new(limit);
            for chunk in &chunks {
                capture.push(chunk);
                prop_assert!(capture.head.len() + capture.tail.len() <= limit);
            }
            let all = chunks.concat();
            let shown = capture.finish();
            prop_assert_eq!(shown.total, all.len() as u64);
            prop_assert!(all.len() > limit || shown.left_out == 0);
            prop_assert!(all.len() as u64 - shown.left_out <= limit as u64);
            prop_assert!(!shown.text.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
            // The chunking makes no difference.
            prop_assert_eq!(self::capture(limit, &all), shown);
        }
    }
}
