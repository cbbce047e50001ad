//! The API's description: OpenAPI 3.1, put together from the handlers. `openapi.yaml` is this, written to a file.

use std::collections::BTreeMap;

use bytes::Bytes;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::{Response, ResponseBuilder};
use utoipa::openapi::schema::{AnyOf, AnyOfBuilder, Discriminator, Schema};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr};
use utoipa::{IntoResponses, OpenApi as _};

use super::problem::{PROBLEM_JSON, ProblemBody, ProblemCode};
use crate::domain::EventKind;
use crate::event::{ReasoningDelta, Snapshot, TextDelta, ToolCallDelta, ToolProgress};

const DESCRIPTION: &str = "\
hames executes LLM agents: a run is the loop of one model and its tools over one task, kept in a log that can be \
followed while it grows and read ever after.

**Errors** are `application/problem+json` (RFC 9457). `code` is stable; `type` is `/problems/` and the code. A path \
that is not listed here answers 404 `route_not_found`, a method that is not listed 405 `method_not_allowed` with `Allow`. \
All codes are in the table below.

**Limits.** A body is JSON in UTF-8 of at most `server.max_body_bytes` (4 MiB unless configured), without content \
encoding, without a key twice in one object, nested at most 127 levels, of at most 100 000 values, without U+0000 in any text. A request has at most \
100 header lines and 32 KiB of headers and address (431 `headers_too_large`; beyond 64 KiB the connection is closed \
after a 431 without a body). The bodies being read take at most 256 MiB together; then \
503 `overloaded`. Headers have to arrive within 5 s and bodies within 30 s. A client that takes no byte for 30 s \
is disconnected. Unknown fields and unknown query parameters are errors.

**Access.** There are no API keys yet: whoever can connect may do everything. The server listens on loopback addresses \
only, unless `server.allow_unauthenticated` says otherwise, and answers requests that are addressed to `localhost`, \
127.0.0.1, [::1] or a name of `server.hosts` (else 403 `host_not_allowed`).

**Headers.** Every answer has `x-request-id`: the caller's own when it is 1 to 128 of `A-Z a-z 0-9 - _ . :`, else a new \
one. Times are RFC 3339 in UTC with milliseconds.";

/// What the description says of the API as a whole; routes are added to it.
#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "hames", license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")),
    servers((url = "/", description = "This server.")),
    components(schemas(ProblemBody, Snapshot, TextDelta, ReasoningDelta, ToolCallDelta, ToolProgress)),
    tags(
        (name = "runs", description = "Create, follow, read and abort runs."),
        (name = "catalog", description = "What is on offer."),
        (name = "operations", description = "For those who run the server."),
    ),
)]
struct Frame;

pub(super) fn frame() -> OpenApi {
    let mut frame = Frame::openapi();
    let codes =
        ProblemCode::ALL.map(|code| format!("| `{}` | {} | {} |", code.as_str(), code.status().as_u16(), code.title()));
    let table = format!("| code | status | meaning |\n|---|---|---|\n{}", codes.join("\n"));
    frame.info.description = Some(format!("{DESCRIPTION}\n\n{table}"));
    let shared = SHARED.iter().map(|(name, codes)| ((*name).to_owned(), RefOr::T(response(codes))));
    let components = frame.components.get_or_insert_default();
    components.responses.extend(shared);
    components.schemas.insert("StreamData".to_owned(), RefOr::T(stream_data().into()));
    // An empty list says that no operation asks for a key; without one, readers take the description for incomplete.
    frame.security = Some(Vec::new());
    frame
}

/// What the frames of an event stream carry.
fn stream_data() -> AnyOf {
    let types = ["Event", "Snapshot", "TextDelta", "ReasoningDelta", "ToolCallDelta", "ToolProgress"];
    let choice = AnyOfBuilder::new().description(Some(
        "The data of one frame of an event stream. The frame's `event` says which: `snapshot`, `text_delta`, \
         `reasoning_delta`, `tool_call_delta`, `tool_progress`; any other is the `type` of an event of the log.",
    ));
    types.into_iter().fold(choice, |choice, name| choice.item(Ref::from_schema_name(name))).build()
}

/// Gives each kind of event a schema of its own, `run_start` becoming `RunStartEvent`, so that generated code has a name
/// for it and `type` can tell them apart.
fn name_events(document: &mut OpenApi) {
    let schemas = &mut document.components.get_or_insert_default().schemas;
    let Some(RefOr::T(Schema::OneOf(mut body))) = schemas.remove("EventBody") else { return };
    let mut discriminator = Discriminator::new("type");
    for (item, kind) in body.items.iter_mut().zip(EventKind::ALL) {
        let mut name = kind.as_str().split('_').flat_map(capitalized).collect::<String>();
        name.push_str("Event");
        let reference = Ref::from_schema_name(name.as_str());
        discriminator.mapping.insert(kind.as_str().to_owned(), reference.ref_location.clone());
        schemas.insert(name, std::mem::replace(item, RefOr::Ref(reference)));
    }
    body.discriminator = Some(discriminator);
    schemas.insert("EventBody".to_owned(), RefOr::T(Schema::OneOf(body)));
}

