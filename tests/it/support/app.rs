//! The whole service in a test: its own database, workspaces and port, with a stage for a model where wanted.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hames::app::{App, Surroundings};
use hames::config::{Config, Env, ProviderKind, ServerConfig, StoreConfig, TelemetryConfig, load};
use hames::domain::{Event, EventKind, Message, Run, RunId, RunRequest, TenantId};
use hames::event::Bus;
use hames::provider::Endpoint;
use hames::run::{Caller, Supervisor};
use hames::shutdown::Shutdown;
use hames::store::Store;
use hames::telemetry::{Metrics, Telemetry};
use hames::time::{Clock, SystemClock};
use hames::tool::Tool;
use hames::tool::supervise::CommandHost;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::client::ApiClient;
use super::stage::{Prompter, stage_model};

/// How long a test waits for something that has to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a test's service is made of.
pub(crate) struct Setup {
    /// Holds the database, the workspaces and the scratch directory.
    pub(crate) dir: Arc<TempDir>,
    /// Settings beside those every test has.
    pub(crate) toml: String,
    pub(crate) tools: Vec<Arc<dyn Tool>>,
    pub(crate) providers: Vec<(String, Endpoint)>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) env: Env,
    /// Replaces the listener's settings.
    pub(crate) server: Option<ServerConfig>,
    /// Replaces the database.
    pub(crate) store: Option<StoreConfig>,
    /// Instruments that the test holds as well.
    pub(crate) metrics: Option<Metrics>,
}

