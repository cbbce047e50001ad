//! Runs and steps are written whole, or refused.

use std::sync::Arc;

use futures_util::future::join_all;
use hames::domain::{Event, EventBody, EventKind, Message, TenantId};
use hames::store::{ClaimedRun, Former, NewRun, StepCommit, StoreError};

use super::{Database, after, create, created, events, held, is_fenced, numbered, run, stored};
use crate::store::sample::{
    aborted, at, body, completed, id, later, mark, parked, queued, running, step, tenant, waiting,
};

pub(crate) async fn a_created_run_reads_back<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    assert_eq!(store.backlog().await.unwrap().ready, 0);
    let returned = store.create_run(new.clone()).await.unwrap();
    assert_eq!(returned, created(&new));
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    assert_eq!(events(&store, &new).await, returned.events);
    assert_eq!(store.transcript(&tenant(), id(1)).await.unwrap(), Some(new.spec.input));
    assert_eq!(store.backlog().await.unwrap().ready, 1);
    store.health().await.unwrap();
}

pub(crate) async fn a_run_that_starts_at_once_is_not_in_the_queue<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    let returned = store.create_run(new.clone()).await.unwrap();
    assert_eq!(returned, created(&new));
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    assert_eq!(store.backlog().await.unwrap().ready, 0);
    assert_eq!(store.claim(10, at(9)).await.unwrap(), []);
}

pub(crate) async fn the_same_id_is_not_stored_twice<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    create(&store, &new).await;
    let mut second = queued(1);
    second.run.tenant = TenantId::new("other");
    second.spec.input = vec![Message::user("something else")];
    assert!(matches!(store.create_run(second).await, Err(StoreError::Failed(_))));
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    assert_eq!(store.transcript(&tenant(), id(1)).await.unwrap(), Some(new.spec.input));
    store.health().await.unwrap();
}

pub(crate) async fn a_step_stores_everything_together<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let commit = step(&new, 1, vec![mark(1), mark(2)]);
    let returned = store.commit_step(commit.clone()).await.unwrap().events;
    assert_eq!(returned, numbered(&new, 3, commit.time, &commit.events));
    let expected = after(stored(&new), &commit);
    assert_eq!(run(&store, &new).await, Some(expected.clone()));
    let mut log = numbered(&new, 1, new.run.created_at, &new.events);
    log.extend(returned);
    assert_eq!(events(&store, &new).await, log);
    // The machine's state is what a worker is given.
    let given = store.load(&tenant(), id(1)).await.unwrap();
    assert_eq!(given, Some(ClaimedRun { state: commit.state, former: Former::LetGo, ..held(&new, expected) }));
}

pub(crate) async fn an_end_is_final<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let end = body(&EventBody::RunEnd { run: serde_json::json!({"id": "x"}), duration_ms: 5 });
    let last = StepCommit { status: completed(), ..step(&new, 1, vec![mark(1), end]) };
    store.commit_step(last.clone()).await.unwrap();
    let finished = after(stored(&new), &last);
    let log = events(&store, &new).await;
    assert_eq!(log.last().map(|event| event.body.kind), Some(EventKind::RunEnd));

    is_fenced(store.commit_step(step(&new, 1, vec![mark(9)])).await, &new, 1);
    let other = StepCommit { status: aborted(), after: 4, ..step(&new, 1, vec![]) };
    is_fenced(store.commit_step(other).await, &new, 1);
    is_fenced(store.commit_step(later(&new, 1, 4, vec![mark(9)])).await, &new, 1);
    is_fenced(store.commit_step(step(&new, 2, vec![mark(9)])).await, &new, 2);
    assert_eq!(store.request_cancel(&tenant(), id(1), at(9)).await.unwrap(), Some(finished.clone()));
    assert_eq!(store.claim(10, at(9)).await.unwrap(), []);
    assert_eq!(store.reclaim(&tenant(), id(1)).await.unwrap(), None);
    assert_eq!(store.held().await.unwrap(), []);
    assert_eq!(run(&store, &new).await, Some(finished));
    assert_eq!(events(&store, &new).await, log);
}

pub(crate) async fn a_run_can_end_in_the_queue<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    create(&store, &new).await;
    let last = StepCommit { status: aborted(), ..step(&new, 0, vec![mark(1)]) };
    store.commit_step(last.clone()).await.unwrap();
    assert_eq!(run(&store, &new).await, Some(after(stored(&new), &last)));
    assert_eq!(store.backlog().await.unwrap().ready, 0);
    assert_eq!(store.claim(10, at(9)).await.unwrap(), []);
}

pub(crate) async fn an_old_generation_is_refused<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.reclaim(&tenant(), id(1)).await.unwrap().unwrap();
    let before = (run(&store, &new).await, events(&store, &new).await);
    for generation in [0, 1, 3, u64::from(u32::MAX)] {
        is_fenced(store.commit_step(step(&new, generation, vec![mark(9)])).await, &new, generation);
        let end = StepCommit { status: completed(), ..step(&new, generation, vec![mark(9)]) };
        is_fenced(store.commit_step(end).await, &new, generation);
    }
    assert_eq!((run(&store, &new).await, events(&store, &new).await), before);
    store.commit_step(step(&new, 2, vec![mark(1)])).await.unwrap();
    let unknown = queued(7);
    is_fenced(store.commit_step(step(&unknown, 0, vec![mark(1)])).await, &unknown, 0);
}

