//! Tells when streamed JSON text has become one whole object.

/// Follows JSON text far enough to know when its first object has ended, at a constant cost per byte.
#[derive(Debug, Default)]
pub(super) struct ObjectScan {
    depth: usize,
    state: ScanState,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ScanState {
    #[default]
    Before,
    Inside,
    InString,
    InEscape,
    Complete,
    /// Not an object.
    Other,
}

impl ObjectScan {
    /// Takes the next piece.
    pub(super) fn feed(&mut self, text: &str) {
        for byte in text.bytes() {
            self.state = match (&self.state, byte) {
                (ScanState::Before, b' ' | b'\t' | b'\r' | b'\n') => ScanState::Before,
                (ScanState::Before, b'{') | (ScanState::Inside, b'{' | b'[') => {
                    self.depth += 1;
                    ScanState::Inside
                }
                (ScanState::Before, _) => ScanState::Other,
                (ScanState::Inside, b'}' | b']') => {
                    self.depth -= 1;
                    if self.depth == 0 { ScanState::Complete } else { ScanState::Inside }
                }
                (ScanState::Inside, b'"') | (ScanState::InEscape, _) => ScanState::InString,
                (ScanState::Inside, _) | (ScanState::InString, b'"') => ScanState::Inside,
                (ScanState::InString, b'\\') => ScanState::InEscape,
                (ScanState::InString, _) => ScanState::InString,
                (ScanState::Complete, _) => ScanState::Complete,
                (ScanState::Other, _) => ScanState::Other,
            };
        }
    }

    /// Whether the object has ended.
    pub(super) fn is_complete(&self) -> bool {
        self.state == ScanState::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_complete_at_its_last_brace() {
        for (pieces, expected) in [
            (&["{}"] as &[_], true),
            (&[" {\"a\":", "[1,{\"b\":\"}\"}]", "}"], true),
            (&["{\"a\":\"\\", "\"}"], false),
            (&["{\"a\":\"\\", "\"\"}"], true),
            (&["{\"a\":{}"], false),
            (&["", " "], false),
            (&["\"{}\""], false),
            (&["null"], false),
        ] {
            let mut scan = ObjectScan::default();
            pieces.iter().for_each(|piece| scan.feed(piece));
            assert_eq!(scan.is_complete(), expected, "{pieces:?}");
        }
    }
}
