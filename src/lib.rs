//! hames executes LLM agents: an HTTP service that runs the model-and-tool loop, streams what happens and
//! keeps what happened. `ARCHITECTURE.md` has the map; `tests/it/architecture.rs` holds the code to it.
//!
//! Imports point one way: `domain` imports nothing of ours, `agent` only `domain`, and `provider` and `tool`
//! never see each other. `run` drives them, `http` and `cli` stand in front, `app` builds the whole.

pub mod agent;
pub mod app;
pub mod cli;
pub mod config;
pub mod domain;
pub mod event;
pub mod http;
pub mod provider;
pub mod run;
pub mod shutdown;
pub mod store;
pub mod telemetry;
pub mod time;
pub mod tls;
pub mod tool;
