//! What is wrong with the settings, where it stands, and what to do.

use std::fmt;
use std::path::PathBuf;

use crate::domain::text::nearest;

/// Where a setting comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// Neither: the built-in settings.
    BuiltIn,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::BuiltIn => f.write_str("built-in settings"),
        }
    }
}

/// One thing wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where it stands.
    pub origin: Origin,
    /// The key, dotted: `agents.coder.model`; empty for the whole of the origin.
    pub key: String,
    /// What was found, what was expected, what to do.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            write!(f, "{}: {}", self.origin, self.message)
        } else {
            write!(f, "{}: {}: {}", self.origin, self.key, self.message)
        }
    }
}

/// Everything wrong with the settings; never empty. Displays as one line for each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let line_end = if index == 0 { "" } else { "\n" };
            write!(f, "{line_end}{problem}")?;
        }
        Ok(())
    }
}

/// Ends a message about an unknown name: what was meant, or what there is.
pub(super) fn meant<'a>(given: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    if let Some(name) = nearest(given, known.clone()) {
        return format!("did you mean `{name}`?");
    }
    let known: Vec<_> = known.into_iter().collect();
    if known.is_empty() { "there are none".to_owned() } else { format!("known: {}", known.join(", ")) }
}
