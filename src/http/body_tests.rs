//! Bodies of every wrong kind, and what is said of them.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::domain::RunRequest;

fn refused(body: &[u8]) -> (ProblemCode, String) {
    let problem = decode::<RunRequest>(body).unwrap_err();
    (problem.code(), problem.detail().to_owned())
}

#[test]
fn text_that_is_not_json_is_refused_with_its_place() {
    for (body, detail) in [
        (&b""[..], "The body is empty; expected a JSON object."),
        (b" \n ", "The body is empty; expected a JSON object."),
        (b"{\"input\": \xff}", "The body is not UTF-8: byte 10 is wrong."),
        ("\u{feff}{}".as_bytes(), "The body starts with a byte order mark, which JSON does not have."),
        (b"{\n \"input\" 1}", "The body is not valid JSON: expected `:` at line 2 column 10."),
        (b"{\"input\": \"a\"", "The body is not valid JSON: EOF while parsing an object at line 1 column 13."),
        (b"{'input': 1}", "The body is not valid JSON: key must be a string at line 1 column 2."),
        (b"{\"input\": NaN}", "The body is not valid JSON: expected value at line 1 column 11."),
        (b"{\"input\": 1e999}", "The body is not valid JSON: number out of range at line 1 column 15."),
        (
            b"{\"input\": \"a\"} x",
            "The body is not valid JSON: something follows after the end of the JSON value at line 1 column 16.",
        ),
        (
            b"{\"input\": \"a\nb\"}",
            "The body is not valid JSON: control character (\\u0000-\\u001F) found while parsing a string at line 2 column 0.",
        ),
    ] {
        assert_eq!(refused(body), (ProblemCode::InvalidJson, detail.to_owned()), "{}", body.escape_ascii());
    }
}

