//! What was written is read back: events, transcripts, lists.

use hames::domain::{EventKind, InboxItem, Message, OutcomeKind, Part, Run, RunStatusName, TenantId};
use hames::store::{Erasure, NewRun, Post, RunFilter, StepCommit, StoreError};

use super::{Database, after, create, events, numbered, run, stored};
use crate::store::sample::{
    asking, at, completed, ended, id, key, labels, later, mark, queued, result, running, said, step, tenant,
};

pub(crate) async fn another_tenant_sees_nothing<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    create(&store, &new).await;
    for (who, what) in [(TenantId::new("other"), id(1)), (TenantId::new(""), id(1)), (tenant(), id(2))] {
        assert_eq!(store.run(&who, what).await.unwrap(), None);
        assert_eq!(store.events_after(&who, what, 0, 10).await.unwrap(), []);
        assert_eq!(store.transcript(&who, what).await.unwrap(), None);
        assert_eq!(store.load(&who, what).await.unwrap(), None);
        assert_eq!(store.request_cancel(&who, what, at(9)).await.unwrap(), None);
        assert_eq!(store.erase(&who, what, at(9)).await.unwrap(), Erasure::Unknown);
        assert!(!store.is_erased(&who, what).await.unwrap());
        let item = InboxItem::Message { content: Vec::new() };
        assert_eq!(store.post(Post { tenant: who.clone(), run: what, item, key: None }).await.unwrap(), None);
    }
    assert_eq!(store.list_runs(&TenantId::new("other"), &RunFilter::default(), None, 10).await.unwrap(), []);
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
}

pub(crate) async fn events_are_read_in_pages<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let (new, other) = (running(1), running(2));
    create(&store, &other).await;
    create(&store, &new).await;
    // More than fit one statement.
    let commit = step(&new, 1, (1..=100).map(mark).collect());
    let returned = store.commit_step(commit).await.unwrap().events;
    let log = events(&store, &new).await;
    assert_eq!(log[2..], returned[..]);
    assert_eq!(log.iter().map(|event| event.seq).collect::<Vec<_>>(), (1..=102).collect::<Vec<_>>());
    for (after, limit, expected) in [
        (0, 5, &log[..5]),
        (5, 5, &log[5..10]),
        (100, 5, &log[100..]),
        (102, 5, &[]),
        (103, 5, &[]),
        (u64::MAX, 5, &[]),
        (7, 0, &[]),
    ] {
        assert_eq!(store.events_after(&tenant(), id(1), after, limit).await.unwrap(), expected, "{after} {limit}");
    }
}

