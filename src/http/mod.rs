//! The HTTP interface: routes, what every request passes first, errors as problems, and the accept loop.
//!
//! Handlers translate: a request into a call of the supervisor, the store or the streams, and what comes back into
//! an answer. They decide nothing about runs.

mod active;
mod body;
mod catalog;
mod events;
mod extract;
mod guard;
mod health;
mod idempotency;
mod linger;
mod negotiate;
mod page;
mod problem;
mod query;
mod room;
mod runs;
mod serve;
mod spec;
mod state;
mod value;
mod view;
mod watch;

use std::any::Any;

use axum::Router;
use axum::http::header::{AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use tower::ServiceBuilder;
use tower_http::ServiceBuilderExt;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::domain::text::panic_text;
use problem::{Problem, ProblemCode};

pub use serve::serve;
pub use spec::{SpecError, openapi, openapi_yaml};
pub use state::{HttpParts, HttpState, Stages};
pub use view::{AgentView, ProviderView};

/// The whole interface as a service.
pub fn router(state: HttpState) -> Router {
    let (router, _) = routes().split_for_parts();
    let layers = ServiceBuilder::new()
        .sensitive_headers([AUTHORIZATION, PROXY_AUTHORIZATION, COOKIE, HeaderName::from_static("x-api-key")])
        .override_response_header(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"))
        .layer(from_fn_with_state(state.clone(), guard::observe))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(state.clone(), guard::admit));
    router.fallback(no_route).method_not_allowed_fallback(wrong_method).layer(layers).with_state(state)
}

/// Every route, with its description. A route that is not here does not exist.
fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::with_openapi(spec::frame())
        .routes(routes!(runs::create, runs::list))
        .routes(routes!(runs::get, runs::abort, active::change))
        .routes(routes!(active::tool_results))
        .routes(routes!(active::approvals))
        .routes(routes!(events::events))
        .routes(routes!(runs::messages, active::say))
        .routes(routes!(catalog::agents))
        .routes(routes!(catalog::models))
        .routes(routes!(catalog::tools))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .routes(routes!(health::openapi_yaml))
        .routes(routes!(health::openapi_json))
}

async fn no_route() -> Problem {
    Problem::new(ProblemCode::RouteNotFound, "No route has this path; GET /openapi.yaml lists them.")
}

/// axum adds `Allow` to this answer.
async fn wrong_method() -> Problem {
    Problem::new(ProblemCode::MethodNotAllowed, "This path does not take this method; `Allow` lists those it takes.")
}

fn panicked(payload: Box<dyn Any + Send>) -> Response {
    tracing::error!(panic = panic_text(&*payload), "a handler panicked");
    Problem::internal().into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use axum::routing::get;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    async fn plain() -> &'static str {
        panic!("canary")
    }

    async fn formatted() -> &'static str {
        panic!("{} {}", "a", "canary")
    }

    #[tokio::test]
    async fn a_panic_is_answered_and_not_told() {
        let router: Router = Router::new()
            .route("/plain", get(plain))
            .route("/formatted", get(formatted))
            .layer(CatchPanicLayer::custom(panicked));
        for path in ["/plain", "/formatted"] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status().as_u16(), 500);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["code"], "internal_error");
            assert!(!body.to_string().contains("canary"));
        }
    }
}
