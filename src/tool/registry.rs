//! The tools that exist, with their compiled schemas, and the check every call passes before it runs.

use std::collections::HashMap;
use std::sync::Arc;

use super::Tool;
use super::schema::{ArgumentSchema, SchemaError};
use crate::domain::text::{nearest, shown};
use crate::domain::{Arguments, ToolName};

/// Most Unicode scalar values quoted of arguments that are not an object.
const QUOTED_CHARS: usize = 200;
/// Longest name or pattern that selects tools, in bytes: that of the longest name. Each is compiled, and callers send
/// them.
const MAX_PATTERN_BYTES: usize = 128;
/// Most names listed in a message.
const LISTED_NAMES: usize = 50;

/// The tools that exist, in the order they were given.
#[derive(Debug, Default)]
pub struct Registry {
    tools: Vec<Registered>,
    by_name: HashMap<ToolName, usize>,
}

/// A tool that passed registration.
pub struct Registered {
    /// The tool.
    pub tool: Arc<dyn Tool>,
    schema: ArgumentSchema,
}

/// A set of tools cannot be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Calls could not be told apart.
    #[error("two tools are named `{0}`; names must be unique")]
    Duplicate(ToolName),
    /// Its arguments could not be checked.
    #[error("the tool `{tool}` cannot be used: {source}")]
    Schema {
        /// The tool.
        tool: ToolName,
        /// What is wrong with its schema.
        source: SchemaError,
    },
}

/// A name or pattern selects nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownTool {
    /// No tool has the name, or none fits the pattern.
    #[error("no tool is named `{pattern}`{}", hint(near, available))]
    NoMatch {
        /// The name or pattern.
        pattern: String,
        /// The most similar name.
        near: Option<String>,
        /// Every name there is.
        available: Vec<String>,
    },
    /// The pattern cannot be read.
    #[error("`{pattern}` is not a tool name or pattern: {reason}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Registered {
    /// The tool's name.
    pub fn name(&self) -> &ToolName {
        &self.tool.spec().name
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registered").field("name", self.name()).finish_non_exhaustive()
    }
}

impl Registry {
    /// Registers tools; each schema is compiled here, once.
    pub fn new(tools: Vec<Arc<dyn Tool>>) -> Result<Self, RegistryError> {
        let mut registry = Self::default();
        for tool in tools {
            let spec = tool.spec();
            let name = spec.name.clone();
            let schema = ArgumentSchema::compile(&spec.parameters)
                .map_err(|source| RegistryError::Schema { tool: name.clone(), source })?;
            if registry.by_name.insert(name.clone(), registry.tools.len()).is_some() {
                return Err(RegistryError::Duplicate(name));
            }
            registry.tools.push(Registered { tool, schema });
        }
        Ok(registry)
    }

    /// The tool of a name.
    pub fn get(&self, name: &str) -> Option<&Registered> {
        // A text that is not a tool name is the name of no tool.
        let name = name.parse::<ToolName>().ok()?;
        self.by_name.get(&name).and_then(|index| self.tools.get(*index))
    }

    /// All tools, in the order they were given.
    pub fn iter(&self) -> impl Iterator<Item = &Registered> {
        self.tools.iter()
    }

    /// The tools that names and patterns (`fs.*`; `*` also matches `.` and `/`) select: each once and in the
    /// registry's order, so the same selection is always told to a model in the same way.
    pub fn select(&self, patterns: &[String]) -> Result<Vec<ToolName>, UnknownTool> {
        let mut chosen = vec![false; self.tools.len()];
        for pattern in patterns {
            if pattern.len() > MAX_PATTERN_BYTES {
                return Err(UnknownTool::BadPattern {
                    pattern: shown(pattern, QUOTED_CHARS),
                    reason: format!("it has {} bytes, and at most {MAX_PATTERN_BYTES} are allowed", pattern.len()),
                });
            }
            let glob = globset::Glob::new(pattern)
                .map_err(|error| UnknownTool::BadPattern {
                    pattern: pattern.clone(),
                    reason: error.kind().to_string(),
                })?
                .compile_matcher();
            let mut found = false;
            for (tool, chosen) in self.tools.iter().zip(&mut chosen) {
                if glob.is_match(tool.name().as_str()) {
                    *chosen = true;
                    found = true;
                }
            }
            if !found {
                let near = nearest(pattern, self.names()).map(str::to_owned);
                let available = self.names().map(str::to_owned).collect();
                return Err(UnknownTool::NoMatch { pattern: pattern.clone(), near, available });
            }
        }
        Ok(self.tools.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(tool, _)| tool.name().clone()).collect())
    }

    /// The tool of a call whose arguments fit; else what to tell the model. Every registered tool can be called.
    pub fn check(&self, name: &str, arguments: &Arguments) -> Result<&Registered, String> {
        self.check_in(self.iter().collect(), name, arguments)
    }

    /// As [`Registry::check`], for a run that may use only the tools in `offered`: any other does not exist for it.
    pub fn check_offered(
        &self,
        offered: &[ToolName],
        name: &str,
        arguments: &Arguments,
    ) -> Result<&Registered, String> {
        self.check_in(self.iter().filter(|tool| offered.contains(tool.name())).collect(), name, arguments)
    }

    fn check_in<'r>(
        &self,
        tools: Vec<&'r Registered>,
        name: &str,
        arguments: &Arguments,
    ) -> Result<&'r Registered, String> {
        let Some(registered) = tools.iter().copied().find(|tool| tool.name().as_str() == name) else {
            let names = || tools.iter().map(|tool| tool.name().as_str());
            let near = nearest(name, names()).map(str::to_owned);
            let available: Vec<String> = names().map(str::to_owned).collect();
            let shown = shown(name, QUOTED_CHARS);
            return Err(format!("No tool is named `{shown}`{}. Nothing was executed.", hint(&near, &available)));
        };
        match arguments {
            Arguments::Object(object) => registered.schema.check(object).map(|()| registered).map_err(|errors| {
                format!(
                    "The arguments of `{name}` do not fit its schema, and it was not executed. Correct them and call it again.\n{errors}"
                )
            }),
            Arguments::Malformed(raw) => Err(format!(
                "The arguments of `{name}` must be one JSON object, and it was not executed. Got {} characters: `{}`",
                raw.chars().count(),
                shown(raw, QUOTED_CHARS)
            )),
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().map(|tool| tool.name().as_str())
    }
}

/// What a message says of the names that exist.
fn hint(near: &Option<String>, available: &[String]) -> String {
    let mut text = String::new();
    if let Some(near) = near {
        text.push_str(&format!("; did you mean `{near}`?"));
    }
    let listed: Vec<&str> = available.iter().take(LISTED_NAMES).map(String::as_str).collect();
    let more = if available.len() > LISTED_NAMES { ", …" } else { "" };
    if listed.is_empty() {
        text.push_str("; there are no tools");
    } else {
        text.push_str(&format!("; available: {}{more}", listed.join(", ")));
    }
    text
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
