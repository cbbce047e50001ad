//! The task of one run: ask the machine, do it, commit, publish, until it is over. Live runs, recovered runs and runs
//! that only have to be ended go the same way.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::apart::{Start, Turn};
use super::commit::{Author, CommitError, LiveProgress, commit, hear};
use super::control::Control;
use super::heard::{Heard, Sink};
use super::scratch::Scratch;
use super::services::Services;
use super::task::{RestoreError, Work};
use super::timeline::Timeline;
use super::watch::Watch;
use crate::agent::{Interrupt, ModelCall, Observation, Step, Transition, UnexpectedObservation};
use crate::domain::{
    FailureClass, ModelFailure, ModelRequest, ModelTurn, Part, Run, RunError, RunStatus, Timestamp, ToolCall,
    ToolOutcome,
};
use crate::provider::conversation::Conversation;
use crate::provider::retry::Decision;
use crate::store::{ClaimedRun, Former};
use crate::tool::executor::{GroupCtx, execute};
use crate::tool::workspace::Workspace;

/// What a driver has from whoever started it.
pub(super) struct Parts {
    pub(super) services: Arc<Services>,
    pub(super) scratch: Arc<Scratch>,
    /// How the run is told to end.
    pub(super) control: Arc<Control>,
    /// Fires when nothing new may be begun.
    pub(super) stopping: CancellationToken,
    /// What it waits for first.
    pub(super) start: Start,
}

/// How a run came into the hands of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// It was never at work.
    New,
    /// It was at work and let go of properly.
    Resumed,
    /// It was at work, and what was done since its last commit is lost.
    TakenOver,
}

impl Origin {
    /// That of a run as it is claimed.
    pub(super) const fn of(claimed: &ClaimedRun) -> Self {
        match (&claimed.state, claimed.former) {
            (None, _) => Self::New,
            (Some(_), Former::Gone) => Self::TakenOver,
            (Some(_), Former::None | Former::LetGo) => Self::Resumed,
        }
    }
}

/// How a driver left its run.
pub(super) enum Left {
    /// It has ended.
    Ended(Box<Run>),
    /// It waits for answers to so many calls, in nobody's hands.
    Waiting(usize),
    /// It is at rest after a commit, for the next process to go on.
    Parked,
}

/// A run in progress.
pub(super) struct Driver {
    services: Arc<Services>,
    scratch: Arc<Scratch>,
    work: Work,
    origin: Origin,
    control: Arc<Control>,
    stopping: CancellationToken,
    start: Start,
    /// Held while it is begun apart from others, until it gets further.
    turn: Option<Turn>,
    deadline: Instant,
    timeline: Timeline,
    /// What its provider keeps of it.
    conversation: Conversation,
    watch: Watch,
}

/// The run cannot be driven any further in this process.
#[derive(Debug, thiserror::Error)]
pub(super) enum DriveError {
    #[error(transparent)]
    Commit(#[from] CommitError),
    #[error("the run's state does not fit what happened: {0}")]
    Machine(#[from] UnexpectedObservation),
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(
        "{0} processes in a row ended with this run before it got any further, the last ones when it was begun apart"
    )]
    Crashes(u32),
}

impl Driver {
    /// Begins to drive a run that this process has: it is stored, and nobody else's.
    pub(super) fn begin(parts: Parts, work: Work, origin: Origin) -> Self {
        let Parts { services, scratch, control, stopping, start } = parts;
        let now = services.clock.now();
        Self {
            deadline: deadline(&work.run, now),
            timeline: Timeline::of(&work.run, now),
            conversation: Conversation::default(),
            watch: Watch::begin(&services, &work.run, &work.machine),
            services,
            scratch,
            work,
            origin,
            control,
            stopping,
            start,
            turn: None,
        }
    }

