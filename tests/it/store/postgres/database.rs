//! A database for each test, on a server that is there.

use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hames::config::{Durability, StoreConfig};
use hames::store::postgres::{PostgresStore, Timing};
use hames::store::{CommitObserver, Store, StoreError, WorkerId};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};

use super::super::contract::Database;

/// Where the server is when `HAMES_TEST_POSTGRES` does not say.
const SERVER: &str = "postgres://postgres@127.0.0.1:5432";

#[expect(clippy::disallowed_methods, reason = "what tests need from outside is said in the environment")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The address of the server, with or without a database.
pub(super) fn server() -> PgConnectOptions {
    variable("HAMES_TEST_POSTGRES").as_deref().unwrap_or(SERVER).parse().unwrap()
}

/// Whether the server is there. Says so when it is not, past what captures the output of tests; where it is required
/// that is a failure.
pub(super) async fn is_here() -> bool {
    let error = match server().connect().await {
        Ok(connection) => {
            connection.close().await.unwrap();
            return true;
        }
        Err(error) => error,
    };
    let required = variable("HAMES_TEST_REQUIRE").unwrap_or_default();
    let is_required = required.split([',', ' ']).any(|name| name == "postgres");
    assert!(!is_required, "Postgres is required and cannot be reached: {error}");
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    writeln!(std::io::stderr(), "SKIPPED {test}: Postgres cannot be reached: {error}").unwrap();
    false
}

/// Skips a test when the server is not there.
macro_rules! need_postgres {
    () => {
        if !$crate::store::postgres::database::is_here().await {
            return;
        }
    };
}
pub(super) use need_postgres;

/// Nobody waits for long, nobody is given up.
pub(super) const PATIENT: Timing = Timing {
    lease: Duration::from_secs(600),
    front: Duration::from_secs(20),
    work: Duration::from_secs(20),
    sweep: Duration::from_secs(20),
};

/// An empty database, dropped at the end.
pub(super) struct Empty {
    pub(super) name: String,
}

impl Empty {
    pub(super) async fn create() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("hames_test_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        run(&server(), &format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")).await;
        Self { name }
    }

    pub(super) fn options(&self) -> PgConnectOptions {
        server().database(&self.name)
    }

    pub(super) fn config(&self) -> StoreConfig {
        config(&self.options())
    }

    pub(super) async fn open(&self, timing: Timing) -> Arc<PostgresStore> {
        open(&self.config(), timing).await.unwrap()
    }

    /// Carries out statements in another database of the server.
    pub(super) async fn at_server(&self, sql: &str) {
        run(&server(), sql).await;
    }

    /// Carries out statements behind the store's back.
    pub(super) async fn tamper(&self, sql: &str) {
        run(&self.options(), sql).await;
    }
}

async fn run(options: &PgConnectOptions, sql: &str) {
    let mut connection: PgConnection = options.connect().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    connection.close().await.unwrap();
}

pub(super) fn config(options: &PgConnectOptions) -> StoreConfig {
    let url = options.to_url_lossy().to_string();
    StoreConfig { url: url.into(), durability: Durability::Full, max_connections: 8 }
}

pub(super) async fn open(config: &StoreConfig, timing: Timing) -> Result<Arc<PostgresStore>, StoreError> {
    Ok(Arc::new(PostgresStore::open(config, worker(), Arc::new(()), timing).await?))
}

pub(super) fn worker() -> WorkerId {
    static PROCESSES: AtomicU32 = AtomicU32::new(0);
    WorkerId::new(format!("process-{}", PROCESSES.fetch_add(1, Ordering::Relaxed)))
}

impl Drop for Empty {
    fn drop(&mut self) {
        let sql = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // A runtime cannot wait inside itself.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(run(&server(), &sql));
        });
        if dropping.join().is_err() && !std::thread::panicking() {
            panic!("the database {} is not dropped", self.name);
        }
    }
}

/// A database with its open store.
pub(super) struct PostgresDatabase {
    store: Option<Arc<PostgresStore>>,
    pub(super) empty: Empty,
    pub(super) commits: Arc<Mutex<Vec<usize>>>,
}

/// Keeps the number of writes of each commit.
struct Commits(Arc<Mutex<Vec<usize>>>);

impl CommitObserver for Commits {
    fn committed(&self, writes: usize, _took: Duration) {
        self.0.lock().unwrap().push(writes);
    }
}

#[async_trait::async_trait]
impl Database for PostgresDatabase {
    async fn is_here() -> bool {
        is_here().await
    }

    async fn fresh() -> Self {
        let (empty, commits) = (Empty::create().await, Arc::default());
        let observer = Arc::new(Commits(Arc::clone(&commits)));
        let store = PostgresStore::open(&empty.config(), worker(), observer, PATIENT).await.unwrap();
        Self { store: Some(Arc::new(store)), empty, commits }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::<PostgresStore>::clone(self.store.as_ref().unwrap())
    }

    async fn crash(&mut self) {
        drop(self.store.take());
        self.empty.tamper("UPDATE workers SET lease_until = now() - interval '1 second'").await;
        self.store = Some(self.empty.open(PATIENT).await);
    }
}
