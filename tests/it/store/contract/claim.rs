//! Runs change hands: claims, cancel requests, crashes.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::join_all;
use hames::domain::{EventKind, Run, RunStatus, RunStatusName, TenantId};
use hames::store::{ClaimedRun, Committed, Former, NewRun, StepCommit, StoreError};

use super::{Database, after, claimed, create, events, held, ids, is_fenced, run, stored};
use crate::store::sample::{
    aborted, asking, at, completed, ended, id, later, mark, parked, queued, result, running, said, step, tenant,
};

pub(crate) async fn the_oldest_is_claimed_first<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let mut other = queued(2);
    other.run.tenant = TenantId::new("other");
    for new in [&queued(3), &queued(1), &other, &running(4)] {
        create(&store, new).await;
    }
    assert_eq!(store.claim(0, at(9)).await.unwrap(), []);
    assert_eq!(store.claim(2, at(9)).await.unwrap(), [claimed(&queued(1), at(9)), claimed(&other, at(9))]);
    assert_eq!(run(&store, &queued(1)).await, Some(claimed(&queued(1), at(9)).run));
    assert_eq!(store.backlog().await.unwrap().ready, 1);
    assert_eq!(store.claim(u32::MAX, at(10)).await.unwrap(), [claimed(&queued(3), at(10))]);
    assert_eq!(store.claim(5, at(11)).await.unwrap(), []);
    store.commit_step(later(&running(1), 1, 1, vec![mark(1)])).await.unwrap();
}

pub(crate) async fn a_claimed_run_brings_everything_along<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    // Back to the queue after a step, as a server does that stops.
    let back = StepCommit { status: parked(), ..step(&new, 1, vec![said(asking("", &["a"])), ended("a", "1")]) };
    store.commit_step(back.clone()).await.unwrap();
    let claims = store.claim(1, at(9)).await.unwrap();
    let run = Run {
        generation: 3,
        status: RunStatus::Running { started_at: at(1), deadline_at: at(1_009) },
        ..after(stored(&new), &back)
    };
    let transcript = vec![asking("", &["a"]), result("a", "1")];
    assert_eq!(claims, [ClaimedRun { state: back.state, transcript, ..held(&new, run) }]);
}

pub(crate) async fn parallel_claims_never_share_a_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for number in 1..=40 {
        create(&store, &queued(number)).await;
    }
    let claims = (0..30).map(|n| {
        let store = Arc::clone(&store);
        async move { store.claim(n % 3 + 1, at(9)).await.unwrap() }
    });
    let taken: Vec<ClaimedRun> = join_all(claims).await.into_iter().flatten().collect();
    let distinct: HashSet<_> = taken.iter().map(|claim| claim.run.id).collect();
    assert_eq!((taken.len(), distinct.len()), (40, 40));
    assert!(taken.iter().all(|claim| claim.run.generation == 1));
}

pub(crate) async fn a_run_is_loaded_without_being_taken<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let (waiting, active) = (queued(1), running(2));
    for new in [&waiting, &active] {
        create(&store, new).await;
        let former = match new.run.status {
            RunStatus::Running { .. } => Former::LetGo,
            _ => Former::None,
        };
        let expected = ClaimedRun { former, ..held(new, stored(new)) };
        for _ in 0..2 {
            assert_eq!(store.load(&tenant(), new.run.id).await.unwrap(), Some(expected.clone()));
        }
    }
    assert_eq!(store.load(&TenantId::new("other"), id(1)).await.unwrap(), None);
    // Whoever loaded it in the queue may end it, unless it was claimed in between.
    let last = StepCommit { status: aborted(), state: None, ..step(&waiting, 0, vec![mark(1)]) };
    store.claim(1, at(9)).await.unwrap();
    is_fenced(store.commit_step(last).await, &waiting, 0);
}

pub(crate) async fn a_run_that_nobody_can_go_on_with_is_ended<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.end_unreadable(&TenantId::new("other"), id(1), "why", at(9)).await.unwrap();
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    store.end_unreadable(&tenant(), id(1), "why", at(9)).await.unwrap();
    let ended = run(&store, &new).await.unwrap();
    assert_eq!(ended.status.name(), RunStatusName::InternalError);
    let log = events(&store, &new).await;
    assert_eq!((log.last().unwrap().body.kind, ended.last_seq), (EventKind::RunEnd, log.len() as u64));
    is_fenced(store.commit_step(step(&new, 1, vec![mark(1)])).await, &new, 1);
    store.end_unreadable(&tenant(), id(1), "again", at(10)).await.unwrap();
    assert_eq!(run(&store, &new).await, Some(ended));
}

