//! Takes requests: a run is accepted, stored, and at work or in the queue; a run that is to end is told so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::commit::{Moment, apply, encode, publish};
use super::control::{Active, Control};
use super::driver::DriveError;
use super::queue::{Place, Queue, Slot};
use super::resolve::resolve;
use super::scratch::Scratch;
use super::services::Services;
use super::task::Loaded;
use crate::agent::{Interrupt, Observation};
use crate::domain::{
    EventBody, FieldError, Run, RunId, RunRequest, RunSpec, RunStatus, TenantId, Timestamp, TraceContext, Usage,
};
use crate::store::{ClaimedRun, NewRun, StoreError};
use crate::telemetry::metric::RunCounts;
use crate::telemetry::run_log_context;

/// What a caller is told to wait when all places are taken.
const OVERLOAD_RETRY_AFTER: Duration = Duration::from_secs(5);
/// How often a cancel looks again for a run that is just changing hands.
const CANCEL_LOOK: Duration = Duration::from_millis(5);

/// Takes requests and owns the runs at work. Cheap to clone.
#[derive(Clone)]
pub struct Supervisor {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) services: Arc<Services>,
    pub(super) scratch: Arc<Scratch>,
    pub(super) queue: Arc<Queue>,
    pub(super) active: Arc<Active>,
    pub(super) tasks: TaskTracker,
    /// No new runs.
    pub(super) stopping: CancellationToken,
    /// Nothing any more.
    pub(super) halted: CancellationToken,
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
    /// The store failed.
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
        let inner = Arc::new(Inner {
            queue: Queue::new(services.run.max_concurrent, services.run.max_queued),
            scratch: Arc::new(Scratch::new(services.run.scratch_dir.clone())),
            services: Arc::new(services),
            active: Arc::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            halted: CancellationToken::new(),
        });
        inner.recover().await?;
        inner.tasks.spawn(Arc::clone(&inner).take_from_queue());
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

    /// Accepts a run: once this returns it is stored, and at work or in the queue.
    pub async fn create(&self, caller: Caller, request: RunRequest) -> Result<Run, CreateError> {
        let Caller { tenant, trace } = caller;
        self.has_room()?;
        let inner = &self.inner;
        let Services { agents, registry, catalog, run, ceilings, .. } = &*inner.services;
        let spec = resolve(request, trace, agents, registry, catalog, run, ceilings).map_err(CreateError::Invalid)?;
        let place = inner.queue.enter().ok_or(CreateError::overloaded())?;
        // A caller that goes away does not take the acceptance with it.
        let accepted = inner.tasks.spawn(Arc::clone(inner).accept(tenant, spec, place));
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
    async fn accept(self: Arc<Self>, tenant: TenantId, spec: RunSpec, place: Place) -> Result<Run, CreateError> {
        let now = self.services.clock.now();
        let run = Run {
            id: RunId::new(self.services.ids.next(now)),
            tenant,
            generation: 0,
            status: RunStatus::Queued,
            agent: spec.agent.clone(),
            model: spec.model.clone(),
            limits: spec.limits,
            metadata: spec.metadata.clone(),
            steps: 0,
            tool_calls: 0,
            usage: Usage::default(),
            created_at: now,
            cancel_requested_at: None,
            last_seq: 0,
        };
        match place {
            Place::Slot(slot) => self.accept_to_work(run, spec, slot, now).await,
            Place::Waiting(place) => {
                let run = self.accept_to_queue(run, spec, now).await?;
                place.stored();
                Ok(run)
            }
        }
    }

    async fn accept_to_queue(&self, mut run: Run, spec: RunSpec, now: Timestamp) -> Result<Run, CreateError> {
        let events = encode(&[EventBody::RunQueued {}], &run, Moment::first(now)).map_err(CreateError::internal)?;
        let stored = self.services.store.create_run(NewRun { run: run.clone(), spec, state: None, events }).await?;
        run.last_seq = stored.last().map_or(0, |event| event.seq);
        Ok(run)
    }

    /// Acceptance and start are one commit.
    async fn accept_to_work(
        self: &Arc<Self>,
        mut run: Run,
        spec: RunSpec,
        slot: Slot,
        now: Timestamp,
    ) -> Result<Run, CreateError> {
        let deadline_at = now.plus(Duration::from_millis(spec.limits.timeout_ms));
        run.generation = 1;
        run.status = RunStatus::Running { started_at: now, deadline_at };
        // Registered first, so that a cancel finds it as soon as it is stored.
        let registration = self.active.register(run.id);
        let claimed = ClaimedRun { run, spec: spec.clone(), state: None, transcript: Vec::new() };
        let Loaded { mut run, mut machine, tools, live } = self.restore(claimed).map_err(CreateError::internal)?;
        let mut events = vec![EventBody::RunQueued {}];
        let started = machine.observe(Observation::Start, &tools).map_err(CreateError::internal)?;
        events.extend(started.events);
        apply(&mut run, &machine, now);
        let new = NewRun {
            run: run.clone(),
            spec,
            state: Some(serde_json::to_string(machine.state()).map_err(CreateError::internal)?),
            events: encode(&events, &run, Moment::first(now)).map_err(CreateError::internal)?,
        };
        let stored = self.services.store.create_run(new).await?;
        publish(&live, &stored, &mut run, &machine);
        let accepted = run.clone();
        let (inner, control) = (Arc::clone(self), Arc::clone(registration.control()));
        let loaded = Loaded { run, machine, tools, live };
        self.spawn(registration, Some(slot), accepted.tenant.clone(), async move { Ok(inner.drive(loaded, &control)) });
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
        while let (false, Some(at)) = (run.status.is_finished(), run.cancel_requested_at) {
            if self.active.cancel(id, at) {
                break;
            }
            match run.status {
                RunStatus::Queued => match self.end_in_queue(&tenant, id, at).await {
                    Ok(()) | Err(StoreError::Fenced { .. }) => {}
                    Err(error) => return Err(error),
                },
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

    /// Ends a run that nobody has claimed, whatever the number of free slots, in one commit.
    async fn end_in_queue(self: &Arc<Self>, tenant: &TenantId, id: RunId, at: Timestamp) -> Result<(), StoreError> {
        let Some(loaded) = self.services.store.load(tenant, id).await? else { return Ok(()) };
        // Claimed since: its worker is told, or about to be registered.
        if loaded.run.status != RunStatus::Queued {
            return Ok(());
        }
        let control = Arc::new(Control::default());
        control.cancel(at);
        let ended = self.end(loaded, Interrupt::Cancel, &control).instrument(run_log_context(id)).await;
        match ended {
            Ok(()) => {
                self.queue.left(1);
                Ok(())
            }
            Err(DriveError::Commit(super::commit::CommitError::Store(error))) => Err(error),
            Err(error) => Err(StoreError::Corrupt { run: id, reason: error.to_string() }),
        }
    }
}
