//! Logs: records of `tracing` on standard error, as text or as JSON, and the names of their fields.
//!
//! What models, tools and callers write ends up in records. Control characters of theirs are shown, never sent to
//! the terminal, and no line break of theirs starts a record.

use std::io::{self, Write};

use serde_json::{Map, Value};
use tracing::{Metadata, Span, Subscriber};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields as _, FormattedFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use super::trace::is_exported;
use crate::config::{LogConfig, LogFormat};
use crate::domain::RunId;
use crate::domain::text::{printable, printable_json};

/// The names fields may have, each with what it holds. One thing has one name wherever it is logged.
pub const FIELDS: [(&str, &str); 36] = [
    ("address", "the address of a listener"),
    ("attempt", "which attempt of something that is repeated, from 1"),
    ("call_id", "the id of a tool call"),
    ("calls", "how many tool calls"),
    ("class", "the class of a provider's failure"),
    ("command", "the name of a configured command"),
    ("connections", "how many connections are open"),
    ("crashes", "processes in a row that ended while they had the run at work"),
    ("duration_ms", "how long it took, in milliseconds"),
    ("ended", "how a command came to its end"),
    ("erased", "how many runs were erased"),
    ("error", "what failed"),
    ("from_now_on", "what a provider is asked from here on"),
    ("host", "the host of a provider"),
    ("limit_bytes", "the bound that was passed, in bytes"),
    ("limit_ms", "the time that was allowed, in milliseconds"),
    ("lost", "how many spans no collector has, or values of metrics it rejected"),
    ("method", "the method of an HTTP request"),
    ("otel.kind", "the kind of a span that is exported"),
    ("otel.name", "the name of a span that is exported"),
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

/// The target of spans that say whose records those inside them are. They are there whatever the level of the log: a
/// warning inside a run needs the run's id as much as anything else.
const CONTEXT: &str = "hames::context";

/// The span of a run at work: every record inside it has the field `run_id`.
pub fn run_log_context(id: RunId) -> Span {
    tracing::error_span!(target: CONTEXT, parent: None, "run", run_id = %id)
}

/// The span of an HTTP request: every record inside it has these fields.
pub fn request_log_context(method: &str, route: &str, request_id: &str) -> Span {
    tracing::error_span!(target: CONTEXT, "http_request", method, route, request_id)
}

/// The layer that writes records.
pub(super) fn layer<S, W>(config: &LogConfig, out: W) -> Result<impl Layer<S> + Send + Sync + use<S, W>, ParseError>
where
    S: Subscriber + for<'s> LookupSpan<'s> + Send + Sync,
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let is_context = |metadata: &Metadata<'_>| metadata.is_span() && metadata.target() == CONTEXT;
    let wanted = EnvFilter::try_new(&config.level)?;
    let filter = wanted
        .and(filter_fn(|metadata| !is_exported(metadata)).with_max_level_hint(LevelFilter::TRACE))
        .or(filter_fn(is_context).with_max_level_hint(LevelFilter::ERROR));
    let writer = Printable { out, format: config.format };
    let layer = match config.format {
        LogFormat::Text => fmt::layer().with_ansi(false).with_writer(writer).boxed(),
        LogFormat::Json => fmt::layer().fmt_fields(JsonFields::new()).event_format(Flat).with_writer(writer).boxed(),
    };
    Ok(layer.with_filter(filter))
}

/// Records as JSON objects whose members are the record's fields and those of the spans around it, without nesting.
struct Flat;

impl<S> FormatEvent<S, JsonFields> for Flat
where
    S: Subscriber + for<'s> LookupSpan<'s>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> std::fmt::Result {
        let own = event.metadata();
        write!(writer, "{{\"timestamp\":\"")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, "\",\"level\":\"{}\",\"target\":\"{}\"", own.level(), own.target())?;
        let spans: Vec<_> = ctx.event_scope().into_iter().flat_map(|scope| scope.from_root()).collect();
        for (depth, span) in spans.iter().enumerate() {
            // A field of the record is nearer to what happened than one of the same name around it; so is one of a span
            // further inside.
            let is_said_nearer = |name: &str| {
                own.fields().field(name).is_some()
                    || spans.iter().skip(depth + 1).any(|inner| inner.fields().field(name).is_some())
            };
            let extensions = span.extensions();
            let fields = extensions.get::<FormattedFields<JsonFields>>().map_or("", |fields| fields.fields.as_str());
            if span.fields().iter().any(|field| is_said_nearer(field.name())) {
                let mut fields: Map<String, Value> = serde_json::from_str(fields).unwrap_or_default();
                fields.retain(|name, _| !is_said_nearer(name));
                members(&mut writer, &Value::Object(fields).to_string())?;
            } else {
                members(&mut writer, fields)?;
            }
        }
        let mut fields = String::new();
        ctx.format_fields(Writer::new(&mut fields), event)?;
        members(&mut writer, &fields)?;
        writeln!(writer, "}}")
    }
}

/// Adds the members of a JSON object to another one.
fn members(writer: &mut Writer<'_>, object: &str) -> std::fmt::Result {
    match object.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        Some(members) if !members.is_empty() => write!(writer, ",{members}"),
        Some(_) | None => Ok(()),
    }
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

    use tracing_subscriber::Registry;
    use tracing_subscriber::layer::SubscriberExt as _;

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
        let subscriber = Registry::default().with(layer(&config, move || writer.clone()).unwrap());
        tracing::subscriber::with_default(subscriber, log);
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

    fn inside() {
        let id = RunId::new(uuid::Uuid::nil());
        run_log_context(id).in_scope(|| {
            tracing::warn!(error = "e", "one");
            tracing::error!(run_id = "another", "two");
            tracing::info!("three");
        });
        request_log_context("GET", "/runs", "r1").in_scope(|| {
            tracing::error!(status = 500, "four");
            tracing::error!(route = "another", "five");
            request_log_context("PUT", "/other", "r2").in_scope(|| tracing::error!("six"));
        });
    }

    #[test]
    fn records_inside_a_run_name_it_at_any_level() {
        let id = RunId::new(uuid::Uuid::nil()).to_string();
        for (level, count) in [("info", 6), ("error", 4), ("off,hames=warn", 5), ("off,hames::telemetry=info", 6)] {
            let text = logged(level, LogFormat::Json, inside);
            let records: Vec<serde_json::Value> =
                text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(records.len(), count, "{level}: {text}");
            let of = |message: &str| records.iter().find(|record| record["message"] == message).cloned();
            for (message, expected) in [("one", id.as_str()), ("two", "another"), ("three", &id)] {
                if let Some(record) = of(message) {
                    assert_eq!(record["run_id"], expected, "{level}: {record}");
                }
            }
            for (message, method, route, request_id) in
                [("four", "GET", "/runs", "r1"), ("five", "GET", "another", "r1"), ("six", "PUT", "/other", "r2")]
            {
                let record = of(message).unwrap();
                let found = (&record["method"], &record["route"], &record["request_id"]);
                assert_eq!(found, (&method.into(), &route.into(), &request_id.into()), "{level}: {record}");
            }
            for name in ["run_id", "method", "route", "request_id"] {
                let key = format!("\"{name}\":");
                assert!(text.lines().all(|line| line.matches(&key).count() <= 1), "{text}");
            }
            let text = logged(level, LogFormat::Text, inside);
            assert!(text.lines().filter(|line| line.contains(&id)).count() >= count - 4, "{text}");
        }
        assert_eq!(logged("off", LogFormat::Json, inside), "");
    }
}
