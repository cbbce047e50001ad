//! A model and a tool that do what a test tells them, when it tells them. Both check their caller.

use std::sync::Arc;

use async_trait::async_trait;
use hames::agent::Transcript;
use hames::domain::{
    Arguments, Delta, Effect, FinishReason, Message, ModelFailure, ModelRequest, ModelTurn, Part, TokenUsage, ToolCall,
    ToolSpec,
};
use hames::provider::conversation::Conversation;
use hames::provider::{DeltaSink, Provider};
use hames::tool::{Tool, ToolCtx, ToolError};
use serde_json::{Map, Value, json};
use tokio::sync::{Mutex, mpsc, oneshot};

/// The model's side of the stage.
pub(crate) struct StageModel {
    asked: mpsc::Sender<Asked>,
}

/// The test's side of the stage.
pub(crate) struct Prompter {
    asked: Mutex<mpsc::Receiver<Asked>>,
}

/// One model call that waits for the test.
pub(crate) struct Asked {
    /// What was sent.
    pub(crate) request: ModelRequest,
    cues: mpsc::Sender<Cue>,
}

enum Cue {
    Text(String, oneshot::Sender<()>),
    Reasoning(String),
    End(Result<ModelTurn, ModelFailure>),
    Panic,
}

/// A model and the test's hold on it.
pub(crate) fn stage_model() -> (Arc<StageModel>, Prompter) {
    let (asked, receiver) = mpsc::channel(1_000);
    (Arc::new(StageModel { asked }), Prompter { asked: Mutex::new(receiver) })
}

impl Prompter {
    /// The next model call.
    pub(crate) async fn asked(&self) -> Asked {
        self.asked.lock().await.recv().await.expect("the model is gone")
    }

    /// Lets go of the model calls that wait.
    pub(crate) async fn forget(&self) {
        while self.asked.lock().await.try_recv().is_ok() {}
    }

    /// Whether no model call waits.
    pub(crate) async fn is_quiet(&self) -> bool {
        self.asked.lock().await.is_empty()
    }
}

impl Asked {
    /// Streams a piece of text and waits until it is taken.
    pub(crate) async fn text(&self, text: &str) {
        assert!(self.try_text(text).await, "the call was dropped");
    }

    /// Streams a piece of text; `false` when the caller has let go.
    pub(crate) async fn try_text(&self, text: &str) -> bool {
        let (taken, done) = oneshot::channel();
        self.cues.send(Cue::Text(text.to_owned(), taken)).await.is_ok() && done.await.is_ok()
    }

    /// Ends the call with an answer; `false` when the caller has let go.
    pub(crate) async fn try_answer(self, text: &str) -> bool {
        self.cues.send(Cue::End(Ok(turn(text, Vec::new())))).await.is_ok()
    }

    /// Streams a piece of reasoning.
    pub(crate) async fn reasoning(&self, text: &str) {
        self.cues.send(Cue::Reasoning(text.to_owned())).await.expect("the call was dropped");
    }

    /// Ends the call with an answer.
    pub(crate) async fn answer(self, text: &str) {
        self.end(Ok(turn(text, Vec::new()))).await;
    }

    /// Ends the call with tool calls.
    pub(crate) async fn call(self, calls: Vec<ToolCall>) {
        self.end(Ok(turn("", calls))).await;
    }

    /// Ends the call.
    pub(crate) async fn end(self, result: Result<ModelTurn, ModelFailure>) {
        self.cues.send(Cue::End(result)).await.expect("the call was dropped");
    }

    /// Makes the provider panic.
    pub(crate) async fn panic(self) {
        self.cues.send(Cue::Panic).await.expect("the call was dropped");
    }

    /// Resolves when the caller has let go of the call.
    pub(crate) async fn dropped(&self) {
        self.cues.closed().await;
    }
}

