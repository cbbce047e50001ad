//! The task of one run: built, driven, seen off. Whatever happens in it stays its own.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::sleep;
use tracing::Instrument;

use super::apart::{MAX_CRASHES, Start};
use super::commit::CommitError;
use super::control::{Control, Registration};
use super::driver::{DriveError, Driver, Left, Origin, Parts};
use super::queue::Slot;
use super::supervisor::Inner;
use super::toolbox::RunTools;
use crate::agent::{AgentState, IllFormed, Machine, estimate_instructions};
use crate::domain::text::panic_text;
use crate::domain::{InboxNumber, Run, RunError, RunId, TenantId};
use crate::event::LiveRun;
use crate::store::{ClaimedRun, Former, StoreError};
use crate::telemetry::run_log_context;

/// How many queued runs are claimed in one go.
const CLAIM_BATCH: usize = 64;
/// How long to wait before another claim when the database fails.
const CLAIM_RETRY: Duration = Duration::from_secs(1);

/// What is stored of a run cannot be continued.
#[derive(Debug, thiserror::Error)]
pub(super) enum RestoreError {
    #[error("the machine's state is unreadable: {0}")]
    State(#[from] serde_json::Error),
    #[error("the transcript is ill-formed: {0}")]
    Transcript(#[from] IllFormed),
}

/// A run with its machine, between two steps.
pub(super) struct Work {
    pub(super) run: Run,
    pub(super) machine: Machine,
    pub(super) tools: RunTools,
    pub(super) live: Arc<LiveRun>,
    /// The newest item of its inbox, as far as is known.
    pub(super) inbox: InboxNumber,
    /// The newest item of its inbox that it has taken in.
    pub(super) inbox_read: InboxNumber,
}

impl Inner {
    /// Takes runs from the queue until the server stops.
    pub(super) async fn take_from_queue(self: Arc<Self>) {
        loop {
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return,
                () = self.queue.changed() => {}
            }
            match AssertUnwindSafe(self.claim()).catch_unwind().await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(%error, "queued runs cannot be taken from the store");
                    sleep(CLAIM_RETRY).await;
                }
                Err(panic) => {
                    tracing::error!(error = panic_text(panic.as_ref()), "taking runs from the queue panicked");
                    sleep(CLAIM_RETRY).await;
                }
            }
        }
    }

    async fn claim(self: &Arc<Self>) -> Result<(), StoreError> {
        let store = &self.services.store;
        let _taking = self.taking.lock().await;
        self.queue.recount(store.backlog().await?);
        loop {
            let slots = self.queue.slots_for_waiting(CLAIM_BATCH);
            let asked = slots.len();
            if asked == 0 || self.stopping.is_cancelled() {
                return Ok(());
            }
            let limit = u32::try_from(asked).unwrap_or(u32::MAX);
            let claimed = store.claim(limit, self.services.clock.now()).await?;
            let came = claimed.len();
            self.queue.left(came);
            let mut slots = slots.into_iter();
            self.begin(claimed.into_iter().zip(slots.by_ref()).collect());
            slots.for_each(Slot::give_back);
            if came < asked {
                return Ok(());
            }
        }
    }

    /// Goes on with runs that were claimed.
    pub(super) fn begin(self: &Arc<Self>, mut claimed: Vec<(ClaimedRun, Slot)>) {
        for (claimed, _) in &mut claimed {
            if claimed.former == Former::Gone {
                // Stored as soon as it is begun; until then it is to blame for nothing.
                claimed.run.crashes = claimed.run.crashes.saturating_add(1);
            }
        }
        let starts: Vec<Start> = claimed.iter().map(|(claimed, _)| self.apart.start(claimed.run.crashes)).collect();
        for ((claimed, slot), start) in claimed.into_iter().zip(starts) {
            self.begin_one(claimed, slot, start);
        }
    }

    fn begin_one(self: &Arc<Self>, claimed: ClaimedRun, slot: Slot, start: Start) {
        let registration = self.active.register(claimed.run.id);
        if let Some(at) = claimed.run.cancel_requested_at {
            registration.control().cancel(at);
        }
        let (inner, control) = (Arc::clone(self), Arc::clone(registration.control()));
        let tenant = claimed.run.tenant.clone();
        self.spawn(registration, Some(slot), tenant, async move {
            let origin = Origin::of(&claimed);
            if origin != Origin::New {
                inner.scratch.take_over(claimed.run.id);
            }
            if claimed.former == Former::Gone {
                let crashes = claimed.run.crashes;
                tracing::warn!(crashes, "the run was interrupted; it goes on from its last commit");
                if crashes > MAX_CRASHES {
                    return Err(DriveError::Crashes(crashes));
                }
            }
            Ok(inner.drive(inner.restore(claimed)?, &control, origin, start))
        });
    }

    /// Brings the machine of a run to where it stood.
    pub(super) fn restore(&self, claimed: ClaimedRun) -> Result<Work, RestoreError> {
        let ClaimedRun { run, spec, state, history, transcript, inbox, former: _ } = claimed;
        let tools = RunTools::new(Arc::clone(&self.services.registry), &self.tool_sets, &spec);
        let head_tokens = estimate_instructions(spec.instructions.as_deref()) + tools.tokens();
        let machine = match state {
            None => Machine::new(spec, head_tokens, history)?,
            Some(state) => {
                let state: AgentState = serde_json::from_str(&state)?;
                Machine::restore(spec, head_tokens, history, state, transcript, &tools)?
            }
        };
        let live = self.services.bus.live(run.id);
        Ok(Work { run, machine, tools, live, inbox, inbox_read: 0 })
    }

    /// Begins to drive a run. `control` is how it is told to end.
    pub(super) fn drive(&self, work: Work, control: &Arc<Control>, origin: Origin, start: Start) -> Driver {
        let parts = Parts {
            services: Arc::clone(&self.services),
            scratch: Arc::clone(&self.scratch),
            control: Arc::clone(control),
            stopping: self.stopping.clone(),
            start,
        };
        Driver::begin(parts, work, origin)
    }

    /// Starts the task of a run, in which its driver is built and driven.
    pub(super) fn spawn(
        self: &Arc<Self>,
        registration: Registration,
        slot: Option<Slot>,
        tenant: TenantId,
        driver: impl Future<Output = Result<Driver, DriveError>> + Send + 'static,
    ) {
        let inner = Arc::clone(self);
        let id = registration.id();
        let task = async move {
            let driven = AssertUnwindSafe(async { driver.await?.drive().await }).catch_unwind();
            let result = tokio::select! {
                biased;
                // It stays where its last commit left it.
                () = inner.halted.cancelled() => return inner.scratch.leave(id),
                result = driven => result,
            };
            inner.settle(&tenant, id, result).await;
            // In this order: whoever sees the slot free finds the run gone.
            drop(registration);
            drop(slot);
        };
        self.tasks.spawn(task.instrument(run_log_context(id)));
    }

    /// Sees a run off whose task is over.
    async fn settle(
        self: &Arc<Self>,
        tenant: &TenantId,
        id: RunId,
        result: Result<Result<Left, DriveError>, Box<dyn Any + Send>>,
    ) {
        if !matches!(result, Ok(Ok(Left::Ended(_))))
            && let Some(live) = self.services.bus.find(id)
        {
            live.let_go();
        }
        match result {
            Ok(Ok(Left::Waiting(calls))) => {
                tracing::info!(calls, "the run waits for answers");
                return self.scratch.leave(id);
            }
            Ok(Ok(Left::Parked)) => {
                tracing::info!("the run is left to the next process");
                self.parked.lock().unwrap_or_else(PoisonError::into_inner).push(id);
                return self.scratch.leave(id);
            }
            Ok(Ok(Left::Ended(run))) => {
                let status = run.status.name().as_str();
                tracing::info!(status, steps = run.steps, tool_calls = run.tool_calls, "run ended");
            }
            Ok(Err(DriveError::Commit(CommitError::Store(error @ StoreError::Fenced { .. })))) => {
                tracing::warn!(%error, "another worker has the run; this one lets go");
                return self.scratch.leave(id);
            }
            Ok(Err(error @ DriveError::Crashes(_))) => {
                tracing::error!(%error, "the run is ended");
                let error = RunError { code: "crash_loop".to_owned(), message: error.to_string(), retryable: false };
                self.end_broken(tenant, id, error).await;
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the run cannot go on");
                let error = RunError { code: "internal".to_owned(), message: error.to_string(), retryable: true };
                self.end_broken(tenant, id, error).await;
            }
            Err(panic) => {
                let message = panic_text(panic.as_ref());
                tracing::error!(error = message, "the run's task panicked");
                let message = format!("hames panicked while it worked on this run: {message}");
                let error = RunError { code: "panicked".to_owned(), message, retryable: false };
                self.end_broken(tenant, id, error).await;
            }
        }
        self.scratch.remove(id).await;
    }
}
