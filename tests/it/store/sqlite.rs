//! The contract on SQLite, and what only a database file can get wrong.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use hames::config::{Durability, StoreConfig};
use hames::domain::{Event, EventKind, Run, RunStatus, RunStatusName};
use hames::store::sqlite::SqliteStore;
use hames::store::{CommitObserver, Committed, Created, RunFilter, Store, StoreError, WorkerId};
use sqlx::{Connection, Row, SqliteConnection};
use tempfile::TempDir;

use super::contract::{Database, contract_suite};
use super::model::model_test;
use super::sample::{asking, at, ended, id, later, mark, queued, running, said, step, tenant};

contract_suite!(SqliteFile);
model_test!(40, SqliteFile);

/// A database in a folder of its own.
pub(crate) struct SqliteFile {
    folder: TempDir,
    store: Option<Arc<SqliteStore>>,
    commits: Arc<Mutex<Vec<usize>>>,
}

/// Keeps the number of writes of each commit.
struct Commits(Arc<Mutex<Vec<usize>>>);

impl CommitObserver for Commits {
    fn committed(&self, writes: usize, _took: Duration) {
        self.0.lock().unwrap().push(writes);
    }
}

impl SqliteFile {
    pub(crate) async fn with(durability: Durability) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let commits = Arc::default();
        let observer = Arc::new(Commits(Arc::clone(&commits)));
        let store =
            SqliteStore::open(&config(&folder.path().join("test.db"), durability), worker(), observer).await.unwrap();
        Self { folder, store: Some(Arc::new(store)), commits }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("test.db")
    }

    fn sqlite(&self) -> &Arc<SqliteStore> {
        self.store.as_ref().unwrap()
    }

    /// A connection that is not the store's, as another program has one.
    async fn foreign(&self) -> SqliteConnection {
        SqliteConnection::connect(&format!("sqlite:{}", self.path().display())).await.unwrap()
    }

    /// Changes the stored data behind the store's back.
    async fn tamper(&self, sql: &'static str) {
        let mut connection = self.foreign().await;
        let done = sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
        assert_ne!(done.rows_affected(), 0, "{sql}");
        connection.close().await.unwrap();
    }
}

fn config(path: &Path, durability: Durability) -> StoreConfig {
    StoreConfig { url: format!("sqlite:{}", path.display()).into(), durability, ..StoreConfig::default() }
}

fn worker() -> WorkerId {
    static PROCESSES: AtomicU32 = AtomicU32::new(0);
    WorkerId::new(format!("process-{}", PROCESSES.fetch_add(1, Ordering::Relaxed)))
}

#[async_trait::async_trait]
impl Database for SqliteFile {
    async fn fresh() -> Self {
        Self::with(Durability::Full).await
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::<SqliteStore>::clone(self.sqlite())
    }

