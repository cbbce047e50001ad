//! What must outlive the process: runs, their specs, their numbered events.
//!
//! The event log is the transcript: `message` and `tool_end` events are its entries, stored once. Every write
//! of a worker is one transaction guarded by the run's generation; numbers are given inside it.

mod claimed;
#[cfg(feature = "failpoints")]
mod failpoint;
mod kept;
pub mod postgres;
mod prepared;
mod row;
mod schema;
pub mod sqlite;
mod transcript;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::config::StoreConfig;
use crate::domain::{
    EncodedBody, Event, Generation, InboxItem, InboxNumber, Message, OnBusy, Run, RunId, RunSpec, RunStatus,
    RunStatusName, Seq, TenantId, Timestamp, Usage,
};

/// A database of runs.
#[async_trait]
pub trait Store: Send + Sync {
    /// Stores an accepted run with its first events. Once this returns, the run survives a crash of the process and,
    /// with durability `full`, of the machine. A run of a thread continues the newest run of it.
    ///
    /// # Errors
    /// Besides others, [`StoreError::KeyTaken`], [`StoreError::ThreadBusy`], and [`StoreError::NoPredecessor`] when the
    /// run that it continues is not there.
    async fn create_run(&self, new: NewRun) -> Result<Created, StoreError>;

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

    /// The whole transcript: that of the runs it continues, the input, then every message and tool outcome, in the
    /// order they are read in (the results of a batch in the order of its calls). `None` when this tenant has no such
    /// run.
    async fn transcript(&self, tenant: &TenantId, id: RunId) -> Result<Option<Vec<Message>>, StoreError>;

    /// Takes up to `limit` runs that nobody has at work: first those whose process let go of them or is gone, of them
    /// first those that most processes ended with; then queued ones, oldest first. Raises their generation; queued ones
    /// are running from `now`. A run is not taken before the one that it continues has ended.
    async fn claim(&self, limit: u32, now: Timestamp) -> Result<Vec<ClaimedRun>, StoreError>;

    /// Tells that this process lives; without it others take its runs. To be called at least every third of the lease.
    async fn renew_lease(&self) -> Result<(), StoreError>;

    /// Gives up every run of this process, so that the next one takes them at once. Of those named here, `parked`, nothing
    /// was begun that is not committed. Called when none is at work any more.
    async fn release(&self, parked: &[RunId]) -> Result<(), StoreError>;

    /// The running runs of this process, as they are stored.
    async fn held(&self) -> Result<Vec<(TenantId, RunId)>, StoreError>;

    /// Reads all that is needed to go on with a run, without taking it; `None` when this tenant has no such run.
    async fn load(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError>;

    /// Takes one running run from whoever holds it; `None` when it is not running. For a worker that lost its
    /// footing and has to begin again from what is stored.
    async fn reclaim(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError>;

    /// Commits one step of a run in one transaction and returns its events numbered. A step that leaves the run queued
    /// or waiting raises its generation: it is in nobody's hands then, and of those who go on from there one wins.
    ///
    /// A step may be handed in again when its fate is not known: one that was committed is answered as it was, if
    /// nobody has gone on from there.
    ///
    /// Refused with [`StoreError::Fenced`] when the run was claimed again since, has ended, or has other events than
    /// its worker knows; the last step with [`StoreError::CancelRequested`] when its worker did not know of a request to
    /// end the run, and with [`StoreError::Unread`] when it has not read the inbox; and any with
    /// [`StoreError::KeyTaken`].
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

    /// Stores something said to a run; what it amends is amended at once. `None` when this tenant has no such run; a run
    /// that has ended is untouched and given as it is.
    async fn post(&self, post: Post) -> Result<Option<Run>, StoreError>;

    /// The inbox of a run, in order, from the number above `after` on.
    async fn inbox(&self, id: RunId, after: InboxNumber) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError>;

    /// Waiting runs that have to be ended: their wait is over at `now`, or somebody asked for it. At most `limit`.
    async fn due(&self, now: Timestamp, limit: u32) -> Result<Vec<(TenantId, RunId)>, StoreError>;

    /// What was answered under a key, at `now` not older than [`KEY_LIFETIME`].
    async fn kept_answer(&self, tenant: &TenantId, key: &str, now: Timestamp)
    -> Result<Option<KeptAnswer>, StoreError>;

    /// Erases a run that has ended with all that belongs to it.
    async fn erase(&self, tenant: &TenantId, id: RunId, now: Timestamp) -> Result<Erasure, StoreError>;

    /// Whether a run of this tenant was there and is erased.
    async fn is_erased(&self, tenant: &TenantId, id: RunId) -> Result<bool, StoreError>;

    /// Erases runs that ended before `finished_before`, oldest first, at most `limit`; none when it is `None`. Forgets
    /// keys that are too old at `now`. Gives the number of erased runs.
    async fn sweep(&self, finished_before: Option<Timestamp>, now: Timestamp, limit: u32) -> Result<u64, StoreError>;

    /// How many runs wait for a worker.
    async fn backlog(&self) -> Result<Backlog, StoreError>;

    /// Whether the database takes writes now.
    async fn health(&self) -> Result<(), StoreError>;

    /// Resolves when the database has failed for good: full disk, I/O error, broken file. From then on every write is
    /// refused, and the process has to end.
    async fn failed(&self);

    /// Finishes what was handed in and lets go of the database.
    async fn close(&self);
}

/// Opens the database that the settings name and creates what it lacks. A file is taken for this process alone.
/// `observer` is told of every commit.
///
/// # Errors
/// [`StoreError::Unusable`] says what has to be changed before a server can start.
pub async fn open(
    config: &StoreConfig,
    worker: WorkerId,
    observer: Arc<dyn CommitObserver>,
) -> Result<Arc<dyn Store>, StoreError> {
    let store: Arc<dyn Store> = match config.url.scheme() {
        Some("postgres" | "postgresql") => {
            let timing = postgres::Timing::default();
            Arc::new(postgres::PostgresStore::open(config, worker, observer, timing).await?)
        }
        Some("sqlite") => Arc::new(sqlite::SqliteStore::open(config, worker, observer).await?),
        // The value is not repeated: addresses of databases often hold a password.
        Some(_) | None => {
            return Err(StoreError::Unusable(
                "[store] url is no address of a database; expected `sqlite:PATH` or \
                 `postgres://USER:PASSWORD@HOST:PORT/DATABASE`"
                    .to_owned(),
            ));
        }
    };
    #[cfg(feature = "failpoints")]
    let store = failpoint::wrap(store)?;
    Ok(store)
}

/// Names a process among all that ever had runs at work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerId(String);

impl WorkerId {
    /// A name that no other process has.
    pub const fn new(unique: String) -> Self {
        Self(unique)
    }

    fn as_str(&self) -> &str {
        &self.0
    }
}

/// How long the answer to a request with an `Idempotency-Key` is kept.
pub const KEY_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// How long it is remembered that an erased run was there.
pub const ERASED_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

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
    /// What it means for its thread; of no meaning without one.
    pub on_busy: OnBusy,
    /// The key it is asked for with.
    pub key: Option<KeyUse>,
}

/// A run that is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Created {
    /// The run as stored.
    pub run: Run,
    /// Its events, numbered.
    pub events: Vec<Event>,
    /// Runs of its thread that were asked to end.
    pub interrupted: Vec<RunId>,
}

