//! What every request passes before its handler: a name, a span, bounds on headers, and the checks that keep
//! web pages of other sites away from a server on this machine.

use std::net::IpAddr;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use super::problem::{Problem, ProblemCode, shown};
use super::state::HttpState;
use super::watch::{UNMATCHED, begin, is_probe, method_name};
use crate::telemetry::request_log_context;
use crate::time::{Clock, Ids};

/// Most header lines of a request.
pub(super) const MAX_HEADERS: usize = 100;

/// Most bytes of a request's headers and address together. Twice as many close the connection (see `serve`).
pub(super) const MAX_HEADER_BYTES: usize = 32 * 1024;

/// Names a request in answers and in the log.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest request id that is taken from a caller.
const MAX_REQUEST_ID: usize = 128;

/// Gives the request its id and its span, and logs its end. The outermost layer.
pub(super) async fn observe(State(state): State<HttpState>, mut request: Request, next: Next) -> Response {
    let id = request_id(request.headers(), &*state.parts().clock, &state.parts().ids);
    // Only the route is logged, never the address: that is the caller's text.
    let route = request.extensions().get::<MatchedPath>().map_or(UNMATCHED, MatchedPath::as_str).to_owned();
    let method = method_name(request.method());
    let span = request_log_context(request.method().as_str(), &route, id.to_str().unwrap_or_default());
    let exported = begin(&mut request, method);
    let start = tokio::time::Instant::now();
    async move {
        let mut response = next.run(request).await;
        let status = response.status().as_u16();
        let took = start.elapsed();
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        // What went well shows in the records of its run, and is counted.
        let is_worth_a_line = if is_probe(&route) { status >= 500 } else { status >= 400 };
        if is_worth_a_line {
            tracing::info!(status, duration_ms, "answered");
        } else {
            tracing::debug!(status, duration_ms, "answered");
        }
        state.parts().metrics.http_request(method, &route, status, took);
        exported.answered(status);
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }
    .instrument(span)
    .await
}

/// The caller's id when it is a plain one; else a new one.
fn request_id(headers: &HeaderMap, clock: &dyn Clock, ids: &Ids) -> HeaderValue {
    let is_plain = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=MAX_REQUEST_ID).contains(&bytes.len())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte))
    };
    if let Some(given) = headers.get(REQUEST_ID).filter(is_plain) {
        return given.clone();
    }
    let fresh = HeaderValue::try_from(format!("req_{}", ids.next(clock.now()).simple()));
    // Hexadecimal digits always fit a header.
    fresh.unwrap_or(HeaderValue::from_static("req_unknown"))
}

/// Refuses requests that no handler should see.
pub(super) async fn admit(State(state): State<HttpState>, request: Request, next: Next) -> Response {
    let host_rule = HostRule { hosts: &state.parts().server.hosts };
    let checked = check_size(&request).and_then(|()| host_rule.check(&request));
    match checked {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

fn check_size(request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    // Each line has a colon, a space and a line end besides.
    let lines: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let address = request.uri().path_and_query().map_or(0, |text| text.as_str().len());
    let bytes = lines + address;
    if headers.len() <= MAX_HEADERS && bytes <= MAX_HEADER_BYTES {
        return Ok(());
    }
    let detail = format!(
        "The request has {} header lines and {bytes} bytes of headers and address; at most {MAX_HEADERS} lines and \
         {MAX_HEADER_BYTES} bytes are accepted.",
        headers.len()
    );
    Err(Problem::new(ProblemCode::HeadersTooLarge, detail))
}

/// Which hosts a request may be addressed to: names and addresses of this machine, and those of the settings. Calls
/// from pages of another origin change nothing.
///
/// A server that asks for no key trusts whoever reaches it. A web page can reach it through a name that its own server
/// points at 127.0.0.1 (DNS rebinding), but not under a name that is this machine's. The address it listens on says
/// nothing of that: in a container it is every address, and the port is published on a loopback address.
#[derive(Clone, Copy, Debug)]
struct HostRule<'a> {
    hosts: &'a [String],
}

impl HostRule<'_> {
    fn check(self, request: &Request) -> Result<(), Problem> {
        let Some(host) = addressed_host(request)? else { return Ok(()) };
        let is_listed = self.hosts.iter().any(|listed| listed.eq_ignore_ascii_case(host.host()));
        if !is_listed && !is_this_machine(host.host()) {
            let detail = format!(
                "The request is addressed to `{}`; this server answers to `localhost`, 127.0.0.1, [::1] and what \
                 `server.hosts` lists only.",
                shown(host.host())
            );
            return Err(Problem::new(ProblemCode::HostNotAllowed, detail));
        }
        check_origin(request, &host)
    }
}

