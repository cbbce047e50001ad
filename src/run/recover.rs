//! Runs whose worker is gone: ended honestly, with what is known of them.

use std::sync::Arc;

use super::commit::CommitError;
use super::driver::DriveError;
use super::supervisor::{Control, Inner, StartError};
use crate::agent::{Interrupt, Observation};
use crate::domain::{RunError, RunId, TenantId};
use crate::store::{ClaimedRun, StoreError};

impl Inner {
    /// Ends every run that a former process left behind, and learns how many wait. Called once, before the first
    /// request.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<(), StartError> {
        for claimed in self.services.store.claim_interrupted().await? {
            let id = claimed.run.id;
            tracing::warn!(run = %id, "the process that ran this died; the run is ended");
            let error = RunError {
                code: "process_died".to_owned(),
                message: "the process that ran this run ended before the run did".to_owned(),
                retryable: true,
            };
            if let Err(error) = self.end_lost(claimed, error).await {
                tracing::error!(run = %id, %error, "an interrupted run could not be ended");
            }
            self.clean_up(id).await;
        }
        let waiting = self.services.store.queued().await?;
        self.queue.recount(usize::try_from(waiting).unwrap_or(usize::MAX));
        Ok(())
    }

    /// Ends a run whose task panicked or lost its footing, from what is stored of it.
    pub(super) async fn end_broken(self: &Arc<Self>, tenant: &TenantId, id: RunId, error: RunError) {
        let ended = match self.services.store.reclaim(tenant, id).await {
            Ok(Some(claimed)) => self.end_lost(claimed, error).await,
            // It ended by itself, or somebody else has it.
            Ok(None) => Ok(()),
            Err(error) => Err(DriveError::Commit(CommitError::Store(error))),
        };
        if let Err(error) = ended {
            tracing::error!(run = %id, %error, "a broken run could not be ended; the next start will do it");
        }
    }

    async fn end_lost(self: &Arc<Self>, claimed: ClaimedRun, error: RunError) -> Result<(), DriveError> {
        let id = claimed.run.id;
        let mut driver = self
            .driver(claimed, Arc::new(Control::default()))
            .map_err(|reason| CommitError::Store(StoreError::Corrupt { run: id, reason: reason.to_string() }))?;
        let transition = driver.machine.observe(
            Observation::Interrupt { cause: Interrupt::WorkerLost(error), partial: None, outcomes: Vec::new() },
            &driver.tools,
        )?;
        driver.commit(transition).await
    }
}
