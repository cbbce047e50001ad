//! Texts of others, made fit to be repeated: in a message, on a terminal, in a log.

use std::any::Any;
use std::borrow::Cow;
use std::error::Error;

/// Whether a terminal or a reader could be misled by this character: controls, delete, separators that some programs
/// break lines at, marks that change the direction of text, and characters without any width. The joiners that scripts
/// need to be spelt right are not among them.
pub const fn is_unprintable(c: char) -> bool {
    matches!(c,
        '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{61c}' | '\u{200b}' | '\u{200e}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}' | '\u{2066}'..='\u{2069}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

/// The text with such characters written as `\n` or `\u{1b}`, except those in `keep`.
pub fn printable<'t>(text: &'t str, keep: &[char]) -> Cow<'t, str> {
    escaped(text, keep, |c, out| out.extend(c.escape_default()))
}

/// A JSON document on one line with such characters written as JSON has it (RFC 8259 §7): it reads back as it was.
pub fn printable_json(document: &str) -> Cow<'_, str> {
    escaped(document, &[], |c, out| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            out.push_str(&format!("\\u{unit:04x}"));
        }
    })
}

fn escaped<'t>(text: &'t str, keep: &[char], spell: impl Fn(char, &mut String)) -> Cow<'t, str> {
    let concerns = |c: char| is_unprintable(c) && !keep.contains(&c);
    if !text.contains(concerns) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if concerns(c) { spell(c, &mut out) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// At most `max` Unicode scalar values of a text, with `…` where it was cut.
pub fn clipped(text: &str, max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

/// A value of somebody else's as a message repeats it: at most `max` Unicode scalar values, on one line, with what
/// is unprintable made visible. Tabs stay.
pub fn shown(text: &str, max: usize) -> String {
    printable(&clipped(text, max), &['\t']).into_owned()
}

/// Words of somebody else's as a message repeats them: as [`shown`], with one space for every stretch of white space.
pub fn excerpt(text: &str, max: usize) -> String {
    let words = text.split_whitespace().flat_map(|word| [" ", word]).skip(1);
    let start: String = words.flat_map(str::chars).take(max.saturating_add(1)).collect();
    shown(&start, max)
}

/// The known name that was probably meant: one that is a few letters off, or that one of the two begins with, whatever
/// the case. The cost does not grow with a text that is far longer than every name.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// A shorter beginning says too little.
    const MIN_BEGINNING: usize = 3;
    let length = given.chars().count();
    let given = clipped(given, 256).to_lowercase();
    let distance = |name: &str| {
        let letters = name.chars().count();
        let difference = letters.abs_diff(length);
        let most = (1 + letters / 4).min(letters / 2);
        let name = name.to_lowercase();
        if difference <= most {
            return Some(strsim::damerau_levenshtein(&given, &name)).filter(|distance| *distance <= most);
        }
        let begins = letters.min(length) >= MIN_BEGINNING && (name.starts_with(&given) || given.starts_with(&name));
        begins.then_some(difference)
    };
    let close = known.into_iter().filter_map(|name| Some((distance(name)?, name)));
    close.min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

/// An error with its causes, in the order in which they explain it. A cause whose words stand there already is not
/// said again: many errors hold those of their source.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut out = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !out.contains(&words) {
            out.push_str(": ");
            out.push_str(&words);
        }
        source = cause.source();
    }
    out
}

