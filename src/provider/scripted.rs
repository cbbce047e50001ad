//! A provider that plays a script: for demonstrations, and for tests that need a model that does as told.
//!
//! A script is `{"turns": [{…}, …]}`; turn N answers step N of every run. Its fragments take the same way as
//! those of a real provider, so the same rules hold: an empty turn is a failure, token counts are checked.

use std::fs;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::sleep;

use super::accumulator::{Accumulator, ArgumentPiece, CallFragment, Fragment};
use super::client::{check_complete, corrupt};
use super::conversation::Conversation;
use super::json::Piece;
use super::names::NameMap;
use super::{DeltaSink, Provider};
use crate::config::{DEMO_SCRIPT, ScriptSource};
use crate::domain::{Delta, FailureClass, FinishReason, ModelFailure, ModelRequest, ModelTurn, TokenUsage};

/// What a model says, step by step.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// One for each step.
    pub turns: Vec<ScriptedTurn>,
}

/// One response.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScriptedTurn {
    /// The visible text, whole or in the pieces it streams in.
    pub text: Pieces,
    /// The reasoning before it.
    pub reasoning: Pieces,
    /// The calls after it.
    pub tool_calls: Vec<ScriptedCall>,
    /// Why it stops; by default what fits.
    pub finish: Option<FinishReason>,
    /// Tokens, if reported.
    pub usage: Option<ScriptedUsage>,
    /// Wait before the first piece, in milliseconds.
    pub delay_ms: u64,
    /// Wait before every further piece, in milliseconds.
    pub chunk_delay_ms: u64,
    /// Characters a piece has at most; unbounded when absent.
    pub chunk_chars: Option<usize>,
    /// What the first attempts meet instead, one each.
    pub failures: Vec<ScriptedFailure>,
}

/// A text, whole or in pieces.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Pieces {
    /// One text.
    Whole(String),
    /// The pieces it streams in.
    List(Vec<String>),
}

impl Default for Pieces {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

/// A call of a turn.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedCall {
    /// Its id; made up when absent.
    #[serde(default)]
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// An object; or a string, which is taken as the raw text a model wrote.
    #[serde(default)]
    pub arguments: Value,
}

/// Token counts as a provider would report them; checked when they are played.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedUsage {
    /// Tokens of the request.
    pub input_tokens: Value,
    /// Tokens of the response.
    pub output_tokens: Value,
    /// The part of the input from a cache.
    #[serde(default)]
    pub cached_input_tokens: Option<Value>,
    /// The part of the output that was reasoning.
    #[serde(default)]
    pub reasoning_tokens: Option<Value>,
}

/// What an attempt meets.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedFailure {
    /// What kind.
    pub class: FailureClass,
    /// In words.
    #[serde(default)]
    pub message: String,
    /// Text that streams before it.
    #[serde(default)]
    pub after_text: Option<String>,
    /// How long the provider asks to wait.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
}

/// The script cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// The file cannot be read.
    #[error("the script {path} cannot be read: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not a script.
    #[error("the script {path} is not valid at {at}: {source}")]
    Form {
        /// The file.
        path: String,
        /// Where in the document.
        at: String,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A turn that cannot be played.
    #[error("turn {turn} of the script: `chunk_chars` is 0; expected 1 or more")]
    EmptyChunks {
        /// Which turn, from 1.
        turn: usize,
    },
}

/// Plays a script.
#[derive(Clone, Debug)]
pub struct ScriptedProvider {
    script: Script,
}

impl ScriptedProvider {
    /// A provider that plays this.
    pub fn new(script: Script) -> Result<Self, ScriptError> {
        match script.turns.iter().position(|turn| turn.chunk_chars == Some(0)) {
            Some(index) => Err(ScriptError::EmptyChunks { turn: index + 1 }),
            None => Ok(Self { script }),
        }
    }

    /// A provider that plays the built-in demonstration, or the JSON of a file.
    pub fn load(source: &ScriptSource) -> Result<Self, ScriptError> {
        match source {
            ScriptSource::Demo => Self::parse("of the demonstration", DEMO_SCRIPT),
            ScriptSource::File(path) => {
                let shown = path.display().to_string();
                let text =
                    fs::read_to_string(path).map_err(|source| ScriptError::Read { path: shown.clone(), source })?;
                Self::parse(&shown, &text)
            }
        }
    }

    fn parse(path: &str, text: &str) -> Result<Self, ScriptError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let script = serde_path_to_error::deserialize(&mut json).map_err(|error| ScriptError::Form {
            path: path.to_owned(),
            at: error.path().to_string(),
            source: error.into_inner(),
        })?;
        Self::new(script)
    }
}

