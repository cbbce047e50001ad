//! Reported failures of comparable programs, replayed: the form of the files in `cases/`.
//!
//! Each file is one report: what a server sent, byte for byte, what each attempt must make of it, and how a run
//! over all of it must end. `source` names the public report.

use std::fs;
use std::path::Path;

use hames::domain::{FailureClass, FinishReason, ModelTurn};
use serde::Deserialize;
use serde_json::Value;

use crate::support::upstream::Response;

/// One report.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// Its short name.
    pub(crate) id: String,
    /// What goes wrong elsewhere.
    pub(crate) title: String,
    /// The public report.
    pub(crate) source: String,
    /// What it is about.
    pub(crate) kind: String,
    /// What is asked.
    pub(crate) run: Run,
    /// What the server answers, one for each model call; the last one again and again.
    pub(crate) upstream: Vec<Response>,
    /// What each of those answers is for a provider, in order.
    pub(crate) attempts: Vec<Attempt>,
    /// What the requests must be like.
    #[serde(default)]
    pub(crate) requests: Vec<Value>,
    /// How a run must end.
    pub(crate) expect: Expect,
}

/// What is asked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    /// The user's words.
    pub(crate) input: String,
    /// The tools on offer.
    pub(crate) tools: Vec<CaseTool>,
    /// Where the server wants its reasoning back.
    pub(crate) reasoning_field: Option<String>,
}

/// A tool that always gives the same.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CaseTool {
    /// Its name.
    pub(crate) name: String,
    /// Its manual.
    pub(crate) description: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// What it gives.
    pub(crate) returns: String,
    /// Where it runs; absent: at the server.
    #[expect(dead_code, reason = "every tool of a case runs at the server here")]
    pub(crate) kind: Option<CaseToolKind>,
}

/// Where a tool runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CaseToolKind {
    /// At the caller of the run, who sends its result.
    Client,
}

/// What one answer of the server is for a provider.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Attempt {
    /// A turn.
    Turn {
        /// The turn, whole.
        turn: ModelTurn,
    },
    /// A failure.
    Failure {
        /// What kind.
        failure: FailureClass,
        /// A part of its message.
        message_contains: String,
        /// How long the server asks to wait.
        #[serde(default)]
        retry_after_ms: Option<u64>,
        /// Text that streamed before it.
        #[serde(default)]
        text: String,
        /// Reasoning that streamed before it.
        #[serde(default)]
        reasoning: String,
    },
}

/// How a run over the whole case must end. Where `…_any` stands, each of those is right as well.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expect {
    /// `completed` or `model_error`.
    pub(crate) status: String,
    /// Other statuses that are right.
    #[serde(default)]
    pub(crate) status_any: Vec<String>,
    /// The final text.
    pub(crate) answer: Option<String>,
    /// Other answers that are right.
    #[serde(default)]
    pub(crate) answer_any: Vec<String>,
    /// The tools that ran, in order: `{name, arguments}`.
    pub(crate) tool_calls: Vec<Value>,
    /// Other lists of tools that are right.
    #[serde(default)]
    pub(crate) tool_calls_any: Vec<Vec<Value>>,
    /// Tools that must never run.
    #[serde(default)]
    pub(crate) must_not_execute: Vec<String>,
    /// Tokens of all model calls together.
    pub(crate) usage: Option<ExpectUsage>,
    /// Text that stays, marked incomplete.
    pub(crate) partial_answer: Option<String>,
    /// Why the model stopped writing the answer.
    pub(crate) finish: Option<FinishReason>,
    /// A part of the error's message.
    pub(crate) error_contains: Option<String>,
    /// The reasoning.
    pub(crate) reasoning: Option<String>,
    /// How many model calls are right.
    pub(crate) model_calls: Option<ExpectCalls>,
    /// Least time before the second model call.
    pub(crate) min_retry_delay_ms: Option<u64>,
    /// Most time for all of it.
    pub(crate) max_wall_ms: Option<u64>,
}

/// Tokens of all model calls together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpectUsage {
    /// Tokens of the requests.
    pub(crate) input_tokens: u64,
    /// Tokens of the responses.
    pub(crate) output_tokens: u64,
}

/// How many model calls are right.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpectCalls {
    /// At least.
    pub(crate) min: usize,
    /// At most.
    pub(crate) max: usize,
}

/// All cases, by id.
pub(crate) fn all() -> Vec<Case> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/provider/cases");
    let mut paths: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).unwrap();
            let case: Case = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert_eq!(path.file_stem().and_then(|stem| stem.to_str()), Some(case.id.as_str()));
            case
        })
        .collect()
}
