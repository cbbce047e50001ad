//! What holds for every answer, and the routes that describe the server. The client checks each answer against the
//! contract besides.

use reqwest::Method;
use serde_json::{Value, json};

use super::served::Served;

#[tokio::test]
async fn the_server_describes_itself_as_the_file_does() {
    let app = Served::start().await;
    let file = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.yaml")).unwrap();
    let yaml = app.client.get("/openapi.yaml").await;
    assert_eq!((yaml.header("content-type"), yaml.text.as_str()), (Some("application/yaml"), file.as_str()));
    let json = app.client.get("/openapi.json").await.body;
    assert_eq!(json, serde_yaml_ng::from_str::<Value>(&file).unwrap());
    app.stop().await;
}

#[tokio::test]
async fn the_catalog_lists_what_is_on_offer() {
    let app = Served::start().await;
    for path in ["/agents", "/models", "/tools"] {
        assert!(app.client.get(path).await.body["data"].is_array(), "{path}");
    }
    assert!(!app.client.get("/agents").await.body["data"].as_array().unwrap().is_empty());
    app.stop().await;
}

#[tokio::test]
async fn health_is_told() {
    let app = Served::start().await;
    assert_eq!(app.client.get("/healthz").await.body["status"], "ok");
    assert_eq!(app.client.get("/readyz").await.body, json!({"status": "ready"}));
    app.stop().await;
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let app = Served::start().await;
    let events = format!("/runs/{}/events", app.waiting_run().await);
    for path in ["/healthz", "/runs", "/openapi.yaml", &events] {
        let answer = app.client.send(app.client.request(Method::HEAD, path)).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, ""), "{path}");
    }
    app.stop().await;
}

#[tokio::test]
async fn a_plain_request_id_comes_back_and_another_is_replaced() {
    let app = Served::start().await;
    let ask =
        |id: &'static str| app.client.send(app.client.request(Method::GET, "/healthz").header("x-request-id", id));
    assert_eq!(ask("abc-1").await.header("x-request-id"), Some("abc-1"));
    for bad in ["", "a b", "<script>"] {
        assert!(ask(bad).await.header("x-request-id").unwrap().starts_with("req_"), "{bad}");
    }
    let one = app.client.get("/nowhere").await;
    let two = app.client.get("/nowhere").await;
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
    app.stop().await;
}

#[tokio::test]
async fn a_web_page_of_another_site_gets_nothing_done() {
    let app = Served::start().await;
    let rebound = app.client.request(Method::GET, "/runs").header("host", "evil.example");
    app.client.send(rebound).await.problem(403, "host_not_allowed");
    for origin in ["http://evil.example", "null"] {
        let post = app.client.request(Method::POST, "/runs").header("origin", origin).json(&json!({"input": "a"}));
        app.client.send(post).await.problem(403, "origin_not_allowed");
    }
    let own = app.client.request(Method::POST, "/runs").header("origin", format!("http://{}", app.addr));
    assert_eq!(app.client.send(own.json(&json!({"input": "a"}))).await.status, 202);
    assert_eq!(app.client.count_runs().await, 1);
    let answer = app.client.get("/runs").await;
    assert!(!answer.headers.contains_key("access-control-allow-origin"));
    app.stop().await;
}
