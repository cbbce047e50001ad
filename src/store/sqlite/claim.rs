//! The verbs that hand runs to a worker. A run that cannot be read ends here, once, as `internal_error`: it
//! would otherwise stand at the head of the queue for ever.

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::read::{history, logged_messages};
use super::write::append;
use super::writer::{Halt, Single};
use crate::domain::{RunId, TenantId, Timestamp};
use crate::store::row::{self, Cells, StatusColumns, run_columns};
use crate::store::{ClaimedRun, StoreError, claimed};

/// What a claim reads: the run, its spec, its state. `{}` is the condition.
macro_rules! select_claimable {
    ($condition:literal) => {
        concat!(
            "SELECT ",
            run_columns!(),
            ", state, inbox, worker, (SELECT spec FROM run_specs WHERE run = runs.id) AS spec FROM runs WHERE ",
            $condition
        )
    };
}

pub(super) use select_claimable;

/// Takes runs that nobody has at work. The file belongs to one process at a time, so a run that another one had is free.
pub(super) struct Claim {
    pub(super) limit: u32,
    pub(super) now: Timestamp,
    pub(super) worker: String,
}

/// Runs that nobody has at work: those that somebody had, then those that wait for a slot and whose turn it is.
const FREE: [&str; 2] = [
    select_claimable!("status = 'running' AND worker IS NOT ?1 ORDER BY crashes DESC, id LIMIT ?2"),
    select_claimable!(
        "status = 'queued' AND ?1 NOTNULL AND NOT EXISTS \
         (SELECT 1 FROM runs AS former WHERE former.id = runs.continues AND former.finished_at IS NULL) \
         ORDER BY id LIMIT ?2"
    ),
];

#[async_trait]
impl Single for Claim {
    type Output = Vec<ClaimedRun>;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Vec<ClaimedRun>, Halt> {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let mut claimed = Vec::new();
        for free in FREE {
            // Every row of a pass leaves the set: it is taken, or it is ended. So this comes to an end.
            while claimed.len() < limit {
                let rows = sqlx::query(free)
                    .bind(&self.worker)
                    .bind(i64::try_from(limit - claimed.len()).unwrap_or(i64::MAX))
                    .fetch_all(&mut *connection)
                    .await?;
                if rows.is_empty() {
                    break;
                }
                for row in &rows {
                    match take(connection, row, &self.worker, self.now).await? {
                        Ok(run) => claimed.push(run),
                        Err(error) => end_unreadable(connection, row, &error, Some(self.now)).await?,
                    }
                }
            }
        }
        Ok(claimed)
    }
}

/// Ends a run that its worker cannot read.
pub(super) struct EndUnreadable {
    pub(super) tenant: TenantId,
    pub(super) id: RunId,
    pub(super) reason: String,
    pub(super) now: Timestamp,
}

#[async_trait]
impl Single for EndUnreadable {
    type Output = ();

