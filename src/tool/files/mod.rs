//! Built-in tools on the files of the workspace: read_file, list_dir, search_files, write_file, edit_file.

mod change;
mod line;
mod list;
mod pattern;
mod read;
mod search;

use std::sync::Arc;

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use serde::{Deserialize as _, Deserializer, de};
use serde_json::{Map, Number, Value};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::workspace::AccessError;
use super::{Tool, ToolCtx, ToolError};
use crate::domain::{Effect, ToolSpec};

/// Most threads that the file tools use at once. A file system answers as fast as it does, so more would not help.
const MAX_THREADS: usize = 16;

/// Most threads of searches at once. They come on top of [`MAX_THREADS`]: searches can be long, and whoever reads a file
/// must not wait for those of another run.
const MAX_SEARCHES: usize = 8;

/// All file tools, those that write included: on a read-only workspace they refuse each call. The tools made by one
/// call of this share a bounded number of threads.
pub fn file_tools() -> Vec<Arc<dyn Tool>> {
    tools_on(&Threads::new(MAX_THREADS), &Threads::new(MAX_SEARCHES))
}

fn tools_on(threads: &Threads, searches: &Threads) -> Vec<Arc<dyn Tool>> {
    vec![
        read::tool(threads.clone()),
        list::tool(threads.clone()),
        search::tool(searches.clone()),
        change::write_file(threads.clone()),
        change::edit_file(threads.clone()),
    ]
}

/// A bounded number of threads for work that blocks.
#[derive(Clone)]
struct Threads(Arc<Semaphore>);

impl Threads {
    fn new(most: usize) -> Self {
        Self(Arc::new(Semaphore::new(most)))
    }

    /// Does the work once a thread is free, which counts against the time of the call. A thread is free again when its
    /// work returns, also if nobody waits for that any more: what cannot be stopped must not add up.
    async fn run<A: Send + 'static>(
        &self,
        mut ctx: ToolCtx,
        args: A,
        work: fn(&ToolCtx, A) -> Result<String, ToolError>,
    ) -> Result<String, ToolError> {
        let asked = Instant::now();
        let permit = tokio::select! {
            biased;
            permit = Arc::clone(&self.0).acquire_owned() => permit,
            () = ctx.cancel.cancelled() => {
                let text = "The call was stopped while it waited for a free thread; nothing was done.".to_owned();
                return Err(ToolError::Respond(text));
            }
        };
        let shutting_down = || ToolError::Respond("The server is shutting down; nothing was done.".to_owned());
        // Nobody closes the semaphore; a closed one gives out no threads.
        let permit = permit.map_err(|_| shutting_down())?;
        ctx.timeout = ctx.timeout.saturating_sub(asked.elapsed());
        let blocking = move || {
            let result = work(&ctx, args);
            drop(permit);
            result
        };
        match tokio::task::spawn_blocking(blocking).await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(shutting_down()),
            },
        }
    }
}

/// How far a file is looked at to tell text from anything else, in bytes.
const SNIFFED: usize = 8_192;

/// A built-in tool: what the model is told, and work on a thread that may block.
struct FileTool<A> {
    spec: ToolSpec,
    effect: Effect,
    threads: Threads,
    work: fn(&ToolCtx, A) -> Result<String, ToolError>,
}

#[async_trait]
impl<A: DeserializeOwned + Send + 'static> Tool for FileTool<A> {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn effect(&self, _arguments: &Map<String, Value>) -> Effect {
        self.effect
    }

    async fn call(&self, ctx: &ToolCtx, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let args = A::deserialize(arguments)
            .map_err(|error| ToolError::Respond(format!("The arguments cannot be read: {error}.")))?;
        self.threads.run(ctx.clone(), args, self.work).await
    }
}

/// Makes a built-in tool.
#[expect(clippy::expect_used, reason = "the names are constants, and a test makes every tool")]
fn built_in<A: DeserializeOwned + Send + 'static>(
    name: &str,
    description: &str,
    parameters: Value,
    effect: Effect,
    threads: Threads,
    work: fn(&ToolCtx, A) -> Result<String, ToolError>,
) -> Arc<dyn Tool> {
    let name = name.parse().expect("a built-in tool's name follows the rule");
    let spec = ToolSpec { name, description: description.to_owned(), parameters };
    Arc::new(FileTool { spec, effect, threads, work })
}

impl From<AccessError> for ToolError {
    /// The model can always choose another path; a broken disk it reads of like anything else.
    fn from(error: AccessError) -> Self {
        let text = error.to_string();
        let mut chars = text.chars();
        let first: String = chars.next().map(|c| c.to_uppercase().collect()).unwrap_or_default();
        Self::Respond(format!("{first}{}.", chars.as_str()))
    }
}

/// The path of a call that names none: the workspace itself.
fn here() -> String {
    ".".to_owned()
}

/// Whether a file that starts with these bytes is no text: it has a zero byte near its start.
fn looks_binary(start: &[u8]) -> bool {
    start.iter().take(SNIFFED).any(|byte| *byte == 0)
}

/// Reads a whole number as JSON Schema means it: `3.0` is one.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let number = Number::deserialize(deserializer)?;
    let whole = number.as_u64().or_else(|| {
        let text = number.to_string();
        text.strip_suffix(".0").and_then(|whole| whole.parse().ok())
    });
    whole.map(Some).ok_or_else(|| de::Error::custom(format!("{number} is not a whole number from 0 to 2^64-1")))
}

/// `1 line`, `2 lines`.
fn count(number: usize, noun: &str) -> String {
    match noun {
        _ if number == 1 => format!("1 {noun}"),
        "match" => format!("{number} matches"),
        "entry" => format!("{number} entries"),
        "directory" => format!("{number} directories"),
        _ => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
#[path = "../files_tests.rs"]
mod tests;
