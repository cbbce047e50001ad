//! The verbs that hand runs to a worker. A run that cannot be read ends here, once, as `internal_error`: it
//! would otherwise stand at the head of the queue for ever.

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::read::logged_messages;
use super::write::append;
use super::writer::{Halt, Single};
use crate::domain::{EncodedBody, End, EndStatus, EventBody, RunError, RunId, RunStatus, RunView, TenantId, Timestamp};
use crate::store::row::{self, Cells, StatusColumns, run_columns};
use crate::store::{ClaimedRun, StoreError};

/// What a claim reads: the run, its spec, its state. `{}` is the condition.
macro_rules! select_claimable {
    ($condition:literal) => {
        concat!(
            "SELECT ",
            run_columns!(),
            ", state, (SELECT spec FROM run_specs WHERE run = runs.id) AS spec FROM runs WHERE ",
            $condition
        )
    };
}

pub(super) use select_claimable;

/// Takes the oldest queued runs.
pub(super) struct ClaimQueued {
    pub(super) limit: u32,
    pub(super) now: Timestamp,
}

#[async_trait]
impl Single for ClaimQueued {
    type Output = Vec<ClaimedRun>;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Vec<ClaimedRun>, Halt> {
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let mut claimed = Vec::new();
        // Every row of a pass leaves the queue: it is taken, or it is ended. So this comes to an end.
        while claimed.len() < limit {
            let rows = sqlx::query(select_claimable!("status = 'queued' ORDER BY id LIMIT ?"))
                .bind(i64::try_from(limit - claimed.len()).unwrap_or(i64::MAX))
                .fetch_all(&mut *connection)
                .await?;
            if rows.is_empty() {
                break;
            }
            for row in &rows {
                match start(connection, row, self.now).await? {
                    Ok(run) => claimed.push(run),
                    Err(error) => end_unreadable(connection, row, &error, Some(self.now)).await?,
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
        sqlx::query("UPDATE runs SET generation = generation + 1 WHERE id = ?")
            .bind(self.id.to_string())
            .execute(&mut *connection)
            .await?;
        claimed.run.generation += 1;
        Ok(Some(claimed))
    }
}

/// Takes every run that is marked running.
pub(super) struct ClaimInterrupted;

#[async_trait]
impl Single for ClaimInterrupted {
    type Output = Vec<ClaimedRun>;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Vec<ClaimedRun>, Halt> {
        let rows = sqlx::query(select_claimable!("status = 'running' ORDER BY id")).fetch_all(&mut *connection).await?;
        let mut claimed = Vec::with_capacity(rows.len());
        for row in &rows {
            match read(connection, row).await? {
                Ok(run) => claimed.push(run),
                Err(error) => end_unreadable(connection, row, &error, None).await?,
            }
        }
        sqlx::query("UPDATE runs SET generation = generation + 1 WHERE status = 'running'")
            .execute(&mut *connection)
            .await?;
        for claim in &mut claimed {
            claim.run.generation += 1;
        }
        Ok(claimed)
    }
}

/// Marks a queued run running. The outer error is the database's, the inner one says what is unreadable.
async fn start(
    connection: &mut SqliteConnection,
    row: &SqliteRow,
    now: Timestamp,
) -> Result<Result<ClaimedRun, StoreError>, sqlx::Error> {
    let mut claimed = match read(connection, row).await? {
        Ok(claimed) => claimed,
        Err(error) => return Ok(Err(error)),
    };
    let timeout = std::time::Duration::from_millis(claimed.run.limits.timeout_ms);
    let deadline_at = now.plus(timeout);
    sqlx::query(
        "UPDATE runs SET generation = generation + 1, status = 'running', started_at = ?, deadline_at = ? WHERE id = ?",
    )
    .bind(now.as_millis())
    .bind(deadline_at.as_millis())
    .bind(claimed.run.id.to_string())
    .execute(&mut *connection)
    .await?;
    claimed.run.generation += 1;
    claimed.run.status = RunStatus::Running { started_at: now, deadline_at };
    Ok(Ok(claimed))
}

/// Everything of a claimable row. The outer error is the database's, the inner one says what is unreadable.
pub(super) async fn read(
    connection: &mut SqliteConnection,
    row: &SqliteRow,
) -> Result<Result<ClaimedRun, StoreError>, sqlx::Error> {
    let whole = |row: &SqliteRow| -> Result<ClaimedRun, StoreError> {
        let run = row::run(row)?;
        let corrupt = |error: sqlx::Error| StoreError::Corrupt { run: run.id, reason: error.to_string() };
        let spec = row::spec(row.optional_text("spec").map_err(corrupt)?.as_deref(), run.id)?;
        let state = row.optional_text("state").map_err(corrupt)?;
        Ok(ClaimedRun { run, spec, state, transcript: Vec::new() })
    };
    let mut claimed = match whole(row) {
        Ok(claimed) => claimed,
        Err(error) => return Ok(Err(error)),
    };
    match logged_messages(connection, claimed.run.id).await? {
        Ok(transcript) => claimed.transcript = transcript,
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
    let end = End::Stopped {
        status: EndStatus::InternalError,
        partial: None,
        error: RunError { code: "stored_run_unreadable".to_owned(), message: error.to_string(), retryable: true },
    };
    let columns = StatusColumns::of(&RunStatus::Finished { started_at: None, deadline_at: None, finished_at, end })?;
    // `started_at` and `deadline_at` stay as they are.
    sqlx::query("UPDATE runs SET status = ?, finished_at = ?, ending = ?, last_seq = ? WHERE id = ?")
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
    let duration = match &run.status {
        RunStatus::Finished { started_at: Some(started_at), finished_at, .. } => finished_at.since(*started_at),
        RunStatus::Finished { started_at: None, .. } | RunStatus::Running { .. } | RunStatus::Queued => {
            std::time::Duration::ZERO
        }
    };
    let body = EventBody::RunEnd {
        run: RunView::from(&run),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
    };
    let body = EncodedBody::new(&body).map_err(|error| StoreError::Failed(error.into()))?;
    append(connection, run.id, last_seq, finished_at, &[body]).await?;
    sqlx::query("UPDATE runs SET last_seq = last_seq + 1 WHERE id = ?").bind(&id).execute(&mut *connection).await?;
    Ok(())
}
