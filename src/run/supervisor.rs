//! Takes requests, owns a task for each run at work, and ends them when asked.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::agent::Agents;
use super::commit::{CommitError, Moment, apply, encode, publish};
use super::driver::{DriveError, Driver, Timeline};
use super::queue::{Place, Queue};
use super::resolve::resolve;
use super::toolbox::RunTools;
use crate::agent::{AgentState, IllFormed, Machine, Observation, estimate_head};
use crate::config::{CeilingConfig, RunConfig};
use crate::domain::{
    EventBody, FieldError, Run, RunError, RunId, RunRequest, RunSpec, RunStatus, TenantId, Timestamp, Usage,
};
use crate::event::Bus;
use crate::provider::Catalog;
use crate::store::{ClaimedRun, NewRun, Store, StoreError};
use crate::time::{Clock, Ids};
use crate::tool::registry::Registry;

/// How many queued runs are claimed in one go.
const CLAIM_BATCH: usize = 64;
/// How long to wait before another claim when the database fails.
const CLAIM_RETRY: Duration = Duration::from_secs(1);
/// What a caller is told to wait when all places are taken.
const OVERLOAD_RETRY_AFTER: Duration = Duration::from_secs(5);

/// What runs need of the rest.
pub struct Services {
    /// Where runs are kept.
    pub store: Arc<dyn Store>,
    /// Who watches runs.
    pub bus: Bus,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// The tools.
    pub registry: Arc<Registry>,
    /// The agents.
    pub agents: Arc<Agents>,
    /// The time of day.
    pub clock: Arc<dyn Clock>,
    /// The source of run ids.
    pub ids: Arc<Ids>,
    /// Random numbers from 0 to 1, for the spread of retries.
    pub jitter: Box<dyn Fn() -> f64 + Send + Sync>,
    /// Scheduling.
    pub run: RunConfig,
    /// Ceilings for requests.
    pub ceilings: CeilingConfig,
}

impl Services {
    /// Where a run without a configured workspace has its own.
    pub(super) fn scratch_path(&self, run: RunId) -> PathBuf {
        self.run.scratch_dir.join(run.to_string())
    }
}

/// Takes requests and owns the runs at work. Cheap to clone.
#[derive(Clone)]
pub struct Supervisor {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) services: Arc<Services>,
    pub(super) queue: Queue,
    /// The runs at work in this process.
    active: Mutex<HashMap<RunId, Arc<Control>>>,
    tasks: TaskTracker,
    /// No new runs.
    stopping: CancellationToken,
    /// Nothing any more.
    halted: CancellationToken,
}

/// How a run at work is told to end.
#[derive(Default)]
pub(super) struct Control {
    pub(super) cancelled: CancellationToken,
    cancelled_at: Mutex<Option<Timestamp>>,
}

impl Control {
    pub(super) fn cancelled_at(&self) -> Option<Timestamp> {
        *lock(&self.cancelled_at)
    }

