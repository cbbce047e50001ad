//! What chat completions are made of, as far as it matters. Nothing is interpreted here but what makes an error.

use serde::de::MapAccess;
use serde_json::value::RawValue;

use crate::provider::json;
use crate::provider::object::{List, Maybe, Object, skip};

/// A field of any type; `None` when it is absent or `null`.
type Raw<'a> = Option<&'a RawValue>;

/// Objects and their fields. A field whose name is no name in Rust says the one it has in JSON.
macro_rules! objects {
    ($($(#[$doc:meta])* $object:ident { $($field:ident $(as $name:literal)?: $form:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $object<'a> {
            $(pub(super) $field: $form,)*
        }

        impl<'a> Object<'a> for $object<'a> {
            fn field<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
                match name {
                    $(objects!(@name $field $($name)?) => self.$field = map.next_value()?,)*
                    _ => skip(map)?,
                }
                Ok(())
            }
        }
    )*};
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
}

objects! {
    /// A chunk of a stream, a whole answer, or an error in the place of one.
    Chunk {
        choices: List<Choice<'a>>,
        usage: Maybe<Usage<'a>>,
        error: Raw<'a>,
        object: Raw<'a>,
        kind as "type": Raw<'a>,
        message: Raw<'a>,
        detail: Raw<'a>,
    }

    /// One of the answers that were asked for.
    Choice {
        index: Raw<'a>,
        delta: Maybe<Delta<'a>>,
        message: Maybe<Delta<'a>>,
        finish_reason: Raw<'a>,
    }

    /// What is new of a message, or all of it.
    Delta {
        content: Raw<'a>,
        refusal: Raw<'a>,
        reasoning: Raw<'a>,
        reasoning_content: Raw<'a>,
        reasoning_details: Raw<'a>,
        tool_calls: List<Call<'a>>,
    }

    /// An item of content that is a list.
    ContentPart {
        text: Raw<'a>,
        thinking: Raw<'a>,
    }

    /// A tool call, or a piece of it.
    Call {
        index: Raw<'a>,
        id: Raw<'a>,
        function: Maybe<Function<'a>>,
    }

    /// What a call calls.
    Function {
        name: Raw<'a>,
        arguments: Raw<'a>,
    }

    /// Tokens of a whole response.
    Usage {
        prompt_tokens: Raw<'a>,
        completion_tokens: Raw<'a>,
        prompt_tokens_details: Maybe<UsageDetails<'a>>,
        completion_tokens_details: Maybe<UsageDetails<'a>>,
    }

    /// Which of the tokens are of a special kind.
    UsageDetails {
        cached_tokens: Raw<'a>,
        reasoning_tokens: Raw<'a>,
    }
}

impl Chunk<'_> {
    /// Whether it is an error: it has one, it is called one, or it is a message in place of choices.
    pub(super) fn is_error(&self) -> bool {
        let is_set = |raw: &RawValue| !matches!(raw.get(), "false" | "\"\"" | "{}" | "[]");
        let named = |raw: Raw<'_>| raw.and_then(json::text).as_deref() == Some("error");
        self.error.is_some_and(is_set)
            || named(self.object)
            || named(self.kind)
            || (matches!(self.choices, List::Absent) && (self.message.is_some() || self.detail.is_some()))
    }
}

impl<'a> Choice<'a> {
    /// What a chunk has of the message. Some servers stream whole messages.
    pub(super) fn delta(&mut self) -> Option<Delta<'a>> {
        self.delta.0.take().or_else(|| self.message.0.take())
    }

    /// The message of a whole answer. Some servers answer with a delta.
    pub(super) fn message(&mut self) -> Option<Delta<'a>> {
        self.message.0.take().or_else(|| self.delta.0.take())
    }
}
