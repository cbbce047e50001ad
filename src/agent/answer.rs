//! Answers from outside: results of calls that the caller executes, approvals, and what came of calls whose outcome was
//! unknown. Answers that come together are taken together or not at all.

use std::collections::HashSet;

use super::admit::{Checked, Toolbox};
use super::cut::cut_middle;
use super::machine::Machine;
use super::state::{Answer, AnswerProblem, Phase, Slot, UnexpectedObservation, Valid};
use crate::domain::{
    Arguments, Effect, EventBody, Message, OutcomeKind, PendingCall, PendingKind, ToolCall, ToolOutcome,
};

impl Answer {
    /// Whether this is the result that its call has in the transcript, cut to `max_chars` as that one was: whoever gave
    /// it says it again, and nothing is left to do.
    pub fn is_taken(&self, transcript: &[Message], max_chars: usize) -> bool {
        let Self::Result { call_id, content, is_error } = self else { return false };
        let last = transcript.iter().rev().find_map(|message| match message {
            Message::Tool(result) if result.call_id == *call_id => Some(result),
            Message::Tool(_) | Message::User(_) | Message::Assistant(_) => None,
        });
        last.is_some_and(|last| last.outcome == outcome(*is_error) && last.content == cut_middle(content, max_chars))
    }
}

const fn outcome(is_error: bool) -> OutcomeKind {
    if is_error { OutcomeKind::Error } else { OutcomeKind::Result }
}

impl Machine {
    /// The calls that wait for an answer.
    pub(super) fn asked(&self, slots: &[Slot]) -> Vec<PendingCall> {
        let calls = self.batch().iter().zip(slots);
        calls
            .filter_map(|(call, slot)| match slot {
                Slot::Asked(kind) => Some(PendingCall {
                    call_id: call.id.clone(),
                    name: call.name.clone(),
                    arguments: call.arguments.clone(),
                    kind: *kind,
                }),
                Slot::Pending(_) | Slot::Started(_) | Slot::Done => None,
            })
            .collect()
    }

    /// Takes answers; once no call waits any more, a worker can go on.
    pub(super) fn take_answers(
        &mut self,
        answers: Vec<Answer>,
        toolbox: &dyn Toolbox,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let Phase::Waiting { slots } = &self.state.phase else { return Ok(()) };
        let mut slots = slots.clone();
        let mut seen = HashSet::new();
        let mut outcomes = Vec::new();
        for answer in answers {
            if !seen.insert(answer.call_id().to_owned()) {
                return Err(AnswerProblem::Twice(answer.call_id().to_owned()).into());
            }
            let position = self.batch().iter().position(|call| call.id == answer.call_id());
            let place = position.and_then(|at| self.batch().get(at).zip(slots.get_mut(at)));
            let Some((call, slot @ Slot::Asked(_))) = place else {
                let pending = self.asked(&slots).into_iter().map(|call| call.call_id).collect();
                return Err(AnswerProblem::NotPending { call_id: answer.call_id().to_owned(), pending }.into());
            };
            *slot = take_answer(call, slot, answer, toolbox, &mut outcomes)?;
        }
        let is_open = slots.iter().any(|slot| matches!(slot, Slot::Asked(_)));
        self.state.phase = if is_open { Phase::Waiting { slots } } else { Phase::Answered { slots } };
        for (call, outcome) in outcomes {
            self.answer(&call, outcome, events)?;
        }
        if !is_open {
            events.push(EventBody::Resumed {});
        }
        Ok(())
    }
}

/// What becomes of a call with its answer.
fn take_answer(
    call: &ToolCall,
    slot: &Slot,
    answer: Answer,
    toolbox: &dyn Toolbox,
    outcomes: &mut Vec<(ToolCall, ToolOutcome)>,
) -> Result<Slot, AnswerProblem> {
    let Slot::Asked(kind) = slot else { return Ok(slot.clone()) };
    let mut done = |kind, content| {
        outcomes.push((call.clone(), ToolOutcome { call_id: call.id.clone(), kind, content, duration_ms: 0 }));
        Slot::Done
    };
    match (answer, kind) {
        (Answer::Result { content, is_error, .. }, PendingKind::Client | PendingKind::UnknownOutcome) => {
            Ok(done(outcome(is_error), content))
        }
        (Answer::Approve { .. }, PendingKind::Approval) => match effect(toolbox, call) {
            Ok(effect) => Ok(Slot::Pending(Valid::as_asked(effect))),
            // The tool has gone since the call was made: the model reads that.
            Err(problem) => Ok(done(OutcomeKind::Error, problem)),
        },
        (Answer::Edit { call_id, arguments }, PendingKind::Approval) => {
            let arguments = Arguments::Object(arguments);
            let edited = ToolCall { arguments: arguments.clone(), ..call.clone() };
            match effect(toolbox, &edited) {
                Ok(effect) => Ok(Slot::Pending(Valid { effect, edited: Some(arguments) })),
                Err(problem) => Err(AnswerProblem::Arguments { call_id, problem }),
            }
        }
        (Answer::Deny { message, .. }, PendingKind::Approval) => {
            let message = match message {
                Some(message) => format!("Not executed: the call was denied. {message}"),
                None => "Not executed: the call was denied.".to_owned(),
            };
            Ok(done(OutcomeKind::Refused, message))
        }
        (answer, kind) => {
            Err(AnswerProblem::WrongKind { call_id: answer.call_id().to_owned(), expected: expected(*kind) })
        }
    }
}

fn effect(toolbox: &dyn Toolbox, call: &ToolCall) -> Result<Effect, String> {
    match toolbox.check(call) {
        Checked::Ready { effect, .. } => Ok(effect),
        Checked::Invalid(problem) => Err(problem),
    }
}

const fn expected(kind: PendingKind) -> &'static str {
    match kind {
        PendingKind::Client => "the result of the caller's tool: POST it to tool_results",
        PendingKind::Approval => "an approval: POST approve, edit or deny to approvals",
        PendingKind::UnknownOutcome => "what came of it: POST that to tool_results",
    }
}
