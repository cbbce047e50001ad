//! The spans of runs, as a collector gets them, and the way of a trace through the service.

use hames::config::ProviderKind;
use hames::domain::{Effect, FailureClass, ModelFailure};
use hames::provider::Endpoint;
use hames::provider::retry::Policy;
use hames::telemetry::FLUSH;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use serde_json::{Value, json};

use super::{CANARIES, TRACEPARENT, Watched, coder, conversation};
use crate::support::app::Setup;
use crate::support::collector::{Collector, Manner, Seen};
use crate::support::stage::{call, stage_model, stage_tool};
use crate::support::upstream::Upstream;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// The attributes of a span, with those that differ from run to run checked and taken out.
fn steady(span: &Seen) -> Value {
    let mut attributes = span.attributes.clone();
    for key in ["hames.run.id", "server.port", "gen_ai.response.time_to_first_chunk"] {
        attributes.remove(key);
    }
    json!(attributes)
}

#[tokio::test]
async fn a_run_is_a_trace_below_its_callers_span() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let upstream = Upstream::start(conversation()).await;
    let app = watched.watch(coder(&upstream)).start().await;
    let request = app.client.request(reqwest::Method::POST, "/runs").header("traceparent", TRACEPARENT);
    let body = json!({"agent": "coder", "input": "canary-prompt"});
    let created = app.client.send(request.header("tracestate", "a=1").json(&body)).await;
    assert_eq!(created.status, 202);
    let id = created.id();
    app.ended(id.parse().unwrap()).await;
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;

    let names: Vec<_> = collector.spans().into_iter().map(|span| (span.name, span.kind)).collect();
    let mut sorted = names.clone();
    sorted.sort_by(|one, other| one.0.cmp(&other.0));
    let expected = [
        ("POST /runs", SpanKind::Server),
        ("chat some-model", SpanKind::Client),
        ("chat some-model", SpanKind::Client),
        ("execute_tool read_file", SpanKind::Internal),
        ("invoke_agent coder", SpanKind::Internal),
    ];
    assert_eq!(sorted, expected.map(|(name, kind)| (name.to_owned(), kind)));

    let agent = collector.span("invoke_agent coder");
    assert_eq!((agent.trace.as_str(), agent.parent.as_str()), (TRACE, CALLER));
    assert_eq!(agent.get("hames.run.id"), json!(id));
    assert!(!agent.is_error);
    let expected = json!({
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "coder", "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "some-model", "gen_ai.usage.input_tokens": 50, "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ["stop"], "hames.provider": "up", "hames.run.status": "completed",
    });
    assert_eq!(steady(&agent), expected);

    let chats = collector.named("chat some-model");
    for (step, (chat, reason, input, output)) in
        [(&chats[0], "tool_calls", 20, 7), (&chats[1], "stop", 30, 5)].into_iter().enumerate()
    {
        assert_eq!((&chat.trace, &chat.parent), (&agent.trace, &agent.id));
        assert!(
            chat.get("server.port").is_u64() && chat.get("gen_ai.response.time_to_first_chunk").is_f64(),
            "{chat:?}"
        );
        let expected = json!({
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "some-model",
            "gen_ai.request.max_tokens": 100, "gen_ai.request.stream": true, "server.address": "127.0.0.1",
            "gen_ai.response.finish_reasons": [reason], "gen_ai.usage.input_tokens": input,
            "gen_ai.usage.output_tokens": output, "hames.provider": "up", "hames.step": step + 1, "hames.attempt": 1,
        });
        assert_eq!(steady(chat), expected);
    }
    // The provider works for the span of its call.
    let told: Vec<_> = upstream.requests().iter().map(|request| request.headers["traceparent"].clone()).collect();
    assert_eq!(told, [chats[0].traceparent(), chats[1].traceparent()]);
    assert!(upstream.requests().iter().all(|request| request.headers["tracestate"] == "a=1"));

    let tool = collector.span("execute_tool read_file");
    assert_eq!((&tool.trace, &tool.parent), (&agent.trace, &agent.id));
    let expected = json!({
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "read_file", "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call_1", "hames.tool.outcome": "result",
    });
    assert_eq!(steady(&tool), expected);

    let request = collector.span("POST /runs");
    assert_eq!((request.trace.as_str(), request.parent.as_str()), (TRACE, CALLER));
    let expected = json!({
        "http.request.method": "POST", "http.route": "/runs", "url.path": "/runs", "url.scheme": "http",
        "http.response.status_code": 202,
    });
    assert_eq!(steady(&request), expected);

    for resource in collector.resources() {
        let version = env!("CARGO_PKG_VERSION");
        let expected = json!({"service.name": "watched", "service.version": version, "service.instance.id": "test"});
        assert_eq!(json!(resource), expected);
    }
    let everything = collector.everything();
    for canary in CANARIES {
        assert!(!everything.contains(canary), "{canary} was exported");
    }
}

