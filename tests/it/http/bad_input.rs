//! Bad input is answered with a clear problem, and nothing is created.

use reqwest::Method;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde_json::{Value, json};

use super::served::Served;

#[tokio::test]
async fn a_bad_body_is_refused_with_its_place_and_creates_nothing() {
    let app = Served::start().await;
    let deep = format!(r#"{{"input": "a", "metadata": {}}}"#, "[".repeat(100_000));
    let cases: Vec<(&str, Vec<u8>, &str, &str)> = vec![
        ("empty", b"".to_vec(), "invalid_json", "The body is empty"),
        ("white space", b" \r\n".to_vec(), "invalid_json", "The body is empty"),
        ("cut off", br#"{"input": "a""#.to_vec(), "invalid_json", "line 1 column 13"),
        ("malformed", b"{\n\"input\" \"a\"}".to_vec(), "invalid_json", "expected `:` at line 2 column 9"),
        ("two values", br#"{"input": "a"}{"input": "b"}"#.to_vec(), "invalid_json", "line 1 column 15"),
        ("not UTF-8", b"{\"input\": \"\xff\xfe\"}".to_vec(), "invalid_json", "byte 11"),
        ("UTF-16", "{\"input\": \"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect(), "invalid_json", ""),
        ("NUL", br#"{"input": "a\u0000b"}"#.to_vec(), "invalid_json", "$.input: the text contains U+0000"),
        ("raw NUL", b"{\"input\": \"a\0b\"}".to_vec(), "invalid_json", "control character"),
        ("lone surrogate", br#"{"input": "\ud800"}"#.to_vec(), "invalid_json", "surrogate"),
        ("lone low surrogate", br#"{"input": "\udc00 "}"#.to_vec(), "invalid_json", "surrogate"),
        ("deep", deep.into_bytes(), "invalid_json", "nested deeper than 127 levels"),
        ("duplicate key", br#"{"input": "a", "input": "a"}"#.to_vec(), "invalid_json", "the key `input` occurs twice"),
        ("number", b"7".to_vec(), "invalid_request", "$: invalid type: integer `7`"),
        ("list", b"[]".to_vec(), "invalid_request", "$: invalid type: sequence"),
        ("no input", b"{}".to_vec(), "invalid_request", "missing field `input`"),
        ("null input", br#"{"input": null}"#.to_vec(), "invalid_request", "$.input: invalid type: null"),
        ("empty input", br#"{"input": ""}"#.to_vec(), "invalid_request", "$.input"),
        ("unknown field", br#"{"input": "a", "agnet": "b"}"#.to_vec(), "invalid_request", "did you mean `agent`?"),
        ("later field", br#"{"input": "a", "webhook": {}}"#.to_vec(), "invalid_request", "$.webhook: unknown field"),
        ("empty thread", br#"{"input": "a", "thread": ""}"#.to_vec(), "invalid_request", "$.thread"),
        (
            "two pasts",
            br#"{"input": "a", "thread": "t", "previous_run": "run_019000000000700080000000000000ab"}"#.to_vec(),
            "invalid_request",
            "$.previous_run",
        ),
        (
            "no such past",
            br#"{"input": "a", "previous_run": "run_019000000000700080000000000000ab"}"#.to_vec(),
            "invalid_request",
            "$.previous_run: there is no run",
        ),
        (
            "client tool without a name",
            br#"{"input": "a", "tools": [{"type": "client"}]}"#.to_vec(),
            "invalid_request",
            "$.tools[0]: missing field `name`",
        ),
        (
            "client tool with a wrong schema",
            br#"{"input": "a", "tools": [{"type": "client", "name": "t", "parameters": {"type": 7}}]}"#.to_vec(),
            "invalid_request",
            "$.tools[0].parameters",
        ),
        ("approval of nothing", br#"{"input": "a", "approval": ["x"]}"#.to_vec(), "invalid_request", "$.approval[0]"),
        ("unknown agent", br#"{"input": "a", "agent": "nobody"}"#.to_vec(), "invalid_request", "$.agent"),
        ("unknown model", br#"{"input": "a", "model": "stage/x"}"#.to_vec(), "invalid_request", "$.model"),
        ("unknown tool", br#"{"input": "a", "tools": ["read_fiel"]}"#.to_vec(), "invalid_request", "$.tools[0]"),
        ("unknown workspace", br#"{"input": "a", "workspace": "x"}"#.to_vec(), "invalid_request", "$.workspace"),
        ("no messages", br#"{"input": []}"#.to_vec(), "invalid_request", "$.input"),
        (
            "wrong type",
            br#"{"input": "a", "limits": {"max_steps": "9"}}"#.to_vec(),
            "invalid_request",
            "$.limits.max_steps: invalid type: string",
        ),
        (
            "over the ceiling",
            br#"{"input": "a", "limits": {"max_steps": 100000}}"#.to_vec(),
            "invalid_request",
            "$.limits.max_steps",
        ),
    ];
    for (name, body, code, detail) in cases {
        let answer = app.client.post_raw("/runs", body).await;
        let words = answer.problem(400, code);
        assert!(words.contains(detail), "{name}: {words}");
    }
    assert_eq!(app.client.count_runs().await, 0);
    app.stop().await;
}

// klarkxy/open-console-gateway#3: the limit is our own, not a framework's, and says what it is.
#[tokio::test]
async fn a_body_may_be_as_large_as_configured_and_no_larger() {
    let app = Served::start().await;
    let of_size = |bytes: usize| {
        let frame = r#"{"input":""}"#.len();
        format!(r#"{{"input":"{}"}}"#, "a".repeat(bytes - frame))
    };
    for bytes in [1_900_000, 2_200_000, 4 * 1024 * 1024] {
        let answer = app.client.post_raw("/runs", of_size(bytes)).await;
        assert_eq!(answer.status, 202, "{bytes}: {}", answer.text);
    }
    assert_eq!(app.client.count_runs().await, 3);
    for bytes in [4 * 1024 * 1024 + 1, 10_000_000, 50_000_000] {
        let answer = app.client.post_raw("/runs", of_size(bytes)).await;
        let words = answer.problem(413, "body_too_large");
        assert!(words.contains("4194304 bytes") && words.contains("server.max_body_bytes"), "{words}");
    }
    // Without a length the body is cut off while it comes.
    let pieces = futures_util::stream::iter((0..1000).map(|_| Ok::<_, std::io::Error>(vec![b' '; 10_000])));
    let answer = app.client.post_raw("/runs", reqwest::Body::wrap_stream(pieces)).await;
    answer.problem(413, "body_too_large");
    assert_eq!(app.client.count_runs().await, 3);
    app.stop().await;
}

#[tokio::test]
async fn only_plain_json_is_taken() {
    let app = Served::start().await;
    let post = || app.client.request(Method::POST, "/runs").body(r#"{"input": "a"}"#);
    let without = app.client.send(post()).await;
    assert!(without.problem(415, "unsupported_media_type").contains("no content type"));
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let answer = app.client.send(post().header(CONTENT_TYPE, kind)).await;
        assert!(answer.problem(415, "unsupported_media_type").contains(kind));
    }
    for encoding in ["gzip", "br", "identity"] {
        let request = post().header(CONTENT_TYPE, "application/json").header(CONTENT_ENCODING, encoding);
        let answer = app.client.send(request).await;
        assert!(answer.problem(415, "unsupported_media_type").contains(encoding));
        assert_eq!(answer.header("accept-encoding"), Some("identity"));
    }
    assert_eq!(app.client.count_runs().await, 0);
    app.stop().await;
}

#[tokio::test]
async fn an_idempotency_key_that_is_none_creates_nothing() {
    let app = Served::start().await;
    let long = "k".repeat(256);
    for keys in [vec![""], vec!["\u{e9}"], vec![long.as_str()], vec!["a", "b"]] {
        let mut request = app.client.request(Method::POST, "/runs");
        for key in keys {
            request = request.header("idempotency-key", key.as_bytes());
        }
        app.client.send(request.json(&json!({"input": "a"}))).await.problem(400, "invalid_header");
    }
    assert_eq!(app.client.count_runs().await, 0);
    app.stop().await;
}

#[tokio::test]
async fn two_places_to_go_on_from_are_refused() {
    let app = Served::start().await;
    let path = format!("/runs/{}/events", app.waiting_run().await);
    for accept in ["text/event-stream", "application/json"] {
        let request = app.client.request(Method::GET, &path).header("accept", accept);
        let request = request.header("last-event-id", "1").header("last-event-id", "2");
        app.client.send(request).await.problem(400, "invalid_header");
    }
    app.stop().await;
}

#[tokio::test]
async fn what_does_not_exist_is_named() {
    let app = Served::start().await;
    for path in ["/", "/run", "/runs/", "/RUNS", "/runs/x/y", "/runs/x/events/1", "//runs", "/metrics/", "/docs"] {
        app.client.get(path).await.problem(404, "route_not_found");
    }
    for (method, path, allowed) in [
        (Method::PUT, "/runs", "GET,HEAD,POST"),
        (Method::DELETE, "/runs", "GET,HEAD,POST"),
        (Method::PUT, "/runs/x", "DELETE,GET,HEAD,PATCH"),
        (Method::POST, "/runs/x/events", "GET,HEAD"),
        (Method::OPTIONS, "/runs", "GET,HEAD,POST"),
        (Method::POST, "/healthz", "GET,HEAD"),
        (Method::from_bytes(b"BREW").unwrap(), "/runs", "GET,HEAD,POST"),
    ] {
        let answer = app.client.send(app.client.request(method.clone(), path)).await;
        answer.problem(405, "method_not_allowed");
        let mut allow: Vec<&str> = answer.header("allow").unwrap().split(',').map(str::trim).collect();
        allow.sort_unstable();
        assert_eq!(allow.join(","), allowed, "{method} {path}");
    }
    for path in
        ["/runs?stauts=queued", "/agents?x=1", "/healthz?x", "/runs?limit=201", "/runs?cursor=x", "/runs?status=done"]
    {
        app.client.get(path).await.problem(400, "invalid_query");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_run_that_is_not_there_looks_the_same_whatever_its_id() {
    let app = Served::start().await;
    let mut seen: Vec<(u16, Value)> = Vec::new();
    let ids =
        ["run_019000000000700080000000000000ab", "x", "run_", "run_%00", "%ff", "run_019000000000700080000000000000AB"];
    for id in ids {
        for (method, path) in [
            (Method::GET, format!("/runs/{id}")),
            (Method::GET, format!("/runs/{id}?wait=60")),
            (Method::DELETE, format!("/runs/{id}")),
            (Method::GET, format!("/runs/{id}/events")),
            (Method::GET, format!("/runs/{id}/messages")),
        ] {
            let answer = app.client.send(app.client.request(method, &path)).await;
            seen.push((answer.status, answer.body));
        }
        let stream = app.client.stream(&format!("/runs/{id}/events"), Some("3")).await.err().unwrap();
        seen.push((stream.status, stream.body));
    }
    assert_eq!(seen[0].1["code"], "run_not_found");
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:#?}");
    app.stop().await;
}
