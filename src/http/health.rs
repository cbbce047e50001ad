//! `GET /healthz`, `/readyz`, `/metrics`, `/openapi.yaml`, `/openapi.json`: operations.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use utoipa::ToSchema;

use super::problem::{Problem, ProblemCode};
use super::query::{NoQuery, Query};
use super::spec::{ReadProblems, SpecError};
use super::state::HttpState;
use crate::telemetry::metric::EXPOSITION;

/// Most time for the database to say how it is.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The process answers.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// Always `ok`.
    #[schema(example = "ok")]
    status: &'static str,
    /// The server's version.
    #[schema(example = "0.1.0")]
    version: &'static str,
}

/// The server accepts runs.
#[derive(Serialize, ToSchema)]
pub(super) struct Readiness {
    /// Always `ready`.
    #[schema(example = "ready")]
    status: &'static str,
}

/// Is the process alive
///
/// Answers as long as the process does; says nothing of the database.
#[utoipa::path(get, path = "/healthz", operation_id = "get_health", tag = "operations",
    responses((status = 200, description = "It is.", body = Health), ReadProblems))]
pub(super) async fn healthz(Query(NoQuery): Query<NoQuery>) -> Json<Health> {
    Json(Health { status: "ok", version: env!("CARGO_PKG_VERSION") })
}

/// Does the server accept runs
///
/// Says 503 while the database takes no writes and once the server is stopping.
#[utoipa::path(get, path = "/readyz", operation_id = "get_readiness", tag = "operations",
    responses((status = 200, description = "It does.", body = Readiness), ReadProblems))]
pub(super) async fn readyz(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Json<Readiness>, Problem> {
    let parts = state.parts();
    if parts.stages.stopping.is_cancelled() {
        return Err(Problem::stopping());
    }
    let unavailable = |reason: String| {
        tracing::warn!(reason, "not ready: the database is not healthy");
        Problem::new(ProblemCode::StoreUnavailable, "The database takes no writes now.").with_retry_after(STORE_TIMEOUT)
    };
    match tokio::time::timeout(STORE_TIMEOUT, parts.store.health()).await {
        Ok(Ok(())) => Ok(Json(Readiness { status: "ready" })),
        Ok(Err(error)) => Err(unavailable(error.to_string())),
        Err(_) => Err(unavailable("no answer in time".to_owned())),
    }
}

/// Read the metrics
///
/// In the text form of Prometheus, version 0.0.4. `docs/metrics.md` lists them.
#[utoipa::path(get, path = "/metrics", operation_id = "get_metrics", tag = "operations",
    responses((status = 200, description = "The metrics.", body = String, content_type = "text/plain"), ReadProblems))]
pub(super) async fn metrics(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Response, Problem> {
    match state.parts().metrics.exposition() {
        Ok(text) => Ok(document(EXPOSITION, text.into())),
        Err(error) => {
            tracing::error!(error = %error, "the metrics cannot be shown");
            Err(Problem::internal())
        }
    }
}

/// This description, as YAML
///
/// OpenAPI 3.1, generated from the code that serves it.
#[utoipa::path(get, path = "/openapi.yaml", operation_id = "get_openapi_yaml", tag = "operations",
    responses((status = 200, description = "The description.", body = Object, content_type = "application/yaml"), ReadProblems))]
pub(super) async fn openapi_yaml(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Response, Problem> {
    let documents = state.documents().map_err(broken)?;
    Ok(document("application/yaml", documents.yaml.clone()))
}

/// This description, as JSON
///
/// OpenAPI 3.1, generated from the code that serves it.
#[utoipa::path(get, path = "/openapi.json", operation_id = "get_openapi_json", tag = "operations",
    responses((status = 200, description = "The description.", body = Object, content_type = "application/json"), ReadProblems))]
pub(super) async fn openapi_json(
    Query(NoQuery): Query<NoQuery>,
    State(state): State<HttpState>,
) -> Result<Response, Problem> {
    let documents = state.documents().map_err(broken)?;
    Ok(document("application/json", documents.json.clone()))
}

fn document(kind: &'static str, bytes: Bytes) -> Response {
    ([(CONTENT_TYPE, kind)], bytes).into_response()
}

fn broken(error: SpecError) -> Problem {
    tracing::error!(error = %error, "the API's description cannot be written");
    Problem::internal()
}