#[tokio::test]
async fn without_a_caller_a_run_belongs_to_the_request_that_made_it() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, model) = Setup::stage();
    let app = watched.watch(setup).start().await;
    let run = app.client.post("/runs", &json!({"agent": "test", "input": "x"})).await.id();
    model.asked().await.answer("done").await;
    app.ended(run.parse().unwrap()).await;
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(app.client.get(path).await.status, 200);
    }
    assert_eq!(app.client.get("/nowhere/secret").await.status, 404);
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;
    let request = collector.span("POST /runs");
    let agent = collector.span("invoke_agent test");
    assert_eq!((request.parent.as_str(), &agent.parent, &agent.trace), ("", &request.id, &request.trace));
    // What asks all the time is worth no span; a path that is only text of a caller is not told.
    let others: Vec<_> = collector.spans().into_iter().filter(|span| span.kind == SpanKind::Server).collect();
    assert_eq!(others.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["POST /runs", "GET"]);
    assert!(!collector.everything().contains("secret"));
}

#[tokio::test]
async fn a_queued_run_keeps_its_place_in_the_trace_through_a_restart() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, model) = Setup::stage();
    let setup = watched.watch(setup.toml("[run]\nmax_concurrent = 1\n"));
    let app = setup.start().await;
    app.client.post("/runs", &json!({"agent": "test", "input": "first"})).await;
    let first = model.asked().await;
    let request = app.client.request(reqwest::Method::POST, "/runs").header("traceparent", TRACEPARENT);
    let second = app.client.send(request.json(&json!({"agent": "test", "input": "second"}))).await;
    assert_eq!(second.body["status"], "queued");
    let second = second.id();
    app.die().await;
    drop(first);

    let app = setup.start().await;
    // The first one goes on where it was.
    model.asked().await.answer("done").await;
    let asked = model.asked().await;
    assert_eq!(asked.request.run.to_string(), second);
    let told = asked.request.trace.clone().unwrap();
    asked.answer("done").await;
    app.ended(second.parse().unwrap()).await;
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;
    let agents = collector.named("invoke_agent test");
    let agent = agents.iter().find(|span| span.get("hames.run.id") == json!(second)).unwrap();
    assert_eq!((agent.trace.as_str(), agent.parent.as_str()), (TRACE, CALLER));
    let chat = collector.named("chat m").into_iter().find(|chat| chat.parent == agent.id).unwrap();
    assert_eq!(told.to_string(), chat.traceparent());
    // The first one was cut off by the restart; whoever ended it says how.
    let lost: Vec<_> = agents.iter().filter(|span| span.id != agent.id).map(|span| span.get("error.type")).collect();
    assert_eq!(lost, [json!("_OTHER"), json!(null)]);
}

#[tokio::test]
async fn a_caller_is_passed_on_when_nothing_is_exported() {
    let upstream = Upstream::start(conversation()).await;
    let app = coder(&upstream).start().await;
    let post = |headers: &[(&'static str, &str)]| {
        let request = app.client.request(reqwest::Method::POST, "/runs").json(&json!({"agent": "coder", "input": "x"}));
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))
    };
    for headers in [&[("traceparent", TRACEPARENT), ("tracestate", "a=1")][..], &[("traceparent", "00-broken")], &[]] {
        let run = app.client.send(post(headers)).await.id();
        app.ended(run.parse().unwrap()).await;
    }
    app.finish().await;
    let requests = upstream.requests();
    let passed: Vec<_> = requests
        .iter()
        .map(|request| (request.headers.get("traceparent").cloned(), request.headers.get("tracestate").cloned()))
        .collect();
    let caller = (Some(TRACEPARENT.to_owned()), Some("a=1".to_owned()));
    assert_eq!(passed[..2], [caller.clone(), caller]);
    assert!(passed.len() > 2 && passed[2..].iter().all(|passed| *passed == (None, None)), "{passed:?}");
}

