//! The event streams of runs: what is live in this process, and how a reader follows it from any cursor.
//!
//! Readers pull. A live run is shared state and a wake-up; a reader holds a position and copies what it has not
//! seen. There is no queue per reader: one that falls behind reads the log, and no reader slows a run. Every
//! wake-up is a hint: a lost one costs latency, since readers also look at the log from time to time.

mod bus;
mod cursor;
mod frame;
mod live;
mod message;
mod stream;

#[cfg(test)]
mod fake;

pub use bus::{Activity, Bus, ExecutingCall, LiveRun};
pub use cursor::{Cursor, InvalidCursor};
pub use frame::{ReasoningDelta, Snapshot, TextDelta, ToolCallDelta, ToolProgress, Writing};
pub use stream::{Streams, SubscribeError, Subscribed, Subscription};
