//! What an experiment leaves behind, for the checker to judge.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::ledger::Start;
use crate::sse::Frame;

/// All of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    /// Runs that were acknowledged, with the key they were asked for with.
    pub(crate) acknowledged: Vec<Acknowledged>,
    /// What each reader was sent.
    pub(crate) readers: Vec<Reader>,
    /// What the server tells of each run after the end, by id.
    pub(crate) runs: BTreeMap<String, Record>,
    /// Every call that began.
    pub(crate) ledger: Vec<Start>,
    /// The generations a run was seen with, in the order of time, by id.
    pub(crate) generations: BTreeMap<String, Vec<u64>>,
    /// What the model refused to take.
    pub(crate) refused_by_model: Vec<String>,
}

/// A run that was acknowledged.
#[derive(Clone, Debug)]
pub(crate) struct Acknowledged {
    pub(crate) run: String,
    pub(crate) key: String,
}

/// A reader of a run: its connections, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    pub(crate) run: String,
    pub(crate) connections: Vec<Connection>,
}

/// One connection of a reader.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    /// `Last-Event-ID`, where it was sent.
    pub(crate) cursor: Option<String>,
    /// The status of the answer.
    pub(crate) status: u16,
    /// The body of an answer that is no stream.
    pub(crate) refusal: String,
    pub(crate) frames: Vec<Frame>,
}

/// What the server tells of a run.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// The key it was asked for with, from its labels.
    pub(crate) key: String,
    /// `GET /runs/{id}`.
    pub(crate) run: Value,
    /// The JSON pages of its events.
    pub(crate) events: Vec<Event>,
    /// `GET /runs/{id}/messages`.
    pub(crate) messages: Vec<Value>,
}

/// An event, as the JSON page has it.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) raw: String,
    pub(crate) json: Value,
}

impl Event {
    pub(crate) fn new(raw: &str) -> Self {
        Self { raw: raw.to_owned(), json: serde_json::from_str(raw).unwrap() }
    }

    pub(crate) fn seq(&self) -> u64 {
        self.json["seq"].as_u64().unwrap_or_default()
    }

    pub(crate) fn kind(&self) -> &str {
        self.json["type"].as_str().unwrap_or_default()
    }
}

/// The visible text of a message.
pub(crate) fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        parts => parts
            .as_array()
            .into_iter()
            .flatten()
            .filter(|part| part["type"] == "text")
            .filter_map(|part| part["text"].as_str())
            .collect(),
    }
}
