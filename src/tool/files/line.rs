//! Goes through the lines of a file in pieces, in bounded memory, however long the lines are.

use std::io::{self, Read};
use std::ops::Range;

/// Least bytes before and after a span that are at hand, where the line has them: what looks around a place (`^`, `$`,
/// `\b`) sees the line and not the edge of the span, and a match can be shown with what stands around it.
pub(super) const CONTEXT: usize = 1_024;

/// Most bytes of a span.
pub(super) const MAX_WINDOW: usize = 64 * 1024;

/// Bytes of the buffer: a span and what stands around it, and as much again, so that little has to be moved.
pub(super) const BUFFER: usize = 2 * (MAX_WINDOW + 2 * CONTEXT);

/// A line, or a part of one that is long.
#[derive(Debug)]
pub(super) struct Piece<'a> {
    /// The number of the line, from 1.
    pub(super) number: usize,
    /// What is at hand of the line, without its end (LF or CR LF).
    pub(super) text: &'a [u8],
    /// Where to look in `text`. Spans of a line overlap by half of the window.
    pub(super) span: Range<usize>,
}

impl Piece<'_> {
    /// Whether the line begins here and goes on after this.
    pub(super) fn is_first_of_many(&self) -> bool {
        self.span.start == 0 && self.span.end < self.text.len()
    }
}

/// Where the reader is in a line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Start,
    Inside,
}

/// The lines of a file. What follows the last LF is a line only if there is something.
pub(super) struct Lines<'b, R> {
    file: R,
    buffer: &'b mut [u8],
    window: usize,
    /// How much of the buffer holds bytes of the file.
    filled: usize,
    at_end: bool,
    /// Where in the buffer begins what is at hand of the line.
    text: usize,
    /// Where in the buffer the next span begins.
    next: usize,
    number: usize,
    place: Place,
    bytes: u64,
}

impl<'b, R: Read> Lines<'b, R> {
    /// `buffer` has to hold at least `window` and twice [`CONTEXT`]; `window` is at least 2.
    pub(super) fn new(file: R, buffer: &'b mut [u8], window: usize) -> Self {
        let place = Place::Start;
        Self { file, buffer, window, filled: 0, at_end: false, text: 0, next: 0, number: 1, place, bytes: 0 }
    }

    /// At least `wanted` bytes of the start of the file, or all of it. Comes before [`Lines::next`].
    pub(super) fn start(&mut self, wanted: usize) -> io::Result<&[u8]> {
        while self.filled < wanted && !self.at_end {
            self.fill()?;
        }
        Ok(self.at_hand(0, self.filled))
    }

