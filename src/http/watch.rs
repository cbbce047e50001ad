//! What the interface tells of its requests: spans and numbers, and the place in the caller's trace.

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, Method};

use crate::domain::{TRACEPARENT, TRACESTATE, TraceContext};
use crate::telemetry::trace::RequestSpan;

/// The route of a request that has none.
pub(super) const UNMATCHED: &str = "unmatched";

/// Routes that are asked all the time by machines: their requests are worth no span, and no record at `info`.
pub(super) fn is_probe(route: &str) -> bool {
    matches!(route, "/healthz" | "/readyz" | "/metrics")
}

/// Begins the span of a request, and notes among its extensions the place in a trace that work for it belongs to, if it
/// has one: the caller's own or else the request's. The work goes on when the request is over, so it stands beside the
/// request where it can.
pub(super) fn begin(request: &mut Request, method: &str) -> RequestSpan {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let caller = caller(request.headers());
    let span = match &route {
        Some(route) if is_probe(route.as_str()) => RequestSpan::none(),
        Some(route) => RequestSpan::begin(method, Some(route.as_str()), Some(request.uri().path()), caller.as_ref()),
        None => RequestSpan::begin(method, None, None, caller.as_ref()),
    };
    if let Some(place) = caller.or_else(|| span.context()) {
        request.extensions_mut().insert(place);
    }
    span
}

/// The caller's span (W3C Trace Context). What is not well-formed is as good as absent, as the standard asks.
fn caller(headers: &HeaderMap) -> Option<TraceContext> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
    let context: TraceContext = parent.to_str().ok()?.trim().parse().ok()?;
    let states: Option<Vec<_>> = headers.get_all(TRACESTATE).iter().map(|state| state.to_str().ok()).collect();
    Some(context.with_state(&states.unwrap_or_default().join(",")))
}

/// A method by its name, or `_OTHER`: anybody can make up methods.
pub(super) fn method_name(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "PATCH" => "PATCH",
        "OPTIONS" => "OPTIONS",
        "TRACE" => "TRACE",
        "CONNECT" => "CONNECT",
        _ => "_OTHER",
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn of(headers: &[(&'static str, &'static str)]) -> Option<(String, Option<String>)> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        caller(&map).map(|context| (context.to_string(), context.state))
    }

    #[test]
    fn the_callers_span_is_taken_as_it_is_sent() {
        assert_eq!(of(&[("traceparent", PARENT)]), Some((PARENT.to_owned(), None)));
        let states = [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")];
        assert_eq!(of(&states), Some((PARENT.to_owned(), Some("a=1,b=2".to_owned()))));
        assert_eq!(of(&[("tracestate", "a=1")]), None);
        assert_eq!(of(&[("traceparent", PARENT), ("traceparent", PARENT)]), None);
        assert_eq!(of(&[("traceparent", "00-zz")]), None);
    }

    #[test]
    fn made_up_methods_have_one_name() {
        assert_eq!(method_name(&Method::GET), "GET");
        assert_eq!(method_name(&Method::from_bytes(b"BREW").unwrap()), "_OTHER");
    }
}