impl Setup {
    /// Where runs without a configured workspace have their own.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.dir.path().join("scratch")
    }

    /// An agent `test` whose model `stage/m` is steered by the test, with every tool there is.
    pub(crate) fn stage() -> (Self, Prompter) {
        let (model, prompter) = stage_model();
        let mut setup = Self::empty();
        setup.providers.push(("stage".to_owned(), Endpoint::new(model, ProviderKind::Scripted)));
        let script = setup.path("none.json");
        std::fs::write(&script, r#"{"turns":[]}"#).unwrap();
        setup.toml = format!(
            "[providers.stage]\nkind = \"scripted\"\nscript = {script:?}\n\
             [agents.test]\nmodel = \"stage/m\"\ntools = [\"*\"]\n"
        );
        (setup, prompter)
    }

    /// No agent, no provider.
    pub(crate) fn empty() -> Self {
        Self {
            dir: Arc::new(tempfile::tempdir().unwrap()),
            toml: String::new(),
            tools: Vec::new(),
            providers: Vec::new(),
            clock: Arc::new(SystemClock),
            env: Env::from_iter([("PATH", "/usr/local/bin:/usr/bin:/bin")]),
            server: None,
            store: None,
            metrics: None,
        }
    }

    /// Adds a tool.
    pub(crate) fn tool(mut self, tool: Arc<dyn Tool>) -> Self {
        self.tools.push(tool);
        self
    }

    /// Adds settings.
    pub(crate) fn toml(mut self, toml: &str) -> Self {
        self.toml.push_str(toml);
        self
    }

    /// A directory below the test's own.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The settings.
    pub(crate) fn config(&self) -> Config {
        let file = self.dir.path().join("hames.toml");
        std::fs::write(&file, &self.toml).unwrap();
        let mut config = load(Some(&file), &self.env).unwrap_or_else(|problems| panic!("{problems}"));
        config.store.url = format!("sqlite:{}", self.dir.path().join("hames.db").display()).into();
        if let Some(server) = &self.server {
            config.server = server.clone();
        }
        if let Some(store) = &self.store {
            config.store = store.clone();
        }
        config.run.scratch_dir = self.scratch();
        config
    }

    /// Starts the service.
    pub(crate) async fn start(&self) -> TestApp {
        let config = self.config();
        let surroundings = Surroundings {
            env: self.env.clone(),
            clock: Arc::clone(&self.clock),
            supervisor: CommandHost::program(env!("CARGO_BIN_EXE_hames")),
            tools: self.tools.clone(),
            providers: self.providers.clone(),
            metrics: self.metrics.clone().unwrap_or_else(own_metrics),
        };
        let app = App::build(config, surroundings).await.unwrap_or_else(|error| panic!("{error:#}"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let shutdown = Shutdown::new();
        let (supervisor, store, bus) = (app.supervisor().clone(), Arc::clone(app.store()), app.bus().clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(app.serve(listener, shutdown.clone()));
        TestApp {
            addr,
            client: ApiClient::new(addr),
            supervisor,
            store,
            bus,
            dir: Arc::clone(&self.dir),
            shutdown,
            tasks,
            ended: false,
        }
    }
}

/// Instruments that only the service has.
pub(crate) fn own_metrics() -> Metrics {
    Telemetry::new(&TelemetryConfig::default(), "test").unwrap().metrics().clone()
}

/// A running service. A test ends it with [`TestApp::finish`] or [`TestApp::die`]; one that forgets fails.
pub(crate) struct TestApp {
    pub(crate) addr: SocketAddr,
    pub(crate) client: ApiClient,
    pub(crate) supervisor: Supervisor,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bus: Bus,
    dir: Arc<TempDir>,
    shutdown: Shutdown,
    tasks: JoinSet<anyhow::Result<()>>,
    ended: bool,
}

impl TestApp {
    /// The tenant of a server without keys.
    pub(crate) fn tenant(&self) -> TenantId {
        TenantId::local()
    }

    /// Creates a run of the agent `test`, with fields of the request beside the input.
    pub(crate) async fn create(&self, fields: Value) -> Run {
        let mut request = serde_json::json!({"agent": "test", "input": "do it"});
        if let (Value::Object(request), Value::Object(fields)) = (&mut request, fields) {
            request.extend(fields);
        }
        let request: RunRequest = serde_json::from_value(request).unwrap();
        self.supervisor
            .create(Caller::untraced(self.tenant()), request, None)
            .await
            .unwrap_or_else(|error| panic!("{error:?}"))
    }

    /// The run as stored.
    pub(crate) async fn run(&self, id: RunId) -> Run {
        self.store.run(&self.tenant(), id).await.unwrap().unwrap()
    }

    /// The run once it has ended.
    pub(crate) async fn ended(&self, id: RunId) -> Run {
        let live = self.bus.live(id);
        let wait = async {
            loop {
                let run = self.run(id).await;
                if run.status.is_finished() {
                    return run;
                }
                tokio::select! {
                    () = live.at_rest() => {}
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the run does not end")
    }

    /// The run's whole log.
    pub(crate) async fn events(&self, id: RunId) -> Vec<Event> {
        let events = self.store.events_after(&self.tenant(), id, 0, 100_000).await.unwrap();
        let numbers: Vec<_> = events.iter().map(|event| event.seq).collect();
        assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>(), "events are numbered without gap");
        events
    }

    /// The types of the run's events.
    pub(crate) async fn kinds(&self, id: RunId) -> Vec<&'static str> {
        self.events(id).await.iter().map(|event| event.body.kind.as_str()).collect()
    }

    /// The run's events of one type, as JSON.
    pub(crate) async fn events_of(&self, id: RunId, kind: EventKind) -> Vec<Value> {
        let events = self.events(id).await;
        let wanted = events.iter().filter(|event| event.body.kind == kind);
        wanted.map(|event| serde_json::from_slice(&event.json()).unwrap()).collect()
    }

    /// What was said.
    pub(crate) async fn transcript(&self, id: RunId) -> Vec<Message> {
        self.store.transcript(&self.tenant(), id).await.unwrap().unwrap()
    }

    /// What stops the service.
    pub(crate) fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Where runs without a configured workspace have their own.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.dir.path().join("scratch")
    }

    /// Stops the service and checks that nothing is left behind.
    pub(crate) async fn finish(mut self) {
        self.ended = true;
        self.shutdown.soft().cancel();
        let stopped = tokio::time::timeout(PATIENCE, self.tasks.join_next()).await;
        stopped.expect("the service does not stop: a run is still at work").unwrap().unwrap().unwrap();
        assert_eq!(self.supervisor.active(), 0, "a run is left at work");
        assert!(self.bus.is_empty(), "a live run is left behind");
        let scratch: Vec<_> = std::fs::read_dir(self.scratch()).into_iter().flatten().collect();
        assert!(scratch.is_empty(), "a run's own workspace is left behind: {scratch:?}");
    }

    /// Stops the service gracefully; runs may be left to the next one.
    pub(crate) async fn hand_over(mut self) {
        self.ended = true;
        self.shutdown.soft().cancel();
        let stopped = tokio::time::timeout(PATIENCE, self.tasks.join_next()).await;
        stopped.expect("the service does not stop").unwrap().unwrap().unwrap();
    }

    /// Stops the service where it stands, as a crash would, but lets go of the database file.
    pub(crate) async fn die(mut self) {
        self.ended = true;
        self.shutdown.soft().cancel();
        self.shutdown.hard().cancel();
        let stopped = tokio::time::timeout(PATIENCE, self.tasks.join_next()).await;
        stopped.expect("the service does not stop").unwrap().unwrap().unwrap();
    }
}

impl Drop for TestApp {
    fn drop(&mut self) {
        assert!(self.ended || std::thread::panicking(), "the test did not end its service");
    }
}
