//! The one task that writes. It commits at once when nothing else waits, and otherwise everything that waits in
//! one transaction: a flush of the disk is paid once for the whole group. Writes of one kind in a group are done
//! together, since every statement costs a round trip to the thread that SQLite works in.

use std::any::{Any, TypeId};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteConnectOptions;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::error::{self, Severity, Shared};
use super::open::{self, FileLock, Opened};
use super::script::{Script, Trips};
use crate::config::Durability;
use crate::store::{CommitObserver, StoreError};

/// Most writes of one transaction.
const MAX_GROUP: usize = 256;
/// Most bytes of one transaction; a single larger write is a group of its own.
const MAX_GROUP_BYTES: usize = 1 << 20;
/// Most writes that wait; more callers wait for a place.
const MAX_WAITING: usize = 1024;
/// Most attempts at one transaction while another process holds the database, each waiting up to the busy timeout.
const MAX_ATTEMPTS: u32 = 3;

/// One kind of write: what it does inside a transaction.
#[async_trait]
pub(super) trait Write: Send + Sync + Sized + 'static {
    /// What the caller gets once it is committed.
    type Output: Send + 'static;

    /// About how many bytes it writes.
    fn bytes(&self) -> usize;

    /// Does all of these and gives an answer for each, in order. None of them was answered before the others were
    /// handed in, so any order among them is as good as another. May be called again in a new transaction when the
    /// one it was part of could not be committed.
    ///
    /// # Errors
    /// The database refused a statement: nothing of these writes may be committed.
    async fn apply_all(
        writes: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Self::Output, StoreError>>, sqlx::Error>;
}

/// A write that gains nothing from being done together with others of its kind.
#[async_trait]
pub(super) trait Single: Send + Sync + 'static {
    /// See [`Write::Output`].
    type Output: Send + 'static;

    /// See [`Write::bytes`].
    fn bytes(&self) -> usize;

    /// Does it.
    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Self::Output, Halt>;
}

#[async_trait]
impl<S: Single> Write for S {
    type Output = S::Output;

    fn bytes(&self) -> usize {
        Single::bytes(self)
    }

    async fn apply_all(
        writes: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Self::Output, StoreError>>, sqlx::Error> {
        let connection = script.connection().await?;
        let mut answers = Vec::with_capacity(writes.len());
        for write in writes {
            answers.push(match write.apply(connection).await {
                Ok(output) => Ok(output),
                Err(Halt::Refused(error)) => Err(error),
                Err(Halt::Database(error)) => return Err(error),
            });
        }
        Ok(answers)
    }
}

/// Why a [`Single`] write does not give its output.
#[derive(Debug)]
pub(super) enum Halt {
    /// It is answered with this error; what it wrote so far is committed with its group.
    Refused(StoreError),
    /// The database refused a statement: nothing of this write may be committed.
    Database(sqlx::Error),
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for Halt {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// The way to the writing task.
pub(super) struct Writer {
    sender: mpsc::Sender<Waiting>,
    state: Arc<State>,
    closing: CancellationToken,
    task: Mutex<JoinSet<()>>,
}

/// What the writing task tells everybody.
#[derive(Default)]
struct State {
    /// Set once the disk or the file failed: no write is accepted any more.
    broken: OnceLock<Shared>,
    /// Fires with it.
    failed: CancellationToken,
}

impl Writer {
    /// Starts the task. It ends when it is told to close, or with the last handle.
    pub(super) fn start(opened: Opened, durability: Durability, observer: Arc<dyn CommitObserver>) -> Self {
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        let state = Arc::new(State::default());
        let closing = CancellationToken::new();
        let task = Task {
            receiver,
            connection: opened.connection,
            options: opened.writing,
            durability,
            state: Arc::clone(&state),
            lock: opened.lock,
            observer,
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(task.run(closing.clone()));
        Self { sender, state, closing, task: Mutex::new(tasks) }
    }

    /// Hands in a write and waits until it is committed. Dropping the future before the write was handed in means
    /// it never happens; later it changes nothing.
    pub(super) async fn write<W: Write>(&self, write: W) -> Result<W::Output, StoreError> {
        if let Some(error) = self.state.broken.get() {
            return Err(StoreError::Failed(error.clone().into()));
        }
        let (reply, answer) = oneshot::channel();
        let entry = Entry { write, result: None, reply };
        self.sender.send(Box::new(entry)).await.map_err(|_| self.gone())?;
        answer.await.map_err(|_| self.gone())?
    }

    /// Why nobody takes writes any more.
    fn gone(&self) -> StoreError {
        if self.closing.is_cancelled() {
            closed()
        } else {
            StoreError::Failed("the task that writes to the database has ended".into())
        }
    }

    /// Resolves when nothing can be written any more.
    pub(super) async fn failed(&self) {
        self.state.failed.cancelled().await;
    }

    /// Finishes what was handed in, closes the connection, and lets go of the file.
    pub(super) async fn close(&self) {
        self.closing.cancel();
        let mut tasks = self.task.lock().await;
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "the database writer did not end properly");
            }
        }
    }
}

fn closed() -> StoreError {
    StoreError::Unavailable("the store is closed".into())
}

/// A write whose caller waits, its kind set aside.
trait Pending: Any + Send {
    fn bytes(&self) -> usize;
    /// What it has in common with others that can be done together with it.
    fn kind(&self) -> Kind;
    /// Answers the caller: with what was kept for it once that is committed, else with the error.
    fn settle(self: Box<Self>, committed: Result<(), StoreError>);
}

type Waiting = Box<dyn Pending>;

/// A kind of write.
#[derive(Clone, Copy)]
struct Kind {
    id: TypeId,
    apply_all: ApplyAll,
}

/// Applies writes of one kind and keeps the answers for [`Pending::settle`].
type ApplyAll = for<'a> fn(&'a mut [Waiting], &'a mut Script<'_>) -> BoxFuture<'a, Result<(), sqlx::Error>>;