fn capitalized(word: &str) -> impl Iterator<Item = char> {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters)
}

/// The description of the whole API.
pub fn openapi() -> OpenApi {
    let mut document = super::routes().into_openapi();
    name_events(&mut document);
    document
}

/// The description as it stands in `openapi.yaml`.
pub fn openapi_yaml() -> Result<String, SpecError> {
    let yaml = openapi().to_yaml().map_err(|error| SpecError(error.to_string()))?;
    Ok(format!("# Generated from the code: cargo run -- openapi > openapi.yaml\n{yaml}"))
}

/// The description cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("the API's description cannot be written: {0}")]
pub struct SpecError(String);

/// The description, ready to be sent.
pub(super) struct Documents {
    pub(super) yaml: Bytes,
    pub(super) json: Bytes,
}

impl Documents {
    pub(super) fn generate() -> Result<Self, SpecError> {
        let json = openapi().to_json().map_err(|error| SpecError(error.to_string()))?;
        Ok(Self { yaml: openapi_yaml()?.into(), json: json.into() })
    }
}

/// Problems any route can answer with 400.
const ANY_BAD_REQUEST: [ProblemCode; 2] = [ProblemCode::InvalidQuery, ProblemCode::InvalidHeader];

/// Answers any route can give, as components that routes refer to.
const SHARED: [(&str, &[ProblemCode]); 4] = [
    ("NotAllowed", &[ProblemCode::HostNotAllowed, ProblemCode::OriginNotAllowed]),
    ("HeadersTooLarge", &[ProblemCode::HeadersTooLarge]),
    ("ServerFailed", &[ProblemCode::InternalError]),
    ("Unavailable", &[ProblemCode::Overloaded, ProblemCode::Stopping, ProblemCode::StoreUnavailable]),
];

/// Problems of a route that reads.
pub(super) struct ReadProblems;

/// Problems of a route that names a run.
pub(super) struct RunProblems;

/// Problems of a route that changes a run.
pub(super) struct ChangeProblems;

/// Problems of a route that takes something for an active run.
pub(super) struct AnswerProblems;

/// Problems of the route that gives a run's events.
pub(super) struct EventProblems;

/// Problems of the route that creates runs.
pub(super) struct CreateProblems;

impl IntoResponses for ReadProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[])
    }
}

impl IntoResponses for RunProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[ProblemCode::RunNotFound, ProblemCode::RunErased])
    }
}

impl IntoResponses for ChangeProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[ProblemCode::RunNotFound, ProblemCode::RunErased, ProblemCode::RunConflict])
    }
}

impl IntoResponses for AnswerProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[
            ProblemCode::RunNotFound,
            ProblemCode::RunErased,
            ProblemCode::RunConflict,
            ProblemCode::CallConflict,
            ProblemCode::KeyInUse,
            ProblemCode::KeyReused,
            ProblemCode::InvalidJson,
            ProblemCode::InvalidRequest,
            ProblemCode::BodyTimeout,
            ProblemCode::BodyTooLarge,
            ProblemCode::UnsupportedMediaType,
        ])
    }
}

impl IntoResponses for EventProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[ProblemCode::InvalidCursor, ProblemCode::RunNotFound, ProblemCode::RunErased])
    }
}

impl IntoResponses for CreateProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        responses(&[
            ProblemCode::InvalidJson,
            ProblemCode::InvalidRequest,
            ProblemCode::ThreadBusy,
            ProblemCode::KeyInUse,
            ProblemCode::KeyReused,
            ProblemCode::BodyTimeout,
            ProblemCode::BodyTooLarge,
            ProblemCode::UnsupportedMediaType,
        ])
    }
}

/// A route's own problems by status, and those of every route.
fn responses(own: &[ProblemCode]) -> BTreeMap<String, RefOr<Response>> {
    let mut by_status: BTreeMap<u16, Vec<ProblemCode>> = BTreeMap::new();
    for code in own.iter().chain(&ANY_BAD_REQUEST) {
        by_status.entry(code.status().as_u16()).or_default().push(*code);
    }
    let own = by_status.into_iter().map(|(status, codes)| (status.to_string(), RefOr::T(response(&codes))));
    let shared = SHARED.iter().filter_map(|(name, codes)| {
        let status = codes.first()?.status().as_u16();
        Some((status.to_string(), RefOr::Ref(Ref::from_response_name(*name))))
    });
    own.chain(shared).collect()
}

/// An answer with one of several problems of the same status.
fn response(codes: &[ProblemCode]) -> Response {
    let lines: Vec<String> = codes.iter().map(|code| format!("`{}`: {}.", code.as_str(), code.title())).collect();
    let schema = Ref::from_schema_name("Problem");
    let response = ResponseBuilder::new()
        .description(lines.join(" "))
        .content(PROBLEM_JSON, ContentBuilder::new().schema(Some(schema)).build());
    if codes.contains(&ProblemCode::Overloaded) {
        let header = HeaderBuilder::new().description(Some("Seconds until another attempt makes sense.")).build();
        return response.header("Retry-After", header).build();
    }
    response.build()
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
