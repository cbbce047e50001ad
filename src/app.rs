//! The composition root: builds the service from its settings and runs it. Two of them fit in one process.

mod verify;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;

use crate::config::{CommandConfig, Config, Env, ProviderConfig, ServerConfig};
use crate::event::{Bus, Streams};
use crate::http::{AgentView, HttpParts, HttpState, ProviderView, Stages, router, serve};
use crate::provider::{Catalog, Endpoint};
use crate::run::{AgentError, Agents, Services, Supervisor};
use crate::shutdown::Shutdown;
use crate::store::{self, CommitObserver, Store, WorkerId};
use crate::telemetry::{Capture, Metrics};
use crate::time::{Clock, Ids, SystemClock, random_bytes};
use crate::tool::Tool;
use crate::tool::command::CommandTool;
use crate::tool::files::file_tools;
use crate::tool::registry::Registry;
use crate::tool::supervise::CommandHost;

pub use verify::{Findings, verify};

/// What the service takes from around it. A program that embeds hames, and a test, put in their own.
pub struct Surroundings {
    /// The environment of commands.
    pub env: Env,
    /// The time of day.
    pub clock: Arc<dyn Clock>,
    /// The program that supervises commands.
    pub supervisor: CommandHost,
    /// Tools beside the configured ones.
    pub tools: Vec<Arc<dyn Tool>>,
    /// Providers beside the configured ones, by name.
    pub providers: Vec<(String, Endpoint)>,
    /// The instruments.
    pub metrics: Metrics,
}

impl Surroundings {
    /// Those of the running program.
    pub fn of_this_program(env: Env, metrics: Metrics) -> Self {
        Self {
            env,
            clock: Arc::new(SystemClock),
            supervisor: CommandHost::this_program(),
            tools: Vec::new(),
            providers: Vec::new(),
            metrics,
        }
    }
}

/// The whole service.
pub struct App {
    supervisor: Supervisor,
    streams: Streams,
    store: Arc<dyn Store>,
    bus: Bus,
    http: HttpState,
    stages: Stages,
    server: ServerConfig,
}

impl App {
    /// Builds the service: opens the database, settles what a former process left behind, and begins to work on
    /// queued runs.
    pub async fn build(config: Config, surroundings: Surroundings) -> anyhow::Result<Self> {
        let Surroundings { env, clock, supervisor: host, tools, providers, metrics } = surroundings;
        warn_of_root(&config);
        let catalog = Arc::new(build_catalog(&config.providers, &clock, providers)?);
        let registry = Arc::new(build_registry(&config.commands, &env, host, tools)?);
        let agents = build_agents(&config, &registry, &catalog).map_err(|errors| anyhow::anyhow!(joined(&errors)))?;
        let agents = Arc::new(agents);
        let observer = Arc::new(Commits(metrics.clone()));
        let ids = Arc::new(Ids::default());
        let worker = WorkerId::new(ids.next(clock.now()).simple().to_string());
        let store = store::open(&config.store, worker, observer).await.context("the database cannot be opened")?;
        let bus = Bus::new();
        let keep_alive = Duration::from_millis(config.server.keep_alive_ms);
        let streams = Streams::new(Arc::clone(&store), bus.clone(), keep_alive);
        let supervisor = Supervisor::start(Services {
            store: Arc::clone(&store),
            bus: bus.clone(),
            catalog: Arc::clone(&catalog),
            registry: Arc::clone(&registry),
            agents: Arc::clone(&agents),
            clock: Arc::clone(&clock),
            ids: Arc::clone(&ids),
            jitter: Box::new(random_fraction),
            run: config.run,
            retention: config.retention,
            ceilings: config.limits,
            metrics: metrics.clone(),
            capture: Capture::of(config.telemetry.capture_content),
        })
        .await
        .context("the runs of the former process cannot be settled")?;
        metrics.watch_runs(supervisor.counts());
        let stages = Stages::default();
        let http = HttpState::new(HttpParts {
            supervisor: supervisor.clone(),
            streams: streams.clone(),
            store: Arc::clone(&store),
            registry,
            agents: agents_on_offer(&agents),
            providers: providers_on_offer(&catalog),
            server: config.server.clone(),
            clock,
            ids,
            stages: stages.clone(),
            metrics,
        });
        Ok(Self { supervisor, streams, store, bus, http, stages, server: config.server })
    }

