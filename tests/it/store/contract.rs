//! What every database has to do for the verbs of [`Store`]. A database runs the whole of it with
//! [`contract_suite`].

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::join_all;
use hames::domain::{
    EncodedBody, Event, EventBody, EventKind, Message, OutcomeKind, Run, RunStatus, RunStatusName, TenantId, Timestamp,
};
use hames::store::{ClaimedRun, NewRun, RunFilter, StepCommit, Store, StoreError};

use super::sample::{
    aborted, asking, at, body, completed, ended, id, labels, mark, queued, result, running, said, started, step, tenant,
};

/// An empty database for one test.
#[async_trait::async_trait]
pub(crate) trait Database: Send + Sync + Sized {
    /// A new one.
    async fn fresh() -> Self;

    /// Its open store.
    fn store(&self) -> Arc<dyn Store>;

    /// Lets go of the store without closing it, and opens it again.
    async fn crash(&mut self);
}

/// Makes a test of each part of the contract.
macro_rules! contract_suite {
    ($database:ty) => {
        $crate::store::contract::contract_suite!(@ $database:
            a_created_run_reads_back,
            a_run_that_starts_at_once_is_not_in_the_queue,
            the_same_id_is_not_stored_twice,
            another_tenant_sees_nothing,
            a_step_stores_everything_together,
            an_end_is_final,
            a_run_can_end_in_the_queue,
            an_old_generation_is_refused,
            a_step_without_events_moves_the_run,
            events_are_read_in_pages,
            parallel_steps_number_without_gaps,
            a_refused_step_leaves_others_whole,
            any_text_reads_back_byte_for_byte,
            a_huge_result_reads_back,
            a_message_with_text_and_calls_is_one_event,
            results_are_read_in_the_order_of_the_calls,
            the_oldest_is_claimed_first,
            a_claimed_run_brings_everything_along,
            parallel_claims_never_share_a_run,
            one_run_is_claimed_out_of_order,
            interrupted_runs_are_claimed_with_a_new_generation,
            a_cancel_request_keeps_its_first_instant,
            a_list_is_newest_first_and_in_pages,
            a_list_can_be_filtered,
            what_was_acknowledged_outlives_a_crash,
            a_closed_store_refuses_work,
        );
    };
    (@ $database:ty: $($name:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $name() {
                $crate::store::contract::$name::<$database>().await;
            }
        )*
    };
}
pub(crate) use contract_suite;

/// The events that storing `bodies` from number `first` on gives.
fn numbered(new: &NewRun, first: u64, time: Timestamp, bodies: &[EncodedBody]) -> Vec<Event> {
    let number = |(seq, body): (u64, &EncodedBody)| Event { run: new.run.id, seq, time, body: body.clone() };
    (first..).zip(bodies).map(number).collect()
}

/// The run as it is read after it was stored.
fn stored(new: &NewRun) -> Run {
    Run { last_seq: new.events.len() as u64, ..new.run.clone() }
}

/// The run as it is read after a step.
fn after(run: Run, commit: &StepCommit) -> Run {
    Run {
        status: commit.status.clone(),
        steps: commit.steps,
        tool_calls: commit.tool_calls,
        usage: commit.usage,
        last_seq: run.last_seq + commit.events.len() as u64,
        ..run
    }
}

fn claimed(new: &NewRun, now: Timestamp) -> ClaimedRun {
    let run = Run {
        generation: 1,
        status: RunStatus::Running { started_at: now, deadline_at: now.plus(std::time::Duration::from_secs(60)) },
        ..stored(new)
    };
    ClaimedRun { run, spec: new.spec.clone(), state: None, transcript: Vec::new() }
}

async fn create(store: &Arc<dyn Store>, new: &NewRun) {
    store.create_run(new.clone()).await.unwrap();
}

async fn run(store: &Arc<dyn Store>, new: &NewRun) -> Option<Run> {
    store.run(&new.run.tenant, new.run.id).await.unwrap()
}

async fn events(store: &Arc<dyn Store>, new: &NewRun) -> Vec<Event> {
    store.events_after(&new.run.tenant, new.run.id, 0, u32::MAX).await.unwrap()
}

fn is_fenced<T: std::fmt::Debug>(result: Result<T, StoreError>, new: &NewRun, refused: u64) {
    match result {
        Err(StoreError::Fenced { run, generation }) => assert_eq!((run, generation), (new.run.id, refused)),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

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

pub(crate) async fn another_tenant_sees_nothing<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = queued(1);
    create(&store, &new).await;
    for (who, what) in [(TenantId::new("other"), id(1)), (TenantId::new(""), id(1)), (tenant(), id(2))] {
        assert_eq!(store.run(&who, what).await.unwrap(), None);
        assert_eq!(store.events_after(&who, what, 0, 10).await.unwrap(), []);
        assert_eq!(store.transcript(&who, what).await.unwrap(), None);
        assert_eq!(store.claim_run(&who, what, at(9)).await.unwrap(), None);
        assert_eq!(store.request_cancel(&who, what, at(9)).await.unwrap(), None);
    }
    assert_eq!(store.list_runs(&TenantId::new("other"), &RunFilter::default(), None, 10).await.unwrap(), []);
    assert_eq!(run(&store, &new).await, Some(stored(&new)));
}

pub(crate) async fn a_step_stores_everything_together<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let commit = step(&new, 1, vec![mark(1), mark(2)]);
    let returned = store.commit_step(commit.clone()).await.unwrap();
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
        state: Some(commit.state),
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
    assert_eq!(store.claim_run(&tenant(), id(1), at(9)).await.unwrap(), None);
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
    assert_eq!(store.commit_step(commit.clone()).await.unwrap(), []);
    assert_eq!(run(&store, &new).await, Some(after(stored(&new), &commit)));
}

