//! The runs that are live in this process, shared by the driver that writes and the readers that follow.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde::Serialize;
use tokio::sync::watch;
use utoipa::ToSchema;

use super::cursor::Cursor;
use super::frame;
use super::live::{Joined, Position, State, Taken};
use crate::domain::{Delta, Event, Run, RunId, TenantId, Timestamp};

type Runs = Mutex<HashMap<RunId, Weak<LiveRun>>>;

/// All live runs of the process. Cheap to clone; clones share the runs.
#[derive(Clone, Debug, Default)]
pub struct Bus {
    runs: Arc<Runs>,
}

impl Bus {
    /// A bus without runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// The live state of a run, made when there is none. It goes away with its last holder.
    pub fn live(&self, run: RunId) -> Arc<LiveRun> {
        let mut runs = lock(&self.runs);
        if let Some(live) = runs.get(&run).and_then(Weak::upgrade) {
            return live;
        }
        let live = Arc::new(LiveRun {
            id: run,
            state: Mutex::new(State::new(run)),
            changes: watch::Sender::new(0),
            at_rest: watch::Sender::new(false),
            runs: Arc::clone(&self.runs),
        });
        runs.insert(run, Arc::downgrade(&live));
        live
    }

    /// The live state of a run that somebody holds.
    pub fn find(&self, run: RunId) -> Option<Arc<LiveRun>> {
        lock(&self.runs).get(&run).and_then(Weak::upgrade)
    }

    /// How many runs are held by somebody.
    pub fn len(&self) -> usize {
        lock(&self.runs).len()
    }

    /// Whether no run is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tool call that is executing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ExecutingCall {
    /// The call.
    pub call_id: String,
    /// The tool.
    pub name: String,
}

/// What a run does between two commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Nothing that can be shown.
    Idle,
    /// The model is writing a response.
    Writing {
        /// Which response of the run, from 1.
        step: u32,
        /// Which attempt at it, from 1.
        attempt: u32,
    },
    /// Tool calls are running.
    Executing(Vec<ExecutingCall>),
    /// The run has ended and its `run_end` is committed.
    Ended,
}

/// A run as it is now. Written by the one driver of the run; read by anybody.
pub struct LiveRun {
    id: RunId,
    state: Mutex<State>,
    /// Counts changes: the wake-up of readers.
    changes: watch::Sender<u64>,
    at_rest: watch::Sender<bool>,
    runs: Arc<Runs>,
}

impl LiveRun {
    /// After a commit: the events it numbered, the run as it now stands, and what it does from now on, as one
    /// change. Events that were published before are passed over.
    ///
    /// A message stays open while `activity` names the same step and attempt, and is closed by anything else. The
    /// closing, and the start of another attempt, come with an event: a cursor inside the old text is
    /// recognised by the number that follows it.
    pub fn publish(&self, events: &[Event], run: &Run, activity: Activity) {
        let at_rest = run.status.is_at_rest();
        self.state().publish(events, run, activity, self.is_watched());
        self.at_rest.send_replace(at_rest);
        self.wake();
    }

    /// A step is handed to the store: until it is published, the store may be ahead.
    pub fn committing(&self) {
        self.state().committing();
    }

    /// The driver lets go of a run that it has not ended.
    pub fn let_go(&self) {
        self.state().let_go();
        self.wake();
    }

    /// Somebody asked for the end of the run, which its driver may not have heard of.
    pub fn cancel_requested(&self, at: Timestamp) {
        self.state().cancel_requested(at);
    }

    /// A fragment of the response being written. Of a response longer than a mebibyte (text and reasoning
    /// together) the rest is not streamed; it comes with the durable message. Fragments of tool calls go to those
    /// who read now and keep up; nobody else misses them, since the message holds the whole calls.
    pub fn delta(&self, delta: Delta<'_>) {
        self.state().delta(delta, self.is_watched());
        self.wake();
    }

    /// Progress of a tool call, shown to those who read now and kept nowhere.
    pub fn progress(&self, call_id: &str, text: &str) {
        if self.is_watched() {
            let frame = frame::tool_progress(self.id, call_id, text);
            self.state().passing(frame);
            self.wake();
        }
    }

    /// The run as last published; `None` before its driver did so.
    pub fn run(&self) -> Option<Run> {
        self.state().run().cloned()
    }

    /// Waits until the run has ended or waits for answers.
    pub async fn at_rest(&self) {
        let mut at_rest = self.at_rest.subscribe();
        if at_rest.wait_for(|ended| *ended).await.is_err() {
            // The sender lives as long as `self`.
            std::future::pending::<()>().await;
        }
    }

    /// The run as last published, when it is driven in this process, belongs to this tenant, and the store knows nothing
    /// of it that is not known here.
    pub(super) fn driven_run(&self, tenant: &TenantId) -> Option<Run> {
        self.state().driven_run().filter(|run| run.tenant == *tenant).cloned()
    }

    /// Whether a driver of this process has published, and the run has not ended.
    pub(super) fn is_driven(&self) -> bool {
        self.state().is_driven()
    }

    /// The wake-up of a reader. Recent frames are kept only while somebody holds one.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn join(&self, stored: &Run, cursor: Cursor, wait: bool) -> Joined {
        self.state().join(stored, cursor, wait)
    }

    pub(super) fn take(&self, at: &mut Position) -> Taken {
        self.state().take(at)
    }

    /// Asked under the lock of the state: a reader that is not counted here takes its first look later.
    fn is_watched(&self) -> bool {
        self.changes.receiver_count() > 0
    }

    fn wake(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.state().held_bytes()
    }
}

impl fmt::Debug for LiveRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveRun").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for LiveRun {
    fn drop(&mut self) {
        let mut runs = lock(&self.runs);
        // Somebody may have made a new one for the same run since the last holder let go.
        if runs.get(&self.id).is_some_and(|live| live.strong_count() == 0) {
            runs.remove(&self.id);
        }
    }
}

/// State is changed in small steps that do not panic half-way, so a poisoned lock is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
