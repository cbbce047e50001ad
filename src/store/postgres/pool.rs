//! Connections, and calls that are carried out on them.
//!
//! The driver's own pool asks the server for a sign of life each time a connection comes back, and waits for the answer
//! without end: a trip more for each call, and one connection less for each that fell silent (transact-rs/sqlx#4349).
//! Here a connection comes back only from a call that ended well; any other is dropped, which waits for nobody.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::error::{Halt, Severity, severity, store_error};
use super::open;
use crate::config::Durability;
use crate::store::{CommitObserver, StoreError};

/// Most attempts at one call that others were in the way of, or whose connection broke.
const MAX_ATTEMPTS: u32 = 3;
/// A connection that nobody used for so long is asked for a sign of life first: the server may have been started again.
const TESTED_AFTER: Duration = Duration::from_secs(1);
/// Most time for that sign.
const TEST_TIMEOUT: Duration = Duration::from_millis(200);
/// A connection that nobody used for so long is closed.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// A connection is closed after so long, so that the memory of its server process goes back, and changes of address or
/// balance are followed.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);
/// Most time for calls to end, and for a connection to close, when the store is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long calls may take, waiting for a connection included.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a process is taken to live after it last told so.
    pub lease: Duration,
    /// Calls that somebody waits for who is told within a second that the database is away.
    pub front: Duration,
    /// Calls of workers, and reading.
    pub work: Duration,
    /// Erasing many runs.
    pub sweep: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            // Renewed every 2 s, it survives four lost renewals, and runs of a node that died go on within 15 s.
            lease: Duration::from_secs(10),
            front: Duration::from_millis(800),
            work: Duration::from_secs(3),
            sweep: open::STATEMENT_TIMEOUT,
        }
    }
}

/// The connections to a database.
pub(super) struct Pool {
    options: PgConnectOptions,
    durability: Durability,
    timing: Timing,
    max: u32,
    permits: Semaphore,
    /// Readers leave some to writers: a lease has to be renewed whatever is read.
    reading: Semaphore,
    idle: Mutex<Vec<Idle>>,
    closing: CancellationToken,
    /// Set once the disk or a file failed: no write is accepted any more.
    broken: OnceLock<String>,
    /// Fires with it.
    failed: CancellationToken,
    observer: Arc<dyn CommitObserver>,
}

struct Idle {
    connection: PgConnection,
    opened: Instant,
    since: Instant,
}

/// What is known of a call before it is carried out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) span: Span,
    /// Whether it is carried out again when its connection broke, since doing it twice is doing it once.
    pub(super) repeats: bool,
    /// Whether it has several statements in one transaction.
    pub(super) is_transaction: bool,
    pub(super) writes: bool,
}

/// Which of the times of [`Timing`] a call has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Span {
    Front,
    Work,
    Sweep,
}

impl Kind {
    /// Reading.
    pub(super) const fn read(span: Span) -> Self {
        Self { span, repeats: true, is_transaction: false, writes: false }
    }

    /// Writing with one statement.
    pub(super) const fn write(span: Span) -> Self {
        Self { span, repeats: true, is_transaction: false, writes: true }
    }

    /// Several statements of one transaction.
    pub(super) const fn in_transaction(self) -> Self {
        Self { is_transaction: true, ..self }
    }

    /// Twice is not once.
    pub(super) const fn once(self) -> Self {
        Self { repeats: false, ..self }
    }
}

impl Pool {
    pub(super) fn new(
        options: PgConnectOptions,
        durability: Durability,
        max: u32,
        timing: Timing,
        observer: Arc<dyn CommitObserver>,
    ) -> Self {
        let max = max.max(1);
        let count = |permits: u32| Semaphore::new(usize::try_from(permits).unwrap_or(Semaphore::MAX_PERMITS));
        Self {
            options,
            durability,
            timing,
            max,
            permits: count(max),
            reading: count((max - max / 4).max(1)),
            idle: Mutex::default(),
            closing: CancellationToken::new(),
            broken: OnceLock::new(),
            failed: CancellationToken::new(),
            observer,
        }
    }