#[tokio::test]
async fn a_caller_that_does_not_record_is_followed_and_passed_on() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, model) = Setup::stage();
    let app = watched.watch(setup).start().await;
    let caller = TRACEPARENT.replace("-01", "-00");
    let request = app.client.request(reqwest::Method::POST, "/runs").header("traceparent", caller);
    let run = app.client.send(request.json(&json!({"agent": "test", "input": "x"}))).await.id();
    let asked = model.asked().await;
    let told = asked.request.trace.clone().unwrap().to_string();
    assert!(told.starts_with(&format!("00-{TRACE}-")) && told.ends_with("-00"), "{told}");
    asked.answer("done").await;
    app.ended(run.parse().unwrap()).await;
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;
    assert_eq!(collector.spans().len(), 0);
}

#[tokio::test]
async fn what_failed_says_how_and_not_in_whose_words() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (mut setup, _) = Setup::stage();
    let (model, prompter) = stage_model();
    let brief = std::time::Duration::from_millis(1);
    let retry = Policy { max_retries: 1, base: brief, cap: brief };
    setup.providers = vec![("stage".to_owned(), Endpoint { retry, ..Endpoint::new(model, ProviderKind::Scripted) })];
    let (tool, mut calls) = stage_tool("wait", Effect::ReadOnly, true);
    let app = watched.watch(setup.tool(tool)).start().await;
    let run = app.create(json!({})).await;
    prompter.asked().await.end(Err(ModelFailure::new(FailureClass::Unavailable, "canary-answer"))).await;
    prompter.asked().await.call(vec![call("c1", "wait", json!({})), call("c2", "no_such_tool", json!({}))]).await;
    calls.recv().await.unwrap().fails(hames::tool::ToolError::Respond("canary-result".to_owned()));
    prompter.asked().await.end(Err(ModelFailure::new(FailureClass::Refused, "canary-answer"))).await;
    app.ended(run.id).await;
    let second = app.create(json!({})).await;
    let asked = prompter.asked().await;
    app.supervisor.cancel(&app.tenant(), second.id).await.unwrap();
    app.ended(second.id).await;
    drop(asked);
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;

    let errors = |name: &str| {
        let all = collector.named(name);
        assert!(all.iter().all(|span| span.is_error != span.get("error.type").is_null()), "{all:#?}");
        all.iter().map(|span| span.get("error.type")).collect::<Vec<_>>()
    };
    let chats = [json!("provider_unavailable"), Value::Null, json!("refused"), json!("interrupted")];
    assert_eq!(errors("chat m"), chats);
    // A call of a tool that does not exist was not executed.
    assert_eq!(errors("execute_tool wait"), [json!("error")]);
    assert_eq!(errors("invoke_agent test"), [json!("refused"), Value::Null]);
    let statuses: Vec<_> =
        collector.named("invoke_agent test").iter().map(|span| span.get("hames.run.status")).collect();
    assert_eq!(statuses, [json!("model_error"), json!("aborted")]);
    let everything = collector.everything();
    for text in ["canary-answer", "canary-result", "no_such_tool"] {
        assert!(!everything.contains(text), "{text} was exported");
    }
}

#[tokio::test]
async fn a_run_that_was_not_stored_has_no_span() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, _model) = Setup::stage();
    let app = watched.watch(setup).start().await;
    app.store.close().await;
    assert_eq!(app.client.post("/runs", &json!({"agent": "test", "input": "x"})).await.status, 503);
    app.die().await;
    watched.telemetry.shutdown(FLUSH).await;
    assert_eq!(collector.span("POST /runs").get("error.type"), json!("503"));
    assert_eq!(collector.named("invoke_agent test").len(), 0);
}

#[tokio::test]
async fn a_run_that_met_a_limit_is_no_error() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, false);
    let (setup, model) = Setup::stage();
    let app = watched.watch(setup).start().await;
    for limits in [json!({"timeout_ms": 1}), json!({"max_steps": 1})] {
        let run = app.create(json!({"limits": limits})).await;
        if limits["max_steps"] == 1 {
            model.asked().await.call(vec![call("c1", "list_dir", json!({"path": "."}))]).await;
        }
        app.ended(run.id).await;
        model.forget().await;
    }
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;
    let runs = collector.named("invoke_agent test");
    let ends: Vec<_> = runs.iter().map(|span| (span.get("hames.run.status"), span.is_error)).collect();
    assert_eq!(ends, [(json!("timeout"), false), (json!("step_limit"), false)]);
}
