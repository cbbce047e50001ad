//! What is said to a run while it is active.

use hames::domain::{InboxItem, Limits, Part, Run};
use hames::store::{NewRun, Post, RunFilter, StepCommit, StoreError};

use super::{Database, create, run, stored};
use crate::store::sample::{aborted, at, completed, id, labels, later, mark, queued, running, step, tenant};

pub(super) fn message(text: &str) -> InboxItem {
    InboxItem::Message { content: vec![Part::Text { text: text.to_owned() }] }
}

pub(super) fn post(new: &NewRun, item: InboxItem) -> Post {
    Post { tenant: new.run.tenant.clone(), run: new.run.id, item, key: None }
}

pub(crate) async fn an_inbox_keeps_its_order_until_it_is_read<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let items: Vec<_> = (1..=5_u64).map(|n| (n, message(&format!("no. {n}")))).collect();
    for (number, item) in &items {
        assert_eq!(store.post(post(&new, item.clone())).await.unwrap(), Some(stored(&new)));
        assert_eq!(store.load(&tenant(), id(1)).await.unwrap().unwrap().inbox, *number);
    }
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), items);
    assert_eq!(store.inbox(id(1), 3).await.unwrap(), items[3..]);
    assert_eq!(store.inbox(id(1), 5).await.unwrap(), []);
    assert_eq!(store.inbox(id(2), 0).await.unwrap(), []);
    let told = store.commit_step(StepCommit { inbox_read: 2, ..step(&new, 1, vec![mark(1)]) }).await.unwrap();
    assert_eq!(told.inbox, 5);
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), items[2..]);
    // Without events it is read as well.
    store.commit_step(StepCommit { inbox_read: 4, ..later(&new, 1, 3, vec![]) }).await.unwrap();
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), items[4..]);
    // Numbers go on where they were.
    store.commit_step(StepCommit { inbox_read: 5, ..later(&new, 1, 3, vec![]) }).await.unwrap();
    store.post(post(&new, message("more"))).await.unwrap();
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), [(6, message("more"))]);
}

pub(crate) async fn what_is_not_read_keeps_a_run_from_its_end<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.post(post(&new, message("wait"))).await.unwrap();
    let before = run(&store, &new).await;
    let end = |inbox_read| StepCommit { status: completed(), inbox_read, ..step(&new, 1, vec![mark(1)]) };
    let refused = store.commit_step(end(0)).await;
    assert!(matches!(refused, Err(StoreError::Unread { run, inbox: 1 }) if run == id(1)), "{refused:?}");
    assert_eq!(run(&store, &new).await, before);
    store.commit_step(end(1)).await.unwrap();
    // What comes too late is not kept.
    let ended = run(&store, &new).await.unwrap();
    assert_eq!(store.post(post(&new, message("late"))).await.unwrap(), Some(ended));
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), []);
    // That is so with every end: the last event shows the whole run.
    let other = running(2);
    create(&store, &other).await;
    store.post(post(&other, message("wait"))).await.unwrap();
    let end = |inbox_read| StepCommit { status: aborted(), inbox_read, ..step(&other, 1, vec![]) };
    assert!(matches!(store.commit_step(end(0)).await, Err(StoreError::Unread { inbox: 1, .. })));
    store.commit_step(end(1)).await.unwrap();
}

pub(crate) async fn a_refused_step_leaves_the_inbox<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.post(post(&new, message("hello"))).await.unwrap();
    store.reclaim(&tenant(), id(1)).await.unwrap();
    for bodies in [vec![], vec![mark(1)]] {
        let stale = StepCommit { inbox_read: 1, ..step(&new, 1, bodies) };
        assert!(matches!(store.commit_step(stale).await, Err(StoreError::Fenced { .. })));
        assert_eq!(store.inbox(id(1), 0).await.unwrap(), [(1, message("hello"))]);
    }
}

pub(crate) async fn new_limits_are_in_the_inbox_and_in_the_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let limits = Limits { max_steps: 77, ..new.run.limits };
    let changed = Some(Run { limits, ..stored(&new) });
    let item = InboxItem::Amendment { limits: Some(limits), metadata: None };
    assert_eq!(store.post(post(&new, item.clone())).await.unwrap(), changed);
    assert_eq!(run(&store, &new).await, changed);
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), [(1, item)]);
    // A step says nothing of limits.
    store.commit_step(step(&new, 1, vec![mark(1)])).await.unwrap();
    assert_eq!(run(&store, &new).await.unwrap().limits, limits);
}

pub(crate) async fn labels_are_replaced<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    create(&store, &new).await;
    let found = async |key: &str, value: &str| {
        let filter = RunFilter { metadata: vec![(key.to_owned(), value.to_owned())], ..RunFilter::default() };
        store.list_runs(&tenant(), &filter, None, 9).await.unwrap().len()
    };
    assert_eq!(found("team", "blue").await, 1);
    for metadata in [labels(&[("team", "red"), ("prio", "low")]), labels(&[("team", "red")]), labels(&[])] {
        let expected = Some(Run { metadata: metadata.clone(), ..stored(&new) });
        let item = InboxItem::Amendment { limits: None, metadata: Some(metadata.clone()) };
        assert_eq!(store.post(post(&new, item)).await.unwrap(), expected);
        assert_eq!(run(&store, &new).await, expected);
        assert_eq!(found("team", "blue").await, 0);
        assert_eq!(found("team", "red").await, metadata.len().min(1));
        assert_eq!(found("prio", "low").await, usize::from(metadata.len() == 2));
    }
    let end = StepCommit { status: aborted(), inbox_read: 3, ..step(&new, 0, vec![]) };
    store.commit_step(end).await.unwrap();
    let ended = run(&store, &new).await;
    let late = InboxItem::Amendment { limits: None, metadata: Some(labels(&[("a", "b")])) };
    assert_eq!(store.post(post(&new, late)).await.unwrap(), ended);
    assert_eq!(found("a", "b").await, 0);
    assert_eq!(store.due(at(9), 9).await.unwrap(), []);
}
