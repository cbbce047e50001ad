//! Where a command prints. A reader that went away is not an error.

use std::io::{self, Write};

use crate::domain::FieldError;
use crate::domain::text::{excerpt, printable, shown, with_causes};

/// Most characters of one thing that a server or a program says in an error.
const MAX_SAID: usize = 1_000;

/// An error as it is printed: its causes once each, every line free of what a terminal would obey.
pub(super) fn told(error: &anyhow::Error) -> String {
    printable(&with_causes(error.as_ref()), &['\n', '\t']).into_owned()
}

/// Words from outside, on one line.
pub(super) fn said(text: &str) -> String {
    excerpt(text, MAX_SAID)
}

/// What of a request the command line gives, by its path.
const ARGUMENTS: [(&str, &str); 5] = [
    ("$.input", "the prompt"),
    ("$.agent", "--agent"),
    ("$.model", "--model"),
    ("$.workspace", "--workspace"),
    ("$.limits.timeout_ms", "--timeout, in milliseconds"),
];

/// What is at fault, as it was given: by its argument where it has one.
fn place(path: &str) -> String {
    if let Some((_, argument)) = ARGUMENTS.iter().find(|(of, _)| *of == path) {
        return (*argument).to_owned();
    }
    match path.strip_prefix("$.metadata.") {
        Some(key) => format!("--metadata {}", shown(key, MAX_SAID)),
        None => shown(path, MAX_SAID),
    }
}

/// The fields at fault: one on the same line, several below each other.
pub(super) fn fields(errors: &[FieldError]) -> String {
    let line = |error: &FieldError| format!("{}: {}", place(&error.path), said(&error.message));
    match errors {
        [only] => format!(": {}", line(only)),
        several => several.iter().map(|error| format!("\n  {}", line(error))).collect(),
    }
}

/// Prints a text.
pub(super) fn print(out: &mut (dyn Write + Send), text: &str) -> io::Result<()> {
    Output::new(out).print(text)
}

/// A place to print to, for as long as somebody reads it.
pub(super) struct Output<'w> {
    out: &'w mut (dyn Write + Send),
    closed: bool,
}

impl<'w> Output<'w> {
    pub(super) fn new(out: &'w mut (dyn Write + Send)) -> Self {
        Self { out, closed: false }
    }

    /// Whether the reader went away.
    pub(super) const fn is_closed(&self) -> bool {
        self.closed
    }

    /// Prints a text at once, without waiting for the end of a line.
    pub(super) fn print(&mut self, text: &str) -> io::Result<()> {
        if self.closed || text.is_empty() {
            return Ok(());
        }
        match self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_named_as_they_were_given() {
        let told =
            |paths: &[&str]| fields(&paths.iter().map(|path| FieldError::new(*path, "is\nbad")).collect::<Vec<_>>());
        assert_eq!(told(&["$.limits.timeout_ms"]), ": --timeout, in milliseconds: is bad");
        assert_eq!(
            told(&["$.metadata.a\n", "$.input", "$.tools[0]"]),
            "\n  --metadata a\\n: is bad\n  the prompt: is bad\n  $.tools[0]: is bad"
        );
        assert_eq!(told(&[]), "");
    }

    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_not_an_error_and_a_full_disk_is() {
        let mut pipe = Failing(io::ErrorKind::BrokenPipe);
        let mut output = Output::new(&mut pipe);
        output.print("x").unwrap();
        assert!(output.is_closed());
        output.print("y").unwrap();
        let mut disk = Failing(io::ErrorKind::StorageFull);
        assert!(print(&mut disk, "x").is_err());
    }
}
