//! The fragments of a response while it is written.

use super::watch::ModelWatch;
use crate::domain::{Delta, Part};
use crate::event::LiveRun;
use crate::provider::DeltaSink;

/// What was said of a response so far, for a run that ends before it does.
#[derive(Default)]
pub(super) struct Heard {
    reasoning: String,
    text: String,
}

impl Heard {
    /// Whether nothing was.
    pub(super) const fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty()
    }

    /// As parts of a message.
    pub(super) fn parts(self) -> Vec<Part> {
        let reasoning = Some(self.reasoning).filter(|text| !text.is_empty());
        let text = Some(self.text).filter(|text| !text.is_empty());
        let reasoning = reasoning.map(|text| Part::Reasoning { text, token: None });
        reasoning.into_iter().chain(text.map(|text| Part::Text { text })).collect()
    }
}

/// Keeps the fragments of a response, and passes them on to whoever watches the run.
pub(super) struct Sink<'a, 'w> {
    pub(super) live: &'a LiveRun,
    pub(super) heard: &'a mut Heard,
    pub(super) watch: &'a mut ModelWatch<'w>,
}

impl DeltaSink for Sink<'_, '_> {
    fn delta(&mut self, delta: Delta<'_>) {
        self.watch.heard();
        match delta {
            Delta::Text(text) => self.heard.text.push_str(text),
            Delta::Reasoning(text) => self.heard.reasoning.push_str(text),
            // A call that is not finished never enters the transcript.
            Delta::ToolCall { .. } => {}
        }
        self.live.delta(delta);
    }
}