struct Entry<W: Write> {
    write: W,
    result: Option<Result<W::Output, StoreError>>,
    reply: oneshot::Sender<Result<W::Output, StoreError>>,
}

impl<W: Write> Entry<W> {
    async fn apply_all(batch: &mut [Waiting], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
        let mut entries: Vec<&mut Self> =
            batch.iter_mut().filter_map(|entry| (&mut **entry as &mut dyn Any).downcast_mut()).collect();
        let writes: Vec<&W> = entries.iter().map(|entry| &entry.write).collect();
        let answers = W::apply_all(&writes, script).await?;
        if answers.len() != entries.len() {
            let words = format!("{} writes were given {} answers", entries.len(), answers.len());
            return Err(sqlx::Error::Protocol(words));
        }
        for (entry, answer) in entries.iter_mut().zip(answers) {
            entry.result = Some(answer);
        }
        Ok(())
    }
}

impl<W: Write> Pending for Entry<W> {
    fn bytes(&self) -> usize {
        self.write.bytes()
    }

    fn kind(&self) -> Kind {
        Kind { id: TypeId::of::<W>(), apply_all: |batch, script| Box::pin(Self::apply_all(batch, script)) }
    }

    fn settle(self: Box<Self>, committed: Result<(), StoreError>) {
        let Self { result, reply, .. } = *self;
        let answer = committed.and_then(|()| result.unwrap_or_else(|| Err(closed())));
        if reply.send(answer).is_err() {
            tracing::trace!("a write was finished after its caller had gone");
        }
    }
}

struct Task {
    receiver: mpsc::Receiver<Waiting>,
    connection: SqliteConnection,
    options: SqliteConnectOptions,
    durability: Durability,
    state: Arc<State>,
    lock: FileLock,
    observer: Arc<dyn CommitObserver>,
}

impl Task {
    async fn run(mut self, closing: CancellationToken) {
        // A panic of this task is as final as a broken disk.
        let alarm = self.state.failed.clone().drop_guard();
        let mut carried = None;
        loop {
            let first = match carried.take() {
                Some(first) => Some(first),
                None => tokio::select! {
                    biased;
                    () = closing.cancelled(), if !self.receiver.is_closed() => {
                        self.receiver.close();
                        continue;
                    }
                    first = self.receiver.recv() => first,
                },
            };
            let Some(first) = first else { break };
            let (group, next) = self.group(first);
            carried = next;
            self.commit(group).await;
        }
        if self.state.broken.get().is_none() {
            alarm.disarm();
        }
        open::close(self.connection).await;
        drop(self.lock);
    }

    /// Everything that waits, up to the caps; the second value is a write that was taken and did not fit.
    fn group(&mut self, first: Waiting) -> (Vec<Waiting>, Option<Waiting>) {
        let mut bytes = first.bytes();
        let mut group = vec![first];
        while group.len() < MAX_GROUP {
            // Empty and closed both mean that nothing waits.
            let Ok(next) = self.receiver.try_recv() else { break };
            bytes = bytes.saturating_add(next.bytes());
            if bytes > MAX_GROUP_BYTES {
                return (group, Some(next));
            }
            group.push(next);
        }
        (group, None)
    }

