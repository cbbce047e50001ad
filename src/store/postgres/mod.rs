//! The store on Postgres: one database, any number of servers, each with its connections and a lease.
//!
//! Every write is one statement where it can be, so that its row is locked for one trip. The server commits those of
//! all connections in groups by itself.

mod claim;
mod create;
mod erase;
mod error;
mod key;
mod open;
mod pool;
mod read;
mod step;
mod text;
mod write;

use std::sync::Arc;

use async_trait::async_trait;

use self::claim::Holder;
pub use self::pool::Timing;
use self::pool::{Kind, Pool, Span, carry_out};
use super::prepared::{PreparedRun, PreparedStep};
use super::{
    Backlog, ClaimedRun, CommitObserver, Committed, Created, Erasure, KeptAnswer, NewRun, Post, RunFilter, StepCommit,
    Store, StoreError, WorkerId,
};
use crate::config::StoreConfig;
use crate::domain::{Event, InboxItem, InboxNumber, Message, Run, RunId, Seq, TenantId, Timestamp};

/// A database that this process shares with others.
pub struct PostgresStore {
    pool: Pool,
    worker: WorkerId,
}

impl PostgresStore {
    /// Connects, creates what the database lacks, and tells that this process lives. `observer` is told of every
    /// commit. `worker` names this process.
    ///
    /// # Errors
    /// [`StoreError::Unusable`] says what has to be changed before a server can start.
    pub async fn open(
        config: &StoreConfig,
        worker: WorkerId,
        observer: Arc<dyn CommitObserver>,
        timing: Timing,
    ) -> Result<Self, StoreError> {
        let options = open::open(config).await?;
        let pool = Pool::new(options, config.durability, config.max_connections, timing, observer);
        let store = Self { pool, worker };
        store.renew_lease().await?;
        Ok(store)
    }

    fn holder(&self) -> Holder<'_> {
        Holder { worker: self.worker.as_str(), lease: self.pool.timing().lease }
    }
}

const READ: Kind = Kind::read(Span::Work);
const FRONT_READ: Kind = Kind::read(Span::Front);
const WRITE: Kind = Kind::write(Span::Work);
const FRONT_WRITE: Kind = Kind::write(Span::Front);

#[async_trait]
impl Store for PostgresStore {
    async fn create_run(&self, new: NewRun) -> Result<Created, StoreError> {
        let new = PreparedRun::new(new, self.worker.as_str())?;
        let kind = if create::is_placed(&new) { FRONT_WRITE.in_transaction() } else { FRONT_WRITE };
        carry_out!(self.pool, kind, |connection, again| create::create(connection, &new, again))
    }

