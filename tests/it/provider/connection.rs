//! What happens on the wire: who hangs up and when, what is sent, what a refusal teaches.

use std::sync::Arc;
use std::time::Duration;

use hames::config::{ProviderConfig, WireConfig};
use hames::domain::{Delta, FailureClass, FinishReason, ModelFailure};
use hames::provider::conversation::Conversation;
use hames::provider::{Catalog, DeltaSink, Provider};
use hames::time::{Clock, SystemClock};
use secrecy::SecretString;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::{Streamed, chat_provider, hi};
use crate::support::upstream::{End, Reply, Response, Upstream};

/// Longer than anything here takes unless it hangs.
const PATIENCE: Duration = Duration::from_secs(10);

fn clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

fn local(upstream: &Upstream, settings: &Value) -> Arc<dyn Provider> {
    chat_provider(upstream.base_url(), settings, &clock())
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
}

fn hello() -> Response {
    Response::events([
        chunk(&json!({"content": "Hello."}), None),
        chunk(&json!({}), Some("stop")),
        "data: [DONE]\n\n".into(),
    ])
}

async fn call(provider: &Arc<dyn Provider>) -> Result<String, ModelFailure> {
    timeout(PATIENCE, provider.call(&hi(), &mut Conversation::default(), &mut Streamed::default()))
        .await
        .expect("an end")
        .map(|turn| turn.text())
}

/// Tells when the first fragment came.
struct Signal(mpsc::Sender<()>);

impl DeltaSink for Signal {
    fn delta(&mut self, _: Delta<'_>) {
        self.0.try_send(()).ok();
    }
}

/// tambo-ai/tambo#2236: a cancelled run goes on being paid for.
#[tokio::test]
async fn dropping_a_call_in_mid_stream_closes_its_connection() {
    let upstream =
        Upstream::start(vec![Response::events([chunk(&json!({"content": "a"}), None)]).with_end(End::Open).into()])
            .await;
    let provider = local(&upstream, &json!({}));
    let (sender, mut begun) = mpsc::channel(1);
    let mut sink = Signal(sender);
    let request = hi();
    let mut conversation = Conversation::default();
    let dropped = tokio::select! {
        result = provider.call(&request, &mut conversation, &mut sink) => panic!("ended: {result:?}"),
        _ = begun.recv() => Instant::now(),
    };
    let hang_ups = timeout(PATIENCE, upstream.wait_for_hang_ups(1)).await.expect("the connection closes");
    assert_eq!(hang_ups.len(), 1);
    assert!(hang_ups[0].at.duration_since(dropped) < Duration::from_secs(1), "{hang_ups:?}");
}

#[tokio::test]
async fn dropping_a_call_before_its_answer_closes_its_connection() {
    let upstream = Upstream::start(vec![Reply::Silence]).await;
    let provider = local(&upstream, &json!({}));
    let (request, mut sink) = (hi(), Streamed::default());
    let mut conversation = Conversation::default();
    tokio::select! {
        result = provider.call(&request, &mut conversation, &mut sink) => panic!("ended: {result:?}"),
        () = upstream.wait_for_requests(1) => {}
    }
    assert_eq!(timeout(PATIENCE, upstream.wait_for_hang_ups(1)).await.expect("the connection closes").len(), 1);
}

/// co-l/openfox#226: a silent stream is noticed and never ended.
#[tokio::test]
async fn silence_ends_the_call_and_its_connection() {
    let idle = json!({"idle_timeout_ms": 50});
    for reply in [
        Reply::Silence,
        Response::events([": ping\n\n".to_owned(), chunk(&json!({"content": "a"}), None)]).with_end(End::Open).into(),
        Response::json(500, &json!({})).with_end(End::Open).into(),
    ] {
        let refuses = matches!(&reply, Reply::Response(response) if response.status == 500);
        let upstream = Upstream::start(vec![reply]).await;
        let failure = call(&local(&upstream, &idle)).await.unwrap_err();
        let expected = if refuses { FailureClass::Unavailable } else { FailureClass::TimedOut };
        assert_eq!(failure.class, expected, "{failure:?}");
        timeout(PATIENCE, upstream.wait_for_hang_ups(1)).await.expect("the connection closes");
    }
}

#[tokio::test]
async fn the_end_mark_ends_the_call_though_the_socket_stays_open() {
    let upstream = Upstream::start(vec![hello().with_end(End::Open).into()]).await;
    let provider = local(&upstream, &json!({"idle_timeout_ms": 600_000}));
    assert_eq!(call(&provider).await.unwrap(), "Hello.");
    timeout(PATIENCE, upstream.wait_for_hang_ups(1)).await.expect("the connection closes");
}

#[tokio::test]
async fn a_reset_before_the_end_is_a_truncated_response() {
    let half = Response::events([chunk(&json!({"content": "Hel"}), None)]).with_end(End::Abort);
    let upstream = Upstream::start(vec![half.into()]).await;
    let failure = call(&local(&upstream, &json!({}))).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::Truncated, "{failure:?}");
}

