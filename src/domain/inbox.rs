//! What callers say to a run that is active. It is stored at once and taken in by the run before its next model call.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Limits, Part};

/// One thing said to an active run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InboxItem {
    /// A user message; enters the transcript before the next model call.
    Message {
        /// Its parts; at least one.
        content: Vec<Part>,
    },
    /// Changes of what the run was accepted with.
    Amendment {
        /// Bounds, which are raised to these where they are lower.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<Limits>,
        /// All labels.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metadata: Option<BTreeMap<String, String>>,
    },
}

/// The number of an item in the inbox of its run: 1, 2, 3, …; zero means "before the first".
pub type InboxNumber = u64;
