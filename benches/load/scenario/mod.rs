//! What is measured, one file for each.

mod cancel;
mod fanout;
mod memory;
mod runs;
mod start;
mod steps;
mod tokens;

use std::pin::Pin;

use bytes::Bytes;
use serde_json::json;

use crate::figure::Report;
use crate::model::Model;

/// One thing that is measured.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) run: Run,
}

/// Measures, prints what it sees, and holds it against what is promised.
type Run = for<'a> fn(&'a Model, &'a mut Report) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// All of them.
pub(crate) const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "runs",
        about: "runs of two model calls and one tool call, created and followed; no model delay, every commit flushed",
        run: |model, report| Box::pin(runs::measure(model, report)),
    },
    Scenario {
        name: "tokens",
        about: "what is added to each token on its way through 64 streams",
        run: |model, report| Box::pin(tokens::measure(model, report)),
    },
    Scenario {
        name: "memory",
        about: "resident memory of runs that wait for a model",
        run: |model, report| Box::pin(memory::measure(model, report)),
    },
    Scenario {
        name: "start",
        about: "from the start of the process to the end of its first run",
        run: |model, report| Box::pin(start::measure(model, report)),
    },
    Scenario {
        name: "cancel",
        about: "from DELETE to the close of the model's stream",
        run: |model, report| Box::pin(cancel::measure(model, report)),
    },
    Scenario {
        name: "steps",
        about: "time of a step as the conversation grows to 200 rounds",
        run: |model, report| Box::pin(steps::measure(model, report)),
    },
    Scenario {
        name: "fanout",
        about: "many readers of one stream, many streams with some readers, and readers that never read",
        run: |model, report| Box::pin(fanout::measure(model, report)),
    },
];

/// The request for a run that does this; see [`crate::model`].
fn request(behaviour: &str) -> Bytes {
    json!({"input": format!("do:{behaviour}")}).to_string().into()
}
