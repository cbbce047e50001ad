//! The loop's decisions, pure: what to do next, which calls are valid, what the model gets to see, when it is
//! enough. No IO, no clock, no async; the same machine serves a live run, a recovered one and a replayed one.

mod admit;
mod batch;
mod context;
mod cut;
mod machine;
mod repeat;
mod state;
mod tokens;
mod transcript;

pub use admit::{Checked, Toolbox};
pub use context::{ContextLimit, Selection, select};
pub use cut::cut_middle;
pub use machine::Machine;
pub use state::{AgentState, Doing, Interrupt, ModelCall, Observation, Step, Transition, UnexpectedObservation};
pub use tokens::{estimate_head, estimate_text};
pub use transcript::{IllFormed, Transcript};
