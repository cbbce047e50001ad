//! What stands in the database, and what happens when it does not read.

use hames::config::{Durability, StoreConfig};
use hames::domain::{EventKind, RunStatus, RunStatusName};
use hames::store::{RunFilter, Store, StoreError};
use sqlx::{ConnectOptions, Connection, Row};

use super::super::contract::Database;
use super::database::{Empty, PATIENT, PostgresDatabase, need_postgres, open};
use crate::store::sample::{at, id, in_thread, mark, queued, running, step, tenant};

#[tokio::test]
async fn every_commit_is_told_of_and_flushed() {
    need_postgres!();
    let database = PostgresDatabase::fresh().await;
    let store = database.store();
    database.commits.lock().unwrap().clear();
    store.create_run(running(1)).await.unwrap();
    store.commit_step(step(&running(1), 1, vec![mark(1)])).await.unwrap();
    store.create_run(in_thread(2, "t", hames::domain::OnBusy::Reject)).await.unwrap();
    store.run(&tenant(), id(1)).await.unwrap();
    assert_eq!(*database.commits.lock().unwrap(), [1, 1, 1]);
    // What is set for the database does not weaken it.
    let empty = Empty::create().await;
    empty.tamper(&format!("ALTER DATABASE {} SET synchronous_commit = off", empty.name)).await;
    for (durability, expected) in [(Durability::Full, "on"), (Durability::Process, "off")] {
        empty.tamper("DROP TABLE IF EXISTS seen").await;
        let config = StoreConfig { durability, ..empty.config() };
        let store = open(&config, PATIENT).await.unwrap();
        let watch = "CREATE TABLE seen AS SELECT ''::text AS setting WHERE FALSE; \
            CREATE OR REPLACE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
            INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$; \
            CREATE OR REPLACE TRIGGER watches BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION watch()";
        empty.tamper(watch).await;
        let number = if expected == "on" { 1 } else { 2 };
        store.create_run(queued(number)).await.unwrap();
        let mut connection = empty.options().connect().await.unwrap();
        let rows = sqlx::query("SELECT setting FROM seen").fetch_all(&mut connection).await.unwrap();
        let seen: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(seen, [expected]);
        connection.close().await.unwrap();
        store.close().await;
    }
}

#[tokio::test]
async fn a_newer_or_a_changed_schema_is_refused() {
    need_postgres!();
    let database = Empty::create().await;
    database.open(PATIENT).await.close().await;
    for (sql, expected) in [
        ("UPDATE _sqlx_migrations SET checksum = '\\x00' WHERE version = 1", "unreleased build"),
        ("INSERT INTO _sqlx_migrations VALUES (77, 'later', now(), TRUE, '\\x00', 1)", "has schema version 77"),
    ] {
        database.tamper(sql).await;
        let Err(StoreError::Unusable(text)) = open(&database.config(), PATIENT).await else { panic!("{sql}") };
        assert!(text.contains(expected) && text.contains(&database.name), "{text}");
    }
}

#[tokio::test]
async fn a_database_that_cannot_hold_every_text_is_refused() {
    need_postgres!();
    let database = Empty::create().await;
    let other = Empty { name: format!("{}_ascii", database.name) };
    let sql =
        format!("CREATE DATABASE {} TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'", other.name);
    database.tamper(&sql).await;
    let Err(StoreError::Unusable(text)) = open(&other.config(), PATIENT).await else { panic!("it was opened") };
    assert!(text.contains("has the encoding SQL_ASCII"), "{text}");
    let missing = StoreConfig {
        url: format!("{}_missing", database.config().url.expose().split('?').next().unwrap()).into(),
        ..database.config()
    };
    let Err(StoreError::Unusable(text)) = open(&missing, PATIENT).await else { panic!("it was opened") };
    assert!(text.contains("does not exist"), "{text}");
}

/// A queued run that cannot be read must not stand in everybody's way (EvoScientist/EvoScientist#358).
#[tokio::test]
async fn a_run_that_does_not_read_ends_once_and_the_next_is_claimed() {
    need_postgres!();
    let database = PostgresDatabase::fresh().await;
    let store = database.store();
    for number in 1..=4 {
        store.create_run(queued(number)).await.unwrap();
    }
    let sql = "DELETE FROM run_specs WHERE run LIKE '%1'; UPDATE run_specs SET spec = '{}' WHERE run LIKE '%2'; \
        INSERT INTO run_events VALUES ('run_01900000000070008000000000000003', 2, 0, 'message', '\\x7b7d')";
    database.empty.tamper(sql).await;
    let error = store.load(&tenant(), id(2)).await.unwrap_err();
    assert!(matches!(&error, StoreError::Corrupt { run, .. } if *run == id(2)), "{error}");
    let claims = store.claim(9, at(900)).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.run.id).collect::<Vec<_>>(), [id(4)]);
    assert_eq!(store.backlog().await.unwrap().ready, 0);
    for (number, last) in [(1, 2), (2, 2), (3, 3)] {
        let run = store.run(&tenant(), id(number)).await.unwrap().unwrap();
        assert_eq!((run.status.name(), run.last_seq), (RunStatusName::InternalError, last));
        let RunStatus::Finished { finished_at, .. } = run.status else { panic!("{run:?}") };
        assert_eq!(finished_at, at(900));
        let log = store.events_after(&tenant(), id(number), last - 1, 9).await.unwrap();
        assert_eq!(log.iter().map(|event| event.body.kind).collect::<Vec<_>>(), [EventKind::RunEnd]);
    }
}

#[tokio::test]
async fn a_row_that_does_not_read_is_named_and_harms_no_other() {
    need_postgres!();
    let database = PostgresDatabase::fresh().await;
    let store = database.store();
    for number in 1..=4 {
        store.create_run(queued(number)).await.unwrap();
    }
    let sql = "UPDATE runs SET limits = '{' WHERE id LIKE '%2'; UPDATE runs SET status = 'paused' WHERE id LIKE '%3'";
    database.empty.tamper(sql).await;
    for number in [2, 3] {
        let error = store.run(&tenant(), id(number)).await.unwrap_err();
        assert!(matches!(&error, StoreError::Corrupt { run, .. } if *run == id(number)), "{error}");
    }
    let listed = store.list_runs(&tenant(), &RunFilter::default(), None, 2).await.unwrap();
    assert_eq!(listed.iter().map(|run| run.id).collect::<Vec<_>>(), [id(4), id(1)]);
}
