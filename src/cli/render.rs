//! What a reader at a terminal sees of an event stream: pure functions of its frames.

use std::io::IsTerminal;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::feed::Frame;
use crate::domain::text::{excerpt, printable, printable_json, shown};
use crate::domain::{Arguments, EventBody, Message, RunError, RunId, RunStatusName, Usage};
use crate::event::{TextDelta, ToolProgress};

/// Most characters of arguments or of a result that are shown on a line.
const MAX_SHOWN: usize = 200;

/// Most characters of a name.
const MAX_NAME: usize = 100;

/// Most characters of the error a run ended with.
const MAX_ERROR: usize = 1_000;

/// What is needed of the final run.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct FinalRun {
    pub(super) id: RunId,
    pub(super) status: RunStatusName,
    pub(super) steps: u32,
    pub(super) tool_calls: u32,
    pub(super) usage: Usage,
    pub(super) error: Option<RunError>,
}

/// What a frame gives.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shown {
    /// What to print; may be empty.
    pub(super) text: String,
    /// The run, when it ended.
    pub(super) end: Option<FinalRun>,
}

/// Turns frames into what is printed.
#[derive(Debug)]
pub(super) enum Renderer {
    /// Every frame on a line of its own, as `{"id", "event", "data"}`; the data are the bytes that were sent.
    Json(JsonLines),
    /// For people.
    Text(Terminal),
}

/// Where lines of JSON go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonLines {
    /// To a program: as they are.
    Piped,
    /// To a screen: what a terminal would obey is escaped, as JSON allows.
    Shown,
}

impl Renderer {
    /// What was asked for on the command line.
    pub(super) fn new(json: bool, out: &impl IsTerminal) -> Self {
        match (json, out.is_terminal()) {
            (false, _) => Self::text(),
            (true, false) => Self::Json(JsonLines::Piped),
            (true, true) => Self::Json(JsonLines::Shown),
        }
    }

    /// For people.
    pub(super) fn text() -> Self {
        Self::Text(Terminal::default())
    }

    /// Takes the next frame.
    pub(super) fn frame(&mut self, frame: &Frame) -> Shown {
        let body = serde_json::from_str::<EventBody<FinalRun>>(&frame.data);
        let end = match &body {
            Ok(EventBody::RunEnd { run, duration_ms: _ }) => Some(run.clone()),
            Ok(_) | Err(_) => None,
        };
        let text = match self {
            Self::Json(out) => json_line(frame, *out),
            Self::Text(terminal) => match body {
                Ok(body) => terminal.event(body),
                Err(_) => terminal.live(frame),
            },
        };
        Shown { text, end }
    }

    /// A server does not answer as it should. Among lines of JSON there is no place for that.
    pub(super) fn trouble(&mut self, what: &str) -> Shown {
        let text = match self {
            Self::Json(_) => {
                eprintln!("hames: {}", shown(what, MAX_ERROR));
                String::new()
            }
            Self::Text(terminal) => terminal.line(&format!("! {}", shown(what, MAX_ERROR))),
        };
        Shown { text, end: None }
    }

    /// The line for a run that had ended before.
    pub(super) fn summary(&mut self, run: &FinalRun) -> String {
        match self {
            Self::Json(_) => String::new(),
            Self::Text(terminal) => summary(run, None).iter().map(|line| terminal.line(line)).collect(),
        }
    }
}

