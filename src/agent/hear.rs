//! What callers say to an active run: messages that enter before the next model call, and new bounds.

use super::machine::Machine;
use super::state::{Phase, UnexpectedObservation};
use crate::domain::{End, EventBody, InboxItem, Limits, Message, UserMessage};

impl Machine {
    /// The bounds as they are now.
    pub const fn limits(&self) -> &Limits {
        &self.spec.limits
    }

    /// Takes what was said. A run that was about to be completed goes on instead when there is a message for it.
    pub(super) fn hear(
        &mut self,
        items: Vec<InboxItem>,
        events: &mut Vec<EventBody>,
    ) -> Result<(), UnexpectedObservation> {
        for item in items {
            match item {
                InboxItem::Message { content } => self.state.said.push(UserMessage { content }),
                // Labels are the run's own.
                InboxItem::Amendment { limits: None, metadata: _ } => {}
                InboxItem::Amendment { limits: Some(limits), metadata: _ } => {
                    // Whoever raised one of them may not have known of another.
                    let limits = self.spec.limits.raised_to(limits);
                    self.spec.limits = limits;
                    self.state.limits = Some(limits);
                    // What was nearly used up may have room again, and can be warned of again.
                    self.state.limits_warned.clear();
                }
            }
        }
        match &self.state.phase {
            Phase::Finished { end: End::Completed { .. } } if !self.state.said.is_empty() => {
                self.enter_model(events)?
            }
            // The call that is about to be made takes it along.
            Phase::Model { .. } => self.say_what_was_heard(events)?,
            Phase::New
            | Phase::Tools { .. }
            | Phase::Waiting { .. }
            | Phase::Answered { .. }
            | Phase::Finished { .. } => {}
        }
        Ok(())
    }

    /// Puts what was said into the transcript.
    pub(super) fn say_what_was_heard(&mut self, events: &mut Vec<EventBody>) -> Result<(), UnexpectedObservation> {
        for message in std::mem::take(&mut self.state.said) {
            let message = Message::User(message);
            self.transcript.push(message.clone())?;
            events.push(EventBody::Message { step: self.state.steps + 1, message });
        }
        Ok(())
    }
}
