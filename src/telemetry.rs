//! Logs: records of `tracing` on standard error, as text or as JSON, and the names of their fields.
//!
//! What models, tools and callers write ends up in records. Control characters of theirs are shown, never sent to
//! the terminal, and no line break of theirs starts a record.

use std::io::{self, Write};

use tracing::Subscriber;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, fmt};

use crate::config::{LogConfig, LogFormat};
use crate::domain::text::{panic_text, printable, printable_json};

/// The names fields may have, each with what it holds. One thing has one name wherever it is logged.
pub const FIELDS: [(&str, &str); 29] = [
    ("address", "the address of a listener"),
    ("attempt", "which attempt of something that is repeated, from 1"),
    ("call_id", "the id of a tool call"),
    ("class", "the class of a provider's failure"),
    ("command", "the name of a configured command"),
    ("connections", "how many connections are open"),
    ("duration_ms", "how long it took, in milliseconds"),
    ("ended", "how a command came to its end"),
    ("error", "what failed"),
    ("from_now_on", "what a provider is asked from here on"),
    ("host", "the host of a provider"),
    ("limit_bytes", "the bound that was passed, in bytes"),
    ("method", "the method of an HTTP request"),
    ("panic", "what a panic said"),
    ("place", "where it happened: file, line and column"),
    ("reason", "why, in words"),
    ("refused", "what a provider refused"),
    ("request_id", "the id of an HTTP request, as in `x-request-id`"),
    ("route", "the route of an HTTP request, never its address"),
    ("run_id", "the id of a run"),
    ("signal", "the name of a signal"),
    ("status", "an HTTP status, or the status of a run"),
    ("step", "which step of a run, from 1"),
    ("steps", "how many steps a run took"),
    ("task", "the name of a long-lived task"),
    ("tasks", "the names of several"),
    ("temporary", "the name of a temporary file"),
    ("tool", "the name of a tool"),
    ("tool_calls", "how many calls a run made"),
];

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `log.level` is not a filter; checked settings have none such.
    #[error("log.level is not a filter: {0}")]
    Filter(#[from] ParseError),
    /// Something else in the process took the global subscriber first.
    #[error("logging was started twice: {0}")]
    Started(#[from] tracing::subscriber::SetGlobalDefaultError),
}

/// Starts logging for the whole process, to standard error. Panics are records like all others.
pub fn start(config: &LogConfig) -> Result<(), TelemetryError> {
    tracing::subscriber::set_global_default(subscriber(config, io::stderr)?)?;
    std::panic::set_hook(Box::new(|panic| {
        let text = panic_text(panic.payload());
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(panic = text, place, "panic");
    }));
    Ok(())
}

/// What [`start`] starts, with another place to write to.
pub fn subscriber<W>(config: &LogConfig, out: W) -> Result<impl Subscriber + Send + Sync + use<W>, TelemetryError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(&config.level)?;
    let writer = Printable { out, format: config.format };
    let layer = match config.format {
        LogFormat::Text => fmt::layer().with_ansi(false).with_writer(writer).boxed(),
        LogFormat::Json => fmt::layer().json().flatten_event(true).with_writer(writer).boxed(),
    };
    Ok(Registry::default().with(filter).with(layer))
}

/// Makes writers whose records are printable.
struct Printable<W> {
    out: W,
    format: LogFormat,
}

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for Printable<W> {
    type Writer = PrintableWriter<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        PrintableWriter { out: self.out.make_writer(), format: self.format }
    }
}

/// Takes one whole record with each write, as the `fmt` layer gives them.
struct PrintableWriter<W> {
    out: W,
    format: LogFormat,
}

impl<W: Write> Write for PrintableWriter<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let line = text.strip_suffix('\n').unwrap_or(&text);
        let mut shown = match self.format {
            LogFormat::Text => printable(line, &[]),
            LogFormat::Json => printable_json(line),
        }
        .into_owned();
        shown.push('\n');
        self.out.write_all(shown.as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::domain::text::is_unprintable;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(level: &str, format: LogFormat, log: impl FnOnce()) -> String {
        let kept = Kept::default();
        let config = LogConfig { level: level.to_owned(), format };
        let writer = kept.clone();
        tracing::subscriber::with_default(subscriber(&config, move || writer.clone()).unwrap(), log);
        let bytes = kept.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    const HOSTILE: &str = "a\u{1b}[2Jb\r\nINFO forged\u{9b}c\u{7f}d\u{202e}e é 漢";

    fn hostile() {
        tracing::info!(task = HOSTILE, "{HOSTILE}");
    }

    #[test]
    fn text_records_stay_on_their_line_and_hold_no_control_character() {
        let text = logged("info", LogFormat::Text, hostile);
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        assert!(text.ends_with('\n') && !text.trim_end_matches('\n').contains(is_unprintable), "{text:?}");
        assert!(text.contains("é 漢") && text.contains("INFO forged"), "{text:?}");
    }

    #[test]
    fn json_records_read_back_as_they_were() {
        let text = logged("info", LogFormat::Json, hostile);
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        assert!(!text.trim_end_matches('\n').contains(is_unprintable), "{text:?}");
        let record: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&record["message"], &record["task"]), (&HOSTILE.into(), &HOSTILE.into()));
    }

    #[test]
    fn the_level_decides_what_is_written() {
        let log = || {
            tracing::info!("seen");
            tracing::debug!("hidden");
        };
        let text = logged("info", LogFormat::Text, log);
        assert!(text.contains("seen") && !text.contains("hidden"), "{text}");
        assert_eq!(logged("off", LogFormat::Text, log), "");
    }
}
