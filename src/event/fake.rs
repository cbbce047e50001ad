//! A store for tests: one run and its log in memory, with the failures a test asks for.

use std::sync::Mutex;

use async_trait::async_trait;

use crate::domain::{
    Event, InboxItem, InboxNumber, Limits, Message, ModelRef, Run, RunId, RunStatus, Seq, TenantId, Timestamp, Usage,
};
use crate::store::{
    Backlog, ClaimedRun, Committed, Created, Erasure, KeptAnswer, NewRun, Post, RunFilter, StepCommit, Store,
    StoreError,
};

/// One run of the local tenant. Panics on any query for more than a page, and on verbs a reader has no use for.
pub(super) struct FakeStore {
    inner: Mutex<Inner>,
}

struct Inner {
    run: Run,
    log: Vec<Event>,
    reads: usize,
    largest_page: usize,
    down: bool,
}

pub(super) fn run(id: RunId) -> Run {
    Run {
        id,
        tenant: TenantId::local(),
        generation: 1,
        status: RunStatus::Queued { paused: None },
        agent: "default".into(),
        model: ModelRef { provider: "p".into(), model: "m".into() },
        thread: None,
        continues: None,
        limits: Limits::default(),
        metadata: Default::default(),
        steps: 0,
        tool_calls: 0,
        usage: Usage::default(),
        created_at: Timestamp::from_millis(0),
        cancel_requested_at: None,
        last_seq: 0,
        crashes: 0,
    }
}

impl FakeStore {
    pub(super) fn new(run: Run) -> Self {
        Self { inner: Mutex::new(Inner { run, log: Vec::new(), reads: 0, largest_page: 0, down: false }) }
    }

    pub(super) fn commit(&self, events: &[Event], run: &Run) {
        let mut inner = self.inner.lock().unwrap();
        for event in events {
            assert_eq!(event.seq, inner.log.len() as Seq + 1);
            inner.log.push(event.clone());
        }
        assert_eq!(run.last_seq, inner.log.len() as Seq);
        inner.run = run.clone();
    }

    pub(super) fn lose_event(&self, seq: Seq) {
        self.inner.lock().unwrap().log.retain(|event| event.seq != seq);
    }

    pub(super) fn set_down(&self, down: bool) {
        self.inner.lock().unwrap().down = down;
    }

    pub(super) fn log(&self) -> Vec<Event> {
        self.inner.lock().unwrap().log.clone()
    }

    /// How many pages were read, and the bytes of the largest.
    pub(super) fn pages(&self) -> (usize, usize) {
        let inner = self.inner.lock().unwrap();
        (inner.reads, inner.largest_page)
    }

    fn up(&self) -> Result<std::sync::MutexGuard<'_, Inner>, StoreError> {
        let inner = self.inner.lock().unwrap();
        if inner.down { Err(StoreError::Unavailable("down".into())) } else { Ok(inner) }
    }
}

#[async_trait]
impl Store for FakeStore {
    async fn run(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        let inner = self.up()?;
        Ok(Some(inner.run.clone()).filter(|run| run.id == id && run.tenant == *tenant))
    }

    async fn events_after(
        &self,
        tenant: &TenantId,
        id: RunId,
        after: Seq,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        assert!((1..=128).contains(&limit), "{limit}");
        let mut inner = self.up()?;
        assert_eq!((id, tenant), (inner.run.id, &inner.run.tenant));
        let page: Vec<_> = inner.log.iter().filter(|event| event.seq > after).take(limit as usize).cloned().collect();
        inner.reads += 1;
        inner.largest_page = inner.largest_page.max(page.iter().map(|event| event.body.json.len()).sum());
        Ok(page)
    }

    async fn create_run(&self, _: NewRun) -> Result<Created, StoreError> {
        unreachable!("a reader creates no run")
    }

    async fn list_runs(&self, _: &TenantId, _: &RunFilter, _: Option<RunId>, _: u32) -> Result<Vec<Run>, StoreError> {
        unreachable!("a reader lists no runs")
    }

    async fn transcript(&self, _: &TenantId, _: RunId) -> Result<Option<Vec<Message>>, StoreError> {
        unreachable!("a reader reads events")
    }

    async fn claim(&self, _: u32, _: Timestamp) -> Result<Vec<ClaimedRun>, StoreError> {
        unreachable!("a reader claims nothing")
    }

    async fn load(&self, _: &TenantId, _: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        unreachable!("a reader drives nothing")
    }

    async fn renew_lease(&self) -> Result<(), StoreError> {
        unreachable!("a reader has no lease")
    }

    async fn release(&self, _parked: &[RunId]) -> Result<(), StoreError> {
        unreachable!("a reader has no runs")
    }

    async fn held(&self) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        unreachable!("a reader has no runs")
    }

    async fn post(&self, _: Post) -> Result<Option<Run>, StoreError> {
        unreachable!("a reader says nothing")
    }

    async fn inbox(&self, _: RunId, _: InboxNumber) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError> {
        unreachable!("a reader reads events")
    }

    async fn due(&self, _: Timestamp, _: u32) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        unreachable!("a reader ends nothing")
    }

    async fn kept_answer(&self, _: &TenantId, _: &str, _: Timestamp) -> Result<Option<KeptAnswer>, StoreError> {
        unreachable!("a reader uses no key")
    }

    async fn erase(&self, _: &TenantId, _: RunId, _: Timestamp) -> Result<Erasure, StoreError> {
        unreachable!("a reader erases nothing")
    }

    async fn is_erased(&self, _: &TenantId, _: RunId) -> Result<bool, StoreError> {
        unreachable!("a reader is told by whoever asks")
    }

    async fn sweep(&self, _: Option<Timestamp>, _: Timestamp, _: u32) -> Result<u64, StoreError> {
        unreachable!("a reader erases nothing")
    }

    async fn reclaim(&self, _tenant: &TenantId, _id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        unreachable!("a reader claims nothing")
    }

    async fn commit_step(&self, _: StepCommit) -> Result<Committed, StoreError> {
        unreachable!("a reader commits nothing")
    }

    async fn end_unreadable(&self, _: &TenantId, _: RunId, _: &str, _: Timestamp) -> Result<(), StoreError> {
        unreachable!("a reader ends nothing")
    }

    async fn failed(&self) {
        unreachable!("a reader does not end the process")
    }

    async fn request_cancel(&self, _: &TenantId, _: RunId, _: Timestamp) -> Result<Option<Run>, StoreError> {
        unreachable!("closing a stream cancels nothing")
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        unreachable!("a reader has no queue")
    }

    async fn health(&self) -> Result<(), StoreError> {
        self.up().map(drop)
    }

    async fn close(&self) {}
}
