//! Tests of the accumulator: how fragments of calls find together.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Writes down what was streamed.
#[derive(Default)]
struct Log(Vec<String>);

impl DeltaSink for Log {
    fn delta(&mut self, delta: Delta<'_>) {
        self.0.push(match delta {
            Delta::Text(text) => format!("text {text}"),
            Delta::Reasoning(text) => format!("reasoning {text}"),
            Delta::ToolCall { index, id, name, arguments } => format!("call {index} {id} {name} {arguments}"),
        });
    }
}

fn entry(json: &Value) -> CallFragment {
    let text = |name: &str| json[name].as_str().map(str::to_owned);
    CallFragment {
        index: json["index"].as_u64(),
        id: text("id"),
        name: text("name"),
        arguments: match &json["args"] {
            Value::Null => ArgumentPiece::None,
            Value::String(piece) => ArgumentPiece::Text(Piece::from(piece.as_str())),
            value => ArgumentPiece::Value(value.to_string()),
        },
    }
}

/// Plays chunks, each a list of entries, and gives back `[id, name, arguments]` of each call.
fn calls(chunks: &Value) -> Result<Value, AccumulateError> {
    let mut accumulator = Accumulator::new(3, NameMap::default());
    let mut log = Log::default();
    for chunk in chunks.as_array().unwrap() {
        let entries = chunk.as_array().unwrap().iter().map(entry).collect();
        accumulator.push(Fragment::Calls(entries), &mut log)?;
    }
    let turn = accumulator.finish(None, &mut log)?;
    Ok(turn.tool_calls.iter().map(|call| json!([call.id, call.name, call.arguments])).collect())
}

