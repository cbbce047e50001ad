//! One exchange with a model: what is asked, what streams back, what was said in the end.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{AssistantMessage, Message, Part, RunId, TokenUsage, ToolCall, ToolSpec, TraceContext};

/// Everything a provider needs for one model call.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRequest {
    /// The run that asks; for tracing, never sent as content.
    pub run: RunId,
    /// Which response of the run this is, from 1.
    pub step: u32,
    /// Which attempt at this response, from 1.
    pub attempt: u32,
    /// The model's name at its provider.
    pub model: String,
    /// The system prompt.
    pub instructions: Option<String>,
    /// What the model sees of the transcript: well formed, in order.
    pub messages: Vec<Arc<Message>>,
    /// The tools on offer.
    pub tools: Arc<[ToolSpec]>,
    /// Most tokens the answer may have; `None` leaves it to the provider.
    pub max_output_tokens: Option<u32>,
    /// The span the provider works for; passed on in the headers of the request.
    pub trace: Option<TraceContext>,
}

/// A finished model response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelTurn {
    /// Text and reasoning, in order.
    pub content: Vec<Part>,
    /// The calls, in order.
    pub tool_calls: Vec<ToolCall>,
    /// Why the model stopped.
    pub finish: FinishReason,
    /// Tokens of this call; `None` when the provider did not say.
    pub usage: Option<TokenUsage>,
}

impl ModelTurn {
    /// The visible text.
    pub fn text(&self) -> String {
        self.content
            .iter()
            .filter_map(|part| match part {
                Part::Text { text } => Some(text.as_str()),
                Part::Reasoning { .. } => None,
            })
            .collect()
    }

    /// The message that enters the transcript.
    pub fn into_message(self) -> AssistantMessage {
        AssistantMessage { content: self.content, tool_calls: self.tool_calls, incomplete: false }
    }
}

/// Why a model stopped writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It was done, or a stop sequence was met.
    Stop,
    /// It wants its tool calls answered.
    ToolCalls,
    /// The output limit cut it off; a call of such a response is never executed.
    Length,
    /// The provider's filter cut it off.
    ContentFilter,
    /// The provider ended the response properly and gave no reason we know.
    Unspecified,
}

impl FinishReason {
    /// The spelling in the JSON form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
            Self::ContentFilter => "content_filter",
            Self::Unspecified => "unspecified",
        }
    }
}

/// A fragment of a response while it is written. Never stored; the finished message replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta<'a> {
    /// More visible text.
    Text(&'a str),
    /// More reasoning.
    Reasoning(&'a str),
    /// More of a tool call.
    ToolCall {
        /// Position of the call in the response, from 0.
        index: usize,
        /// The call's id as known so far; empty before the provider gave it.
        id: &'a str,
        /// The tool's name as known so far; empty before the provider gave it.
        name: &'a str,
        /// The next piece of the raw arguments.
        arguments: &'a str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_spelt_as_in_json() {
        for spelling in ["stop", "tool_calls", "length", "content_filter", "unspecified"] {
            let reason: FinishReason = serde_json::from_value(spelling.into()).unwrap();
            assert_eq!(reason.as_str(), spelling);
        }
    }
}
