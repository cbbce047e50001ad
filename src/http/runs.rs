//! `POST /runs`, `GET /runs`, `GET /runs/{id}`, `DELETE /runs/{id}`, `GET /runs/{id}/messages`.

use std::str::FromStr;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::events;
use super::extract::{Admitted, KeyedBody, Rejection, RunPath, Tenant};
use super::idempotency::{self, Attempt};
use super::negotiate::{Form, MAX_WAIT_SECONDS, Prefer};
use super::page;
use super::problem::{Problem, ProblemCode, shown};
use super::query::{FromQuery, NoQuery, Query, QueryReader, whole_number};
use super::spec::{ChangeProblems, CreateProblems, ReadProblems, RunProblems};
use super::state::HttpState;
use crate::domain::text::nearest;
use crate::domain::{Message, Run, RunId, RunRequest, RunStatusName, RunView, TenantId};
use crate::event::{Cursor, Subscribed};
use crate::run::CreateError;
use crate::store::{Erasure, KeptAnswer, RunFilter, StoreError};

/// Tells which of the caller's preferences was followed (RFC 7240 §3).
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Most labels one list request can ask for.
const MAX_LABELS: usize = 32;

/// Create a run
///
/// Accepts a run and answers at once with 202: it is `running`, or `queued` while as many runs are at work
/// as may be. With `Prefer: wait=N` the answer is held back until the run has ended or waits for answers, at most N seconds (300 at most):
/// then it is 200. With `Accept: text/event-stream` the answer is the run's event stream itself, as from
/// `GET /runs/{id}/events`. Closing the connection never stops the run.
#[utoipa::path(post, path = "/runs", operation_id = "create_run", tag = "runs",
    params(
        ("Idempotency-Key" = Option<String>, Header, nullable = false, example = "8e03978e-40d5-43dd-bc93-6894a57f9324",
            description = "1 to 255 visible ASCII characters, chosen by you. A request that is repeated with its key \
                           within 24 hours makes no second run and gets the first answer again, with \
                           `Idempotency-Replayed: true`; with another body it is refused with 422, and with 409 while \
                           the first is being answered."),
        ("Prefer" = Option<String>, Header, nullable = false, example = "wait=10",
            description = "`wait=N`: hold the answer back until the run has ended or waits for answers, at most N seconds (RFC 7240). \
                           The answer repeats it in `Preference-Applied`. Has no meaning for a stream."),
    ),
    request_body(content = RunRequest, description = "What to do. Only `input` is required.", examples(
        ("text" = (summary = "A text", value = json!({"input": "What does README.md say?", "agent": "coder"}))),
        ("conversation" = (summary = "A conversation, with bounds", value = json!({
            "input": [
                {"role": "user", "content": "Name a file."},
                {"role": "assistant", "content": "README.md"},
                {"role": "user", "content": [{"type": "text", "text": "Summarise it."}]}
            ],
            "limits": {"max_steps": 5, "timeout_ms": 60000},
            "metadata": {"ticket": "42"}
        }))),
    )),
    responses(
        (status = 202, description = "Accepted, and stored for good.", body = RunView, headers(
            ("Location" = String, description = "The run: `/runs/{id}`."),
            ("Preference-Applied" = String, description = "The wait that was followed."))),
        (status = 200, description = "Ended, or waiting for answers, within the wait; or the event stream.", headers(
            ("Location" = String, description = "The run: `/runs/{id}`."),
            ("Preference-Applied" = String, description = "The wait that was followed.")),
            content((RunView = "application/json"), (String = "text/event-stream"))),
        CreateProblems,
    ))]
pub(super) async fn create(
    Query(NoQuery): Query<NoQuery>,
    Admitted(caller): Admitted,
    form: Form,
    prefer: Prefer,
    State(state): State<HttpState>,
    KeyedBody { body: request, key }: KeyedBody<RunRequest>,
) -> Result<Response, Rejection> {
    let tenant = caller.tenant.clone();
    let first = match idempotency::attempt(&state, &tenant, key.as_ref()).await? {
        Attempt::Again(kept) => Err(kept),
        Attempt::First(flight) => match state.parts().supervisor.create(caller, request, key.clone()).await {
            Ok(run) => {
                drop(flight);
                Ok(run)
            }
            // Another server was faster with the same key.
            Err(CreateError::Store(StoreError::KeyTaken(kept))) => match &key {
                Some(key) => Err(idempotency::same(kept, key)?),
                None => return Err(Problem::internal().into()),
            },
            Err(error) => return Err(Problem::from(error).into()),
        },
    };
    match first {
        Ok(run) => Ok(answer(&state, &tenant, &run, form, prefer).await),
        Err(kept) => Ok(answer_again(&state, &tenant, kept, form, prefer).await?),
    }
}

