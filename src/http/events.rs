//! `GET /runs/{id}/events`: the log of a run, as a stream that can be resumed or as JSON pages.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt, stream};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

use super::extract::{RunPath, Tenant};
use super::negotiate::{EVENT_STREAM, Form};
use super::page;
use super::problem::{Problem, ProblemCode};
use super::query::{FromQuery, Query, QueryReader};
use super::runs::missing;
use super::spec::EventProblems;
use super::state::HttpState;
use crate::domain::{Event, EventBody, RunId, Seq, TenantId, Timestamp};
use crate::event::{Cursor, SubscribeError, Subscribed, Subscription};
use crate::telemetry::metric::SseReader;

/// Where a reader of a stream stood when it lost its connection (WHATWG HTML, server-sent events).
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Tells nginx and its kin to pass each event on as it comes.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// How long a stream may be silent, once nothing is committed any more, before it is taken to be at its end.
const QUIET: Duration = Duration::from_millis(250);

/// A JSON page ends early once its events are larger than this, so that memory stays bounded.
const PAGE_BYTES: usize = 4 * 1024 * 1024;

/// Events read from the store at once for a JSON page.
const PAGE_STEP: u32 = 20;

/// Bytes of frames that are joined for one write.
const JOINED_BYTES: usize = 16 * 1024;

/// Which events.
pub(super) struct EventsQuery {
    after: Option<String>,
    limit: Option<u32>,
}

impl FromQuery for EventsQuery {
    fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
        let after = query.one("after", |text| Ok(text.to_owned()))?;
        Ok(Self { after, limit: page::optional_limit(query)? })
    }
}

/// A page of events.
#[derive(Serialize, ToSchema)]
pub(super) struct EventPage {
    /// The events, in order.
    data: Vec<EventView>,
    /// `after` of the next page; `null` when this page reaches the newest event.
    #[schema(value_type = Option<u64>)]
    next_after: Option<Seq>,
}

/// One event of a run's log. The same number always has the same content.
#[derive(Serialize, ToSchema)]
#[schema(as = Event)]
pub(super) struct EventView {
    /// The run.
    #[schema(value_type = String, example = "run_019000000000700080000000000000ab")]
    run_id: RunId,
    /// Its number in the run: 1, 2, 3, … without gap.
    #[schema(value_type = u64, minimum = 1, example = 1)]
    seq: Seq,
    /// When it happened; taken just before it was committed.
    #[schema(value_type = String, format = DateTime)]
    time: Timestamp,
    /// What happened.
    #[serde(flatten)]
    body: EventBody,
}

/// Follow a run, or read its log
///
/// With `Accept: text/event-stream`: server-sent events. `event` is the type of a frame and `data` JSON of the schema
/// `StreamData`. The first frame is a `snapshot` (schema `Snapshot`, no id) with the run as it
/// stands; then every event of the log after the reader's cursor (`Event`), each with its number as `id`; then what
/// happens, as it happens: events as they are committed, and between them the fragments of the message being written
/// (`text_delta`: `TextDelta`, `reasoning_delta`: `ReasoningDelta`, `tool_call_delta`: `ToolCallDelta`) and of what
/// tools say (`tool_progress`: `ToolProgress`). A fragment of text has the id `SEQ.OFFSET`,
/// OFFSET counting Unicode scalar values of the message; one of reasoning has `SEQ.OFFSET.ROFFSET`, ROFFSET counting
/// those of the reasoning. Up to 1 MiB of a response is streamed; the rest of a longer one arrives with its `message`
/// event. Connect again with the last id in `Last-Event-ID` (or in
/// `after`) and the stream goes on exactly there. A comment comes every 15 seconds when nothing else does. After
/// `run_end` the server closes; a stream resumed past it gets 204. Closing a stream never stops the run.
///
/// Otherwise: the log in JSON pages.
#[utoipa::path(get, path = "/runs/{id}/events", operation_id = "list_events", tag = "runs",
    params(
        ("id" = String, Path, pattern = "^run_[0-9a-f]{32}$", description = "The run.", example = "run_019000000000700080000000000000ab"),
        ("after" = Option<String>, Query, pattern = r"^[0-9]+(\.[0-9]+){0,2}$", example = "17",
            description = "The cursor: only what follows it. `SEQ`, or for a place inside the message being written \
                           `SEQ.OFFSET` or `SEQ.OFFSET.ROFFSET`. No number is greater than 18446744073709551615."),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 200,
            description = "Most events of a JSON page; 50 if absent. A page also ends after 4 MiB."),
        ("Last-Event-ID" = Option<String>, Header, nullable = false, pattern = r"^[0-9]+(\.[0-9]+){0,2}$",
            description = "The cursor, as browsers send it, in the form of `after`. Wins over `after`."),
    ),
    responses(
        (status = 200, description = "The stream, or one page.", headers(
            ("Cache-Control" = String, description = "`no-cache` for a stream."),
            ("X-Accel-Buffering" = String, description = "`no` for a stream.")),
            content((EventPage = "application/json"), (String = "text/event-stream"))),
        (status = 204, description = "The run has ended and the stream's cursor lies behind its last event: do not connect again."),
        EventProblems,
    ))]
