//! Tests of the decoder: one event at a time.

use serde_json::json;

use super::*;
use crate::domain::FailureClass;

fn event(data: &Value) -> Event {
    Event { data: data.to_string(), ..Event::default() }
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn decode(chunks: &[Value]) -> Result<(Vec<Fragment>, ChatDecoder), StreamError> {
    let (mut decoder, mut out) = (ChatDecoder::default(), Vec::new());
    for chunk in chunks {
        assert_eq!(decoder.event(&event(chunk), &mut out)?, Decoded::More);
    }
    Ok((out, decoder))
}

fn fragments(chunks: &[Value]) -> Vec<Fragment> {
    decode(chunks).unwrap().0
}

fn text(text: &str) -> Fragment {
    Fragment::Text(text.into())
}

fn reasoning(text: &str) -> Fragment {
    Fragment::Reasoning(text.into())
}

#[test]
fn chunks_become_fragments() {
    for (chunk, expected) in [
        (delta(json!({"role": "assistant", "content": null})), vec![]),
        (delta(json!({"content": "a"})), vec![text("a")]),
        (json!({"choices": [{"message": {"content": "a"}}]}), vec![text("a")]),
        (
            json!({"choices": [{"index": 1, "delta": {"content": "other"}}, {"index": 0, "delta": {"content": "a"}}]}),
            vec![text("a")],
        ),
        (
            json!({"choices": [{"delta": {"content": " 42."}, "finish_reason": "length"}]}),
            vec![text(" 42."), Fragment::Finish(FinishReason::Length)],
        ),
        (json!({"choices": [{"delta": {}, "finish_reason": ""}]}), vec![]),
        (json!({"choices": [{"delta": {}, "finish_reason": "end_turn"}]}), vec![Fragment::Finish(FinishReason::Stop)]),
        (
            json!({"choices": [{"delta": {}, "finish_reason": "new_word"}]}),
            vec![Fragment::Finish(FinishReason::Unspecified)],
        ),
        (json!({"choices": null, "object": "ping"}), vec![]),
        (json!({}), vec![]),
        (delta(json!({"reasoning": {}})), vec![]),
        (json!({"choices": [], "error": null, "usage": null}), vec![]),
    ] {
        assert_eq!(fragments(std::slice::from_ref(&chunk)), expected, "{chunk}");
    }
}

#[test]
fn the_envelope_may_hold_anything_and_the_last_of_a_name_counts() {
    let call = CallFragment { id: Some("a".into()), ..CallFragment::default() };
    for (data, expected) in [
        (r#"{"choices":[{"delta":{"content":"a"},"delta":{"content":"b"}}]}"#, vec![text("b")]),
        (r#"{"choices":[{"delta":{"content":"a"},"delta":null}]}"#, vec![]),
        (r#"{"\u0063hoices":[7,null,"x",[],{"index":0,"delta":{"content":"\u0061"}}]}"#, vec![text("a")]),
        (r#"{"choices":{"a":[1]},"usage":7,"x":"\ud83d"}"#, vec![]),
        (r#"{"choices":[{"index":"0","delta":[1],"message":"x","finish_reason":{}}]}"#, vec![]),
        (r#"{"choices":[{"delta":{"tool_calls":[1,{"id":"a","function":7}]}}]}"#, vec![Fragment::Calls(vec![call])]),
    ] {
        let mut out = Vec::new();
        let event = Event { data: data.to_owned(), ..Event::default() };
        assert_eq!(ChatDecoder::default().event(&event, &mut out), Ok(Decoded::More), "{data}");
        assert_eq!(out, expected, "{data}");
    }
}

#[test]
fn calls_are_read_with_whatever_is_there() {
    let chunk = delta(json!({"tool_calls": [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "t", "arguments": "{"}},
        {"id": null, "function": {"name": null, "arguments": {"x": 1}}},
        {"index": null, "function": {"arguments": null}},
        {"index": 2},
    ]}));
    let call = |index, id: Option<&str>, name: Option<&str>, arguments| CallFragment {
        index,
        id: id.map(str::to_owned),
        name: name.map(str::to_owned),
        arguments,
    };
    assert_eq!(
        fragments(&[chunk]),
        [Fragment::Calls(vec![
            call(Some(0), Some("a"), Some("t"), ArgumentPiece::Text("{".into())),
            call(None, None, None, ArgumentPiece::Value("{\"x\":1}".into())),
            call(None, None, None, ArgumentPiece::None),
            call(Some(2), None, None, ArgumentPiece::None),
        ])]
    );
}

#[test]
fn reasoning_comes_once_from_whichever_field_has_it() {
    for (part, expected) in [
        (json!({"reasoning": "a", "reasoning_content": "a"}), vec![reasoning("a")]),
        (json!({"reasoning": "a", "reasoning_content": ""}), vec![reasoning("a")]),
        (
            json!({"reasoning": "a", "reasoning_details": [{"type": "reasoning.text", "text": "a", "index": 0}]}),
            vec![reasoning("a")],
        ),
        (json!({"reasoning_details": [{"type": "reasoning.summary", "summary": "a"}]}), vec![reasoning("a")]),
        (
            json!({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}, {"type": "text", "text": "b"}]}),
            vec![reasoning("a"), text("b")],
        ),
        (
            json!({"content": [{"type": "thinking", "thinking": "a"}, {"type": "reference", "reference_ids": [1]}]}),
            vec![reasoning("a")],
        ),
    ] {
        assert_eq!(fragments(&[delta(part.clone())]), expected, "{part}");
    }
}

#[test]
fn reasoning_details_merge_by_type_and_index() {
    let details = |entries: Value| delta(json!({"reasoning_details": entries}));
    let (_, mut decoder) = decode(&[
        details(json!([{"type": "reasoning.text", "text": "The ", "format": "f", "index": 0}])),
        details(json!([{"type": "reasoning.text", "text": "user", "index": 0}, {"type": "reasoning.encrypted", "data": "e1", "index": 1}])),
        details(json!([{"type": "reasoning.text", "signature": "s", "text": null, "index": 0}])),
        details(json!([{"type": "reasoning.encrypted", "data": "e1", "index": 1}, {"type": "reasoning.encrypted", "data": "e2"}])),
    ])
    .unwrap();
    assert_eq!(
        decoder.token(),
        Some(ReasoningToken {
            wire: "openai_chat".into(),
            data: json!([
                {"type": "reasoning.text", "text": "The user", "format": "f", "index": 0, "signature": "s"},
                {"type": "reasoning.encrypted", "data": "e1", "index": 1},
                {"type": "reasoning.encrypted", "data": "e2"},
            ]),
        })
    );
    assert_eq!(decoder.token(), None);
}

#[test]
fn usage_is_checked() {
    let usage = |usage: Value| decode(&[json!({"choices": [], "usage": usage})]).map(|(fragments, _)| fragments);
    assert_eq!(
        usage(
            json!({"prompt_tokens": 9, "completion_tokens": 5.0, "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 3}})
        ),
        Ok(vec![Fragment::Usage(TokenUsage {
            input_tokens: 9,
            output_tokens: 5,
            cached_input_tokens: 4,
            reasoning_tokens: 3
        })])
    );
    let some = TokenUsage { input_tokens: 9, ..TokenUsage::default() };
    assert_eq!(
        usage(json!({"prompt_tokens": 9, "completion_tokens": null, "prompt_tokens_details": null})),
        Ok(vec![Fragment::Usage(some)])
    );
    assert_eq!(usage(json!({})), Ok(vec![]));
    for bad in [
        json!({"prompt_tokens": -1}),
        json!({"completion_tokens": 1.5}),
        json!({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": "2"}}),
    ] {
        assert!(matches!(usage(bad.clone()), Err(StreamError::Usage(_))), "{bad}");
    }
}

#[test]
fn errors_in_the_stream_are_found_in_every_form() {
    let named = |name: &str, data: &str| Event { name: name.into(), data: data.into(), id: "".into() };
    for (event, class, message) in [
        (
            named("", r#"{"choices":[],"error":{"code":502,"message":"worker limit"}}"#),
            FailureClass::Unavailable,
            "worker limit (502)",
        ),
        (
            named(
                "",
                r#"{"choices":[{"delta":{"content":""},"finish_reason":"error"}],"error":{"code":"server_error","message":"gone"}}"#,
            ),
            FailureClass::Unavailable,
            "gone (server_error)",
        ),
        (named("", r#"{"error":"plain"}"#), FailureClass::Unavailable, "plain"),
        (
            named("", r#"{"object":"error","message":"bad","type":"invalid_request_error","code":400}"#),
            FailureClass::InvalidRequest,
            "bad (400)",
        ),
        (
            named("", r#"{"type":"error","error":{"type":"rate_limit_error","message":"slow"}}"#),
            FailureClass::RateLimited,
            "slow (rate_limit_error)",
        ),
        (
            named("error", r#"{"message":"named","code":"context_length_exceeded"}"#),
            FailureClass::ContextTooLong,
            "named (context_length_exceeded)",
        ),
        (named("error", r#""text""#), FailureClass::Unavailable, "text"),
        (
            named("", r#"{"choices":[{"delta":{},"finish_reason":"error"}]}"#),
            FailureClass::Unavailable,
            "the response ended with finish reason `error`",
        ),
        (named("", r#"{"error":{"message":"half \ud83d"}}"#), FailureClass::Unavailable, "half \u{FFFD}"),
    ] {
        match ChatDecoder::default().event(&event, &mut Vec::new()) {
            Err(StreamError::Provider(error)) => {
                assert_eq!((error.class_in_stream(), error.excerpt()), (class, message.to_owned()))
            }
            other => panic!("{event:?}: {other:?}"),
        }
    }
    let mut out = Vec::new();
    let chunk = r#"{"choices":[{"delta":{"content":"last words"}}],"error":{"message":"x"}}"#;
    ChatDecoder::default().event(&named("", chunk), &mut out).unwrap_err();
    assert_eq!(out, [text("last words")]);
    assert_eq!(ChatDecoder::default().event(&named("ping", "12:00"), &mut out), Ok(Decoded::More));
    for data in ["Number of choices must be greater than 0.", "{\"choices\":[", "[]", "7", "{}{}"] {
        let read = ChatDecoder::default().event(&named("", data), &mut Vec::new());
        assert_eq!(read, Err(StreamError::Unreadable(data.to_owned())));
    }
}

#[test]
fn stray_lines_are_errors_only_when_they_say_so() {
    let stray = |line: &str| ChatDecoder::default().stray(line);
    let message = |line: &str| match stray(line) {
        Err(StreamError::Provider(error)) => error.excerpt(),
        other => panic!("{line}: {other:?}"),
    };
    assert_eq!(message(r#"error: {"message":"a","code":500}"#), "a (500)");
    assert_eq!(message("error: out of memory"), "out of memory");
    assert_eq!(message(r#"{"error":{"message":"b"}}"#), "b");
    for line in ["x-note: 1", "{\"a\":1}", "upstream says hi"] {
        assert_eq!(stray(line), Ok(()));
    }
}

#[test]
fn a_whole_answer_is_read_like_a_chunk() {
    let body = json!({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "content": "hi",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"}}]}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2}});
    let mut out = Vec::new();
    ChatDecoder::default().whole(&body.to_string(), &mut out).unwrap();
    let call = CallFragment {
        index: None,
        id: Some("a".into()),
        name: Some("t".into()),
        arguments: ArgumentPiece::Text("{}".into()),
    };
    let usage = TokenUsage { input_tokens: 1, output_tokens: 2, ..TokenUsage::default() };
    assert_eq!(
        out,
        [Fragment::Usage(usage), text("hi"), Fragment::Calls(vec![call]), Fragment::Finish(FinishReason::ToolCalls)]
    );
    let error = ChatDecoder::default().whole(r#"{"error":{"message":"no","code":503}}"#, &mut Vec::new());
    assert!(matches!(error, Err(StreamError::Provider(_))));
    assert!(matches!(ChatDecoder::default().whole(r#"{"id":1}"#, &mut Vec::new()), Err(StreamError::Unreadable(_))));
}

#[test]
fn content_is_text_and_calls_are_a_list() {
    for field in ["content", "tool_calls"] {
        for wrong in [json!({"a": 1}), json!(7), json!(true)] {
            let decoded = decode(&[delta(json!({ field: wrong }))]);
            assert!(matches!(decoded, Err(StreamError::Unreadable(_))), "{field}: {decoded:?}");
        }
        for nothing in [json!(null), json!([])] {
            assert_eq!(fragments(&[delta(json!({ field: nothing }))]), []);
        }
    }
    assert!(matches!(decode(&[delta(json!({"tool_calls": "x"}))]), Err(StreamError::Unreadable(_))));
}
