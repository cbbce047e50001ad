//! Takes requests: a run is accepted, stored, and at work or in the queue; a run that is to end is told so.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::apart::{Apart, Start};
use super::commit::{Moment, apply, encode, publish};
use super::control::Active;
use super::driver::Origin;
use super::outside::Deliveries;
use super::queue::{Place, Queue, Slot};
use super::resolve::{Resolved, resolve};
use super::scratch::Scratch;
use super::services::Services;
use super::toolbox::ToolSets;
use crate::agent::Observation;
use crate::domain::{
    EventBody, FieldError, Run, RunId, RunRequest, RunStatus, TenantId, Timestamp, TraceContext, Usage,
};
use crate::store::{ClaimedRun, Created, Former, KeyUse, NewRun, StoreError};
use crate::telemetry::metric::RunCounts;
use crate::telemetry::run_log_context;

/// What a caller is told to wait when all places are taken.
const OVERLOAD_RETRY_AFTER: Duration = Duration::from_secs(5);
/// How often a cancel looks again for a run that is just changing hands.
const CANCEL_LOOK: Duration = Duration::from_millis(5);
/// How long a cancel looks for it. What is stored is found by whoever takes the run.
const CANCEL_PATIENCE: Duration = Duration::from_secs(1);

/// Takes requests and owns the runs at work. Cheap to clone.
#[derive(Clone)]
pub struct Supervisor {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) services: Arc<Services>,
    pub(super) scratch: Arc<Scratch>,
    pub(super) queue: Arc<Queue>,
    pub(super) tool_sets: ToolSets,
    pub(super) active: Arc<Active>,
    pub(super) tasks: TaskTracker,
    /// For runs that may have ended processes.
    pub(super) apart: Arc<Apart>,
    /// What is done by the clock; goes on while runs come to rest.
    upkeep: TaskTracker,
    /// Held while runs are taken from the store, until they are begun.
    pub(super) taking: tokio::sync::Mutex<()>,
    /// Answers that are being delivered.
    pub(super) deliveries: Deliveries,
    /// Runs that were brought to rest for the next process.
    pub(super) parked: Mutex<Vec<RunId>>,
    /// No new runs.
    pub(super) stopping: CancellationToken,
    /// Nothing any more.
    pub(super) halted: CancellationToken,
    /// Every run of this process is let go of.
    pub(super) released: CancellationToken,
}

/// Who asks for a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Whose run it is.
    pub tenant: TenantId,
    /// The place in a trace that the run is a part of.
    pub trace: Option<TraceContext>,
}

impl Caller {
    /// A caller whose requests are no part of a trace.
    pub const fn untraced(tenant: TenantId) -> Self {
        Self { tenant, trace: None }
    }
}

/// Why a run was not accepted. Nothing was stored.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The request is wrong.
    #[error("the request is invalid")]
    Invalid(Vec<FieldError>),
    /// All places are taken.
    #[error("the server is at its capacity of running and queued runs; try again in {} s", retry_after.as_secs())]
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is about to end.
    #[error("the server is stopping")]
    Stopping,
    /// The store failed, the key was used before, or the run does not fit its thread.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// hames is broken.
    #[error("{0}")]
    Internal(String),
}

impl CreateError {
    fn internal(error: impl std::fmt::Display) -> Self {
        Self::Internal(error.to_string())
    }

    const fn overloaded() -> Self {
        Self::Overloaded { retry_after: OVERLOAD_RETRY_AFTER }
    }
}

impl Supervisor {
    /// Settles what a former process left behind and begins to take runs from the queue.
    pub async fn start(services: Services) -> Result<Self, StoreError> {
        let tasks = TaskTracker::new();
        let inner = Arc::new(Inner {
            queue: Queue::new(services.run.max_concurrent, services.run.max_queued),
            scratch: Arc::new(Scratch::new(services.run.scratch_dir.clone())),
            services: Arc::new(services),
            active: Arc::default(),
            tool_sets: ToolSets::default(),
            apart: Arc::new(Apart::new(tasks.clone())),
            tasks,
            upkeep: TaskTracker::new(),
            taking: tokio::sync::Mutex::default(),
            deliveries: Deliveries::default(),
            parked: Mutex::default(),
            stopping: CancellationToken::new(),
            halted: CancellationToken::new(),
            released: CancellationToken::new(),
        });
        inner.recover().await?;
        inner.tasks.spawn(Arc::clone(&inner).take_from_queue());
        inner.upkeep.spawn(Arc::clone(&inner).keep_lease());
        inner.upkeep.spawn(Arc::clone(&inner).keep_up());
        Ok(Self { inner })
    }

