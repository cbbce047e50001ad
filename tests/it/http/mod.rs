//! The HTTP interface from outside.

mod bad_input;
mod connection;
mod contract;
mod events;
mod runs;
mod served;
