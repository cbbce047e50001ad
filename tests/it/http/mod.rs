//! The HTTP interface from outside.

mod active;
mod bad_input;
mod connection;
mod contract;
mod events;
mod idempotency;
mod runs;
mod served;