/// The answer for a run that was created. From here on the run exists: whatever fails now is logged, and the answer says
/// 202 and where the run is.
async fn answer(state: &HttpState, tenant: &TenantId, run: &Run, form: Form, prefer: Prefer) -> Response {
    match form {
        Form::EventStream => match state.parts().streams.subscribe(tenant, run.id, Cursor::default()).await {
            Ok(Subscribed::Stream(subscription)) => {
                let mut response = events::stream(state, run.id, subscription);
                insert_location(&mut response, run.id);
                response
            }
            Ok(Subscribed::Past) => created(run, None),
            Err(error) => {
                tracing::error!(run_id = %run.id, error = %error, "the new run cannot be followed now");
                created(run, None)
            }
        },
        Form::Json => match prefer.wait() {
            None => created(run, None),
            Some((wait, applied)) => match settled(state, tenant, run.id, wait).await {
                Ok(Some(now)) => created(&now, Some(applied)),
                Ok(None) => created(run, None),
                Err(error) => {
                    tracing::error!(run_id = %run.id, error = %error, "the end of the new run cannot be awaited now");
                    created(run, None)
                }
            },
        },
    }
}

/// The answer for a run that was created by an earlier request: as then, or what the caller wants to see of it now.
async fn answer_again(
    state: &HttpState,
    tenant: &TenantId,
    kept: KeptAnswer,
    form: Form,
    prefer: Prefer,
) -> Result<Response, Problem> {
    let id = kept.run;
    let wants_more = matches!(form, Form::EventStream) || prefer.wait().is_some();
    let run = match wants_more {
        true => state.parts().store.run(tenant, id).await?,
        false => None,
    };
    let mut response = match run {
        Some(run) => answer(state, tenant, &run, form, prefer).await,
        None => {
            let mut response = idempotency::replay(kept, StatusCode::ACCEPTED);
            insert_location(&mut response, id);
            response
        }
    };
    idempotency::mark(&mut response);
    Ok(response)
}

fn created(run: &Run, applied: Option<HeaderValue>) -> Response {
    // Without a wait the answer is the same whatever the run does next.
    let status = if applied.is_some() && run.status.is_at_rest() { StatusCode::OK } else { StatusCode::ACCEPTED };
    let mut response = (status, Json(RunView::from(run))).into_response();
    insert_location(&mut response, run.id);
    if let Some(applied) = applied {
        response.headers_mut().insert(PREFERENCE_APPLIED, applied);
    }
    response
}

fn insert_location(response: &mut Response, id: RunId) {
    match HeaderValue::try_from(format!("/runs/{id}")) {
        Ok(location) => drop(response.headers_mut().insert(LOCATION, location)),
        Err(error) => tracing::error!(run_id = %id, error = %error, "the location is no header value"),
    }
}

/// Waits for a run to end, and not longer than `wait` or than the server lives; then reads it as it stands.
async fn settled(state: &HttpState, tenant: &TenantId, id: RunId, wait: Duration) -> Result<Option<Run>, StoreError> {
    let parts = state.parts();
    if wait.is_zero() {
        return parts.store.run(tenant, id).await;
    }
    tokio::select! {
        biased;
        run = parts.streams.settled(tenant, id, wait) => run,
        () = parts.stages.closing.cancelled() => parts.store.run(tenant, id).await,
    }
}

/// Which runs to list.
pub(super) struct ListQuery {
    filter: RunFilter,
    limit: u32,
    before: Option<RunId>,
}