    async fn crash(&mut self) {
        drop(self.store.take());
        // The runtime drops the aborted writer, and with it the lock, when it gets to it.
        loop {
            match SqliteStore::open(&config(&self.path(), Durability::Full), worker(), Arc::new(())).await {
                Ok(store) => break self.store = Some(Arc::new(store)),
                Err(StoreError::Unusable(text)) if text.contains("is in use") => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

async fn refusal(path: &Path) -> String {
    match SqliteStore::open(&config(path, Durability::Full), worker(), Arc::new(())).await {
        Err(StoreError::Unusable(text)) => text,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("{} was opened", path.display()),
    }
}

#[tokio::test]
async fn every_file_is_its_owners_alone() {
    let database = SqliteFile::fresh().await;
    database.store().create_run(queued(1)).await.unwrap();
    let mut files: Vec<(String, u32)> = std::fs::read_dir(database.folder.path())
        .unwrap()
        .map(Result::unwrap)
        .map(|file| {
            let name = file.file_name().into_string().unwrap();
            (name, file.metadata().unwrap().permissions().mode() & 0o777)
        })
        .collect();
    files.sort();
    let names = ["test.db", "test.db-shm", "test.db-wal", "test.db.lock"];
    assert_eq!(files, names.map(|name| (name.to_owned(), 0o600)));
}

#[tokio::test]
async fn a_second_server_is_refused_and_told_who_holds_the_file() {
    let database = SqliteFile::fresh().await;
    let link = database.folder.path().join("link.db");
    std::os::unix::fs::symlink(database.path(), &link).unwrap();
    for path in [database.path(), link] {
        let text = refusal(&path).await;
        let holder = format!("in use by process {}", std::process::id());
        assert!(text.contains(&holder) && text.contains("test.db.lock"), "{text}");
    }
    database.store().create_run(queued(1)).await.unwrap();
    database.store().close().await;
    // A closed one lets go, though the lock file stays.
    let next = SqliteStore::open(&config(&database.path(), Durability::Full), worker(), Arc::new(())).await.unwrap();
    assert_eq!(next.backlog().await.unwrap().ready, 1);
}

#[tokio::test]
async fn files_that_cannot_be_used_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.db");
    std::fs::write(&other, "This is a letter and not a database. ".repeat(100)).unwrap();
    for (path, expected) in [
        (folder.path().join("missing/h.db"), "No such file or directory"),
        (folder.path().to_owned(), "unable to open database file"),
        (other.clone(), "file is not a database"),
    ] {
        let text = refusal(&path).await;
        assert!(text.contains(expected) && text.contains(path.to_str().unwrap()), "{text}");
    }
    assert!(std::fs::read_to_string(other).unwrap().starts_with("This is a letter"));
}

#[tokio::test]
async fn a_newer_or_a_changed_schema_is_refused() {
    let mut database = SqliteFile::fresh().await;
    database.store().close().await;
    database.store = None;
    database.tamper("UPDATE _sqlx_migrations SET checksum = x'00' WHERE version = 1").await;
    let text = refusal(&database.path()).await;
    assert!(text.contains("schema version 1") && text.contains("unreleased build"), "{text}");
    database.tamper("INSERT INTO _sqlx_migrations VALUES (77, 'later', '2030-01-01', TRUE, x'00', 1)").await;
    let text = refusal(&database.path()).await;
    assert!(text.contains("has schema version 77") && text.contains("knows 1"), "{text}");
}

#[tokio::test]
async fn a_file_that_existed_keeps_its_mode_and_its_data() {
    let mut database = SqliteFile::fresh().await;
    database.store().create_run(queued(1)).await.unwrap();
    database.store().close().await;
    std::fs::set_permissions(database.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
    database.crash().await;
    assert_eq!(database.store().backlog().await.unwrap().ready, 1);
    assert_eq!(std::fs::metadata(database.path()).unwrap().permissions().mode() & 0o777, 0o640);
}

/// While another program holds the database for a moment, callers queue up; then they share one commit.
#[tokio::test]
async fn callers_that_wait_share_a_commit() {
    let database = SqliteFile::fresh().await;
    let store = database.sqlite();
    database.commits.lock().unwrap().clear();
    let mut other = database.foreign().await;
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let mut waiting: Vec<_> = (2..202).map(|number| Box::pin(store.create_run(running(number)))).collect();
    for write in &mut waiting {
        assert!(futures_util::poll!(write).is_pending());
    }
    sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    join_all(waiting).await.into_iter().for_each(|done| {
        done.unwrap();
    });
    let commits = database.commits.lock().unwrap().clone();
    // The first may have gone ahead alone.
    assert!((1..=2).contains(&commits.len()), "{commits:?}");
    assert_eq!(commits.iter().sum::<usize>(), 200);
}

/// A transaction that reads first and writes later fails at once when somebody else committed in between
/// (peakflo/20x#538): 50 writers beside a process that writes every 5 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_that_writes_makes_nobody_fail() {
    let database = SqliteFile::fresh().await;
    database.tamper("CREATE TABLE foreign_notes (n INTEGER); INSERT INTO foreign_notes VALUES (0)").await;
    // A thread with its own connection is to the store what another process is: both meet in the file's locks.
    let path = database.path();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let disturber = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let mut connection = SqliteConnection::connect(&format!("sqlite:{}", path.display())).await.unwrap();
            let mut ticks = tokio::time::interval(Duration::from_millis(5));
            let mut writes = 0_i64;
            while stopped.try_recv() == Err(tokio::sync::oneshot::error::TryRecvError::Empty) {
                ticks.tick().await;
                sqlx::query("UPDATE foreign_notes SET n = n + 1").execute(&mut connection).await.unwrap();
                writes += 1;
            }
            connection.close().await.unwrap();
            writes
        })
    });
    let store = database.store();
    let runs = (1..=50).map(|number| {
        let store = Arc::clone(&store);
        async move {
            // A claim reads before it writes: the order that a deferred transaction cannot survive.
            let new = running(number);
            store.create_run(queued(number)).await.unwrap();
            store.load(&tenant(), new.run.id).await.unwrap().unwrap();
            while store.run(&tenant(), new.run.id).await.unwrap().unwrap().generation == 0 {
                store.claim(1, at(0)).await.unwrap();
            }
            for n in 0..20 {
                let call = format!("c{n}");
                let bodies = vec![mark(n), said(asking("", &[&call])), ended(&call, "done")];
                store.commit_step(later(&new, 1, u64::from(n) * 3 + 1, bodies)).await.unwrap();
                store.run(&tenant(), new.run.id).await.unwrap();
            }
            store.events_after(&tenant(), new.run.id, 0, 1000).await.unwrap().len()
        }
    });
    assert_eq!(join_all(runs).await, [61; 50]);
    stop.send(()).unwrap();
    let writes = disturber.join().unwrap();
    let mut connection = database.foreign().await;
    let row = sqlx::query("SELECT n FROM foreign_notes").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<i64, _>(0), writes);
    assert_ne!(writes, 0);
}

