//! What must outlive the process: runs, their specs, their numbered events.
//!
//! The event log is the transcript: `message` and `tool_end` events are its entries, stored once. Every write
//! of a worker is one transaction guarded by the run's generation; numbers are given inside it.

mod row;
pub mod sqlite;
mod transcript;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::config::StoreConfig;
use crate::domain::{
    EncodedBody, Event, Generation, Message, Run, RunId, RunSpec, RunStatus, RunStatusName, Seq, TenantId, Timestamp,
    Usage,
};

/// A database of runs.
#[async_trait]
pub trait Store: Send + Sync {
    /// Stores an accepted run with its first events and returns them numbered. Once this returns, the run
    /// survives a crash of the process and, with durability `full`, of the machine.
    async fn create_run(&self, new: NewRun) -> Result<Vec<Event>, StoreError>;

    /// One run; `None` when this tenant has none of that id.
    async fn run(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError>;

    /// Runs of a tenant, newest first, strictly before `before` when given; at most `limit`.
    async fn list_runs(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        before: Option<RunId>,
        limit: u32,
    ) -> Result<Vec<Run>, StoreError>;

    /// Events numbered above `after`, in order; at most `limit`. Empty also when no such run exists.
    async fn events_after(
        &self,
        tenant: &TenantId,
        id: RunId,
        after: Seq,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError>;

    /// The whole transcript: the input, then every message and tool outcome, in the order they are read in
    /// (the results of a batch in the order of its calls). `None` when this tenant has no such run.
    async fn transcript(&self, tenant: &TenantId, id: RunId) -> Result<Option<Vec<Message>>, StoreError>;

    /// Takes up to `limit` queued runs, oldest first: raises their generation and marks them running from `now`.
    async fn claim_queued(&self, limit: u32, now: Timestamp) -> Result<Vec<ClaimedRun>, StoreError>;

    /// Reads all that is needed to go on with a run, without taking it; `None` when this tenant has no such run.
    async fn load(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError>;

    /// Takes every run that is marked running. Called at start, before any run is claimed by this process: what
    /// is found was interrupted.
    async fn claim_interrupted(&self) -> Result<Vec<ClaimedRun>, StoreError>;

    /// Takes one running run from whoever holds it; `None` when it is not running. For a worker that lost its
    /// footing and has to begin again from what is stored.
    async fn reclaim(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError>;

    /// Commits one step of a run in one transaction and returns its events numbered. Refused with
    /// [`StoreError::Fenced`] when the run was claimed again since, or has ended, and the last step with
    /// [`StoreError::CancelRequested`] when its worker did not know of a request to end the run.
    async fn commit_step(&self, commit: StepCommit) -> Result<Committed, StoreError>;

    /// Ends a run whose stored state nobody can go on from, as `internal_error` with the code
    /// `stored_run_unreadable`. A run that has ended is untouched.
    async fn end_unreadable(
        &self,
        tenant: &TenantId,
        id: RunId,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), StoreError>;

    /// Stores that somebody wants the run ended. Idempotent; the first instant stays. A finished run is
    /// untouched. `None` when this tenant has no such run; else the run as it now stands.
    async fn request_cancel(&self, tenant: &TenantId, id: RunId, at: Timestamp) -> Result<Option<Run>, StoreError>;

    /// How many runs are queued.
    async fn queued(&self) -> Result<u64, StoreError>;

    /// Whether the database takes writes now.
    async fn health(&self) -> Result<(), StoreError>;

    /// Resolves when the database has failed for good: full disk, I/O error, broken file. From then on every write is
    /// refused, and the process has to end.
    async fn failed(&self);

    /// Finishes what was handed in and lets go of the database.
    async fn close(&self);
}

/// Opens the database that the settings name, creates what it lacks, and takes it for this process alone. `observer`
/// is told of every commit.
///
/// # Errors
/// [`StoreError::Unusable`] says what has to be changed before a server can start.
pub async fn open(config: &StoreConfig, observer: Arc<dyn CommitObserver>) -> Result<Arc<dyn Store>, StoreError> {
    Ok(Arc::new(sqlite::SqliteStore::open(config, observer).await?))
}

/// Is told of commits as they happen. Never blocks.
pub trait CommitObserver: Send + Sync {
    /// A transaction with this number of writes was committed, and took so long.
    fn committed(&self, writes: usize, took: Duration);
}

/// Nobody listens.
impl CommitObserver for () {
    fn committed(&self, _writes: usize, _took: Duration) {}
}

/// A run to be stored.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// The run, `Queued` with generation 0 or `Running` with generation 1; `last_seq` is ignored.
    pub run: Run,
    /// What it was accepted as.
    pub spec: RunSpec,
    /// The machine's state, in its own JSON; `None` before the machine was started.
    pub state: Option<String>,
    /// Its first events.
    pub events: Vec<EncodedBody>,
}

/// One step of a run.
#[derive(Clone, Debug)]
pub struct StepCommit {
    /// The run.
    pub run: RunId,
    /// The generation of the worker that writes.
    pub generation: Generation,
    /// When it happened; the time of its events.
    pub time: Timestamp,
    /// Where the run now stands.
    pub status: RunStatus,
    /// The request to end the run, as far as the worker knows.
    pub cancel_requested_at: Option<Timestamp>,
    /// Model responses so far.
    pub steps: u32,
    /// Tool calls so far.
    pub tool_calls: u32,
    /// Tokens so far.
    pub usage: Usage,
    /// The machine's state, in its own JSON; `None` when nobody goes on from here.
    pub state: Option<String>,
    /// What happened, in order.
    pub events: Vec<EncodedBody>,
}

/// A step that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its events, numbered.
    pub events: Vec<Event>,
    /// When somebody asked to end the run, if anybody has.
    pub cancel_requested_at: Option<Timestamp>,
}

/// A run in the hands of a worker, with all that is needed to go on.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimedRun {
    /// The run, with its new generation.
    pub run: Run,
    /// What it was accepted as.
    pub spec: RunSpec,
    /// The machine's state; `None` when it was never started.
    pub state: Option<String>,
    /// The transcript so far, without the input (that is in the spec).
    pub transcript: Vec<Message>,
}

/// Which runs to list. Conditions are joined by "and"; empty means all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunFilter {
    /// Any of these statuses.
    pub status: Vec<RunStatusName>,
    /// This agent.
    pub agent: Option<String>,
    /// All of these labels.
    pub metadata: Vec<(String, String)>,
}

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The run was claimed by another worker since, or has ended: the writer has to stop.
    #[error("run {run} is no longer held with generation {generation}")]
    Fenced {
        /// The run.
        run: RunId,
        /// The generation that was refused.
        generation: Generation,
    },
    /// The last step of a run shows the whole run, and somebody asked to end it since its worker looked.
    #[error("run {run} was asked to end at {at}, which its last step does not know")]
    CancelRequested {
        /// The run.
        run: RunId,
        /// When.
        at: Timestamp,
    },
    /// The database cannot be reached or does not answer in time; the same call may succeed later.
    #[error("the database is unavailable: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database refused or failed: full disk, I/O error, broken file. Going on would lose data.
    #[error("the database failed: {0}")]
    Failed(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Stored data does not read back.
    #[error("stored data of run {run} is unreadable: {reason}")]
    Corrupt {
        /// The run.
        run: RunId,
        /// What is wrong with it.
        reason: String,
    },
    /// The database cannot be used by this version: too old an engine, a newer schema, locked by another process.
    #[error("{0}")]
    Unusable(String),
}
