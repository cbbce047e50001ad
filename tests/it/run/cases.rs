//! Every reported case as a whole run: loop, tools, retries and store over the bytes of the report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use hames::config::{AgentConfig, CeilingConfig, Durability, ProviderConfig, RetentionConfig, RunConfig, StoreConfig};
use hames::domain::{Effect, Message, Part, RunId, RunRequest, RunView, TenantId, ToolSpec};
use hames::event::{Bus, Streams};
use hames::provider::Catalog;
use hames::run::{Agents, Caller, Services, Supervisor};
use hames::store::{self, Store, WorkerId};
use hames::telemetry::Capture;
use hames::time::{Clock, SystemClock};
use hames::tool::registry::Registry;
use hames::tool::{Tool, ToolCtx, ToolError};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::provider::case::{self, Case, CaseTool, Expect};
use crate::provider::request_check;
use crate::support::app::{PATIENCE, own_metrics};
use crate::support::upstream::{Reply, Upstream};

/// A tool of a case; counts what it was really called with.
struct Fixed {
    spec: ToolSpec,
    returns: String,
    ran: Arc<Mutex<Vec<Value>>>,
}

#[async_trait]
impl Tool for Fixed {
    fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    fn effect(&self, _arguments: &Map<String, Value>) -> Effect {
        Effect::SideEffect
    }

    async fn call(&self, _ctx: &ToolCtx, arguments: &Map<String, Value>) -> Result<String, ToolError> {
        self.ran.lock().unwrap().push(json!({"name": self.spec.name, "arguments": arguments}));
        Ok(self.returns.clone())
    }
}

