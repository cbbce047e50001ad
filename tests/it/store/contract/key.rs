//! Answers that are kept under an `Idempotency-Key`.

use futures_util::future::join_all;
use hames::domain::{Run, RunView, TenantId};
use hames::store::{KEY_LIFETIME, KeptAnswer, NewRun, Post, StepCommit, StoreError};

use super::inbox::{message, post};
use super::{Database, create, created, run, stored};
use crate::store::sample::{at, id, key, mark, parked, queued, running, step, tenant, waiting};

fn keyed(new: NewRun, name: &str) -> NewRun {
    NewRun { key: Some(key(name, "print", 10)), ..new }
}

fn kept(run: &Run) -> KeptAnswer {
    let answer = serde_json::to_string(&RunView::from(run)).unwrap();
    KeptAnswer { fingerprint: "print".to_owned(), run: run.id, answer }
}

#[track_caller]
fn is_taken<T: std::fmt::Debug>(outcome: Result<T, StoreError>, expected: &KeptAnswer) {
    match outcome {
        Err(StoreError::KeyTaken(kept)) => assert_eq!(kept, *expected),
        other => panic!("expected what was kept, got {other:?}"),
    }
}

pub(crate) async fn a_key_gives_one_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = keyed(queued(1), "k");
    assert_eq!(store.kept_answer(&tenant(), "k", at(10)).await.unwrap(), None);
    assert_eq!(store.create_run(new.clone()).await.unwrap(), created(&new));
    let expected = kept(&stored(&new));
    assert_eq!(store.kept_answer(&tenant(), "k", at(10)).await.unwrap().as_ref(), Some(&expected));
    let mut threaded = keyed(queued(2), "k");
    threaded.run.thread = Some("t".to_owned());
    for again in [new.clone(), keyed(queued(2), "k"), threaded] {
        is_taken(store.create_run(again).await, &expected);
    }
    assert_eq!(run(&store, &queued(2)).await, None);
    // The answer stays what it was.
    store.claim(1, at(20)).await.unwrap();
    assert_eq!(store.kept_answer(&tenant(), "k", at(30)).await.unwrap(), Some(expected));
    // What is refused leaves no key.
    let refused = keyed(queued(1), "other");
    assert!(matches!(store.create_run(refused).await, Err(StoreError::Failed(_))));
    assert_eq!(store.kept_answer(&tenant(), "other", at(30)).await.unwrap(), None);
}

pub(crate) async fn racing_creates_with_one_key_make_one_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for (name, thread) in [("plain", None), ("threaded", Some("t"))] {
        let base = if thread.is_some() { 100 } else { 0 };
        let racers = (1..=64).map(|number| {
            let mut new = keyed(queued(base + number), name);
            new.run.thread = thread.map(str::to_owned);
            store.create_run(new)
        });
        let outcomes = join_all(racers).await;
        let winners: Vec<Run> = outcomes.iter().flatten().map(|created| created.run.clone()).collect();
        let [winner] = &winners[..] else { panic!("{name}: {} runs were stored", winners.len()) };
        for outcome in outcomes.into_iter().filter(Result::is_err) {
            is_taken(outcome, &kept(winner));
        }
    }
    assert_eq!(store.backlog().await.unwrap().ready, 2);
}

pub(crate) async fn a_key_is_its_tenant_s_and_grows_old<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    store.create_run(keyed(queued(1), "k")).await.unwrap();
    let mut foreign = keyed(queued(2), "k");
    foreign.run.tenant = TenantId::new("other");
    store.create_run(foreign).await.unwrap();
    let lifetime = i64::try_from(KEY_LIFETIME.as_millis()).unwrap();
    assert_eq!(store.kept_answer(&tenant(), "k", at(9 + lifetime)).await.unwrap().unwrap().run, id(1));
    assert_eq!(store.kept_answer(&tenant(), "k", at(10 + lifetime)).await.unwrap(), None);
    // It is free again, and what it was used for stays.
    let late = NewRun { key: Some(key("k", "print", 10 + lifetime)), ..queued(3) };
    store.create_run(late).await.unwrap();
    assert_eq!(store.kept_answer(&tenant(), "k", at(11 + lifetime)).await.unwrap().unwrap().run, id(3));
    assert_eq!(store.backlog().await.unwrap().ready, 3);
    // Old ones are swept.
    assert_eq!(store.sweep(None, at(10 + lifetime), 9).await.unwrap(), 0);
    assert_eq!(store.kept_answer(&TenantId::new("other"), "k", at(11)).await.unwrap(), None);
    assert_eq!(store.kept_answer(&tenant(), "k", at(11 + lifetime)).await.unwrap().unwrap().run, id(3));
}

pub(crate) async fn a_step_and_a_post_can_have_a_key<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let said = Post { key: Some(key("post", "print", 10)), ..post(&new, message("hello")) };
    let answer = store.post(said.clone()).await.unwrap().unwrap();
    is_taken(store.post(said).await, &kept(&answer));
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), [(1, message("hello"))]);

    store.commit_step(StepCommit { status: waiting(99), ..step(&new, 1, vec![]) }).await.unwrap();
    let resume = StepCommit {
        status: parked(),
        inbox_read: 1,
        key: Some(key("step", "print", 20)),
        ..step(&new, 2, vec![mark(1)])
    };
    // A refused one leaves no key.
    let stale = StepCommit { generation: 1, ..resume.clone() };
    assert!(matches!(store.commit_step(stale).await, Err(StoreError::Fenced { .. })));
    assert_eq!(store.kept_answer(&tenant(), "step", at(21)).await.unwrap(), None);
    store.commit_step(resume.clone()).await.unwrap();
    assert_eq!(store.inbox(id(1), 0).await.unwrap(), []);
    let resumed = run(&store, &new).await.unwrap();
    is_taken(store.commit_step(resume).await, &kept(&resumed));
    assert_eq!(run(&store, &new).await, Some(resumed));
    // A key is a key, whatever it was used for.
    is_taken(store.create_run(keyed(queued(2), "post")).await, &kept(&answer));
}
