//! A server that is away, silent, or broken, and connections that break at the worst moment.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use hames::domain::{OnBusy, Seq};
use hames::store::postgres::{PostgresStore, Timing};
use hames::store::{Backlog, Former, NewRun, StepCommit, Store, StoreError};
use tokio::time::{Instant, timeout};

use super::database::{Empty, PATIENT, config, need_postgres, open};
use super::proxy::Proxy;
use crate::store::sample::{at, completed, id, in_thread, key, later, mark, parked, queued, running, step, tenant};

/// A store that reaches its server through a network that can be broken.
async fn behind_proxy(connections: u32, timing: Timing) -> (Empty, Proxy, Arc<PostgresStore>) {
    let (database, proxy) = (Empty::create().await, Proxy::start().await);
    let mut config = config(&proxy.options(database.options()));
    config.max_connections = connections;
    let store = open(&config, timing).await.unwrap();
    (database, proxy, store)
}

#[track_caller]
fn is_unavailable<T: std::fmt::Debug>(outcome: Result<T, StoreError>) {
    assert!(matches!(outcome, Err(StoreError::Unavailable(_))), "{outcome:?}");
}

async fn log(store: &dyn Store, number: u32) -> Vec<Seq> {
    let events = store.events_after(&tenant(), id(number), 0, 99).await.unwrap();
    events.iter().map(|event| event.seq).collect()
}

#[tokio::test]
async fn a_server_that_is_down_is_told_of_within_a_second_and_found_again() {
    need_postgres!();
    let (_database, proxy, store) = behind_proxy(4, Timing::default()).await;
    store.create_run(running(1)).await.unwrap();
    proxy.take_down();
    for number in 2..6 {
        let begun = Instant::now();
        is_unavailable(store.create_run(queued(number)).await);
        is_unavailable(store.health().await);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }
    is_unavailable(store.commit_step(step(&running(1), 1, vec![mark(1)])).await);
    proxy.mend();
    store.health().await.unwrap();
    store.create_run(queued(2)).await.unwrap();
    store.commit_step(step(&running(1), 1, vec![mark(1)])).await.unwrap();
}

/// A peer that falls silent without a word leaves calls waiting, and used to leave the pool without connections
/// (transact-rs/sqlx#4349).
#[tokio::test]
async fn a_server_that_falls_silent_costs_a_second_and_no_connection() {
    need_postgres!();
    let timing = Timing { work: Duration::from_millis(1_500), ..Timing::default() };
    let (_database, proxy, store) = behind_proxy(3, timing).await;
    store.create_run(running(1)).await.unwrap();
    for _ in 0..2 {
        join_all((0..6).map(|_| store.health())).await.into_iter().for_each(|done| done.unwrap());
        proxy.silence();
        // More than there are connections; some are given up by their callers.
        let given_up = join_all((0..3).map(|_| timeout(Duration::from_millis(50), store.health()))).await;
        assert!(given_up.iter().all(Result::is_err));
        let begun = Instant::now();
        let calls = join_all((10..22).map(|number| store.create_run(queued(number)))).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        calls.into_iter().for_each(is_unavailable);
        is_unavailable(store.commit_step(step(&running(1), 1, vec![mark(1)])).await);
        proxy.mend();
    }
    let opened = proxy.opened();
    join_all((0..9).map(|_| store.health())).await.into_iter().for_each(|done| done.unwrap());
    assert!(proxy.opened() - opened <= 3, "{}", proxy.opened() - opened);
    store.commit_step(step(&running(1), 1, vec![mark(1)])).await.unwrap();
    assert_eq!(log(&*store, 1).await, [1, 2, 3]);
}

/// Connections that were idle while the server was started again are noticed before they are used.
#[tokio::test]
async fn idle_connections_that_died_are_not_used() {
    need_postgres!();
    let (_database, proxy, store) = behind_proxy(4, PATIENT).await;
    join_all((0..8).map(|_| store.health())).await.into_iter().for_each(|done| done.unwrap());
    proxy.take_down();
    proxy.mend();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    // A claim is not carried out twice, so it has to meet a good connection at once.
    assert_eq!(store.claim(1, at(9)).await.unwrap(), []);
}

