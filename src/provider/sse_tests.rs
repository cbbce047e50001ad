//! Tests of the event stream decoder.

use proptest::prelude::*;

use super::*;

fn event(data: &str) -> Frame {
    named("", data, "")
}

fn named(name: &str, data: &str, id: &str) -> Frame {
    Frame::Event(Event { name: name.into(), data: data.into(), id: id.into() })
}

fn decode(chunks: &[&[u8]]) -> Result<Vec<Frame>, SseError> {
    let (mut decoder, mut out) = (Decoder::default(), Vec::new());
    for chunk in chunks {
        decoder.push(chunk, &mut out)?;
    }
    decoder.finish(&mut out)?;
    Ok(out)
}

#[test]
fn lines_fields_and_dispatch_follow_the_standard() {
    for (text, expected) in [
        ("data: a\n\n", vec![event("a")]),
        ("data:a\n\ndata:  b\n\n", vec![event("a"), event(" b")]),
        ("data: a\ndata: b\n\n", vec![event("a\nb")]),
        ("data\ndata\n\n", vec![event("\n")]),
        ("data:\n\ndata\n\n", vec![]),
        ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", vec![event("a"), event("b"), event("c")]),
        ("\u{FEFF}data: a\n\n\u{FEFF}data: b\n\n", vec![event("a"), Frame::Stray("\u{FEFF}data: b".into())]),
        (": hi\n\n:\n\n", vec![Frame::Comment, Frame::Comment]),
        ("id: 1\ndata: a\n\n: ping\n\ndata: b\n\n", vec![named("", "a", "1"), Frame::Comment, named("", "b", "1")]),
        ("id: 1\nid\ndata: a\n\n", vec![event("a")]),
        ("id: 1\nid: 2\0\ndata: a\n\n", vec![named("", "a", "1")]),
        ("event: error\ndata: a\n\ndata: b\n\n", vec![named("error", "a", ""), event("b")]),
        ("event: lost\n\ndata: b\n\n", vec![event("b")]),
        (
            "error: no\n{\"error\":1}\ndatax: y\n\n",
            ["error: no", "{\"error\":1}", "datax: y"].map(|l| Frame::Stray(l.into())).into(),
        ),
        ("data: [DONE]", vec![event("[DONE]")]),
        ("data: a\ndata: b\n", vec![event("a\nb")]),
    ] {
        assert_eq!(decode(&[text.as_bytes()]).unwrap(), expected, "{text:?}");
    }
}

#[test]
fn a_reconnection_time_is_known_and_says_nothing() {
    assert_eq!(decode(&[b"retry: 1500\nretry: x\nretry\ndata: a\n\n"]).unwrap(), [event("a")]);
}

#[test]
fn a_character_cut_between_reads_is_whole_and_bad_bytes_are_replaced() {
    assert_eq!(decode(&[b"data: \xF0\x9F", b"\x98\x80\n\n"]).unwrap(), [event("\u{1F600}")]);
    assert_eq!(decode(&[b"data: a\xFFb\n\n"]).unwrap(), [event("a\u{FFFD}b")]);
}

#[test]
fn lines_and_events_are_bounded() {
    let long = vec![b'x'; MAX_LINE_BYTES + 1];
    assert_eq!(decode(&[&long]), Err(SseError::LineTooLong));
    assert_eq!(decode(&long.chunks(1000).collect::<Vec<_>>()), Err(SseError::LineTooLong));
    let line = format!("data: {}\n", "x".repeat(MAX_LINE_BYTES - 6));
    assert_eq!(decode(&[line.as_bytes(); 5]), Err(SseError::EventTooLarge));
    assert_eq!(decode(&[line.as_bytes()]).unwrap().len(), 1);
}

fn stream() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        3 => prop::sample::select(vec![
            "\n", "\r", "\r\n", "\n\n", "data:", "data: ", "data", ": c", "id: 7", "event: e", "retry: 9", "{}", "é😀", "\u{FEFF}", "error: x",
        ]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..6),
    ];
    prop::collection::vec(token, 0..40).prop_map(|tokens| tokens.concat())
}

proptest! {
    #[test]
    fn any_chunking_gives_the_same_frames(bytes in stream(), sizes in prop::collection::vec(1usize..9, 1..60)) {
        let whole = decode(&[&bytes]).unwrap();
        let (mut chunks, mut rest) = (Vec::new(), bytes.as_slice());
        for size in sizes.iter().cycle() {
            if rest.is_empty() { break; }
            let (head, tail) = rest.split_at((*size).min(rest.len()));
            chunks.push(head);
            rest = tail;
        }
        prop_assert_eq!(decode(&chunks).unwrap(), whole);
    }
}
