//! Tools: what a model can use, and how a call runs under control.
//!
//! A [`Tool`] does its work; the [`registry`] knows which exist and checks arguments; the [`executor`] gives
//! every call exactly one outcome, whatever the tool does.

mod capture;
pub mod command;
pub mod executor;
#[cfg(test)]
mod fake;
pub mod files;
mod process;
pub mod registry;
pub mod schema;
mod session;
pub mod supervise;
mod takeover;
mod utf8;
pub mod workspace;

pub use registry::Registry;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::domain::{Effect, OnUnknown, RunId, ToolSpec};

/// Something a model can call.
#[async_trait]
pub trait Tool: Send + Sync {
    /// What the model is told.
    fn spec(&self) -> &ToolSpec;

    /// What a call with these arguments can change; for arguments it cannot judge, the most it could.
    fn effect(&self, arguments: &Map<String, Value>) -> Effect;

    /// What becomes of a call with side effects when a crash hid its outcome.
    fn on_unknown(&self, _arguments: &Map<String, Value>) -> OnUnknown {
        OnUnknown::Tell
    }

    /// Whether repeating the same call makes sense (a status to wait for), so that repeats are not counted.
    fn is_pollable(&self, _arguments: &Map<String, Value>) -> bool {
        false
    }

    /// Runs one call with arguments that fit the schema.
    ///
    /// `ctx.cancel` fires on cancel, deadline and timeout: the tool then stops what it started and returns;
    /// one that does not is dropped shortly after.
    async fn call(&self, ctx: &ToolCtx, arguments: &Map<String, Value>) -> Result<String, ToolError>;
}

/// What a call may know and use.
#[derive(Clone)]
pub struct ToolCtx {
    /// The run.
    pub run: RunId,
    /// The call; also its idempotency key.
    pub call_id: String,
    /// The files the run may touch.
    pub workspace: Arc<workspace::Workspace>,
    /// Most time for the call, from its start. One that is not over by then is stopped, and what it returns after
    /// that is refused: a tool with something to tell ends itself before.
    pub timeout: Duration,
    /// Fires when the call has to stop.
    pub cancel: CancellationToken,
    /// Where to tell what is going on.
    pub progress: Arc<dyn ProgressSink>,
}

/// When a tool that has something to tell stops its work, in a call of `timeout`: a second before the end, or a fifth
/// of the time if that is less.
fn time_to_return(timeout: Duration) -> Duration {
    timeout.saturating_sub(Duration::from_secs(1)).max(timeout / 5 * 4)
}

/// Takes live notes of running calls. Never blocks; notes may be merged or left out.
pub trait ProgressSink: Send + Sync {
    /// What a call is doing or has printed.
    fn progress(&self, call_id: &str, text: &str);
}

/// Why a call gave no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// The model can read this and do better: what was wrong, what is allowed, what to try.
    #[error("{0}")]
    Respond(String),
    /// The run cannot go on.
    #[error("{0}")]
    Fatal(String),
}
