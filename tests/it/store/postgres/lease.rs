//! Several processes on one database.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hames::domain::OnBusy;
use hames::store::postgres::{PostgresStore, Timing};
use hames::store::{ClaimedRun, Former, Store, StoreError};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::database::{Empty, PATIENT, need_postgres};
use crate::store::sample::{at, id, in_thread, mark, queued, running, step, tenant};

const LEASE: Duration = Duration::from_millis(700);

fn short() -> Timing {
    Timing { lease: LEASE, ..PATIENT }
}

/// Claims again and again until there is something.
async fn wait_for_runs(store: &PostgresStore) -> Vec<ClaimedRun> {
    loop {
        store.renew_lease().await.unwrap();
        let claims = store.claim(9, at(9)).await.unwrap();
        if !claims.is_empty() {
            return claims;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn runs_of_a_process_are_its_own_until_its_lease_is_over() {
    need_postgres!();
    let database = Empty::create().await;
    let (first, second) = (database.open(short()).await, database.open(short()).await);
    first.create_run(running(1)).await.unwrap();
    // As long as it tells that it lives, however long that is.
    let until = Instant::now() + LEASE * 2;
    while Instant::now() < until {
        first.renew_lease().await.unwrap();
        second.renew_lease().await.unwrap();
        assert_eq!(second.claim(9, at(9)).await.unwrap(), []);
        assert_eq!(second.backlog().await.unwrap().ready, 0);
        sleep(Duration::from_millis(50)).await;
    }
    let renewed = Instant::now();
    first.renew_lease().await.unwrap();
    let claims = wait_for_runs(&second).await;
    let waited = renewed.elapsed();
    assert!(waited >= LEASE && waited < LEASE * 3, "{waited:?}");
    let [claim] = &claims[..] else { panic!("{claims:?}") };
    assert_eq!((claim.run.id, claim.run.generation, claim.former), (id(1), 2, Former::Gone));
    // It wakes up, and has lost the run.
    assert_eq!(first.held().await.unwrap(), []);
    let fenced = first.commit_step(step(&running(1), 1, vec![mark(1)])).await;
    assert!(matches!(fenced, Err(StoreError::Fenced { .. })), "{fenced:?}");
    second.commit_step(step(&running(1), 2, vec![mark(1)])).await.unwrap();
    assert_eq!(second.held().await.unwrap(), [(tenant(), id(1))]);
}

#[tokio::test]
async fn a_process_that_was_cut_off_takes_over_nothing_at_first() {
    need_postgres!();
    let database = Empty::create().await;
    let (first, second) = (database.open(short()).await, database.open(short()).await);
    first.create_run(running(1)).await.unwrap();
    second.create_run(queued(2)).await.unwrap();
    // The database was away, and the leases of both have ended.
    database.tamper("UPDATE workers SET lease_until = now() - interval '1 minute'").await;
    assert_eq!(second.backlog().await.unwrap().ready, 1);
    // What nobody had is taken.
    let claims = second.claim(9, at(9)).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.run.id).collect::<Vec<_>>(), [id(2)]);
    let back = Instant::now();
    second.renew_lease().await.unwrap();
    assert_eq!(second.claim(9, at(9)).await.unwrap(), []);
    // The other one does not come back.
    wait_for_runs(&second).await;
    assert!(back.elapsed() >= LEASE - Duration::from_millis(50), "{:?}", back.elapsed());
}

#[tokio::test]
async fn runs_that_were_let_go_are_taken_at_once_by_another_process() {
    need_postgres!();
    let database = Empty::create().await;
    let (first, second) = (database.open(PATIENT).await, database.open(PATIENT).await);
    first.create_run(running(1)).await.unwrap();
    first.create_run(running(2)).await.unwrap();
    assert_eq!(second.claim(9, at(9)).await.unwrap(), []);
    first.release(&[id(1)]).await.unwrap();
    assert_eq!(second.backlog().await.unwrap().ready, 2);
    let claims = second.claim(9, at(9)).await.unwrap();
    assert_eq!(
        claims.iter().map(|claim| (claim.run.generation, claim.former)).collect::<Vec<_>>(),
        [(2, Former::LetGo), (2, Former::Gone)]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_race_never_share_a_run() {
    need_postgres!();
    let database = Empty::create().await;
    let stores: Vec<Arc<PostgresStore>> = join_all((0..3).map(|_| database.open(PATIENT))).await;
    for number in 1..=90 {
        stores[0].create_run(queued(number)).await.unwrap();
    }
    let claims: JoinSet<_> = (0..60)
        .map(|n: u32| {
            let store = Arc::clone(&stores[n as usize % 3]);
            async move { store.claim(n % 4 + 1, at(9)).await.unwrap() }
        })
        .collect();
    let mut taken: Vec<ClaimedRun> = claims.join_all().await.into_iter().flatten().collect();
    // Some may have looked past rows that others had locked.
    taken.extend(stores[0].claim(90, at(9)).await.unwrap());
    let distinct: HashSet<_> = taken.iter().map(|claim| claim.run.id).collect();
    assert_eq!((taken.len(), distinct.len()), (90, 90));
    assert!(taken.iter().all(|claim| claim.run.generation == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_has_one_active_run_whatever_processes_race() {
    need_postgres!();
    let database = Empty::create().await;
    let stores: Vec<Arc<PostgresStore>> = join_all((0..2).map(|_| database.open(PATIENT))).await;
    let creates: JoinSet<_> = (1..=40_u32)
        .map(|number| {
            let store = Arc::clone(&stores[number as usize % 2]);
            async move { store.create_run(in_thread(number, "t", OnBusy::Reject)).await }
        })
        .collect();
    let outcomes = creates.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(_) | Err(StoreError::ThreadBusy { .. }))));
}

#[tokio::test]
async fn processes_that_start_at_once_make_one_schema() {
    need_postgres!();
    let database = Empty::create().await;
    let stores = join_all((0..4).map(|_| database.open(PATIENT))).await;
    for store in &stores {
        store.health().await.unwrap();
    }
    stores[3].create_run(queued(1)).await.unwrap();
    assert_eq!(stores[0].backlog().await.unwrap().ready, 1);
}