pub(crate) async fn runs_of_a_process_that_is_gone_are_claimed_first<D: Database>() {
    let mut database = D::fresh().await;
    let store = database.store();
    for new in [&queued(1), &running(3), &running(4)] {
        create(&store, new).await;
    }
    store.commit_step(StepCommit { status: completed(), ..step(&running(4), 1, vec![]) }).await.unwrap();
    // What this process has is not for it to claim, and is what it holds.
    assert_eq!(ids(&store.claim(5, at(9)).await.unwrap()), [id(1)]);
    assert_eq!(store.claim(5, at(9)).await.unwrap(), []);
    let mut held_here = store.held().await.unwrap();
    held_here.sort_by_key(|(_, run)| *run);
    assert_eq!(held_here, [(tenant(), id(1)), (tenant(), id(3))]);
    create(&store, &queued(2)).await;
    drop(store);

    for generation in 2..=3 {
        database.crash().await;
        let store = database.store();
        assert_eq!(store.held().await.unwrap(), []);
        let [first, second] = &store.claim(2, at(20)).await.unwrap()[..] else { panic!("two runs are free") };
        let run = Run { generation, ..claimed(&queued(1), at(9)).run };
        assert_eq!(*first, ClaimedRun { former: Former::Gone, ..held(&queued(1), run) });
        let run = Run { generation, ..stored(&running(3)) };
        assert_eq!(*second, ClaimedRun { former: Former::Gone, ..held(&running(3), run) });
        is_fenced(
            store.commit_step(step(&running(3), generation - 1, vec![mark(1)])).await,
            &running(3),
            generation - 1,
        );
        assert_eq!(store.backlog().await.unwrap().ready, 1);
    }
    let store = database.store();
    store.commit_step(step(&running(3), 3, vec![mark(1)])).await.unwrap();
    assert_eq!(ids(&store.claim(9, at(20)).await.unwrap()), [id(2)]);
}

pub(crate) async fn runs_that_were_let_go_are_claimed_at_once<D: Database>() {
    let mut database = D::fresh().await;
    let store = database.store();
    create(&store, &running(1)).await;
    create(&store, &running(2)).await;
    store.release(&[id(1)]).await.unwrap();
    assert_eq!(store.held().await.unwrap().into_iter().map(|(_, id)| id).collect::<Vec<_>>(), [id(2)]);
    assert_eq!(run(&store, &running(1)).await, Some(stored(&running(1))));
    drop(store);
    database.crash().await;
    let store = database.store();
    store.renew_lease().await.unwrap();
    // The other one was cut off in the middle of something.
    let expected = [(1, Former::LetGo), (2, Former::Gone)].map(|(number, former)| {
        let taken = Run { generation: 2, ..stored(&running(number)) };
        ClaimedRun { former, ..held(&running(number), taken) }
    });
    assert_eq!(store.claim(9, at(9)).await.unwrap(), expected);
    // The worker that let go of it has lost it.
    is_fenced(store.commit_step(step(&running(1), 1, vec![mark(1)])).await, &running(1), 1);
}

pub(crate) async fn a_step_says_how_often_its_run_was_taken_over_in_vain<D: Database>() {
    let mut database = D::fresh().await;
    create(&database.store(), &running(1)).await;
    for (generation, known, crashes) in [(2, 2, 1), (3, 3, 2), (4, 4, 0)] {
        database.crash().await;
        let store = database.store();
        let claims = store.claim(9, at(9)).await.unwrap();
        let before = run(&store, &running(1)).await.map(|run| run.crashes);
        assert_eq!(claims.iter().map(|claim| Some(claim.run.crashes)).collect::<Vec<_>>(), [before]);
        let begun = StepCommit { crashes, ..later(&running(1), generation, known, vec![mark(1)]) };
        store.commit_step(begun).await.unwrap();
        assert_eq!(run(&store, &running(1)).await.map(|run| run.crashes), Some(crashes));
    }
}

/// Time does not count while nobody works on a run.
pub(crate) async fn a_parked_run_goes_on_with_the_time_it_had<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let back = StepCommit { status: parked(), ..step(&new, 1, vec![mark(1)]) };
    store.commit_step(back.clone()).await.unwrap();
    let idle = Run { generation: 2, ..after(stored(&new), &back) };
    assert_eq!(run(&store, &new).await, Some(idle.clone()));
    assert_eq!((store.held().await.unwrap(), store.backlog().await.unwrap().ready), (vec![], 1));
    // Whoever parked it has lost it.
    is_fenced(store.commit_step(later(&new, 1, 3, vec![mark(2)])).await, &new, 1);
    let claims = store.claim(1, at(50_000)).await.unwrap();
    let status = RunStatus::Running { started_at: at(1), deadline_at: at(51_000) };
    let taken = Run { generation: 3, status, ..idle };
    assert_eq!(claims, [ClaimedRun { state: back.state, ..held(&new, taken.clone()) }]);
    assert_eq!(run(&store, &new).await, Some(taken));
}

