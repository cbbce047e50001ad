//! An API client that holds every answer against `openapi.yaml`: its path, method, status and content type have to be
//! declared there, and its JSON has to fit the schema.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use jsonschema::Validator;
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::sse::SseClient;

/// Talks to one server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ApiClient {
    base: String,
    http: reqwest::Client,
    contract: Arc<Contract>,
}

/// An answer that fits the contract.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    /// The JSON body; null when there is none or when it is something else.
    pub(crate) body: Value,
    /// The body as it came.
    pub(crate) text: String,
}

impl Answer {
    /// A header as text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The run's id.
    pub(crate) fn id(&self) -> String {
        self.body["id"].as_str().unwrap_or_else(|| panic!("no run: {}", self.text)).to_owned()
    }

    /// Checks that this is a problem, and gives its words.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16, code: &str) -> &str {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{}", self.text);
        self.body["detail"].as_str().unwrap()
    }
}

impl ApiClient {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        // reqwest asks for a crypto provider even where no TLS is spoken. A second installation is refused, which is fine.
        rustls::crypto::ring::default_provider().install_default().ok();
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { base: format!("http://{addr}"), http, contract: Arc::new(Contract::load()) }
    }

    /// A request of any kind, to be given to [`ApiClient::send`].
    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base))
    }

    /// Sends a request, reads the whole answer and checks it.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Answer {
        let request = request.build().unwrap();
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let response = self.http.execute(request).await.unwrap_or_else(|error| panic!("{method} {path}: {error:?}"));
        self.answer(&method, &path, response).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    /// Posts bytes as they are, as JSON.
    pub(crate) async fn post_raw(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        self.send(self.request(Method::POST, path).header(CONTENT_TYPE, "application/json").body(body)).await
    }

    /// How many runs there are, at most 200.
    pub(crate) async fn count_runs(&self) -> usize {
        self.get("/runs?limit=200").await.body["data"].as_array().unwrap().len()
    }

    /// Opens an event stream; an answer that is none comes back as it is.
    pub(crate) async fn stream(&self, path: &str, last_event_id: Option<&str>) -> Result<SseClient, Box<Answer>> {
        let mut request = self.request(Method::GET, path);
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        self.follow(request).await
    }

    /// Opens the event stream of a request made by hand.
    pub(crate) async fn follow(&self, request: RequestBuilder) -> Result<SseClient, Box<Answer>> {
        let request = request.header(ACCEPT, "text/event-stream");
        let sent = request.try_clone().and_then(|request| request.build().ok()).unwrap();
        let query = sent.url().query().map(|query| format!("?{query}")).unwrap_or_default();
        let path = format!("{}{query}", sent.url().path());
        let last_id = sent.headers().get("last-event-id").map_or("", |id| id.to_str().unwrap()).to_owned();
        let response = self.open(request).await?;
        Ok(SseClient::new(self.clone(), &path, &last_id, response))
    }

    /// Posts a run and follows it on the same connection.
    pub(crate) async fn create_and_stream(&self, body: &Value) -> Result<SseClient, Box<Answer>> {
        let request = self.request(Method::POST, "/runs").header(ACCEPT, "text/event-stream").json(body);
        let response = self.open(request).await?;
        let location = response.headers()["location"].to_str().unwrap().to_owned();
        Ok(SseClient::new(self.clone(), &format!("{location}/events"), "", response))
    }

    async fn open(&self, request: RequestBuilder) -> Result<Response, Box<Answer>> {
        let request = request.build().unwrap();
        let (method, path) = (request.method().clone(), request.url().path().to_owned());
        let response = self.http.execute(request).await.unwrap();
        if content_type(response.headers()) != Some("text/event-stream") {
            return Err(Box::new(self.answer(&method, &path, response).await));
        }
        self.contract.check(&method, &path, response.status().as_u16(), response.headers(), b"");
        assert_eq!(response.headers()["cache-control"], "no-cache");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        assert!(!response.headers().contains_key("content-encoding"));
        Ok(response)
    }

    async fn answer(&self, method: &Method, path: &str, response: Response) -> Answer {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.bytes().await.unwrap();
        self.contract.check(method, path, status, &headers, &bytes);
        let is_json = content_type(&headers).is_some_and(|kind| kind.ends_with("json"));
        Answer {
            status,
            body: if is_json && !bytes.is_empty() { serde_json::from_slice(&bytes).unwrap() } else { Value::Null },
            text: String::from_utf8(bytes.to_vec()).unwrap(),
            headers,
        }
    }

    /// The contract this client checks.
    pub(crate) fn contract(&self) -> &Contract {
        &self.contract
    }
}

