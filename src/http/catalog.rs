//! `GET /agents`, `/models`, `/tools`: what is on offer.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::problem::Problem;
use super::query::{NoQuery, Query};
use super::spec::ReadProblems;
use super::state::HttpState;
use super::view::{AgentView, ModelView, ToolView};

/// All agents.
#[derive(Serialize, ToSchema)]
pub(super) struct AgentList {
    /// The agents, by name.
    data: Vec<AgentView>,
}

/// All models that are shown.
#[derive(Serialize, ToSchema)]
pub(super) struct ModelList {
    /// The models, by provider.
    data: Vec<ModelView>,
}

/// All tools.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolList {
    /// The tools, by name.
    data: Vec<ToolView>,
}

/// List agents
///
/// The agents a run can name, with what each may use.
#[utoipa::path(get, path = "/agents", operation_id = "list_agents", tag = "catalog",
    responses((status = 200, description = "All agents.", body = AgentList), ReadProblems))]
pub(super) async fn agents(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Json<AgentList>, Problem> {
    Ok(Json(AgentList { data: state.parts().agents.clone() }))
}

/// List models
///
/// The models that are configured to be shown or that an agent uses. An agent decides which of them its runs can name.
#[utoipa::path(get, path = "/models", operation_id = "list_models", tag = "catalog",
    responses((status = 200, description = "All models that are shown.", body = ModelList), ReadProblems))]
pub(super) async fn models(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Json<ModelList>, Problem> {
    Ok(Json(ModelList { data: state.models().to_vec() }))
}

/// List tools
///
/// The tools of this server, with the JSON Schema of their arguments. An agent decides which of them its runs can use.
#[utoipa::path(get, path = "/tools", operation_id = "list_tools", tag = "catalog",
    responses((status = 200, description = "All tools.", body = ToolList), ReadProblems))]
pub(super) async fn tools(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Json<ToolList>, Problem> {
    Ok(Json(ToolList { data: state.tools().to_vec() }))
}
