//! Runs that are erased.

use hames::domain::{OnBusy, TenantId};
use hames::store::{ERASED_LIFETIME, Erasure, NewRun, RunFilter, StepCommit, Store};

use super::inbox::{message, post};
use super::{Database, create, events, run};
use crate::store::sample::{aborted, asking, at, id, in_thread, key, queued, running, said, step, tenant};

async fn end(store: &dyn Store, new: &NewRun, finished_at: i64) {
    let mut status = aborted();
    if let hames::domain::RunStatus::Finished { finished_at: when, .. } = &mut status {
        *when = at(finished_at);
    }
    store.commit_step(StepCommit { status, ..step(new, new.run.generation, vec![]) }).await.unwrap();
}

pub(crate) async fn an_erased_run_leaves_only_that_it_was_there<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = NewRun { key: Some(key("k", "print", 1)), ..running(1) };
    create(&store, &new).await;
    store.post(post(&new, message("hello"))).await.unwrap();
    assert_eq!(store.erase(&tenant(), id(1), at(9)).await.unwrap(), Erasure::Active);
    store.commit_step(step(&new, 1, vec![said(asking("x", &[]))])).await.unwrap();
    // As one ends that cannot be read: with what was said to it.
    store.end_unreadable(&tenant(), id(1), "gone", at(9)).await.unwrap();
    let other = TenantId::new("other");
    assert_eq!(store.erase(&other, id(1), at(9)).await.unwrap(), Erasure::Unknown);
    assert!(!store.is_erased(&tenant(), id(1)).await.unwrap());
    for _ in 0..2 {
        assert_eq!(store.erase(&tenant(), id(1), at(9)).await.unwrap(), Erasure::Erased);
        assert!(store.is_erased(&tenant(), id(1)).await.unwrap());
        assert!(!store.is_erased(&other, id(1)).await.unwrap());
        assert_eq!(run(&store, &new).await, None);
        assert_eq!(events(&store, &new).await, []);
        assert_eq!(store.transcript(&tenant(), id(1)).await.unwrap(), None);
        assert_eq!(store.inbox(id(1), 0).await.unwrap(), []);
        assert_eq!(store.kept_answer(&tenant(), "k", at(9)).await.unwrap(), None);
        assert_eq!(store.list_runs(&tenant(), &RunFilter::default(), None, 9).await.unwrap(), []);
    }
    // That is forgotten in time as well.
    let lifetime = i64::try_from(ERASED_LIFETIME.as_millis()).unwrap();
    store.sweep(None, at(8 + lifetime), 9).await.unwrap();
    assert!(store.is_erased(&tenant(), id(1)).await.unwrap());
    store.sweep(None, at(9 + lifetime), 9).await.unwrap();
    assert!(!store.is_erased(&tenant(), id(1)).await.unwrap());
}

pub(crate) async fn old_runs_are_swept<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for (number, finished_at) in [(1, 300), (2, 100), (3, 200), (4, 400)] {
        create(&store, &queued(number)).await;
        end(&*store, &queued(number), finished_at).await;
    }
    create(&store, &queued(5)).await;
    // What another one goes on from stays with it.
    for number in [6, 7] {
        let new = in_thread(number, "t", OnBusy::Reject);
        create(&store, &new).await;
        end(&*store, &new, i64::from(number)).await;
    }
    let left = async || {
        let runs = store.list_runs(&tenant(), &RunFilter::default(), None, 99).await.unwrap();
        runs.iter().map(|run| run.id).collect::<Vec<_>>()
    };
    assert_eq!(store.sweep(None, at(9_000), 9).await.unwrap(), 0);
    assert_eq!(store.sweep(Some(at(7)), at(9_000), 9).await.unwrap(), 0);
    assert_eq!(store.sweep(Some(at(301)), at(9_000), 2).await.unwrap(), 2);
    assert_eq!(left().await, [id(6), id(5), id(4), id(3), id(1)]);
    assert_eq!(store.sweep(Some(at(300)), at(9_000), 9).await.unwrap(), 2);
    assert_eq!(left().await, [id(5), id(4), id(1)]);
    assert_eq!(store.sweep(Some(at(301)), at(9_000), 9).await.unwrap(), 1);
    assert!(store.is_erased(&tenant(), id(1)).await.unwrap());
    assert_eq!(left().await, [id(5), id(4)]);
}