impl FromQuery for ListQuery {
    fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
        let mut status = Vec::new();
        for name in query.all("status").iter().flat_map(|value| value.split(',')) {
            let name = StatusParam::from_str(name.trim())?.0;
            if !status.contains(&name) {
                status.push(name);
            }
        }
        let agent = query.one("agent", |text| Ok(text.to_owned()))?;
        let thread = query.one("thread", |text| Ok(text.to_owned()))?;
        let metadata = query.prefixed("metadata.")?;
        if metadata.len() > MAX_LABELS {
            let detail = format!("The request filters by {} labels; at most {MAX_LABELS} are allowed.", metadata.len());
            return Err(Problem::new(ProblemCode::InvalidQuery, detail));
        }
        Ok(Self {
            filter: RunFilter { status, agent, thread, metadata },
            limit: page::limit(query)?,
            before: page::cursor(query)?,
        })
    }
}

struct StatusParam(RunStatusName);

impl FromStr for StatusParam {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let names = RunStatusName::ALL.map(RunStatusName::as_str);
        RunStatusName::ALL.into_iter().find(|name| name.as_str() == text).map(Self).ok_or_else(|| {
            let known = match nearest(text, names) {
                Some(meant) => format!("did you mean `{meant}`?"),
                None => format!("expected one or more of {}", names.join(", ")),
            };
            let message = format!("`{}` is not a status; {known}", shown(text));
            Problem::field(ProblemCode::InvalidQuery, crate::domain::FieldError::new("?status", message))
        })
    }
}

/// A page of runs.
#[derive(Serialize, ToSchema)]
pub(super) struct RunPage {
    /// The runs, newest first.
    data: Vec<RunView>,
    /// `cursor` of the next page; `null` when this is the last.
    next_cursor: Option<String>,
}

/// List runs
///
/// Newest first. All conditions must hold.
#[utoipa::path(get, path = "/runs", operation_id = "list_runs", tag = "runs",
    params(
        ("status" = Option<Vec<RunStatusName>>, Query, style = Form, explode,
            description = "Any of these statuses; repeated, or in one list with commas."),
        ("thread" = Option<String>, Query, description = "Only runs of this thread."),
        ("agent" = Option<String>, Query, description = "Runs of this agent.", example = "coder"),
        ("metadata" = Option<BTreeMap<String, String>>, Query, style = Form, explode,
            example = json!({"metadata.ticket": "42"}),
            description = "Runs with all of these labels, at most 32. Each label is a parameter of its own, \
                           `metadata.KEY=VALUE`: the keys of this object start with `metadata.`, and its own name is \
                           never sent."),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 200, description = "Most runs of the page; 50 if absent."),
        ("cursor" = Option<String>, Query, pattern = "^before_[0-9a-f]{32}$", description = "`next_cursor` of the page before. Opaque: do not make or change one."),
    ),
    responses((status = 200, description = "One page.", body = RunPage), ReadProblems))]
pub(super) async fn list(
    Query(query): Query<ListQuery>,
    Tenant(tenant): Tenant,
    State(state): State<HttpState>,
) -> Result<Json<RunPage>, Problem> {
    let runs = state.parts().store.list_runs(&tenant, &query.filter, query.before, query.limit + 1).await?;
    let (runs, next_cursor) = page::cut(runs, query.limit);
    Ok(Json(RunPage { data: runs.iter().map(RunView::from).collect(), next_cursor }))
}

/// How long to wait for the end of a run.
pub(super) struct WaitQuery(Option<Duration>);

impl FromQuery for WaitQuery {
    fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
        let seconds = query.one("wait", |text| whole_number(text, 0, MAX_WAIT_SECONDS))?;
        Ok(Self(seconds.map(Duration::from_secs)))
    }
}

/// Get a run
///
/// The run as it stands; with `wait=N` as soon as it has ended or waits for answers, and after N seconds in any case.
#[utoipa::path(get, path = "/runs/{id}", operation_id = "get_run", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("wait" = Option<u64>, Query, minimum = 0, maximum = 300,
            description = "Hold the answer back until the run has ended or waits for answers, at most this many seconds."),
    ),
    responses((status = 200, description = "The run.", body = RunView), RunProblems))]
pub(super) async fn get(
    Query(WaitQuery(wait)): Query<WaitQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
) -> Result<Json<RunView>, Problem> {
    let run = settled(&state, &tenant, id, wait.unwrap_or_default()).await?;
    match run {
        Some(run) => Ok(Json(RunView::from(&run))),
        None => Err(missing(&state, &tenant, id).await),
    }
}

/// Whether to erase.
pub(super) struct PurgeQuery(bool);

