//! What is kept of a run between its calls of one provider: the parts of the request that are already encoded.
//!
//! A run sends its whole conversation with every step. Each part of it is encoded once, when it is first sent, and
//! copied from then on, so that a step costs what is new in it and a copy of what is old.

use std::sync::Arc;

use serde_json::value::RawValue;

use crate::domain::{Message, ModelRequest, ToolSpec};

/// How a wire writes the parts of a request that do not change from step to step.
pub trait Encode {
    /// The system prompt.
    fn instructions(&self, text: &str) -> Result<Box<RawValue>, serde_json::Error>;
    /// The tools on offer.
    fn tools(&self, tools: &[ToolSpec]) -> Result<Box<RawValue>, serde_json::Error>;
    /// A message.
    fn message(&self, message: &Message) -> Result<Box<RawValue>, serde_json::Error>;
}

/// The encoded parts of one run's last request.
#[derive(Debug, Default)]
pub struct Conversation {
    /// What the server was known to take when the parts were encoded.
    dialect: u64,
    instructions: Option<Box<RawValue>>,
    tools: Option<Box<RawValue>>,
    /// Those that were sent last, in order. An entry that is not sent any more is let go.
    messages: Vec<(Arc<Message>, Box<RawValue>)>,
}

impl Conversation {
    /// Encodes what is new in a request since the last one. Instructions and tools of a run never change, and
    /// neither does a message; another `dialect` means that everything may be written in another way.
    pub fn bring_up_to(
        &mut self,
        request: &ModelRequest,
        dialect: u64,
        encode: &impl Encode,
    ) -> Result<(), serde_json::Error> {
        if self.dialect != dialect {
            *self = Self { dialect, ..Self::default() };
        }
        if let (None, Some(text)) = (&self.instructions, &request.instructions) {
            self.instructions = Some(encode.instructions(text)?);
        }
        if self.tools.is_none() && !request.tools.is_empty() {
            self.tools = Some(encode.tools(&request.tools)?);
        }
        // Messages are left out and appended, so those that are known come in the same order.
        let mut known = std::mem::take(&mut self.messages).into_iter();
        for message in &request.messages {
            let at = known.as_slice().iter().position(|(known, _)| Arc::ptr_eq(known, message));
            let kept = match at.and_then(|at| known.nth(at)) {
                Some(kept) => kept,
                None => (Arc::clone(message), encode.message(message)?),
            };
            self.messages.push(kept);
        }
        Ok(())
    }

    /// The system prompt, if there is one.
    pub fn instructions(&self) -> Option<&RawValue> {
        self.instructions.as_deref()
    }

    /// The tools, if there are any.
    pub fn tools(&self) -> Option<&RawValue> {
        self.tools.as_deref()
    }

    /// The messages, in order.
    pub fn messages(&self) -> impl Iterator<Item = &RawValue> {
        self.messages.iter().map(|(_, encoded)| &**encoded)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::domain::RunId;

    /// Counts what is encoded.
    #[derive(Default)]
    struct Counting(Cell<usize>);

    impl Counting {
        fn count(&self, text: &str) -> Result<Box<RawValue>, serde_json::Error> {
            self.0.set(self.0.get() + 1);
            serde_json::value::to_raw_value(text)
        }
    }

    impl Encode for Counting {
        fn instructions(&self, text: &str) -> Result<Box<RawValue>, serde_json::Error> {
            self.count(text)
        }

        fn tools(&self, tools: &[ToolSpec]) -> Result<Box<RawValue>, serde_json::Error> {
            self.count(&tools.len().to_string())
        }

        fn message(&self, message: &Message) -> Result<Box<RawValue>, serde_json::Error> {
            self.count(&message.text())
        }
    }

    fn request(messages: &[&Arc<Message>]) -> ModelRequest {
        ModelRequest {
            run: RunId::new(uuid::Uuid::nil()),
            step: 1,
            attempt: 1,
            model: "m".into(),
            instructions: Some("i".into()),
            messages: messages.iter().map(|message| Arc::clone(message)).collect(),
            tools: Arc::new([]),
            max_output_tokens: None,
            trace: None,
        }
    }

    #[test]
    fn each_part_is_encoded_once_whatever_is_left_out_and_appended() {
        let all: Vec<_> = (0..40).map(|number| Arc::new(Message::user(number.to_string()))).collect();
        let (mut conversation, encode) = (Conversation::default(), Counting::default());
        let mut sent = 0;
        for end in 1..all.len() {
            // The first one stays, and of the others the newest ten.
            let first = end.saturating_sub(10).max(1);
            let messages: Vec<_> = all[..1].iter().chain(all.get(first..end).unwrap_or_default()).collect();
            conversation.bring_up_to(&request(&messages), 0, &encode).unwrap();
            let texts: Vec<_> = conversation.messages().map(|encoded| encoded.get().trim_matches('"')).collect();
            assert_eq!(texts, messages.iter().map(|message| message.text()).collect::<Vec<_>>());
            sent = sent.max(end);
            assert_eq!(encode.0.get(), 1 + sent);
        }
    }

    #[test]
    fn another_dialect_and_a_message_that_comes_back_are_encoded_anew() {
        let [one, two, three] = ["1", "2", "3"].map(|text| Arc::new(Message::user(text)));
        let (mut conversation, encode) = (Conversation::default(), Counting::default());
        let mut cost = |messages: &[&Arc<Message>], dialect| {
            let before = encode.0.get();
            conversation.bring_up_to(&request(messages), dialect, &encode).unwrap();
            assert_eq!(conversation.messages().count(), messages.len());
            encode.0.get() - before
        };
        assert_eq!(cost(&[&one, &two], 0), 3);
        assert_eq!(cost(&[&two], 0), 0);
        assert_eq!(cost(&[&one, &two, &three], 0), 2);
        assert_eq!(cost(&[&one, &two, &three], 1), 4);
    }
}
