//! Tests of the rules on ends, errors and silence, with the chat completions wire.

use futures_util::stream;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::*;
use crate::domain::{Delta, Part};
use crate::provider::names::NameMap;
use crate::provider::openai_chat::ChatDecoder;

#[derive(Default)]
struct Texts(String);

impl DeltaSink for Texts {
    fn delta(&mut self, delta: Delta<'_>) {
        if let Delta::Text(text) = delta {
            self.0.push_str(text);
        }
    }
}

fn reader(content_type: Option<&str>) -> Reader<ChatDecoder> {
    Reader::new(content_type, ChatDecoder::default(), Accumulator::new(1, NameMap::default()))
}

/// Reads chunks as far as the response goes; with the text that streamed.
fn decode(content_type: Option<&str>, chunks: &[&[u8]]) -> (Result<ModelTurn, ModelFailure>, String) {
    let mut texts = Texts::default();
    let mut reader = reader(content_type);
    for chunk in chunks {
        match reader.push(chunk, &mut texts) {
            Ok(Progress::Done) => return (reader.done(&mut texts), texts.0),
            Ok(Progress::Reading | Progress::Finished) => {}
            Err(failure) => return (Err(failure), texts.0),
        }
    }
    (reader.end("the stream ended", &mut texts), texts.0)
}

fn chunk(delta: &Value, finish: Option<&str>) -> String {
    let chunk = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
    format!("data: {chunk}\n\n")
}

fn say(text: &str) -> String {
    chunk(&json!({ "content": text }), None)
}

fn failed(body: &str) -> (FailureClass, String) {
    let (result, _) = decode(Some("text/event-stream"), &[body.as_bytes()]);
    let failure = result.expect_err(body);
    (failure.class, failure.message)
}

const DONE: &str = "data: [DONE]\n\n";

#[test]
fn only_the_providers_word_ends_a_response() {
    let stop = chunk(&json!({}), Some("stop"));
    for (body, expected) in [
        (say("Hello.") + &stop + DONE, Ok(FinishReason::Stop)),
        (say("Hello.") + DONE, Ok(FinishReason::Unspecified)),
        (say("Hello.") + &stop, Ok(FinishReason::Stop)),
        (say("Hello.") + &stop + "data: [DONE]", Ok(FinishReason::Stop)),
        (say("Hello."), Err(FailureClass::Truncated)),
        (say("Hello.") + "data: {\"choices\":[", Err(FailureClass::Protocol)),
        (String::new(), Err(FailureClass::Truncated)),
        (": ping\n\n".to_owned(), Err(FailureClass::Truncated)),
        (chunk(&json!({"reasoning": "hm"}), None), Err(FailureClass::Truncated)),
    ] {
        let (turn, text) = decode(Some("text/event-stream; charset=utf-8"), &[body.as_bytes()]);
        assert_eq!(turn.as_ref().map(|turn| turn.finish).map_err(|failure| failure.class), expected, "{body}");
        if let Ok(turn) = turn {
            assert_eq!((turn.text(), text), ("Hello.".to_owned(), "Hello.".to_owned()));
        }
    }
}

#[test]
fn an_answer_without_text_and_calls_is_none() {
    for (delta, finish, class, message) in [
        (json!({}), "stop", FailureClass::Empty, "without text and without a tool call"),
        (json!({"content": " \n"}), "stop", FailureClass::Empty, "without text"),
        (json!({"reasoning": "hm"}), "stop", FailureClass::Empty, "without text"),
        (json!({"tool_calls": []}), "tool_calls", FailureClass::Empty, "without text"),
        (json!({"reasoning": "hm"}), "length", FailureClass::Empty, "the output limit was reached"),
        (json!({}), "content_filter", FailureClass::Refused, "content filter"),
        (json!({"refusal": "I cannot."}), "stop", FailureClass::Refused, "the model declined: I cannot."),
    ] {
        let (got, words) = failed(&(chunk(&delta, Some(finish)) + DONE));
        assert!(got == class && words.contains(message), "{delta} {finish}: {got:?} {words}");
    }
}

