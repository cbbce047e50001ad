//! Selection on made-up conversations: what fits, what must fit, and that rounds stay whole.

use proptest::prelude::*;

use super::*;
use crate::domain::{Arguments, AssistantMessage, OutcomeKind, Part, ToolCall, ToolMessage};

fn round(number: usize, calls: usize, size: usize) -> Vec<Message> {
    let id = |call: usize| format!("c{number}_{call}");
    let assistant = Message::Assistant(AssistantMessage {
        content: vec![Part::Text { text: "x".repeat(size) }],
        tool_calls: (0..calls)
            .map(|call| ToolCall { id: id(call), name: "t".into(), arguments: Arguments::parse("") })
            .collect(),
        incomplete: false,
    });
    let results = (0..calls).map(|call| {
        Message::Tool(ToolMessage {
            call_id: id(call),
            name: "t".into(),
            content: "y".repeat(size),
            outcome: OutcomeKind::Result,
            is_error: crate::domain::ErrorMark,
        })
    });
    std::iter::once(assistant).chain(results).collect()
}

fn conversation(rounds: &[(usize, usize, bool)]) -> Transcript {
    let mut messages = vec![Message::user("the task")];
    for (number, (calls, size, steered)) in rounds.iter().enumerate() {
        messages.extend(round(number, *calls, *size));
        if *steered {
            messages.push(Message::user("also this"));
        }
    }
    Transcript::from_messages(messages).unwrap()
}

#[test]
fn everything_is_kept_while_it_fits() {
    let transcript = conversation(&[(1, 10, false), (3, 10, false)]);
    let selection = select(&transcript, 0, 10_000).unwrap();
    assert_eq!((selection.from, selection.anchor, selection.dropped), (0, None, 0));
    assert_eq!(selection.messages(&transcript).len(), transcript.len());
}

// n8n-io/n8n#34385: the border of the window fell inside a group, and some of its results lost their call.
#[test]
fn a_group_of_parallel_results_is_dropped_as_a_whole() {
    let transcript = conversation(&[(3, 400, false), (1, 40, false)]);
    let whole = select(&transcript, 0, 10_000).unwrap().tokens;
    let selection = select(&transcript, 0, whole - 1).unwrap();
    assert_eq!((selection.from, selection.anchor, selection.dropped), (5, Some(0), 4));
    let kept = selection.messages(&transcript);
    assert_eq!(kept.len(), 3);
    assert_eq!(Transcript::from_messages(kept.iter().map(|m| (**m).clone())).map(|t| t.len()), Ok(3));
}

#[test]
fn the_newest_round_must_fit() {
    let transcript = conversation(&[(1, 10, false), (1, 4_000, false)]);
    let error = select(&transcript, 100, 500).unwrap_err();
    assert!(error.needed > 500 && error.room == 500, "{error}");
    let short = Transcript::from_messages([Message::user("x".repeat(4_000))]).unwrap();
    assert!(select(&short, 0, 500).is_err());
}

proptest! {
    #[test]
    fn selections_fit_keep_rounds_whole_and_keep_all_that_fits(
        rounds in prop::collection::vec((0_usize..4, 0_usize..300, any::<bool>()), 0..12),
        head in 0_u64..200,
        room in 1_u64..2_000,
    ) {
        let transcript = conversation(&rounds);
        match select(&transcript, head, room) {
            Ok(selection) => {
                prop_assert!(selection.tokens <= room);
                let kept = selection.messages(&transcript);
                // Well formed, so no round was split.
                let again = Transcript::from_messages(kept.iter().map(|message| (**message).clone()));
                prop_assert!(again.is_ok(), "{again:?}");
                let cost: u64 = again.unwrap().entries().iter().map(|entry| entry.tokens).sum();
                prop_assert_eq!(cost + head, selection.tokens);
                prop_assert_eq!(&kept[0], transcript.messages().next().unwrap());
                prop_assert_eq!(kept.last(), transcript.messages().next_back());
                prop_assert_eq!(kept.len() + selection.dropped, transcript.len());
                // One more unit would not have fitted.
                let next = transcript.units().iter().rev().find(|unit| unit.range.end == selection.from);
                if let Some(next) = next && selection.anchor.is_some_and(|anchor| anchor != next.range.start) {
                    prop_assert!(selection.tokens + next.tokens > room);
                }
            }
            Err(limit) => {
                let newest = transcript.units().last().unwrap();
                let first = &transcript.units()[0];
                let least = head + first.tokens + if transcript.units().len() > 1 { newest.tokens } else { 0 };
                prop_assert!(least > room && limit.needed == least, "{} {}", least, limit);
            }
        }
    }
}
