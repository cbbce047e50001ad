//! Built-in tools on the files of the workspace: read_file, list_dir, search_files, write_file, edit_file.

mod change;
mod list;
mod read;
mod search;

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize as _, Deserializer, de};
use serde_json::{Map, Number, Value};

use super::workspace::AccessError;
use super::{Tool, ToolCtx, ToolError};
use crate::domain::ToolSpec;

/// All file tools, those that write included: on a read-only workspace they refuse each call.
pub fn file_tools() -> Vec<Arc<dyn Tool>> {
    vec![
        Arc::new(read::ReadFile::new()),
        Arc::new(list::ListDir::new()),
        Arc::new(search::SearchFiles::new()),
        Arc::new(change::WriteFile::new()),
        Arc::new(change::EditFile::new()),
    ]
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

/// A spec of a built-in tool.
#[expect(clippy::expect_used, reason = "the names are constants, and a test makes every tool")]
fn spec(name: &str, description: &str, parameters: Value) -> ToolSpec {
    let name = name.parse().expect("a built-in tool's name follows the rule");
    ToolSpec { name, description: description.to_owned(), parameters }
}

/// Reads checked arguments into their type.
fn arguments<T: DeserializeOwned>(arguments: &Map<String, Value>) -> Result<T, ToolError> {
    T::deserialize(arguments).map_err(|error| ToolError::Respond(format!("The arguments cannot be read: {error}.")))
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

/// Does file work on a thread that may block.
async fn blocking<T: Send + 'static>(
    ctx: &ToolCtx,
    work: impl FnOnce(&ToolCtx) -> Result<T, ToolError> + Send + 'static,
) -> Result<T, ToolError> {
    let ctx = ctx.clone();
    match tokio::task::spawn_blocking(move || work(&ctx)).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(ToolError::Respond("The server is shutting down; nothing was done.".to_owned())),
        },
    }
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