    /// Commits a group and answers each of its callers, whatever happens.
    async fn commit(&mut self, mut group: Vec<Waiting>) {
        let mut attempt = 1;
        let mut batching = Batching::ByKind;
        while !group.is_empty() {
            if let Some(error) = self.state.broken.get() {
                let error = error.clone();
                return settle_all(group, || StoreError::Failed(error.clone().into()));
            }
            let begun = Instant::now();
            let failure = match self.transaction(&mut group, batching).await {
                Ok(()) => {
                    self.observer.committed(group.len(), begun.elapsed());
                    group.into_iter().for_each(|entry| entry.settle(Ok(())));
                    return;
                }
                Err(failure) => failure,
            };
            let severity = error::severity(&failure.error);
            let error = Shared::new(failure.error);
            if severity == Severity::Broken {
                self.mark_broken(error.clone());
            }
            self.undo().await;
            match severity {
                Severity::Broken => return settle_all(group, || StoreError::Failed(error.clone().into())),
                Severity::Busy if attempt < MAX_ATTEMPTS => {
                    attempt += 1;
                    tracing::debug!(%error, attempt, "another process holds the database");
                }
                Severity::Busy => return settle_all(group, || StoreError::Unavailable(error.clone().into())),
                // Which one it was shows when each is done by itself.
                Severity::Statement if failure.at.len() > 1 && batching == Batching::ByKind => {
                    batching = Batching::OneByOne
                }
                // The others of the group did nothing wrong: they are done again without this one.
                Severity::Statement if failure.at.len() == 1 => {
                    group.remove(failure.at.start).settle(Err(StoreError::Failed(error.into())));
                }
                Severity::Statement => return settle_all(group, || StoreError::Failed(error.clone().into())),
            }
        }
    }

    async fn transaction(&mut self, group: &mut [Waiting], batching: Batching) -> Result<(), Failure> {
        let trips = if group.len() > 1 { Trips::Parts } else { Trips::Few };
        let all = 0..group.len();
        let mut script = Script::new(&mut self.connection, trips);
        // A deferred transaction that reads first cannot be upgraded once somebody else has written.
        script.add("BEGIN IMMEDIATE");
        let mut from = 0;
        while let Some(kind) = group.get(from).map(|entry| entry.kind()) {
            let count = match batching {
                Batching::OneByOne => 1,
                Batching::ByKind => of_kind(group.get_mut(from..).unwrap_or_default(), kind.id),
            };
            let batch = from..from + count;
            let entries = group.get_mut(batch.clone()).unwrap_or_default();
            let applied = async {
                (kind.apply_all)(entries, &mut script).await?;
                match batching {
                    // Which one fails has to show.
                    Batching::OneByOne => script.flush().await,
                    Batching::ByKind => Ok(()),
                }
            };
            let at = match batching {
                Batching::OneByOne => batch,
                Batching::ByKind => all.clone(),
            };
            applied.await.map_err(|error| Failure { error, at })?;
            from += count;
        }
        script.commit().await.map_err(|error| Failure { error, at: all })
    }

    /// Leaves the failed transaction behind, if there is one: it may not have begun, and SQLite ends it by itself after
    /// some errors. A connection whose state is not known is replaced.
    async fn undo(&mut self) {
        match sqlx::query("ROLLBACK").execute(&mut self.connection).await {
            Ok(_) => return,
            Err(error) if error.to_string().contains("no transaction is active") => return,
            Err(error) => tracing::debug!(%error, "the transaction cannot be rolled back; the connection is replaced"),
        }
        match open::reopen(&self.options, self.durability).await {
            Ok(fresh) => open::close(std::mem::replace(&mut self.connection, fresh)).await,
            Err(error) => self.mark_broken(Shared::new(sqlx::Error::Io(std::io::Error::other(error)))),
        }
    }

    fn mark_broken(&self, error: Shared) {
        tracing::error!(
            %error,
            "the database failed; nothing is written any more: free the disk or repair it, then start again"
        );
        // Only the first failure is kept; later ones follow from it.
        self.state.broken.get_or_init(|| error);
        self.state.failed.cancel();
    }
}

/// Why a transaction was not committed.
struct Failure {
    error: sqlx::Error,
    /// The writes of the group that may have been the cause.
    at: Range<usize>,
}

/// How many writes are done together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Batching {
    /// All of a kind together.
    ByKind,
    /// One after the other.
    OneByOne,
}

/// Moves the writes of a kind to the front, in their order, and says how many there are.
fn of_kind(group: &mut [Waiting], kind: TypeId) -> usize {
    group.sort_by_key(|entry| entry.kind().id != kind);
    group.partition_point(|entry| entry.kind().id == kind)
}

fn settle_all(group: Vec<Waiting>, error: impl Fn() -> StoreError) {
    group.into_iter().for_each(|entry| entry.settle(Err(error())));
}

#[cfg(test)]
#[path = "writer_tests.rs"]
mod tests;
