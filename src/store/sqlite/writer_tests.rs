//! The writing task: groups, isolation, failures.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use sqlx::{Connection, Row};
use tempfile::TempDir;
use tokio::sync::Notify;

use super::*;
use crate::config::StoreConfig;

struct Fixture {
    folder: TempDir,
    writer: Arc<Writer>,
    counted: Arc<Counted>,
}

/// Transactions and the writes in them.
#[derive(Default)]
struct Counted(Mutex<(u64, usize)>);

impl CommitObserver for Counted {
    fn committed(&self, writes: usize, _took: std::time::Duration) {
        let mut counted = self.0.try_lock().unwrap();
        *counted = (counted.0 + 1, counted.1 + writes);
    }
}

impl Fixture {
    /// Commits, and writes in them.
    fn counted(&self) -> (u64, usize) {
        *self.counted.0.try_lock().unwrap()
    }
}

async fn fixture() -> Fixture {
    fixture_with_busy_timeout(5_000).await
}

/// A writer over a new file, with a table `notes (text)` for writes to use.
async fn fixture_with_busy_timeout(millis: u32) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let mut opened = open::open(&config(&folder)).await.unwrap();
    for sql in ["CREATE TABLE notes (text TEXT NOT NULL UNIQUE)".to_owned(), format!("PRAGMA busy_timeout = {millis}")]
    {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut opened.connection).await.unwrap();
    }
    let counted = Arc::new(Counted::default());
    let writer = Writer::start(opened, Durability::Process, Arc::clone(&counted) as Arc<dyn CommitObserver>);
    Fixture { folder, writer: Arc::new(writer), counted }
}

fn config(folder: &TempDir) -> StoreConfig {
    let url = format!("sqlite:{}", folder.path().join("test.db").display());
    StoreConfig { url: url.into(), durability: Durability::Process, ..StoreConfig::default() }
}

/// What stands in the table, read by a connection of its own.
async fn notes(fixture: &Fixture) -> Vec<String> {
    let path = fixture.folder.path().join("test.db");
    let mut connection = SqliteConnection::connect(&format!("sqlite:{}", path.display())).await.unwrap();
    let rows = sqlx::query("SELECT text FROM notes ORDER BY rowid").fetch_all(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Runs statements, one after the other.
struct Sql {
    statements: Vec<String>,
    bytes: usize,
}

impl Sql {
    fn new(statements: &[&str]) -> Self {
        Self { statements: statements.iter().map(|&sql| sql.to_owned()).collect(), bytes: 0 }
    }

    fn note(text: &str) -> Self {
        Self::new(&[&format!("INSERT INTO notes VALUES ('{text}')")])
    }
}

#[async_trait]
impl Single for Sql {
    type Output = ();

    fn bytes(&self) -> usize {
        self.bytes
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<(), Halt> {
        for sql in &self.statements {
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql.clone())).execute(&mut *connection).await?;
        }
        Ok(())
    }
}

/// Keeps the writer busy until it is let go.
#[derive(Default)]
struct Gate {
    entered: Notify,
    opened: Notify,
}

struct Hold(Arc<Gate>);

#[async_trait]
impl Single for Hold {
    type Output = ();

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, _connection: &mut SqliteConnection) -> Result<(), Halt> {
        self.0.entered.notify_one();
        self.0.opened.notified().await;
        Ok(())
    }
}

/// Hands in all writes while the writer is busy, lets it go, and gives their answers.
async fn all_waiting(fixture: &Fixture, writes: Vec<Sql>) -> Vec<Result<(), StoreError>> {
    let gate = Arc::new(Gate::default());
    let hold = fixture.writer.write(Hold(Arc::clone(&gate)));
    let handed_in = async {
        gate.entered.notified().await;
        // Each is polled, and so handed in, before the last of these futures opens the gate.
        let mut answers: Vec<futures_util::future::BoxFuture<'_, Result<(), StoreError>>> = Vec::new();
        for write in writes {
            answers.push(Box::pin(fixture.writer.write(write)));
        }
        answers.push(Box::pin(async {
            gate.opened.notify_one();
            Ok(())
        }));
        // Without tokio's budget, which would let the gate open before all have had their turn.
        let mut answers = tokio::task::unconstrained(join_all(answers)).await;
        answers.pop();
        answers
    };
    let (held, answers) = tokio::join!(hold, handed_in);
    held.unwrap();
    answers
}