    fn cancel(&self, at: Option<Timestamp>) {
        *lock(&self.cancelled_at) = at;
        self.cancelled.cancel();
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

/// The supervisor cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What is stored of a run cannot be continued.
#[derive(Debug, thiserror::Error)]
pub(super) enum RestoreError {
    #[error("the machine's state is unreadable: {0}")]
    State(#[from] serde_json::Error),
    #[error("the transcript is ill-formed: {0}")]
    Transcript(#[from] IllFormed),
}

impl Supervisor {
    /// Settles what a former process left behind and begins to take runs from the queue.
    pub async fn start(services: Services) -> Result<Self, StartError> {
        let inner = Arc::new(Inner {
            queue: Queue::new(services.run.max_concurrent, services.run.max_queued),
            services: Arc::new(services),
            active: Mutex::new(HashMap::new()),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            halted: CancellationToken::new(),
        });
        inner.recover().await?;
        inner.tasks.spawn(Arc::clone(&inner).take_from_queue());
        Ok(Self { inner })
    }

    /// Accepts a run: once this returns it is stored, and at work or in the queue.
    pub async fn create(&self, tenant: &TenantId, request: RunRequest) -> Result<Run, CreateError> {
        let inner = &self.inner;
        let services = &inner.services;
        let spec = resolve(
            request,
            &services.agents,
            &services.registry,
            &services.catalog,
            &services.run,
            &services.ceilings,
        )
        .map_err(CreateError::Invalid)?;
        if inner.stopping.is_cancelled() {
            return Err(CreateError::Stopping);
        }
        let place = inner.queue.enter().ok_or(CreateError::Overloaded { retry_after: OVERLOAD_RETRY_AFTER })?;
        let now = services.clock.now();
        let id = RunId::new(services.ids.next(now));
        // A caller that goes away does not take the acceptance with it.
        let accepted = inner.tasks.spawn(Arc::clone(inner).accept(tenant.clone(), id, spec, place, now));
        match accepted.await {
            Ok(result) => result,
            Err(error) => Err(CreateError::Internal(format!("accepting the run failed: {error}"))),
        }
    }

    /// Asks a run to end: stored before this returns. The run as it now stands; `None` when there is none.
    pub async fn cancel(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
        let inner = &self.inner;
        let now = inner.services.clock.now();
        let Some(run) = inner.services.store.request_cancel(tenant, id, now).await? else { return Ok(None) };
        if run.status.is_finished() || inner.cancel_active(&run) {
            return Ok(Some(run));
        }
        // Not at work here: take it out of the queue and end it, whatever the number of free slots.
        match inner.services.store.claim_run(tenant, id, now).await? {
            Some(mut claimed) => {
                inner.queue.left(1);
                claimed.run.status = RunStatus::Queued;
                let control = Arc::new(Control::default());
                control.cancel(run.cancel_requested_at);
                inner.begin(claimed, control, None);
                inner.services.store.run(tenant, id).await
            }
            None => {
                // It was taken from the queue in between, or has ended.
                inner.cancel_active(&run);
                inner.services.store.run(tenant, id).await
            }
        }
    }

    /// Whether new runs are taken.
    pub fn is_accepting(&self) -> bool {
        !self.inner.stopping.is_cancelled()
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
        lock(&self.inner.active).len()
    }
}

impl Inner {
    async fn accept(
        self: Arc<Self>,
        tenant: TenantId,
        id: RunId,
        spec: RunSpec,
        place: Place,
        now: Timestamp,
    ) -> Result<Run, CreateError> {
        let run = Run {
            id,
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
            Place::Waiting => {
                let accepted = self.accept_to_queue(run, spec, now).await;
                match &accepted {
                    Ok(_) => self.queue.stored(),
                    Err(_) => self.queue.abandoned(),
                }
                accepted
            }
        }
    }

    async fn accept_to_queue(&self, mut run: Run, spec: RunSpec, now: Timestamp) -> Result<Run, CreateError> {
        let moment = Moment { now, ran_for: Duration::ZERO };
        let events = encode(&[EventBody::RunQueued {}], &run, moment).map_err(CreateError::internal)?;
        let new = NewRun { run: run.clone(), spec, state: None, events };
        let stored = self.services.store.create_run(new).await?;
        run.last_seq = stored.last().map_or(0, |event| event.seq);
        Ok(run)
    }

    /// Acceptance and start are one commit.
    async fn accept_to_work(
        self: &Arc<Self>,
        mut run: Run,
        spec: RunSpec,
        slot: OwnedSemaphorePermit,
        now: Timestamp,
    ) -> Result<Run, CreateError> {
        let deadline_at = now.plus(Duration::from_millis(spec.limits.timeout_ms));
        run.generation = 1;
        run.status = RunStatus::Running { started_at: now, deadline_at };
        let claimed = ClaimedRun { run, spec: spec.clone(), state: None, transcript: Vec::new() };
        let control = Arc::new(Control::default());
        let mut driver = self.driver(claimed, Arc::clone(&control)).map_err(CreateError::internal)?;
        let mut events = vec![EventBody::RunQueued {}];
        let started = driver.machine.observe(Observation::Start, &driver.tools).map_err(CreateError::internal)?;
        events.extend(started.events);
        apply(&mut driver.run, &driver.machine, now);
        let new = NewRun {
            run: driver.run.clone(),
            spec,
            state: Some(serde_json::to_string(driver.machine.state()).map_err(CreateError::internal)?),
            events: encode(&events, &driver.run, Moment { now, ran_for: Duration::ZERO })
                .map_err(CreateError::internal)?,
        };
        // Registered first, so that a cancel finds it as soon as it is stored.
        let registration = self.register(driver.run.id, control);
        let stored = self.services.store.create_run(new).await?;
        publish(&driver.live, &stored, &mut driver.run, &driver.machine);
        let run = driver.run.clone();
        self.spawn(driver, registration, Some(slot));
        Ok(run)
    }

    /// Goes on with a run that was claimed.
    fn begin(self: &Arc<Self>, claimed: ClaimedRun, control: Arc<Control>, slot: Option<OwnedSemaphorePermit>) {
        let (tenant, id) = (claimed.run.tenant.clone(), claimed.run.id);
        let registration = self.register(id, Arc::clone(&control));
        match self.driver(claimed, control) {
            Ok(driver) => self.spawn(driver, registration, slot),
            Err(error) => {
                tracing::error!(run = %id, %error, "a stored run cannot be continued");
                let inner = Arc::clone(self);
                let error = RunError {
                    code: "run_unreadable".to_owned(),
                    message: format!("what is stored of the run cannot be continued: {error}"),
                    retryable: false,
                };
                self.tasks.spawn(async move { inner.end_broken(&tenant, id, error).await });
            }
        }
    }

    pub(super) fn driver(self: &Arc<Self>, claimed: ClaimedRun, control: Arc<Control>) -> Result<Driver, RestoreError> {
        let ClaimedRun { run, spec, state, transcript } = claimed;
        let tools = RunTools::new(Arc::clone(&self.services.registry), spec.tools.clone());
        let head_tokens = estimate_head(spec.instructions.as_deref(), &tools.specs());
        let machine = match state {
            None => Machine::new(spec, head_tokens)?,
            Some(state) => {
                let state: AgentState = serde_json::from_str(&state)?;
                Machine::restore(spec, head_tokens, state, transcript, &tools)?
            }
        };
        let now = self.services.clock.now();
        let (started_at, left) = match &run.status {
            RunStatus::Running { started_at, deadline_at } => (Some(*started_at), deadline_at.since(now)),
            RunStatus::Queued | RunStatus::Finished { .. } => (None, Duration::ZERO),
        };
        let timeline = Timeline::new(now, started_at);
        let live = self.services.bus.live(run.id);
        let services = Arc::clone(&self.services);
        Ok(Driver { services, run, machine, tools, live, control, deadline: Instant::now() + left, timeline })
    }

    fn spawn(self: &Arc<Self>, driver: Driver, registration: Registration, slot: Option<OwnedSemaphorePermit>) {
        let inner = Arc::clone(self);
        let (tenant, id) = (driver.run.tenant.clone(), driver.run.id);
        let span = tracing::info_span!("run", run_id = %id);
        let task = async move {
            let driven = AssertUnwindSafe(driver.drive()).catch_unwind();
            let result = tokio::select! {
                biased;
                () = inner.halted.cancelled() => return,
                result = driven => result,
            };
            inner.settle(&tenant, id, result).await;
            // In this order: whoever sees the slot free finds the run gone.
            drop(registration);
            drop(slot);
        };
        self.tasks.spawn(task.instrument(span));
    }

    /// Sees a run off whose task is over.
    async fn settle(
        self: &Arc<Self>,
        tenant: &TenantId,
        id: RunId,
        result: Result<Result<Run, DriveError>, Box<dyn std::any::Any + Send>>,
    ) {
        match result {
            Ok(Ok(run)) => {
                tracing::info!(
                    status = run.status.name().as_str(),
                    steps = run.steps,
                    tool_calls = run.tool_calls,
                    "run ended"
                );
            }
            Ok(Err(DriveError::Commit(CommitError::Store(error @ StoreError::Fenced { .. })))) => {
                tracing::warn!(%error, "another worker has the run; this one lets go");
                return;
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the run cannot go on");
                let error = RunError { code: "internal".to_owned(), message: error.to_string(), retryable: true };
                self.end_broken(tenant, id, error).await;
            }
            Err(panic) => {
                let message = panic_message(panic.as_ref());
                tracing::error!(message, "the run's task panicked");
                let message = format!("hames panicked while it worked on this run: {message}");
                let error = RunError { code: "panicked".to_owned(), message, retryable: false };
                self.end_broken(tenant, id, error).await;
            }
        }
        self.clean_up(id).await;
    }

    /// Removes what a run had to itself.
    pub(super) async fn clean_up(&self, id: RunId) {
        let path = self.services.scratch_path(id);
        let removed = tokio::task::spawn_blocking(move || match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other,
        })
        .await;
        match removed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(run = %id, %error, "the run's own workspace could not be removed"),
            Err(error) => tracing::warn!(run = %id, %error, "removing the run's own workspace failed"),
        }
    }

    async fn take_from_queue(self: Arc<Self>) {
        loop {
            let slots = tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                slots = self.queue.slots_for_waiting(CLAIM_BATCH) => slots,
            };
            if let Err(error) = self.claim_for(slots).await {
                tracing::error!(%error, "queued runs cannot be taken from the store");
                sleep(CLAIM_RETRY).await;
            }
        }
    }

    async fn claim_for(self: &Arc<Self>, slots: Vec<OwnedSemaphorePermit>) -> Result<(), StoreError> {
        let asked = slots.len();
        let limit = u32::try_from(asked).unwrap_or(u32::MAX);
        let claimed = self.services.store.claim_queued(limit, self.services.clock.now()).await?;
        let came = claimed.len();
        self.queue.left(came);
        for (run, slot) in claimed.into_iter().zip(slots) {
            self.begin(run, Arc::new(Control::default()), Some(slot));
        }
        if came < asked {
            // Some were cancelled meanwhile, or could not be read and were ended.
            let waiting = self.services.store.queued().await?;
            self.queue.recount(usize::try_from(waiting).unwrap_or(usize::MAX));
        }
        Ok(())
    }

    fn cancel_active(&self, run: &Run) -> bool {
        let control = lock(&self.active).get(&run.id).cloned();
        match control {
            Some(control) => {
                control.cancel(run.cancel_requested_at);
                true
            }
            None => false,
        }
    }

    fn register(self: &Arc<Self>, id: RunId, control: Arc<Control>) -> Registration {
        lock(&self.active).insert(id, control);
        Registration { inner: Arc::clone(self), id }
    }
}

/// A run's entry among the active ones; gone with it.
struct Registration {
    inner: Arc<Inner>,
    id: RunId,
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.inner.active).remove(&self.id);
    }
}

impl CreateError {
    fn internal(error: impl std::fmt::Display) -> Self {
        Self::Internal(error.to_string())
    }
}

/// Nothing is left half-changed under these locks, so a panic elsewhere does not spoil them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