    /// Accepts and cancels runs.
    pub const fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Follows runs.
    pub const fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Reads runs.
    pub const fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The runs that are followed or at work.
    pub const fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Serves until the soft token fires; then takes no new work, lets runs come to their end until the hard token
    /// fires, closes streams after the last committed event, and closes the database.
    ///
    /// # Errors
    /// The database failed for good: nothing can be recorded any more, so the process has to end.
    pub async fn serve(self, listener: TcpListener, shutdown: Shutdown) -> anyhow::Result<()> {
        let serving = serve(listener, router(self.http.clone()), &self.server, self.stages.clone());
        // Readers use the database until their connections are closed.
        let ((), ended) = tokio::join!(serving, self.run_until_stopped(&shutdown));
        self.store.close().await;
        ended
    }

    /// The same without a listener.
    ///
    /// # Errors
    /// As for [`App::serve`].
    pub async fn work(&self, shutdown: Shutdown) -> anyhow::Result<()> {
        let ended = self.run_until_stopped(&shutdown).await;
        self.store.close().await;
        ended
    }

    async fn run_until_stopped(&self, shutdown: &Shutdown) -> anyhow::Result<()> {
        let ended = tokio::select! {
            () = shutdown.soft().cancelled() => Ok(()),
            () = self.store.failed() => {
                shutdown.soft().cancel();
                Err(anyhow::anyhow!("the database failed and nothing can be recorded; see the log, mend it, start again"))
            }
        };
        self.stages.stopping.cancel();
        self.supervisor.stop();
        tokio::select! {
            () = self.supervisor.drained() => {}
            () = shutdown.hard().cancelled() => self.supervisor.halt().await,
            // What cannot be recorded need not be waited for.
            () = self.store.failed() => self.supervisor.halt().await,
        }
        self.supervisor.release().await;
        self.stages.closing.cancel();
        ended
    }
}

/// Counts the commits of the store, which knows nothing of instruments.
struct Commits(Metrics);

impl CommitObserver for Commits {
    fn committed(&self, writes: usize, took: Duration) {
        self.0.committed(writes, took);
    }
}

/// A process of root reads the memory and the environment of any other, whatever that one does against it.
fn warn_of_root(config: &Config) {
    let keys = config.providers.iter().filter(|(_, provider)| provider.api_key().is_some()).count();
    if rustix::process::geteuid().is_root() && !config.commands.is_empty() && keys > 0 {
        tracing::warn!(
            "this server runs as root: the commands it starts can read the keys of its providers; \
             start it as a user of its own"
        );
    }
}

fn build_catalog(
    own: &BTreeMap<String, ProviderConfig>,
    clock: &Arc<dyn Clock>,
    providers: Vec<(String, Endpoint)>,
) -> anyhow::Result<Catalog> {
    let mut catalog = Catalog::new(own, clock)?;
    for (name, endpoint) in providers {
        catalog.insert(name, endpoint);
    }
    Ok(catalog)
}

fn build_agents(config: &Config, registry: &Registry, catalog: &Catalog) -> Result<Agents, Vec<AgentError>> {
    Agents::new(&config.run.default_agent, &config.agents, &config.workspaces, registry, catalog)
}

/// Several errors as lines of one text.
fn joined<E: ToString>(errors: &[E]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn build_registry(
    commands: &BTreeMap<String, CommandConfig>,
    env: &Env,
    host: CommandHost,
    tools: Vec<Arc<dyn Tool>>,
) -> anyhow::Result<Registry> {
    let commands =
        CommandTool::new(commands, env.variables(), host).map_err(|errors| anyhow::anyhow!(joined(&errors)))?;
    let mut all = file_tools();
    all.extend(commands.map(|tool| Arc::new(tool) as Arc<dyn Tool>));
    all.extend(tools);
    Ok(Registry::new(all)?)
}

fn agents_on_offer(agents: &Agents) -> Vec<AgentView> {
    agents
        .iter()
        .filter_map(|(name, agent)| {
            let (model, others) = agent.models.split_first()?;
            Some(AgentView {
                name: name.to_owned(),
                description: agent.description.clone(),
                model: model.clone(),
                models: others.to_vec(),
                tools: agent.tools.iter().map(ToString::to_string).collect(),
                workspace: agent.workspace.clone(),
            })
        })
        .collect()
}

fn providers_on_offer(catalog: &Catalog) -> Vec<ProviderView> {
    catalog
        .iter()
        .map(|(name, endpoint)| ProviderView {
            name: name.to_owned(),
            kind: endpoint.kind.as_str().to_owned(),
            models: endpoint.models.clone(),
            context_window: endpoint.context_window,
        })
        .collect()
}

/// A number from 0 to 1, from the operating system; a half when it has none to give, which only makes retries less
/// spread.
fn random_fraction() -> f64 {
    random_bytes::<4>().map_or(0.5, |bytes| f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX))
}
