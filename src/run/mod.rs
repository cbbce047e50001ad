//! Runs at work: accepted, queued, driven step by step, ended.
//!
//! [`Supervisor`] takes requests and owns one task per run; the driver in that task asks the machine what to do,
//! does it, commits what came of it and only then publishes it.

mod agent;
mod apart;
mod commit;
mod control;
mod driver;
mod heard;
mod outside;
mod queue;
mod recover;
mod resolve;
mod scratch;
mod services;
mod supervisor;
mod task;
mod timeline;
mod toolbox;
mod upkeep;
mod watch;

pub use crate::agent::{Answer, AnswerProblem};
pub use agent::{Agent, AgentError, Agents};
pub use outside::OutsideError;
pub(crate) use resolve::said_parts;
pub use services::Services;
pub use supervisor::{Caller, CreateError, Supervisor};
