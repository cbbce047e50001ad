//! The machine's dealings with one batch of tool calls: admitted whole or not at all, started in order, every call
//! answered exactly once.

use super::admit::{Checked, Toolbox};
use super::cut::cut_middle;
use super::machine::Machine;
use super::repeat::Candidate;
use super::state::{Interrupt, Phase, Slot, UnexpectedObservation, Valid};
use crate::domain::{
    AssistantMessage, Effect, EndStatus, ErrorMark, EventBody, FinishReason, Gate, Message, ModelTurn, OnRepeat,
    OutcomeKind, ParallelTools, PendingKind, ToolCall, ToolMessage, ToolOutcome,
};

impl Machine {
    /// Admits a batch of calls as a whole, or ends the run without a trace of it.
    pub(super) fn take_batch(
        &mut self,
        turn: ModelTurn,
        toolbox: &dyn Toolbox,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let text = Some(turn.text()).filter(|text| !text.is_empty());
        let finish = turn.finish;
        let message = turn.into_message();
        let asked = u32::try_from(message.tool_calls.len()).unwrap_or(u32::MAX);
        let max = self.spec.limits.max_tool_calls;
        let left = max.saturating_sub(self.state.tool_calls);
        if asked > left {
            let words = format!("the model asked for {asked} tool calls with {left} of max_tool_calls = {max} left");
            self.stop(EndStatus::ToolLimit, words, text);
            return Ok(());
        }
        let checks = check_all(&message, toolbox);
        let batch = candidates(&message.tool_calls, &checks);
        let repeats = match self.spec.on_repeat {
            OnRepeat::Allow => vec![false; batch.len()],
            OnRepeat::Warn | OnRepeat::Stop => self.repeats.check(&batch),
        };
        if let Some((call, _)) = message.tool_calls.iter().zip(&repeats).find(|(_, repeat)| **repeat)
            && (self.spec.on_repeat == OnRepeat::Stop || self.state.repeat_warned)
        {
            let words = format!("the model repeated the call `{}` with the same arguments", call.name);
            self.stop(EndStatus::RepeatLimit, words, text);
            return Ok(());
        }
        // Before this batch is recorded, so that a repeat is answered with an earlier round's result.
        let earlier: Vec<_> = message
            .tool_calls
            .iter()
            .zip(&repeats)
            .map(|(call, repeat)| repeat.then(|| self.earlier_result(call)))
            .collect();
        self.repeats.record(&batch, self.transcript.len());
        self.state.tool_calls += asked;
        self.state.repeat_warned |= repeats.contains(&true);
        self.say(message.clone(), events)?;

        let mut slots = Vec::with_capacity(checks.len());
        for ((call, checked), earlier) in message.tool_calls.iter().zip(checks).zip(earlier) {
            let answer = match (checked, earlier) {
                _ if finish == FinishReason::Length => Some((OutcomeKind::Refused, CUT_OFF.to_owned())),
                (_, Some(earlier)) => Some((OutcomeKind::Refused, repeat_notice(earlier.as_deref()))),
                (Checked::Invalid(problem), None) => Some((OutcomeKind::Error, problem)),
                (Checked::Ready { effect, gate, .. }, None) => {
                    slots.push(match gate {
                        Gate::Open => Slot::Pending(Valid::as_asked(effect)),
                        Gate::Approval => Slot::Asked(PendingKind::Approval),
                        Gate::Client => Slot::Asked(PendingKind::Client),
                    });
                    None
                }
            };
            if let Some((kind, content)) = answer {
                slots.push(Slot::Done);
                let outcome = ToolOutcome { call_id: call.id.clone(), kind, content, duration_ms: 0 };
                self.answer(call, outcome, events)?;
            }
        }
        self.state.phase = Phase::Tools { slots };
        self.go_on_with_batch(events)
    }

    /// Starts what comes next of the batch; waits when that needs an answer from outside; goes back to the model when
    /// all of it is answered.
    pub(super) fn go_on_with_batch(&mut self, events: &mut Vec<EventBody>) -> Result<(), UnexpectedObservation> {
        let Phase::Tools { slots } = &mut self.state.phase else { return Ok(()) };
        if slots.iter().any(|slot| matches!(slot, Slot::Started(_))) {
            return Ok(());
        }
        let next = slots.iter().find(|slot| !matches!(slot, Slot::Done));
        if matches!(next, Some(Slot::Asked(_))) {
            self.state.phase = Phase::Waiting { slots: std::mem::take(slots) };
            return Ok(());
        }
        let calls = self.transcript.last_round().map_or(&[][..], |round| &round.tool_calls);
        let mut group: Option<Effect> = None;
        for (slot, call) in slots.iter_mut().zip(calls) {
            let valid = match slot {
                Slot::Done => continue,
                Slot::Pending(valid) => valid.clone(),
                Slot::Asked(_) | Slot::Started(_) => break,
            };
            let effect = valid.effect;
            let joins = match group {
                None => true,
                Some(Effect::ReadOnly) => {
                    effect == Effect::ReadOnly && self.spec.parallel_tools == ParallelTools::ReadOnly
                }
                Some(Effect::Idempotent | Effect::SideEffect) => false,
            };
            if !joins {
                break;
            }
            group = Some(effect);
            let ToolCall { id, name, arguments } = valid.apply(call);
            *slot = Slot::Started(valid);
            events.push(EventBody::ToolStart { step: self.state.steps, call_id: id, name, arguments, effect });
        }
        match group {
            Some(_) => Ok(()),
            None => self.enter_model(events),
        }
    }

