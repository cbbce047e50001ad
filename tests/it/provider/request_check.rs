//! What a case demands of the requests: operations on the decoded body.

use serde_json::Value;

/// The checks of a case that these bodies fail, as text. A check of a call that was not made fails.
pub(crate) fn failed(checks: &[Value], bodies: &[Value]) -> Vec<String> {
    let fails = |check: &&Value| {
        let call = usize::try_from(check["call"].as_u64().expect("a call number")).unwrap();
        !bodies.get(call - 1).is_some_and(|body| holds(check, body))
    };
    checks.iter().filter(fails).map(Value::to_string).collect()
}

fn holds(check: &Value, body: &Value) -> bool {
    let messages = body["messages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = || body["tools"].as_array().into_iter().flatten().filter_map(|tool| tool["function"]["name"].as_str());
    let matching = || messages.iter().filter(|message| matches(&check["match"], message)).count();
    match check["op"].as_str().expect("an operation") {
        "messages_any" => matching() > 0,
        "messages_count" => u64::try_from(matching()).ok() == check["count"].as_u64(),
        "args_valid_json" => {
            messages.iter().flat_map(|message| message["tool_calls"].as_array().into_iter().flatten()).all(|call| {
                matches!(call["function"]["arguments"].as_str().map(serde_json::from_str), Some(Ok(Value::Object(_))))
            })
        }
        "tool_names_valid" => {
            let pattern = regex::Regex::new(check["pattern"].as_str().expect("a pattern")).unwrap();
            names().count() > 0 && names().all(|name| pattern.is_match(name))
        }
        "tool_names_unique" => {
            let mut all: Vec<_> = names().collect();
            all.sort_unstable();
            all.windows(2).all(|pair| pair[0] != pair[1])
        }
        other => panic!("unknown operation `{other}`"),
    }
}

/// Whether `got` has at least what `want` has: objects by key, lists as a subsequence, the rest by equality.
fn matches(want: &Value, got: &Value) -> bool {
    match (want, got) {
        (Value::Object(want), Value::Object(got)) => {
            want.iter().all(|(key, want)| got.get(key).is_some_and(|got| matches(want, got)))
        }
        (Value::Array(want), Value::Array(got)) if want.is_empty() => got.is_empty(),
        (Value::Array(want), Value::Array(got)) => {
            let mut rest = got.iter();
            want.iter().all(|want| rest.any(|got| matches(want, got)))
        }
        (want, got) => want == got,
    }
}

#[test]
fn a_check_that_does_not_hold_is_reported() {
    use serde_json::json;
    let body = json!({
        "messages": [{"role": "assistant", "content": "hi", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}, {"id": "b", "function": {"arguments": "\"x\""}}]}],
        "tools": [{"function": {"name": "t"}}, {"function": {"name": "t"}}],
    });
    for (check, expected) in [
        (json!({"call": 1, "op": "messages_any", "match": {"role": "assistant", "tool_calls": [{"id": "b"}]}}), true),
        (
            json!({"call": 1, "op": "messages_any", "match": {"role": "assistant", "tool_calls": [{"id": "b"}, {"id": "a"}]}}),
            false,
        ),
        (json!({"call": 1, "op": "messages_any", "match": {"tool_calls": []}}), false),
        (json!({"call": 2, "op": "messages_any", "match": {}}), false),
        (json!({"call": 1, "op": "messages_count", "match": {"role": "assistant"}, "count": 1}), true),
        (json!({"call": 1, "op": "messages_count", "match": {"role": "assistant"}, "count": 2}), false),
        (json!({"call": 1, "op": "args_valid_json"}), false),
        (json!({"call": 1, "op": "tool_names_valid", "pattern": "^t$"}), true),
        (json!({"call": 1, "op": "tool_names_unique"}), false),
    ] {
        assert_eq!(failed(std::slice::from_ref(&check), std::slice::from_ref(&body)).is_empty(), expected, "{check}");
    }
}