#[test]
fn errors_are_told_with_the_providers_words() {
    for (body, class, message) in [
        (
            "data: Number of choices must be greater than 0.\n\n",
            FailureClass::Protocol,
            "Number of choices must be greater than 0.",
        ),
        ("error: {\"message\":\"worker lost\"}\n\n", FailureClass::Unavailable, "worker lost"),
        ("{\"error\":{\"message\":\"worker lost\",\"code\":429}}\n", FailureClass::RateLimited, "worker lost"),
        ("event: error\ndata: {\"message\":\"worker lost\"}\n\n", FailureClass::Unavailable, "worker lost"),
        ("upstream connect error\n", FailureClass::Truncated, "it held the line `upstream connect error`"),
        (
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":-1}}\n\n",
            FailureClass::Protocol,
            "usage field `prompt_tokens` is -1",
        ),
    ] {
        let (got, words) = failed(body);
        assert!(got == class && words.contains(message), "{body}: {got:?} {words}");
    }
    let long = "x".repeat(sse::MAX_LINE_BYTES + 1);
    assert_eq!(failed(&long), (FailureClass::Protocol, sse::SseError::LineTooLong.to_string()));
}

#[test]
fn what_came_before_an_error_was_streamed() {
    let body = say("Partly")
        + "data: {\"choices\":[{\"delta\":{\"content\":\" more\"},\"finish_reason\":\"error\"}]}\n\n"
        + DONE;
    let (result, text) = decode(Some("text/event-stream"), &[body.as_bytes()]);
    assert_eq!((result.unwrap_err().class, text.as_str()), (FailureClass::Unavailable, "Partly more"));
}

