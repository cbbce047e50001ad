//! What handlers share.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

use super::idempotency::Flights;
use super::room::BodyRoom;
use super::spec::{Documents, SpecError};
use super::view::{AgentView, ModelView, ProviderView, ToolView, models_on_offer, tools_on_offer};
use crate::config::ServerConfig;
use crate::event::Streams;
use crate::run::Supervisor;
use crate::store::Store;
use crate::telemetry::Metrics;
use crate::time::{Clock, Ids};
use crate::tool::registry::Registry;

/// The two steps in which the server stops. Between them runs in progress come to rest.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    /// Nothing new is accepted: the listener closes, `/readyz` says so.
    pub stopping: CancellationToken,
    /// Nothing will be committed any more: streams end after their last event, waits are answered.
    pub closing: CancellationToken,
}

/// What the HTTP interface is built from.
pub struct HttpParts {
    /// Creates and cancels runs.
    pub supervisor: Supervisor,
    /// Follows runs.
    pub streams: Streams,
    /// Reads runs.
    pub store: Arc<dyn Store>,
    /// The tools of this server.
    pub registry: Arc<Registry>,
    /// The agents of this server, by name.
    pub agents: Vec<AgentView>,
    /// The providers of this server, by name.
    pub providers: Vec<ProviderView>,
    /// Limits of requests; the address decides which hosts are taken.
    pub server: ServerConfig,
    /// The time of day.
    pub clock: Arc<dyn Clock>,
    /// For the ids of requests.
    pub ids: Arc<Ids>,
    /// When the server stops.
    pub stages: Stages,
    /// The instruments.
    pub metrics: Metrics,
}

/// What handlers share; cheap to clone.
#[derive(Clone)]
pub struct HttpState(Arc<Inner>);

struct Inner {
    parts: HttpParts,
    models: Vec<ModelView>,
    tools: Vec<ToolView>,
    bodies: BodyRoom,
    flights: Flights,
    documents: OnceLock<Documents>,
}

impl HttpState {
    /// Puts the parts together.
    pub fn new(parts: HttpParts) -> Self {
        let models = models_on_offer(&parts.providers, &parts.agents);
        let tools = tools_on_offer(&parts.registry);
        let bodies = BodyRoom::new(parts.server.max_body_bytes);
        Self(Arc::new(Inner { parts, models, tools, bodies, flights: Flights::default(), documents: OnceLock::new() }))
    }

    /// What it was built from.
    pub(super) fn parts(&self) -> &HttpParts {
        &self.0.parts
    }

    /// The room for request bodies.
    pub(super) fn bodies(&self) -> &BodyRoom {
        &self.0.bodies
    }

    /// The keys whose first request is being answered.
    pub(super) fn flights(&self) -> &Flights {
        &self.0.flights
    }

    /// The models on offer.
    pub(super) fn models(&self) -> &[ModelView] {
        &self.0.models
    }

    /// The tools on offer.
    pub(super) fn tools(&self) -> &[ToolView] {
        &self.0.tools
    }

    /// The API's description, made when it is first asked for.
    pub(super) fn documents(&self) -> Result<&Documents, SpecError> {
        if let Some(documents) = self.0.documents.get() {
            return Ok(documents);
        }
        let documents = Documents::generate()?;
        Ok(self.0.documents.get_or_init(|| documents))
    }
}
