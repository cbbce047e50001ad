//! How many tokens a text is likely to have, when no tokenizer for its model is known.

use crate::domain::{Arguments, Message, Part, ToolSpec};

/// Tokens that roles and separators of one message cost on common chat formats.
const MESSAGE_OVERHEAD: u64 = 4;

/// Estimates the tokens of a text: four characters of an alphabet, or one and a half of Chinese, Japanese or
/// Korean writing, make a token. Rounded up.
pub fn estimate_text(text: &str) -> u64 {
    let (mut wide, mut narrow) = (0_u64, 0_u64);
    for c in text.chars() {
        if is_cjk(c) { wide += 1 } else { narrow += 1 }
    }
    // narrow / 4 + wide / 1.5 over the common denominator 12.
    (narrow * 3 + wide * 8).div_ceil(12)
}

/// Estimates the instructions, which stand before the messages.
pub fn estimate_instructions(instructions: Option<&str>) -> u64 {
    instructions.map_or(0, |text| MESSAGE_OVERHEAD + estimate_text(text))
}

/// Estimates the tools and their schemas, which stand before the messages.
pub fn estimate_tools(tools: &[ToolSpec]) -> u64 {
    tools
        .iter()
        .map(|tool| {
            MESSAGE_OVERHEAD
                + estimate_text(tool.name.as_str())
                + estimate_text(&tool.description)
                + estimate_text(&tool.parameters.to_string())
        })
        .sum()
}

/// Estimates one message as it is sent.
pub(super) fn estimate_message(message: &Message) -> u64 {
    let parts = |parts: &[Part]| -> u64 { parts.iter().map(estimate_part).sum() };
    MESSAGE_OVERHEAD
        + match message {
            Message::User(message) => parts(&message.content),
            Message::Assistant(message) => {
                let calls: u64 = message
                    .tool_calls
                    .iter()
                    .map(|call| {
                        let arguments = match &call.arguments {
                            Arguments::Object(_) => estimate_text(&call.arguments.canonical()),
                            Arguments::Malformed(raw) => estimate_text(raw),
                        };
                        MESSAGE_OVERHEAD + estimate_text(&call.id) + estimate_text(&call.name) + arguments
                    })
                    .sum();
                parts(&message.content) + calls
            }
            Message::Tool(message) => estimate_text(&message.call_id) + estimate_text(&message.content),
        }
}

/// Estimates one part.
pub(super) fn estimate_part(part: &Part) -> u64 {
    match part {
        Part::Text { text } => estimate_text(text),
        Part::Reasoning { text, token } => {
            estimate_text(text) + token.as_ref().map_or(0, |token| estimate_text(&token.data.to_string()))
        }
    }
}

fn is_cjk(c: char) -> bool {
    matches!(u32::from(c),
        0x1100..=0x11FF       // Hangul Jamo
        | 0x2E80..=0x303F     // CJK radicals and punctuation
        | 0x3040..=0x30FF     // Hiragana, Katakana
        | 0x3130..=0x318F     // Hangul compatibility Jamo
        | 0x31F0..=0x4DBF     // Katakana extensions, CJK extension A
        | 0x4E00..=0x9FFF     // CJK unified ideographs
        | 0xA960..=0xA97F | 0xAC00..=0xD7FF   // Hangul
        | 0xF900..=0xFAFF     // CJK compatibility ideographs
        | 0xFF00..=0xFFEF     // full-width forms
        | 0x2_0000..=0x3_FFFF // CJK extensions B and later
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_letters_or_one_and_a_half_ideographs_make_a_token() {
        for (text, tokens) in [("", 0), ("abcd", 1), ("abcde", 2), ("漢字漢", 2), ("漢字", 2), ("abcd漢字漢", 3)]
        {
            assert_eq!(estimate_text(text), tokens, "{text}");
        }
    }
}