#[tokio::test]
async fn a_whole_document_is_an_answer_too() {
    let body = json!({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "length"}],
                      "usage": {"prompt_tokens": 3, "completion_tokens": 2}});
    let upstream = Upstream::start(vec![Response::json(200, &body).into()]).await;
    let mut streamed = Streamed::default();
    let turn = local(&upstream, &json!({})).call(&hi(), &mut Conversation::default(), &mut streamed).await.unwrap();
    assert_eq!((turn.text(), turn.finish, streamed.text), ("Hello.".into(), FinishReason::Length, "Hello.".into()));
    assert_eq!(turn.usage.map(|usage| (usage.input_tokens, usage.output_tokens)), Some((3, 2)));
}

/// vybestack/llxprt-code#114: a server that does not know `stream_options` refuses every request.
#[tokio::test]
async fn a_refused_option_is_left_out_from_then_on() {
    let refusal = json!({"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]});
    let upstream = Upstream::start(vec![Response::json(422, &refusal).into(), hello().into()]).await;
    let provider = local(&upstream, &json!({}));
    assert_eq!(call(&provider).await.unwrap(), "Hello.");
    assert_eq!(call(&provider).await.unwrap(), "Hello.");
    let asked: Vec<_> =
        upstream.requests().iter().map(|request| request.body.get("stream_options").is_some()).collect();
    assert_eq!(asked, [true, false, false]);
}

#[tokio::test]
async fn a_bound_that_has_another_name_is_renamed() {
    let refusal = json!({"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "code": "unsupported_parameter"}});
    let upstream = Upstream::start(vec![Response::json(400, &refusal).into(), hello().into()]).await;
    let provider = local(&upstream, &json!({}));
    let mut request = hi();
    request.max_output_tokens = Some(9);
    provider.call(&request, &mut Conversation::default(), &mut Streamed::default()).await.unwrap();
    let bodies: Vec<_> = upstream.requests().into_iter().map(|request| request.body).collect();
    assert_eq!(
        (&bodies[0]["max_tokens"], &bodies[1]["max_completion_tokens"], bodies[1].get("max_tokens")),
        (&json!(9), &json!(9), None)
    );
}

#[tokio::test]
async fn a_server_that_refuses_everything_is_not_asked_for_ever() {
    let refusal = json!({"error": {"message": "stream_options and max_completion_tokens"}});
    let upstream = Upstream::start(vec![Response::json(400, &refusal).into()]).await;
    assert_eq!(call(&local(&upstream, &json!({}))).await.unwrap_err().class, FailureClass::InvalidRequest);
    assert_eq!(upstream.requests().len(), 3);
}

#[tokio::test]
async fn refusals_are_told_shortly_and_redirects_are_not_followed() {
    let long = "x".repeat(100_000);
    for (response, class, message) in [
        (
            Response::json(401, &json!({"error": {"message": "no key"}})),
            FailureClass::Authentication,
            "answered 401 Unauthorized: no key",
        ),
        (Response::json(503, &json!(long)), FailureClass::Unavailable, "answered 503 Service Unavailable: \"xxx"),
        (
            Response::json(302, &json!({})).with_header("location", "http://127.0.0.1:1/"),
            FailureClass::InvalidRequest,
            "answered 302 Found",
        ),
    ] {
        let upstream = Upstream::start(vec![response.into()]).await;
        let failure = call(&local(&upstream, &json!({}))).await.unwrap_err();
        assert!(
            failure.class == class && failure.message.contains(message) && failure.message.len() < 700,
            "{failure:?}"
        );
        assert!(failure.message.starts_with("127.0.0.1:"), "{failure:?}");
        assert_eq!(upstream.requests().len(), 1);
    }
}

#[tokio::test]
async fn nobody_there_is_told_with_the_address_and_the_cause() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let provider = chat_provider(&format!("http://{address}/v1"), &json!({}), &clock());
    let failure = call(&provider).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::Unavailable);
    assert!(failure.message.starts_with(&address.to_string()) && failure.message.contains("refused"), "{failure:?}");
}

#[tokio::test]
async fn the_key_is_sent_and_never_told() {
    let echo = json!({"error": {"message": "Incorrect API key provided: sk-secret"}});
    let upstream = Upstream::start(vec![Response::json(401, &echo).into()]).await;
    let mut config: ProviderConfig =
        serde_json::from_value(json!({"kind": "openai_chat", "base_url": upstream.base_url()})).unwrap();
    let WireConfig::OpenaiChat(chat) = &mut config.wire else { panic!("{config:?}") };
    chat.api_key = Some(SecretString::from("sk-secret"));
    let catalog = Catalog::new(&[("local".to_owned(), config)].into(), &clock()).unwrap();
    let failure = call(&catalog.get("local").unwrap().provider).await.unwrap_err();
    assert!(failure.message.ends_with("Incorrect API key provided: [key]"), "{failure:?}");
    let sent = upstream.requests()[0].headers.clone();
    assert_eq!(sent["authorization"], "Bearer sk-secret");
    assert_eq!(
        (sent["accept"].as_str(), sent["content-type"].as_str()),
        ("text/event-stream, application/json", "application/json")
    );
}
