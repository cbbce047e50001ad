//! Runs and steps are written whole, or refused.

use std::sync::Arc;

use futures_util::future::join_all;
use hames::domain::{Event, EventBody, EventKind, Message, Run, TenantId};
use hames::store::{ClaimedRun, NewRun, StepCommit, StoreError};

use super::{Database, after, create, events, is_fenced, numbered, run, stored};
use crate::store::sample::{aborted, at, body, completed, id, mark, queued, running, step, tenant};

pub(crate) async fn a_created_run_reads_back<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    assert_eq!(store.queued().await.unwrap(), 0);
    let returned = store.create_run(new.clone()).await.unwrap();
    assert_eq!(returned, numbered(&new, 1, new.run.created_at, &new.events));
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    assert_eq!(events(&store, &new).await, returned);
    assert_eq!(store.transcript(&tenant(), id(1)).await.unwrap(), Some(new.spec.input));
    assert_eq!(store.queued().await.unwrap(), 1);
    store.health().await.unwrap();
}

pub(crate) async fn a_run_that_starts_at_once_is_not_in_the_queue<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    let returned = store.create_run(new.clone()).await.unwrap();
    assert_eq!(returned, numbered(&new, 1, new.run.created_at, &new.events));
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
    assert_eq!(store.queued().await.unwrap(), 0);
    assert_eq!(store.claim_queued(10, at(9)).await.unwrap(), []);
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
    // The machine's state is what a claim gives.
    let claim = store.claim_interrupted().await.unwrap();
    let expected = ClaimedRun {
        run: Run { generation: 2, ..expected },
        spec: new.spec,
        state: commit.state,
        transcript: Vec::new(),
    };
    assert_eq!(claim, [expected]);
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
    is_fenced(store.commit_step(StepCommit { status: aborted(), ..step(&new, 1, vec![]) }).await, &new, 1);
    is_fenced(store.commit_step(step(&new, 2, vec![mark(9)])).await, &new, 2);
    assert_eq!(store.request_cancel(&tenant(), id(1), at(9)).await.unwrap(), Some(finished.clone()));
    assert_eq!(store.claim_queued(10, at(9)).await.unwrap(), []);
    assert_eq!(store.claim_interrupted().await.unwrap(), []);
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
    assert_eq!(store.queued().await.unwrap(), 0);
    assert_eq!(store.claim_queued(10, at(9)).await.unwrap(), []);
}

pub(crate) async fn an_old_generation_is_refused<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    assert_eq!(store.claim_interrupted().await.unwrap().len(), 1);
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
    let appends = (0..100).map(|n| {
        let (store, commit) = (Arc::clone(&store), step(&new, 1, vec![mark(2 * n), mark(2 * n + 1)]));
        async move { store.commit_step(commit).await.unwrap().events }
    });
    let mut returned: Vec<Event> = join_all(appends).await.into_iter().flatten().collect();
    returned.sort_by_key(|event| event.seq);
    let log = events(&store, &new).await;
    assert_eq!(log.iter().map(|event| event.seq).collect::<Vec<_>>(), (1..=202).collect::<Vec<_>>());
    assert_eq!(log[2..], returned);
    assert_eq!(run(&store, &new).await.map(|run| run.last_seq), Some(202));
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
                _ => store.create_run(new.clone()).await,
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
