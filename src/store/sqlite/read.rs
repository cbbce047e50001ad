//! Reading: short statements, each on its own, from connections that cannot write.

use sqlx::sqlite::{SqliteExecutor, SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite, SqliteConnection};

use super::claim::{self, select_claimable};
use super::error::store_error;
use crate::domain::{Event, InboxItem, InboxNumber, Message, Run, RunId, Seq, TenantId, Timestamp};
use crate::store::row::{self, Cells, run_columns};
use crate::store::transcript::{self, transcript_kinds};
use crate::store::{Backlog, ClaimedRun, RunFilter, StoreError};

impl Cells for SqliteRow {
    fn text(&self, column: &str) -> Result<String, sqlx::Error> {
        self.try_get(column)
    }

    fn optional_text(&self, column: &str) -> Result<Option<String>, sqlx::Error> {
        self.try_get(column)
    }

    fn integer(&self, column: &str) -> Result<i64, sqlx::Error> {
        self.try_get(column)
    }

    fn optional_integer(&self, column: &str) -> Result<Option<i64>, sqlx::Error> {
        self.try_get(column)
    }

    fn bytes(&self, column: &str) -> Result<Vec<u8>, sqlx::Error> {
        self.try_get(column)
    }
}

pub(super) async fn run(pool: &SqlitePool, tenant: &TenantId, id: RunId) -> Result<Option<Run>, StoreError> {
    let row = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = ? AND tenant = ?"))
        .bind(id.to_string())
        .bind(tenant.as_str())
        .fetch_optional(pool)
        .await
        .map_err(store_error)?;
    row.map(|row| row::run(&row)).transpose()
}

/// A run that cannot be read is left out and logged: one broken row must not hide all the others.
pub(super) async fn list(
    pool: &SqlitePool,
    tenant: &TenantId,
    filter: &RunFilter,
    before: Option<RunId>,
    limit: u32,
) -> Result<Vec<Run>, StoreError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut runs = Vec::new();
    let mut before = before;
    while runs.len() < limit {
        let missing = limit - runs.len();
        let rows =
            list_statement(tenant, filter, before, missing).build().fetch_all(pool).await.map_err(store_error)?;
        let is_last = rows.len() < missing;
        for row in &rows {
            before = Some(row::run_id(row, "id")?);
            match row::run(row) {
                Ok(run) => runs.push(run),
                Err(error) => tracing::error!(%error, "a run is left out of a list"),
            }
        }
        if is_last {
            break;
        }
    }
    Ok(runs)
}

