//! Workspaces that runs have to themselves: made when a tool first needs one, removed with the run.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::domain::{RunError, RunId};
use crate::tool::workspace::Workspace;

/// The workspaces that runs of this process have to themselves.
pub(super) struct Scratch {
    dir: PathBuf,
    /// Runs at work here that have one, or may have.
    made: Mutex<HashSet<RunId>>,
}

impl Scratch {
    /// They are made below `dir`.
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir, made: Mutex::default() }
    }

    /// Makes that of a run, or opens it again when the run may have made it before.
    pub(super) async fn make(&self, run: RunId, has_one: bool) -> Result<Arc<Workspace>, RunError> {
        let unusable = |message: String| RunError { code: "workspace_unusable".to_owned(), message, retryable: false };
        let path = self.dir.join(run.to_string());
        self.made().insert(run);
        match tokio::task::spawn_blocking(move || match has_one && path.is_dir() {
            true => Workspace::scratch_again(&path),
            false => Workspace::scratch(&path),
        })
        .await
        {
            Ok(Ok(workspace)) => Ok(Arc::new(workspace)),
            Ok(Err(error)) => Err(unusable(error.to_string())),
            Err(error) => Err(unusable(format!("opening the run's own workspace failed: {error}"))),
        }
    }

    /// A run goes on here that may have made one elsewhere.
    pub(super) fn take_over(&self, run: RunId) {
        self.made().insert(run);
    }

    /// Forgets that of a run which is let go of and goes on later, perhaps elsewhere. It stays where it is.
    pub(super) fn leave(&self, run: RunId) {
        self.made().remove(&run);
    }

    /// Removes that of a run which has ended, if there may be one.
    pub(super) async fn remove(&self, run: RunId) {
        if self.made().remove(&run) {
            self.remove_left(run).await;
        }
    }

    /// Removes that of a run of a former process, if there is one.
    pub(super) async fn remove_left(&self, run: RunId) {
        let path = self.dir.join(run.to_string());
        let removed = tokio::task::spawn_blocking(move || match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other,
        })
        .await;
        match removed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(run_id = %run, %error, "the run's own workspace could not be removed"),
            Err(error) => tracing::warn!(run_id = %run, %error, "removing the run's own workspace failed"),
        }
    }

    /// The runs that have one on the disk, whoever made it.
    pub(super) async fn left_over(&self) -> Vec<RunId> {
        let dir = self.dir.clone();
        let listed = tokio::task::spawn_blocking(move || match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
            Ok(entries) => entries
                .map(|entry| Ok(entry?.file_name().to_str().and_then(|name| name.parse().ok())))
                .filter_map(std::io::Result::transpose)
                .collect(),
        })
        .await;
        match listed {
            Ok(Ok(runs)) => runs,
            Ok(Err(error)) => {
                tracing::warn!(%error, "run.scratch_dir cannot be read; what runs left there stays");
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(%error, "reading run.scratch_dir failed; what runs left there stays");
                Vec::new()
            }
        }
    }

    fn made(&self) -> MutexGuard<'_, HashSet<RunId>> {
        // Each change is one call, so a panic elsewhere leaves nothing half-changed.
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
