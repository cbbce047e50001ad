//! Going on from the last commit of a worker that is gone. Nothing is repeated that could have an effect twice: a call
//! that was started and has no outcome is run again only when its effect allows it.

use super::admit::Toolbox;
use super::batch::UNKNOWN_OUTCOME;
use super::machine::Machine;
use super::state::{Interrupt, Phase, Slot, UnexpectedObservation};
use crate::domain::{
    AbandonedAttempt, Effect, EventBody, OnUnknown, OutcomeKind, PendingKind, RunError, ToolCall, ToolOutcome,
};

impl Machine {
    /// Settles what the former worker had begun and not recorded.
    pub(super) fn go_on_elsewhere(
        &mut self,
        toolbox: &dyn Toolbox,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        match &self.state.phase {
            Phase::Model { attempt } => {
                let attempt = *attempt;
                self.abandon_attempt(attempt, events);
                Ok(())
            }
            Phase::Tools { slots } => {
                let slots = slots.clone();
                self.settle_started(slots, toolbox, events)
            }
            // Nothing was begun that is not recorded.
            Phase::New | Phase::Waiting { .. } | Phase::Answered { .. } | Phase::Finished { .. } => Ok(()),
        }
    }

    /// A model call that was cut off is made again; the provider may have counted it.
    fn abandon_attempt(&mut self, attempt: u32, events: &mut Vec<EventBody>) {
        let step = self.state.steps + 1;
        let estimated_tokens = self.request_tokens();
        self.state.spent_tokens = self.state.spent_tokens.saturating_add(estimated_tokens);
        events.push(EventBody::Recovered {
            abandoned: Some(AbandonedAttempt { step, attempt, estimated_tokens }),
            rerun: Vec::new(),
            unknown: Vec::new(),
        });
        if self.has_tokens_for(estimated_tokens) {
            let attempt = attempt.saturating_add(1);
            self.state.phase = Phase::Model { attempt };
            events.push(EventBody::ModelStart { step, attempt });
        }
    }

    fn settle_started(
        &mut self,
        mut slots: Vec<Slot>,
        toolbox: &dyn Toolbox,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let (mut rerun, mut unknown, mut told) = (Vec::new(), Vec::new(), Vec::new());
        let mut failed: Option<ToolCall> = None;
        for (call, slot) in self.batch().iter().zip(&mut slots) {
            let Slot::Started(valid) = slot else { continue };
            match valid.effect {
                Effect::ReadOnly | Effect::Idempotent => rerun.push(call.id.clone()),
                Effect::SideEffect => {
                    unknown.push(call.id.clone());
                    match toolbox.on_unknown(call) {
                        OnUnknown::Tell => {
                            *slot = Slot::Done;
                            told.push(call.clone());
                        }
                        OnUnknown::Hold => *slot = Slot::Asked(PendingKind::UnknownOutcome),
                        OnUnknown::Fail => failed = Some(call.clone()),
                    }
                }
            }
        }
        self.state.phase = Phase::Tools { slots };
        events.push(EventBody::Recovered { abandoned: None, rerun, unknown });
        for call in told {
            let content = UNKNOWN_OUTCOME.to_owned();
            let outcome =
                ToolOutcome { call_id: call.id.clone(), kind: OutcomeKind::OutcomeUnknown, content, duration_ms: 0 };
            self.answer(&call, outcome, events)?;
        }
        match failed {
            Some(call) => {
                let error = RunError {
                    code: "outcome_unknown".to_owned(),
                    message: format!(
                        "call `{}` of `{}` was started when the process that ran it ended, and its outcome is unknown",
                        call.id, call.name
                    ),
                    retryable: false,
                };
                self.interrupt(Interrupt::WorkerLost(error), Vec::new(), Vec::new(), events)
            }
            None => self.go_on_with_batch(events),
        }
    }
}