fn list_statement(tenant: &TenantId, filter: &RunFilter, before: Option<RunId>, limit: usize) -> QueryBuilder<Sqlite> {
    let mut sql = QueryBuilder::new(concat!("SELECT ", run_columns!(), " FROM runs WHERE tenant = "));
    sql.push_bind(tenant.as_str().to_owned());
    if let Some(before) = before {
        sql.push(" AND id < ").push_bind(before.to_string());
    }
    if !filter.status.is_empty() {
        sql.push(" AND status IN (");
        let mut names = sql.separated(", ");
        for status in &filter.status {
            names.push_bind(status.as_str());
        }
        sql.push(")");
    }
    if let Some(agent) = &filter.agent {
        sql.push(" AND agent = ").push_bind(agent.clone());
    }
    if let Some(thread) = &filter.thread {
        sql.push(" AND thread = ").push_bind(thread.clone());
    }
    for (key, value) in &filter.metadata {
        sql.push(" AND id IN (SELECT run FROM run_metadata WHERE tenant = ").push_bind(tenant.as_str().to_owned());
        sql.push(" AND key = ").push_bind(key.clone());
        sql.push(" AND value = ").push_bind(value.clone());
        sql.push(")");
    }
    sql.push(" ORDER BY id DESC LIMIT ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    sql
}

pub(super) async fn events_after(
    pool: &SqlitePool,
    tenant: &TenantId,
    id: RunId,
    after: Seq,
    limit: u32,
) -> Result<Vec<Event>, StoreError> {
    // No event has a number beyond the column's range, so nothing follows one.
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    let rows = sqlx::query(
        "SELECT seq, time, kind, body FROM run_events WHERE run = ?1 AND seq > ?2 \
         AND EXISTS (SELECT 1 FROM runs WHERE id = ?1 AND tenant = ?3) ORDER BY seq LIMIT ?4",
    )
    .bind(id.to_string())
    .bind(after)
    .bind(tenant.as_str())
    .bind(i64::from(limit))
    .fetch_all(pool)
    .await
    .map_err(store_error)?;
    rows.iter().map(|row| row::event(row, id)).collect()
}

pub(super) async fn transcript(
    pool: &SqlitePool,
    tenant: &TenantId,
    id: RunId,
) -> Result<Option<Vec<Message>>, StoreError> {
    let mut connection = pool.acquire().await.map_err(store_error)?;
    let found = sqlx::query("SELECT continues FROM runs WHERE id = ? AND tenant = ?")
        .bind(id.to_string())
        .bind(tenant.as_str())
        .fetch_optional(&mut *connection)
        .await
        .map_err(store_error)?;
    let Some(found) = found else { return Ok(None) };
    let continues = found.optional_run_id("continues").map_err(store_error)?;
    let mut messages = history(&mut connection, continues).await.map_err(store_error)??;
    messages.extend(own_messages(&mut connection, id).await.map_err(store_error)??.unwrap_or_default());
    Ok(Some(messages))
}

/// All that was said in a run and in those before it that it continues. The outer error is the database's, the inner
/// one says what is unreadable. What was erased is left out.
pub(super) async fn history(
    connection: &mut SqliteConnection,
    newest: Option<RunId>,
) -> Result<Result<Vec<Message>, StoreError>, sqlx::Error> {
    let mut chain = Vec::new();
    let mut next = newest;
    while let Some(id) = next {
        chain.push(id);
        let row = sqlx::query("SELECT continues FROM runs WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&mut *connection)
            .await?;
        next = match row {
            Some(row) => row.optional_run_id("continues")?,
            None => None,
        };
    }
    let mut messages = Vec::new();
    for id in chain.into_iter().rev() {
        match own_messages(connection, id).await? {
            Ok(own) => messages.extend(own.unwrap_or_default()),
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(messages))
}

/// The input of a run and what was said in it; `None` when it is erased.
async fn own_messages(
    connection: &mut SqliteConnection,
    id: RunId,
) -> Result<Result<Option<Vec<Message>>, StoreError>, sqlx::Error> {
    let row = sqlx::query("SELECT spec FROM run_specs WHERE run = ?")
        .bind(id.to_string())
        .fetch_optional(&mut *connection)
        .await?;
    let Some(row) = row else { return Ok(Ok(None)) };
    let mut messages = match row::spec(row.optional_text("spec")?.as_deref(), id) {
        Ok(spec) => spec.input,
        Err(error) => return Ok(Err(error)),
    };
    // The spec never changes and the log only grows, so two statements see one transcript.
    Ok(logged_messages(connection, id).await?.map(|logged| {
        messages.extend(logged);
        Some(messages)
    }))
}

/// Events of a run numbered above `after`, in order; at most `limit`.
pub(super) async fn log(
    executor: impl SqliteExecutor<'_>,
    run: RunId,
    after: i64,
    limit: i64,
) -> Result<Vec<Event>, sqlx::Error> {
    let rows =
        sqlx::query("SELECT seq, time, kind, body FROM run_events WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?")
            .bind(run.to_string())
            .bind(after)
            .bind(limit)
            .fetch_all(executor)
            .await?;
    let read = |row| row::event(row, run).map_err(|error| sqlx::Error::Decode(error.into()));
    rows.iter().map(read).collect()
}

/// The transcript without the input. The outer error is the database's, the inner one says what is unreadable.
pub(super) async fn logged_messages(
    connection: &mut SqliteConnection,
    id: RunId,
) -> Result<Result<Vec<Message>, StoreError>, sqlx::Error> {
    let rows = sqlx::query(concat!(
        "SELECT seq, time, kind, body FROM run_events WHERE run = ? AND kind IN ",
        transcript_kinds!(),
        " ORDER BY seq"
    ))
    .bind(id.to_string())
    .fetch_all(connection)
    .await?;
    let events: Result<Vec<_>, _> = rows.iter().map(|row| row::event(row, id).map(|event| event.body)).collect();
    Ok(events.and_then(|events| transcript::fold(&events).map_err(|reason| StoreError::Corrupt { run: id, reason })))
}

/// All that is needed to go on with a run, as of one moment.
pub(super) async fn load(pool: &SqlitePool, tenant: &TenantId, id: RunId) -> Result<Option<ClaimedRun>, StoreError> {
    let mut moment = pool.begin().await.map_err(store_error)?;
    let row = sqlx::query(select_claimable!("id = ? AND tenant = ?"))
        .bind(id.to_string())
        .bind(tenant.as_str())
        .fetch_optional(&mut *moment)
        .await
        .map_err(store_error)?;
    match row {
        Some(row) => claim::read(&mut moment, &row).await.map_err(store_error)?.map(Some),
        None => Ok(None),
    }
}

pub(super) async fn backlog(pool: &SqlitePool, worker: &str) -> Result<Backlog, StoreError> {
    let row = sqlx::query(
        "SELECT (SELECT COUNT(*) FROM runs WHERE status = 'queued') \
         + (SELECT COUNT(*) FROM runs WHERE status = 'running' AND worker IS NOT ?) AS free, \
         (SELECT COUNT(*) FROM runs JOIN runs AS former ON former.id = runs.continues \
         WHERE runs.status = 'queued' AND former.finished_at IS NULL) AS blocked",
    )
    .bind(worker)
    .fetch_one(pool)
    .await
    .map_err(store_error)?;
    row::backlog(&row).map_err(store_error)
}

pub(super) async fn inbox(
    pool: &SqlitePool,
    id: RunId,
    after: InboxNumber,
) -> Result<Vec<(InboxNumber, InboxItem)>, StoreError> {
    let rows = sqlx::query("SELECT number, item FROM run_inbox WHERE run = ? AND number > ? ORDER BY number")
        .bind(id.to_string())
        .bind(row::signed(after)?)
        .fetch_all(pool)
        .await
        .map_err(store_error)?;
    rows.iter().map(|row| row::inbox_item(row, id)).collect()
}

pub(super) async fn held(pool: &SqlitePool, worker: &str) -> Result<Vec<(TenantId, RunId)>, StoreError> {
    let rows = sqlx::query("SELECT tenant, id FROM runs WHERE status = 'running' AND worker = ?")
        .bind(worker)
        .fetch_all(pool)
        .await
        .map_err(store_error)?;
    rows.iter().map(named).collect()
}

pub(super) async fn due(pool: &SqlitePool, now: Timestamp, limit: u32) -> Result<Vec<(TenantId, RunId)>, StoreError> {
    let rows = sqlx::query(
        "SELECT tenant, id FROM runs WHERE status = 'waiting' AND (waiting_until <= ? OR cancel_requested_at NOTNULL) \
         ORDER BY waiting_until LIMIT ?",
    )
    .bind(now.as_millis())
    .bind(limit)
    .fetch_all(pool)
    .await
    .map_err(store_error)?;
    rows.iter().map(named).collect()
}

fn named(row: &SqliteRow) -> Result<(TenantId, RunId), StoreError> {
    Ok((TenantId::new(row.text("tenant").map_err(store_error)?), row.run_id("id").map_err(store_error)?))
}

pub(super) async fn is_erased(pool: &SqlitePool, tenant: &TenantId, id: RunId) -> Result<bool, StoreError> {
    let row = sqlx::query("SELECT 1 FROM erased_runs WHERE run = ? AND tenant = ?")
        .bind(id.to_string())
        .bind(tenant.as_str())
        .fetch_optional(pool)
        .await
        .map_err(store_error)?;
    Ok(row.is_some())
}