    pub(super) fn take_outcome(
        &mut self,
        outcome: ToolOutcome,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let position = self.batch().iter().position(|call| call.id == outcome.call_id);
        let call = position.and_then(|position| self.batch().get(position).cloned());
        let slot = match &mut self.state.phase {
            Phase::Tools { slots } => position.and_then(|position| slots.get_mut(position)),
            Phase::New
            | Phase::Model { .. }
            | Phase::Waiting { .. }
            | Phase::Answered { .. }
            | Phase::Finished { .. } => None,
        };
        match (slot, call) {
            (Some(slot @ Slot::Started(_)), Some(call)) => {
                *slot = Slot::Done;
                self.answer(&call, outcome, events)
            }
            (Some(_) | None, _) => Err(UnexpectedObservation::Outcome(outcome.call_id)),
        }
    }

    /// Gives every call of the batch that has no outcome yet one that tells the truth about it.
    pub(super) fn answer_the_rest(
        &mut self,
        cause: &Interrupt,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let (Phase::Tools { slots } | Phase::Waiting { slots } | Phase::Answered { slots }) = &mut self.state.phase
        else {
            return Ok(());
        };
        let done = vec![Slot::Done; slots.len()];
        let slots = std::mem::replace(slots, done);
        for (call, slot) in self.batch().to_vec().iter().zip(slots) {
            let (kind, content) = match (slot, cause) {
                (Slot::Done, _) => continue,
                (Slot::Pending(_), _) => (OutcomeKind::Aborted, "The run ended before this call was started."),
                (Slot::Asked(PendingKind::Client | PendingKind::Approval), _) => {
                    (OutcomeKind::Aborted, "The run ended before this call was answered.")
                }
                (Slot::Asked(PendingKind::UnknownOutcome), _) | (Slot::Started(_), Interrupt::WorkerLost(_)) => {
                    (OutcomeKind::OutcomeUnknown, UNKNOWN_OUTCOME)
                }
                (
                    Slot::Started(_),
                    Interrupt::Cancel | Interrupt::Deadline | Interrupt::WaitExpired | Interrupt::Failed(_),
                ) => (
                    OutcomeKind::Aborted,
                    "The run ended while this call was running; it may have had some of its effect.",
                ),
            };
            let outcome = ToolOutcome { call_id: call.id.clone(), kind, content: content.to_owned(), duration_ms: 0 };
            self.answer(call, outcome, events)?;
        }
        Ok(())
    }

    pub(super) fn answer(
        &mut self,
        call: &ToolCall,
        outcome: ToolOutcome,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        let content = cut_middle(&outcome.content, self.spec.context.max_tool_result_chars).into_owned();
        let name = call.name.clone();
        self.transcript.push(Message::Tool(ToolMessage {
            call_id: outcome.call_id.clone(),
            name: name.clone(),
            content: content.clone(),
            outcome: outcome.kind,
            is_error: ErrorMark,
        }))?;
        events.push(EventBody::ToolEnd {
            step: self.state.steps,
            call_id: outcome.call_id,
            name,
            outcome: outcome.kind,
            is_error: ErrorMark,
            content,
            duration_ms: outcome.duration_ms,
        });
        Ok(())
    }

    pub(super) fn batch(&self) -> &[ToolCall] {
        self.transcript.last_round().map_or(&[], |round| &round.tool_calls)
    }

    /// The result that answers a repeated call, from its first occurrence; `None` when it has none yet.
    fn earlier_result(&self, call: &ToolCall) -> Option<String> {
        let (position, call_id) = self.repeats.first(call)?;
        self.transcript
            .messages()
            .skip(position + 1)
            .map_while(|message| match message.as_ref() {
                Message::Tool(result) => Some(result),
                Message::User(_) | Message::Assistant(_) => None,
            })
            .find(|result| result.call_id == call_id)
            .map(|result| result.content.clone())
    }
}

pub(super) const UNKNOWN_OUTCOME: &str =
    "This call was started and its outcome is unknown; it may have had its effect. Find out before you repeat it.";

const CUT_OFF: &str = "Not executed: your response was cut off by the output limit, so this call may be incomplete. \
    Make a shorter call, or split the work into several calls.";

fn repeat_notice(earlier: Option<&str>) -> String {
    let notice = "Not executed: you already made exactly this call, and repeating it gives nothing new. \
        Use the earlier result, try something else, or answer; the next repeat ends the run.";
    match earlier {
        Some(result) => format!("{notice}\nThe earlier result was:\n{result}"),
        None => notice.to_owned(),
    }
}

pub(super) fn check_all(message: &AssistantMessage, toolbox: &dyn Toolbox) -> Vec<Checked> {
    message.tool_calls.iter().map(|call| toolbox.check(call)).collect()
}

pub(super) fn candidates<'a>(calls: &'a [ToolCall], checks: &[Checked]) -> Vec<Candidate<'a>> {
    calls
        .iter()
        .zip(checks)
        .map(|(call, checked)| Candidate { call, pollable: matches!(checked, Checked::Ready { pollable: true, .. }) })
        .collect()
}
