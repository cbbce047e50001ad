//! How a response is read, the same for every wire: what an end, a silence or an unreadable piece means.
//!
//! Wires only translate (see [`Decoder`]); the rules stand here once. A response is complete when the
//! provider said so: by its end mark, by a finish reason, or by being one whole document. Everything else
//! is truncated, whatever came before.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::time::{Instant, timeout};

use super::accumulator::{AccumulateError, Accumulator, Fragment};
use super::error::{ProviderError, excerpt};
use super::sse::{self, Event, Frame};
use super::{DeltaSink, json};
use crate::domain::{FailureClass, FinishReason, InvalidUsage, ModelFailure, ModelTurn, ReasoningToken};

/// Largest answer that comes as one document.
const MAX_DOCUMENT_BYTES: usize = 16 * 1024 * 1024;
/// How long after the finish reason the rest (usage, end mark) is waited for, whatever comes meanwhile: a server that
/// goes on sending comments must not turn an answer into a timeout.
const TAIL_WAIT: Duration = Duration::from_secs(5);

const TAIL_OVER: &str = "the stream did not end";

/// Reads the events of one response as fragments. A pure function of what it is given, in order.
pub trait Decoder: Send {
    /// Reads one event.
    fn event(&mut self, event: &Event, out: &mut Vec<Fragment>) -> Result<Decoded, StreamError>;
    /// Looks at a line of the stream that is no part of an event.
    fn stray(&mut self, line: &str) -> Result<(), StreamError>;
    /// Reads an answer that came as one document.
    fn whole(&mut self, body: &str, out: &mut Vec<Fragment>) -> Result<(), StreamError>;
    /// Bytes of memory that it keeps of the response itself, besides the fragments.
    fn kept(&self) -> usize;
    /// The token of the reasoning read so far, once.
    fn token(&mut self) -> Option<ReasoningToken>;
    /// What the model said in place of an answer when it declined.
    fn refusal(&self) -> Option<&str>;
}

/// What an event said of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// More may follow.
    More,
    /// The provider's end mark: nothing follows that matters.
    Done,
}

/// An event that carries no fragment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The provider reports an error.
    #[error("{}", .0.excerpt())]
    Provider(ProviderError),
    /// This is not of the wire's form.
    #[error("unreadable: {}", excerpt(.0))]
    Unreadable(String),
    /// Token counts that cannot be.
    #[error(transparent)]
    Usage(InvalidUsage),
    /// More of something than is taken for real.
    #[error("the response has more than {0}")]
    TooMany(&'static str),
}

/// The bytes of one response, on the way to a turn. Pure: any cut of the same bytes gives the same result.
pub struct Reader<D> {
    form: Form,
    decoder: D,
    accumulator: Accumulator,
    fragments: Vec<Fragment>,
    /// Empty between two pieces; kept for its room.
    frames: Vec<Frame>,
    /// The first line that was no part of an event, for the message of a failure.
    stray: Option<String>,
}

enum Form {
    /// Nothing but white space came, and the label does not say.
    Unknown,
    Events(sse::Decoder),
    Document(Vec<u8>),
}

/// Whether a response has to be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More is needed.
    Reading,
    /// The model finished; usage and the end mark may follow.
    Finished,
    /// Nothing follows.
    Done,
}