pub(crate) async fn a_cancel_request_keeps_its_first_instant<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let (waiting, active) = (queued(1), running(2));
    for new in [&waiting, &active] {
        create(&store, new).await;
        let expected = Some(Run { cancel_requested_at: Some(at(50)), ..stored(new) });
        for instant in [50, 60, 40] {
            let answer = store.request_cancel(&tenant(), new.run.id, at(instant)).await.unwrap();
            assert_eq!(answer, expected);
        }
        assert_eq!(run(&store, new).await, expected);
        assert_eq!(events(&store, new).await.len(), new.events.len());
    }
    // It is seen by whoever takes the run. A last step that does not know of it is refused, since it could not tell.
    let claims = store.claim(1, at(70)).await.unwrap();
    assert_eq!(claims.first().and_then(|claim| claim.run.cancel_requested_at), Some(at(50)));
    let unknowing = StepCommit { status: completed(), ..step(&active, 1, vec![mark(1)]) };
    let refused = store.commit_step(unknowing).await;
    assert!(
        matches!(refused, Err(StoreError::CancelRequested { run, at: when }) if run == id(2) && when == at(50)),
        "{refused:?}"
    );
    // Any other step is told of it.
    let told = store.commit_step(step(&active, 1, vec![])).await.unwrap();
    assert_eq!(told, Committed { events: vec![], cancel_requested_at: Some(at(50)), inbox: 0 });
    let last = StepCommit { status: aborted(), cancel_requested_at: Some(at(50)), ..step(&active, 1, vec![mark(1)]) };
    store.commit_step(last.clone()).await.unwrap();
    let ended = Run { cancel_requested_at: Some(at(50)), ..after(stored(&active), &last) };
    assert_eq!(run(&store, &active).await, Some(ended.clone()));
    assert_eq!(store.request_cancel(&tenant(), id(2), at(90)).await.unwrap(), Some(ended));
}

pub(crate) async fn what_was_acknowledged_outlives_a_crash<D: Database>() {
    let mut database = D::fresh().await;
    let store = database.store();
    let runs: Vec<NewRun> = (1..=50).map(running).collect();
    let acknowledged = join_all(runs.iter().map(|new| async {
        let mut log = store.create_run(new.clone()).await.unwrap().events;
        log.extend(store.commit_step(step(new, 1, vec![mark(1)])).await.unwrap().events);
        log
    }))
    .await;
    // Work that nobody waits for any more must not stand in the way.
    let mut abandoned = Box::pin(store.create_run(queued(99)));
    assert!(futures_util::poll!(&mut abandoned).is_pending());
    drop(abandoned);
    drop(store);
    database.crash().await;
    let store = database.store();
    for (new, log) in runs.iter().zip(acknowledged) {
        assert_eq!(run(&store, new).await, Some(after(stored(new), &step(new, 1, vec![mark(1)]))));
        assert_eq!(events(&store, new).await, log);
    }
    create(&store, &running(100)).await;
}

pub(crate) async fn a_closed_store_refuses_work<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    create(&store, &queued(1)).await;
    store.close().await;
    store.close().await;
    assert!(matches!(store.create_run(queued(2)).await, Err(StoreError::Unavailable(_))));
    assert!(matches!(store.health().await, Err(StoreError::Unavailable(_))));
    assert!(matches!(store.run(&tenant(), id(1)).await, Err(StoreError::Unavailable(_))));
}

pub(crate) async fn a_running_run_is_taken_from_its_holder<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let (waiting, active) = (queued(1), running(2));
    create(&store, &waiting).await;
    create(&store, &active).await;
    assert_eq!(store.reclaim(&tenant(), id(1)).await.unwrap(), None);
    assert_eq!(store.reclaim(&TenantId::new("other"), id(2)).await.unwrap(), None);
    let taken = Run { generation: 2, ..stored(&active) };
    let expected = ClaimedRun { former: Former::LetGo, ..held(&active, taken) };
    assert_eq!(store.reclaim(&tenant(), id(2)).await.unwrap(), Some(expected));
    is_fenced(store.commit_step(step(&active, 1, vec![mark(1)])).await, &active, 1);
    store.commit_step(StepCommit { status: completed(), ..step(&active, 2, vec![mark(1)]) }).await.unwrap();
    assert_eq!(store.reclaim(&tenant(), id(2)).await.unwrap(), None);
}
