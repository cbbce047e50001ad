//! The loop's decisions, pure: what to do next, which calls are valid, what the model gets to see, when it is
//! enough. No IO, no clock, no async; the same machine serves a live run, a recovered one and a replayed one.

mod admit;
mod answer;
mod batch;
mod context;
mod cut;
mod hear;
#[cfg(test)]
mod life_tests;
mod machine;
mod repeat;
mod state;
mod takeover;
mod tokens;
mod transcript;

pub use admit::{Checked, Toolbox};
pub use context::{ContextLimit, Selection, select};
pub use cut::cut_middle;
pub use machine::Machine;
pub use state::{
    AgentState, Answer, AnswerProblem, Doing, Interrupt, ModelCall, Observation, Step, Transition,
    UnexpectedObservation,
};
pub use tokens::{estimate_instructions, estimate_text, estimate_tools};
pub use transcript::{IllFormed, Transcript};