pub(super) async fn events(
    Query(query): Query<EventsQuery>,
    Tenant(tenant): Tenant,
    RunPath(id): RunPath,
    form: Form,
    State(state): State<HttpState>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let cursor = cursor_of(&headers, query.after.as_deref())?;
    match (form, query.limit) {
        (Form::EventStream, Some(_)) => {
            Err(Problem::new(ProblemCode::InvalidQuery, "?limit: is for JSON pages; a stream has no limit."))
        }
        (Form::EventStream, None) => match state.parts().streams.subscribe(&tenant, id, cursor).await {
            Ok(Subscribed::Past) => Ok(StatusCode::NO_CONTENT.into_response()),
            Ok(Subscribed::Stream(subscription)) => Ok(stream(&state, id, subscription)),
            Err(SubscribeError::NotFound) => Err(missing(&state, &tenant, id).await),
            Err(error) => Err(error.into()),
        },
        (Form::Json, limit) => json_page(&state, &tenant, id, cursor.seq(), limit.unwrap_or(page::DEFAULT_LIMIT)).await,
    }
}

/// Reads both places a cursor can come from; the header wins. A malformed one is an error even where it loses.
fn cursor_of(headers: &HeaderMap, after: Option<&str>) -> Result<Cursor, Problem> {
    let read = |name: &str, text: &str| {
        let invalid = |error| Problem::new(ProblemCode::InvalidCursor, format!("{name}: {error}"));
        text.parse::<Cursor>().map_err(invalid)
    };
    let after = after.map(|text| read("after", text)).transpose()?;
    if headers.get_all(LAST_EVENT_ID).iter().nth(1).is_some() {
        return Err(Problem::new(ProblemCode::InvalidHeader, "The request has more than one `Last-Event-ID` header."));
    }
    match headers.get(LAST_EVENT_ID) {
        // Browsers leave the header out when they have no id; others send it empty.
        Some(value) if !value.is_empty() => read("Last-Event-ID", &String::from_utf8_lossy(value.as_bytes())),
        Some(_) | None => Ok(after.unwrap_or_default()),
    }
}

/// The answer that carries a subscription.
pub(super) fn stream(state: &HttpState, run: RunId, subscription: Subscription) -> Response {
    let (closing, reader) = (state.parts().stages.closing.clone(), state.parts().metrics.sse_reader());
    let feed = Feed { subscription, run, closing, _reader: reader };
    let frames = stream::unfold(feed, |mut feed| async move {
        let frame = feed.next().await?;
        let bytes = feed.with_what_is_ready(frame);
        Some((Ok::<_, Infallible>(bytes), feed))
    });
    let headers = [(CONTENT_TYPE, EVENT_STREAM), (CACHE_CONTROL, "no-cache"), (ACCEL_BUFFERING, "no")];
    (headers, Body::from_stream(frames)).into_response()
}

/// A subscription on its way to a client. Dropped with the connection; the run does not notice.
struct Feed {
    subscription: Subscription,
    run: RunId,
    closing: CancellationToken,
    /// Counted as open until it is dropped.
    _reader: SseReader,
}

impl Feed {
    /// The next frame. `None` ends the stream: after `run_end`, after the last committed event of a server that
    /// stops, or when the store fails; the client resumes where it was.
    async fn next(&mut self) -> Option<Bytes> {
        let mut next = pin!(self.subscription.next());
        let frame = tokio::select! {
            biased;
            frame = &mut next => frame,
            () = self.closing.cancelled() => tokio::time::timeout(QUIET, next).await.unwrap_or(Ok(None)),
        };
        frame.unwrap_or_else(|error| {
            tracing::error!(run_id = %self.run, error = %error, "an event stream ends early: the log cannot be read");
            None
        })
    }

    /// Puts frames that need no waiting behind the first one, so that a reader who is behind costs one write and not
    /// one for each. A frame that is alone stays shared with other readers.
    fn with_what_is_ready(&mut self, first: Bytes) -> Bytes {
        let mut joined = BytesMut::new();
        // An end or an error is met again by the next call.
        while joined.len() < JOINED_BYTES
            && let Some(Ok(Some(frame))) = self.subscription.next().now_or_never()
        {
            if joined.is_empty() {
                joined.extend_from_slice(&first);
            }
            joined.extend_from_slice(&frame);
        }
        if joined.is_empty() { first } else { joined.freeze() }
    }
}

