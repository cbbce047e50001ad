//! The whole service for tests of its HTTP interface, with runs that wait and runs that have ended.

use std::net::SocketAddr;

use hames::config::ServerConfig;
use serde_json::json;

use crate::support::app::{Setup, TestApp};
use crate::support::client::ApiClient;
use crate::support::stage::{Asked, Prompter};

/// A service whose model answers only when a test wants an ended run.
pub(super) struct Served {
    pub(super) addr: SocketAddr,
    pub(super) client: ApiClient,
    app: TestApp,
    model: Prompter,
    /// Calls that are never answered.
    waiting: tokio::sync::Mutex<Vec<Asked>>,
}

impl Served {
    pub(super) async fn start() -> Self {
        Self::with(ServerConfig::default()).await
    }

    pub(super) async fn with(server: ServerConfig) -> Self {
        let (mut setup, model) = Setup::stage();
        setup.server = Some(server);
        Self::of(setup, model).await
    }

    /// With more settings.
    pub(super) async fn configured(toml: &str) -> Self {
        let (setup, model) = Setup::stage();
        Self::of(setup.toml(toml), model).await
    }

    async fn of(setup: Setup, model: Prompter) -> Self {
        let app = setup.start().await;
        Self { addr: app.addr, client: app.client.clone(), app, model, waiting: tokio::sync::Mutex::default() }
    }

    /// A run whose model does not answer.
    pub(super) async fn waiting_run(&self) -> String {
        let id = self.client.post("/runs", &json!({"input": "wait"})).await.id();
        self.asked(&id).await;
        id
    }

    /// A run that has completed.
    pub(super) async fn finished_run(&self) -> String {
        let id = self.client.post("/runs", &json!({"input": "end"})).await.id();
        self.asked(&id).await;
        let asked = self.waiting.lock().await.pop().unwrap();
        asked.answer("done").await;
        self.app.ended(id.parse().unwrap()).await;
        id
    }

    /// Waits for the run's model call and keeps it, last of all.
    async fn asked(&self, id: &str) {
        loop {
            let asked = self.model.asked().await;
            let found = asked.request.run.to_string() == id;
            self.waiting.lock().await.push(asked);
            if found {
                return;
            }
        }
    }

    /// No new work; runs at work go on.
    pub(super) fn stop_softly(&self) {
        self.app.shutdown().soft().cancel();
    }

    /// Runs at work are let go.
    pub(super) fn stop_hard(&self) {
        self.app.shutdown().hard().cancel();
    }

    pub(super) async fn stop(self) {
        self.app.die().await;
    }
}
