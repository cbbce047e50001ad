//! A store that fails on purpose, for `tests/chaos`. It exists with the cargo feature `failpoints` only, and is told
//! what to do by two variables:
//!
//! * `HAMES_FAILPOINT=commit:before:N` or `commit:after:N`: the process aborts at the N-th commit of a creation, a step
//!   or a claim that took something, before or after it is durable. A claim has no `before`: nobody knows yet whether it
//!   takes anything.
//! * `HAMES_BUG=NAME`: the store is broken in the way of a [`Bug`], which the checker of the experiments has to find.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::{
    Backlog, ClaimedRun, Committed, Created, Erasure, KeptAnswer, NewRun, Post, RunFilter, StepCommit, Store,
    StoreError,
};
use crate::domain::{Event, EventKind, InboxItem, InboxNumber, Message, Run, RunId, Seq, TenantId, Timestamp};

/// How long a commit that was answered too early waits for its turn.
const LATE: Duration = Duration::from_millis(20);
/// Most commits that wait for their turn.
const MAX_LATE: usize = 4096;
/// One of so many new runs is lost.
const LOST_OF: u64 = 4;

/// A way to be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// Some runs are acknowledged and never stored.
    LoseRun,
    /// Steps are answered before they are stored.
    PublishBeforeCommit,
    /// Steps that start calls are answered before they are stored.
    IntentAfterStart,
    /// Outcomes of calls are not stored.
    ForgetOutcome,
    /// Outcomes of calls are stored twice.
    TwoOutcomes,
    /// The last event is stored twice.
    DoubleEnd,
    /// An event is stored after the last one.
    LateEvent,
    /// Ends of model calls are not stored.
    DropEvent,
    /// Events are told of with a number that is one too high.
    Renumber,
    /// A reader that goes on from an event misses the next one.
    ResumeOffByOne,
    /// The tokens of a step are added twice.
    UsageTwice,
    /// Steps are stored whoever hands them in.
    NoFence,
}

impl Bug {
    const ALL: [(&str, Self); 12] = [
        ("lose_run", Self::LoseRun),
        ("publish_before_commit", Self::PublishBeforeCommit),
        ("intent_after_start", Self::IntentAfterStart),
        ("forget_outcome", Self::ForgetOutcome),
        ("two_outcomes", Self::TwoOutcomes),
        ("double_end", Self::DoubleEnd),
        ("late_event", Self::LateEvent),
        ("drop_event", Self::DropEvent),
        ("renumber", Self::Renumber),
        ("resume_off_by_one", Self::ResumeOffByOne),
        ("usage_twice", Self::UsageTwice),
        ("no_fence", Self::NoFence),
    ];
}

/// Where the process aborts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Abort {
    Before(u64),
    After(u64),
}

/// Wraps a store when the environment asks for it.
///
/// # Errors
/// A variable names nothing that is known here.
pub(super) fn wrap(inner: Arc<dyn Store>) -> Result<Arc<dyn Store>, StoreError> {
    let abort = variable("HAMES_FAILPOINT").map(|text| abort_of(&text)).transpose()?;
    let bug = variable("HAMES_BUG").map(|text| bug_of(&text)).transpose()?;
    if abort.is_none() && bug.is_none() {
        return Ok(inner);
    }
    tracing::warn!("this server fails on purpose: HAMES_FAILPOINT or HAMES_BUG is set");
    let lane = match bug {
        Some(Bug::PublishBeforeCommit | Bug::IntentAfterStart) => Some(Lane::start(Arc::clone(&inner))),
        _ => None,
    };
    Ok(Arc::new(FailpointStore {
        inner,
        abort,
        bug,
        commits: AtomicU64::new(0),
        created: AtomicU64::new(0),
        last: Mutex::default(),
        lane,
    }))
}

#[expect(clippy::disallowed_methods, reason = "no setting: it must not exist where the feature is off")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn abort_of(text: &str) -> Result<Abort, StoreError> {
    let parts: Vec<&str> = text.split(':').collect();
    let abort = match parts[..] {
        ["commit", side, number] => match (side, number.parse()) {
            ("before", Ok(number)) => Some(Abort::Before(number)),
            ("after", Ok(number)) => Some(Abort::After(number)),
            _ => None,
        },
        _ => None,
    };
    abort.ok_or_else(|| {
        let expected = "expected commit:before:N or commit:after:N";
        StoreError::Unusable(format!("HAMES_FAILPOINT is `{text}`; {expected}"))
    })
}

fn bug_of(text: &str) -> Result<Bug, StoreError> {
    Bug::ALL.into_iter().find(|(name, _)| *name == text).map(|(_, bug)| bug).ok_or_else(|| {
        let names = Bug::ALL.map(|(name, _)| name).join(", ");
        StoreError::Unusable(format!("HAMES_BUG is `{text}`; expected one of {names}"))
    })
}

