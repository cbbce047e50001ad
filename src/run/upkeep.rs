//! What has to be done by the clock: the lease is renewed, waits that are over end, runs that were claimed in vain are
//! taken up, old runs are erased. Each of it is tried again when the database is back.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tracing::Instrument as _;

use super::commit::CommitError;
use super::control::Control;
use super::driver::DriveError;
use super::supervisor::Inner;
use crate::agent::Interrupt;
use crate::domain::text::panic_text;
use crate::domain::{RunId, RunStatus, TenantId, Timestamp};
use crate::store::StoreError;
use crate::telemetry::run_log_context;

/// How often there is a look.
const TICK: Duration = Duration::from_secs(1);
/// How often the lease is renewed, a small part of it.
const RENEWAL: Duration = Duration::from_secs(2);
/// How often a claim is looked for whose answer was lost.
const ADOPTION: Duration = Duration::from_secs(10);
/// How often old runs are erased.
const SWEEP: Duration = Duration::from_secs(60);
/// Most runs of one transaction that erases, and most waits that are ended in one look.
const BATCH: u32 = 100;
/// A day.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// When each duty was last done.
#[derive(Default)]
struct Done {
    adoption: Option<Instant>,
    sweep: Option<Instant>,
}

/// How much of what is too old was erased.
#[derive(PartialEq, Eq)]
enum Swept {
    All,
    Some,
}

/// Ticks; one that is missed is left out.
fn every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

/// Tells of a duty that could not be done. It is done again with the next tick.
fn tell(duty: &str, outcome: Result<Result<(), StoreError>, Box<dyn Any + Send>>) {
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "{duty} has to wait for the database"),
        Err(panic) => tracing::error!(error = panic_text(panic.as_ref()), "{duty} panicked"),
    }
}

/// Whether a duty has to be done; notes that it is.
fn is_due(last: &mut Option<Instant>, every: Duration) -> bool {
    let now = Instant::now();
    let due = last.is_none_or(|last| now.duration_since(last) >= every);
    if due {
        *last = Some(now);
    }
    due
}

impl Inner {
    /// Renews the lease until the runs are let go of. It waits for nothing else that is done by the clock.
    pub(super) async fn keep_lease(self: Arc<Self>) {
        let mut ticks = every(RENEWAL);
        while self.goes_on(&mut ticks).await {
            tell("renewing the lease", AssertUnwindSafe(self.services.store.renew_lease()).catch_unwind().await);
        }
    }

    /// Does all the rest until the server stops.
    pub(super) async fn keep_up(self: Arc<Self>) {
        let mut ticks = every(TICK);
        // What was just opened needs none of it yet.
        let mut done = Done { adoption: Some(Instant::now()), ..Done::default() };
        while self.goes_on(&mut ticks).await {
            tell("upkeep", AssertUnwindSafe(self.look_after(&mut done)).catch_unwind().await);
        }
    }

    /// Waits for the next tick; `false` when there is nothing more to do.
    async fn goes_on(&self, ticks: &mut Interval) -> bool {
        tokio::select! {
            biased;
            () = self.halted.cancelled() => false,
            () = self.released.cancelled() => false,
            _ = ticks.tick() => true,
        }
    }

    async fn look_after(self: &Arc<Self>, done: &mut Done) -> Result<(), StoreError> {
        if self.stopping.is_cancelled() {
            return Ok(());
        }
        self.end_waits().await?;
        if is_due(&mut done.adoption, ADOPTION) {
            self.adopt().await?;
        }
        if is_due(&mut done.sweep, SWEEP) && self.sweep().await? == Swept::Some {
            done.sweep = None;
        }
        Ok(())
    }

    /// Ends runs that waited long enough, and those that somebody wants ended.
    async fn end_waits(self: &Arc<Self>) -> Result<(), StoreError> {
        let now = self.services.clock.now();
        for (tenant, id) in self.services.store.due(now, BATCH).await? {
            match self.end_at_rest(&tenant, id, now).instrument(run_log_context(id)).await {
                Ok(()) | Err(StoreError::Fenced { .. }) => {}
                Err(error) => tracing::error!(run_id = %id, %error, "a wait could not be ended"),
            }
        }
        Ok(())
    }

    /// Ends a run that is in nobody's hands, in one commit: because somebody asked for it, or because its wait is over.
    pub(super) async fn end_at_rest(
        self: &Arc<Self>,
        tenant: &TenantId,
        id: RunId,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let loaded = match self.services.store.load(tenant, id).await {
            Ok(Some(loaded)) => loaded,
            Ok(None) => return Ok(()),
            Err(StoreError::Corrupt { reason, .. }) => {
                return self.services.store.end_unreadable(tenant, id, &reason, now).await;
            }
            Err(error) => return Err(error),
        };
        let control = Control::default();
        let is_queued = matches!(loaded.run.status, RunStatus::Queued { .. });
        let cause = match (&loaded.run.status, loaded.run.cancel_requested_at) {
            (RunStatus::Queued { .. } | RunStatus::Waiting { .. }, Some(at)) => {
                control.cancel(at);
                Interrupt::Cancel
            }
            (RunStatus::Waiting { until, .. }, None) if *until <= now => Interrupt::WaitExpired,
            // It went on since, or has ended.
            (
                RunStatus::Queued { .. }
                | RunStatus::Waiting { .. }
                | RunStatus::Running { .. }
                | RunStatus::Finished { .. },
                _,
            ) => return Ok(()),
        };
        match self.end(loaded, cause, &control).await {
            Ok(()) => {
                if is_queued {
                    self.queue.left(1);
                }
                self.scratch.remove_left(id).await;
                // A run of its thread may have waited for this.
                self.queue.look();
                Ok(())
            }
            Err(DriveError::Commit(CommitError::Store(error))) => Err(error),
            Err(error) => self.services.store.end_unreadable(tenant, id, &error.to_string(), now).await,
        }
    }

    /// Takes up runs that this process has claimed without having heard of it: the answer was lost on its way.
    async fn adopt(self: &Arc<Self>) -> Result<(), StoreError> {
        // What is being taken is about to be begun.
        let _taking = self.taking.lock().await;
        for (tenant, id) in self.services.store.held().await? {
            // Between its commit and here, a run may have ended.
            let is_running = |run: crate::domain::Run| matches!(run.status, RunStatus::Running { .. });
            if self.active.has(id) || !self.services.store.run(&tenant, id).await?.is_some_and(is_running) {
                continue;
            }
            if self.active.has(id) {
                continue;
            }
            let Some(slot) = self.queue.free_slot() else { return Ok(()) };
            if let Some(claimed) = self.services.store.reclaim(&tenant, id).await? {
                tracing::warn!(run_id = %id, "a run was claimed and its claim was not answered; it is taken up");
                self.begin(vec![(claimed, slot)]);
            }
        }
        Ok(())
    }

    /// Erases some of what is too old.
    async fn sweep(&self) -> Result<Swept, StoreError> {
        let now = self.services.clock.now();
        let before = self.services.retention.finished_days.map(|days| now.minus(DAY.saturating_mul(days)));
        let erased = self.services.store.sweep(before, now, BATCH).await?;
        if erased > 0 {
            tracing::info!(erased, "old runs are erased");
        }
        Ok(if erased < u64::from(BATCH) { Swept::All } else { Swept::Some })
    }
}