    /// Drives the run until it ends, waits, or is left to the next process.
    pub(super) async fn drive(mut self) -> Result<Left, DriveError> {
        let mut workspace = None;
        self.wait_for_turn().await;
        if self.origin == Origin::TakenOver {
            let transition = self.work.machine.observe(Observation::TakenOver, &self.work.tools)?;
            // It has not got any further by this.
            self.commit(transition).await?;
        }
        loop {
            let step = self.work.machine.step();
            match &step {
                Step::Finish(_) => return Ok(Left::Ended(Box::new(self.work.run))),
                Step::Wait => return Ok(Left::Waiting(pending(&self.work.run))),
                Step::Start | Step::CallModel(_) | Step::RunTools(_) | Step::Resume => {}
            }
            // Nothing new starts once somebody asked for the end.
            if let Some(cause) = self.interrupted_already() {
                self.interrupt(cause, Vec::new(), Vec::new()).await?;
                continue;
            }
            // A call whose start is recorded is made: nobody else could know that it was not.
            if self.stopping.is_cancelled() && !matches!(step, Step::RunTools(_)) {
                return Ok(Left::Parked);
            }
            if self.has_mail() {
                self.hear().await?;
                continue;
            }
            match step {
                Step::Finish(_) | Step::Wait => {}
                Step::Start => self.observe(Observation::Start).await?,
                Step::Resume => self.observe(Observation::Resumed).await?,
                Step::CallModel(call) => {
                    if call.attempt == 1 {
                        self.watch.step(&self.work.run.agent);
                    }
                    self.call_model(call).await?;
                }
                Step::RunTools(calls) => {
                    let opened = match workspace.clone() {
                        Some(workspace) => Ok(workspace),
                        None => self.open_workspace().await,
                    };
                    match opened {
                        Ok(opened) => {
                            workspace = Some(Arc::clone(&opened));
                            self.run_tools(calls, opened).await?;
                        }
                        Err(error) => self.interrupt(Interrupt::Failed(error), Vec::new(), Vec::new()).await?,
                    }
                }
            }
        }
    }

    /// Waits until it may begin, or has to end.
    async fn wait_for_turn(&mut self) {
        let start = std::mem::replace(&mut self.start, Start::AtOnce);
        self.turn = tokio::select! {
            biased;
            _ = interrupted(&self.control, self.deadline) => None,
            () = self.stopping.cancelled() => None,
            turn = start.wait() => turn,
        };
    }

    async fn call_model(&mut self, call: ModelCall) -> Result<(), DriveError> {
        let attempt = call.attempt;
        let started = Instant::now();
        let control = Arc::clone(&self.control);
        let mut heard = Heard::default();
        let mut conversation = std::mem::take(&mut self.conversation);
        let result = tokio::select! {
            biased;
            cause = interrupted(&control, self.deadline) => Err(cause),
            result = self.attempt(call, &mut conversation, &mut heard) => Ok(result),
        };
        self.conversation = conversation;
        let duration_ms = elapsed_ms(started);
        match result {
            // The provider's connection went with the attempt's future.
            Err(cause) => self.interrupt(cause, heard.parts(), Vec::new()).await,
            Ok(Ok(turn)) => self.observe(Observation::ModelTurn { turn, duration_ms }).await,
            Ok(Err(failed)) => self.after_failure(failed, heard.parts(), attempt, duration_ms).await,
        }
    }

    /// One attempt at a model call, within its timeout.
    async fn attempt(
        &self,
        call: ModelCall,
        conversation: &mut Conversation,
        heard: &mut Heard,
    ) -> Result<ModelTurn, Failed> {
        let spec = self.work.machine.spec();
        let Some(endpoint) = self.services.catalog.get(&spec.model.provider) else {
            let message = format!("the provider `{}` is no longer configured", spec.model.provider);
            return Err(Failed::ForGood(ModelFailure::new(FailureClass::InvalidRequest, message)));
        };
        let mut request = ModelRequest {
            run: self.work.run.id,
            step: call.step,
            attempt: call.attempt,
            model: spec.model.model.clone(),
            instructions: spec.instructions.clone(),
            messages: call.messages,
            tools: Arc::clone(self.work.tools.specs()),
            max_output_tokens: spec.max_output_tokens,
            trace: None,
        };
        let mut watch = self.watch.model_call(&request, spec, endpoint);
        request.trace = watch.context();
        let limit = spec.limits.model_timeout_ms;
        let mut sink = Sink { live: &self.work.live, heard, watch: &mut watch };
        let asked = endpoint.provider.call(&request, conversation, &mut sink);
        match timeout(Duration::from_millis(limit), asked).await {
            Ok(Ok(turn)) => {
                watch.answered(&turn);
                Ok(turn)
            }
            Ok(Err(failure)) => {
                watch.failed(failure.class);
                Err(Failed::ThisTime(failure))
            }
            Err(_) => {
                watch.failed(FailureClass::TimedOut);
                let message = format!(
                    "`{}` did not finish within model_timeout_ms = {limit}; raise limits.model_timeout_ms or set \
                     max_output_tokens of the provider",
                    spec.model
                );
                let failure = ModelFailure::new(FailureClass::TimedOut, message);
                // A response that was being written is only long: it would be as long the next time.
                Err(if heard.is_empty() { Failed::ThisTime(failure) } else { Failed::ForGood(failure) })
            }
        }
    }

