//! The state machine of a run: an observation goes in, what to record and what to do next comes out.

use std::collections::BTreeSet;

use super::admit::{Toolbox, check_envelope};
use super::batch::{candidates, check_all};
use super::context::{ContextLimit, Selection, select};
use super::repeat::Repeats;
use super::state::{
    AgentState, Doing, Interrupt, ModelCall, Observation, Phase, Slot, Step, Transition, UnexpectedObservation,
};
use super::tokens::{estimate_part, estimate_text};
use super::transcript::{IllFormed, Transcript};
use crate::domain::{
    AssistantMessage, End, EndStatus, EventBody, FailureClass, LimitKind, Message, ModelFailure, ModelTurn, Part,
    RunError, RunSpec, ToolCall, ToolOutcome, Usage,
};

/// A run's decisions, with all they depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub(super) spec: RunSpec,
    /// Estimated tokens of instructions and tool schemas.
    pub(super) head_tokens: u64,
    pub(super) state: AgentState,
    pub(super) transcript: Transcript,
    /// How many messages of the transcript are the input.
    input_len: usize,
    pub(super) repeats: Repeats,
}

impl Machine {
    /// A run that was never started. `head_tokens` is the estimated cost of instructions and tool schemas.
    /// `history` is what was said in the runs that it continues.
    pub fn new(mut spec: RunSpec, head_tokens: u64, history: Vec<Message>) -> Result<Self, IllFormed> {
        let input = std::mem::take(&mut spec.input);
        let transcript = Transcript::from_messages(history.into_iter().chain(input))?;
        let state = AgentState {
            steps: 0,
            tool_calls: 0,
            usage: Usage::default(),
            spent_tokens: 0,
            repeat_warned: false,
            limits_warned: BTreeSet::new(),
            dropped: 0,
            limits: None,
            said: Vec::new(),
            phase: Phase::New,
        };
        let repeats = Repeats::new(spec.repeat_limit);
        Ok(Self { input_len: transcript.len(), spec, head_tokens, state, transcript, repeats })
    }

    /// A run that goes on from its stored state; `messages` are those that followed the input.
    pub fn restore(
        spec: RunSpec,
        head_tokens: u64,
        history: Vec<Message>,
        state: AgentState,
        messages: Vec<Message>,
        toolbox: &dyn Toolbox,
    ) -> Result<Self, IllFormed> {
        let mut machine = Self::new(spec, head_tokens, history)?;
        if let Some(limits) = state.limits {
            machine.spec.limits = limits;
        }
        for message in messages {
            let position = machine.transcript.len();
            if let Message::Assistant(assistant) = &message
                && !assistant.tool_calls.is_empty()
            {
                machine.repeats.record(&candidates(&assistant.tool_calls, &check_all(assistant, toolbox)), position);
            }
            machine.transcript.push(message)?;
        }
        machine.state = state;
        Ok(machine)
    }

    /// What is stored with each commit.
    pub const fn state(&self) -> &AgentState {
        &self.state
    }

    /// What was said so far.
    pub const fn transcript(&self) -> &Transcript {
        &self.transcript
    }

    /// What the caller said.
    pub fn input(&self) -> impl Iterator<Item = &Message> {
        self.transcript.messages().take(self.input_len).map(AsRef::as_ref)
    }

    /// What the run was accepted as; its input has moved into the transcript.
    pub const fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// What is to be done now.
    pub fn step(&self) -> Step {
        match &self.state.phase {
            Phase::New => Step::Start,
            Phase::Model { attempt } => Step::CallModel(ModelCall {
                step: self.state.steps + 1,
                attempt: *attempt,
                // Entering this phase made sure that a selection exists.
                messages: self.selection().map(|selection| selection.messages(&self.transcript)).unwrap_or_default(),
            }),
            Phase::Tools { slots } => Step::RunTools(self.started(slots).collect()),
            Phase::Waiting { .. } => Step::Wait,
            Phase::Answered { .. } => Step::Resume,
            Phase::Finished { end } => Step::Finish(end.clone()),
        }
    }

    /// How the run ended, if it has.
    pub const fn end(&self) -> Option<&End> {
        match &self.state.phase {
            Phase::Finished { end } => Some(end),
            Phase::New | Phase::Model { .. } | Phase::Tools { .. } | Phase::Waiting { .. } | Phase::Answered { .. } => {
                None
            }
        }
    }

