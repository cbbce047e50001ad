//! What a former process left behind, and runs that cannot go on: ended honestly, with what is known of them. Runs that
//! can go on are claimed like queued ones.

use std::sync::Arc;

use super::commit::{Author, CommitError, commit};
use super::control::Control;
use super::driver::DriveError;
use super::supervisor::Inner;
use super::timeline::Timeline;
use super::watch::Watch;
use crate::agent::{Interrupt, Observation};
use crate::domain::{RunError, RunId, TenantId};
use crate::store::{ClaimedRun, StoreError};

impl Inner {
    /// Learns how many runs wait for a worker, and tidies up. Called once, before the first request.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<(), StoreError> {
        self.services.store.renew_lease().await?;
        // A process can die between the end of a run and the removal of its workspace.
        for id in self.scratch.left_over().await {
            let (store, tenant) = (&self.services.store, TenantId::local());
            let is_over = match store.run(&tenant, id).await? {
                Some(run) => run.status.is_finished(),
                None => store.is_erased(&tenant, id).await?,
            };
            if is_over {
                self.scratch.remove_left(id).await;
            }
        }
        self.queue.recount(self.services.store.backlog().await?);
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
                tracing::error!(run_id = %id, %error, "a broken run could not be ended now; it is begun anew in a while");
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
            Err(error) => {
                let now = self.services.clock.now();
                self.services.store.end_unreadable(&tenant, id, &error.to_string(), now).await
            }
        };
        if let Err(error) = ended {
            tracing::error!(run_id = %id, %error, "a run could not be ended now; it is begun anew in a while");
        }
    }

    /// Ends a run in one commit, from what was loaded of it.
    pub(super) async fn end(&self, loaded: ClaimedRun, cause: Interrupt, control: &Control) -> Result<(), DriveError> {
        let mut work = self.restore(loaded)?;
        let services = &self.services;
        let now = services.clock.now();
        let moment = Timeline::of(&work.run, now).moment(now);
        work.run.cancel_requested_at = control.cancelled_at();
        let interrupt = Observation::Interrupt { cause, partial: Vec::new(), outcomes: Vec::new() };
        let transition = work.machine.observe(interrupt, &work.tools)?;
        commit(services.store.as_ref(), &mut work, transition, moment, Author::Other(None)).await?;
        // Not before: until it is committed, the run may be another task's.
        Watch::begin(services, &work.run, &work.machine).ended(&work.run, moment.ran_for);
        Ok(())
    }
}