/// Readers that are given up in the middle must give their connections back (transact-rs/sqlx#3241).
#[tokio::test]
async fn abandoned_calls_never_use_up_the_connections() {
    let database = SqliteFile::fresh().await;
    let store = database.store();
    let new = running(1);
    store.create_run(new.clone()).await.unwrap();
    store.commit_step(step(&new, 1, (1..=300).map(mark).collect())).await.unwrap();
    for n in 0..600 {
        // Each is given up after another number of steps, from not even started to far inside.
        let polls = n % 12;
        let call: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> = match n % 4 {
            0 => Box::pin(async { drop(store.events_after(&tenant(), id(1), 0, 1000).await.unwrap()) }),
            1 => Box::pin(async { drop(store.list_runs(&tenant(), &RunFilter::default(), None, 10).await.unwrap()) }),
            2 => Box::pin(async { drop(store.transcript(&tenant(), id(1)).await.unwrap()) }),
            _ => Box::pin(async { drop(store.create_run(running(n + 2)).await.unwrap()) }),
        };
        let mut call = call;
        for _ in 0..polls {
            if futures_util::poll!(&mut call).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    // More at once than there are connections.
    let tenant = tenant();
    let reads = join_all((0..50).map(|_| store.events_after(&tenant, id(1), 0, 10_000))).await;
    for log in reads {
        let numbers: Vec<u64> = log.unwrap().iter().map(|event| event.seq).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
    }
    store.health().await.unwrap();
}

/// A queued run that cannot be read must not stand in everybody's way (EvoScientist/EvoScientist#358).
#[tokio::test]
async fn a_run_without_its_spec_ends_once_and_the_next_is_claimed() {
    let database = SqliteFile::fresh().await;
    let store = database.store();
    for number in 1..=4 {
        store.create_run(queued(number)).await.unwrap();
    }
    database
        .tamper(
            "DELETE FROM run_specs WHERE run LIKE '%1'; \
             UPDATE runs SET state = CAST(x'ff' AS TEXT) WHERE id LIKE '%2'; \
             INSERT INTO run_events VALUES ('run_01900000000070008000000000000003', 2, 0, 'message', x'7b7d')",
        )
        .await;
    let claims = store.claim(1, at(900)).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.run.id).collect::<Vec<_>>(), [id(4)]);
    assert_eq!(store.backlog().await.unwrap().ready, 0);
    assert_eq!(store.claim(9, at(950)).await.unwrap(), []);

    let ended = store.run(&tenant(), id(1)).await.unwrap().unwrap();
    let RunStatus::Finished { started_at: None, deadline_at: None, finished_at, end } = &ended.status else {
        panic!("{ended:?}")
    };
    assert_eq!((*finished_at, end.name()), (at(900), RunStatusName::InternalError));
    let log = store.events_after(&tenant(), id(1), 0, 10).await.unwrap();
    let kinds: Vec<_> = log.iter().map(|event| (event.seq, event.body.kind)).collect();
    assert_eq!(kinds, [(1, EventKind::RunQueued), (2, EventKind::RunEnd)]);
    assert_eq!(ended.last_seq, 2);
    let last: serde_json::Value = serde_json::from_slice(&log[1].json()).unwrap();
    assert_eq!(
        last["run"]["error"],
        serde_json::json!({
            "code": "stored_run_unreadable",
            "message": format!("stored data of run {} is unreadable: its spec is missing", id(1)),
            "retryable": true
        })
    );
    assert_eq!((&last["run"]["status"], &last["duration_ms"]), (&"internal_error".into(), &0.into()));
    for number in [2, 3] {
        let run = store.run(&tenant(), id(number)).await.unwrap().unwrap();
        assert_eq!(run.status.name(), RunStatusName::InternalError);
    }
}