#[tokio::test]
async fn a_step_whose_answer_is_lost_is_stored_once() {
    need_postgres!();
    let (_database, proxy, store) = behind_proxy(1, PATIENT).await;
    let new = running(1);
    store.create_run(new.clone()).await.unwrap();
    let first = step(&new, 1, vec![mark(1)]);
    store.commit_step(first).await.unwrap();
    // The statement is known to the connection now, so the next request is the commit itself.
    let commit = later(&new, 1, 3, vec![mark(2), mark(3)]);
    proxy.cut_answer_to("model_start");
    let committed = store.commit_step(commit.clone()).await.unwrap();
    assert_eq!(proxy.cuts(), 1);
    assert_eq!(committed.events.iter().map(|event| event.seq).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(store.commit_step(commit).await.unwrap(), committed);
    assert_eq!(log(&*store, 1).await, [1, 2, 3, 4, 5]);
    let last = StepCommit { status: completed(), ..later(&new, 1, 5, vec![mark(4)]) };
    store.commit_step(later(&new, 1, 5, vec![])).await.unwrap();
    proxy.cut_answer_to("model_start");
    store.commit_step(last).await.unwrap();
    assert_eq!((proxy.cuts(), log(&*store, 1).await), (2, vec![1, 2, 3, 4, 5, 6]));
    // A key is not taken by the step it was used for.
    store.create_run(running(2)).await.unwrap();
    let keyed = StepCommit { key: Some(key("k", "print", 1)), ..step(&running(2), 1, vec![mark(1)]) };
    proxy.cut_answer_to("COMMIT");
    let committed = store.commit_step(keyed.clone()).await.unwrap();
    assert_eq!(committed.events.iter().map(|event| event.seq).collect::<Vec<_>>(), [3]);
    assert_eq!((proxy.cuts(), log(&*store, 2).await), (3, vec![1, 2, 3]));
    assert!(matches!(store.commit_step(keyed).await, Err(StoreError::KeyTaken(kept)) if kept.run == id(2)));
}

#[tokio::test]
async fn a_step_whose_answer_is_lost_may_be_handed_in_again_later() {
    need_postgres!();
    let timing = Timing { work: Duration::from_millis(500), ..Timing::default() };
    let (database, proxy, store) = behind_proxy(1, timing).await;
    for (number, status) in [(1, None), (2, Some(parked()))] {
        let new = running(number);
        store.create_run(new.clone()).await.unwrap();
        store.commit_step(step(&new, 1, vec![])).await.unwrap();
        let first = step(&new, 1, vec![mark(1)]);
        let commit = StepCommit { status: status.unwrap_or(first.status.clone()), ..first };
        proxy.cut_answer_to("model_start");
        let (lost, ()) = tokio::join!(store.commit_step(commit.clone()), async {
            while proxy.cuts() < number as usize {
                tokio::task::yield_now().await;
            }
            proxy.take_down();
        });
        is_unavailable(lost);
        let other = database.open(PATIENT).await;
        assert_eq!(log(&*other, number).await, [1, 2, 3]);
        is_unavailable(store.commit_step(commit.clone()).await);
        proxy.mend();
        let committed = store.commit_step(commit).await.unwrap();
        assert_eq!(committed.events.iter().map(|event| event.seq).collect::<Vec<_>>(), [3]);
        assert_eq!(log(&*store, number).await, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_run_whose_answer_is_lost_is_stored_once() {
    need_postgres!();
    let (_database, proxy, store) = behind_proxy(1, PATIENT).await;
    let keyed = |number| NewRun { key: Some(key(&format!("k{number}"), "print", 1)), ..queued(number) };
    let interrupting = |number| in_thread(number, "t", OnBusy::Interrupt);
    store.create_run(queued(1)).await.unwrap();
    store.create_run(keyed(2)).await.unwrap();
    store.create_run(interrupting(3)).await.unwrap();
    for (cuts, (text, new)) in
        (1..).zip([("run_queued", queued(11)), ("run_queued", keyed(12)), ("COMMIT", interrupting(13))])
    {
        proxy.cut_answer_to(text);
        let created = store.create_run(new.clone()).await.unwrap();
        assert_eq!((proxy.cuts(), created.run.id), (cuts, new.run.id));
        assert_eq!(store.run(&tenant(), new.run.id).await.unwrap(), Some(created.run));
        let log = store.events_after(&tenant(), new.run.id, 0, 99).await.unwrap();
        assert_eq!(log, created.events);
        assert_eq!(created.interrupted, if new.run.thread.is_some() { vec![id(3)] } else { vec![] });
        // Another run of the same id is as wrong as ever.
        let again = store.create_run(NewRun { key: None, on_busy: OnBusy::Queue, ..new }).await;
        assert!(matches!(again, Err(StoreError::Failed(_))), "{again:?}");
    }
    assert_eq!(store.backlog().await.unwrap(), Backlog { ready: 5, blocked: 1 });
    assert!(matches!(store.create_run(keyed(12)).await, Err(StoreError::KeyTaken(kept)) if kept.run == id(12)));
}

#[tokio::test]
async fn a_claim_whose_answer_is_lost_is_held() {
    need_postgres!();
    let (_database, proxy, store) = behind_proxy(1, PATIENT).await;
    for number in 1..=3 {
        store.create_run(queued(number)).await.unwrap();
    }
    assert_eq!(store.claim(1, at(9)).await.unwrap().len(), 1);
    proxy.cut_answer_to("COMMIT");
    is_unavailable(store.claim(1, at(9)).await);
    let mut held = store.held().await.unwrap();
    held.sort_by_key(|(_, run)| *run);
    assert_eq!(held, [(tenant(), id(1)), (tenant(), id(2))]);
    let taken = store.reclaim(&tenant(), id(2)).await.unwrap().unwrap();
    assert_eq!((taken.run.generation, taken.run.crashes, taken.former), (2, 0, Former::LetGo));
    store.commit_step(later(&running(2), 2, 1, vec![mark(1)])).await.unwrap();
}

/// Raises an error for each new run, by the condition and with the code that are given.
async fn break_creates(database: &Empty, condition: &str, code: &str) {
    let sql = format!(
        "CREATE SEQUENCE IF NOT EXISTS breaks; \
         CREATE OR REPLACE FUNCTION breaking() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF {condition} THEN RAISE EXCEPTION 'broken on purpose' USING ERRCODE = '{code}'; END IF; RETURN NEW; END $$; \
         CREATE OR REPLACE TRIGGER breaks BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION breaking()"
    );
    database.tamper(&sql).await;
}

#[tokio::test]
async fn a_full_disk_ends_all_writing() {
    need_postgres!();
    let database = Empty::create().await;
    let store = database.open(PATIENT).await;
    store.create_run(running(1)).await.unwrap();
    // An error of one statement is that statement's.
    break_creates(&database, "TRUE", "22000").await;
    assert!(matches!(store.create_run(queued(2)).await, Err(StoreError::Failed(_))));
    assert!(futures_util::poll!(Box::pin(store.failed())).is_pending());
    store.commit_step(step(&running(1), 1, vec![mark(1)])).await.unwrap();

    break_creates(&database, "TRUE", "53100").await;
    assert!(matches!(store.create_run(queued(3)).await, Err(StoreError::Failed(_))));
    store.failed().await;
    let refused = store.commit_step(later(&running(1), 1, 3, vec![mark(2)])).await;
    assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    assert!(matches!(store.health().await, Err(StoreError::Failed(_))));
    assert_eq!(log(&*store, 1).await, [1, 2, 3]);
}

#[tokio::test]
async fn what_others_were_in_the_way_of_is_done_again() {
    need_postgres!();
    let database = Empty::create().await;
    let store = database.open(PATIENT).await;
    // Twice, then no more.
    for (code, number) in [("40001", 1), ("40P01", 2)] {
        database.tamper("DROP SEQUENCE IF EXISTS breaks").await;
        break_creates(&database, "nextval('breaks') <= 2", code).await;
        store.create_run(queued(number)).await.unwrap();
        database.tamper("DROP SEQUENCE IF EXISTS breaks").await;
        break_creates(&database, "nextval('breaks') <= 2", code).await;
        store.create_run(in_thread(number + 10, code, OnBusy::Reject)).await.unwrap();
    }
    break_creates(&database, "TRUE", "40001").await;
    is_unavailable(store.create_run(queued(3)).await);
    assert_eq!(store.backlog().await.unwrap().ready, 4);
}

/// After a failover an address may lead to a server that takes no writes.
#[tokio::test]
async fn a_server_that_takes_no_writes_is_unavailable_until_it_does() {
    need_postgres!();
    let database = Empty::create().await;
    let store = database.open(PATIENT).await;
    let name = &database.name;
    database.at_server(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on")).await;
    // Connections that are open go on as before, so they are closed.
    let close = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'");
    database.at_server(&close).await;
    is_unavailable(store.health().await);
    is_unavailable(store.create_run(queued(1)).await);
    database.at_server(&format!("ALTER DATABASE {name} RESET default_transaction_read_only")).await;
    store.create_run(queued(1)).await.unwrap();
    store.health().await.unwrap();
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_without_its_password() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let url = format!("postgres://ann:s3cret@127.0.0.1:{port}/d");
    let settings = hames::config::StoreConfig { url: url.into(), ..Default::default() };
    tokio::time::pause();
    let Err(error) = open(&settings, PATIENT).await else { panic!("there is no server") };
    let text = format!("{error} {error:?} {settings:?}");
    assert!(text.contains(&format!("cannot connect to the database postgres://ann@127.0.0.1:{port}/d")), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}