struct FailpointStore {
    inner: Arc<dyn Store>,
    abort: Option<Abort>,
    bug: Option<Bug>,
    commits: AtomicU64,
    created: AtomicU64,
    /// The last number of each run that was told of.
    last: Mutex<HashMap<RunId, Seq>>,
    lane: Option<Lane>,
}

impl FailpointStore {
    /// The number of a commit that is about to be made.
    fn before(&self) -> u64 {
        let number = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
        if self.abort == Some(Abort::Before(number)) {
            std::process::abort();
        }
        number
    }

    fn after(&self, number: u64) {
        if self.abort == Some(Abort::After(number)) {
            std::process::abort();
        }
    }

    /// Counts a claim that took something.
    fn claimed(&self, claimed: &[ClaimedRun]) {
        if claimed.is_empty() {
            return;
        }
        for claimed in claimed {
            self.told(claimed.run.id, claimed.run.last_seq);
        }
        self.after(self.commits.fetch_add(1, Ordering::SeqCst) + 1);
    }

    fn told(&self, run: RunId, seq: Seq) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).insert(run, seq);
    }

    /// Events of a run as they will be numbered, as far as is known here.
    fn number(&self, run: RunId, time: Timestamp, bodies: &[crate::domain::EncodedBody]) -> Vec<Event> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last.entry(run).or_insert(0);
        let events = bodies.iter().map(|body| {
            *last += 1;
            Event { run, seq: *last, time, body: body.clone() }
        });
        events.collect()
    }

    /// Does to a step what the bug does to it before it is stored.
    fn spoil(&self, commit: &mut StepCommit) {
        let doubled = |kind: EventKind, commit: &mut StepCommit| {
            let events = std::mem::take(&mut commit.events);
            commit.events = events
                .into_iter()
                .flat_map(|event| {
                    let count = if event.kind == kind { 2 } else { 1 };
                    std::iter::repeat_n(event, count)
                })
                .collect();
        };
        match self.bug {
            Some(Bug::ForgetOutcome) => commit.events.retain(|event| event.kind != EventKind::ToolEnd),
            Some(Bug::DropEvent) => commit.events.retain(|event| event.kind != EventKind::ModelEnd),
            Some(Bug::TwoOutcomes) => doubled(EventKind::ToolEnd, commit),
            Some(Bug::DoubleEnd) => doubled(EventKind::RunEnd, commit),
            Some(Bug::LateEvent) if has(commit, EventKind::RunEnd) => commit.events.push(cancel_requested()),
            Some(Bug::UsageTwice) => commit.usage.input_tokens *= 2,
            _ => {}
        }
    }
}

fn has(commit: &StepCommit, kind: EventKind) -> bool {
    commit.events.iter().any(|event| event.kind == kind)
}