#[tokio::test]
async fn a_row_that_does_not_read_is_named_and_harms_no_other() {
    let database = SqliteFile::fresh().await;
    let store = database.store();
    for number in 1..=5 {
        store.create_run(queued(number)).await.unwrap();
    }
    database
        .tamper(
            "UPDATE runs SET limits = '{' WHERE id LIKE '%2'; \
             UPDATE runs SET started_at = 5 WHERE id LIKE '%3'; \
             UPDATE runs SET status = 'paused' WHERE id LIKE '%4'",
        )
        .await;
    let reasons = [
        (2, "`limits` does not read back: EOF while parsing an object at line 1 column 1"),
        (
            3,
            "its times do not fit together: started Some(Timestamp(5)), deadline None, left None, waiting until None, \
             finished None, with an ending: false, with pending calls: false",
        ),
        (4, "its status `paused` is unknown"),
    ];
    for (number, reason) in reasons {
        let error = store.run(&tenant(), id(number)).await.unwrap_err();
        assert_eq!(error.to_string(), format!("stored data of run {} is unreadable: {reason}", id(number)));
        assert!(matches!(error, StoreError::Corrupt { run, .. } if run == id(number)));
    }
    let ids = |runs: Vec<Run>| runs.iter().map(|run| run.id).collect::<Vec<_>>();
    let (tenant, all) = (tenant(), RunFilter::default());
    let list = |before, limit| store.list_runs(&tenant, &all, before, limit);
    assert_eq!(ids(list(None, 2).await.unwrap()), [id(5), id(1)]);
    assert_eq!(ids(list(Some(id(5)), 1).await.unwrap()), [id(1)]);
}

#[tokio::test]
async fn a_loaded_run_that_does_not_read_is_named() {
    let database = SqliteFile::fresh().await;
    let store = database.store();
    store.create_run(queued(1)).await.unwrap();
    database.tamper("UPDATE run_specs SET spec = '{}'").await;
    let error = store.load(&tenant(), id(1)).await.unwrap_err();
    assert!(matches!(&error, StoreError::Corrupt { run, .. } if *run == id(1)), "{error}");
}

#[tokio::test]
async fn a_run_whose_log_does_not_read_is_ended_and_not_given_out() {
    let mut database = SqliteFile::fresh().await;
    for number in [1, 2, 3] {
        database.store().create_run(running(number)).await.unwrap();
    }
    for number in [1, 3] {
        database.store().commit_step(step(&running(number), 1, vec![said(asking("", &["a"]))])).await.unwrap();
    }
    database.tamper("UPDATE run_events SET body = CAST('{\"type\":\"message\"}' AS BLOB) WHERE seq = 3").await;
    assert!(matches!(database.store().reclaim(&tenant(), id(3)).await, Err(StoreError::Corrupt { .. })));
    database.crash().await;
    let store = database.store();
    let claims = store.claim(9, at(9_000)).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.run.id).collect::<Vec<_>>(), [id(2)]);
    assert!(matches!(store.transcript(&tenant(), id(1)).await, Err(StoreError::Corrupt { .. })));
    // One that is taken back ends at the time of its last event, since nobody said what time it is.
    for (number, ended_at) in [(1, at(9_000)), (3, at(5_000))] {
        let run = store.run(&tenant(), id(number)).await.unwrap().unwrap();
        let RunStatus::Finished { started_at, finished_at, .. } = run.status else { panic!("{run:?}") };
        assert_eq!((started_at, finished_at, run.last_seq), (Some(at(i64::from(number))), ended_at, 4));
    }
}

#[tokio::test]
async fn an_event_that_is_not_what_it_says_is_named() {
    let database = SqliteFile::fresh().await;
    let store = database.store();
    store.create_run(running(1)).await.unwrap();
    for (sql, reason) in [
        ("UPDATE run_events SET kind = 'run_end' WHERE seq = 2", "the body of event 2 is not a `run_end` event"),
        ("UPDATE run_events SET kind = 'party' WHERE seq = 2", "event 2 has unknown kind `party`"),
    ] {
        database.tamper(sql).await;
        let error = store.events_after(&tenant(), id(1), 1, 10).await.unwrap_err();
        assert_eq!(error.to_string(), format!("stored data of run {} is unreadable: {reason}", id(1)));
        assert_eq!(store.events_after(&tenant(), id(1), 0, 1).await.unwrap().len(), 1);
    }
}