/// What a panic said, from what `catch_unwind`, a joined task or a panic hook gives.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&'static str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_misleads_is_written_out_and_the_rest_kept() {
        assert_eq!(printable("a\tb\n", &['\n', '\t']), "a\tb\n");
        assert_eq!(printable("a\tb\u{1b}[0m\r", &['\n']), "a\\tb\\u{1b}[0m\\r");
        let hidden = "\u{202e}\u{2066}\u{200b}\u{feff}\u{2028}\u{2029}\u{e0041}\u{9b}\u{7f}\u{200e}\u{200f}\u{61c}";
        let escaped: String = hidden.chars().map(|c| format!("\\u{{{:x}}}", u32::from(c))).collect();
        assert_eq!(printable(hidden, &[]), escaped);
        let plain = "é 漢 \u{200c}\u{200d} \\ \" '";
        assert!(matches!(printable(plain, &[]), Cow::Borrowed(text) if text == plain));
    }

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(clipped("ééééé", 5), "ééééé");
        assert_eq!(clipped("éééééé", 5), "ééééé…");
        assert_eq!(clipped("a", 0), "…");
        assert_eq!(clipped("", 0), "");
    }

    #[test]
    fn values_are_shown_short_and_on_one_line() {
        assert_eq!(shown("a\tb", 10), "a\tb");
        assert_eq!(shown("a\r\nb\u{1b}[2J\"'é", 64), "a\\r\\nb\\u{1b}[2J\"'é");
        assert_eq!(shown(&"x".repeat(1000), 64), format!("{}…", "x".repeat(64)));
    }

    #[test]
    fn words_are_shown_without_their_line_breaks() {
        assert_eq!(excerpt(" a\n\tb  \u{1b}", 9), "a b \\u{1b}");
        assert_eq!(excerpt("ab cd", 5), "ab cd");
        assert_eq!(excerpt("ab  cde", 5), "ab cd…");
        assert_eq!(excerpt(" \n", 5), "");
    }

    #[test]
    fn only_close_names_are_suggested() {
        let known = ["input", "agent", "instructions", "metadata", "api_key_env", "b", "read_file", "write_file"];
        for (given, meant) in [
            ("inptu", Some("input")),
            ("Metadta", Some("metadata")),
            ("api_key", Some("api_key_env")),
            ("read", Some("read_file")),
            ("read_files_now", Some("read_file")),
            ("readFile", Some("read_file")),
            ("raed_file", Some("read_file")),
            ("webhook", None),
            ("thread", None),
            ("strict", None),
            ("c", None),
            ("re", None),
            ("", None),
        ] {
            assert_eq!(nearest(given, known), meant, "{given}");
        }
    }

    #[test]
    fn a_long_text_is_not_compared_letter_by_letter() {
        // A comparison of each letter with each would need gigabytes.
        let long = "input".repeat(10_000_000);
        assert_eq!(nearest(&long, ["input_of_a_long_name"; 20]), None);
    }

    #[test]
    fn a_cause_is_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("{words}")]
        struct Link {
            words: &'static str,
            source: Option<Box<Link>>,
        }
        let chain = |words: &[&'static str]| {
            let link = words.iter().rev().fold(None, |source, words| Some(Box::new(Link { words, source })));
            with_causes(&*link.unwrap())
        };
        assert_eq!(chain(&["a"]), "a");
        assert_eq!(chain(&["a", "b", "c"]), "a: b: c");
        assert_eq!(chain(&["file x: bad line", "bad line", "at 3", "bad line"]), "file x: bad line: at 3");
    }

    #[test]
    fn both_kinds_of_panic_messages_are_read() {
        assert_eq!(panic_text(&"plain"), "plain");
        assert_eq!(panic_text(&"formatted".to_owned()), "formatted");
        assert_eq!(panic_text(&7), "a panic without a message");
    }

    proptest! {
        #[test]
        fn json_reads_back_as_it_was(
            text in "\\PC{0,10}[\u{7f}-\u{a0}\u{2020}-\u{2070}\u{e0000}-\u{e0080}\u{0}-\u{20}]{0,20}",
        ) {
            let document = serde_json::to_string(&text).unwrap();
            let shown = printable_json(&document);
            prop_assert!(!shown.contains(is_unprintable));
            prop_assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
        }

        #[test]
        fn shown_is_bounded_and_printable(text in any::<String>(), max in 0usize..20) {
            for out in [shown(&text, max), excerpt(&text, max)] {
                prop_assert!(!out.replace('\t', "").contains(is_unprintable));
                // The longest spelling of one character is `\u{e0041}`.
                prop_assert!(out.chars().count() <= 9 * max + 1);
            }
        }
    }
}
