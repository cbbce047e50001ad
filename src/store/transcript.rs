//! Reads a transcript back out of the event log.

use std::collections::HashMap;

use crate::domain::{EncodedBody, EventBody, EventKind, Message, ToolMessage};

/// The kinds of events that are entries of the transcript, as an SQL list.
macro_rules! transcript_kinds {
    () => {
        "('message', 'tool_end')"
    };
}
pub(super) use transcript_kinds;

/// The transcript told by `events`, which come in the order of their numbers. The results of a batch stand in
/// the order of its calls, whatever the order they came in; a call without a result has no entry yet. Events
/// of other kinds are passed over.
///
/// # Errors
/// A reason in words when a body cannot be read, or when a result answers no call of the newest assistant
/// message or answers one twice.
pub(super) fn fold<'a>(events: impl IntoIterator<Item = &'a EncodedBody>) -> Result<Vec<Message>, String> {
    let mut messages = Vec::new();
    let mut batch = Batch::default();
    for event in events {
        match event.kind {
            EventKind::Message | EventKind::ToolEnd => {}
            EventKind::RunQueued
            | EventKind::RunStart
            | EventKind::ModelStart
            | EventKind::ModelRetry
            | EventKind::ModelEnd
            | EventKind::ModelError
            | EventKind::ToolStart
            | EventKind::ContextTrimmed
            | EventKind::LimitWarning
            | EventKind::Waiting
            | EventKind::Resumed
            | EventKind::Recovered
            | EventKind::CancelRequested
            | EventKind::RunEnd => continue,
        }
        let body: EventBody = serde_json::from_slice(&event.json)
            .map_err(|error| format!("a `{}` event does not read back: {error}", event.kind.as_str()))?;
        match body {
            EventBody::Message { message, .. } => {
                batch.flush_into(&mut messages);
                batch = Batch::of(&message);
                messages.push(message);
            }
            EventBody::ToolEnd { call_id, name, outcome, is_error, content, .. } => {
                batch.answer(ToolMessage { call_id, name, content, outcome, is_error })?;
            }
            EventBody::RunQueued {}
            | EventBody::RunStart { .. }
            | EventBody::ModelStart { .. }
            | EventBody::ModelRetry { .. }
            | EventBody::ModelEnd { .. }
            | EventBody::ModelError { .. }
            | EventBody::ToolStart { .. }
            | EventBody::ContextTrimmed { .. }
            | EventBody::LimitWarning { .. }
            | EventBody::Waiting { .. }
            | EventBody::Resumed {}
            | EventBody::Recovered { .. }
            | EventBody::CancelRequested {}
            | EventBody::RunEnd { .. } => {
                return Err(format!("an event stored as `{}` is of another type", event.kind.as_str()));
            }
        }
    }
    batch.flush_into(&mut messages);
    Ok(messages)
}

/// The calls of the newest assistant message, and their results so far.
#[derive(Default)]
struct Batch {
    positions: HashMap<String, usize>,
    results: Vec<Option<ToolMessage>>,
}

impl Batch {
    fn of(message: &Message) -> Self {
        match message {
            Message::Assistant(assistant) => Self {
                positions: assistant.tool_calls.iter().enumerate().map(|(at, call)| (call.id.clone(), at)).collect(),
                results: vec![None; assistant.tool_calls.len()],
            },
            Message::User(_) | Message::Tool(_) => Self::default(),
        }
    }

    fn answer(&mut self, result: ToolMessage) -> Result<(), String> {
        let place = self.positions.get(&result.call_id).and_then(|at| self.results.get_mut(*at));
        match place {
            None => Err(format!("the result of call `{}` answers no call before it", result.call_id)),
            Some(Some(_)) => Err(format!("call `{}` has two results", result.call_id)),
            Some(place) => {
                *place = Some(result);
                Ok(())
            }
        }
    }

    fn flush_into(&mut self, messages: &mut Vec<Message>) {
        messages.extend(self.results.drain(..).flatten().map(Message::Tool));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Arguments, AssistantMessage, ErrorMark, OutcomeKind, Part, ToolCall};

    fn encoded(body: &EventBody) -> EncodedBody {
        EncodedBody::new(body).unwrap()
    }

    fn asking(ids: &[&str]) -> Message {
        let call = |id: &&str| ToolCall { id: (*id).into(), name: "t".into(), arguments: Arguments::parse("{}") };
        Message::Assistant(AssistantMessage {
            content: vec![Part::Text { text: "let me see".into() }],
            tool_calls: ids.iter().map(call).collect(),
            incomplete: false,
        })
    }

    fn said(message: Message) -> EncodedBody {
        encoded(&EventBody::Message { step: 1, message })
    }

    fn ended(call_id: &str) -> EncodedBody {
        encoded(&EventBody::ToolEnd {
            step: 1,
            call_id: call_id.into(),
            name: "t".into(),
            outcome: OutcomeKind::Result,
            is_error: ErrorMark,
            content: format!("result of {call_id}"),
            duration_ms: 3,
        })
    }

    fn result(call_id: &str) -> Message {
        Message::Tool(ToolMessage {
            call_id: call_id.into(),
            name: "t".into(),
            content: format!("result of {call_id}"),
            outcome: OutcomeKind::Result,
            is_error: ErrorMark,
        })
    }

    #[test]
    fn results_stand_in_the_order_of_their_calls() {
        let events = [
            encoded(&EventBody::RunQueued {}),
            said(asking(&["a", "b", "c"])),
            ended("c"),
            encoded(&EventBody::ModelStart { step: 2, attempt: 1 }),
            ended("a"),
            ended("b"),
            said(asking(&["a"])),
            ended("a"),
        ];
        assert_eq!(
            fold(&events).unwrap(),
            [asking(&["a", "b", "c"]), result("a"), result("b"), result("c"), asking(&["a"]), result("a")]
        );
    }

    #[test]
    fn a_call_without_a_result_has_no_entry_yet() {
        let events = [said(asking(&["a", "b"])), ended("b")];
        assert_eq!(fold(&events).unwrap(), [asking(&["a", "b"]), result("b")]);
    }

    #[test]
    fn arguments_as_deep_as_they_are_accepted_read_back() {
        for depth in 1..=130 {
            let raw = format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
            let Message::Assistant(mut message) = asking(&["a"]) else { panic!("asking() asks") };
            message.tool_calls[0].arguments = Arguments::parse(&raw);
            let message = Message::Assistant(message);
            assert_eq!(fold(&[said(message.clone())]), Ok(vec![message]), "{depth}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error_in_words() {
        let broken = EncodedBody { kind: EventKind::Message, json: r#"{"type":"message","step":1}"#.into() };
        let other = EncodedBody { kind: EventKind::Message, json: r#"{"type":"run_queued"}"#.into() };
        for (events, expected) in [
            (vec![broken], "a `message` event does not read back: missing field `message`"),
            (vec![other], "an event stored as `message` is of another type"),
            (vec![ended("a")], "the result of call `a` answers no call before it"),
            (vec![said(asking(&["a"])), ended("a"), ended("a")], "call `a` has two results"),
            (
                vec![said(asking(&["a"])), said(Message::user("hi")), ended("a")],
                "the result of call `a` answers no call before it",
            ),
        ] {
            assert_eq!(fold(&events), Err(expected.to_owned()));
        }
    }
}
