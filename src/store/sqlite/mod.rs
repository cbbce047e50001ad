//! The store on SQLite: one file, one server, one writing task, several reading connections.

mod claim;
mod create;
mod erase;
mod error;
mod key;
mod open;
mod read;
mod script;
mod step;
mod write;
mod writer;

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::sqlite::{SqlitePool, SqlitePoolOptions};

use self::writer::Writer;
use super::{
    Backlog, ClaimedRun, CommitObserver, Committed, Created, Erasure, KeptAnswer, NewRun, Post, RunFilter, StepCommit,
    Store, StoreError, WorkerId,
};
use crate::config::StoreConfig;
use crate::domain::{Event, InboxItem, InboxNumber, Message, Run, RunId, Seq, TenantId, Timestamp};

/// A database file held by this process.
pub struct SqliteStore {
    writer: Writer,
    readers: SqlitePool,
    worker: WorkerId,
}

impl SqliteStore {
    /// Opens the file, creates what it lacks, and takes it for this process alone. `observer` is told of every commit.
    /// `worker` names this process.
    pub async fn open(
        config: &StoreConfig,
        worker: WorkerId,
        observer: Arc<dyn CommitObserver>,
    ) -> Result<Self, StoreError> {
        let opened = open::open(config).await?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let cores = u32::try_from(cores).unwrap_or(u32::MAX);
        let readers = SqlitePoolOptions::new()
            .max_connections(cores)
            .min_connections(cores)
            .acquire_timeout(open::ACQUIRE_TIMEOUT)
            // A file does not go away like a server does, so connections need no renewal and no test.
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_with(opened.reading.clone())
            .await
            .map_err(error::store_error)?;
        let writer = Writer::start(opened, config.durability, observer);
        Ok(Self { writer, readers, worker })
    }

    fn worker(&self) -> String {
        self.worker.as_str().to_owned()
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn create_run(&self, new: NewRun) -> Result<Created, StoreError> {
        self.writer.write(create::CreateRun::new(new, self.worker.as_str())?).await
    }

    async fn run(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        read::run(&self.readers, tenant, id).await
    }

    async fn list_runs(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        before: Option<RunId>,
        limit: u32,
    ) -> Result<Vec<Run>, StoreError> {
        read::list(&self.readers, tenant, filter, before, limit).await
    }

    async fn events_after(
        &self,
        tenant: &TenantId,
        id: RunId,
        after: Seq,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        read::events_after(&self.readers, tenant, id, after, limit).await
    }

    async fn transcript(&self, tenant: &TenantId, id: RunId) -> Result<Option<Vec<Message>>, StoreError> {
        read::transcript(&self.readers, tenant, id).await
    }

    async fn claim(&self, limit: u32, now: Timestamp) -> Result<Vec<ClaimedRun>, StoreError> {
        self.writer.write(claim::Claim { limit, now, worker: self.worker() }).await
    }

    async fn renew_lease(&self) -> Result<(), StoreError> {
        // Whoever has the file has its runs.
        Ok(())
    }

    async fn release(&self, parked: &[RunId]) -> Result<(), StoreError> {
        self.writer.write(claim::Release { worker: self.worker(), parked: parked.to_vec() }).await
    }

    async fn held(&self) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        read::held(&self.readers, self.worker.as_str()).await
    }

    async fn load(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        read::load(&self.readers, tenant, id).await
    }

    async fn reclaim(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        self.writer.write(claim::Reclaim { tenant: tenant.clone(), id, worker: self.worker() }).await
    }

    async fn commit_step(&self, commit: StepCommit) -> Result<Committed, StoreError> {
        self.writer.write(step::CommitStep::new(commit)?).await
    }

    async fn end_unreadable(
        &self,
        tenant: &TenantId,
        id: RunId,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        self.writer.write(claim::EndUnreadable { tenant: tenant.clone(), id, reason: reason.to_owned(), now }).await
    }

    async fn request_cancel(&self, tenant: &TenantId, id: RunId, at: Timestamp) -> Result<Option<Run>, StoreError> {
        self.writer.write(write::RequestCancel { tenant: tenant.clone(), id, at }).await
    }

    async fn post(&self, post: Post) -> Result<Option<Run>, StoreError> {
        self.writer.write(write::PostItem::new(post)?).await
    }

    async fn inbox(&self, id: RunId, after: InboxNumber) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError> {
        read::inbox(&self.readers, id, after).await
    }

    async fn due(&self, now: Timestamp, limit: u32) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        read::due(&self.readers, now, limit).await
    }

    async fn kept_answer(
        &self,
        tenant: &TenantId,
        key: &str,
        now: Timestamp,
    ) -> Result<Option<KeptAnswer>, StoreError> {
        key::find(&self.readers, tenant, key, now).await.map_err(error::store_error)
    }

    async fn erase(&self, tenant: &TenantId, id: RunId, now: Timestamp) -> Result<Erasure, StoreError> {
        self.writer.write(erase::Erase { tenant: tenant.clone(), id, now }).await
    }

    async fn is_erased(&self, tenant: &TenantId, id: RunId) -> Result<bool, StoreError> {
        read::is_erased(&self.readers, tenant, id).await
    }

    async fn sweep(&self, finished_before: Option<Timestamp>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.writer.write(erase::Sweep { finished_before, now, limit }).await
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        read::backlog(&self.readers, self.worker.as_str()).await
    }

    async fn health(&self) -> Result<(), StoreError> {
        self.writer.write(write::Probe).await
    }

    async fn failed(&self) {
        self.writer.failed().await;
    }

    async fn close(&self) {
        // The writer's connection goes last: it moves the write-ahead log into the file.
        self.readers.close().await;
        self.writer.close().await;
    }
}