#[test]
fn half_a_surrogate_pair_is_refused_and_a_whole_one_is_read() {
    for half in [r#""\ud83d""#, r#""\ud83dx""#, r#""\ude00""#, r#""\ud83d\ud83d""#, r#""\ud83d\n""#] {
        let (code, detail) = refused(format!(r#"{{"input": {half}}}"#).as_bytes());
        assert_eq!(code, ProblemCode::InvalidJson, "{half}");
        assert!(detail.contains("surrogate"), "{half}: {detail}");
    }
    let request: RunRequest = decode(br#"{"input": "\ud83d\ude00"}"#).unwrap();
    assert_eq!(serde_json::to_value(request.input).unwrap(), json!("😀"));
}

#[test]
fn nul_is_refused_with_its_path() {
    for (body, path) in [
        (r#"{"input": "a\u0000b"}"#, "$.input"),
        (
            r#"{"input": [{"role": "user", "content": [{"type": "text", "text": "\u0000"}]}]}"#,
            "$.input[0].content[0].text",
        ),
        (r#"{"input": "a", "metadata": {"k\u0000": "v"}}"#, "$.metadata"),
    ] {
        let problem = decode::<RunRequest>(body.as_bytes()).unwrap_err();
        assert_eq!(problem.code(), ProblemCode::InvalidJson);
        assert_eq!(problem.errors()[0].path, path);
        assert!(problem.detail().contains("U+0000"), "{}", problem.detail());
    }
}

#[test]
fn a_key_that_occurs_twice_is_refused_at_any_depth() {
    for (body, detail) in [
        (r#"{"input": "a", "input": "b"}"#, "$: the key `input` occurs twice in one object"),
        (r#"{"input": "a", "metadata": {"k": "1", "k": "1"}}"#, "$.metadata: the key `k` occurs twice in one object"),
        (
            r#"{"input": [{"role": "user", "content": "a", "\u0072ole": "user"}]}"#,
            "$.input[0]: the key `role` occurs twice in one object",
        ),
    ] {
        assert_eq!(refused(body.as_bytes()), (ProblemCode::InvalidJson, detail.to_owned()));
    }
}

#[test]
fn depth_is_bounded() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let deep = |levels: usize| format!("{}1{}", open.repeat(levels), close.repeat(levels));
        assert!(parse(deep(127).as_bytes()).is_ok());
        for levels in [128, 100_000] {
            let detail = parse(deep(levels).as_bytes()).unwrap_err().detail().to_owned();
            assert!(detail.contains("nested deeper than 127 levels at line 1 column"), "{detail}");
        }
    }
}

#[test]
fn the_number_of_values_is_bounded() {
    let list = |items: usize| format!("[{}0]", "0,".repeat(items - 1));
    assert!(parse(list(MAX_VALUES - 1).as_bytes()).is_ok());
    let problem = parse(list(MAX_VALUES).as_bytes()).unwrap_err();
    assert_eq!(problem.detail(), "$[99999]: the body holds more than 100000 values");
}

#[test]
fn a_wrong_field_is_named_by_its_path() {
    for (body, path, message) in [
        (json!([]), "$", "invalid type: sequence, expected an object"),
        (json!({"input": "a", "limits": [1, 2, 3]}), "$.limits", "invalid type: sequence, expected an object"),
        (json!({"input": [["user", "a"]]}), "$.input[0]", "invalid type: sequence, expected an object"),
        (
            json!({"input": "a", "on_repeat": {"warn": null}}),
            "$.on_repeat",
            "invalid type: map, expected enum OnRepeat",
        ),
        (
            json!({"input": "a", "on_repeat": "wran"}),
            "$.on_repeat",
            "unknown variant `wran`, expected one of `warn`, `stop`, `allow`",
        ),
        (
            json!({"input": [{"role": "user", "content": [["text", "a"]]}]}),
            "$.input[0].content[0]",
            "invalid type: sequence, expected an object",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "image", "text": ""}]}]}),
            "$.input[0].content[0].type",
            "unknown variant `image`, expected `text`",
        ),
        (json!("x"), "$", "invalid type: string \"x\", expected an object"),
        (json!({}), "$", "missing field `input`"),
        (json!({"input": 7}), "$.input", "invalid type: integer `7`, expected a text or a list of messages"),
        (json!({"input": null}), "$.input", "invalid type: null, expected a text or a list of messages"),
        (
            json!({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": 1}]}),
            "$.input[1].content",
            "invalid type: integer `1`, expected a text or a list of parts",
        ),
        (
            json!({"input": [{"role": "system", "content": "a"}]}),
            "$.input[0].role",
            "unknown variant `system`, expected `user` or `assistant`",
        ),
        (
            json!({"input": "a", "limits": {"max_steps": "10"}}),
            "$.limits.max_steps",
            "invalid type: string \"10\", expected u32",
        ),
        (
            json!({"input": "a", "limits": {"max_steps": -1}}),
            "$.limits.max_steps",
            "invalid value: integer `-1`, expected u32",
        ),
        (
            json!({"input": "a", "limits": {"max_steps": 1.5}}),
            "$.limits.max_steps",
            "invalid type: floating point `1.5`, expected u32",
        ),
        (json!({"input": "a", "metadata": {"k": 1}}), "$.metadata.k", "invalid type: integer `1`, expected a string"),
        (
            json!({"input": "a", "tools": ["x", 1]}),
            "$.tools[1]",
            "invalid type: integer `1`, expected the name of a tool, a pattern, or an object of type `client`",
        ),
        (json!({"input": "a", "inptu": 1}), "$.inptu", "unknown field; did you mean `input`?"),
        (
            json!({"input": "a", "limits": {"max_step": 1}}),
            "$.limits.max_step",
            "unknown field; did you mean `max_steps`?",
        ),
        (
            json!({"input": "a", "webhook": {}}),
            "$.webhook",
            "unknown field; known here: agent, input, instructions, model, tools, approval, limits, context, on_repeat, \
             parallel_tools, workspace, thread, on_busy, previous_run, metadata",
        ),
        (
            json!({"input": [{"role": "user", "content": "a", "name": "b"}]}),
            "$.input[0].name",
            "unknown field; known here: role, content",
        ),
    ] {
        let problem = decode::<RunRequest>(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(problem.code(), ProblemCode::InvalidRequest, "{body}");
        assert_eq!(problem.errors(), [FieldError::new(path, message)], "{body}");
    }
}

#[test]
fn a_long_unknown_name_is_not_repeated_whole() {
    let body = json!({"input": "a", "x".repeat(10_000): 1}).to_string();
    let problem = decode::<RunRequest>(body.as_bytes()).unwrap_err();
    assert!(problem.detail().len() < 400, "{}", problem.detail());
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        "[^\u{0}]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map("[^\u{0}]{0,4}", inner, 0..5)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn the_strict_reader_reads_what_json_is(value in any_json()) {
        prop_assert_eq!(parse(value.to_string().as_bytes()).unwrap(), value);
    }

    #[test]
    fn no_bytes_crash_it(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let strict = parse(&bytes);
        let lenient = serde_json::from_slice::<Value>(&bytes);
        prop_assert!(strict.is_err() || lenient.is_ok());
    }
}