/// A finished response.
pub(crate) fn turn(text: &str, tool_calls: Vec<ToolCall>) -> ModelTurn {
    let content = if text.is_empty() { Vec::new() } else { vec![Part::Text { text: text.to_owned() }] };
    let finish = if tool_calls.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls };
    let usage = TokenUsage { input_tokens: 10, output_tokens: 5, ..TokenUsage::default() };
    ModelTurn { content, tool_calls, finish, usage: Some(usage) }
}

/// A call of a response.
pub(crate) fn call(id: &str, name: &str, arguments: Value) -> ToolCall {
    ToolCall { id: id.to_owned(), name: name.to_owned(), arguments: Arguments::parse(&arguments.to_string()) }
}

#[async_trait]
impl Provider for StageModel {
    async fn call(
        &self,
        request: &ModelRequest,
        _conversation: &mut Conversation,
        sink: &mut dyn DeltaSink,
    ) -> Result<ModelTurn, ModelFailure> {
        let sent: Vec<Message> = request.messages.iter().map(|message| (**message).clone()).collect();
        let mut transcript = Transcript::from_messages(sent).expect("the request is well formed");
        transcript.push(Message::user("probe")).expect("every call of the request is answered");
        let (cues, mut script) = mpsc::channel(1);
        self.asked.send(Asked { request: request.clone(), cues }).await.expect("the test is gone");
        loop {
            match script.recv().await.expect("the test let go of the call") {
                Cue::Text(text, taken) => {
                    sink.delta(Delta::Text(&text));
                    taken.send(()).expect("the test is gone");
                }
                Cue::Reasoning(text) => sink.delta(Delta::Reasoning(&text)),
                Cue::End(result) => return result,
                Cue::Panic => panic!("the stage was told to"),
            }
        }
    }
}

/// A tool that waits for the test.
pub(crate) struct StageTool {
    spec: ToolSpec,
    effect: Effect,
    obeys: bool,
    called: mpsc::Sender<Called>,
}

/// One running call.
pub(crate) struct Called {
    /// Its id.
    pub(crate) id: String,
    /// Its arguments.
    pub(crate) arguments: Map<String, Value>,
    end: oneshot::Sender<Finale>,
}

enum Finale {
    Return(Result<String, ToolError>),
    Panic,
}

impl Called {
    /// Ends the call.
    pub(crate) fn returns(self, text: &str) {
        assert!(self.end.send(Finale::Return(Ok(text.to_owned()))).is_ok(), "the call was dropped");
    }

    /// Ends the call with a failure.
    pub(crate) fn fails(self, error: ToolError) {
        assert!(self.end.send(Finale::Return(Err(error))).is_ok(), "the call was dropped");
    }

    /// Makes the tool panic.
    pub(crate) fn panics(self) {
        assert!(self.end.send(Finale::Panic).is_ok(), "the call was dropped");
    }
}

/// A tool and its calls. One that does not obey goes on when it is told to stop.
pub(crate) fn stage_tool(name: &str, effect: Effect, obeys: bool) -> (Arc<dyn Tool>, mpsc::Receiver<Called>) {
    let (called, receiver) = mpsc::channel(1_000);
    let spec = ToolSpec {
        name: name.parse().expect("a tool name"),
        description: "Waits for the test.".to_owned(),
        parameters: json!({"type": "object"}),
    };
    (Arc::new(StageTool { spec, effect, obeys, called }), receiver)
}

#[async_trait]
impl Tool for StageTool {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn effect(&self, _arguments: &Map<String, Value>) -> Effect {
        self.effect
    }

    async fn call(&self, ctx: &ToolCtx, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        let (end, finale) = oneshot::channel();
        let called = Called { id: ctx.call_id.clone(), arguments: arguments.clone(), end };
        self.called.send(called).await.expect("the test is gone");
        let finale = tokio::select! {
            () = ctx.cancel.cancelled(), if self.obeys => return Err(ToolError::Respond("stopped".to_owned())),
            finale = finale => finale.expect("the test let go of the call"),
        };
        match finale {
            Finale::Return(result) => result,
            Finale::Panic => panic!("the stage was told to"),
        }
    }
}
