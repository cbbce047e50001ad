//! What an experiment takes place in: a folder, a database, a model, a server, and what is collected of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use std::sync::Mutex;

use tempfile::TempDir;

use crate::client::{Client, Log};
use crate::evidence::Evidence;
use crate::ledger;
use crate::model::{COMMANDS, Model};
use crate::postgres::Postgres;
use crate::server::{Server, free_address};

/// How long a command of the ledger takes, in milliseconds.
const PAUSE_MS: u32 = 10;

/// Where runs are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// A file in the folder.
    Sqlite,
    /// An own instance of Postgres.
    OwnPostgres,
    /// A fresh database of this server.
    Postgres(String),
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "sqlite" => Ok(Self::Sqlite),
            "postgres" => Ok(Self::OwnPostgres),
            _ => match text.strip_prefix("postgres:") {
                Some(url) if url.starts_with("postgres") => Ok(Self::Postgres(url.to_owned())),
                Some(_) => Ok(Self::Postgres(text.to_owned())),
                None => Err(format!("`{text}` is not a store; expected sqlite, postgres or postgres:URL")),
            },
        }
    }
}

impl std::fmt::Display for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Sqlite => f.write_str("sqlite"),
            Self::OwnPostgres => f.write_str("postgres"),
            Self::Postgres(url) => write!(f, "postgres:{url}"),
        }
    }
}

/// The place of one experiment.
pub(crate) struct Sandbox {
    folder: TempDir,
    pub(crate) model: Model,
    pub(crate) server: Server,
    pub(crate) postgres: Option<Postgres>,
    database: String,
    generations: Mutex<BTreeMap<String, Vec<u64>>>,
}

impl Sandbox {
    /// Everything but a running server.
    pub(crate) async fn new(store: &Store) -> Self {
        // Beside what is built, which is on a disk; the system's temporary folder may be memory.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let postgres = match store {
            Store::OwnPostgres => Some(Postgres::start().await),
            Store::Sqlite | Store::Postgres(_) => None,
        };
        let database = match (store, &postgres) {
            (Store::Postgres(url), _) => crate::postgres::fresh_database(url),
            (_, Some(postgres)) => postgres.url(),
            (_, None) => format!("sqlite:{}/hames.db", folder.path().display()),
        };
        let (model, address) = (Model::start().await, free_address());
        let settings = settings(folder.path(), &model, &database);
        std::fs::write(folder.path().join("hames.toml"), settings).unwrap();
        std::fs::create_dir(folder.path().join("files")).unwrap();
        let server = Server::new(folder.path().to_owned(), address);
        Self { folder, model, server, postgres, database, generations: Mutex::default() }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.server.address)
    }

    /// Notes the generation of every run, as the database has it now.
    pub(crate) fn note_generations(&self) {
        let Some(rows) = self.query("SELECT id, generation FROM runs") else { return };
        let mut seen = self.generations.lock().unwrap();
        for row in rows.lines() {
            if let Some((id, Ok(generation))) = row.split_once('|').map(|(id, number)| (id, number.parse())) {
                seen.entry(id.to_owned()).or_default().push(generation);
            }
        }
    }

    /// Asks the database by its own tool; `None` where that is not there or does not answer.
    fn query(&self, sql: &str) -> Option<String> {
        let output = match self.database.strip_prefix("sqlite:") {
            Some(file) => Command::new("sqlite3").args(["-readonly", file, sql]).output(),
            None => Command::new("psql").args(["-At", "-c", sql, &self.database]).output(),
        };
        let output = output.ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    }

    /// Whether generations can be seen here.
    pub(crate) fn sees_generations(&self) -> bool {
        self.query("SELECT 1").is_some()
    }

    /// Everything there is to judge, from a server that runs.
    pub(crate) async fn collect(&self, log: Log) -> Evidence {
        self.note_generations();
        let runs = self.client().read_all().await;
        Evidence {
            acknowledged: log.acknowledged,
            readers: log.readers,
            runs,
            ledger: ledger::read(&self.folder.path().join("ledger")),
            generations: self.generations.lock().unwrap().clone(),
            refused_by_model: self.model.take_refused(),
        }
    }

    /// Leaves the folder behind for a look at it.
    pub(crate) fn keep(self) -> PathBuf {
        let Self { folder, .. } = self;
        folder.keep()
    }
}

fn settings(folder: &std::path::Path, model: &Model, database: &str) -> String {
    let folder = folder.display();
    let program = std::env::current_exe().unwrap();
    let commands: String = COMMANDS
        .iter()
        .map(|effect| {
            format!(
                "[commands.{effect}]\nexecutable = \"{}\"\nargs = [\"ledger\", \"{folder}/ledger\", \"{effect}\", \
                 \"{PAUSE_MS}\"]\neffect = \"{effect}\"\n",
                program.display()
            )
        })
        .collect();
    format!(
        r#"
[store]
url = "{database}"
[run]
drain_ms = 25000
scratch_dir = "{folder}/scratch"
[log]
format = "json"
[providers.chaos]
kind = "openai_chat"
base_url = "{model}"
[agents.default]
model = "chaos/model"
tools = ["run_command"]
workspace = "files"
[workspaces.files]
path = "{folder}/files"
{commands}
"#,
        model = model.base_url(),
    )
}