    pub(super) const fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Begins a call.
    pub(super) fn call(&self, kind: Kind) -> Call<'_> {
        let span = match kind.span {
            Span::Front => self.timing.front,
            Span::Work => self.timing.work,
            Span::Sweep => self.timing.sweep,
        };
        let now = Instant::now();
        Call { pool: self, kind, deadline: now + span, attempt: 0, begun: now }
    }

    /// Refuses what is of no use once the database has failed for good.
    pub(super) fn refuse_broken(&self) -> Result<(), StoreError> {
        match self.broken.get() {
            Some(error) => Err(StoreError::Failed(error.clone().into())),
            None => Ok(()),
        }
    }

    /// Resolves when nothing can be written any more.
    pub(super) async fn failed(&self) {
        self.failed.cancelled().await;
    }

    /// Waits for calls under way, closes all connections, and refuses later calls.
    pub(super) async fn close(&self) {
        self.closing.cancel();
        // Those who do not end in time are left to the server.
        if timeout(CLOSE_TIMEOUT, self.permits.acquire_many(self.max)).await.is_err() {
            tracing::warn!("calls to the database are still under way while it is closed");
        }
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        for Idle { connection, .. } in idle {
            if !matches!(timeout(CLOSE_TIMEOUT, connection.close()).await, Ok(Ok(()))) {
                tracing::debug!("a database connection did not close properly");
            }
        }
    }

    async fn lease(&self, kind: Kind) -> Result<Lease<'_>, sqlx::Error> {
        if self.closing.is_cancelled() {
            return Err(sqlx::Error::PoolClosed);
        }
        let reading = if kind.writes { None } else { Some(self.reading.acquire().await) };
        let reading = reading.transpose().map_err(|_| sqlx::Error::PoolClosed)?;
        let permit = self.permits.acquire().await.map_err(|_| sqlx::Error::PoolClosed)?;
        let (connection, opened) = match self.take_idle().await {
            Some(found) => found,
            None => (open::connect(&self.options, self.durability).await?, Instant::now()),
        };
        Ok(Lease { pool: self, connection: Some(connection), opened, is_sound: false, _permits: (permit, reading) })
    }

    /// The connection that was used last, if it still lives.
    async fn take_idle(&self) -> Option<(PgConnection, Instant)> {
        let Idle { mut connection, opened, since } = self.idle().pop()?;
        if since.elapsed() < TESTED_AFTER {
            return Some((connection, opened));
        }
        match timeout(TEST_TIMEOUT, connection.ping()).await {
            Ok(Ok(())) => Some((connection, opened)),
            Ok(Err(_)) | Err(_) => {
                // The others were used before this one, and most likely broke with it.
                self.idle().clear();
                None
            }
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Idle>> {
        // Nothing that is done under the lock can leave it half done.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_broken(&self, error: &sqlx::Error) {
        tracing::error!(
            %error,
            "the database failed; nothing is written any more: free its disk or repair it, then start again"
        );
        // Only the first failure is kept; later ones follow from it.
        self.broken.get_or_init(|| error.to_string());
        self.failed.cancel();
    }
}

/// A connection that one call uses.
pub(super) struct Lease<'p> {
    pool: &'p Pool,
    connection: Option<PgConnection>,
    opened: Instant,
    /// Whether nothing is under way on it.
    is_sound: bool,
    _permits: (SemaphorePermit<'p>, Option<SemaphorePermit<'p>>),
}

impl Lease<'_> {
    /// The connection; `None` never while the lease is held.
    pub(super) const fn connection(&mut self) -> Option<&mut PgConnection> {
        self.connection.as_mut()
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        if !self.is_sound || self.pool.closing.is_cancelled() || self.opened.elapsed() > MAX_AGE {
            return;
        }
        let mut idle = self.pool.idle();
        if idle.first().is_some_and(|oldest| oldest.since.elapsed() > MAX_IDLE) {
            idle.remove(0);
        }
        idle.push(Idle { connection, opened: self.opened, since: Instant::now() });
    }
}

/// A call: one piece of work, carried out once or, where that is safe, again.
pub(super) struct Call<'p> {
    pool: &'p Pool,
    kind: Kind,
    deadline: Instant,
    attempt: u32,
    begun: Instant,
}

/// What comes after an attempt.
pub(super) enum Next<T> {
    /// The answer for the caller.
    Answer(Result<T, StoreError>),
    /// Another attempt.
    Again,
}

