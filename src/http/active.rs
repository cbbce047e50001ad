//! What callers do to an active run: `POST /runs/{id}/tool_results`, `/approvals`, `/messages`, and `PATCH /runs/{id}`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::extract::{JsonBody, KeyedBody, Rejection, RunPath, Tenant};
use super::idempotency::{self, Attempt};
use super::problem::{Problem, ProblemCode};
use super::query::{NoQuery, Query};
use super::runs::missing;
use super::spec::AnswerProblems;
use super::state::HttpState;
use crate::domain::{
    Approval, Approvals, CallResult, Decision, FieldError, Run, RunId, RunPatch, RunView, SteeringMessage, TenantId,
    TextOrParts, TextPart, ToolResults,
};
use crate::run::{Answer, OutsideError, said_parts};
use crate::store::{KeyUse, StoreError};

/// Deliver results of calls
///
/// Gives a waiting run what came of its pending calls: of tools that the caller executes (`client`), and of calls that
/// were started when their process ended (`unknown_outcome`). All results of a request are taken, or none; one that was
/// given before, word for word, is passed over. The run goes on once nothing is pending any more.
#[utoipa::path(post, path = "/runs/{id}/tool_results", operation_id = "deliver_tool_results", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "See `POST /runs`."),
    ),
    request_body = ToolResults,
    responses((status = 200, description = "They are taken; the run as it now stands.", body = RunView), AnswerProblems))]
pub(super) async fn tool_results(
    Query(NoQuery): Query<NoQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
    KeyedBody { body, key }: KeyedBody<ToolResults>,
) -> Result<Response, Rejection> {
    not_empty("$.results", &body.results)?;
    let answers = body.results.into_iter().map(result).collect();
    deliver(&state, &tenant, id, answers, key).await
}

/// Decide on calls
///
/// Approves, denies or edits pending calls of kind `approval`. All decisions of a request are taken, or none. The run goes
/// on once nothing is pending any more.
#[utoipa::path(post, path = "/runs/{id}/approvals", operation_id = "decide_approvals", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "See `POST /runs`."),
    ),
    request_body = Approvals,
    responses((status = 200, description = "They are taken; the run as it now stands.", body = RunView), AnswerProblems))]
pub(super) async fn approvals(
    Query(NoQuery): Query<NoQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
    KeyedBody { body, key }: KeyedBody<Approvals>,
) -> Result<Response, Rejection> {
    not_empty("$.decisions", &body.decisions)?;
    let answers = body.decisions.into_iter().enumerate().map(|(index, approval)| decision(index, approval));
    deliver(&state, &tenant, id, answers.collect::<Result<_, _>>()?, key).await
}

/// Say something to an active run
///
/// A user message that enters the transcript before the next model call. A run that was about to be completed goes on
/// with it.
#[utoipa::path(post, path = "/runs/{id}/messages", operation_id = "steer_run", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "See `POST /runs`."),
    ),
    request_body = SteeringMessage,
    responses((status = 202, description = "Stored; the run as it now stands.", body = RunView), AnswerProblems))]
pub(super) async fn say(
    Query(NoQuery): Query<NoQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
    KeyedBody { body, key }: KeyedBody<SteeringMessage>,
) -> Result<Response, Rejection> {
    let content =
        said_parts("$.content", body.content).map_err(|error| Problem::field(ProblemCode::InvalidRequest, error))?;
    let status = StatusCode::ACCEPTED;
    match idempotency::attempt(&state, &tenant, key.as_ref()).await? {
        Attempt::Again(kept) => Ok(idempotency::replay(kept, status)),
        Attempt::First(_flight) => {
            let said = state.parts().supervisor.say(&tenant, id, content, key.clone()).await;
            changed(&state, &tenant, id, said, key, status).await
        }
    }
}

/// Change an active run
///
/// Raises limits, never above the server's ceilings, and replaces labels. What is absent stays as it is.
#[utoipa::path(patch, path = "/runs/{id}", operation_id = "change_run", tag = "runs",
    params(("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab")),
    request_body = RunPatch,
    responses((status = 200, description = "The run as it now stands.", body = RunView), AnswerProblems))]
pub(super) async fn change(
    Query(NoQuery): Query<NoQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
    JsonBody(patch): JsonBody<RunPatch>,
) -> Result<Response, Rejection> {
    let amended = state.parts().supervisor.amend(&tenant, id, patch).await;
    changed(&state, &tenant, id, amended, None, StatusCode::OK).await
}

async fn deliver(
    state: &HttpState,
    tenant: &TenantId,
    id: RunId,
    answers: Vec<Answer>,
    key: Option<KeyUse>,
) -> Result<Response, Rejection> {
    match idempotency::attempt(state, tenant, key.as_ref()).await? {
        Attempt::Again(kept) => Ok(idempotency::replay(kept, StatusCode::OK)),
        Attempt::First(_flight) => {
            let delivered = state.parts().supervisor.deliver(tenant, id, answers, key.clone()).await;
            changed(state, tenant, id, delivered, key, StatusCode::OK).await
        }
    }
}

/// The answer to a change.
async fn changed(
    state: &HttpState,
    tenant: &TenantId,
    id: RunId,
    changed: Result<Run, OutsideError>,
    key: Option<KeyUse>,
    status: StatusCode,
) -> Result<Response, Rejection> {
    match (changed, key) {
        (Ok(run), _) => Ok((status, Json(RunView::from(&run))).into_response()),
        // Another server was faster with the same key.
        (Err(OutsideError::Store(StoreError::KeyTaken(kept))), Some(key)) => {
            Ok(idempotency::replay(idempotency::same(kept, &key)?, status))
        }
        (Err(OutsideError::Unknown), _) => Err(missing(state, tenant, id).await.into()),
        (Err(error), _) => Err(Problem::from(error).into()),
    }
}

fn result(result: CallResult) -> Answer {
    let content = match result.content {
        TextOrParts::Text(text) => text,
        TextOrParts::Parts(parts) => {
            parts.into_iter().map(|TextPart::Text { text }| text).collect::<Vec<_>>().join("\n")
        }
    };
    Answer::Result { call_id: result.call_id, content, is_error: result.is_error }
}

fn decision(index: usize, approval: Approval) -> Result<Answer, Problem> {
    let Approval { call_id, decision, message, arguments } = approval;
    let refuse = |field: &str, message: &str| {
        let error = FieldError::new(format!("$.decisions[{index}].{field}"), message);
        Err(Problem::field(ProblemCode::InvalidRequest, error))
    };
    match (decision, message, arguments) {
        (Decision::Approve, None, None) => Ok(Answer::Approve { call_id }),
        (Decision::Deny, message, None) => Ok(Answer::Deny { call_id, message }),
        (Decision::Edit, None, Some(arguments)) => Ok(Answer::Edit { call_id, arguments }),
        (Decision::Edit, _, None) => refuse("arguments", "is missing; `edit` needs the new arguments"),
        (Decision::Approve | Decision::Edit, Some(_), _) => refuse("message", "is only for `deny`"),
        (Decision::Approve | Decision::Deny, _, Some(_)) => refuse("arguments", "is only for `edit`"),
    }
}

fn not_empty<T>(path: &str, items: &[T]) -> Result<(), Problem> {
    match items {
        [] => Err(Problem::field(ProblemCode::InvalidRequest, FieldError::new(path, "is empty; give at least one"))),
        _ => Ok(()),
    }
}