    /// How much of the file was read.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next piece of the line, or of the next one.
    pub(super) fn next(&mut self) -> io::Result<Option<Piece<'_>>> {
        loop {
            let wanted = self.next + self.window + CONTEXT;
            let ahead = self.at_hand(self.next, self.filled.min(wanted));
            if let Some(length) = memchr::memchr(b'\n', ahead) {
                return Ok(Some(self.last_piece(self.next + length, 1)));
            }
            if self.filled >= wanted {
                return Ok(Some(self.piece(wanted)));
            }
            if !self.at_end {
                self.fill()?;
            } else if self.next == self.filled {
                return Ok(None);
            } else {
                return Ok(Some(self.last_piece(self.filled, 0)));
            }
        }
    }

    /// Leaves out the rest of a line of which the last piece was not the last.
    pub(super) fn leave_out_rest(&mut self) -> io::Result<()> {
        while self.place == Place::Inside {
            match memchr::memchr(b'\n', self.at_hand(self.next, self.filled)) {
                Some(length) => self.go_to_line(self.next + length + 1),
                None if self.at_end => self.go_to_line(self.filled),
                None => {
                    (self.text, self.next) = (self.filled, self.filled);
                    self.fill()?;
                }
            }
        }
        Ok(())
    }

    fn at_hand(&self, from: usize, to: usize) -> &[u8] {
        self.buffer.get(from..to).unwrap_or_default()
    }

    /// A span and what follows it up to `end`; the line goes on.
    fn piece(&mut self, end: usize) -> Piece<'_> {
        let (text, next) = (self.text, self.next);
        self.next = next + self.window / 2;
        self.text = text.max(self.next.saturating_sub(CONTEXT));
        self.place = Place::Inside;
        Piece { number: self.number, text: self.at_hand(text, end), span: next - text..next + self.window - text }
    }

    /// The rest of a line that ends at `end`, before a line end of `length` bytes.
    fn last_piece(&mut self, end: usize, length: usize) -> Piece<'_> {
        let (text, next, number) = (self.text, self.next, self.number);
        self.go_to_line(end + length);
        let line = self.at_hand(text, end);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        Piece { number, text: line, span: (next - text).min(line.len())..line.len() }
    }

    fn go_to_line(&mut self, start: usize) {
        (self.text, self.next, self.place) = (start, start, Place::Start);
        self.number += 1;
    }

    /// Moves what is needed to the start of the buffer and reads once behind it.
    fn fill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.text..self.filled, 0);
        (self.filled, self.next, self.text) = (self.filled - self.text, self.next - self.text, 0);
        let room = self.buffer.get_mut(self.filled..).unwrap_or_default();
        let length = loop {
            match self.file.read(room) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.at_end = length == 0;
        self.filled += length;
        self.bytes += length as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A reader that gives little at a time.
    struct Dribble<'a>(&'a [u8], usize);

    impl Read for Dribble<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = self.1.min(buffer.len());
            self.0.read(&mut buffer[..length])
        }
    }

    /// The lines as one would split them in memory.
    fn expected(content: &[u8]) -> Vec<&[u8]> {
        let content = content.strip_suffix(b"\n").unwrap_or(content);
        let lines = content.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        lines.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn pieces_cover_each_line_with_what_stands_around(
            lines in proptest::collection::vec((0_usize..6_000, any::<bool>()), 1..6),
            window in 2_usize..3_000,
            step in 1_usize..5_000,
            left_out in 0_usize..4,
        ) {
            let mut content = Vec::new();
            for (length, is_dos) in lines {
                content.extend((0..length).map(|index| b'a' + (index % 23) as u8));
                content.extend_from_slice(if is_dos { b"\r\n" } else { b"\n" });
            }
            let mut buffer = vec![0; window + 2 * CONTEXT];
            let mut reader = Lines::new(Dribble(&content, step), &mut buffer, window);
            for (index, line) in expected(&content).into_iter().enumerate() {
                let mut from = 0;
                let seen = loop {
                    let piece = reader.next().unwrap().unwrap();
                    prop_assert_eq!(piece.number, index + 1);
                    prop_assert!(piece.span.len() <= window + CONTEXT);
                    // The text is that of the line, and the span begins half a window after the one before.
                    let text = from - piece.span.start;
                    let is_cut_cr = piece.text.len() == line.len() + 1 - text && piece.text.ends_with(b"\r");
                    prop_assert!(line[text..].starts_with(piece.text) || is_cut_cr);
                    prop_assert!(piece.span.start == from.min(CONTEXT) || piece.span.start >= CONTEXT);
                    let rest = piece.text.len() - piece.span.end;
                    if rest == 0 {
                        break text + piece.span.end;
                    }
                    prop_assert_eq!((piece.span.len(), rest), (window, CONTEXT));
                    if index == left_out {
                        reader.leave_out_rest().unwrap();
                        break line.len();
                    }
                    from += window / 2;
                };
                prop_assert_eq!(seen, line.len());
            }
            prop_assert!(reader.next().unwrap().is_none());
            prop_assert_eq!(reader.bytes(), content.len() as u64);
        }
    }

    #[test]
    fn what_follows_the_last_newline_is_a_line_if_there_is_something() {
        for (content, lines) in [("", &[][..]), ("\n", &[""]), ("a", &["a"]), ("a\r\n\nb\r", &["a", "", "b"])] {
            let mut buffer = [0; 4 * CONTEXT];
            let mut reader = Lines::new(content.as_bytes(), &mut buffer, CONTEXT);
            assert_eq!(reader.start(100).unwrap(), content.as_bytes());
            for (index, line) in lines.iter().enumerate() {
                let piece = reader.next().unwrap().unwrap();
                assert_eq!((piece.number, piece.text, piece.span), (index + 1, line.as_bytes(), 0..line.len()));
            }
            assert!(reader.next().unwrap().is_none(), "{content:?}");
        }
    }
}