#[test]
fn fragments_find_their_call() {
    for (what, chunks, expected) in [
        (
            "the usual form",
            json!([[{"index": 0, "id": "a", "name": "t", "args": ""}], [{"index": 0, "args": "{\"x\""}], [{"index": 0, "args": ":1}"}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "two calls in turns",
            json!([[{"index": 0, "id": "a", "name": "t"}, {"index": 1, "id": "b", "name": "u"}],
                   [{"index": 0, "args": "{\"x\":"}, {"index": 1, "args": "{\"y\":"}], [{"index": 1, "args": "2}"}, {"index": 0, "args": "1}"}]]),
            json!([["a", "t", {"x": 1}], ["b", "u", {"y": 2}]]),
        ),
        (
            "no index, ids",
            json!([[{"id": "a", "name": "t", "args": "{}"}, {"id": "b", "name": "t", "args": "{\"y\":"}], [{"id": "b", "args": "2}"}]]),
            json!([["a", "t", {}], ["b", "t", {"y": 2}]]),
        ),
        (
            "no index, the open call goes on",
            json!([[{"id": "a", "name": "t", "args": "{}"}], [{"id": "b", "name": "t", "args": ""}], [{"args": "{\"y\":"}], [{"args": "2}"}]]),
            json!([["a", "t", {}], ["b", "t", {"y": 2}]]),
        ),
        (
            "neither index nor id, two whole calls in one chunk",
            json!([[{"name": "t", "args": "{\"x\":1}"}, {"name": "t", "args": "{\"x\":2}"}]]),
            json!([["call_3_1", "t", {"x": 1}], ["call_3_2", "t", {"x": 2}]]),
        ),
        (
            "neither index nor id, two whole calls in two chunks",
            json!([[{"name": "t", "args": "{\"x\":1}"}], [{"name": "t", "args": "{\"x\":2}"}]]),
            json!([["call_3_1", "t", {"x": 1}], ["call_3_2", "t", {"x": 2}]]),
        ),
        (
            "neither index nor id, two open calls by position",
            json!([[{"name": "t", "args": "{\"x\":"}, {"name": "u", "args": "{\"y\":"}], [{"args": "1}"}, {"args": "2}"}]]),
            json!([["call_3_1", "t", {"x": 1}], ["call_3_2", "u", {"y": 2}]]),
        ),
        (
            "the name repeated without index and id",
            json!([[{"name": "t", "args": "{\"x\""}], [{"name": "t", "args": ":1}"}]]),
            json!([["call_3_1", "t", {"x": 1}]]),
        ),
        (
            "an index only on some chunks",
            json!([[{"id": "a", "name": "t", "args": ""}], [{"index": 0, "args": "{\"x\":"}], [{"args": "1}"}], [{"index": 1, "id": "b", "name": "u"}]]),
            json!([["a", "t", {"x": 1}], ["b", "u", {}]]),
        ),
        (
            "arguments before the name",
            json!([[{"index": 0, "args": "{\"x\":1"}], [{"index": 0, "id": "a", "name": "t", "args": "}"}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "arguments before id and name, without index",
            json!([[{"args": "{\"x\":1"}], [{"id": "a", "name": "t", "args": "}"}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "id and name repeated on every chunk",
            json!([[{"index": 0, "id": "a", "name": "t", "args": "{"}], [{"index": 0, "id": "a", "name": "t", "args": "}"}]]),
            json!([["a", "t", {}]]),
        ),
        (
            "empty id, the word null as name, null arguments",
            json!([[{"index": 0, "id": "a", "name": "t", "args": "{\"x\":1"}], [{"index": 0, "id": "", "name": "null", "args": "}"}], [{"index": 0, "id": "", "args": null}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "an empty trailing fragment without anything",
            json!([[{"id": "a", "name": "t", "args": "{}"}], [{"id": "", "name": "", "args": ""}], [{}]]),
            json!([["a", "t", {}]]),
        ),
        (
            "arguments as an object",
            json!([[{"index": 0, "id": "a", "name": "t", "args": {"x": 1}}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "an empty object as a stand-in",
            json!([[{"index": 0, "id": "a", "name": "t", "args": {}}], [{"index": 0, "args": "{\"x\":"}], [{"index": 0, "args": "1}"}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "an empty object as the whole",
            json!([[{"index": 0, "id": "a", "name": "t", "args": {}}]]),
            json!([["a", "t", {}]]),
        ),
        (
            "the whole call twice",
            json!([[{"index": 0, "id": "a", "name": "t", "args": "{\"x\":"}], [{"index": 0, "args": "1}"}], [{"index": 0, "id": "a", "name": "t", "args": "{\"x\":1}"}]]),
            json!([["a", "t", {"x": 1}]]),
        ),
        (
            "every call numbered 0",
            json!([[{"index": 0, "id": "a", "name": "t", "args": "{\"x\":1}"}], [{"index": 0, "id": "b", "name": "t", "args": "{\"x\":2"}], [{"index": 0, "args": "}"}]]),
            json!([["a", "t", {"x": 1}], ["b", "t", {"x": 2}]]),
        ),
        (
            "the order of the numbers counts",
            json!([[{"index": 1, "id": "b", "name": "u"}], [{"index": 0, "id": "a", "name": "t"}]]),
            json!([["a", "t", {}], ["b", "u", {}]]),
        ),
        (
            "a name in pieces, and one that grows",
            json!([[{"index": 0, "id": "a", "name": "get_"}, {"index": 1, "id": "b", "name": "get"}], [{"index": 0, "name": "time"}, {"index": 1, "name": "get_x"}]]),
            json!([["a", "get_time", {}], ["b", "get_x", {}]]),
        ),
        (
            "an id of ours keeps clear of the provider's",
            json!([[{"index": 0, "id": "call_3_2", "name": "t"}, {"index": 1, "name": "u"}]]),
            json!([["call_3_2", "t", {}], ["call_3_2x", "u", {}]]),
        ),
        (
            "cut arguments stay cut",
            json!([[{"index": 0, "id": "a", "name": "t", "args": "{\"x\":\"li"}]]),
            json!([["a", "t", "{\"x\":\"li"]]),
        ),
    ] {
        assert_eq!(calls(&chunks).as_ref(), Ok(&expected), "{what}");
    }
}

#[test]
fn calls_that_make_no_sense_are_refused_and_never_guessed() {
    let many: Vec<_> =
        (0..=MAX_CALLS).map(|index| json!({"index": index, "id": index.to_string(), "name": "t"})).collect();
    let half = "x".repeat(MAX_ARGUMENT_BYTES / 2 + 1);
    for (chunks, expected) in [
        (json!([[{"index": 0, "id": "a", "args": "{}"}]]), AccumulateError::NoName(1)),
        (json!([[{"index": 0, "id": "a", "name": "null", "args": "{}"}]]), AccumulateError::NoName(1)),
        (
            json!([[{"index": 0, "name": "t", "args": "{"}], [{"index": 0, "name": "u", "args": "}"}]]),
            AccumulateError::TwoNames { number: 1, first: "t".into(), second: "u".into() },
        ),
        (
            json!([[{"id": "a", "name": "t", "args": "{"}, {"id": "b", "name": "u", "args": "{"}], [{"args": "}"}]]),
            AccumulateError::NoName(3),
        ),
        (json!([many]), AccumulateError::TooManyCalls),
        (
            json!([[{"index": 0, "name": "t", "args": half}], [{"index": 0, "args": half}]]),
            AccumulateError::ArgumentsTooLong(1),
        ),
    ] {
        assert_eq!(calls(&chunks), Err(expected));
    }
}

#[test]
fn parts_keep_their_order_and_the_token_goes_to_the_last_reasoning() {
    let mut accumulator = Accumulator::new(1, NameMap::default());
    let mut log = Log::default();
    let halves = ["\"B\\ud83d\"", "\"\\ude00\""]
        .map(|json| super::super::json::piece(super::super::json::document(json).unwrap()).unwrap());
    let [first, second] = halves;
    for fragment in [
        Fragment::Reasoning("think".into()),
        Fragment::Reasoning("ing".into()),
        Fragment::Text("A".into()),
        Fragment::Text("".into()),
        Fragment::Text(first),
        Fragment::Reasoning("again".into()),
        Fragment::Text(second),
    ] {
        accumulator.push(fragment, &mut log).unwrap();
    }
    let token = Some(ReasoningToken { wire: "w".into(), data: json!([1]) });
    let turn = accumulator.finish(token.clone(), &mut log).unwrap();
    let text = |text: &str| Part::Text { text: text.into() };
    assert_eq!(
        turn.content,
        [
            Part::Reasoning { text: "thinking".into(), token: None },
            text("AB"),
            Part::Reasoning { text: "again".into(), token },
            text("\u{1F600}"),
        ]
    );
    assert_eq!(log.0, ["reasoning think", "reasoning ing", "text A", "text B", "reasoning again", "text \u{1F600}"]);
}

#[test]
fn names_are_mapped_back_live_and_in_the_turn() {
    let names = NameMap::new(["fs.read"]);
    let wire = names.to_wire("fs.read");
    let mut accumulator = Accumulator::new(1, names);
    let mut log = Log::default();
    let call = entry(&json!({"index": 0, "id": "a", "name": wire, "args": "{}"}));
    accumulator.push(Fragment::Calls(vec![call]), &mut log).unwrap();
    assert_eq!(log.0, ["call 0 a fs.read {}"]);
    assert_eq!(accumulator.finish(None, &mut log).unwrap().tool_calls[0].name, "fs.read");
}

#[test]
fn the_calls_decide_what_the_finish_reason_means() {
    use FinishReason::*;
    for (said, called, expected) in [
        (Some(Stop), true, ToolCalls),
        (None, true, ToolCalls),
        (Some(Length), true, Length),
        (Some(ToolCalls), true, ToolCalls),
        (Some(Stop), false, Stop),
        (None, false, Unspecified),
        (Some(ToolCalls), false, Unspecified),
        (Some(ContentFilter), false, ContentFilter),
    ] {
        let mut accumulator = Accumulator::new(1, NameMap::default());
        let mut log = Log::default();
        if called {
            accumulator.push(Fragment::Calls(vec![entry(&json!({"index": 0, "name": "t"}))]), &mut log).unwrap();
        }
        if let Some(reason) = said {
            accumulator.push(Fragment::Finish(reason), &mut log).unwrap();
        }
        assert_eq!(accumulator.finish(None, &mut log).unwrap().finish, expected);
    }
}

fn any_entry() -> impl Strategy<Value = CallFragment> {
    let short =
        |values: &'static [&'static str]| prop::option::of(prop::sample::select(values).prop_map(str::to_owned));
    (
        prop::option::of(0u64..3),
        short(&["", "a", "b"]),
        short(&["", "null", "t", "u", "tu"]),
        prop_oneof![
            Just(ArgumentPiece::None),
            prop::sample::select(vec!["", "{", "}", "{}", "\"", "\\", "[", "x", "null"])
                .prop_map(|p| ArgumentPiece::Text(p.into())),
            prop::sample::select(vec!["{}", "{\"a\":1}", "[]", "3"]).prop_map(|v| ArgumentPiece::Value(v.into())),
        ],
    )
        .prop_map(|(index, id, name, arguments)| CallFragment { index, id, name, arguments })
}

proptest! {
    #[test]
    fn no_sequence_of_fragments_breaks_it(chunks in prop::collection::vec(prop::collection::vec(any_entry(), 0..4), 0..12)) {
        let mut accumulator = Accumulator::new(1, NameMap::default());
        let mut log = Log::default();
        let pushed = chunks.into_iter().try_for_each(|entries| accumulator.push(Fragment::Calls(entries), &mut log));
        if let Ok(turn) = pushed.and_then(|()| accumulator.finish(None, &mut log)) {
            for call in turn.tool_calls {
                prop_assert!(!call.id.is_empty() && !call.name.is_empty());
            }
        }
    }
}