impl<'p> Call<'p> {
    /// Whether an attempt before this one may have been carried out.
    pub(super) const fn is_repeated(&self) -> bool {
        self.attempt > 1
    }

    /// A connection for the next attempt.
    pub(super) async fn lease(&mut self) -> Result<Lease<'p>, StoreError> {
        if self.kind.writes {
            self.pool.refuse_broken()?;
        }
        self.attempt += 1;
        let lease = match timeout_at(self.deadline, self.pool.lease(self.kind)).await {
            Ok(lease) => lease.map_err(|error| match severity(&error) {
                // Settings that do not fit the server any more; nothing is lost by it.
                Severity::Statement => StoreError::Unavailable(error.into()),
                Severity::Away | Severity::Busy | Severity::Conflict | Severity::Broken => store_error(error),
            })?,
            Err(_) => return Err(StoreError::Unavailable("there is no connection to the database in time".into())),
        };
        self.begun = Instant::now();
        Ok(lease)
    }

    /// The outcome of an attempt, which ends with the time of the call.
    pub(super) async fn within<T>(&self, work: impl Future<Output = Result<T, Halt>>) -> Result<T, Halt> {
        match timeout_at(self.deadline, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Halt::Database(sqlx::Error::Io(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                "the database does not answer in time",
            )))),
        }
    }

    /// Decides what an outcome means, and what becomes of the connection.
    pub(super) async fn settle<T>(&self, mut lease: Lease<'p>, outcome: Result<T, Halt>) -> Next<T> {
        let error = match outcome {
            Ok(output) => {
                lease.is_sound = true;
                if self.kind.writes {
                    self.pool.observer.committed(1, self.begun.elapsed());
                }
                return Next::Answer(Ok(output));
            }
            Err(Halt::Refused(error)) => {
                self.undo(&mut lease).await;
                return Next::Answer(Err(error));
            }
            Err(Halt::Database(error)) => error,
        };
        let is_left = self.attempt < MAX_ATTEMPTS && Instant::now() < self.deadline;
        match severity(&error) {
            Severity::Away if self.kind.repeats && is_left => {
                tracing::debug!(%error, "a database connection broke; the call is carried out again");
                Next::Again
            }
            Severity::Away => Next::Answer(Err(store_error(error))),
            Severity::Conflict => {
                self.undo(&mut lease).await;
                if is_left { Next::Again } else { Next::Answer(Err(store_error(error))) }
            }
            Severity::Broken => {
                self.pool.mark_broken(&error);
                Next::Answer(Err(store_error(error)))
            }
            // A server that does not take writes has to be left, so that the next connection finds the one that does.
            Severity::Busy => Next::Answer(Err(store_error(error))),
            Severity::Statement => {
                if matches!(error, sqlx::Error::Database(_)) {
                    self.undo(&mut lease).await;
                }
                Next::Answer(Err(store_error(error)))
            }
        }
    }

    /// Leaves the transaction behind, if there is one; the connection then is as good as before.
    async fn undo(&self, lease: &mut Lease<'p>) {
        lease.is_sound = match lease.connection() {
            Some(connection) if self.kind.is_transaction => {
                matches!(timeout_at(self.deadline, sqlx::raw_sql("ROLLBACK").execute(connection)).await, Ok(Ok(_)))
            }
            Some(_) | None => true,
        };
    }
}

/// Carries out a call: `$work` is a future made from `$connection`, and `$again` says whether an attempt before may
/// have been carried out.
macro_rules! carry_out {
    ($pool:expr, $kind:expr, |$connection:ident, $again:ident| $work:expr) => {{
        let mut call = $pool.call($kind);
        loop {
            let mut lease = match call.lease().await {
                Ok(lease) => lease,
                Err(error) => break Err(error),
            };
            let $again = call.is_repeated();
            let outcome = match lease.connection() {
                Some($connection) => call.within($work).await,
                None => Err(sqlx::Error::PoolClosed.into()),
            };
            match call.settle(lease, outcome).await {
                crate::store::postgres::pool::Next::Answer(answer) => break answer,
                crate::store::postgres::pool::Next::Again => {}
            }
        }
    }};
    ($pool:expr, $kind:expr, |$connection:ident| $work:expr) => {
        carry_out!($pool, $kind, |$connection, _again| $work)
    };
}
pub(super) use carry_out;
