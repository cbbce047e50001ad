//! Model providers: one wire per file, each a pure encoder and decoder, and one client that drives them all.
//!
//! A call is one attempt: it streams fragments into a [`DeltaSink`] and gives a whole turn or a classified
//! failure. Whether to try again is decided by [`retry`] and carried out by the run's driver, which records it.
//!
//! The way of a request: the wire writes what is new in the [`conversation`] and puts the body together.
//! The way of a response: [`http`] asks and checks the status; [`client`] reads the bytes and holds every rule
//! on ends and errors; [`sse`] cuts them into events; the wire's decoder ([`openai_chat`]) turns events into
//! fragments; [`accumulator`] folds those into the turn.

pub mod accumulator;
mod catalog;
pub mod client;
pub mod conversation;
pub mod error;
pub mod http;
pub mod json;
pub mod names;
mod object;
mod object_scan;
pub mod openai_chat;
pub mod retry;
pub mod scripted;
pub mod sse;

use async_trait::async_trait;

use self::conversation::Conversation;

pub use catalog::{Catalog, CatalogError, Endpoint};

use crate::domain::{Delta, ModelFailure, ModelRequest, ModelTurn};

/// One configured endpoint that answers model requests.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Makes one attempt. Dropping the future closes the connection at once.
    ///
    /// A turn comes back only after the provider said that it was finished; anything else is a
    /// [`ModelFailure`] with its class.
    ///
    /// `conversation` is that of the run with this provider, and new at its first call.
    async fn call(
        &self,
        request: &ModelRequest,
        conversation: &mut Conversation,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, ModelFailure>;
}

/// Takes the fragments of a response as they arrive. Never blocks.
pub trait DeltaSink: Send {
    /// Takes one fragment.
    fn delta(&mut self, delta: Delta<'_>);
}
