//! Runs that continue others.

use futures_util::future::join_all;
use hames::domain::{Message, OnBusy, Run, TenantId};
use hames::store::{Backlog, Created, StepCommit, Store, StoreError};

use super::{Database, create, created, ids, run};
use crate::store::sample::{
    aborted, asking, at, completed, ended, id, in_thread, queued, result, running, said, step, tenant,
};

async fn end(store: &dyn Store, number: u32) {
    let generation = store.run(&tenant(), id(number)).await.unwrap().unwrap().generation;
    let last = StepCommit { status: aborted(), after: 1, ..step(&queued(number), generation, vec![]) };
    store.commit_step(last).await.unwrap();
}

pub(crate) async fn a_run_continues_its_thread<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let mut first = running(1);
    first.run.thread = Some("t".to_owned());
    create(&store, &first).await;
    let bodies = vec![said(asking("let me see", &["a"])), ended("a", "1")];
    store.commit_step(StepCommit { status: completed(), ..step(&first, 1, bodies) }).await.unwrap();
    // Others' runs and those of other threads are not of the conversation.
    let mut foreign = in_thread(2, "t", OnBusy::Reject);
    foreign.run.tenant = TenantId::new("other");
    create(&store, &foreign).await;
    create(&store, &in_thread(3, "u", OnBusy::Reject)).await;

    let second = in_thread(4, "t", OnBusy::Reject);
    let expected = created(&second);
    let expected = Created { run: Run { continues: Some(id(1)), ..expected.run }, ..expected };
    assert_eq!(store.create_run(second.clone()).await.unwrap(), expected);
    assert_eq!(run(&store, &second).await, Some(expected.run));
    let said = vec![Message::user("task 1"), asking("let me see", &["a"]), result("a", "1")];
    let claims = store.claim(9, at(9)).await.unwrap();
    let claim = claims.iter().find(|claim| claim.run.id == id(4)).unwrap();
    assert_eq!((&claim.history, &claim.transcript), (&said, &vec![]));
    end(&*store, 4).await;
    let third = in_thread(5, "t", OnBusy::Queue);
    assert_eq!(store.create_run(third).await.unwrap().run.continues, Some(id(4)));
    let whole = [said, vec![Message::user("task 4"), Message::user("task 5")]].concat();
    assert_eq!(store.transcript(&tenant(), id(5)).await.unwrap(), Some(whole.clone()));
    assert_eq!(store.load(&tenant(), id(5)).await.unwrap().unwrap().history, whole[..4]);
}

pub(crate) async fn a_busy_thread_refuses_queues_or_interrupts<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    create(&store, &in_thread(1, "t", OnBusy::Reject)).await;
    let refused = store.create_run(in_thread(2, "t", OnBusy::Reject)).await;
    assert!(matches!(refused, Err(StoreError::ThreadBusy { run }) if run == id(1)), "{refused:?}");
    assert_eq!(run(&store, &queued(2)).await, None);
    let queue = store.create_run(in_thread(3, "t", OnBusy::Queue)).await.unwrap();
    assert_eq!((queue.run.continues, queue.interrupted), (Some(id(1)), vec![]));
    let interrupt = store.create_run(in_thread(4, "t", OnBusy::Interrupt)).await.unwrap();
    assert_eq!((interrupt.run.continues, interrupt.interrupted), (Some(id(3)), vec![id(1), id(3)]));
    for number in [1, 3] {
        let asked = run(&store, &queued(number)).await.unwrap().cancel_requested_at;
        assert_eq!(asked, Some(interrupt.run.created_at));
    }
    assert_eq!(run(&store, &queued(4)).await.unwrap().cancel_requested_at, None);
}

pub(crate) async fn racing_creates_of_a_thread_make_one_active_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let outcomes = join_all((1..=30).map(|number| store.create_run(in_thread(number, "t", OnBusy::Reject)))).await;
    let winners: Vec<_> = outcomes.iter().flatten().map(|created| created.run.id).collect();
    let [winner] = &winners[..] else { panic!("{} runs are active", winners.len()) };
    for outcome in outcomes.iter().filter(|outcome| outcome.is_err()) {
        assert!(matches!(outcome, Err(StoreError::ThreadBusy { run }) if run == winner), "{outcome:?}");
    }
    // Those that queue form one line, whatever order they came in.
    let line = join_all((101..=120).map(|number| store.create_run(in_thread(number, "u", OnBusy::Queue)))).await;
    let mut followed: Vec<_> = line.into_iter().filter_map(|created| created.unwrap().run.continues).collect();
    followed.sort();
    followed.dedup();
    assert_eq!(followed.len(), 19);
}

pub(crate) async fn a_run_continues_the_one_it_names<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let naming = |number: u32, named: u32| {
        let mut new = queued(number);
        new.run.continues = Some(id(named));
        new
    };
    let missing = store.create_run(naming(2, 1)).await;
    assert!(matches!(missing, Err(StoreError::NoPredecessor { run }) if run == id(1)), "{missing:?}");
    let mut foreign = queued(1);
    foreign.run.tenant = TenantId::new("other");
    create(&store, &foreign).await;
    let hidden = store.create_run(naming(2, 1)).await;
    assert!(matches!(hidden, Err(StoreError::NoPredecessor { run }) if run == id(1)), "{hidden:?}");
    create(&store, &queued(3)).await;
    let busy = store.create_run(naming(4, 3)).await;
    assert!(matches!(busy, Err(StoreError::ThreadBusy { run }) if run == id(3)), "{busy:?}");
    end(&*store, 3).await;
    // Two may go on from one.
    for number in [4, 5] {
        assert_eq!(store.create_run(naming(number, 3)).await.unwrap().run.continues, Some(id(3)));
        let said = [Message::user("task 3"), Message::user(format!("task {number}"))];
        assert_eq!(store.transcript(&tenant(), id(number)).await.unwrap().as_deref(), Some(&said[..]));
    }
}

pub(crate) async fn a_run_waits_for_its_predecessor<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for number in 1..=3 {
        create(&store, &in_thread(number, "t", OnBusy::Queue)).await;
    }
    create(&store, &queued(4)).await;
    assert_eq!(store.backlog().await.unwrap(), Backlog { ready: 2, blocked: 2 });
    assert_eq!(ids(&store.claim(9, at(9)).await.unwrap()), [id(1), id(4)]);
    assert_eq!(store.claim(9, at(9)).await.unwrap(), []);
    assert_eq!(store.backlog().await.unwrap(), Backlog { ready: 0, blocked: 2 });
    end(&*store, 1).await;
    assert_eq!(store.backlog().await.unwrap(), Backlog { ready: 1, blocked: 1 });
    assert_eq!(ids(&store.claim(9, at(9)).await.unwrap()), [id(2)]);
    // An erased one is no obstacle.
    end(&*store, 2).await;
    store.erase(&tenant(), id(2), at(9)).await.unwrap();
    let claims = store.claim(9, at(9)).await.unwrap();
    assert_eq!(ids(&claims), [id(3)]);
    assert_eq!(claims[0].history, []);
}