    /// What the run is doing, without what that takes.
    pub fn doing(&self) -> Doing<'_, impl Iterator<Item = ToolCall>> {
        match &self.state.phase {
            Phase::New => Doing::Nothing,
            Phase::Model { attempt } => Doing::Calling { step: self.state.steps + 1, attempt: *attempt },
            Phase::Tools { slots } => Doing::Running(self.started(slots)),
            Phase::Waiting { slots } => Doing::Waiting(self.asked(slots)),
            Phase::Answered { .. } => Doing::Answered,
            Phase::Finished { end } => Doing::Over(end),
        }
    }

    /// The calls that run, with the arguments they run with.
    fn started<'a>(&'a self, slots: &'a [Slot]) -> impl Iterator<Item = ToolCall> {
        self.batch().iter().zip(slots).filter_map(|(call, slot)| match slot {
            Slot::Started(valid) => Some(valid.apply(call)),
            Slot::Pending(_) | Slot::Asked(_) | Slot::Done => None,
        })
    }

    /// Takes what happened and decides what follows.
    pub fn observe(
        &mut self,
        observation: Observation,
        toolbox: &dyn Toolbox,
    ) -> Result<Transition, UnexpectedObservation> {
        let mut events = Vec::new();
        match (observation, &self.state.phase) {
            (Observation::Start, Phase::New) => {
                events.push(EventBody::RunStart { agent: self.spec.agent.clone(), model: self.spec.model.clone() });
                self.enter_model(&mut events)?;
            }
            (Observation::TakenOver, _) => self.go_on_elsewhere(toolbox, &mut events)?,
            (Observation::Answers(answers), Phase::Waiting { .. }) => {
                self.take_answers(answers, toolbox, &mut events)?;
            }
            (Observation::Resumed, Phase::Answered { slots }) => {
                self.state.phase = Phase::Tools { slots: slots.clone() };
                self.go_on_with_batch(&mut events)?;
            }
            (Observation::Said(items), _) => self.hear(items, &mut events)?,
            (Observation::ModelTurn { turn, duration_ms }, Phase::Model { attempt }) => {
                let attempt = *attempt;
                self.take_turn(turn, attempt, duration_ms, toolbox, &mut events)?;
            }
            (Observation::ModelRetry { failure, partial, delay_ms }, Phase::Model { attempt }) => {
                let attempt = attempt.saturating_add(1);
                self.try_again(failure, &partial, attempt, delay_ms, &mut events);
            }
            (Observation::ModelFailed { failure, duration_ms, partial }, Phase::Model { attempt }) => {
                let attempt = *attempt;
                self.fail_model(failure, attempt, duration_ms, partial, &mut events)?;
            }
            (Observation::ToolOutcomes { outcomes, fatal }, Phase::Tools { .. }) => {
                for outcome in outcomes {
                    self.take_outcome(outcome, &mut events)?;
                }
                match fatal {
                    Some(message) => {
                        let error = RunError { code: "tool_failed".to_owned(), message, retryable: false };
                        self.interrupt(Interrupt::Failed(error), Vec::new(), Vec::new(), &mut events)?;
                    }
                    None => self.go_on_with_batch(&mut events)?,
                }
            }
            (
                Observation::Interrupt { cause, partial, outcomes },
                Phase::New | Phase::Model { .. } | Phase::Tools { .. } | Phase::Waiting { .. } | Phase::Answered { .. },
            ) => {
                self.interrupt(cause, partial, outcomes, &mut events)?;
            }
            (observation, phase) => return Err(unexpected(&observation, phase)),
        }
        Ok(Transition { events })
    }

    fn take_turn(
        &mut self,
        turn: ModelTurn,
        attempt: u32,
        duration_ms: u64,
        toolbox: &dyn Toolbox,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let usage = match check_envelope(&turn).and_then(|()| {
            self.state
                .usage
                .plus(turn.usage)
                .map_err(|error| ModelFailure::new(FailureClass::Protocol, error.to_string()))
        }) {
            Ok(usage) => usage,
            Err(failure) => return self.fail_model(failure, attempt, duration_ms, Vec::new(), events),
        };
        self.state.spent_tokens = self.state.spent_tokens.saturating_add(match turn.usage {
            Some(usage) => usage.input_tokens.saturating_add(usage.output_tokens),
            None => self.estimated_call(&turn),
        });
        self.state.usage = usage;
        self.state.steps += 1;
        events.push(EventBody::ModelEnd {
            step: self.state.steps,
            attempt,
            duration_ms,
            finish_reason: turn.finish,
            usage: turn.usage,
        });
        if turn.tool_calls.is_empty() {
            let end = End::Completed { answer: turn.text(), finish_reason: turn.finish };
            self.say(turn.into_message(), events)?;
            self.state.phase = Phase::Finished { end };
            return Ok(());
        }
        self.take_batch(turn, toolbox, events)
    }

    /// Goes to the next model call if every limit allows it, else ends the run.
    pub(super) fn enter_model(&mut self, events: &mut Vec<EventBody>) -> Result<(), UnexpectedObservation> {
        self.say_what_was_heard(events)?;
        let limits = self.spec.limits;
        if self.state.steps >= limits.max_steps {
            let words = format!("the run used max_steps = {} and the model still calls tools", limits.max_steps);
            self.stop(EndStatus::StepLimit, words, None);
            return Ok(());
        }
        let selection = match self.selection() {
            Ok(selection) => selection,
            Err(limit) => {
                self.stop(EndStatus::ContextLimit, limit.to_string(), None);
                return Ok(());
            }
        };
        if !self.has_tokens_for(selection.tokens) {
            return Ok(());
        }
        let step = self.state.steps + 1;
        if selection.dropped > self.state.dropped {
            events.push(EventBody::ContextTrimmed {
                step,
                dropped_messages: selection.dropped,
                estimated_tokens: selection.tokens,
            });
        }
        self.state.dropped = selection.dropped;
        self.warn_of_limits(events);
        self.state.phase = Phase::Model { attempt: 1 };
        events.push(EventBody::ModelStart { step, attempt: 1 });
        Ok(())
    }

    /// Counts an attempt that was cut off against the budget, and goes on to the next when there is room for it.
    fn try_again(
        &mut self,
        failure: ModelFailure,
        partial: &[Part],
        attempt: u32,
        delay_ms: u64,
        events: &mut Vec<EventBody>,
    ) {
        let request = self.request_tokens();
        if !partial.is_empty() {
            let heard: u64 = partial.iter().map(estimate_part).sum();
            self.state.spent_tokens = self.state.spent_tokens.saturating_add(request).saturating_add(heard);
        }
        if !self.has_tokens_for(request) {
            return;
        }
        events.push(EventBody::ModelRetry {
            step: self.state.steps + 1,
            attempt,
            reason: failure.class,
            message: failure.message,
            delay_ms,
        });
        self.state.phase = Phase::Model { attempt };
    }

    /// Ends the run when a request of this size does not fit what is left of `max_tokens`.
    pub(super) fn has_tokens_for(&mut self, request: u64) -> bool {
        let (used, max) = (self.state.spent_tokens, self.spec.limits.max_tokens);
        let fits = used.saturating_add(request) <= max;
        if !fits {
            let words = format!(
                "{used} tokens are used and the next request needs about {request}, more than max_tokens = {max}"
            );
            self.stop(EndStatus::TokenLimit, words, None);
        }
        fits
    }

    fn warn_of_limits(&mut self, events: &mut Vec<EventBody>) {
        let limits = self.spec.limits;
        for (limit, used, max) in [
            (LimitKind::MaxSteps, u64::from(self.state.steps), u64::from(limits.max_steps)),
            (LimitKind::MaxToolCalls, u64::from(self.state.tool_calls), u64::from(limits.max_tool_calls)),
            (LimitKind::MaxTokens, self.state.spent_tokens, limits.max_tokens),
        ] {
            let nearly = used > 0 && used.saturating_mul(5) >= max.saturating_mul(4);
            if nearly && self.state.limits_warned.insert(limit) {
                events.push(EventBody::LimitWarning { limit, used, max });
            }
        }
    }

    pub(super) fn interrupt(
        &mut self,
        cause: Interrupt,
        partial: Vec<Part>,
        outcomes: Vec<ToolOutcome>,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        if matches!(cause, Interrupt::Cancel) {
            events.push(EventBody::CancelRequested {});
        }
        for outcome in outcomes {
            self.take_outcome(outcome, events)?;
        }
        self.answer_the_rest(&cause, events)?;
        let (status, error) = match cause {
            Interrupt::Cancel => (
                EndStatus::Aborted,
                RunError { code: "aborted".to_owned(), message: "the run was aborted".to_owned(), retryable: true },
            ),
            Interrupt::Deadline => (
                EndStatus::Timeout,
                RunError {
                    code: "timeout".to_owned(),
                    message: format!("the run did not finish within timeout_ms = {}", self.spec.limits.timeout_ms),
                    retryable: true,
                },
            ),
            Interrupt::WaitExpired => (
                EndStatus::Timeout,
                RunError {
                    code: "wait_expired".to_owned(),
                    message: format!(
                        "what the run waited for did not come within wait_timeout_ms = {}",
                        self.spec.limits.wait_timeout_ms
                    ),
                    retryable: true,
                },
            ),
            Interrupt::Failed(error) | Interrupt::WorkerLost(error) => (EndStatus::InternalError, error),
        };
        self.keep_partial(partial, events)?;
        self.finish_early(status, error, None);
        Ok(())
    }

    fn fail_model(
        &mut self,
        failure: ModelFailure,
        attempt: u32,
        duration_ms: u64,
        partial: Vec<Part>,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        events.push(EventBody::ModelError {
            step: self.state.steps + 1,
            attempt,
            duration_ms,
            reason: failure.class,
            message: failure.message.clone(),
        });
        self.keep_partial(partial, events)?;
        self.finish_early(EndStatus::ModelError, failure.into(), None);
        Ok(())
    }

    /// Records what was streamed and never finished, marked as such.
    fn keep_partial(&mut self, partial: Vec<Part>, events: &mut Vec<EventBody>) -> Result<(), UnexpectedObservation> {
        if partial.is_empty() {
            return Ok(());
        }
        self.say(AssistantMessage { content: partial, tool_calls: Vec::new(), incomplete: true }, events)
    }

    pub(super) fn say(
        &mut self,
        message: AssistantMessage,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        // An unfinished response belongs to the step that was being made.
        let step = self.state.steps + u32::from(message.incomplete);
        let message = Message::Assistant(message);
        self.transcript.push(message.clone())?;
        events.push(EventBody::Message { step, message });
        Ok(())
    }

    pub(super) fn stop(&mut self, status: EndStatus, message: String, partial: Option<String>) {
        let error = RunError { code: status.name().as_str().to_owned(), message, retryable: false };
        self.finish_early(status, error, partial);
    }

    fn finish_early(&mut self, status: EndStatus, error: RunError, partial: Option<String>) {
        let partial = partial.filter(|text| !text.is_empty()).or_else(|| self.last_text());
        self.state.phase = Phase::Finished { end: End::Stopped { status, partial, error } };
    }

    /// The newest text the model said in this run.
    fn last_text(&self) -> Option<String> {
        self.transcript.messages().rev().take(self.transcript.len() - self.input_len).find_map(|message| match message
            .as_ref()
        {
            Message::Assistant(assistant) => Some(assistant.text()).filter(|text| !text.is_empty()),
            Message::User(_) | Message::Tool(_) => None,
        })
    }

    /// Estimated tokens of the next request.
    pub(super) fn request_tokens(&self) -> u64 {
        self.selection().map_or(0, |selection| selection.tokens)
    }

    fn selection(&self) -> Result<Selection, ContextLimit> {
        select(&self.transcript, self.head_tokens, self.spec.context.max_tokens)
    }

    fn estimated_call(&self, turn: &ModelTurn) -> u64 {
        let request = self.request_tokens();
        let calls: u64 = turn.tool_calls.iter().map(|call| estimate_text(&call.arguments.canonical())).sum();
        request.saturating_add(estimate_text(&turn.text())).saturating_add(calls)
    }
}

fn unexpected(observation: &Observation, phase: &Phase) -> UnexpectedObservation {
    let observation = match observation {
        Observation::Start => "a start",
        Observation::ModelTurn { .. } | Observation::ModelRetry { .. } | Observation::ModelFailed { .. } => {
            "a model response"
        }
        Observation::ToolOutcomes { .. } => "a tool outcome",
        Observation::TakenOver => "a change of hands",
        Observation::Answers(_) => "an answer from outside",
        Observation::Resumed => "a resumption",
        Observation::Said(_) => "a message",
        Observation::Interrupt { .. } => "an interrupt",
    };
    let expected = match phase {
        Phase::New => "the run has not started",
        Phase::Model { .. } => "a model response is awaited",
        Phase::Tools { .. } => "tool outcomes are awaited",
        Phase::Waiting { .. } => "answers from outside are awaited",
        Phase::Answered { .. } => "a worker has to go on",
        Phase::Finished { .. } => "the run is over",
    };
    UnexpectedObservation::Phase { observation, expected }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
pub(super) mod tests;
