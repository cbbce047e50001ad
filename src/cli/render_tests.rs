//! What is printed for whole streams.

use serde_json::json;

use super::*;

const RUN: &str = "run_019000000000700080000000000000ab";

fn event(seq: u64, body: Value) -> Frame {
    let Value::Object(mut data) = body else { panic!("{body} is not an object") };
    let event = data["type"].as_str().unwrap().to_owned();
    data.insert("run_id".into(), RUN.into());
    data.insert("seq".into(), seq.into());
    data.insert("time".into(), "2026-11-30T16:17:10.000Z".into());
    Frame { id: Some(seq.to_string()), event, data: Value::Object(data).to_string() }
}

fn delta(step: u32, attempt: u32, offset: usize, text: &str) -> Frame {
    let data = json!({"run_id": RUN, "step": step, "attempt": attempt, "offset": offset, "text": text});
    Frame { id: Some(format!("2.{offset}")), event: "text_delta".into(), data: data.to_string() }
}

fn live(event: &str, data: Value) -> Frame {
    Frame { id: None, event: event.into(), data: data.to_string() }
}

fn said(step: u32, text: &str) -> Value {
    let content = json!([{"type": "text", "text": text}]);
    json!({"type": "message", "step": step, "message": {"role": "assistant", "content": content}})
}

fn ended(status: &str, usage: [u32; 4], error: Value) -> Value {
    let [input, output, calls, with_usage] = usage;
    json!({"type": "run_end", "duration_ms": 1234, "run": {
        "id": RUN, "status": status, "agent": "demo", "model": "demo/script", "answer": null, "partial": null,
        "error": error, "steps": 2, "tool_calls": 1, "metadata": {},
        "usage": {"input_tokens": input, "output_tokens": output, "cached_input_tokens": 0, "reasoning_tokens": 0,
                  "model_calls": calls, "model_calls_with_usage": with_usage},
    }})
}

fn shown(frames: &[Frame]) -> String {
    let mut renderer = Renderer::text();
    frames.iter().map(|frame| renderer.frame(frame).text).collect()
}

#[test]
fn a_run_reads_from_top_to_bottom() {
    let frames = [
        live("snapshot", json!({"run": {}, "executing": [], "writing": null})),
        event(1, json!({"type": "run_queued"})),
        event(2, json!({"type": "run_start", "agent": "demo", "model": "demo/script"})),
        event(3, json!({"type": "model_start", "step": 1, "attempt": 1})),
        delta(1, 1, 0, "I will "),
        delta(1, 1, 7, "look."),
        event(
            4,
            json!({"type": "model_end", "step": 1, "attempt": 1, "duration_ms": 5, "finish_reason": "tool_calls",
                        "usage": null}),
        ),
        event(5, said(1, "I will look.")),
        event(
            6,
            json!({"type": "tool_start", "step": 1, "call_id": "c1", "name": "list_dir",
                        "arguments": {"path": "."}, "effect": "read_only"}),
        ),
        live("tool_progress", json!({"run_id": RUN, "call_id": "c1", "text": "one\ntwo\n"})),
        event(
            7,
            json!({"type": "tool_end", "step": 1, "call_id": "c1", "name": "list_dir", "outcome": "result",
                        "is_error": false, "content": "README.md", "duration_ms": 12}),
        ),
        event(8, said(2, "Not streamed.\nTwo lines.")),
        event(9, ended("completed", [125, 20, 2, 2], json!(null))),
    ];
    let expected = "agent demo, model demo/script\n\
        I will look.\n\
        > list_dir {\"path\":\".\"}\n\
        | one\n\
        | two\n\
        < list_dir result, 12 ms\n\
        Not streamed.\n\
        Two lines.\n\
        completed: 2 steps, 1 tool call, 125 + 20 tokens, 1.2 s (run_019000000000700080000000000000ab)\n";
    assert_eq!(shown(&frames), expected);
}

