//! Reading, and how a row is read.

use std::collections::HashMap;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, QueryBuilder, Row};

use super::claim::{self, Holder, is_free, select_claimable};
use super::error::Halt;
use super::text::{read, stored};
use crate::domain::{Event, InboxItem, InboxNumber, Message, Run, RunId, Seq, TenantId, Timestamp};
use crate::store::row::{self, Cells, run_columns};
use crate::store::transcript::{self, transcript_kinds};
use crate::store::{Backlog, ClaimedRun, RunFilter, StoreError};

impl Cells for PgRow {
    fn text(&self, column: &str) -> Result<String, sqlx::Error> {
        self.try_get(column).map(read)
    }

    fn optional_text(&self, column: &str) -> Result<Option<String>, sqlx::Error> {
        let form: Option<String> = self.try_get(column)?;
        Ok(form.map(read))
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

pub(super) async fn find_run(connection: &mut PgConnection, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Halt> {
    let row = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = $1 AND tenant = $2"))
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_optional(connection)
        .await?;
    Ok(row.map(|row| row::run(&row)).transpose()?)
}

/// A run that cannot be read is left out and logged: one broken row must not hide all the others.
pub(super) async fn list(
    connection: &mut PgConnection,
    tenant: &TenantId,
    filter: &RunFilter,
    before: Option<RunId>,
    limit: u32,
) -> Result<Vec<Run>, Halt> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut runs = Vec::new();
    let mut before = before;
    while runs.len() < limit {
        let missing = limit - runs.len();
        let rows = list_statement(tenant, filter, before, missing).build().fetch_all(&mut *connection).await?;
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

fn list_statement(
    tenant: &TenantId,
    filter: &RunFilter,
    before: Option<RunId>,
    limit: usize,
) -> QueryBuilder<Postgres> {
    let text = |text: &str| stored(text).into_owned();
    let mut sql = QueryBuilder::new(concat!("SELECT ", run_columns!(), " FROM runs WHERE tenant = "));
    sql.push_bind(text(tenant.as_str()));
    if let Some(before) = before {
        sql.push(" AND id < ").push_bind(before.to_string());
    }
    if !filter.status.is_empty() {
        let names: Vec<_> = filter.status.iter().map(|status| status.as_str()).collect();
        sql.push(" AND status = ANY(").push_bind(names).push(")");
    }
    if let Some(agent) = &filter.agent {
        sql.push(" AND agent = ").push_bind(text(agent));
    }
    if let Some(thread) = &filter.thread {
        sql.push(" AND thread = ").push_bind(text(thread));
    }
    for (key, value) in &filter.metadata {
        sql.push(" AND id IN (SELECT run FROM run_metadata WHERE tenant = ").push_bind(text(tenant.as_str()));
        sql.push(" AND key = ").push_bind(text(key));
        sql.push(" AND value = ").push_bind(text(value));
        sql.push(")");
    }
    sql.push(" ORDER BY id DESC LIMIT ").push_bind(i64::try_from(limit).unwrap_or(i64::MAX));
    sql
}

pub(super) async fn events_after(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
    after: Seq,
    limit: u32,
) -> Result<Vec<Event>, Halt> {
    // No event has a number beyond the column's range, so nothing follows one.
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    let rows = sqlx::query(
        "SELECT seq, time, kind, body FROM run_events WHERE run = $1 AND seq > $2 \
         AND EXISTS (SELECT 1 FROM runs WHERE id = $1 AND tenant = $3) ORDER BY seq LIMIT $4",
    )
    .bind(id.to_string())
    .bind(after)
    .bind(stored(tenant.as_str()))
    .bind(i64::from(limit))
    .fetch_all(connection)
    .await?;
    Ok(rows.iter().map(|row| row::event(row, id)).collect::<Result<_, _>>()?)
}

/// Events of a run numbered above `after`, in order; at most `limit`.
pub(super) async fn log(connection: &mut PgConnection, run: RunId, after: i64, limit: i64) -> Result<Vec<Event>, Halt> {
    let rows =
        sqlx::query("SELECT seq, time, kind, body FROM run_events WHERE run = $1 AND seq > $2 ORDER BY seq LIMIT $3")
            .bind(run.to_string())
            .bind(after)
            .bind(limit)
            .fetch_all(connection)
            .await?;
    Ok(rows.iter().map(|row| row::event(row, run)).collect::<Result<_, _>>()?)
}

pub(super) async fn transcript(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
) -> Result<Option<Vec<Message>>, Halt> {
    let found = sqlx::query("SELECT 1 FROM runs WHERE id = $1 AND tenant = $2")
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_optional(&mut *connection)
        .await?;
    match found {
        None => Ok(None),
        Some(_) => Ok(Some(history(connection, Some(id)).await?)),
    }
}

/// All that was said in a run and in those before it that it continues. What was erased is left out.
pub(super) async fn history(connection: &mut PgConnection, newest: Option<RunId>) -> Result<Vec<Message>, Halt> {
    let Some(newest) = newest else { return Ok(Vec::new()) };
    // Specs never change and logs only grow, so several statements see one transcript.
    let specs = sqlx::query(
        "WITH RECURSIVE chain (id, continues, place) AS (SELECT id, continues, 0 FROM runs WHERE id = $1 \
         UNION ALL SELECT runs.id, runs.continues, chain.place + 1 FROM runs JOIN chain ON runs.id = chain.continues) \
         SELECT run, spec FROM chain JOIN run_specs ON run_specs.run = chain.id ORDER BY place DESC",
    )
    .bind(newest.to_string())
    .fetch_all(&mut *connection)
    .await?;
    let ids: Vec<RunId> = specs.iter().map(|row| row.run_id("run")).collect::<Result<_, _>>()?;
    let mut logged = logged_messages(connection, &ids).await?;
    let mut messages = Vec::new();
    for (row, id) in specs.iter().zip(ids) {
        messages.extend(row::spec(row.optional_text("spec")?.as_deref(), id)?.input);
        messages.extend(logged.remove(&id).unwrap_or(Ok(Vec::new()))?);
    }
    Ok(messages)
}

/// The transcripts of these runs, each without its input, or what is unreadable of one. A run in which nothing was said
/// is left out.
pub(super) async fn logged_messages(
    connection: &mut PgConnection,
    ids: &[RunId],
) -> Result<HashMap<RunId, Result<Vec<Message>, StoreError>>, sqlx::Error> {
    let names: Vec<_> = ids.iter().map(RunId::to_string).collect();
    let rows = sqlx::query(concat!(
        "SELECT run, seq, time, kind, body FROM run_events WHERE run = ANY($1) AND kind IN ",
        transcript_kinds!(),
        " ORDER BY run, seq"
    ))
    .bind(names)
    .fetch_all(connection)
    .await?;
    let mut logs: HashMap<RunId, Result<Vec<_>, StoreError>> = HashMap::new();
    for row in &rows {
        let run = row.run_id("run")?;
        let log = logs.entry(run).or_insert(Ok(Vec::new()));
        match (row::event(row, run), log.as_mut()) {
            (Ok(event), Ok(bodies)) => bodies.push(event.body),
            (Err(error), Ok(_)) => *log = Err(error),
            (Ok(_) | Err(_), Err(_)) => {}
        }
    }
    let fold = |(run, log): (RunId, Result<Vec<_>, StoreError>)| {
        let told =
            log.and_then(|bodies| transcript::fold(&bodies).map_err(|reason| StoreError::Corrupt { run, reason }));
        (run, told)
    };
    Ok(logs.into_iter().map(fold).collect())
}

/// All that is needed to go on with a run, as of one moment.
pub(super) async fn load(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
) -> Result<Option<ClaimedRun>, Halt> {
    sqlx::raw_sql("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").execute(&mut *connection).await?;
    let found = sqlx::query(select_claimable!("id = $1 AND tenant = $2"))
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_all(&mut *connection)
        .await?;
    let loaded = claim::read(connection, &found).await?.pop().map(|(_, loaded)| loaded);
    let loaded = loaded.transpose()?;
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(loaded)
}

pub(super) async fn backlog(connection: &mut PgConnection, holder: Holder<'_>) -> Result<Backlog, Halt> {
    let row = sqlx::query(concat!(
        "SELECT (SELECT COUNT(*) FROM runs WHERE status = 'queued') + (SELECT COUNT(*) FROM runs WHERE ",
        is_free!(),
        ") AS free, (SELECT COUNT(*) FROM runs JOIN runs AS former ON former.id = runs.continues \
         WHERE runs.status = 'queued' AND former.finished_at IS NULL) AS blocked"
    ))
    .bind(stored(holder.worker))
    .bind(holder.lease_ms())
    .fetch_one(connection)
    .await?;
    Ok(row::backlog(&row)?)
}

pub(super) async fn inbox(
    connection: &mut PgConnection,
    id: RunId,
    after: InboxNumber,
) -> Result<Vec<(InboxNumber, InboxItem)>, Halt> {
    let rows = sqlx::query("SELECT number, item FROM run_inbox WHERE run = $1 AND number > $2 ORDER BY number")
        .bind(id.to_string())
        .bind(row::signed(after)?)
        .fetch_all(connection)
        .await?;
    Ok(rows.iter().map(|row| row::inbox_item(row, id)).collect::<Result<_, _>>()?)
}

pub(super) async fn held(connection: &mut PgConnection, worker: &str) -> Result<Vec<(TenantId, RunId)>, Halt> {
    let rows = sqlx::query("SELECT tenant, id FROM runs WHERE status = 'running' AND worker = $1")
        .bind(stored(worker))
        .fetch_all(connection)
        .await?;
    Ok(rows.iter().map(named).collect::<Result<_, _>>()?)
}

pub(super) async fn due(
    connection: &mut PgConnection,
    now: Timestamp,
    limit: u32,
) -> Result<Vec<(TenantId, RunId)>, Halt> {
    let rows = sqlx::query(
        "SELECT tenant, id FROM runs WHERE status = 'waiting' \
         AND (waiting_until <= $1 OR cancel_requested_at IS NOT NULL) ORDER BY waiting_until LIMIT $2",
    )
    .bind(now.as_millis())
    .bind(i64::from(limit))
    .fetch_all(connection)
    .await?;
    Ok(rows.iter().map(named).collect::<Result<_, _>>()?)
}

fn named(row: &PgRow) -> Result<(TenantId, RunId), sqlx::Error> {
    Ok((TenantId::new(row.text("tenant")?), row.run_id("id")?))
}

/// Whether this server takes writes: it may have become a standby since the connection was opened.
pub(super) async fn health(connection: &mut PgConnection) -> Result<(), Halt> {
    let is_read_only: bool =
        sqlx::query_scalar("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool")
            .fetch_one(connection)
            .await?;
    if is_read_only {
        return Err(sqlx::Error::Io(std::io::Error::other("the database takes no writes")).into());
    }
    Ok(())
}
