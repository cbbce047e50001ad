//! Reading: short statements, each on its own, from connections that cannot write.

use sqlx::sqlite::{SqlitePool, SqliteRow};
use sqlx::{QueryBuilder, Row, Sqlite, SqliteConnection};

use super::claim::{self, select_claimable};
use super::error::store_error;
use crate::domain::{Event, Message, Run, RunId, Seq, TenantId};
use crate::store::row::{self, Cells, run_columns};
use crate::store::transcript::{self, transcript_kinds};
use crate::store::{ClaimedRun, RunFilter, StoreError};

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
    let found = sqlx::query(
        "SELECT (SELECT spec FROM run_specs WHERE run = runs.id) AS spec FROM runs WHERE id = ? AND tenant = ?",
    )
    .bind(id.to_string())
    .bind(tenant.as_str())
    .fetch_optional(&mut *connection)
    .await
    .map_err(store_error)?;
    let Some(found) = found else { return Ok(None) };
    let text = found.optional_text("spec").map_err(store_error)?;
    let mut messages = row::spec(text.as_deref(), id)?.input;
    // The spec never changes and the log only grows, so two statements see one transcript.
    messages.extend(logged_messages(&mut connection, id).await.map_err(store_error)??);
    Ok(Some(messages))
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

pub(super) async fn queued(pool: &SqlitePool) -> Result<u64, StoreError> {
    let row = sqlx::query("SELECT COUNT(*) AS queued FROM runs WHERE status = 'queued'")
        .fetch_one(pool)
        .await
        .map_err(store_error)?;
    u64::try_from(row.integer("queued").map_err(store_error)?).map_err(|error| StoreError::Failed(error.into()))
}