#[test]
fn the_end_is_handed_on() {
    let error = json!({"code": "provider_unavailable", "message": "no route", "retryable": true});
    let frame = event(9, ended("model_error", [0, 0, 2, 0], error));
    let shown = Renderer::text().frame(&frame);
    let end = shown.end.unwrap();
    assert_eq!((end.status, end.steps, end.usage.model_calls), (RunStatusName::ModelError, 2, 2));
    assert_eq!(
        shown.text,
        "model_error: 2 steps, 1 tool call, tokens unknown, 1.2 s (run_019000000000700080000000000000ab)\n\
         provider_unavailable: no route\n"
    );
    let partly = event(9, ended("aborted", [5, 1, 2, 1], json!(null)));
    assert!(Renderer::text().frame(&partly).text.contains("at least 5 + 1 tokens"));
}

#[test]
fn text_that_comes_twice_is_shown_once() {
    let frames = [
        delta(1, 1, 0, "héllo "),
        delta(1, 1, 0, "héllo wor"),
        delta(1, 1, 6, "world"),
        event(5, said(1, "héllo world!")),
    ];
    assert_eq!(shown(&frames), "héllo world!\n");
}

#[test]
fn a_retried_message_starts_anew() {
    let retry = json!({"type": "model_retry", "step": 1, "attempt": 2, "reason": "truncated", "message": "cut\noff",
                       "delay_ms": 1500});
    let frames = [delta(1, 1, 0, "Hal"), event(4, retry), delta(1, 2, 0, "Hello"), event(5, said(1, "Hello"))];
    let expected = "Hal\n! response_truncated: cut off; attempt 2 follows in 1.5 s\n\
        ! the text above was cut off; it starts anew\nHello\n";
    assert_eq!(shown(&frames), expected);
    assert_eq!(shown(&[delta(1, 1, 0, "Half"), event(5, said(1, "Other"))]), "Half\nOther\n");
}

#[test]
fn warnings_and_failures_have_a_line_each() {
    let frames = [
        event(1, json!({"type": "context_trimmed", "step": 1, "dropped_messages": 4, "estimated_tokens": 9})),
        event(2, json!({"type": "limit_warning", "limit": "max_steps", "used": 8, "max": 10})),
        event(
            3,
            json!({"type": "model_error", "step": 1, "attempt": 3, "duration_ms": 1, "reason": "timed_out",
                        "message": "nothing came"}),
        ),
        event(
            4,
            json!({"type": "tool_end", "step": 1, "call_id": "c", "name": "x", "outcome": "outcome_unknown",
                        "is_error": true, "content": "who\nknows", "duration_ms": 125_000}),
        ),
        event(5, json!({"type": "cancel_requested"})),
        event(6, json!({"type": "something_newer"})),
        live("reasoning_delta", json!({"text": "hm"})),
    ];
    let expected = "! 4 older messages are left out of the next request\n\
        ! 8 of 10 used: max_steps\n\
        ! model_timeout: nothing came\n\
        < x outcome unknown, 2 min 5 s: who knows\n\
        ! cancel requested\n\
        ! an event of a kind this version does not know: something_newer\n";
    assert_eq!(shown(&frames), expected);
}

#[test]
fn nothing_a_model_or_tool_writes_reaches_the_terminal_as_a_command() {
    let hostile = "\u{1b}]0;owned\u{7}\r\u{9b}2J\u{202e}";
    let frames = [
        event(1, json!({"type": "run_start", "agent": hostile, "model": "a/b"})),
        delta(1, 1, 0, hostile),
        event(2, said(1, &format!("{hostile}more"))),
        event(
            3,
            json!({"type": "tool_start", "step": 1, "call_id": "c", "name": hostile, "arguments": hostile,
                        "effect": "side_effect"}),
        ),
        live("tool_progress", json!({"run_id": RUN, "call_id": "c", "text": hostile})),
        event(
            4,
            json!({"type": "tool_end", "step": 1, "call_id": "c", "name": hostile, "outcome": "error",
                        "is_error": true, "content": hostile, "duration_ms": 1}),
        ),
        live(hostile, json!({})),
        event(5, ended("internal_error", [0; 4], json!({"code": hostile, "message": hostile, "retryable": false}))),
    ];
    let text = shown(&frames);
    assert!(!text.replace('\n', "").contains(crate::domain::text::is_unprintable), "{text:?}");
    assert!(text.contains("\\u{1b}]0;owned\\u{7}\\r\\u{9b}2J\\u{202e}more"), "{text}");
}