/// An `Idempotency-Key` that a change is made under. The run as it stands after the change is kept with it, in its
/// public form, in the same transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyUse {
    /// The key.
    pub key: String,
    /// What tells the request from others.
    pub fingerprint: String,
    /// When it is used.
    pub at: Timestamp,
}

/// What was answered under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptAnswer {
    /// What tells the request from others.
    pub fingerprint: String,
    /// The run it was about.
    pub run: RunId,
    /// The run as it then stood, in the JSON of its public form.
    pub answer: String,
}

/// Something said to a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Post {
    /// Whose run it is.
    pub tenant: TenantId,
    /// The run.
    pub run: RunId,
    /// What.
    pub item: InboxItem,
    /// The key it is said with.
    pub key: Option<KeyUse>,
}

/// Runs that wait for a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Those that can be taken: queued ones, and those whose worker is gone.
    pub ready: u64,
    /// Queued ones whose predecessor has not ended.
    pub blocked: u64,
}

/// What became of the wish to erase a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Erasure {
    /// It is erased, or was before.
    Erased,
    /// It has not ended.
    Active,
    /// This tenant has no such run.
    Unknown,
}

/// One step of a run.
#[derive(Clone, Debug)]
pub struct StepCommit {
    /// The run.
    pub run: RunId,
    /// The generation of the worker that writes.
    pub generation: Generation,
    /// The number of the newest event that the worker knows; those of the step follow it. It tells a step that is
    /// handed in again from the next one.
    pub after: Seq,
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
    /// See [`Run::crashes`].
    pub crashes: u32,
    /// The newest item of the inbox that the run has taken in; it and those before it are removed.
    pub inbox_read: InboxNumber,
    /// The machine's state, in its own JSON; `None` when nobody goes on from here.
    pub state: Option<String>,
    /// What happened, in order.
    pub events: Vec<EncodedBody>,
    /// The key the step is asked for with.
    pub key: Option<KeyUse>,
}

/// A step that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its events, numbered.
    pub events: Vec<Event>,
    /// When somebody asked to end the run, if anybody has.
    pub cancel_requested_at: Option<Timestamp>,
    /// The newest item of the run's inbox, read or not.
    pub inbox: InboxNumber,
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
    /// What was said in the runs it continues.
    pub history: Vec<Message>,
    /// The transcript so far, without the input (that is in the spec).
    pub transcript: Vec<Message>,
    /// The newest item of its inbox.
    pub inbox: InboxNumber,
    /// What became of the worker that had it.
    pub former: Former,
}

/// What became of the worker that had a run before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Former {
    /// The run was not at work.
    None,
    /// It let go of the run, or is to do so.
    LetGo,
    /// It is gone, and did not let go of the run.
    Gone,
}

/// Which runs to list. Conditions are joined by "and"; empty means all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunFilter {
    /// Any of these statuses.
    pub status: Vec<RunStatusName>,
    /// This agent.
    pub agent: Option<String>,
    /// This thread.
    pub thread: Option<String>,
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
    /// The run was to be completed and something was said to it that its worker has not read.
    #[error("item {inbox} of the inbox of run {run} is not read")]
    Unread {
        /// The run.
        run: RunId,
        /// The newest item.
        inbox: InboxNumber,
    },
    /// Something was done under this key before.
    #[error("the idempotency key was used for run {} before", .0.run)]
    KeyTaken(KeptAnswer),
    /// The thread has a run that has not ended.
    #[error("run {run} of the thread has not ended")]
    ThreadBusy {
        /// That run.
        run: RunId,
    },
    /// The run to continue is not there.
    #[error("there is no run {run} to continue")]
    NoPredecessor {
        /// That run.
        run: RunId,
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