#[tokio::test]
async fn everything_that_waits_is_one_transaction() {
    let fixture = fixture().await;
    let writes = (0..100).map(|n| Sql::note(&n.to_string())).collect();
    assert!(all_waiting(&fixture, writes).await.into_iter().all(|answer| answer.is_ok()));
    assert_eq!(fixture.counted(), (2, 101));
    assert_eq!(notes(&fixture).await, (0..100).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_group_is_cut_by_number_and_by_bytes() {
    let fixture = fixture().await;
    let small = (0..600).map(|n| Sql::note(&n.to_string())).collect();
    assert!(all_waiting(&fixture, small).await.into_iter().all(|answer| answer.is_ok()));
    assert_eq!(fixture.counted(), (1 + 3, 601));

    let large = |n: usize, bytes| Sql { bytes, ..Sql::note(&format!("large {n}")) };
    let sizes = [MAX_GROUP_BYTES / 2, MAX_GROUP_BYTES / 2, MAX_GROUP_BYTES * 3, 1, 1];
    let large = sizes.into_iter().enumerate().map(|(n, bytes)| large(n, bytes)).collect();
    assert!(all_waiting(&fixture, large).await.into_iter().all(|answer| answer.is_ok()));
    // Two halves, the huge one alone, the two small ones; and the write that held the gate.
    assert_eq!(fixture.counted(), (4 + 4, 601 + 6));
    assert_eq!(notes(&fixture).await.len(), 605);
}

#[tokio::test]
async fn a_write_that_fails_leaves_the_others_of_its_group_whole() {
    let fixture = fixture().await;
    let writes = vec![
        Sql::note("a"),
        // Its first statement succeeds and must be undone.
        Sql::new(&["INSERT INTO notes VALUES ('half')", "INSERT INTO notes VALUES ('a')"]),
        Sql::note("b"),
        Sql::new(&["INSERT INTO nowhere VALUES (1)"]),
        Sql::note("c"),
    ];
    let answers: Vec<_> = all_waiting(&fixture, writes)
        .await
        .into_iter()
        .map(|answer| answer.map_err(|error| error.to_string()))
        .collect();
    assert_eq!(
        answers,
        [
            Ok(()),
            Err("the database failed: error returned from database: (code: 2067) UNIQUE constraint failed: notes.text"
                .to_owned()),
            Ok(()),
            Err("the database failed: error returned from database: (code: 1) no such table: nowhere".to_owned()),
            Ok(()),
        ]
    );
    assert_eq!(notes(&fixture).await, ["a", "b", "c"]);
    assert_eq!(fixture.counted(), (2, 4));
}

#[tokio::test]
async fn a_failed_commit_answers_its_whole_group_and_is_undone() {
    let fixture = fixture().await;
    let orphan = "INSERT INTO run_events VALUES ('run_x', 1, 0, 'run_queued', x'00')";
    let writes = vec![Sql::note("lost"), Sql::new(&["PRAGMA defer_foreign_keys = ON", orphan])];
    let answers = all_waiting(&fixture, writes).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::Failed(_)))), "{answers:?}");
    fixture.writer.write(Sql::note("next")).await.unwrap();
    assert_eq!(notes(&fixture).await, ["next"]);
}

