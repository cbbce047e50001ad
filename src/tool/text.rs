//! Texts that came from a model or a file, as they are put into one line of a message.

/// At most `max` Unicode scalar values of `text`, with `…` where it was cut; control characters are escaped, so
/// that a name or a line cannot pass for another line of the message.
pub(super) fn shown(text: &str, max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(max) + 4);
    for (index, c) in text.chars().enumerate() {
        if index == max {
            out.push('…');
            break;
        }
        if c.is_control() && c != '\t' {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn one_line_and_bounded() {
        assert_eq!(shown("a\tb", 10), "a\tb");
        assert_eq!(shown("a\nb\u{1b}[0m", 20), "a\\nb\\u{1b}[0m");
        assert_eq!(shown("ééééé", 5), "ééééé");
        assert_eq!(shown("éééééé", 5), "ééééé…");
    }
}
