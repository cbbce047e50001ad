//! Any text in a column of Postgres, which holds every character but NUL.

use std::borrow::Cow;

/// Begins an escape. It is written as itself followed by `1`, so that every text has one form and reads back as it was.
const ESCAPE: char = '\u{1}';

/// A text as its column holds it. Nearly every text is its own form; equal texts have equal forms.
pub(super) fn stored(text: &str) -> Cow<'_, str> {
    if !text.bytes().any(|byte| byte <= 1) {
        return Cow::Borrowed(text);
    }
    let mut form = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '\0' => form.extend([ESCAPE, '0']),
            ESCAPE => form.extend([ESCAPE, '1']),
            other => form.push(other),
        }
    }
    Cow::Owned(form)
}

/// The text of a column.
pub(super) fn read(form: String) -> String {
    if !form.contains(ESCAPE) {
        return form;
    }
    let mut text = String::with_capacity(form.len());
    let mut characters = form.chars();
    while let Some(character) = characters.next() {
        match character {
            ESCAPE => match characters.next() {
                Some('0') => text.push('\0'),
                Some('1') => text.push(ESCAPE),
                // Nothing of ours; it is shown as it stands.
                Some(other) => text.extend([ESCAPE, other]),
                None => text.push(ESCAPE),
            },
            other => text.push(other),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_what_has_to_be_is_escaped() {
        for plain in ["", "a b", "\\u0000", "\\0", "\u{2}é😀", "0", "1"] {
            assert!(matches!(stored(plain), Cow::Borrowed(form) if form == plain));
        }
        for (text, form) in [("\0", "\u{1}0"), ("\u{1}", "\u{1}1"), ("\\\0\\", "\\\u{1}0\\"), ("\u{1}0", "\u{1}10")] {
            assert_eq!(stored(text), form);
        }
    }

    proptest! {
        #[test]
        fn any_text_reads_back(text in "[\u{0}\u{1}\u{2}01\\\\ué]{0,12}") {
            let form = stored(&text).into_owned();
            prop_assert!(!form.contains('\0'));
            prop_assert_eq!(read(form), text);
        }
    }
}