/// Readers and the log: what a reader sees is always a beginning of the log, and commits are seen at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_beside_the_writer_sees_a_growing_log() {
    let database = SqliteFile::with(Durability::Process).await;
    let store = database.store();
    let new = running(1);
    store.create_run(new.clone()).await.unwrap();
    let writing = async {
        let mut log: Vec<Event> = Vec::new();
        for n in 0..200 {
            let after = u64::from(n) * 2 + 2;
            let committed = store.commit_step(later(&new, 1, after, vec![mark(n), mark(n)])).await.unwrap().events;
            assert_eq!(store.events_after(&tenant(), id(1), after, 10).await.unwrap(), committed);
            log.extend(committed);
        }
        log
    };
    let reading = async {
        let mut seen: Vec<Event> = Vec::new();
        while seen.len() < 402 {
            let cursor = seen.last().map_or(0, |event| event.seq);
            seen.extend(store.events_after(&tenant(), id(1), cursor, 7).await.unwrap());
        }
        seen
    };
    let (written, seen) = tokio::join!(writing, reading);
    assert_eq!(seen[2..], written);
    assert_eq!(seen.iter().map(|event| event.seq).collect::<Vec<_>>(), (1..=402).collect::<Vec<_>>());
}

/// The lock is the process's and not inherited by the programs it starts.
#[tokio::test]
async fn a_child_process_does_not_keep_the_file_locked() {
    let mut database = SqliteFile::fresh().await;
    let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
    database.store().close().await;
    database.crash().await;
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Handed in at once, so that they are one group.
async fn together<T>(writes: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    tokio::task::unconstrained(join_all(writes)).await
}

/// A worker that lost its run and the one that took it write in one group, in either order, among many others.
#[tokio::test]
async fn of_two_steps_of_one_run_in_a_group_the_holder_s_counts() {
    for generations in [[1, 2], [2, 1]] {
        let database = SqliteFile::fresh().await;
        let store = database.sqlite();
        let runs: Vec<_> = (1..=40).map(running).collect();
        for new in &runs {
            store.create_run(new.clone()).await.unwrap();
        }
        store.reclaim(&tenant(), id(7)).await.unwrap().unwrap();
        let steps = runs.iter().flat_map(|new| {
            let generations: &[u64] = if new.run.id == id(7) { &generations } else { &[1] };
            generations.iter().map(|&generation| step(new, generation, vec![mark(1), mark(2)]))
        });
        let (asked, writes): (Vec<_>, Vec<BoxFuture<'_, Result<Committed, StoreError>>>) = steps
            .map(|step| ((step.run, step.generation), Box::pin(store.commit_step(step)) as BoxFuture<'_, _>))
            .unzip();
        for ((run, generation), answer) in asked.into_iter().zip(together(writes).await) {
            match answer {
                Ok(committed) => {
                    assert_eq!(generation, if run == id(7) { 2 } else { 1 });
                    let seen: Vec<_> = committed.events.iter().map(|event| (event.run, event.seq)).collect();
                    assert_eq!(seen, [(run, 3), (run, 4)]);
                }
                Err(error) => {
                    assert_eq!((run, generation), (id(7), 1));
                    assert!(matches!(error, StoreError::Fenced { generation: 1, .. }), "{error}");
                }
            }
        }
    }
}

/// Of runs that are stored together, those whose id is taken are refused and all others are stored.
#[tokio::test]
async fn a_run_that_cannot_be_stored_takes_no_other_with_it() {
    let database = SqliteFile::fresh().await;
    let store = database.sqlite();
    store.create_run(queued(5)).await.unwrap();
    let numbers: Vec<u32> = (1..=20).chain([13]).collect();
    let writes: Vec<BoxFuture<'_, Result<Created, StoreError>>> =
        numbers.iter().map(|&number| Box::pin(store.create_run(queued(number))) as BoxFuture<'_, _>).collect();
    let answers = together(writes).await;
    let refused: Vec<_> = numbers.iter().zip(&answers).filter(|(_, answer)| answer.is_err()).map(|(n, _)| *n).collect();
    assert_eq!(refused, [5, 13]);
    for (number, answer) in numbers.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()) {
        assert_eq!(answer.as_ref().unwrap().run.id, id(*number));
        assert!(store.run(&tenant(), id(*number)).await.unwrap().is_some());
    }
}
