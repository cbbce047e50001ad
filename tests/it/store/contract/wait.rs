//! Runs that wait for an answer from outside.

use futures_util::future::join_all;
use hames::domain::Run;
use hames::store::{StepCommit, StoreError};

use super::{Database, after, create, is_fenced, run, stored};
use crate::store::sample::{aborted, at, id, later, mark, parked, queued, running, step, tenant, waiting};

pub(crate) async fn a_waiting_run_is_in_nobody_s_hands<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let wait = StepCommit { status: waiting(50), ..step(&new, 1, vec![mark(1)]) };
    store.commit_step(wait.clone()).await.unwrap();
    let idle = Run { generation: 2, ..after(stored(&new), &wait) };
    assert_eq!(run(&store, &new).await, Some(idle.clone()));
    assert_eq!((store.held().await.unwrap(), store.backlog().await.unwrap().ready), (vec![], 0));
    assert_eq!(store.claim(9, at(99)).await.unwrap(), []);
    assert_eq!(store.reclaim(&tenant(), id(1)).await.unwrap(), None);
    is_fenced(store.commit_step(later(&new, 1, 3, vec![mark(2)])).await, &new, 1);
    assert_eq!(store.load(&tenant(), id(1)).await.unwrap().map(|loaded| loaded.run), Some(idle));
}

pub(crate) async fn waiting_runs_are_due<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for (number, until) in [(1, 300), (2, 100), (3, 200), (4, 900)] {
        let new = running(number);
        create(&store, &new).await;
        store.commit_step(StepCommit { status: waiting(until), ..step(&new, 1, vec![]) }).await.unwrap();
    }
    create(&store, &running(5)).await;
    store.request_cancel(&tenant(), id(5), at(1)).await.unwrap();
    assert_eq!(store.due(at(99), 9).await.unwrap(), []);
    assert_eq!(store.due(at(100), 9).await.unwrap(), [(tenant(), id(2))]);
    assert_eq!(store.due(at(300), 2).await.unwrap(), [(tenant(), id(2)), (tenant(), id(3))]);
    assert_eq!(store.due(at(300), 0).await.unwrap(), []);
    store.request_cancel(&tenant(), id(4), at(1)).await.unwrap();
    assert_eq!(store.due(at(99), 9).await.unwrap(), [(tenant(), id(4))]);
    let end = StepCommit { status: aborted(), cancel_requested_at: Some(at(1)), ..step(&running(4), 2, vec![]) };
    store.commit_step(end).await.unwrap();
    assert_eq!(store.due(at(99), 9).await.unwrap(), []);
}

pub(crate) async fn of_those_who_go_on_from_a_wait_one_wins<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.commit_step(StepCommit { status: waiting(50), ..step(&new, 1, vec![]) }).await.unwrap();
    // Each answers something else; one ends the run.
    let mut answers: Vec<StepCommit> =
        (0..10).map(|n| StepCommit { status: parked(), ..step(&new, 2, vec![mark(n)]) }).collect();
    answers.push(StepCommit { status: aborted(), ..step(&new, 2, vec![mark(99)]) });
    let outcomes = join_all(answers.iter().map(|answer| store.commit_step(answer.clone()))).await;
    let won: Vec<_> = answers.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok()).collect();
    assert_eq!(won.len(), 1);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(_) | Err(StoreError::Fenced { .. }))));
    let stood = run(&store, &new).await.unwrap();
    assert_eq!((stood.status, stood.last_seq), (won[0].0.status.clone(), 3));
    create(&store, &queued(2)).await;
}