pub(crate) async fn a_step_without_events_moves_the_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let commit = step(&new, 1, vec![]);
    assert_eq!(store.commit_step(commit.clone()).await.unwrap().events, []);
    assert_eq!(run(&store, &new).await, Some(after(stored(&new), &commit)));
}

/// A number read as "highest so far plus one" would collide here (praxis-proxy/ai#662).
pub(crate) async fn parallel_steps_number_without_gaps<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let appends = (0..20).map(|n| {
        let (store, new) = (Arc::clone(&store), new.clone());
        async move {
            loop {
                let known = run(&store, &new).await.unwrap().last_seq;
                match store.commit_step(later(&new, 1, known, vec![mark(2 * n), mark(2 * n + 1)])).await {
                    Ok(committed) => break committed.events,
                    Err(StoreError::Fenced { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    });
    let mut returned: Vec<Event> = join_all(appends).await.into_iter().flatten().collect();
    returned.sort_by_key(|event| event.seq);
    let log = events(&store, &new).await;
    assert_eq!(log.iter().map(|event| event.seq).collect::<Vec<_>>(), (1..=42).collect::<Vec<_>>());
    assert_eq!(log[2..], returned);
    assert_eq!(run(&store, &new).await.map(|run| run.last_seq), Some(42));
}

/// Its writer does not know whether it was committed, and asks again.
pub(crate) async fn a_step_that_is_handed_in_again_is_taken_once<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for (number, status) in [(1, None), (2, Some(parked())), (3, Some(waiting(99))), (4, Some(completed()))] {
        for bodies in [vec![mark(1), mark(2)], vec![]] {
            let number = number + u32::try_from(bodies.len()).unwrap() * 10;
            let new = running(number);
            create(&store, &new).await;
            let first = step(&new, 1, bodies);
            let commit = StepCommit { status: status.clone().unwrap_or(first.status.clone()), ..first };
            let committed = store.commit_step(commit.clone()).await.unwrap();
            let (as_run, log) = (run(&store, &new).await, events(&store, &new).await);
            for _ in 0..2 {
                assert_eq!(store.commit_step(commit.clone()).await.unwrap(), committed, "{number}");
                assert_eq!((run(&store, &new).await, events(&store, &new).await), (as_run.clone(), log.clone()));
            }
        }
    }
    // Once somebody went on from there, it is too late to ask.
    let parked = StepCommit { status: parked(), ..step(&running(22), 1, vec![mark(1), mark(2)]) };
    store.claim(u32::MAX, at(9)).await.unwrap();
    is_fenced(store.commit_step(parked).await, &running(22), 1);
}

pub(crate) async fn a_step_that_knows_other_events_is_refused<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    store.commit_step(step(&new, 1, vec![mark(1), mark(2)])).await.unwrap();
    let before = (run(&store, &new).await, events(&store, &new).await);
    for (known, bodies) in [
        (2, vec![mark(1), mark(3)]),
        (2, vec![mark(1)]),
        (2, vec![mark(1), mark(2), mark(3)]),
        (2, vec![]),
        (3, vec![mark(2), mark(3)]),
        (5, vec![mark(3)]),
        (0, vec![]),
    ] {
        is_fenced(store.commit_step(later(&new, 1, known, bodies)).await, &new, 1);
    }
    let another_time = StepCommit { time: at(5_001), ..step(&new, 1, vec![mark(1), mark(2)]) };
    is_fenced(store.commit_step(another_time).await, &new, 1);
    assert_eq!((run(&store, &new).await, events(&store, &new).await), before);
    store.commit_step(later(&new, 1, 4, vec![mark(3)])).await.unwrap();
}

pub(crate) async fn a_refused_step_leaves_others_whole<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let runs: Vec<NewRun> = (1..=60).map(running).collect();
    join_all(runs.iter().map(|new| store.create_run(new.clone()))).await.into_iter().for_each(|done| {
        done.unwrap();
    });
    // Every third write carries a wrong generation, every third one an id that exists already.
    let writes = runs.iter().enumerate().map(|(n, new)| {
        let store = Arc::clone(&store);
        async move {
            match n % 3 {
                0 => store.commit_step(step(new, 1, vec![mark(1)])).await.map(|done| done.events),
                1 => store.commit_step(step(new, 9, vec![mark(1)])).await.map(|done| done.events),
                _ => store.create_run(new.clone()).await.map(|done| done.events),
            }
        }
    });
    for ((n, new), answer) in runs.iter().enumerate().zip(join_all(writes).await) {
        let mut expected = stored(new);
        match n % 3 {
            0 => {
                answer.unwrap();
                expected = after(expected, &step(new, 1, vec![mark(1)]));
            }
            1 => is_fenced(answer, new, 9),
            _ => assert!(matches!(answer, Err(StoreError::Failed(_))), "{answer:?}"),
        }
        assert_eq!(run(&store, new).await, Some(expected));
    }
}
