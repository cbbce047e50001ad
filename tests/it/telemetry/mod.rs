//! What the service tells of itself, seen by a collector, a scraper and a reader of the log.

mod content;
mod log;
mod metrics;
mod traces;
mod trouble;

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use hames::config::{LogConfig, LogFormat, TelemetryConfig};
use hames::telemetry::Telemetry;
use serde_json::{Value, json};
use tracing::subscriber::DefaultGuard;

use crate::support::app::Setup;
use crate::support::upstream::{Reply, Response, Upstream};

/// A caller's place in its trace.
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// What must not be seen where content is not wanted.
const CANARIES: [&str; 6] =
    ["canary-prompt", "canary-instructions", "canary-answer", "canary-argument", "canary-result", KEY];

/// What must not be seen anywhere.
const KEY: &str = "canary-key";

/// A log that a test reads.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The records of our own code.
    fn records(&self) -> Vec<Value> {
        let all = self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>();
        all.into_iter().filter(|record| record["target"].as_str().unwrap().starts_with("hames")).collect()
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Telemetry of this test: all tasks of a test run on its thread, for which alone this is the subscriber.
struct Watched {
    telemetry: Telemetry,
    log: Kept,
    _guard: DefaultGuard,
}

impl Watched {
    fn new(config: &TelemetryConfig, level: &str) -> Self {
        let telemetry = Telemetry::new(config, "test").unwrap();
        let log = Kept::default();
        let writer = log.clone();
        let config = LogConfig { level: level.to_owned(), format: LogFormat::Json };
        let subscriber = telemetry.subscriber(&config, move || writer.clone()).unwrap();
        Self { telemetry, log, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Telemetry that exports to this address.
    fn exporting(endpoint: &str, capture_content: bool) -> Self {
        let config = TelemetryConfig {
            otlp_endpoint: Some(endpoint.parse().unwrap()),
            capture_content,
            service_name: "watched".to_owned(),
            ..TelemetryConfig::default()
        };
        Self::new(&config, "info")
    }

    /// A service that is told of by it.
    fn watch(&self, mut setup: Setup) -> Setup {
        setup.metrics = Some(self.telemetry.metrics().clone());
        setup
    }
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A response that calls `read_file`, and one that answers.
fn conversation() -> Vec<Reply> {
    let usage = |input: u64, output: u64| {
        event(&json!({"choices": [], "usage": {"prompt_tokens": input, "completion_tokens": output}}))
    };
    let choice = |delta: Value, reason: Value| {
        event(&json!({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}))
    };
    let arguments = json!({"path": "canary-argument.txt"}).to_string();
    let call = json!({"tool_calls": [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    ]});
    let done = "data: [DONE]\n\n".to_owned();
    [
        vec![choice(call, Value::Null), choice(json!({}), json!("tool_calls")), usage(20, 7), done.clone()],
        vec![
            choice(json!({"content": "canary-answer"}), Value::Null),
            choice(json!({}), json!("stop")),
            usage(30, 5),
            done,
        ],
    ]
    .map(|chunks| Reply::Response(Response::events(chunks)))
    .to_vec()
}

/// An agent `coder` with a file to read and a model that is asked at this server.
fn coder(upstream: &Upstream) -> Setup {
    let mut setup = Setup::empty();
    let workspace = setup.path("files");
    std::fs::create_dir(&workspace).unwrap();
    std::fs::write(workspace.join("canary-argument.txt"), "canary-result").unwrap();
    setup.env = hames::config::Env::from_iter([("PATH", "/usr/bin:/bin"), ("MODEL_KEY", KEY)]);
    setup.toml(&format!(
        "[providers.up]\nkind = \"openai_chat\"\nbase_url = {:?}\napi_key_env = \"MODEL_KEY\"\nmax_output_tokens = 100\n\
         [workspaces.files]\npath = {workspace:?}\n\
         [agents.coder]\nmodel = \"up/some-model\"\ntools = [\"read_file\"]\nworkspace = \"files\"\n\
         instructions = \"canary-instructions\"\n",
        upstream.base_url()
    ))
}