/// A NUL escaped by replacing text would break the literal six characters (osbuild/osbuild-composer#4779).
pub(crate) async fn any_text_reads_back_byte_for_byte<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let text = "\\u0000 \u{0} \\\u{0}\\ \"\u{7f}\u{1}\r\n\u{2028}\u{fffd}\u{ffff}😀é\u{301}\u{10ffff}' OR 1=1; --";
    let mut new = running(1);
    new.run.agent = text.to_owned();
    new.run.model = format!("{text}/{text}").parse().unwrap();
    new.run.thread = Some(text.to_owned());
    new.key = Some(key(text, text, 1));
    new.run.tenant = TenantId::new(text);
    new.run.metadata = labels(&[(text, text), ("", ""), ("%", "_")]);
    new.spec.metadata = new.run.metadata.clone();
    new.spec.input = vec![Message::user(text)];
    new.state = Some(text.to_owned());
    create(&store, &new).await;
    let kept = store.kept_answer(&new.run.tenant, text, at(2)).await.unwrap().unwrap();
    assert_eq!((kept.fingerprint.as_str(), kept.run), (text, id(1)));
    assert!(matches!(store.create_run(new.clone()).await, Err(StoreError::KeyTaken(again)) if again == kept));
    let item = InboxItem::Message { content: vec![Part::Text { text: text.to_owned() }] };
    let post = Post { tenant: new.run.tenant.clone(), run: id(1), item: item.clone(), key: None };
    store.post(post).await.unwrap().unwrap();
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), [(1, item)]);
    let bodies = vec![said(asking(text, &["a"])), ended("a", text)];
    let returned =
        store.commit_step(StepCommit { state: Some(text.to_owned()), ..step(&new, 1, bodies.clone()) }).await;
    assert_eq!(returned.unwrap().events, numbered(&new, 3, at(5_000), &bodies));
    assert_eq!(events(&store, &new).await[2..], numbered(&new, 3, at(5_000), &bodies));
    let transcript = vec![Message::user(text), asking(text, &["a"]), result("a", text)];
    assert_eq!(store.transcript(&new.run.tenant, id(1)).await.unwrap(), Some(transcript.clone()));

    let expected = after(stored(&new), &step(&new, 1, bodies));
    assert_eq!(run(&store, &new).await, Some(expected.clone()));
    for pair in [(text, text), ("", ""), ("%", "_")] {
        let filter = RunFilter {
            agent: Some(text.to_owned()),
            thread: Some(text.to_owned()),
            metadata: vec![(pair.0.to_owned(), pair.1.to_owned())],
            ..RunFilter::default()
        };
        assert_eq!(store.list_runs(&new.run.tenant, &filter, None, 9).await.unwrap(), std::slice::from_ref(&expected));
    }
    let state = store.load(&new.run.tenant, id(1)).await.unwrap().unwrap().state;
    assert_eq!(state.as_deref(), Some(text));
    let end = store.commit_step(StepCommit { status: completed(), inbox_read: 1, ..later(&new, 1, 4, vec![]) }).await;
    assert_eq!(end.unwrap().events, []);
    assert_eq!(run(&store, &new).await.map(|run| run.status), Some(completed()));
}

pub(crate) async fn a_huge_result_reads_back<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let content = format!("{}ERROR: real cause", "0123456789\u{0}é\n".repeat(300_000));
    let bodies = vec![said(asking("x", &["a"])), ended("a", &content)];
    let (large, small) = tokio::join!(store.commit_step(step(&new, 1, bodies.clone())), store.create_run(queued(2)),);
    assert_eq!(large.unwrap().events, numbered(&new, 3, at(5_000), &bodies));
    small.unwrap();
    assert_eq!(events(&store, &new).await[2..], numbered(&new, 3, at(5_000), &bodies));
    let transcript = store.transcript(&tenant(), id(1)).await.unwrap().unwrap();
    assert_eq!(transcript[1..], [asking("x", &["a"]), result("a", &content)]);
}

/// One turn with text and calls must not need two entries under one key (google/adk-python#297), and deltas are
/// no messages (google/adk-python#7035).
pub(crate) async fn a_message_with_text_and_calls_is_one_event<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let turn = asking("I look at both.", &["a", "b"]);
    for (known, bodies) in
        [(2, vec![mark(1), said(turn.clone())]), (4, vec![ended("a", "1")]), (5, vec![ended("b", "2")])]
    {
        store.commit_step(later(&new, 1, known, bodies)).await.unwrap();
    }
    let kinds: Vec<EventKind> = events(&store, &new).await.iter().map(|event| event.body.kind).collect();
    let message = |kind: &&EventKind| **kind == EventKind::Message;
    assert_eq!(kinds.iter().filter(message).count(), 1);
    let transcript = store.transcript(&tenant(), id(1)).await.unwrap().unwrap();
    assert_eq!(transcript, [Message::user("task 1"), turn, result("a", "1"), result("b", "2")]);
}

pub(crate) async fn results_are_read_in_the_order_of_the_calls<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let bodies = vec![
        said(asking("", &["a", "b", "c"])),
        ended("c", "3"),
        ended("a", "1"),
        ended("b", "2"),
        mark(2),
        said(asking("", &["a", "z"])),
        ended("z", "5"),
    ];
    store.commit_step(step(&new, 1, bodies)).await.unwrap();
    let logged = vec![
        asking("", &["a", "b", "c"]),
        result("a", "1"),
        result("b", "2"),
        result("c", "3"),
        asking("", &["a", "z"]),
        result("z", "5"),
    ];
    let whole: Vec<Message> = new.spec.input.iter().cloned().chain(logged.clone()).collect();
    assert_eq!(store.transcript(&tenant(), id(1)).await.unwrap(), Some(whole));
    let claim = store.reclaim(&tenant(), id(1)).await.unwrap();
    assert_eq!(claim.map(|claim| claim.transcript), Some(logged));
    assert!(matches!(result("a", "1"), Message::Tool(message) if message.outcome == OutcomeKind::Result));
}

