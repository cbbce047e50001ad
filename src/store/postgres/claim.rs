//! The verbs that hand runs to a worker, and leases. A run that cannot be read ends here, once, as `internal_error`: it
//! would otherwise stand at the head of the queue for ever.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::PgConnection;
use sqlx::postgres::PgRow;

use super::error::Halt;
use super::read::{history, logged_messages};
use super::text::stored;
use crate::domain::{EncodedBody, RunId, Seq, TenantId, Timestamp};
use crate::store::prepared::numbered;
use crate::store::row::{self, Cells, StatusColumns, run_columns};
use crate::store::{ClaimedRun, StoreError, claimed};

/// Most runs of one transaction.
pub(super) const PORTION: usize = 32;

/// What a claim reads: the run, its spec, its state. `{}` is the condition and what follows it.
macro_rules! select_claimable {
    ($condition:expr) => {
        concat!(
            "SELECT ",
            run_columns!(),
            ", state, inbox, worker, (SELECT spec FROM run_specs WHERE run = runs.id) AS spec FROM runs WHERE ",
            $condition
        )
    };
}
pub(super) use select_claimable;

/// A running run that this process `$1`, with leases of `$2` milliseconds, may take. By the clock of the database alone.
///
/// A process whose own lease had ended in between takes over nothing until a lease later: what cut it off from the
/// database may have cut off the others as well, and they come back as it did.
macro_rules! is_free {
    () => {
        "status = 'running' AND worker IS DISTINCT FROM $1 AND (worker IS NULL OR (\
         NOT EXISTS (SELECT 1 FROM workers WHERE workers.id = runs.worker AND workers.lease_until > now()) \
         AND EXISTS (SELECT 1 FROM workers AS own WHERE own.id = $1 AND own.lease_until > now() \
         AND (own.resumed_at IS NULL OR own.resumed_at + $2 * interval '1 millisecond' <= now()))))"
    };
}
pub(super) use is_free;

const LEFT: &str =
    select_claimable!(concat!(is_free!(), " ORDER BY crashes DESC, id LIMIT $3 FOR UPDATE OF runs SKIP LOCKED"));

const QUEUED: &str = select_claimable!(
    "status = 'queued' AND NOT EXISTS \
     (SELECT 1 FROM runs AS former WHERE former.id = runs.continues AND former.finished_at IS NULL) \
     ORDER BY id LIMIT $1 FOR UPDATE OF runs SKIP LOCKED"
);

/// A process and how long it is taken to live.
#[derive(Clone, Copy)]
pub(super) struct Holder<'w> {
    pub(super) worker: &'w str,
    pub(super) lease: Duration,
}

impl Holder<'_> {
    pub(super) fn lease_ms(self) -> i64 {
        i64::try_from(self.lease.as_millis()).unwrap_or(i64::MAX)
    }
}

/// What a portion of a claim came to.
pub(super) struct Portion {
    pub(super) claimed: Vec<ClaimedRun>,
    /// Whether there was nothing more to take.
    pub(super) is_last: bool,
}

/// Takes up to `limit` runs that nobody has at work.
pub(super) async fn claim(
    connection: &mut PgConnection,
    holder: Holder<'_>,
    limit: usize,
    now: Timestamp,
) -> Result<Portion, Halt> {
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    let limited = |taken: usize| i64::try_from(limit.saturating_sub(taken)).unwrap_or(i64::MAX);
    let mut rows = sqlx::query(LEFT)
        .bind(stored(holder.worker))
        .bind(holder.lease_ms())
        .bind(limited(0))
        .fetch_all(&mut *connection)
        .await?;
    if rows.len() < limit {
        rows.extend(sqlx::query(QUEUED).bind(limited(rows.len())).fetch_all(&mut *connection).await?);
    }
    let is_last = rows.len() < limit;
    let mut taken = Vec::with_capacity(rows.len());
    if !rows.is_empty() {
        // What this process has at work is its own for as long as it tells so.
        renew(connection, holder).await?;
        for (row, read) in read(connection, &rows).await? {
            let ready = read.and_then(|mut run| {
                let had = row.optional_text("worker").map_err(|error| StoreError::Failed(error.into()))?;
                claimed::take(&mut run, had.is_some(), now);
                Ok((StatusColumns::of(&run.run.status)?, run))
            });
            match ready {
                Ok(ready) => taken.push(ready),
                Err(error) => end_row(connection, row, &error, Some(now)).await?,
            }
        }
        mark(connection, holder.worker, &taken).await?;
    }
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(Portion { claimed: taken.into_iter().map(|(_, run)| run).collect(), is_last })
}