#[test]
fn a_hostile_name_stays_on_its_line_and_is_cut() {
    for (name, shown_name) in [
        ("x\n< x result, 1 ms", "x\\n< x result, 1 ms".to_owned()),
        ("x\r\u{2028}\u{2029}\u{85}y", "x\\r\\u{2028}\\u{2029}\\u{85}y".to_owned()),
        ("a\u{200e}\u{200f}\u{61c}b", "a\\u{200e}\\u{200f}\\u{61c}b".to_owned()),
        (&"n".repeat(200_000), format!("{}…", "n".repeat(MAX_NAME))),
    ] {
        let frames = [
            event(1, json!({"type": "run_start", "agent": name, "model": format!("a/{name}")})),
            event(
                2,
                json!({"type": "tool_start", "step": 1, "call_id": "c", "name": name, "arguments": {},
                            "effect": "read_only"}),
            ),
            event(
                3,
                json!({"type": "tool_end", "step": 1, "call_id": "c", "name": name, "outcome": "result",
                            "is_error": false, "content": "", "duration_ms": 1}),
            ),
            live(name, json!({})),
            event(4, ended("internal_error", [0; 4], json!({"code": name, "message": name, "retryable": false}))),
        ];
        let text = shown(&frames);
        let lines: Vec<_> = text.split('\n').collect();
        assert_eq!(lines.len(), 7, "{text}");
        assert!(lines[0].starts_with(&format!("agent {shown_name}, model a/")), "{}", lines[0]);
        assert_eq!(
            lines[1..4],
            [
                format!("> {shown_name} {{}}"),
                format!("< {shown_name} result, 1 ms"),
                format!("! an event of a kind this version does not know: {shown_name}"),
            ]
        );
        assert!(lines[4].starts_with("internal_error: 2 steps"), "{}", lines[4]);
        assert!(lines[5].starts_with(&format!("{shown_name}: ")) && lines[5].chars().count() < 1_200, "{}", lines[5]);
        assert_eq!(lines[6], "");
    }
}

#[test]
fn long_arguments_are_cut() {
    let long = json!({"type": "tool_start", "step": 1, "call_id": "c", "name": "write_file",
                      "arguments": {"content": "é".repeat(1000)}, "effect": "side_effect"});
    let text = shown(&[event(1, long)]);
    assert_eq!(text, format!("> write_file {{\"content\":\"{}…\n", "é".repeat(MAX_SHOWN - 12)));
}

#[test]
fn json_output_is_one_line_a_frame_with_the_data_as_sent() {
    let data = "{\"z\": 1,\n \"a\":\"\u{9b}\u{2028}\\n\",  \"n\":1.0}";
    let frames = [
        Frame { id: Some("2.7".into()), event: "text_delta".into(), data: data.into() },
        live("snapshot", json!({})),
        Frame { id: None, event: "odd \"\n".into(), data: "no JSON\u{1b}".into() },
    ];
    let printed = |out| -> Vec<String> {
        let mut renderer = Renderer::Json(out);
        frames.iter().map(|frame| renderer.frame(frame).text).collect()
    };
    let piped = printed(JsonLines::Piped);
    assert_eq!(
        piped,
        [
            "{\"id\":\"2.7\",\"event\":\"text_delta\",\"data\":{\"z\": 1,  \"a\":\"\u{9b}\u{2028}\\n\",  \"n\":1.0}}\n",
            "{\"id\":null,\"event\":\"snapshot\",\"data\":{}}\n",
            "{\"id\":null,\"event\":\"odd \\\"\\n\",\"data\":\"no JSON\\u001b\"}\n",
        ]
    );
    let on_screen = printed(JsonLines::Shown);
    for (line, same) in on_screen.iter().zip(&piped) {
        assert!(!line.trim_end().contains(crate::domain::text::is_unprintable), "{line:?}");
        let read = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        assert_eq!(read(line), read(same));
    }
}

#[test]
fn trouble_with_the_server_has_a_line_of_its_own() {
    let mut renderer = Renderer::text();
    let text = renderer.frame(&delta(1, 1, 0, "Hel")).text + &renderer.trouble("not\nreachable").text;
    assert_eq!(text, "Hel\n! not\\nreachable\n");
}