pub(crate) async fn a_list_is_newest_first_and_in_pages<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for number in [2, 5, 1, 4, 3] {
        create(&store, &queued(number)).await;
    }
    let mut foreign = queued(6);
    foreign.run.tenant = TenantId::new("other");
    create(&store, &foreign).await;
    let all: Vec<Run> = [5, 4, 3, 2, 1].map(|number| stored(&queued(number))).into();
    for (before, limit, expected) in [
        (None, 10, &all[..]),
        (None, 5, &all[..]),
        (None, 2, &all[..2]),
        (Some(id(4)), 2, &all[2..4]),
        (Some(id(2)), 2, &all[4..]),
        (Some(id(1)), 2, &[]),
        (Some(id(99)), 1, &all[..1]),
        (None, 0, &[]),
    ] {
        let listed = store.list_runs(&tenant(), &RunFilter::default(), before, limit).await.unwrap();
        assert_eq!(listed, expected, "{before:?} {limit}");
    }
}

pub(crate) async fn a_list_can_be_filtered<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let labelled = |mut new: NewRun, agent: &str, metadata: &[(&str, &str)]| {
        new.run.agent = agent.to_owned();
        new.run.metadata = labels(metadata);
        new
    };
    let runs = [
        labelled(queued(1), "coder", &[("team", "blue"), ("prio", "high")]),
        labelled(running(2), "coder", &[("team", "red"), ("prio", "high")]),
        labelled(running(3), "writer", &[("team", "blue")]),
        labelled(running(4), "writer", &[]),
    ];
    for new in &runs {
        create(&store, new).await;
    }
    let last = StepCommit { status: completed(), ..step(&runs[3], 1, vec![]) };
    store.commit_step(last).await.unwrap();
    let filter = |status: &[RunStatusName], agent: Option<&str>, metadata: &[(&str, &str)]| RunFilter {
        status: status.to_vec(),
        agent: agent.map(str::to_owned),
        thread: None,
        metadata: metadata.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect(),
    };
    for (filter, expected) in [
        (filter(&[RunStatusName::Queued], None, &[]), &[1][..]),
        (filter(&[RunStatusName::Queued, RunStatusName::Completed], None, &[]), &[4, 1]),
        (filter(&RunStatusName::ALL, None, &[]), &[4, 3, 2, 1]),
        (filter(&[RunStatusName::Aborted], None, &[]), &[]),
        (filter(&[], Some("coder"), &[]), &[2, 1]),
        (filter(&[], Some("Coder"), &[]), &[]),
        (filter(&[], None, &[("team", "blue")]), &[3, 1]),
        (filter(&[], None, &[("team", "blue"), ("prio", "high")]), &[1]),
        (filter(&[], None, &[("team", "blue"), ("team", "red")]), &[]),
        (filter(&[], None, &[("blue", "team")]), &[]),
        (filter(&[RunStatusName::Running], Some("writer"), &[("team", "blue")]), &[3]),
    ] {
        let listed = store.list_runs(&tenant(), &filter, None, 10).await.unwrap();
        let ids: Vec<_> = listed.iter().map(|run| run.id).collect();
        assert_eq!(ids, expected.iter().map(|&number| id(number)).collect::<Vec<_>>(), "{filter:?}");
    }
    let blue = filter(&[], None, &[("team", "blue")]);
    let page = store.list_runs(&tenant(), &blue, Some(id(3)), 10).await.unwrap();
    assert_eq!(page, [stored(&runs[0])]);
    assert_eq!(store.list_runs(&TenantId::new("other"), &blue, None, 10).await.unwrap(), []);
}