/// The frame as one JSON object. Data that are not JSON, which no server of ours sends, stand as a text.
fn json_line(frame: &Frame, out: JsonLines) -> String {
    let Frame { id, event, data } = frame;
    let data = match serde_json::from_str::<&RawValue>(data) {
        // A line break between tokens is white space; inside a text there is none.
        Ok(raw) => raw.get().replace(['\n', '\r'], " "),
        Err(_) => Value::from(data.as_str()).to_string(),
    };
    let id = id.as_deref().map_or(Value::Null, Value::from);
    let line = format!(r#"{{"id":{id},"event":{},"data":{data}}}"#, Value::from(event.as_str()));
    match out {
        JsonLines::Piped => format!("{line}\n"),
        JsonLines::Shown => format!("{}\n", printable_json(&line)),
    }
}

/// What is on the screen.
#[derive(Debug, Default)]
pub(super) struct Terminal {
    /// Whether the cursor is inside a line.
    in_line: bool,
    writing: Option<Writing>,
}

/// The message being written.
#[derive(Debug)]
struct Writing {
    step: u32,
    attempt: u32,
    /// What of it is on the screen.
    text: String,
}

impl Terminal {
    fn event(&mut self, body: EventBody<FinalRun>) -> String {
        match body {
            EventBody::RunQueued {} | EventBody::ModelStart { .. } | EventBody::ModelEnd { .. } => String::new(),
            EventBody::RunStart { agent, model } => {
                let (agent, model) = (shown(&agent, MAX_NAME), shown(&model.to_string(), MAX_NAME));
                self.line(&format!("agent {agent}, model {model}"))
            }
            EventBody::ModelRetry { step: _, attempt, reason, message, delay_ms } => {
                let reason = reason.code();
                self.line(&format!(
                    "! {reason}: {}; attempt {attempt} follows in {}",
                    excerpt(&message, MAX_SHOWN),
                    duration(delay_ms)
                ))
            }
            EventBody::ModelError { step: _, attempt: _, duration_ms: _, reason, message } => {
                self.line(&format!("! {}: {}", reason.code(), excerpt(&message, MAX_SHOWN)))
            }
            EventBody::Message { step, message } => self.message(step, &message),
            EventBody::ToolStart { step: _, call_id: _, name, arguments, effect: _ } => {
                let name = shown(&name, MAX_NAME);
                self.line(&format!("> {name} {}", shown(&arguments_text(&arguments), MAX_SHOWN)))
            }
            EventBody::ToolEnd { step: _, call_id: _, name, outcome, is_error: _, content, duration_ms } => {
                let is_error = outcome.is_error();
                let outcome = serde_json::to_value(outcome).unwrap_or_default();
                let outcome = outcome.as_str().unwrap_or_default().replace('_', " ");
                let time = duration(duration_ms);
                let said = if is_error { format!(": {}", excerpt(&content, MAX_SHOWN)) } else { String::new() };
                self.line(&format!("< {} {outcome}, {time}{said}", shown(&name, MAX_NAME)))
            }
            EventBody::ContextTrimmed { step: _, dropped_messages, estimated_tokens: _ } => {
                self.line(&format!("! {dropped_messages} older messages are left out of the next request"))
            }
            EventBody::LimitWarning { limit, used, max } => {
                let limit = serde_json::to_value(limit).unwrap_or_default();
                self.line(&format!("! {used} of {max} used: {}", limit.as_str().unwrap_or_default()))
            }
            EventBody::Waiting { calls, until } => {
                let calls: Vec<_> = calls.iter().map(|call| format!("{} ({})", call.name, call.call_id)).collect();
                self.line(&format!("? waits until {until} for {}", calls.join(", ")))
            }
            EventBody::Resumed {} => self.line("> resumed"),
            EventBody::Recovered { abandoned: _, rerun: _, unknown: _ } => {
                self.line("! the process that ran this is gone; another one goes on")
            }
            EventBody::CancelRequested {} => self.line("! cancel requested"),
            EventBody::RunEnd { run, duration_ms } => {
                summary(&run, Some(duration_ms)).iter().map(|line| self.line(line)).collect()
            }
        }
    }

    /// A frame that is not an event, or one that only newer servers send.
    fn live(&mut self, frame: &Frame) -> String {
        match frame.event.as_str() {
            "text_delta" => serde_json::from_str(&frame.data).map(|delta| self.delta(delta)).unwrap_or_default(),
            "tool_progress" => serde_json::from_str(&frame.data)
                .map(|ToolProgress { text, run_id: _, call_id: _ }| {
                    text.lines().map(|line| self.line(&format!("| {}", shown(line, MAX_SHOWN)))).collect::<String>()
                })
                .unwrap_or_default(),
            "snapshot" | "reasoning_delta" | "tool_call_delta" => String::new(),
            other => self.line(&format!("! an event of a kind this version does not know: {}", shown(other, MAX_NAME))),
        }
    }

    fn delta(&mut self, delta: TextDelta) -> String {
        let TextDelta { run_id: _, step, attempt, offset, text } = delta;
        let mut out = String::new();
        let mut streamed = match self.writing.take() {
            Some(writing) if (writing.step, writing.attempt) == (step, attempt) => writing.text,
            Some(earlier) if earlier.step == step && !earlier.text.is_empty() => {
                out = self.line("! the text above was cut off; it starts anew");
                String::new()
            }
            Some(_) | None => String::new(),
        };
        let known = streamed.chars().count();
        let new: String = text.chars().skip(known.saturating_sub(offset)).collect();
        out.push_str(&self.text(&new));
        streamed.push_str(&new);
        self.writing = Some(Writing { step, attempt, text: streamed });
        out
    }

    /// A finished message: what of it was not streamed.
    fn message(&mut self, step: u32, message: &Message) -> String {
        let Message::Assistant(message) = message else { return String::new() };
        let text = message.text();
        let writing = self.writing.take().filter(|writing| writing.step == step);
        let streamed = writing.map(|writing| writing.text).unwrap_or_default();
        let mut out = match text.strip_prefix(&streamed) {
            Some(rest) => self.text(rest),
            None => {
                let end = self.end_line();
                end + &self.text(&text)
            }
        };
        out.push_str(&self.end_line());
        out
    }

    fn text(&mut self, text: &str) -> String {
        if let Some(last) = text.chars().last() {
            self.in_line = last != '\n';
        }
        printable(text, &['\n', '\t']).into_owned()
    }

    fn end_line(&mut self) -> String {
        let end = if self.in_line { "\n" } else { "" };
        self.in_line = false;
        end.to_owned()
    }

    /// A line of its own. Nothing in it breaks it.
    fn line(&mut self, text: &str) -> String {
        format!("{}{}\n", self.end_line(), printable(text, &['\t']))
    }
}

/// The last lines: how it ended and what it took.
fn summary(run: &FinalRun, duration_ms: Option<u64>) -> Vec<String> {
    let FinalRun { id, status, steps, tool_calls, usage, error } = run;
    let Usage { input_tokens, output_tokens, model_calls, model_calls_with_usage, .. } = usage;
    let tokens = match *model_calls_with_usage {
        0 if *model_calls > 0 => "tokens unknown".to_owned(),
        known if known < *model_calls => format!("at least {input_tokens} + {output_tokens} tokens"),
        _ => format!("{input_tokens} + {output_tokens} tokens"),
    };
    let time = duration_ms.map(|millis| format!(", {}", duration(millis))).unwrap_or_default();
    let plural = |count: u32| if count == 1 { "" } else { "s" };
    let mut lines = vec![format!(
        "{}: {steps} step{}, {tool_calls} tool call{}, {tokens}{time} ({id})",
        status.as_str(),
        plural(*steps),
        plural(*tool_calls)
    )];
    if let Some(RunError { code, message, retryable: _ }) = error {
        lines.push(format!("{}: {}", shown(code, MAX_NAME), excerpt(message, MAX_ERROR)));
    }
    lines
}

fn arguments_text(arguments: &Arguments) -> String {
    match arguments {
        Arguments::Object(object) => serde_json::to_string(object).unwrap_or_default(),
        Arguments::Malformed(raw) => raw.clone(),
    }
}

/// A time as people read it.
pub(super) fn duration(millis: u64) -> String {
    match millis {
        0..1_000 => format!("{millis} ms"),
        1_000..60_000 => format!("{}.{} s", millis / 1_000, millis % 1_000 / 100),
        _ => format!("{} min {} s", millis / 60_000, millis % 60_000 / 1_000),
    }
}

#[cfg(test)]
#[path = "render_tests.rs"]
mod tests;