#[tokio::test]
async fn a_full_disk_stops_all_writing() {
    let fixture = fixture().await;
    fixture.writer.write(Sql::note("kept")).await.unwrap();
    // Stands for a full disk: SQLite answers with the same code, SQLITE_FULL.
    fixture.writer.write(Sql::new(&["PRAGMA max_page_count = 1"])).await.unwrap();
    let large = format!("INSERT INTO notes VALUES ('{}')", "x".repeat(100_000));
    let answers = all_waiting(&fixture, vec![Sql::note("lost"), Sql::new(&[&large]), Sql::note("lost too")]).await;
    for answer in answers {
        let error = answer.unwrap_err();
        assert!(matches!(&error, StoreError::Failed(_)) && error.to_string().contains("full"), "{error}");
    }
    // From here on nothing is taken, not even what would fit.
    for _ in 0..2 {
        let error = fixture.writer.write(super::super::write::Probe).await.unwrap_err();
        assert!(matches!(&error, StoreError::Failed(_)) && error.to_string().contains("full"), "{error}");
    }
    assert_eq!(notes(&fixture).await, ["kept"]);
    fixture.writer.close().await;
    // A new start with space on the disk goes on.
    drop(open::open(&config(&fixture.folder)).await.unwrap());
    // Whoever waits for it learns that the process has to end.
    fixture.writer.failed().await;
}

#[tokio::test]
async fn a_database_held_by_another_process_is_unavailable_and_comes_back() {
    let fixture = fixture_with_busy_timeout(1).await;
    let path = fixture.folder.path().join("test.db");
    let mut other = SqliteConnection::connect(&format!("sqlite:{}", path.display())).await.unwrap();
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let applied = Arc::new(AtomicBool::new(false));
    let lost = Announced { sql: Sql::note("lost"), applied: Arc::clone(&applied) };
    let error = fixture.writer.write(lost).await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable(_)) && error.to_string().contains("locked"), "{error}");
    // The lock comes first: a transaction that had begun to read could not be upgraded later.
    assert!(!applied.load(Ordering::SeqCst));
    sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    fixture.writer.write(Sql::note("next")).await.unwrap();
    assert_eq!(notes(&fixture).await, ["next"]);
}

/// Says when it was applied, so that its caller can go away at a known point.
struct Announced {
    sql: Sql,
    applied: Arc<AtomicBool>,
}

#[async_trait]
impl Single for Announced {
    type Output = ();

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<(), Halt> {
        self.applied.store(true, Ordering::SeqCst);
        self.sql.apply(connection).await
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_does_not_take_its_write_along() {
    let fixture = fixture().await;
    let gate = Arc::new(Gate::default());
    let applied = Arc::new(AtomicBool::new(false));
    let mut hold = Box::pin(fixture.writer.write(Hold(Arc::clone(&gate))));
    assert!(futures_util::poll!(&mut hold).is_pending());
    let sql = Sql::new(&["INSERT INTO notes VALUES ('one')", "INSERT INTO notes VALUES ('two')"]);
    let mut abandoned = Box::pin(fixture.writer.write(Announced { sql, applied: Arc::clone(&applied) }));
    assert!(futures_util::poll!(&mut abandoned).is_pending());
    drop(abandoned);
    assert!(!applied.load(Ordering::SeqCst));
    gate.opened.notify_one();
    hold.await.unwrap();
    fixture.writer.write(Sql::note("three")).await.unwrap();
    assert_eq!(notes(&fixture).await, ["one", "two", "three"]);
}

#[tokio::test]
async fn close_finishes_what_was_handed_in_and_refuses_what_comes_later() {
    let fixture = fixture().await;
    let mut handed_in = Box::pin(fixture.writer.write(Sql::note("in time")));
    assert!(futures_util::poll!(&mut handed_in).is_pending());
    fixture.writer.close().await;
    handed_in.await.unwrap();
    let error = fixture.writer.write(Sql::note("too late")).await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable(_)), "{error}");
    assert_eq!(notes(&fixture).await, ["in time"]);
    // Closing again is nothing, and the file is free for the next.
    fixture.writer.close().await;
    drop(open::open(&config(&fixture.folder)).await.unwrap());
}