pub(crate) async fn events_are_read_in_pages<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let (new, other) = (running(1), running(2));
    create(&store, &other).await;
    create(&store, &new).await;
    // More than fit one statement.
    let commit = step(&new, 1, (1..=100).map(mark).collect());
    let returned = store.commit_step(commit).await.unwrap();
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

/// A number read as "highest so far plus one" would collide here (praxis-proxy/ai#662).
pub(crate) async fn parallel_steps_number_without_gaps<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    let appends = (0..100).map(|n| {
        let (store, commit) = (Arc::clone(&store), step(&new, 1, vec![mark(2 * n), mark(2 * n + 1)]));
        async move { store.commit_step(commit).await.unwrap() }
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
                0 => store.commit_step(step(new, 1, vec![mark(1)])).await,
                1 => store.commit_step(step(new, 9, vec![mark(1)])).await,
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

/// A NUL escaped by replacing text would break the literal six characters (osbuild/osbuild-composer#4779).
pub(crate) async fn any_text_reads_back_byte_for_byte<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let text = "\\u0000 \u{0} \\\u{0}\\ \"\u{7f}\u{1}\r\n\u{2028}\u{fffd}\u{ffff}😀é\u{301}\u{10ffff}' OR 1=1; --";
    let mut new = running(1);
    new.run.agent = text.to_owned();
    new.run.tenant = TenantId::new(text);
    new.run.metadata = labels(&[(text, text), ("", ""), ("%", "_")]);
    new.spec.metadata = new.run.metadata.clone();
    new.spec.input = vec![Message::user(text)];
    new.state = Some(text.to_owned());
    create(&store, &new).await;
    let bodies = vec![said(asking(text, &["a"])), ended("a", text)];
    let returned = store.commit_step(StepCommit { state: text.to_owned(), ..step(&new, 1, bodies.clone()) }).await;
    assert_eq!(returned.unwrap(), numbered(&new, 3, at(5_000), &bodies));
    assert_eq!(events(&store, &new).await[2..], numbered(&new, 3, at(5_000), &bodies));
    let transcript = vec![Message::user(text), asking(text, &["a"]), result("a", text)];
    assert_eq!(store.transcript(&new.run.tenant, id(1)).await.unwrap(), Some(transcript.clone()));

    let expected = after(stored(&new), &step(&new, 1, bodies));
    assert_eq!(run(&store, &new).await, Some(expected.clone()));
    for pair in [(text, text), ("", ""), ("%", "_")] {
        let filter = RunFilter {
            agent: Some(text.to_owned()),
            metadata: vec![(pair.0.to_owned(), pair.1.to_owned())],
            ..RunFilter::default()
        };
        assert_eq!(store.list_runs(&new.run.tenant, &filter, None, 9).await.unwrap(), std::slice::from_ref(&expected));
    }
    let end = store.commit_step(StepCommit { status: completed(), ..step(&new, 1, vec![]) }).await;
    assert_eq!(end.unwrap(), []);
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
    assert_eq!(large.unwrap(), numbered(&new, 3, at(5_000), &bodies));
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
    for bodies in [vec![mark(1), said(turn.clone())], vec![ended("a", "1")], vec![ended("b", "2")]] {
        store.commit_step(step(&new, 1, bodies)).await.unwrap();
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
    let claims = store.claim_interrupted().await.unwrap();
    assert_eq!(claims.into_iter().map(|claim| claim.transcript).collect::<Vec<_>>(), [logged]);
    assert!(matches!(result("a", "1"), Message::Tool(message) if message.outcome == OutcomeKind::Result));
}

pub(crate) async fn the_oldest_is_claimed_first<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let mut other = queued(2);
    other.run.tenant = TenantId::new("other");
    for new in [&queued(3), &queued(1), &other, &running(4)] {
        create(&store, new).await;
    }
    assert_eq!(store.claim_queued(0, at(9)).await.unwrap(), []);
    assert_eq!(store.claim_queued(2, at(9)).await.unwrap(), [claimed(&queued(1), at(9)), claimed(&other, at(9))]);
    assert_eq!(run(&store, &queued(1)).await, Some(claimed(&queued(1), at(9)).run));
    assert_eq!(store.queued().await.unwrap(), 1);
    assert_eq!(store.claim_queued(u32::MAX, at(10)).await.unwrap(), [claimed(&queued(3), at(10))]);
    assert_eq!(store.claim_queued(5, at(11)).await.unwrap(), []);
    store.commit_step(step(&running(1), 1, vec![mark(1)])).await.unwrap();
}

pub(crate) async fn a_claimed_run_brings_everything_along<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    let new = running(1);
    create(&store, &new).await;
    // Back to the queue after a step, as a server does that stops.
    let parked =
        StepCommit { status: RunStatus::Queued, ..step(&new, 1, vec![said(asking("", &["a"])), ended("a", "1")]) };
    store.commit_step(parked.clone()).await.unwrap();
    let claims = store.claim_queued(1, at(9)).await.unwrap();
    let run = Run {
        generation: 2,
        status: RunStatus::Running { started_at: at(9), deadline_at: at(60_009) },
        ..after(stored(&new), &parked)
    };
    let transcript = vec![asking("", &["a"]), result("a", "1")];
    assert_eq!(claims, [ClaimedRun { run, spec: new.spec, state: Some(parked.state), transcript }]);
}