    async fn after_failure(
        &mut self,
        failed: Failed,
        partial: Vec<Part>,
        attempt: u32,
        duration_ms: u64,
    ) -> Result<(), DriveError> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        let provider = &self.work.machine.spec().model.provider;
        let (failure, decision) = match (failed, self.services.catalog.get(provider)) {
            (Failed::ThisTime(failure), Some(endpoint)) => {
                let decision = endpoint.retry.next(&failure, attempt, remaining, (self.services.jitter)());
                (failure, decision)
            }
            (Failed::ThisTime(failure) | Failed::ForGood(failure), _) => (failure, Decision::GiveUp),
        };
        tracing::info!(attempt, class = failure.class.code(), error = %failure, "model call failed");
        match decision {
            Decision::GiveUp => self.observe(Observation::ModelFailed { failure, duration_ms, partial }).await,
            Decision::Retry { delay } => {
                let class = failure.class;
                let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
                self.observe(Observation::ModelRetry { failure, partial, delay_ms }).await?;
                let control = Arc::clone(&self.control);
                tokio::select! {
                    biased;
                    cause = interrupted(&control, self.deadline) => self.interrupt(cause, Vec::new(), Vec::new()).await,
                    // Not to be waited for: the next process makes the attempt.
                    () = self.stopping.cancelled() => Ok(()),
                    () = sleep(delay) => {
                        self.watch.retry(&self.work.machine.spec().model.provider, class);
                        Ok(())
                    }
                }
            }
        }
    }

    /// Runs a group of calls to the end of each; outcomes are committed as they come.
    async fn run_tools(&mut self, calls: Vec<ToolCall>, workspace: Arc<Workspace>) -> Result<(), DriveError> {
        let cancel = self.control.cancelled().child_token();
        let (ready, missing): (Vec<_>, Vec<_>) = calls
            .into_iter()
            .map(|call| (call.id.clone(), self.work.tools.ready(call)))
            .partition(|(_, call)| call.is_some());
        let mut outcomes: Vec<ToolOutcome> = missing.into_iter().map(|(call_id, _)| gone(call_id)).collect();
        let ready: Vec<_> = ready.into_iter().filter_map(|(_, call)| call).collect();
        let mut watch = self.watch.tools(&ready);
        let mut execution = execute(
            ready,
            GroupCtx {
                run: self.work.run.id,
                workspace,
                cancel: cancel.clone(),
                timeout: Duration::from_millis(self.work.machine.spec().limits.tool_timeout_ms),
                progress: Arc::new(LiveProgress(Arc::clone(&self.work.live))),
            },
        );
        let control = Arc::clone(&self.control);
        loop {
            if !outcomes.is_empty() {
                // New bounds count for what is decided now.
                if self.has_mail() {
                    self.hear().await?;
                }
                let outcomes = std::mem::take(&mut outcomes);
                self.observe(Observation::ToolOutcomes { outcomes, fatal: None }).await?;
            }
            let executed = tokio::select! {
                biased;
                cause = interrupted(&control, self.deadline) => {
                    cancel.cancel();
                    let mut outcomes = Vec::new();
                    while let Some(executed) = execution.next().await {
                        watch.ended(&executed.outcome);
                        outcomes.push(executed.outcome);
                    }
                    return self.interrupt(cause, Vec::new(), outcomes).await;
                }
                executed = execution.next() => executed,
            };
            let Some(executed) = executed else { return Ok(()) };
            watch.ended(&executed.outcome);
            match executed.fatal {
                None => outcomes.push(executed.outcome),
                Some(message) => {
                    // The others of the group are stopped and told of as what they are.
                    cancel.cancel();
                    let mut outcomes = vec![executed.outcome];
                    while let Some(executed) = execution.next().await {
                        watch.ended(&executed.outcome);
                        outcomes.push(executed.outcome);
                    }
                    return self.observe(Observation::ToolOutcomes { outcomes, fatal: Some(message) }).await;
                }
            }
        }
    }