/// Stores that runs are at work here.
async fn mark(
    connection: &mut PgConnection,
    worker: &str,
    taken: &[(StatusColumns, ClaimedRun)],
) -> Result<(), sqlx::Error> {
    let ids: Vec<_> = taken.iter().map(|(_, claimed)| claimed.run.id.to_string()).collect();
    let started: Vec<_> = taken.iter().map(|(columns, _)| columns.started_at).collect();
    let deadlines: Vec<_> = taken.iter().map(|(columns, _)| columns.deadline_at).collect();
    sqlx::query(
        "UPDATE runs SET generation = generation + 1, status = 'running', started_at = taken.started_at, \
         deadline_at = taken.deadline_at, time_left_ms = NULL, worker = $1 \
         FROM unnest($2::text[], $3::bigint[], $4::bigint[]) \
         AS taken (id, started_at, deadline_at) WHERE runs.id = taken.id",
    )
    .bind(stored(worker))
    .bind(ids)
    .bind(started)
    .bind(deadlines)
    .execute(connection)
    .await?;
    Ok(())
}

/// Everything of claimable rows, or what is unreadable of each.
pub(super) async fn read<'r>(
    connection: &mut PgConnection,
    rows: &'r [PgRow],
) -> Result<Vec<(&'r PgRow, Result<ClaimedRun, StoreError>)>, sqlx::Error> {
    let mut runs: Vec<_> = rows.iter().map(|row| (row, claimed::read(row))).collect();
    let ids: Vec<RunId> = runs.iter().filter_map(|(_, run)| run.as_ref().ok()).map(|run| run.run.id).collect();
    let mut logged: HashMap<_, _> = logged_messages(connection, &ids).await?;
    for (_, read) in &mut runs {
        let Ok(run) = read else { continue };
        let told = async {
            run.transcript = logged.remove(&run.run.id).unwrap_or(Ok(Vec::new()))?;
            run.history = history(connection, run.run.continues).await?;
            Ok::<(), Halt>(())
        };
        match told.await {
            Ok(()) => {}
            Err(Halt::Refused(error)) => *read = Err(error),
            Err(Halt::Database(error)) => return Err(error),
        }
    }
    Ok(runs)
}

/// Takes one running run from whoever holds it.
pub(super) async fn reclaim(
    connection: &mut PgConnection,
    holder: Holder<'_>,
    tenant: &TenantId,
    id: RunId,
) -> Result<Option<ClaimedRun>, Halt> {
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    let found = sqlx::query(select_claimable!("id = $1 AND tenant = $2 AND status = 'running' FOR UPDATE OF runs"))
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_all(&mut *connection)
        .await?;
    let mut refused = None;
    let mut taken = None;
    if let Some((row, read)) = read(connection, &found).await?.pop() {
        match read {
            Ok(mut claimed) => {
                sqlx::query("UPDATE runs SET generation = generation + 1, worker = $2 WHERE id = $1")
                    .bind(id.to_string())
                    .bind(stored(holder.worker))
                    .execute(&mut *connection)
                    .await?;
                claimed.run.generation += 1;
                taken = Some(claimed);
            }
            Err(error) => {
                end_row(connection, row, &error, None).await?;
                refused = Some(error);
            }
        }
    }
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    match refused {
        Some(error) => Err(error.into()),
        None => Ok(taken),
    }
}