    async fn run(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::find_run(connection, tenant, id))
    }

    async fn list_runs(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        before: Option<RunId>,
        limit: u32,
    ) -> Result<Vec<Run>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::list(connection, tenant, filter, before, limit))
    }

    async fn events_after(
        &self,
        tenant: &TenantId,
        id: RunId,
        after: Seq,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::events_after(connection, tenant, id, after, limit))
    }

    async fn transcript(&self, tenant: &TenantId, id: RunId) -> Result<Option<Vec<Message>>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::transcript(connection, tenant, id))
    }

    async fn claim(&self, limit: u32, now: Timestamp) -> Result<Vec<ClaimedRun>, StoreError> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (mut claimed, holder) = (Vec::new(), self.holder());
        // What is taken and not heard of is held, so a second attempt would take others.
        let kind = WRITE.in_transaction().once();
        while claimed.len() < limit {
            let portion = (limit - claimed.len()).min(claim::PORTION);
            let taken = carry_out!(self.pool, kind, |connection| claim::claim(connection, holder, portion, now));
            match taken {
                Ok(taken) => {
                    claimed.extend(taken.claimed);
                    if taken.is_last {
                        break;
                    }
                }
                Err(error) if claimed.is_empty() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "fewer runs are claimed than there may be");
                    break;
                }
            }
        }
        Ok(claimed)
    }

    async fn renew_lease(&self) -> Result<(), StoreError> {
        let holder = self.holder();
        carry_out!(self.pool, WRITE, |connection| async { Ok(claim::renew(connection, holder).await?) })
    }

    async fn release(&self, parked: &[RunId]) -> Result<(), StoreError> {
        let worker = self.worker.as_str();
        carry_out!(self.pool, WRITE, |connection| async { Ok(claim::release(connection, worker, parked).await?) })
    }

    async fn held(&self) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::held(connection, self.worker.as_str()))
    }

    async fn load(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        carry_out!(self.pool, FRONT_READ.in_transaction(), |connection| read::load(connection, tenant, id))
    }

    async fn reclaim(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        let holder = self.holder();
        carry_out!(self.pool, WRITE.in_transaction(), |connection| claim::reclaim(connection, holder, tenant, id))
    }

    async fn commit_step(&self, commit: StepCommit) -> Result<Committed, StoreError> {
        let step = PreparedStep::new(commit)?;
        match &step.key {
            None => carry_out!(self.pool, WRITE, |connection| step::commit(connection, &step)),
            Some(key) => {
                let kind = FRONT_WRITE.in_transaction();
                carry_out!(self.pool, kind, |connection, again| step::commit_with_key(connection, &step, key, again))
            }
        }
    }

    async fn end_unreadable(
        &self,
        tenant: &TenantId,
        id: RunId,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let kind = WRITE.in_transaction();
        carry_out!(self.pool, kind, |connection| claim::end_unreadable(connection, tenant, id, reason, now))
    }

    async fn request_cancel(&self, tenant: &TenantId, id: RunId, at: Timestamp) -> Result<Option<Run>, StoreError> {
        carry_out!(self.pool, FRONT_WRITE, |connection| write::request_cancel(connection, tenant, id, at))
    }

    async fn post(&self, post: Post) -> Result<Option<Run>, StoreError> {
        let said = write::PreparedPost::new(post)?;
        // With a key, a second attempt finds what the first one kept, and its caller is told of that.
        let kind = FRONT_WRITE.once();
        let kind = if said.is_transaction() { kind.in_transaction() } else { kind };
        carry_out!(self.pool, kind, |connection| write::post(connection, &said))
    }

    async fn inbox(&self, id: RunId, after: InboxNumber) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::inbox(connection, id, after))
    }

    async fn due(&self, now: Timestamp, limit: u32) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        carry_out!(self.pool, READ, |connection| read::due(connection, now, limit))
    }

    async fn kept_answer(
        &self,
        tenant: &TenantId,
        key: &str,
        now: Timestamp,
    ) -> Result<Option<KeptAnswer>, StoreError> {
        carry_out!(self.pool, FRONT_READ, |connection| key::find(connection, tenant, key, now))
    }

    async fn erase(&self, tenant: &TenantId, id: RunId, now: Timestamp) -> Result<Erasure, StoreError> {
        carry_out!(self.pool, FRONT_WRITE, |connection| erase::erase(connection, tenant, id, now))
    }

    async fn is_erased(&self, tenant: &TenantId, id: RunId) -> Result<bool, StoreError> {
        carry_out!(self.pool, READ, |connection| erase::is_erased(connection, tenant, id))
    }

    async fn sweep(&self, finished_before: Option<Timestamp>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        let kind = Kind::write(Span::Sweep);
        carry_out!(self.pool, kind, |connection| erase::forget(connection, now))?;
        match finished_before {
            None => Ok(0),
            Some(before) => {
                carry_out!(self.pool, kind.once(), |connection| erase::sweep(connection, before, now, limit))
            }
        }
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        let holder = self.holder();
        carry_out!(self.pool, FRONT_READ, |connection| read::backlog(connection, holder))
    }

    async fn health(&self) -> Result<(), StoreError> {
        carry_out!(self.pool, FRONT_READ, |connection| read::health(connection))?;
        self.pool.refuse_broken()
    }

    async fn failed(&self) {
        self.pool.failed().await;
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}
