//! A tool for tests: a name, an effect and a closure.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};

use super::{ProgressSink, Tool, ToolCtx, ToolError};
use crate::domain::{Effect, ToolSpec};

type Work = dyn Fn(ToolCtx) -> BoxFuture<'static, Result<String, ToolError>> + Send + Sync;

pub(super) struct FakeTool {
    spec: ToolSpec,
    effect: Effect,
    work: Box<Work>,
}

impl FakeTool {
    pub(super) fn tool<F>(
        name: &str,
        effect: Effect,
        work: impl Fn(ToolCtx) -> F + Send + Sync + 'static,
    ) -> Arc<dyn Tool>
    where
        F: Future<Output = Result<String, ToolError>> + Send + 'static,
    {
        let parameters = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        Self::with_parameters(name, effect, parameters, work)
    }

    pub(super) fn with_parameters<F>(
        name: &str,
        effect: Effect,
        parameters: Value,
        work: impl Fn(ToolCtx) -> F + Send + Sync + 'static,
    ) -> Arc<dyn Tool>
    where
        F: Future<Output = Result<String, ToolError>> + Send + 'static,
    {
        let spec = ToolSpec { name: name.parse().unwrap(), description: String::new(), parameters };
        Arc::new(Self { spec, effect, work: Box::new(move |ctx| Box::pin(work(ctx))) })
    }
}

#[async_trait]
impl Tool for FakeTool {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn effect(&self, _arguments: &Map<String, Value>) -> Effect {
        self.effect
    }

    async fn call(&self, ctx: &ToolCtx, _arguments: &Map<String, Value>) -> Result<String, ToolError> {
        (self.work)(ctx.clone()).await
    }
}

pub(super) struct NoProgress;

impl ProgressSink for NoProgress {
    fn progress(&self, _call_id: &str, _text: &str) {}
}