#[test]
fn a_document_is_read_whatever_its_label() {
    let answer =
        json!({"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]}).to_string();
    for label in [Some("application/json"), Some("application/json; charset=utf-8"), Some("text/plain"), None] {
        let (turn, _) = decode(label, &[b"\n", answer.as_bytes()]);
        assert_eq!(turn.unwrap().text(), "Hi");
        let (cut, _) = decode(label, &[&answer.as_bytes()[..20]]);
        assert_eq!(cut.unwrap_err().class, FailureClass::Truncated);
        let (events, _) = decode(label, &[(say("Hi") + DONE).as_bytes()]);
        assert_eq!(events.unwrap().text(), "Hi");
    }
    let (error, _) =
        decode(Some("application/json"), &[br#"{"error":{"message":"no","code":"context_length_exceeded"}}"#]);
    assert_eq!(error.unwrap_err().class, FailureClass::ContextTooLong);
    let (odd, _) = decode(Some("application/json"), &[br#"{"id":1}"#]);
    assert_eq!(odd.unwrap_err().class, FailureClass::Protocol);
}

/// A body that says each text after a wait, then goes on as `rest`.
fn timed(pieces: Vec<(u64, String)>, rest: Rest) -> impl Stream<Item = Result<Bytes, String>> + Unpin {
    let said = stream::iter(pieces).then(|(wait, text)| async move {
        sleep(Duration::from_millis(wait)).await;
        Ok(Bytes::from(text))
    });
    let rest = match rest {
        Rest::Silence => stream::pending().left_stream(),
        Rest::Reset => stream::iter([Err("connection reset".to_owned())]).right_stream(),
    };
    Box::pin(said.chain(rest))
}

enum Rest {
    Silence,
    Reset,
}

const IDLE: Duration = Duration::from_secs(30);

async fn read_timed(pieces: Vec<(u64, String)>, rest: Rest) -> (Result<String, ModelFailure>, u64) {
    let start = Instant::now();
    let result = read(timed(pieces, rest), IDLE, reader(Some("text/event-stream")), &mut Texts::default()).await;
    (result.map(|turn| turn.text()), start.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn silence_is_measured_between_bytes_and_comments_are_bytes() {
    let (result, seconds) = read_timed(vec![], Rest::Silence).await;
    assert_eq!((result.unwrap_err().class, seconds), (FailureClass::TimedOut, 30));

    let (result, seconds) = read_timed(vec![(29_000, say("a")), (29_000, ": ping\n\n".into())], Rest::Silence).await;
    let failure = result.unwrap_err();
    assert_eq!(
        (failure.class, failure.message.as_str(), seconds),
        (FailureClass::TimedOut, "sent nothing for 30000 ms", 88)
    );

    let mut pieces = vec![(29_000, ": ping\n".to_owned()); 10];
    pieces.push((29_000, say("done") + DONE));
    let (result, seconds) = read_timed(pieces, Rest::Silence).await;
    assert_eq!((result.unwrap().as_str(), seconds), ("done", 319));
}

#[tokio::test(start_paused = true)]
async fn the_end_mark_ends_the_read_and_a_finish_reason_soon_after() {
    let stop = chunk(&json!({}), Some("stop"));
    let (result, seconds) = read_timed(vec![(0, say("a") + &stop + DONE)], Rest::Silence).await;
    assert_eq!((result.unwrap().as_str(), seconds), ("a", 0));
    let (result, seconds) = read_timed(vec![(0, say("a") + &stop)], Rest::Silence).await;
    assert_eq!((result.unwrap().as_str(), seconds), ("a", 5));
    let mut pings = vec![(0, say("a") + &stop)];
    pings.extend(vec![(1_000, ": ping\n\n".to_owned()); 1_000]);
    let (result, seconds) = read_timed(pings, Rest::Silence).await;
    assert_eq!((result.unwrap().as_str(), seconds), ("a", 5), "comments are no reason to wait longer");
    let (result, _) = read_timed(vec![(0, say("a") + &stop)], Rest::Reset).await;
    assert_eq!(result.unwrap(), "a");
    let (result, _) = read_timed(vec![(0, say("a"))], Rest::Reset).await;
    let failure = result.unwrap_err();
    assert_eq!(failure.class, FailureClass::Truncated);
    assert_eq!(failure.message, "the response broke off before the model had finished: connection reset");
}

/// Streams that a provider could send, with what they say.
fn valid_stream() -> impl Strategy<Value = (String, String, Vec<Value>)> {
    let text = prop::collection::vec("[a-zé😀\\n\"\\\\]{0,6}", 0..5);
    let calls =
        prop::collection::vec(("[a-z]{1,5}", prop::collection::btree_map("[a-z]{1,3}", "\\PC{0,5}", 0..3)), 0..3);
    let breaks = prop::sample::select(vec!["\n", "\r\n", "\r"]);
    (text, calls, breaks, any::<bool>(), 1usize..6).prop_map(|(texts, calls, line_end, keep_alive, cut)| {
        let mut body = String::new();
        let mut expected = Vec::new();
        for text in &texts {
            body.push_str(&say(text));
            if keep_alive {
                body.push_str(": ping\n\n");
            }
        }
        for (index, (name, arguments)) in calls.iter().enumerate() {
            let arguments = json!(arguments);
            let id = format!("id{index}");
            body.push_str(&chunk(
                &json!({"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": ""}}]}),
                None,
            ));
            let raw: Vec<char> = arguments.to_string().chars().collect();
            for piece in raw.chunks(cut) {
                let piece: String = piece.iter().collect();
                body.push_str(&chunk(
                    &json!({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}),
                    None,
                ));
            }
            expected.push(json!({"id": id, "name": name, "arguments": arguments}));
        }
        body.push_str(&chunk(&json!({}), Some("stop")));
        body.push_str("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\n");
        body.push_str(DONE);
        (body.replace('\n', line_end), texts.concat(), expected)
    })
}

fn cut<'a>(mut rest: &'a [u8], sizes: &[usize]) -> Vec<&'a [u8]> {
    let mut chunks = Vec::new();
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (head, tail) = rest.split_at((*size).min(rest.len()));
        chunks.push(head);
        rest = tail;
    }
    chunks
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1usize..40, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_chunking_of_a_valid_stream_gives_the_turn_it_says((body, text, calls) in valid_stream(), sizes in sizes()) {
        for chunks in [cut(body.as_bytes(), &sizes), cut(body.as_bytes(), &[1]), vec![body.as_bytes()]] {
            let (result, streamed) = decode(Some("text/event-stream"), &chunks);
            if text.trim().is_empty() && calls.is_empty() {
                prop_assert_eq!(result.map_err(|failure| failure.class), Err(FailureClass::Empty));
                continue;
            }
            let turn = result.unwrap();
            prop_assert_eq!(&turn.text(), &text);
            prop_assert_eq!(&streamed, &text);
            prop_assert_eq!(serde_json::to_value(&turn.tool_calls).unwrap(), json!(calls));
            prop_assert_eq!(turn.finish, if calls.is_empty() { FinishReason::Stop } else { FinishReason::ToolCalls });
            prop_assert_eq!(turn.usage.map(|usage| (usage.input_tokens, usage.output_tokens)), Some((7, 3)));
        }
    }

    #[test]
    fn any_chunking_of_any_bytes_gives_the_same_result(
        (body, _, _) in valid_stream(), noise in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), end in any::<prop::sample::Index>(), sizes in sizes(), label in any::<bool>(),
    ) {
        let mut bytes = body.into_bytes();
        for (at, byte) in noise {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        let label = label.then_some("text/event-stream");
        let whole = decode(label, &[&bytes]);
        prop_assert_eq!(&decode(label, &cut(&bytes, &sizes)), &whole);
        prop_assert_eq!(&decode(label, &cut(&bytes, &[1])), &whole);
    }

    #[test]
    fn garbage_is_a_failure_and_not_a_crash(bytes in prop::collection::vec(any::<u8>(), 0..400), sizes in sizes()) {
        let whole = decode(None, &[&bytes]);
        prop_assert_eq!(&decode(None, &cut(&bytes, &sizes)), &whole);
        prop_assert!(whole.0.is_err());
    }
}

/// Nothing of a response makes this process keep more than the bound, whatever it is made of.
#[test]
fn everything_a_response_adds_counts_once_against_one_bound() {
    const BOUND: usize = 20_000;
    let x = "x".repeat(100);
    let call = |index: usize, entry: Value| {
        let mut entry = entry;
        entry["index"] = json!(index);
        json!({"tool_calls": [entry]})
    };
    type Deltas<'a> = &'a dyn Fn(usize) -> Value;
    let kinds: [(&str, Deltas<'_>, usize); 9] = [
        ("text", &|_| json!({"content": x}), 190),
        ("reasoning", &|_| json!({"reasoning": x}), 190),
        ("parts", &|n| if n % 2 == 0 { json!({"content": "a"}) } else { json!({"reasoning": "a"}) }, 290),
        ("arguments of one call", &|_| call(0, json!({"function": {"name": "t", "arguments": x}})), 190),
        ("arguments of many", &|n| call(n % 100, json!({"function": {"name": "t", "arguments": x}})), 120),
        ("names", &|_| call(0, json!({"function": {"name": x}})), 190),
        ("refusal", &|_| json!({"refusal": x}), 190),
        ("details", &|_| json!({"reasoning_details": [{"data": x}]}), 20),
        ("one detail", &|_| json!({"reasoning_details": [{"index": 0, "type": "e", "signature": x}]}), 20),
    ];
    for (kind, delta, at_least) in kinds {
        let accumulator = Accumulator::new(1, NameMap::default()).bounded(BOUND);
        let mut reader = Reader::new(Some("text/event-stream"), ChatDecoder::default(), accumulator);
        let mut push = |n| reader.push(chunk(&delta(n), None).as_bytes(), &mut Texts::default());
        let (taken, failure) =
            (0..1_000).find_map(|n| Some((n, push(n).err()?))).unwrap_or_else(|| panic!("{kind} has no bound"));
        assert_eq!(
            (failure.class, failure.message.as_str()),
            (FailureClass::Protocol, "the response is larger than 20000 bytes"),
            "{kind}"
        );
        assert!((at_least..=400).contains(&taken), "{kind}: {taken} chunks");
    }
    // Kinds share it.
    let accumulator = Accumulator::new(1, NameMap::default()).bounded(BOUND);
    let mut reader = Reader::new(None, ChatDecoder::default(), accumulator);
    let all = json!({"content": "x".repeat(9_000), "refusal": "x".repeat(9_000), "reasoning": "x".repeat(3_000)});
    let body = json!({"choices": [{"message": all, "finish_reason": "stop"}]}).to_string();
    reader.push(body.as_bytes(), &mut Texts::default()).unwrap();
    let failure = reader.end("the stream ended", &mut Texts::default()).unwrap_err();
    assert_eq!(failure.message, "the response is larger than 20000 bytes");
}

#[test]
fn the_usual_bound_is_eight_mebibytes() {
    let piece = say(&"x".repeat(512 * 1024));
    let mut reader = reader(Some("text/event-stream"));
    let mut push = || reader.push(piece.as_bytes(), &mut Texts::default());
    for _ in 0..15 {
        push().unwrap();
    }
    assert_eq!(push().unwrap_err().message, "the response is larger than 8388608 bytes");
}

/// A fragment is compared with every numbered entry, so their number is bounded.
#[test]
fn reasoning_details_that_are_numbered_without_end_are_refused() {
    let details: Vec<Value> = (0..10_000).map(|index| json!({"index": index})).collect();
    let body = chunk(&json!({"reasoning_details": details}), None);
    let (class, message) = failed(&body);
    assert_eq!(
        (class, message.as_str()),
        (FailureClass::Protocol, "the response has more than 1024 numbered reasoning details")
    );
}

#[test]
fn parts_of_the_turn_are_whole() {
    let body = chunk(&json!({"reasoning_content": "hm", "reasoning": "hm"}), None) + &say("Hi") + DONE;
    let (turn, _) = decode(Some("text/event-stream"), &[body.as_bytes()]);
    assert_eq!(
        turn.unwrap().content,
        [Part::Reasoning { text: "hm".into(), token: None }, Part::Text { text: "Hi".into() }]
    );
}