fn content_type(headers: &HeaderMap) -> Option<&str> {
    headers.get(CONTENT_TYPE)?.to_str().ok()?.split(';').next().map(str::trim)
}

/// `openapi.yaml`, ready to check answers.
pub(crate) struct Contract {
    document: Value,
    validators: Mutex<HashMap<String, Arc<Validator>>>,
}

impl Contract {
    fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.yaml");
        let document = serde_yaml_ng::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        Self { document, validators: Mutex::default() }
    }

    /// Panics with all that is wrong when an answer is not what the contract says.
    #[track_caller]
    pub(crate) fn check(&self, method: &Method, path: &str, status: u16, headers: &HeaderMap, body: &[u8]) {
        let at = format!("{method} {path} {status}");
        assert!(headers.contains_key("x-request-id"), "{at}: no request id");
        assert_eq!(headers.get("x-content-type-options").map(|value| value.as_bytes()), Some(&b"nosniff"[..]), "{at}");
        let Some(operation) = self.operation(method, path) else {
            return self.check_undeclared(&at, status, headers, body);
        };
        let response = operation["responses"]
            .get(status.to_string())
            .map(|response| self.resolve(response))
            .unwrap_or_else(|| panic!("{at}: the status is not declared; {}", String::from_utf8_lossy(body)));
        let Some(declared) = response.get("content") else {
            assert!(body.is_empty(), "{at}: a body where none is declared");
            return;
        };
        let kind = content_type(headers).unwrap_or_else(|| panic!("{at}: no content type"));
        let content = declared.get(kind).unwrap_or_else(|| panic!("{at}: content type {kind} is not declared"));
        if status == 503 {
            assert!(headers.contains_key("retry-after"), "{at}: no Retry-After");
        }
        if kind.ends_with("json") && *method != Method::HEAD {
            self.check_json(&at, &content["schema"], &serde_json::from_slice(body).unwrap());
        }
    }

    /// What no operation is declared for is refused with a problem that says so.
    #[track_caller]
    fn check_undeclared(&self, at: &str, status: u16, headers: &HeaderMap, body: &[u8]) {
        assert_eq!(content_type(headers), Some("application/problem+json"), "{at}: not declared");
        let problem: Value = serde_json::from_slice(body).unwrap();
        self.check_schema(at, "Problem", &problem);
        match problem["code"].as_str().unwrap() {
            "route_not_found" => assert_eq!(status, 404, "{at}"),
            "method_not_allowed" => {
                assert_eq!(status, 405, "{at}");
                assert!(headers.contains_key("allow"), "{at}: no Allow");
            }
            "host_not_allowed" | "origin_not_allowed" => assert_eq!(status, 403, "{at}"),
            "headers_too_large" => assert_eq!(status, 431, "{at}"),
            other => panic!("{at}: {other} on a route that is not declared"),
        }
    }

    /// Checks a value against a schema of the components.
    #[track_caller]
    pub(crate) fn check_schema(&self, at: &str, name: &str, value: &Value) {
        self.check_json(at, &json!({"$ref": format!("#/components/schemas/{name}")}), value);
    }

    #[track_caller]
    fn check_json(&self, at: &str, schema: &Value, value: &Value) {
        let validator = self.validator(schema);
        let errors: Vec<String> =
            validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(errors.is_empty(), "{at}: {value} breaks the contract: {errors:#?}");
    }

    fn validator(&self, schema: &Value) -> Arc<Validator> {
        let mut validators = self.validators.lock().unwrap();
        let validator = validators.entry(schema.to_string()).or_insert_with(|| {
            let whole = json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "allOf": [schema],
                "components": self.document["components"],
            });
            Arc::new(jsonschema::options().should_validate_formats(true).build(&whole).unwrap())
        });
        Arc::clone(validator)
    }

    fn operation(&self, method: &Method, path: &str) -> Option<&Value> {
        let method = if *method == Method::HEAD { "get".to_owned() } else { method.as_str().to_ascii_lowercase() };
        let paths = self.document["paths"].as_object().unwrap();
        let (_, item) = paths.iter().find(|(template, _)| fits(template, path))?;
        item.get(method)
    }

    fn resolve<'a>(&'a self, value: &'a Value) -> &'a Value {
        match value["$ref"].as_str() {
            Some(reference) => self.document.pointer(reference.strip_prefix('#').unwrap()).unwrap(),
            None => value,
        }
    }
}

fn fits(template: &str, path: &str) -> bool {
    let (template, path): (Vec<&str>, Vec<&str>) = (template.split('/').collect(), path.split('/').collect());
    let is_open = |part: &str| part.starts_with('{');
    template.len() == path.len()
        && template.iter().zip(&path).all(|(left, right)| (is_open(left) && !right.is_empty()) || left == right)
}
