//! What runs need of the rest of the program.

use std::sync::Arc;

use super::agent::Agents;
use crate::config::{CeilingConfig, RetentionConfig, RunConfig};
use crate::event::Bus;
use crate::provider::Catalog;
use crate::store::Store;
use crate::telemetry::{Capture, Metrics};
use crate::time::{Clock, Ids};
use crate::tool::registry::Registry;

/// What runs need of the rest of the program.
pub struct Services {
    /// Where runs are kept.
    pub store: Arc<dyn Store>,
    /// Who watches runs.
    pub bus: Bus,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// The tools.
    pub registry: Arc<Registry>,
    /// The agents.
    pub agents: Arc<Agents>,
    /// The time of day.
    pub clock: Arc<dyn Clock>,
    /// The source of run ids.
    pub ids: Arc<Ids>,
    /// Random numbers from 0 to 1, for the spread of retries.
    pub jitter: Box<dyn Fn() -> f64 + Send + Sync>,
    /// Scheduling.
    pub run: RunConfig,
    /// How long runs are kept.
    pub retention: RetentionConfig,
    /// Ceilings for requests.
    pub ceilings: CeilingConfig,
    /// The instruments.
    pub metrics: Metrics,
    /// Whether spans carry what was said.
    pub capture: Capture,
}
