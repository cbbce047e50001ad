//! Content in spans: only where it is wanted, and keys never.

use hames::telemetry::FLUSH;
use serde_json::{Value, json};

use super::{KEY, Watched, coder, conversation};
use crate::support::collector::{Collector, Manner};
use crate::support::upstream::Upstream;

#[tokio::test]
async fn content_is_exported_when_it_is_asked_for() {
    let collector = Collector::start(Manner::Takes).await;
    let watched = Watched::exporting(&collector.endpoint, true);
    let upstream = Upstream::start(conversation()).await;
    let setup = watched.watch(coder(&upstream)).toml("[telemetry]\ncapture_content = true\n");
    let app = setup.start().await;
    let run = app.client.post("/runs", &json!({"agent": "coder", "input": "canary-prompt"})).await.id();
    app.ended(run.parse().unwrap()).await;
    app.finish().await;
    watched.telemetry.shutdown(FLUSH).await;

    let read = |value: Value| serde_json::from_str::<Value>(value.as_str().unwrap()).unwrap();
    let prompt = json!({"role": "user", "parts": [{"type": "text", "content": "canary-prompt"}]});
    let instructions = json!([{"type": "text", "content": "canary-instructions"}]);
    let said = json!({"type": "text", "content": "canary-answer"});
    let called = json!({"type": "tool_call", "id": "call_1", "name": "read_file",
        "arguments": {"path": "canary-argument.txt"}});
    let answer = json!([{"role": "assistant", "parts": [said], "finish_reason": "stop"}]);

    let agent = collector.span("invoke_agent coder");
    assert_eq!(read(agent.get("gen_ai.input.messages")), json!([prompt]));
    assert_eq!(read(agent.get("gen_ai.system_instructions")), instructions);
    assert_eq!(read(agent.get("gen_ai.output.messages")), answer);

    let chats = collector.named("chat some-model");
    assert_eq!(read(chats[0].get("gen_ai.input.messages")), json!([prompt]));
    let calling = json!([{"role": "assistant", "parts": [called], "finish_reason": "tool_calls"}]);
    assert_eq!(read(chats[0].get("gen_ai.output.messages")), calling);
    assert_eq!(read(chats[0].get("gen_ai.tool.definitions"))[0]["name"], "read_file");
    let history = read(chats[1].get("gen_ai.input.messages"));
    assert_eq!((&history[0], &history[1]["parts"][0]), (&prompt, &called));
    assert_eq!(history[2]["role"], "tool");
    assert!(history[2]["parts"][0]["response"].as_str().unwrap().contains("canary-result"), "{history}");
    assert_eq!(read(chats[1].get("gen_ai.output.messages")), answer);
    assert_eq!(read(chats[1].get("gen_ai.system_instructions")), instructions);

    let tool = collector.span("execute_tool read_file");
    assert_eq!(read(tool.get("gen_ai.tool.call.arguments")), json!({"path": "canary-argument.txt"}));
    assert!(tool.get("gen_ai.tool.call.result").as_str().unwrap().contains("canary-result"));
    assert!(!collector.everything().contains(KEY), "a key was exported");
}