pub(crate) async fn parallel_claims_never_share_a_run<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for number in 1..=40 {
        create(&store, &queued(number)).await;
    }
    let claims = (0..30).map(|n| {
        let store = Arc::clone(&store);
        async move {
            match n % 3 {
                0 => store.claim_run(&tenant(), id(n + 1), at(9)).await.unwrap().into_iter().collect(),
                _ => store.claim_queued(3, at(9)).await.unwrap(),
            }
        }
    });
    let taken: Vec<ClaimedRun> = join_all(claims).await.into_iter().flatten().collect();
    let distinct: HashSet<_> = taken.iter().map(|claim| claim.run.id).collect();
    assert_eq!((taken.len(), distinct.len()), (40, 40));
    assert!(taken.iter().all(|claim| claim.run.generation == 1));
}

pub(crate) async fn one_run_is_claimed_out_of_order<D: Database>() {
    let database = D::fresh().await;
    let store = database.store();
    for new in [&queued(1), &queued(2), &running(3)] {
        create(&store, new).await;
    }
    assert_eq!(store.claim_run(&tenant(), id(2), at(9)).await.unwrap(), Some(claimed(&queued(2), at(9))));
    assert_eq!(store.claim_run(&tenant(), id(2), at(9)).await.unwrap(), None);
    assert_eq!(store.claim_run(&tenant(), id(3), at(9)).await.unwrap(), None);
    assert_eq!(store.claim_queued(9, at(10)).await.unwrap(), [claimed(&queued(1), at(10))]);
}

pub(crate) async fn interrupted_runs_are_claimed_with_a_new_generation<D: Database>() {
    let mut database = D::fresh().await;
    let store = database.store();
    for new in [&queued(1), &running(2), &running(3)] {
        create(&store, new).await;
    }
    store.commit_step(StepCommit { status: completed(), ..step(&running(3), 1, vec![]) }).await.unwrap();
    store.claim_queued(1, at(9)).await.unwrap();
    create(&store, &queued(4)).await;
    drop(store);
    database.crash().await;
    let store = database.store();

    let started_1 = claimed(&queued(1), at(9));
    let expected = |generation: u64| {
        [
            ClaimedRun { run: Run { generation, ..started_1.run.clone() }, ..started_1.clone() },
            ClaimedRun {
                run: Run { generation, status: started(2), ..stored(&running(2)) },
                spec: running(2).spec,
                state: running(2).state,
                transcript: Vec::new(),
            },
        ]
    };
    assert_eq!(store.claim_interrupted().await.unwrap(), expected(2));
    // Nothing says that this process holds them; a second call takes them again.
    assert_eq!(store.claim_interrupted().await.unwrap(), expected(3));
    is_fenced(store.commit_step(step(&running(2), 2, vec![mark(1)])).await, &running(2), 2);
    store.commit_step(step(&running(2), 3, vec![mark(1)])).await.unwrap();
    assert_eq!(store.queued().await.unwrap(), 1);
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
    // It is seen by whoever takes the run, and does not stand in the way of the end.
    let claims = store.claim_queued(1, at(70)).await.unwrap();
    assert_eq!(claims.first().and_then(|claim| claim.run.cancel_requested_at), Some(at(50)));
    let last = StepCommit { status: aborted(), ..step(&active, 1, vec![mark(1)]) };
    store.commit_step(last.clone()).await.unwrap();
    let ended = Run { cancel_requested_at: Some(at(50)), ..after(stored(&active), &last) };
    assert_eq!(run(&store, &active).await, Some(ended.clone()));
    assert_eq!(store.request_cancel(&tenant(), id(2), at(90)).await.unwrap(), Some(ended));
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

pub(crate) async fn what_was_acknowledged_outlives_a_crash<D: Database>() {
    let mut database = D::fresh().await;
    let store = database.store();
    let runs: Vec<NewRun> = (1..=50).map(running).collect();
    let acknowledged = join_all(runs.iter().map(|new| async {
        let mut log = store.create_run(new.clone()).await.unwrap();
        log.extend(store.commit_step(step(new, 1, vec![mark(1)])).await.unwrap());
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
