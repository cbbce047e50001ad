//! Runs whose worker is gone: ended honestly, with what is known of them.

use std::sync::Arc;

use tracing::Instrument as _;

use super::commit::{CommitError, commit};
use super::control::Control;
use super::driver::DriveError;
use super::supervisor::Inner;
use super::task::Loaded;
use super::timeline::Timeline;
use super::watch::Watch;
use crate::agent::{Interrupt, Observation};
use crate::domain::{RunError, RunId, TenantId};
use crate::store::{ClaimedRun, StoreError};
use crate::telemetry::run_log_context;

impl Inner {
    /// Ends every run that a former process left behind, and learns how many wait. Called once, before the first
    /// request.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<(), StoreError> {
        for claimed in self.services.store.claim_interrupted().await? {
            let id = claimed.run.id;
            tracing::warn!(run_id = %id, "the process that ran this died; the run is ended");
            let error = RunError {
                code: "process_died".to_owned(),
                message: "the process that ran this run ended before the run did".to_owned(),
                retryable: true,
            };
            let settled = async {
                self.end_lost(claimed, error).await;
                self.scratch.remove_left(id).await;
            };
            settled.instrument(run_log_context(id)).await;
        }
        // A process can die between the end of a run and the removal of its workspace.
        for id in self.scratch.left_over().await {
            let run = self.services.store.run(&TenantId::local(), id).await?;
            if run.is_some_and(|run| run.status.is_finished()) {
                self.scratch.remove_left(id).await;
            }
        }
        let waiting = self.services.store.queued().await?;
        self.queue.recount(usize::try_from(waiting).unwrap_or(usize::MAX));
        self.queue.look();
        Ok(())
    }

    /// Ends a run whose task panicked or lost its footing, from what is stored of it.
    pub(super) async fn end_broken(self: &Arc<Self>, tenant: &TenantId, id: RunId, error: RunError) {
        match self.services.store.reclaim(tenant, id).await {
            Ok(Some(claimed)) => self.end_lost(claimed, error).await,
            // It ended by itself, or the store has ended it as unreadable.
            Ok(None) | Err(StoreError::Corrupt { .. }) => {}
            Err(error) => {
                tracing::error!(run_id = %id, %error, "a broken run could not be ended; the next start will do it");
            }
        }
    }

    /// Ends a run that this process has claimed: as its caller wished when there was a wish, else with `error`.
    async fn end_lost(self: &Arc<Self>, claimed: ClaimedRun, error: RunError) {
        let (tenant, id) = (claimed.run.tenant.clone(), claimed.run.id);
        let control = Control::default();
        let cause = match claimed.run.cancel_requested_at {
            Some(at) => {
                control.cancel(at);
                Interrupt::Cancel
            }
            None => Interrupt::WorkerLost(error),
        };
        let ended = match self.end(claimed, cause, &control).await {
            Ok(()) => Ok(()),
            Err(DriveError::Commit(CommitError::Store(error))) => Err(error),
            Err(
                error @ (DriveError::Restore(_) | DriveError::Machine(_) | DriveError::Commit(CommitError::Encode(_))),
            ) => {
                let now = self.services.clock.now();
                self.services.store.end_unreadable(&tenant, id, &error.to_string(), now).await
            }
        };
        if let Err(error) = ended {
            tracing::error!(run_id = %id, %error, "a run could not be ended; the next start will do it");
        }
    }

    /// Ends a run in one commit, from what was loaded of it.
    pub(super) async fn end(&self, loaded: ClaimedRun, cause: Interrupt, control: &Control) -> Result<(), DriveError> {
        let Loaded { mut run, mut machine, tools, live } = self.restore(loaded)?;
        let services = &self.services;
        let now = services.clock.now();
        let moment = Timeline::of(&run, now).moment(now);
        run.cancel_requested_at = control.cancelled_at();
        let interrupt = Observation::Interrupt { cause, partial: Vec::new(), outcomes: Vec::new() };
        let transition = machine.observe(interrupt, &tools)?;
        commit(services.store.as_ref(), &live, &mut run, &machine, transition, moment).await?;
        // Not before: until it is committed, the run may be another task's.
        Watch::begin(services, &run, &machine).ended(&run, moment.ran_for);
        Ok(())
    }
}