/// Ends a run that its worker cannot read.
pub(super) async fn end_unreadable(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
    reason: &str,
    now: Timestamp,
) -> Result<(), Halt> {
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    let row = sqlx::query("SELECT id FROM runs WHERE id = $1 AND tenant = $2 AND finished_at IS NULL FOR UPDATE")
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_optional(&mut *connection)
        .await?;
    if let Some(row) = row {
        let error = StoreError::Corrupt { run: id, reason: reason.to_owned() };
        end_row(connection, &row, &error, Some(now)).await?;
    }
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(())
}

/// Ends a run that cannot be read, with its `run_end` event where that can be made. Without `now` it ends at the
/// time of its last event. Its row is locked.
async fn end_row(
    connection: &mut PgConnection,
    row: &PgRow,
    error: &StoreError,
    now: Option<Timestamp>,
) -> Result<(), Halt> {
    let id = row.text("id")?;
    tracing::error!(run_id = id, %error, "a stored run cannot be read; it is ended as internal_error");
    let last = sqlx::query(
        "SELECT COALESCE(MAX(seq), 0) AS seq, COALESCE(MAX(time), 0) AS time FROM run_events WHERE run = $1",
    )
    .bind(&id)
    .fetch_one(&mut *connection)
    .await?;
    let last_seq = last.integer("seq")?;
    let finished_at = now.unwrap_or(Timestamp::from_millis(last.integer("time")?));
    let columns = claimed::unreadable_end(error, finished_at)?;
    // `started_at` and `deadline_at` stay as they are.
    let ended = sqlx::query(concat!(
        "UPDATE runs SET status = $2, finished_at = $3, ending = $4, last_seq = $5, worker = NULL, \
         time_left_ms = NULL, waiting_until = NULL, pending = NULL WHERE id = $1 RETURNING ",
        run_columns!()
    ))
    .bind(&id)
    .bind(columns.status)
    .bind(columns.finished_at)
    .bind(columns.ending.as_deref())
    .bind(last_seq)
    .fetch_one(&mut *connection)
    .await?;
    // A row that still does not read is the broken part itself: it has no public form to tell of its end.
    let Ok(run) = row::run(&ended) else { return Ok(()) };
    append(connection, run.id, last_seq, finished_at, &claimed::run_end(&run)?).await?;
    Ok(())
}

/// Appends an event to the log of a run whose row is locked.
async fn append(
    connection: &mut PgConnection,
    run: RunId,
    last_seq: i64,
    time: Timestamp,
    body: &EncodedBody,
) -> Result<(), Halt> {
    let after = Seq::try_from(last_seq).map_err(|error| sqlx::Error::Decode(error.into()))?;
    for event in numbered(run, after, time, std::slice::from_ref(body)) {
        let seq = row::signed(event.seq)?;
        sqlx::query("INSERT INTO run_events (run, seq, time, kind, body) VALUES ($1, $2, $3, $4, $5)")
            .bind(run.to_string())
            .bind(seq)
            .bind(time.as_millis())
            .bind(body.kind.as_str())
            .bind(&body.json[..])
            .execute(&mut *connection)
            .await?;
        sqlx::query("UPDATE runs SET last_seq = $2 WHERE id = $1")
            .bind(run.to_string())
            .bind(seq)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

/// Tells that this process lives, from now on for as long as a lease is.
pub(super) async fn renew(connection: &mut PgConnection, holder: Holder<'_>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO workers (id, lease_until) VALUES ($1, now() + $2 * interval '1 millisecond') \
         ON CONFLICT (id) DO UPDATE SET lease_until = excluded.lease_until, \
         resumed_at = CASE WHEN workers.lease_until > now() THEN workers.resumed_at ELSE now() END",
    )
    .bind(stored(holder.worker))
    .bind(holder.lease_ms())
    .execute(connection)
    .await?;
    Ok(())
}

/// Lets go of every run of this process.
pub(super) async fn release(connection: &mut PgConnection, worker: &str, parked: &[RunId]) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH gone AS (DELETE FROM workers WHERE id = $1) \
         UPDATE runs SET worker = NULL WHERE id = ANY($2) AND status = 'running' AND worker = $1",
    )
    .bind(stored(worker))
    .bind(parked.iter().map(RunId::to_string).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(())
}