#[async_trait]
impl Provider for ScriptedProvider {
    async fn call(
        &self,
        request: &ModelRequest,
        _conversation: &mut Conversation,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, ModelFailure> {
        let turn = nth(&self.script.turns, request.step).ok_or_else(|| {
            let turns = self.script.turns.len();
            let message = format!("the script ran out: step {} was asked for, it has {turns} turns", request.step);
            ModelFailure::new(FailureClass::Protocol, message)
        })?;
        sleep(Duration::from_millis(turn.delay_ms)).await;
        let mut play = Play { turn, sink, begun: Begun::No };
        if let Some(failure) = nth(&turn.failures, request.attempt) {
            let text = failure.after_text.iter().map(String::as_str);
            for piece in text.flat_map(|text| cut(text, turn.chunk_chars)) {
                play.pause().await;
                play.sink.delta(Delta::Text(piece));
            }
            return Err(ModelFailure {
                class: failure.class,
                message: failure.message.clone(),
                retry_after: failure.retry_after_ms.map(Duration::from_millis),
            });
        }
        play.turn(request.step).await
    }
}

struct Play<'a> {
    turn: &'a ScriptedTurn,
    sink: &'a mut dyn DeltaSink,
    begun: Begun,
}

/// Whether the first piece went out.
enum Begun {
    No,
    Yes,
}

impl Play<'_> {
    async fn turn(&mut self, step: u32) -> Result<ModelTurn, ModelFailure> {
        let turn = self.turn;
        let mut accumulator = Accumulator::new(step, NameMap::default());
        let mut fragments: Vec<Fragment> = Vec::new();
        fragments.extend(pieces(&turn.reasoning, turn.chunk_chars).map(|text| Fragment::Reasoning(Piece::from(text))));
        fragments.extend(pieces(&turn.text, turn.chunk_chars).map(|text| Fragment::Text(Piece::from(text))));
        for (index, call) in turn.tool_calls.iter().enumerate() {
            let raw = match &call.arguments {
                Value::Null => String::new(),
                Value::String(raw) => raw.clone(),
                other => other.to_string(),
            };
            let index = u64::try_from(index).ok();
            let head =
                CallFragment { index, id: call.id.clone(), name: Some(call.name.clone()), ..CallFragment::default() };
            fragments.push(Fragment::Calls(vec![head]));
            fragments.extend(cut(&raw, turn.chunk_chars).map(|text| {
                let arguments = ArgumentPiece::Text(Piece::from(text));
                Fragment::Calls(vec![CallFragment { index, arguments, ..CallFragment::default() }])
            }));
        }
        for fragment in fragments {
            self.pause().await;
            accumulator.push(fragment, self.sink).map_err(corrupt)?;
        }
        let finish = turn.finish.unwrap_or(match turn.tool_calls.is_empty() {
            true => FinishReason::Stop,
            false => FinishReason::ToolCalls,
        });
        accumulator.push(Fragment::Finish(finish), self.sink).map_err(corrupt)?;
        if let Some(usage) = &turn.usage {
            accumulator.push(Fragment::Usage(usage.checked()?), self.sink).map_err(corrupt)?;
        }
        let turn = accumulator.finish(None, self.sink).map_err(corrupt)?;
        check_complete(&turn, None)?;
        Ok(turn)
    }

    async fn pause(&mut self) {
        match std::mem::replace(&mut self.begun, Begun::Yes) {
            Begun::No => {}
            Begun::Yes => sleep(Duration::from_millis(self.turn.chunk_delay_ms)).await,
        }
    }
}

impl ScriptedUsage {
    fn checked(&self) -> Result<TokenUsage, ModelFailure> {
        let count = |field: &str, value: &Value| {
            TokenUsage::count(field, value)
                .map_err(|error| ModelFailure::new(FailureClass::Protocol, error.to_string()))
        };
        let part = |field: &str, value: &Option<Value>| value.as_ref().map_or(Ok(0), |value| count(field, value));
        Ok(TokenUsage {
            input_tokens: count("input_tokens", &self.input_tokens)?,
            output_tokens: count("output_tokens", &self.output_tokens)?,
            cached_input_tokens: part("cached_input_tokens", &self.cached_input_tokens)?,
            reasoning_tokens: part("reasoning_tokens", &self.reasoning_tokens)?,
        })
    }
}

/// The item of that number, from 1.
fn nth<T>(items: &[T], number: u32) -> Option<&T> {
    items.get(usize::try_from(number).ok()?.checked_sub(1)?)
}

fn pieces(pieces: &Pieces, chars: Option<usize>) -> impl Iterator<Item = &str> {
    let texts = match pieces {
        Pieces::Whole(text) => std::slice::from_ref(text),
        Pieces::List(texts) => texts.as_slice(),
    };
    texts.iter().flat_map(move |text| cut(text, chars))
}

/// A text in pieces of at most so many characters.
fn cut(text: &str, chars: Option<usize>) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = chars.and_then(|chars| rest.char_indices().nth(chars)).map_or(rest.len(), |(end, _)| end);
        let (piece, tail) = rest.split_at(end);
        rest = tail;
        Some(piece)
    })
}

#[cfg(test)]
#[path = "scripted_tests.rs"]
mod tests;