/// The host a request is addressed to: `:authority` or an absolute address before `Host` (RFC 9112 §3.2.2).
/// `None` when the client names none, which no browser does.
fn addressed_host(request: &Request) -> Result<Option<Authority>, Problem> {
    if let Some(authority) = request.uri().authority() {
        return Ok(Some(authority.clone()));
    }
    let mut hosts = request.headers().get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => Ok(None),
        (Some(host), None) => match Authority::try_from(host.as_bytes()) {
            Ok(host) if !host.as_str().contains('@') => Ok(Some(host)),
            Ok(_) | Err(_) => Err(Problem::new(ProblemCode::InvalidHeader, "The `Host` header is not a host.")),
        },
        (Some(_), Some(_)) => {
            Err(Problem::new(ProblemCode::InvalidHeader, "The request has more than one `Host` header."))
        }
    }
}

fn is_this_machine(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    if host == "localhost" || host.ends_with(".localhost") {
        return true;
    }
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
    address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Browsers say which page a changing request comes from; programs say nothing.
fn check_origin(request: &Request, host: &Authority) -> Result<(), Problem> {
    if request.method().is_safe() || *request.method() == Method::OPTIONS {
        return Ok(());
    }
    for origin in request.headers().get_all(ORIGIN) {
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, rest)| rest);
        if !authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host.as_str())) {
            let shown = shown(&String::from_utf8_lossy(origin.as_bytes()));
            let detail = format!("The request comes from a page of `{shown}`, which is not this server.");
            return Err(Problem::new(ProblemCode::OriginNotAllowed, detail));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;
    use crate::domain::Timestamp;
    use crate::time::ManualClock;

    fn request(method: Method, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::builder().method(method).uri("/runs");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Body::empty()).unwrap()
    }

    fn checked(method: Method, headers: &[(&str, &str)]) -> Option<ProblemCode> {
        HostRule { hosts: &[] }.check(&request(method, headers)).err().map(|problem| problem.code())
    }

    #[test]
    fn a_loopback_server_answers_to_its_own_names_only() {
        for good in
            ["localhost", "LOCALHOST:8080", "localhost.", "app.localhost:1", "127.0.0.1:8080", "127.9.9.9", "[::1]:80"]
        {
            assert_eq!(checked(Method::GET, &[("host", good)]), None, "{good}");
        }
        for bad in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "notlocalhost",
            "0.0.0.0",
            "192.168.0.1",
            "127.0.0.1.nip.io",
            "[::]",
        ] {
            assert_eq!(checked(Method::GET, &[("host", bad)]), Some(ProblemCode::HostNotAllowed), "{bad}");
        }
        for broken in ["", "a b", "user@localhost"] {
            assert_eq!(checked(Method::GET, &[("host", broken)]), Some(ProblemCode::InvalidHeader), "{broken}");
        }
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(checked(Method::GET, &two), Some(ProblemCode::InvalidHeader));
        assert_eq!(checked(Method::GET, &[]), None);
        let hosts = ["hames".to_owned()];
        let listed = |host| HostRule { hosts: &hosts }.check(&request(Method::GET, &[("host", host)])).is_ok();
        assert!(listed("hames:8080") && listed("HAMES") && listed("127.0.0.1") && !listed("evil.example"));
    }

    #[test]
    fn a_page_of_another_origin_changes_nothing() {
        let from = |method, origin| checked(method, &[("host", "localhost:8080"), ("origin", origin)]);
        assert_eq!(from(Method::POST, "http://localhost:8080"), None);
        for foreign in
            ["http://evil.example", "null", "", "http://localhost:3000", "http://localhost", "localhost:8080"]
        {
            for method in [Method::POST, Method::DELETE, Method::PATCH] {
                assert_eq!(from(method, foreign), Some(ProblemCode::OriginNotAllowed), "{foreign}");
            }
            assert_eq!(from(Method::GET, foreign), None, "{foreign}");
        }
    }

    #[test]
    fn headers_are_bounded_in_number_and_size() {
        let long = "x".repeat(MAX_HEADER_BYTES - "/runs".len() - "a".len() - 4);
        assert!(check_size(&request(Method::GET, &[("a", &long)])).is_ok());
        let problem = check_size(&request(Method::GET, &[("ab", &long)])).unwrap_err();
        assert_eq!(problem.code(), ProblemCode::HeadersTooLarge);
        assert!(!problem.detail().contains("xxx"));
        assert!(check_size(&request(Method::GET, &[("a", "b"); MAX_HEADERS])).is_ok());
        assert!(check_size(&request(Method::GET, &[("a", "b"); MAX_HEADERS + 1])).is_err());
    }

    #[test]
    fn only_a_plain_request_id_is_taken_over() {
        let clock = ManualClock::new(Timestamp::from_millis(0));
        let id = |given: &str| {
            let headers = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_bytes(given.as_bytes()).unwrap())]);
            request_id(&headers, &clock, &Ids::default()).to_str().unwrap().to_owned()
        };
        assert_eq!(id("Abc-1_2.3:4"), "Abc-1_2.3:4");
        for bad in ["", "a b", "a\tb", "é", "a;b", "<x>", &"a".repeat(129)] {
            let fresh = id(bad);
            assert!(fresh.starts_with("req_") && fresh.len() == 36, "{bad}: {fresh}");
        }
    }
}