async fn json_page(
    state: &HttpState,
    tenant: &TenantId,
    id: RunId,
    after: Seq,
    limit: u32,
) -> Result<Response, Problem> {
    let store = &state.parts().store;
    let Some(run) = store.run(tenant, id).await? else { return Err(missing(state, tenant, id).await) };
    if after > run.last_seq {
        return Err(Problem::beyond_end(run.last_seq));
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut page = PageWriter::new(limit);
    let mut last = after;
    loop {
        let events = store.events_after(tenant, id, last, PAGE_STEP).await?;
        let at_end = events.len() < usize::try_from(PAGE_STEP).unwrap_or(usize::MAX);
        for event in &events {
            if page.is_full() {
                return Ok(page.finish(Some(last)));
            }
            page.push(event);
            last = event.seq;
        }
        if at_end {
            return Ok(page.finish(None));
        }
    }
}

/// Puts stored events into one JSON text, byte for byte as the stream sends them.
struct PageWriter {
    out: Vec<u8>,
    events: usize,
    limit: usize,
}

impl PageWriter {
    fn new(limit: usize) -> Self {
        Self { out: br#"{"data":["#.to_vec(), events: 0, limit }
    }

    fn is_full(&self) -> bool {
        self.events >= self.limit || self.out.len() >= PAGE_BYTES
    }

    fn push(&mut self, event: &Event) {
        if self.events > 0 {
            self.out.push(b',');
        }
        self.out.extend_from_slice(&event.json());
        self.events += 1;
    }

    fn finish(mut self, next_after: Option<Seq>) -> Response {
        let next = next_after.map_or_else(|| "null".to_owned(), |seq| seq.to_string());
        self.out.extend_from_slice(format!(r#"],"next_after":{next}}}"#).as_bytes());
        ([(CONTENT_TYPE, "application/json")], self.out).into_response()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;
    use crate::domain::EncodedBody;

    fn position(header: Option<&[u8]>, after: Option<&str>) -> Result<Seq, String> {
        let mut headers = HeaderMap::new();
        if let Some(header) = header {
            headers.insert(LAST_EVENT_ID, header.try_into().unwrap());
        }
        cursor_of(&headers, after).map(Cursor::seq).map_err(|problem| {
            assert_eq!(problem.code(), ProblemCode::InvalidCursor);
            problem.detail().to_owned()
        })
    }

    #[test]
    fn the_header_wins_over_the_parameter() {
        assert_eq!(position(None, None), Ok(0));
        assert_eq!(position(None, Some("7")), Ok(7));
        assert_eq!(position(Some(b"9"), Some("7")), Ok(9));
        assert_eq!(position(Some(b"9.12"), None), Ok(9));
        assert_eq!(position(Some(b""), Some("7")), Ok(7));
        assert!(position(Some(b"9"), Some("x")).unwrap_err().starts_with("after: "));
    }

    #[test]
    fn two_headers_are_refused_even_where_they_agree() {
        for second in ["7", "8", ""] {
            let mut headers = HeaderMap::new();
            headers.append(LAST_EVENT_ID, "7".parse().unwrap());
            headers.append(LAST_EVENT_ID, second.parse().unwrap());
            let problem = cursor_of(&headers, Some("7")).unwrap_err();
            assert_eq!(problem.code(), ProblemCode::InvalidHeader);
            assert_eq!(problem.detail(), "The request has more than one `Last-Event-ID` header.");
        }
    }

    // aegra/aegra#472: a client that always sends -1 must get a clear answer, and never a stream without an end.
    #[test]
    fn a_malformed_cursor_is_refused_and_not_repeated_whole() {
        for bad in [&b"-1"[..], b"x", b"1.", b".1", b"1.2.3.4", b" 1", b"+1", b"1e3", b"\xff", &[b'9'; 100_000]] {
            let detail = position(Some(bad), Some("7")).unwrap_err();
            assert!(detail.starts_with("Last-Event-ID: ") && detail.chars().count() < 230, "{detail}");
            if let Ok(text) = std::str::from_utf8(bad) {
                assert!(position(None, Some(text)).unwrap_err().starts_with("after: "));
            }
        }
    }

    #[tokio::test]
    async fn a_page_holds_the_events_as_stored() {
        let event = |seq| Event {
            run: RunId::new(uuid::Uuid::nil()),
            seq,
            time: Timestamp::from_millis(0),
            body: EncodedBody::new(&EventBody::<Value>::RunQueued {}).unwrap(),
        };
        let mut page = PageWriter::new(2);
        for seq in [4, 5] {
            assert!(!page.is_full());
            page.push(&event(seq));
        }
        assert!(page.is_full());
        let bytes = page.finish(Some(5)).into_body().collect().await.unwrap().to_bytes();
        let one = |seq| serde_json::from_slice::<Value>(&event(seq).json()).unwrap();
        assert_eq!(
            serde_json::from_slice::<Value>(&bytes).unwrap(),
            json!({"data": [one(4), one(5)], "next_after": 5})
        );
        let bytes = PageWriter::new(2).finish(None).into_body().collect().await.unwrap().to_bytes();
        assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), json!({"data": [], "next_after": null}));
    }
}
