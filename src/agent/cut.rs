//! Shortening a text that is too long, keeping what is most useful: how it begins and how it ends.

use std::borrow::Cow;

use unicode_segmentation::UnicodeSegmentation;

/// Keeps head and tail of a text of more than `max_chars` Unicode scalar values around a line that says how many
/// are left out. Never cuts inside a user-perceived character (extended grapheme cluster, UAX #29), unless a
/// single one is longer than the room for it. The result has at most `max_chars` scalar values, or is the
/// marker alone when not even that fits.
pub fn cut_middle(text: &str, max_chars: usize) -> Cow<'_, str> {
    // Bytes bound scalar values from above, so short texts need no counting.
    if text.len() <= max_chars {
        return Cow::Borrowed(text);
    }
    let total = text.chars().count();
    if total <= max_chars {
        return Cow::Borrowed(text);
    }
    // The number in the marker has at most as many digits as the total.
    let room = max_chars.saturating_sub(marker(total).chars().count());
    let head = head_len(text, room.div_ceil(2));
    let kept_head = text.get(..head).unwrap_or_default();
    let rest = text.get(head..).unwrap_or_default();
    let tail = tail_start(rest, room - kept_head.chars().count().min(room));
    let kept_tail = rest.get(tail..).unwrap_or_default();
    let left_out = total - kept_head.chars().count() - kept_tail.chars().count();
    Cow::Owned(format!("{kept_head}{}{kept_tail}", marker(left_out)))
}

fn marker(left_out: usize) -> String {
    format!("\n[… {left_out} characters left out …]\n")
}

/// Byte length of the longest head of at most `room` scalar values.
fn head_len(text: &str, room: usize) -> usize {
    let (mut used, mut end) = (0, 0);
    for (start, cluster) in text.grapheme_indices(true) {
        used += cluster.chars().count();
        if used > room {
            break;
        }
        end = start + cluster.len();
    }
    if end == 0 { text.char_indices().nth(room).map_or(text.len(), |(at, _)| at) } else { end }
}

/// Byte offset of the longest tail of at most `room` scalar values.
fn tail_start(text: &str, room: usize) -> usize {
    let (mut used, mut begin) = (0, text.len());
    for (start, cluster) in text.grapheme_indices(true).rev() {
        used += cluster.chars().count();
        if used > room {
            break;
        }
        begin = start;
    }
    if begin == text.len() && room > 0 {
        return text.char_indices().rev().nth(room - 1).map_or(0, |(at, _)| at);
    }
    begin
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keeps_the_beginning_and_the_end() {
        let text = format!("{}ERROR: real cause", "x".repeat(300_000));
        let cut = cut_middle(&text, 200);
        assert!(cut.starts_with("xxx") && cut.ends_with("ERROR: real cause"), "{cut}");
        assert_eq!(cut.chars().count(), 200);
        let kept = 200 - "\n[… 299854 characters left out …]\n".chars().count();
        assert!(cut.contains(&format!("[… {} characters left out …]", 300_017 - kept)), "{cut}");
    }

    #[test]
    fn a_text_that_fits_is_untouched() {
        let text = "é".repeat(200);
        assert!(matches!(cut_middle(&text, 200), Cow::Borrowed(same) if same == text));
    }

    #[test]
    fn a_family_emoji_is_whole_or_gone() {
        let family = "👨‍👩‍👧‍👦";
        let text = family.repeat(100);
        let cut = cut_middle(&text, 100);
        for piece in cut.split('\n').filter(|piece| !piece.starts_with('[')) {
            assert_eq!(piece.replace(family, ""), "", "{cut}");
        }
    }

    proptest! {
        #[test]
        fn result_fits_and_is_made_of_the_text(text in "\\PC{0,400}", max in 60_usize..300) {
            let cut = cut_middle(&text, max);
            prop_assert!(cut.chars().count() <= max);
            if let Some((head, rest)) = cut.split_once("\n[… ") && matches!(cut, Cow::Owned(_)) {
                let (count, tail) = rest.split_once(" characters left out …]\n").unwrap();
                prop_assert!(text.starts_with(head) && text.ends_with(tail));
                let left_out: usize = count.parse().unwrap();
                prop_assert_eq!(head.chars().count() + tail.chars().count() + left_out, text.chars().count());
            }
        }
    }
}