    /// Whether a run would be accepted now, without any work: a request that would be refused need not be read.
    pub fn has_room(&self) -> Result<(), CreateError> {
        if self.inner.stopping.is_cancelled() {
            Err(CreateError::Stopping)
        } else if self.inner.queue.has_room() {
            Ok(())
        } else {
            Err(CreateError::overloaded())
        }
    }

    /// Accepts a run: once this returns it is stored, and at work or in the queue. `key` is what it is asked for with.
    pub async fn create(&self, caller: Caller, request: RunRequest, key: Option<KeyUse>) -> Result<Run, CreateError> {
        let Caller { tenant, trace } = caller;
        self.has_room()?;
        let inner = &self.inner;
        let Services { agents, registry, catalog, run, ceilings, .. } = &*inner.services;
        let resolved =
            resolve(request, trace, agents, registry, catalog, run, ceilings).map_err(CreateError::Invalid)?;
        // What has to wait for another run is not begun with its acceptance.
        let place = match resolved.is_alone() {
            true => inner.queue.enter(),
            false => inner.queue.enter_waiting().map(Place::Waiting),
        };
        let place = place.ok_or(CreateError::overloaded())?;
        // A caller that goes away does not take the acceptance with it.
        let accepted = inner.tasks.spawn(Arc::clone(inner).accept(tenant, resolved, key, place));
        accepted.await.unwrap_or_else(|error| Err(CreateError::internal(format!("accepting the run failed: {error}"))))
    }

    /// Asks a run to end: stored before this returns. The run as it now stands; `None` when there is none.
    pub async fn cancel(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        // A caller that goes away does not take the request with it.
        let cancelled = self.inner.tasks.spawn(Arc::clone(&self.inner).cancel(tenant.clone(), id));
        cancelled.await.unwrap_or_else(|error| Err(StoreError::Unavailable(error.into())))
    }

    /// Takes no more runs, neither from callers nor from the queue.
    pub fn stop(&self) {
        self.inner.stopping.cancel();
        self.inner.tasks.close();
    }

    /// Resolves when every run at work has ended, after [`Supervisor::stop`].
    pub async fn drained(&self) {
        self.inner.tasks.wait().await;
    }

    /// Lets go of every run at work where it stands; what is committed stays.
    pub async fn halt(&self) {
        self.stop();
        self.inner.halted.cancel();
        self.inner.tasks.wait().await;
    }

    /// Leaves the runs of this process to the next one, which then need not wait until the lease is over. Called once
    /// none is at work any more.
    pub async fn release(&self) {
        self.inner.released.cancel();
        self.inner.upkeep.close();
        self.inner.upkeep.wait().await;
        let parked = std::mem::take(&mut *self.inner.parked.lock().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = self.inner.services.store.release(&parked).await {
            tracing::warn!(%error, "the runs of this process could not be let go of; they go on once its lease is over");
        }
    }

    /// How many runs are at work in this process.
    pub fn active(&self) -> usize {
        self.inner.active.len()
    }

    /// Counts the runs whenever it is called; `None` once the supervisor is gone, which it does not keep alive.
    pub fn counts(&self) -> impl Fn() -> Option<RunCounts> + Send + Sync + use<> {
        let inner = Arc::downgrade(&self.inner);
        move || {
            let inner = inner.upgrade()?;
            Some(RunCounts { active: inner.active.len(), queued: inner.queue.waiting() })
        }
    }
}

impl Inner {
    async fn accept(
        self: Arc<Self>,
        tenant: TenantId,
        resolved: Resolved,
        key: Option<KeyUse>,
        place: Place,
    ) -> Result<Run, CreateError> {
        let now = self.services.clock.now();
        let Resolved { spec, thread, continues, on_busy } = resolved;
        let run = Run {
            id: RunId::new(self.services.ids.next(now)),
            tenant,
            generation: 0,
            status: RunStatus::Queued { paused: None },
            agent: spec.agent.clone(),
            model: spec.model.clone(),
            thread,
            continues,
            limits: spec.limits,
            metadata: spec.metadata.clone(),
            steps: 0,
            tool_calls: 0,
            usage: Usage::default(),
            created_at: now,
            cancel_requested_at: None,
            last_seq: 0,
            crashes: 0,
        };
        let new = NewRun { run, spec, state: None, events: Vec::new(), on_busy, key };
        match place {
            Place::Slot(slot) => self.accept_to_work(new, slot, now).await,
            Place::Waiting(place) => {
                let created = self.accept_to_queue(new, now).await?;
                place.stored();
                for id in created.interrupted {
                    let cancelled = Arc::clone(&self).cancel(created.run.tenant.clone(), id);
                    self.tasks.spawn(async move {
                        // It is stored that the run is to end; whoever has it learns of it with its next commit.
                        if let Err(error) = cancelled.await {
                            tracing::warn!(run_id = %id, %error, "the run that is interrupted is not told of it at once");
                        }
                    });
                }
                Ok(created.run)
            }
        }
    }