fn cancel_requested() -> crate::domain::EncodedBody {
    let json = bytes::Bytes::from_static(br#"{"type":"cancel_requested"}"#);
    crate::domain::EncodedBody { kind: EventKind::CancelRequested, json }
}

/// A step, and who waits for it; nobody does when it was answered early.
type Late = (StepCommit, Option<oneshot::Sender<Result<Committed, StoreError>>>);

/// Commits one after the other, each some time after it was handed in.
struct Lane {
    sender: mpsc::Sender<Late>,
    _task: JoinSet<()>,
}

impl Lane {
    fn start(inner: Arc<dyn Store>) -> Self {
        let (sender, mut receiver) = mpsc::channel::<Late>(MAX_LATE);
        let mut task = JoinSet::new();
        task.spawn(async move {
            while let Some((commit, reply)) = receiver.recv().await {
                if reply.is_none() {
                    tokio::time::sleep(LATE).await;
                }
                let result = inner.commit_step(commit).await;
                match (reply, result) {
                    (Some(reply), result) => drop(reply.send(result)),
                    (None, Ok(_)) => {}
                    (None, Err(error)) => tracing::error!(%error, "a step that was answered early is not stored"),
                }
            }
        });
        Self { sender, _task: task }
    }
}

fn gone() -> StoreError {
    StoreError::Unavailable("the late commits have ended".into())
}

#[async_trait]
impl Store for FailpointStore {
    async fn create_run(&self, new: NewRun) -> Result<Created, StoreError> {
        let id = new.run.id;
        let is_lost = self.created.fetch_add(1, Ordering::SeqCst) % LOST_OF == LOST_OF - 1;
        if self.bug == Some(Bug::LoseRun) && is_lost {
            let events = self.number(id, new.run.created_at, &new.events);
            return Ok(Created { run: new.run, events, interrupted: Vec::new() });
        }
        let number = self.before();
        let created = self.inner.create_run(new).await?;
        self.after(number);
        self.told(id, created.run.last_seq);
        Ok(created)
    }

    async fn run(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        self.inner.run(tenant, id).await
    }

    async fn list_runs(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        before: Option<RunId>,
        limit: u32,
    ) -> Result<Vec<Run>, StoreError> {
        self.inner.list_runs(tenant, filter, before, limit).await
    }

    async fn events_after(
        &self,
        tenant: &TenantId,
        id: RunId,
        after: Seq,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        if self.bug == Some(Bug::ResumeOffByOne) && after > 0 {
            let mut events = self.inner.events_after(tenant, id, after + 1, limit).await?;
            events.iter_mut().for_each(|event| event.seq -= 1);
            return Ok(events);
        }
        self.inner.events_after(tenant, id, after, limit).await
    }

    async fn transcript(&self, tenant: &TenantId, id: RunId) -> Result<Option<Vec<Message>>, StoreError> {
        self.inner.transcript(tenant, id).await
    }

    async fn claim(&self, limit: u32, now: Timestamp) -> Result<Vec<ClaimedRun>, StoreError> {
        let claimed = self.inner.claim(limit, now).await?;
        self.claimed(&claimed);
        Ok(claimed)
    }

    async fn load(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        let loaded = self.inner.load(tenant, id).await?;
        if let Some(loaded) = &loaded {
            self.told(id, loaded.run.last_seq);
        }
        Ok(loaded)
    }

    async fn renew_lease(&self) -> Result<(), StoreError> {
        self.inner.renew_lease().await
    }

    async fn release(&self, parked: &[RunId]) -> Result<(), StoreError> {
        self.inner.release(parked).await
    }

    async fn held(&self) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        self.inner.held().await
    }

    async fn post(&self, post: Post) -> Result<Option<Run>, StoreError> {
        self.inner.post(post).await
    }

    async fn inbox(&self, id: RunId, after: InboxNumber) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError> {
        self.inner.inbox(id, after).await
    }

    async fn due(&self, now: Timestamp, limit: u32) -> Result<Vec<(TenantId, RunId)>, StoreError> {
        self.inner.due(now, limit).await
    }

    async fn kept_answer(
        &self,
        tenant: &TenantId,
        key: &str,
        now: Timestamp,
    ) -> Result<Option<KeptAnswer>, StoreError> {
        self.inner.kept_answer(tenant, key, now).await
    }

    async fn erase(&self, tenant: &TenantId, id: RunId, now: Timestamp) -> Result<Erasure, StoreError> {
        self.inner.erase(tenant, id, now).await
    }

    async fn is_erased(&self, tenant: &TenantId, id: RunId) -> Result<bool, StoreError> {
        self.inner.is_erased(tenant, id).await
    }

    async fn sweep(&self, finished_before: Option<Timestamp>, now: Timestamp, limit: u32) -> Result<u64, StoreError> {
        self.inner.sweep(finished_before, now, limit).await
    }

    async fn reclaim(&self, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
        let claimed = self.inner.reclaim(tenant, id).await?;
        self.claimed(claimed.as_slice());
        Ok(claimed)
    }

    async fn commit_step(&self, mut commit: StepCommit) -> Result<Committed, StoreError> {
        self.spoil(&mut commit);
        if let Some(lane) = &self.lane {
            let is_early = self.bug == Some(Bug::PublishBeforeCommit) || has(&commit, EventKind::ToolStart);
            if is_early {
                let events = self.number(commit.run, commit.time, &commit.events);
                let cancel_requested_at = commit.cancel_requested_at;
                lane.sender.send((commit, None)).await.map_err(|_| gone())?;
                return Ok(Committed { events, cancel_requested_at, inbox: 0 });
            }
            let run = commit.run;
            let (reply, answer) = oneshot::channel();
            lane.sender.send((commit, Some(reply))).await.map_err(|_| gone())?;
            let committed = answer.await.map_err(|_| gone())??;
            if let Some(last) = committed.events.last() {
                self.told(run, last.seq);
            }
            return Ok(committed);
        }
        if self.bug == Some(Bug::NoFence)
            && let Some(run) = self.inner.run(&TenantId::local(), commit.run).await?
        {
            (commit.generation, commit.after) = (run.generation, run.last_seq);
        }
        let number = self.before();
        let mut committed = self.inner.commit_step(commit).await?;
        self.after(number);
        if self.bug == Some(Bug::Renumber) {
            committed.events.iter_mut().for_each(|event| event.seq += 1);
        }
        Ok(committed)
    }

    async fn end_unreadable(
        &self,
        tenant: &TenantId,
        id: RunId,
        reason: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        self.inner.end_unreadable(tenant, id, reason, now).await
    }

    async fn request_cancel(&self, tenant: &TenantId, id: RunId, at: Timestamp) -> Result<Option<Run>, StoreError> {
        self.inner.request_cancel(tenant, id, at).await
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        self.inner.backlog().await
    }

    async fn health(&self) -> Result<(), StoreError> {
        self.inner.health().await
    }

    async fn failed(&self) {
        self.inner.failed().await;
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