impl FromQuery for PurgeQuery {
    fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
        let purge = query.one("purge", |text| match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err("expected `true` or `false`".to_owned()),
        })?;
        Ok(Self(purge.unwrap_or_default()))
    }
}

/// Abort or erase a run
///
/// Asks the run to end as `aborted`. May be repeated. A run that has ended is left as it is. With `purge=true` a run that
/// has ended is erased: its transcript, events, labels and idempotency keys; from then on its routes answer 410.
#[utoipa::path(delete, path = "/runs/{id}", operation_id = "abort_run", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("purge" = Option<bool>, Query, description = "Erase a run that has ended."),
    ),
    responses(
        (status = 202, description = "It is being aborted.", body = RunView),
        (status = 200, description = "It had ended.", body = RunView),
        (status = 204, description = "It is erased."),
        ChangeProblems,
    ))]
pub(super) async fn abort(
    Query(PurgeQuery(purge)): Query<PurgeQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
) -> Result<Response, Problem> {
    let parts = state.parts();
    if purge {
        return match parts.store.erase(&tenant, id, parts.clock.now()).await? {
            Erasure::Erased => Ok(StatusCode::NO_CONTENT.into_response()),
            Erasure::Active => {
                let detail = "The run has not ended. Abort it first, then erase it. Nothing was erased.";
                Err(Problem::new(ProblemCode::RunConflict, detail))
            }
            Erasure::Unknown => Err(Problem::run_not_found()),
        };
    }
    let Some(run) = parts.supervisor.cancel(&tenant, id).await? else {
        return Err(missing(&state, &tenant, id).await);
    };
    let status = if run.status.is_finished() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(RunView::from(&run))).into_response())
}

/// Why a run is not there.
pub(super) async fn missing(state: &HttpState, tenant: &TenantId, id: RunId) -> Problem {
    match state.parts().store.is_erased(tenant, id).await {
        Ok(true) => Problem::run_erased(),
        Ok(false) => Problem::run_not_found(),
        Err(error) => error.into(),
    }
}

/// The transcript of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct MessageList {
    /// The messages, in order: those of the runs it continues, the input, then everything that was said and done.
    data: Vec<Message>,
}

/// Get the transcript of a run
///
/// Every message so far, whole and in order, also of a run in progress.
#[utoipa::path(get, path = "/runs/{id}/messages", operation_id = "list_messages", tag = "runs",
    params(("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab")),
    responses((status = 200, description = "The transcript.", body = MessageList), RunProblems))]
pub(super) async fn messages(
    Query(NoQuery): Query<NoQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    State(state): State<HttpState>,
) -> Result<Json<MessageList>, Problem> {
    match state.parts().store.transcript(&tenant, id).await? {
        Some(data) => Ok(Json(MessageList { data })),
        None => Err(missing(&state, &tenant, id).await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<RunFilter, String> {
        let uri = format!("/runs?{query}").parse().unwrap();
        match Query::<ListQuery>::read(&uri) {
            Ok(Query(list)) => Ok(list.filter),
            Err(problem) => Err(problem.detail().to_owned()),
        }
    }

    #[test]
    fn filters_are_read() {
        let expected = RunFilter {
            status: vec![RunStatusName::Queued, RunStatusName::Running, RunStatusName::Aborted],
            agent: Some("coder".into()),
            thread: Some("t".into()),
            metadata: vec![("ticket".into(), "4=2".into())],
        };
        let query = "status=queued,running&status=aborted&status=queued&agent=coder&thread=t&metadata.ticket=4%3D2";
        assert_eq!(read(query), Ok(expected));
        assert_eq!(read(""), Ok(RunFilter::default()));
    }

    #[test]
    fn wrong_filters_are_named() {
        for (query, detail) in [
            ("status=complete", "?status: `complete` is not a status; did you mean `completed`?"),
            ("threads=x", "?threads: is not a parameter of this route; did you mean `thread`?"),
            ("agent=a&agent=b", "?agent: is given more than once"),
        ] {
            assert_eq!(read(query), Err(detail.to_owned()));
        }
        assert!(read("status=").unwrap_err().contains("expected one or more of queued, running, waiting, completed"));
        let many: Vec<String> = (0..33).map(|n| format!("metadata.k{n}=v")).collect();
        assert!(read(&many.join("&")).unwrap_err().contains("filters by 33 labels"));
    }
}
