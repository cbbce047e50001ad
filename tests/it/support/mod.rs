//! What integration tests share: the service, its clients, and fakes that check their caller.

pub(crate) mod app;
pub(crate) mod client;
pub(crate) mod collector;
pub(crate) mod process;
pub(crate) mod raw;
pub(crate) mod sse;
pub(crate) mod stage;
pub(crate) mod upstream;
