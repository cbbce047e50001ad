//! What is on offer, as published: agents, models and tools.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::domain::{Effect, ModelRef};
use crate::tool::registry::Registry;

/// An agent that runs can name.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Agent)]
pub struct AgentView {
    /// The name, as in `agent` of a request.
    #[schema(example = "coder")]
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// The model it uses unless the request names another, as `provider/model`.
    #[schema(value_type = String, example = "openai/gpt-5")]
    pub model: ModelRef,
    /// The other models a request may name.
    #[schema(value_type = Vec<String>)]
    pub models: Vec<ModelRef>,
    /// The tools it may use.
    pub tools: Vec<String>,
    /// The workspace it works in; `null` is a fresh, empty one for each run.
    pub workspace: Option<String>,
}

/// A provider as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct ProviderView {
    /// Its name.
    pub name: String,
    /// The wire it speaks, in the spelling of the configuration.
    pub kind: String,
    /// The models it is configured to show, without the provider's name.
    pub models: Vec<String>,
    /// Tokens a request and its answer may have together.
    pub context_window: u64,
}

/// A model that runs can name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Model)]
pub(super) struct ModelView {
    /// The name, as in `model` of a request: `provider/model`.
    #[schema(value_type = String, example = "openai/gpt-5")]
    pub id: ModelRef,
    /// The provider's name.
    #[schema(example = "openai")]
    pub provider: String,
    /// The wire the provider speaks.
    #[schema(example = "openai_chat")]
    pub kind: String,
    /// Tokens a request and its answer may have together.
    #[schema(example = 128000)]
    pub context_window: u64,
}

/// A tool that agents can use.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = Tool)]
pub(super) struct ToolView {
    /// The name the model calls it by.
    #[schema(example = "read_file")]
    pub name: String,
    /// What the model is told of it.
    pub description: String,
    /// JSON Schema (2020-12) of its arguments.
    #[schema(value_type = Object)]
    pub parameters: Value,
    /// What it can change.
    pub effect: Effect,
}

/// The models providers show and agents use, each once, by provider in the order configured.
pub(super) fn models_on_offer(providers: &[ProviderView], agents: &[AgentView]) -> Vec<ModelView> {
    let mut out: Vec<ModelView> = Vec::new();
    for provider in providers {
        let shown =
            provider.models.iter().map(|model| ModelRef { provider: provider.name.clone(), model: model.clone() });
        let used = agents
            .iter()
            .flat_map(|agent| std::iter::once(&agent.model).chain(&agent.models))
            .filter(|model| model.provider == provider.name)
            .cloned();
        for id in shown.chain(used) {
            if out.iter().all(|known| known.id != id) {
                out.push(ModelView {
                    id,
                    provider: provider.name.clone(),
                    kind: provider.kind.clone(),
                    context_window: provider.context_window,
                });
            }
        }
    }
    out
}

/// The tools of a registry, as published.
pub(super) fn tools_on_offer(registry: &Registry) -> Vec<ToolView> {
    registry
        .iter()
        .map(|tool| {
            let spec = tool.tool.spec();
            ToolView {
                name: spec.name.to_string(),
                description: spec.description.clone(),
                parameters: spec.parameters.clone(),
                effect: tool.tool.effect(&serde_json::Map::new()),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_on_offer_once_whether_shown_or_used() {
        let provider = |name: &str, models: &[&str]| ProviderView {
            name: name.into(),
            kind: "openai_chat".into(),
            models: models.iter().map(|&model| model.into()).collect(),
            context_window: 10,
        };
        let agent = AgentView {
            name: "a".into(),
            description: None,
            model: "p/one".parse().unwrap(),
            models: vec!["p/two".parse().unwrap(), "gone/x".parse().unwrap()],
            tools: vec![],
            workspace: None,
        };
        let offered = models_on_offer(&[provider("p", &["one", "three"]), provider("q", &["one"])], &[agent]);
        let names: Vec<String> = offered.iter().map(|model| model.id.to_string()).collect();
        assert_eq!(names, ["p/one", "p/three", "p/two", "q/one"]);
    }
}