impl<D: Decoder> Reader<D> {
    /// A reader of a response with this content type, if it has one.
    pub fn new(content_type: Option<&str>, decoder: D, accumulator: Accumulator) -> Self {
        let form = match content_type.map(|full| full.split(';').next().unwrap_or_default().trim()) {
            Some("text/event-stream") => Form::Events(sse::Decoder::default()),
            // Others are told by their first byte, since the label is often wrong.
            Some(_) | None => Form::Unknown,
        };
        Self { form, decoder, accumulator, fragments: Vec::new(), frames: Vec::new(), stray: None }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8], sink: &mut dyn DeltaSink) -> Result<Progress, ModelFailure> {
        if let (Form::Unknown, Some(first)) = (&self.form, bytes.iter().find(|byte| !byte.is_ascii_whitespace())) {
            self.form = match first {
                b'{' | b'[' => Form::Document(Vec::new()),
                _ => Form::Events(sse::Decoder::default()),
            };
        }
        match &mut self.form {
            Form::Unknown => {}
            Form::Document(body) => {
                if body.len() + bytes.len() > MAX_DOCUMENT_BYTES {
                    return Err(protocol(format!("the answer is longer than {MAX_DOCUMENT_BYTES} bytes")));
                }
                body.extend_from_slice(bytes);
            }
            Form::Events(events) => {
                let mut frames = std::mem::take(&mut self.frames);
                let bounded = events.push(bytes, &mut frames);
                if self.frames(&frames, sink)? == Decoded::Done {
                    return Ok(Progress::Done);
                }
                frames.clear();
                self.frames = frames;
                bounded.map_err(|error| protocol(error.to_string()))?;
            }
        }
        Ok(if self.accumulator.finish_reason().is_some() { Progress::Finished } else { Progress::Reading })
    }

    /// The turn of a response whose end mark came.
    pub fn done(mut self, sink: &mut dyn DeltaSink) -> Result<ModelTurn, ModelFailure> {
        let refusal = self.decoder.refusal().map(excerpt);
        let token = self.decoder.token();
        let turn = self.accumulator.finish(token, sink).map_err(corrupt)?;
        check_complete(&turn, refusal)?;
        Ok(turn)
    }

    /// The turn of a response whose bytes ended, for the reason given.
    pub fn end(mut self, reason: &str, sink: &mut dyn DeltaSink) -> Result<ModelTurn, ModelFailure> {
        let mut frames = Vec::new();
        match std::mem::replace(&mut self.form, Form::Unknown) {
            Form::Unknown => {}
            Form::Document(body) => {
                let body = String::from_utf8_lossy(&body);
                if json::document(&body).is_some() {
                    self.decoder.whole(&body, &mut self.fragments).map_err(unreadable)?;
                    self.fold(sink)?;
                    return self.done(sink);
                }
            }
            Form::Events(mut events) => {
                events.finish(&mut frames).map_err(|error| protocol(error.to_string()))?;
                if self.frames(&frames, sink)? == Decoded::Done {
                    return self.done(sink);
                }
            }
        }
        if self.accumulator.finish_reason().is_some() {
            return self.done(sink);
        }
        let seen = self.stray.map(|line| format!("; it held the line `{}`", excerpt(&line))).unwrap_or_default();
        Err(ModelFailure::new(
            FailureClass::Truncated,
            format!("the response broke off before the model had finished: {reason}{seen}"),
        ))
    }

    fn frames(&mut self, frames: &[Frame], sink: &mut dyn DeltaSink) -> Result<Decoded, ModelFailure> {
        for frame in frames {
            let decoded = match frame {
                Frame::Comment => Ok(Decoded::More),
                Frame::Stray(line) => {
                    self.stray.get_or_insert_with(|| line.clone());
                    self.decoder.stray(line).map(|()| Decoded::More)
                }
                Frame::Event(event) => self.decoder.event(event, &mut self.fragments),
            };
            // What an event carried before its error counts: it was streamed.
            self.fold(sink)?;
            if decoded.map_err(unreadable)? == Decoded::Done {
                return Ok(Decoded::Done);
            }
        }
        Ok(Decoded::More)
    }

    fn fold(&mut self, sink: &mut dyn DeltaSink) -> Result<(), ModelFailure> {
        self.accumulator.set_aside(self.decoder.kept()).map_err(corrupt)?;
        self.fragments.drain(..).try_for_each(|fragment| self.accumulator.push(fragment, sink)).map_err(corrupt)
    }
}

/// What a finished response must hold to be an answer.
pub(super) fn check_complete(turn: &ModelTurn, refusal: Option<String>) -> Result<(), ModelFailure> {
    if !turn.tool_calls.is_empty() || !turn.text().trim().is_empty() {
        return Ok(());
    }
    Err(match (refusal, turn.finish) {
        (Some(refusal), _) => ModelFailure::new(FailureClass::Refused, format!("the model declined: {refusal}")),
        (None, FinishReason::ContentFilter) => {
            ModelFailure::new(FailureClass::Refused, "the provider's content filter held the answer back")
        }
        (None, FinishReason::Length) => ModelFailure::new(
            FailureClass::Empty,
            "the output limit was reached before the model wrote any text or tool call",
        ),
        (None, FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Unspecified) => {
            ModelFailure::new(FailureClass::Empty, "the response ended without text and without a tool call")
        }
    })
}

fn protocol(message: String) -> ModelFailure {
    ModelFailure::new(FailureClass::Protocol, message)
}

pub(super) fn corrupt(error: AccumulateError) -> ModelFailure {
    protocol(error.to_string())
}

fn unreadable(error: StreamError) -> ModelFailure {
    match error {
        StreamError::Provider(error) => {
            ModelFailure::new(error.class_in_stream(), format!("error in the response: {}", error.excerpt()))
        }
        StreamError::Unreadable(text) => {
            protocol(format!("the response holds something unreadable: {}", excerpt(&text)))
        }
        StreamError::Usage(_) | StreamError::TooMany(_) => protocol(error.to_string()),
    }
}

/// Reads a response to its end, with at most `idle` between its bytes.
pub(super) async fn read<D: Decoder>(
    mut bytes: impl Stream<Item = Result<Bytes, String>> + Unpin,
    idle: Duration,
    mut reader: Reader<D>,
    sink: &mut dyn DeltaSink,
) -> Result<ModelTurn, ModelFailure> {
    let mut progress = Progress::Reading;
    let mut tail_end = None;
    loop {
        let wait = match progress {
            Progress::Reading => idle,
            Progress::Finished => {
                let tail_end = *tail_end.get_or_insert_with(|| Instant::now() + TAIL_WAIT);
                let left = tail_end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return reader.end(TAIL_OVER, sink);
                }
                idle.min(left)
            }
            Progress::Done => return reader.done(sink),
        };
        progress = match timeout(wait, bytes.next()).await {
            Ok(Some(Ok(piece))) => reader.push(&piece, sink)?,
            Ok(Some(Err(error))) => return reader.end(&error, sink),
            Ok(None) => return reader.end("the stream ended", sink),
            Err(_) if progress == Progress::Finished => return reader.end(TAIL_OVER, sink),
            Err(_) => return Err(silent(idle)),
        };
    }
}

pub(super) fn silent(idle: Duration) -> ModelFailure {
    ModelFailure::new(FailureClass::TimedOut, format!("sent nothing for {} ms", idle.as_millis()))
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