    async fn interrupt(
        &mut self,
        cause: Interrupt,
        partial: Vec<Part>,
        outcomes: Vec<ToolOutcome>,
    ) -> Result<(), DriveError> {
        if let Interrupt::Cancel = cause {
            self.work.run.cancel_requested_at = self.control.cancelled_at();
        }
        self.observe(Observation::Interrupt { cause, partial, outcomes }).await
    }

    async fn observe(&mut self, observation: Observation) -> Result<(), DriveError> {
        let transition = self.work.machine.observe(observation, &self.work.tools)?;
        self.work.run.crashes = 0;
        self.commit(transition).await?;
        drop(self.turn.take());
        Ok(())
    }

    async fn commit(&mut self, transition: Transition) -> Result<(), DriveError> {
        let moment = self.timeline.moment(self.services.clock.now());
        commit(self.services.store.as_ref(), &mut self.work, transition, moment, Author::Worker).await?;
        let run = &self.work.run;
        // A wake-up can be lost; what is stored cannot.
        if let Some(at) = run.cancel_requested_at {
            self.control.cancel(at);
        }
        if run.status.is_finished() {
            self.watch.ended(run, moment.ran_for);
        }
        Ok(())
    }

    /// Whether something was said to the run that it has not heard.
    fn has_mail(&self) -> bool {
        self.control.take_mail() || self.work.inbox > self.work.inbox_read
    }

    /// Takes in what was said to the run.
    async fn hear(&mut self) -> Result<(), DriveError> {
        let before = self.work.inbox_read;
        let inbox = self.work.inbox;
        let transition = hear(self.services.store.as_ref(), &mut self.work, inbox).await?;
        if self.work.inbox_read > before {
            self.commit(transition).await?;
        }
        self.deadline = deadline(&self.work.run, self.services.clock.now());
        Ok(())
    }

    fn interrupted_already(&self) -> Option<Interrupt> {
        if self.control.cancelled().is_cancelled() {
            Some(Interrupt::Cancel)
        } else if self.deadline <= Instant::now() {
            Some(Interrupt::Deadline)
        } else {
            None
        }
    }

    async fn open_workspace(&self) -> Result<Arc<Workspace>, RunError> {
        match &self.work.machine.spec().workspace {
            Some(name) => self.services.agents.workspace(name).map(Arc::clone).ok_or_else(|| RunError {
                code: "workspace_unusable".to_owned(),
                message: format!("the workspace `{name}` is no longer configured"),
                retryable: false,
            }),
            None => self.scratch.make(self.work.run.id, self.origin != Origin::New).await,
        }
    }
}

/// When a run has to end, as an instant of this process.
fn deadline(run: &Run, now: Timestamp) -> Instant {
    let left = match &run.status {
        RunStatus::Running { deadline_at, .. } => deadline_at.since(now),
        RunStatus::Queued { .. } | RunStatus::Waiting { .. } | RunStatus::Finished { .. } => Duration::ZERO,
    };
    Instant::now() + left
}

/// How many calls a run waits for.
fn pending(run: &Run) -> usize {
    match &run.status {
        RunStatus::Waiting { calls, .. } => calls.len(),
        RunStatus::Queued { .. } | RunStatus::Running { .. } | RunStatus::Finished { .. } => 0,
    }
}

/// Resolves when the run has to end.
async fn interrupted(control: &Control, deadline: Instant) -> Interrupt {
    tokio::select! {
        biased;
        () = control.cancelled().cancelled() => Interrupt::Cancel,
        () = sleep_until(deadline) => Interrupt::Deadline,
    }
}

fn elapsed_ms(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn gone(call_id: String) -> ToolOutcome {
    ToolOutcome {
        call_id,
        kind: crate::domain::OutcomeKind::Error,
        content: "This tool is no longer available.".to_owned(),
        duration_ms: 0,
    }
}

/// Why an attempt gave no turn.
enum Failed {
    /// Another attempt may do better.
    ThisTime(ModelFailure),
    /// It would not.
    ForGood(ModelFailure),
}
