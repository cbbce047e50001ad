//! The chat completions wire, as OpenAI and most other servers speak it: `POST …/chat/completions`.
//!
//! Facts about the wire: <https://platform.openai.com/docs/api-reference/chat>, and what servers were seen to
//! do differently, each noted where it is handled.

mod decode;
mod encode;
mod form;

pub use decode::ChatDecoder;
pub use encode::{ChatEncoder, body};

pub use crate::config::ReasoningField;

use super::conversation::Conversation;
use super::error::ProviderError;
use super::http::{Learnt, Wire};
use super::names::NameMap;
use crate::domain::ModelRequest;

/// The name of this wire in the tokens it makes.
pub(super) const WIRE: &str = "openai_chat";

/// What a server understands. Begins with the usual and is corrected by its refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// Where reasoning goes in assistant messages; `None`: it is not sent back.
    pub reasoning_field: Option<ReasoningField>,
    /// Whether usage is asked for.
    pub usage: UsageRequest,
    /// What the bound of the answer is called.
    pub limit: LimitField,
}

/// Whether usage is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageRequest {
    /// `stream_options: {include_usage: true}`, without which many servers report none.
    Asked,
    /// Not mentioned: the server refuses the field.
    Unmentioned,
}

/// What the bound of the answer is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitField {
    /// Known to nearly every server.
    MaxTokens,
    /// What OpenAI's newer models take instead.
    MaxCompletionTokens,
}

/// The wire.
#[derive(Debug)]
pub struct OpenAiChat {
    reasoning_field: Option<ReasoningField>,
}

impl OpenAiChat {
    /// The wire of a server that wants its reasoning back in `reasoning_field`.
    pub const fn new(reasoning_field: Option<ReasoningField>) -> Self {
        Self { reasoning_field }
    }
}

impl Wire for OpenAiChat {
    type Dialect = Dialect;
    type Decoder = ChatDecoder;

    fn path(&self) -> &'static str {
        "chat/completions"
    }

    fn dialect(&self) -> Dialect {
        Dialect { reasoning_field: self.reasoning_field, usage: UsageRequest::Asked, limit: LimitField::MaxTokens }
    }

    fn names(&self, request: &ModelRequest) -> NameMap {
        NameMap::new(request.tools.iter().map(|tool| tool.name.as_str()))
    }

    fn encode(
        &self,
        request: &ModelRequest,
        names: &NameMap,
        learnt: &Learnt<Dialect>,
        conversation: &mut Conversation,
    ) -> Result<Vec<u8>, serde_json::Error> {
        let Learnt { dialect, version } = learnt;
        conversation.bring_up_to(request, *version, &ChatEncoder { names, dialect })?;
        body(request, conversation, dialect)
    }

    fn decoder(&self) -> ChatDecoder {
        ChatDecoder::default()
    }

    fn adapt(&self, used: &Dialect, status: u16, error: &ProviderError, body: &str) -> Option<Dialect> {
        let names = |field: &str| error.message.contains(field) || body.contains(field);
        if !matches!(status, 400 | 422) {
            None
        } else if used.usage == UsageRequest::Asked && names("stream_options") {
            Some(Dialect { usage: UsageRequest::Unmentioned, ..*used })
        } else if used.limit == LimitField::MaxTokens && names("max_completion_tokens") {
            Some(Dialect { limit: LimitField::MaxCompletionTokens, ..*used })
        } else {
            None
        }
    }
}
