//! Providers against a real socket.

pub(crate) mod case;
mod cases_run;
mod connection;
pub(crate) mod request_check;

use std::collections::BTreeMap;
use std::sync::Arc;

use hames::config::ProviderConfig;
use hames::domain::{Delta, Message, ModelRequest, RunId, ToolSpec};
use hames::provider::{Catalog, DeltaSink, Provider};
use hames::time::Clock;
use serde_json::{Value, json};
use uuid::Uuid;

/// Collects what streamed.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Streamed {
    /// The visible text.
    pub(crate) text: String,
    /// The reasoning.
    pub(crate) reasoning: String,
    /// Name and arguments of each call, by position.
    pub(crate) calls: BTreeMap<usize, (String, String)>,
}

impl DeltaSink for Streamed {
    fn delta(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Text(text) => self.text.push_str(text),
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::ToolCall { index, name, arguments, .. } => {
                let call = self.calls.entry(index).or_default();
                name.clone_into(&mut call.0);
                call.1.push_str(arguments);
            }
        }
    }
}

/// A chat provider at this address, with more settings as in a configuration file.
pub(crate) fn chat_provider(base_url: &str, settings: &Value, clock: &Arc<dyn Clock>) -> Arc<dyn Provider> {
    let mut section = json!({"kind": "openai_chat", "base_url": base_url});
    section.as_object_mut().unwrap().extend(settings.as_object().cloned().unwrap_or_default());
    let config: ProviderConfig = serde_json::from_value(section).unwrap();
    let catalog = Catalog::new(&BTreeMap::from([("local".to_owned(), config)]), clock).unwrap();
    Arc::clone(&catalog.get("local").unwrap().provider)
}

/// A request for the answer to these messages.
pub(crate) fn request(messages: Vec<Arc<Message>>, tools: Vec<ToolSpec>) -> ModelRequest {
    ModelRequest {
        run: RunId::new(Uuid::nil()),
        step: 1,
        attempt: 1,
        model: "m-test".to_owned(),
        instructions: None,
        messages,
        tools: tools.into(),
        max_output_tokens: None,
        trace: None,
    }
}

/// A request that says hi.
pub(crate) fn hi() -> ModelRequest {
    request(vec![Arc::new(Message::user("Hi"))], vec![])
}