    fn bytes(&self) -> usize {
        self.reason.len()
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<(), Halt> {
        let row = sqlx::query("SELECT id FROM runs WHERE id = ? AND tenant = ? AND finished_at IS NULL")
            .bind(self.id.to_string())
            .bind(self.tenant.as_str())
            .fetch_optional(&mut *connection)
            .await?;
        let Some(row) = row else { return Ok(()) };
        let error = StoreError::Corrupt { run: self.id, reason: self.reason.clone() };
        end_unreadable(connection, &row, &error, Some(self.now)).await
    }
}

/// Takes one running run from whoever holds it.
pub(super) struct Reclaim {
    pub(super) tenant: TenantId,
    pub(super) id: RunId,
    pub(super) worker: String,
}

#[async_trait]
impl Single for Reclaim {
    type Output = Option<ClaimedRun>;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Option<ClaimedRun>, Halt> {
        let row = sqlx::query(select_claimable!("id = ? AND tenant = ? AND status = 'running'"))
            .bind(self.id.to_string())
            .bind(self.tenant.as_str())
            .fetch_optional(&mut *connection)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let mut claimed = match read(connection, &row).await? {
            Ok(claimed) => claimed,
            Err(error) => {
                end_unreadable(connection, &row, &error, None).await?;
                return Err(error.into());
            }
        };
        sqlx::query("UPDATE runs SET generation = generation + 1, worker = ? WHERE id = ?")
            .bind(&self.worker)
            .bind(self.id.to_string())
            .execute(&mut *connection)
            .await?;
        claimed.run.generation += 1;
        Ok(Some(claimed))
    }
}

/// Lets go of runs of this process. The others have no worker any more once it is gone.
pub(super) struct Release {
    pub(super) worker: String,
    pub(super) parked: Vec<RunId>,
}

#[async_trait]
impl Single for Release {
    type Output = ();

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<(), Halt> {
        for id in &self.parked {
            sqlx::query("UPDATE runs SET worker = NULL WHERE id = ? AND status = 'running' AND worker = ?")
                .bind(id.to_string())
                .bind(&self.worker)
                .execute(&mut *connection)
                .await?;
        }
        Ok(())
    }
}

/// Marks a run as at work in this process. The outer error is the database's, the inner one says what is unreadable.
async fn take(
    connection: &mut SqliteConnection,
    row: &SqliteRow,
    worker: &str,
    now: Timestamp,
) -> Result<Result<ClaimedRun, StoreError>, sqlx::Error> {
    let mut claimed = match read(connection, row).await? {
        Ok(claimed) => claimed,
        Err(error) => return Ok(Err(error)),
    };
    let had = row.optional_text("worker")?;
    claimed::take(&mut claimed, had.is_some(), now);
    let columns = match StatusColumns::of(&claimed.run.status) {
        Ok(columns) => columns,
        Err(error) => return Ok(Err(error)),
    };
    sqlx::query(
        "UPDATE runs SET generation = generation + 1, status = ?, started_at = ?, deadline_at = ?, \
         time_left_ms = NULL, worker = ? WHERE id = ?",
    )
    .bind(columns.status)
    .bind(columns.started_at)
    .bind(columns.deadline_at)
    .bind(worker)
    .bind(claimed.run.id.to_string())
    .execute(&mut *connection)
    .await?;
    Ok(Ok(claimed))
}

/// Everything of a claimable row. The outer error is the database's, the inner one says what is unreadable.
pub(super) async fn read(
    connection: &mut SqliteConnection,
    row: &SqliteRow,
) -> Result<Result<ClaimedRun, StoreError>, sqlx::Error> {
    let mut claimed = match claimed::read(row) {
        Ok(claimed) => claimed,
        Err(error) => return Ok(Err(error)),
    };
    match logged_messages(connection, claimed.run.id).await? {
        Ok(transcript) => claimed.transcript = transcript,
        Err(error) => return Ok(Err(error)),
    }
    match history(connection, claimed.run.continues).await? {
        Ok(history) => claimed.history = history,
        Err(error) => return Ok(Err(error)),
    }
    Ok(Ok(claimed))
}

/// Ends a run that cannot be read, with its `run_end` event where that can be made. Without `now` it ends at the
/// time of its last event.
async fn end_unreadable(
    connection: &mut SqliteConnection,
    row: &SqliteRow,
    error: &StoreError,
    now: Option<Timestamp>,
) -> Result<(), Halt> {
    let id = row.text("id")?;
    tracing::error!(run_id = id, %error, "a stored run cannot be read; it is ended as internal_error");
    let last = sqlx::query(
        "SELECT COALESCE(MAX(seq), 0) AS seq, COALESCE(MAX(time), 0) AS time FROM run_events WHERE run = ?",
    )
    .bind(&id)
    .fetch_one(&mut *connection)
    .await?;
    let (last_seq, last_time) = (last.integer("seq")?, last.integer("time")?);
    let finished_at = now.unwrap_or(Timestamp::from_millis(last_time));
    let columns = claimed::unreadable_end(error, finished_at)?;
    // `started_at` and `deadline_at` stay as they are.
    sqlx::query(
        "UPDATE runs SET status = ?, finished_at = ?, ending = ?, last_seq = ?, worker = NULL, time_left_ms = NULL, \
         waiting_until = NULL, pending = NULL WHERE id = ?",
    )
    .bind(columns.status)
    .bind(columns.finished_at)
    .bind(columns.ending.as_deref())
    .bind(last_seq)
    .bind(&id)
    .execute(&mut *connection)
    .await?;
    let row = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = ?"))
        .bind(&id)
        .fetch_one(&mut *connection)
        .await?;
    // A row that still does not read is the broken part itself: it has no public form to tell of its end.
    let Ok(run) = row::run(&row) else { return Ok(()) };
    append(connection, run.id, last_seq, finished_at, &[claimed::run_end(&run)?]).await?;
    sqlx::query("UPDATE runs SET last_seq = last_seq + 1 WHERE id = ?").bind(&id).execute(&mut *connection).await?;
    Ok(())
}
