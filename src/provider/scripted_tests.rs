//! Tests of the scripted provider.

use std::sync::Arc;

use serde_json::json;
use tokio::time::Instant;
use uuid::Uuid;

use super::*;
use crate::domain::{Arguments, Part, RunId, ToolCall};

#[derive(Default)]
struct Log(Vec<String>);

impl DeltaSink for Log {
    fn delta(&mut self, delta: Delta<'_>) {
        self.0.push(match delta {
            Delta::Text(text) => text.to_owned(),
            Delta::Reasoning(text) => format!("({text})"),
            Delta::ToolCall { name, arguments, .. } => format!("{name}<{arguments}"),
        });
    }
}

fn script(turns: Value) -> ScriptedProvider {
    ScriptedProvider::new(serde_json::from_value(json!({ "turns": turns })).unwrap()).unwrap()
}

async fn play(provider: &ScriptedProvider, step: u32, attempt: u32) -> (Result<ModelTurn, ModelFailure>, Vec<String>) {
    let request = ModelRequest {
        run: RunId::new(Uuid::nil()),
        step,
        attempt,
        model: "demo".into(),
        instructions: None,
        messages: vec![],
        tools: Arc::new([]),
        max_output_tokens: None,
        trace: None,
    };
    let mut log = Log::default();
    (provider.call(&request, &mut Conversation::default(), &mut log).await, log.0)
}

#[tokio::test(start_paused = true)]
async fn a_turn_streams_in_pieces_and_takes_its_time() {
    let provider = script(json!([{
        "reasoning": "hm", "text": ["ab", "çde"], "tool_calls": [{"name": "t", "arguments": {"x": 1}}, {"id": "own", "name": "u"}],
        "usage": {"input_tokens": 3, "output_tokens": 4}, "delay_ms": 1000, "chunk_delay_ms": 10, "chunk_chars": 2,
    }]));
    let start = Instant::now();
    let (turn, pieces) = play(&provider, 1, 1).await;
    assert_eq!(pieces, ["(hm)", "ab", "çd", "e", "t<", "t<{\"", "t<x\"", "t<:1", "t<}", "u<"]);
    assert_eq!(start.elapsed(), Duration::from_millis(1000 + 9 * 10));
    let call = |id: &str, name: &str, arguments: &str| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments: Arguments::parse(arguments),
    };
    assert_eq!(
        turn,
        Ok(ModelTurn {
            content: vec![Part::Reasoning { text: "hm".into(), token: None }, Part::Text { text: "abçde".into() }],
            tool_calls: vec![call("call_1_1", "t", "{\"x\":1}"), call("own", "u", "")],
            finish: FinishReason::ToolCalls,
            usage: Some(TokenUsage { input_tokens: 3, output_tokens: 4, ..TokenUsage::default() }),
        })
    );
}

#[tokio::test(start_paused = true)]
async fn the_first_attempts_fail_as_written() {
    let provider = script(json!([{ "text": "ok", "failures": [
        {"class": "rate_limited", "message": "slow down", "retry_after_ms": 700}, {"class": "truncated", "after_text": "half"},
    ]}]));
    let (first, pieces) = play(&provider, 1, 1).await;
    let failure = first.unwrap_err();
    assert_eq!(
        (failure.class, failure.message.as_str(), failure.retry_after),
        (FailureClass::RateLimited, "slow down", Some(Duration::from_millis(700)))
    );
    assert!(pieces.is_empty());
    let (second, pieces) = play(&provider, 1, 2).await;
    assert_eq!((second.unwrap_err().class, pieces), (FailureClass::Truncated, vec!["half".to_owned()]));
    let (third, pieces) = play(&provider, 1, 3).await;
    assert_eq!((third.unwrap().text(), pieces), ("ok".to_owned(), vec!["ok".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn what_no_provider_may_say_fails_like_one_that_does() {
    let provider = script(json!([
        {"text": "a", "usage": {"input_tokens": -5, "output_tokens": 1}}, {}, {"tool_calls": [{"name": "", "arguments": {}}]},
        {"tool_calls": [{"name": "t", "arguments": "{\"cut"}], "finish": "length"},
    ]));
    for (step, class, message) in [
        (1, FailureClass::Protocol, "usage field `input_tokens` is -5"),
        (2, FailureClass::Empty, "without text and without a tool call"),
        (3, FailureClass::Protocol, "tool call 1 has no name"),
        (5, FailureClass::Protocol, "the script ran out: step 5 was asked for, it has 4 turns"),
    ] {
        let failure = play(&provider, step, 1).await.0.unwrap_err();
        assert!(failure.class == class && failure.message.contains(message), "{failure:?}");
    }
    let turn = play(&provider, 4, 1).await.0.unwrap();
    assert_eq!(
        (turn.finish, &turn.tool_calls[0].arguments),
        (FinishReason::Length, &Arguments::Malformed("{\"cut".into()))
    );
}

#[test]
fn a_script_is_checked_when_it_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.json");
    let load = |text: &str| {
        fs::write(&path, text).unwrap();
        ScriptedProvider::load(&ScriptSource::File(path.clone())).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(load(r#"{"turns":[{"text":"hi"}]}"#), Ok(()));
    for (text, expected) in [
        (r#"{"turns":[{"txt":"hi"}]}"#, "turns[0].txt: unknown field `txt`"),
        (r#"{"turns":[{"usage":{"input_tokens":1,"tokens":2}}]}"#, "unknown field `tokens`"),
        (r#"{"turns":[{"failures":[{"class":"tired"}]}]}"#, "unknown variant `tired`"),
        (r#"{"turns":[{"text":"a","chunk_chars":0}]}"#, "turn 1 of the script: `chunk_chars` is 0"),
        ("", "is not valid"),
    ] {
        let error = load(text).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    assert!(ScriptedProvider::load(&ScriptSource::File(directory.path().join("none"))).is_err());
}