/// What a run over a case left behind.
struct Left {
    view: Value,
    transcript: Vec<Message>,
    ran: Vec<Value>,
    bodies: Vec<Value>,
    rejections: Vec<String>,
    took: Duration,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_as_a_whole_run() {
    let cases = case::all();
    assert_eq!(cases.len(), 36);
    let runs = join_all(cases.iter().map(play)).await;
    let wrong: Vec<String> = cases
        .iter()
        .zip(&runs)
        .flat_map(|(case, left)| {
            problems(case, left)
                .into_iter()
                .map(move |problem| format!("{} ({}; {}): {problem}\n{}", case.id, case.title, case.source, left.view))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

async fn play(case: &Case) -> Left {
    let directory = tempfile::tempdir().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let replies = case.upstream.iter().cloned().map(Reply::Response).collect();
    let upstream = Upstream::start_at(replies, Arc::clone(&clock)).await;
    let ran = Arc::new(Mutex::new(Vec::new()));
    let registry = Registry::new(case.run.tools.iter().map(|tool| fixed(tool, &ran)).collect()).unwrap();
    let provider: ProviderConfig = read(json!({"kind": "openai_chat", "base_url": upstream.base_url(),
        "reasoning_field": case.run.reasoning_field}));
    let catalog = Catalog::new(&BTreeMap::from([("p".to_owned(), provider)]), &clock).unwrap();
    let patterns = if case.run.tools.is_empty() { json!([]) } else { json!(["*"]) };
    let agent: AgentConfig = read(json!({"model": "p/m-test", "tools": patterns}));
    let agents = Agents::new("a", &BTreeMap::from([("a".to_owned(), agent)]), &BTreeMap::new(), &registry, &catalog);
    let url = format!("sqlite:{}", directory.path().join("hames.db").display());
    let store = store::open(
        &StoreConfig { url: url.into(), durability: Durability::Process, ..StoreConfig::default() },
        WorkerId::new("w".to_owned()),
        Arc::new(()),
    )
    .await
    .unwrap();
    let bus = Bus::new();
    let supervisor = Supervisor::start(Services {
        store: Arc::clone(&store),
        bus: bus.clone(),
        catalog: Arc::new(catalog),
        registry: Arc::new(registry),
        agents: Arc::new(agents.unwrap()),
        clock,
        ids: Arc::default(),
        jitter: Box::new(|| 0.5),
        run: RunConfig { scratch_dir: directory.path().join("scratch"), ..RunConfig::default() },
        retention: RetentionConfig::default(),
        ceilings: CeilingConfig::default(),
        metrics: own_metrics(),
        capture: Capture::Nothing,
    })
    .await
    .unwrap();

    let started = Instant::now();
    let request: RunRequest = read(json!({"input": case.run.input}));
    let run = supervisor.create(Caller::untraced(TenantId::local()), request, None).await.unwrap();
    let streams = Streams::new(Arc::clone(&store), bus, PATIENCE);
    let ended = streams.settled(&TenantId::local(), run.id, PATIENCE).await.unwrap().unwrap();
    assert!(ended.status.is_finished(), "the run does not end");
    let took = started.elapsed();
    supervisor.stop();
    supervisor.drained().await;
    let left = Left {
        view: view(store.as_ref(), run.id).await,
        transcript: store.transcript(&TenantId::local(), run.id).await.unwrap().unwrap(),
        ran: ran.lock().unwrap().clone(),
        bodies: upstream.requests().into_iter().map(|request| request.body).collect(),
        rejections: upstream.take_rejections(),
        took,
    };
    store.close().await;
    left
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn fixed(tool: &CaseTool, ran: &Arc<Mutex<Vec<Value>>>) -> Arc<dyn Tool> {
    Arc::new(Fixed {
        spec: ToolSpec {
            name: tool.name.parse().unwrap(),
            description: tool.description.clone(),
            parameters: tool.parameters.clone(),
        },
        returns: tool.returns.clone(),
        ran: Arc::clone(ran),
    })
}

async fn view(store: &dyn Store, id: RunId) -> Value {
    let run = store.run(&TenantId::local(), id).await.unwrap().unwrap();
    serde_json::to_value(RunView::from(&run)).unwrap()
}

/// What is not as the report says it must be.
fn problems(case: &Case, left: &Left) -> Vec<String> {
    let Expect { status, status_any, answer, answer_any, tool_calls, tool_calls_any, .. } = &case.expect;
    let mut wrong = Vec::new();
    let mut check = |holds: bool, problem: String| {
        if !holds {
            wrong.push(problem);
        }
    };
    let got = left.view["status"].as_str().unwrap().to_owned();
    check(*status == got || status_any.contains(&got), format!("status {got}, expected {status}"));
    if got == "completed"
        && let Some(expected) = answer
    {
        let got = left.view["answer"].as_str().unwrap_or_default().to_owned();
        check(*expected == got || answer_any.contains(&got), format!("answer {got:?}, expected {expected:?}"));
    }
    check(
        left.ran == *tool_calls || tool_calls_any.contains(&left.ran),
        format!("tools ran {:?}, expected {tool_calls:?}", left.ran),
    );
    for name in &case.expect.must_not_execute {
        check(left.ran.iter().all(|call| call["name"] != name.as_str()), format!("{name} ran"));
    }
    if let Some(usage) = &case.expect.usage {
        let got = (left.view["usage"]["input_tokens"].as_u64(), left.view["usage"]["output_tokens"].as_u64());
        check(got == (Some(usage.input_tokens), Some(usage.output_tokens)), format!("usage {got:?}, not {usage:?}"));
    }
    if let Some(partial) = &case.expect.partial_answer {
        check(left.view["partial"] == partial.as_str(), format!("partial {}", left.view["partial"]));
        let kept = left.transcript.last().map(|message| serde_json::to_value(message).unwrap()).unwrap();
        check(kept["incomplete"] == true, format!("the last message is {kept}"));
    }
    if let Some(finish) = case.expect.finish {
        check(left.view["finish_reason"] == json!(finish), format!("finish {}", left.view["finish_reason"]));
    }
    if let Some(part) = &case.expect.error_contains {
        let message = left.view["error"]["message"].as_str().unwrap_or_default();
        check(message.contains(part.as_str()), format!("the error is {message:?}, without {part:?}"));
    }
    if let Some(reasoning) = &case.expect.reasoning {
        let kept = reasoning_of(&left.transcript);
        check(kept == *reasoning, format!("reasoning {kept:?}, expected {reasoning:?}"));
    }
    let calls = left.bodies.len();
    match &case.expect.model_calls {
        Some(allowed) => check((allowed.min..=allowed.max).contains(&calls), format!("{calls} model calls")),
        None if got == "completed" => check(calls == case.upstream.len(), format!("{calls} model calls")),
        None => {}
    }
    if let Some(least) = case.expect.min_retry_delay_ms {
        check(left.took >= Duration::from_millis(least), format!("took only {:?}", left.took));
    }
    if let Some(most) = case.expect.max_wall_ms {
        check(left.took <= Duration::from_millis(most), format!("took {:?}", left.took));
    }
    wrong.extend(
        request_check::failed(&case.requests, &left.bodies).into_iter().map(|check| format!("not sent: {check}")),
    );
    wrong.extend(left.rejections.iter().map(|rejection| format!("ill-formed request: {rejection}")));
    wrong
}

fn reasoning_of(transcript: &[Message]) -> String {
    let parts = transcript.iter().flat_map(|message| match message {
        Message::Assistant(message) => message.content.as_slice(),
        Message::User(_) | Message::Tool(_) => &[],
    });
    parts
        .filter_map(|part| match part {
            Part::Reasoning { text, .. } => Some(text.as_str()),
            Part::Text { .. } => None,
        })
        .collect()
}
