//! Pieces that were cut out of UTF-8 text anywhere: how much at their ends belongs to characters cut in two.

/// How many bytes at the end are the start of a character whose rest is missing: at most three.
pub(super) fn cut_end(bytes: &[u8]) -> usize {
    let tail = bytes.get(bytes.len().saturating_sub(3)..).unwrap_or_default();
    let Some(start) = tail.iter().rposition(|byte| !is_continuation(*byte)) else { return 0 };
    let last = tail.get(start..).unwrap_or_default();
    // Only what is the start of something counts; other bytes are not UTF-8, and stay to be seen as such.
    match std::str::from_utf8(last) {
        Err(error) if error.error_len().is_none() => last.len(),
        Ok(_) | Err(_) => 0,
    }
}

/// How many bytes at the start are the rest of a character whose start is missing: at most three.
pub(super) fn cut_start(bytes: &[u8]) -> usize {
    bytes.iter().take(3).take_while(|byte| is_continuation(**byte)).count()
}

const fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_cut_characters_count() {
        for (bytes, start, end) in [
            (b"".as_slice(), 0, 0),
            (b"ab", 0, 0),
            ("é".as_bytes(), 0, 0),
            (b"a\xc3", 0, 1),
            (b"\xe2\x82", 0, 2),
            (b"\xf0\x9f\x98", 0, 3),
            (b"\xff\xc3", 0, 1),
            (b"\xc3\xff", 0, 0),
            (b"\xf0\x80", 0, 0),
            (b"\xa9b", 1, 0),
            (b"\x80\x80\x80\x80", 3, 0),
        ] {
            assert_eq!((cut_start(bytes), cut_end(bytes)), (start, end), "{bytes:x?}");
        }
    }

    proptest! {
        #[test]
        fn any_piece_of_a_text_becomes_text(text in "\\PC{1,12}", from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
            let (a, b) = (from.index(text.len() + 1), to.index(text.len() + 1));
            let piece = &text.as_bytes()[a.min(b)..a.max(b)];
            let rest = &piece[cut_start(piece)..];
            let whole = &rest[..rest.len() - cut_end(rest)];
            prop_assert!(std::str::from_utf8(whole).is_ok());
            prop_assert!(piece.len() - whole.len() <= 6);
        }

        #[test]
        fn the_end_is_what_a_reader_of_the_whole_finds(bytes in prop::collection::vec(any::<u8>(), 0..12)) {
            let invalid = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
            let is_start = std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            prop_assert_eq!(cut_end(&bytes), if is_start { invalid.len() } else { 0 });
        }
    }
}
