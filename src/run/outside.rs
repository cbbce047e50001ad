//! What comes from outside for an active run: answers it waits for, messages, new bounds.

use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard};
use tracing::Instrument as _;

use super::commit::{Author, CommitError, commit};
use super::resolve::{Amendment, raise_limits};
use super::supervisor::{Inner, Supervisor};
use super::timeline::Timeline;
use crate::agent::{Answer, AnswerProblem, Observation, UnexpectedObservation};
use crate::domain::{FieldError, InboxItem, Part, Run, RunId, RunPatch, RunStatus, TenantId};
use crate::store::{KeyUse, Post, StoreError};
use crate::telemetry::run_log_context;

/// Why something for a run was not taken. Nothing was stored.
#[derive(Debug, thiserror::Error)]
pub enum OutsideError {
    /// The caller has no such run.
    #[error("there is no such run")]
    Unknown,
    /// The run does not wait for answers.
    #[error("the run is {}; it does not wait for answers", .0.status.name().as_str())]
    NotWaiting(Box<Run>),
    /// The run has ended.
    #[error("the run has ended as {}", .0.status.name().as_str())]
    Ended(Box<Run>),
    /// An answer does not fit.
    #[error(transparent)]
    Answer(#[from] AnswerProblem),
    /// Another delivery came first.
    #[error("another answer came at the same time and was taken; read the run and answer what is still pending")]
    Raced,
    /// The request is wrong.
    #[error("the request is invalid")]
    Invalid(Vec<FieldError>),
    /// The store failed, or the key was used before.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// hames is broken.
    #[error("{0}")]
    Internal(String),
}

/// Lets deliveries to one run come one after the other. Two of the same content at the same moment could not be told
/// from one that is stored twice. Runs may share a place; that costs a wait.
pub(super) struct Deliveries([Mutex<()>; 64]);

impl Default for Deliveries {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Deliveries {
    async fn turn(&self, id: RunId) -> Option<MutexGuard<'_, ()>> {
        let [.., last] = id.uuid().into_bytes();
        let place = self.0.get(usize::from(last) % self.0.len())?;
        Some(place.lock().await)
    }
}

impl Supervisor {
    /// Delivers answers to a waiting run: stored before this returns. A result that was delivered before is passed over.
    /// Once nothing is waited for any more, the run is queued.
    pub async fn deliver(
        &self,
        tenant: &TenantId,
        id: RunId,
        answers: Vec<Answer>,
        key: Option<KeyUse>,
    ) -> Result<Run, OutsideError> {
        let (inner, tenant) = (Arc::clone(&self.inner), tenant.clone());
        // A caller that goes away does not take the answers with it.
        let delivery = async move { inner.deliver(&tenant, id, answers, key).instrument(run_log_context(id)).await };
        finished(self.inner.tasks.spawn(delivery).await)
    }

    /// Says something to an active run; it enters before the next model call.
    pub async fn say(
        &self,
        tenant: &TenantId,
        id: RunId,
        content: Vec<Part>,
        key: Option<KeyUse>,
    ) -> Result<Run, OutsideError> {
        let post = Post { tenant: tenant.clone(), run: id, item: InboxItem::Message { content }, key };
        let inner = Arc::clone(&self.inner);
        finished(self.inner.tasks.spawn(async move { inner.post(post).await }).await)
    }

    /// Raises limits of an active run and replaces its labels.
    pub async fn amend(&self, tenant: &TenantId, id: RunId, patch: RunPatch) -> Result<Run, OutsideError> {
        let (inner, tenant) = (Arc::clone(&self.inner), tenant.clone());
        finished(self.inner.tasks.spawn(async move { inner.amend(&tenant, id, patch).await }).await)
    }
}

fn finished<T>(joined: Result<Result<T, OutsideError>, tokio::task::JoinError>) -> Result<T, OutsideError> {
    joined.unwrap_or_else(|error| Err(OutsideError::Internal(format!("the change failed: {error}"))))
}

impl Inner {
    async fn deliver(
        self: &Arc<Self>,
        tenant: &TenantId,
        id: RunId,
        answers: Vec<Answer>,
        key: Option<KeyUse>,
    ) -> Result<Run, OutsideError> {
        let services = &self.services;
        let _turn = self.deliveries.turn(id).await;
        let loaded = services.store.load(tenant, id).await?.ok_or(OutsideError::Unknown)?;
        let max_chars = loaded.spec.context.max_tool_result_chars;
        let is_open = |answer: &Answer| !answer.is_taken(&loaded.transcript, max_chars);
        let answers = match answers.iter().any(is_open) {
            true => answers.into_iter().filter(is_open).collect(),
            false if key.is_none() => return Ok(loaded.run),
            // Under a key, something has to change: otherwise it could be used again.
            false => answers,
        };
        match &loaded.run.status {
            RunStatus::Waiting { .. } => {}
            RunStatus::Queued { .. } | RunStatus::Running { .. } | RunStatus::Finished { .. } => {
                return Err(OutsideError::NotWaiting(Box::new(loaded.run)));
            }
        }
        let mut work = self.restore(loaded).map_err(|error| OutsideError::Internal(error.to_string()))?;
        let transition = match work.machine.observe(Observation::Answers(answers), &work.tools) {
            Ok(transition) => transition,
            Err(UnexpectedObservation::Answer(problem)) => return Err(problem.into()),
            Err(error) => return Err(OutsideError::Internal(error.to_string())),
        };
        let now = services.clock.now();
        let moment = Timeline::of(&work.run, now).moment(now);
        let committed =
            commit(services.store.as_ref(), &mut work, transition, moment, Author::Other(key.as_ref())).await;
        work.live.let_go();
        match committed {
            Ok(()) => {}
            Err(CommitError::Store(StoreError::Fenced { .. })) => return Err(OutsideError::Raced),
            Err(CommitError::Store(error)) => return Err(error.into()),
            Err(error) => return Err(OutsideError::Internal(error.to_string())),
        }
        if let RunStatus::Queued { .. } = work.run.status {
            self.queue.came_back();
        }
        Ok(work.run)
    }

    async fn post(&self, post: Post) -> Result<Run, OutsideError> {
        let id = post.run;
        let run = self.services.store.post(post).await?.ok_or(OutsideError::Unknown)?;
        if run.status.is_finished() {
            return Err(OutsideError::Ended(Box::new(run)));
        }
        self.active.posted(id);
        Ok(run)
    }

    async fn amend(&self, tenant: &TenantId, id: RunId, patch: RunPatch) -> Result<Run, OutsideError> {
        let store = &self.services.store;
        let run = store.run(tenant, id).await?.ok_or(OutsideError::Unknown)?;
        if run.status.is_finished() {
            return Err(OutsideError::Ended(Box::new(run)));
        }
        let Amendment { limits, metadata } =
            raise_limits(&run, &patch, &self.services.ceilings).map_err(OutsideError::Invalid)?;
        if limits.is_none() && metadata.is_none() {
            return Ok(run);
        }
        let item = InboxItem::Amendment { limits, metadata };
        self.post(Post { tenant: tenant.clone(), run: id, item, key: None }).await
    }
}