    async fn accept_to_queue(&self, mut new: NewRun, now: Timestamp) -> Result<Created, CreateError> {
        new.events = encode(&[EventBody::RunQueued {}], &new.run, Moment::first(now)).map_err(CreateError::internal)?;
        Ok(self.services.store.create_run(new).await?)
    }

    /// Acceptance and start are one commit.
    async fn accept_to_work(self: &Arc<Self>, mut new: NewRun, slot: Slot, now: Timestamp) -> Result<Run, CreateError> {
        let deadline_at = now.plus(Duration::from_millis(new.spec.limits.timeout_ms));
        new.run.generation = 1;
        new.run.status = RunStatus::Running { started_at: now, deadline_at };
        // Registered first, so that a cancel finds it as soon as it is stored.
        let registration = self.active.register(new.run.id);
        let claimed = ClaimedRun {
            run: new.run.clone(),
            spec: new.spec.clone(),
            state: None,
            history: Vec::new(),
            transcript: Vec::new(),
            inbox: 0,
            former: Former::None,
        };
        let mut work = self.restore(claimed).map_err(CreateError::internal)?;
        let mut events = vec![EventBody::RunQueued {}];
        let started = work.machine.observe(Observation::Start, &work.tools).map_err(CreateError::internal)?;
        events.extend(started.events);
        apply(&mut work.run, &work.machine, now);
        new.run = work.run.clone();
        new.state = Some(serde_json::to_string(work.machine.state()).map_err(CreateError::internal)?);
        new.events = encode(&events, &work.run, Moment::first(now)).map_err(CreateError::internal)?;
        let stored = self.services.store.create_run(new).await?;
        publish(&work.live, &stored.events, &mut work.run, &work.machine);
        let accepted = work.run.clone();
        let (inner, control) = (Arc::clone(self), Arc::clone(registration.control()));
        let driver = async move { Ok(inner.drive(work, &control, Origin::New, Start::AtOnce)) };
        self.spawn(registration, Some(slot), accepted.tenant.clone(), driver);
        Ok(accepted)
    }

    async fn cancel(self: Arc<Self>, tenant: TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        let store = &self.services.store;
        let Some(mut run) = store.request_cancel(&tenant, id, self.services.clock.now()).await? else {
            return Ok(None);
        };
        if let (false, Some(at)) = (run.status.is_finished(), run.cancel_requested_at)
            && let Some(live) = self.services.bus.find(id)
        {
            live.cancel_requested(at);
        }
        // Asked for is asked for; from here on it is only a matter of who ends it.
        let until = Instant::now() + CANCEL_PATIENCE;
        while let (false, Some(at)) = (run.status.is_finished(), run.cancel_requested_at) {
            if self.active.cancel(id, at) || Instant::now() >= until || self.stopping.is_cancelled() {
                break;
            }
            match run.status {
                RunStatus::Queued { .. } | RunStatus::Waiting { .. } => {
                    let ended = self.end_at_rest(&tenant, id, at).instrument(run_log_context(id)).await;
                    match ended {
                        Ok(()) | Err(StoreError::Fenced { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                // It was claimed a moment ago and is about to be registered.
                RunStatus::Running { .. } | RunStatus::Finished { .. } => sleep(CANCEL_LOOK).await,
            }
            match store.run(&tenant, id).await? {
                Some(now) => run = now,
                None => return Ok(None),
            }
        }
        Ok(Some(run))
    }
}
