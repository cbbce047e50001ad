//! The verb that stores an accepted run: one statement, unless other runs decide what becomes of it.

use sqlx::PgConnection;

use super::error::Halt;
use super::key;
use super::read::find_run;
use super::text::stored;
use super::write::request_cancel;
use crate::domain::{RunId, Timestamp};
use crate::store::prepared::{Place, PreparedRun, count};
use crate::store::row::Cells;
use crate::store::{Created, KeyUse, StoreError, kept};

/// Stores a run with all that belongs to it. `{}` is what comes first, and the condition for all the rest.
macro_rules! insert_run {
    ($before:literal, $condition:literal) => {
        concat!(
            "WITH ",
            $before,
            "added AS (INSERT INTO runs (id, tenant, generation, status, agent, model, thread, continues, limits, \
             metadata, steps, tool_calls, usage, last_seq, worker, crashes, created_at, started_at, deadline_at, \
             time_left_ms, waiting_until, cancel_requested_at, finished_at, pending, ending, state, inbox) \
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, \
             $22, $23, $24, $25, $26, 0 ",
            $condition,
            " RETURNING id), \
             specs AS (INSERT INTO run_specs (run, spec) SELECT id, $27 FROM added), \
             labels AS (INSERT INTO run_metadata (tenant, key, value, run) \
             SELECT $2, label.key, label.value, added.id \
             FROM added, unnest($28::text[], $29::text[]) AS label (key, value)), \
             log AS (INSERT INTO run_events (run, seq, time, kind, body) \
             SELECT added.id, event.seq, $17, event.kind, event.body \
             FROM added, unnest($30::text[], $31::bytea[]) WITH ORDINALITY AS event (kind, body, seq)) \
             SELECT id FROM added"
        )
    };
}

const INSERT: &str = insert_run!("", "");
/// A key that somebody else uses at the same time is waited for. One that is too old gives way.
const INSERT_WITH_KEY: &str = insert_run!(
    "used AS (INSERT INTO idempotency_keys (tenant, key, fingerprint, run, answer, created_at) \
     VALUES ($2, $32, $33, $1, $34, $35) ON CONFLICT (tenant, key) DO UPDATE SET fingerprint = excluded.fingerprint, \
     run = excluded.run, answer = excluded.answer, created_at = excluded.created_at \
     WHERE idempotency_keys.created_at <= $36 RETURNING run), ",
    "FROM used"
);

/// Whether other runs decide what becomes of it.
pub(super) const fn is_placed(new: &PreparedRun) -> bool {
    new.run.thread.is_some() || new.run.continues.is_some()
}

/// Stores an accepted run. `again` says that it may have been stored by an attempt whose answer was lost.
pub(super) async fn create(connection: &mut PgConnection, new: &PreparedRun, again: bool) -> Result<Created, Halt> {
    if again && let Some(created) = find_created(connection, new).await? {
        return Ok(created);
    }
    if !is_placed(new) {
        let created = new.created(Place::default());
        return match insert(connection, new, &created).await {
            Ok(()) => Ok(created),
            // The attempt before was still being committed, and this one has waited for that.
            Err(error) if again => find_created(connection, new).await?.ok_or(error),
            Err(error) => Err(error),
        };
    }
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    if let Some(thread) = &new.run.thread {
        // Two that come at once must see each other.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended($1, hashtextextended($2, 0)))")
            .bind(stored(thread))
            .bind(stored(new.run.tenant.as_str()))
            .execute(&mut *connection)
            .await?;
    }
    key::refuse_taken(connection, &new.run.tenant, new.key.as_ref()).await?;
    let created = new.created(find_place(connection, new).await?);
    insert(connection, new, &created).await?;
    for id in &created.interrupted {
        request_cancel(connection, &new.run.tenant, *id, new.run.created_at).await?;
    }
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(created)
}

/// The run of this very request, if it is stored.
async fn find_created(connection: &mut PgConnection, new: &PreparedRun) -> Result<Option<Created>, Halt> {
    let Some(run) = find_run(connection, &new.run.tenant, new.run.id).await? else { return Ok(None) };
    if run.created_at != new.run.created_at {
        return Ok(None);
    }
    let asked = sqlx::query(
        "SELECT id FROM runs WHERE tenant = $1 AND cancel_requested_at = $2 AND id <> $3 \
         AND (id = $4 OR thread = $5) ORDER BY id",
    )
    .bind(stored(new.run.tenant.as_str()))
    .bind(new.run.created_at.as_millis())
    .bind(&new.name)
    .bind(run.continues.map(|id| id.to_string()))
    .bind(new.run.thread.as_deref().map(stored))
    .fetch_all(connection)
    .await?;
    let interrupted = asked.iter().map(|row| row.run_id("id")).collect::<Result<_, _>>()?;
    Ok(Some(new.created(Place { continues: run.continues, interrupted })))
}

/// Where it comes in its thread, or after the run that it names.
async fn find_place(connection: &mut PgConnection, new: &PreparedRun) -> Result<Place, Halt> {
    let tenant = stored(new.run.tenant.as_str());
    let thread = new.run.thread.as_deref().map(stored);
    let newest = match new.run.continues {
        Some(named) => {
            let found = sqlx::query("SELECT id FROM runs WHERE id = $1 AND tenant = $2")
                .bind(named.to_string())
                .bind(&tenant)
                .fetch_optional(&mut *connection)
                .await?;
            if found.is_none() {
                return Err(StoreError::NoPredecessor { run: named }.into());
            }
            found
        }
        // Ids are given before runs are stored, so the run with the highest one may have been stored first.
        None => {
            sqlx::query(
                "SELECT id FROM runs WHERE tenant = $1 AND thread = $2 AND NOT EXISTS \
                 (SELECT 1 FROM runs AS later WHERE later.continues = runs.id AND later.thread = $2) \
                 ORDER BY id DESC LIMIT 1",
            )
            .bind(&tenant)
            .bind(&thread)
            .fetch_optional(&mut *connection)
            .await?
        }
    };
    let Some(newest) = newest else { return Ok(Place::default()) };
    let newest = newest.run_id("id")?;
    let active = sqlx::query(
        "SELECT id FROM runs WHERE tenant = $1 AND finished_at IS NULL AND (id = $2 OR thread = $3) ORDER BY id",
    )
    .bind(&tenant)
    .bind(newest.to_string())
    .bind(&thread)
    .fetch_all(connection)
    .await?;
    let active: Vec<RunId> = active.iter().map(|row| row.run_id("id")).collect::<Result<_, _>>()?;
    Ok(new.place(newest, active)?)
}

async fn insert(connection: &mut PgConnection, new: &PreparedRun, created: &Created) -> Result<(), Halt> {
    let run = &new.run;
    let (keys, values): (Vec<_>, Vec<_>) =
        run.metadata.iter().map(|(key, value)| (stored(key).into_owned(), stored(value).into_owned())).unzip();
    let (kinds, bodies): (Vec<_>, Vec<_>) = new.events.iter().map(|body| (body.kind.as_str(), &body.json[..])).unzip();
    let query = sqlx::query(match new.key {
        Some(_) => INSERT_WITH_KEY,
        None => INSERT,
    })
    .bind(&new.name)
    .bind(stored(run.tenant.as_str()))
    .bind(new.generation)
    .bind(new.status.status)
    .bind(stored(&run.agent))
    .bind(stored(&new.model))
    .bind(run.thread.as_deref().map(stored))
    .bind(created.run.continues.map(|id| id.to_string()))
    .bind(&new.limits)
    .bind(&new.metadata)
    .bind(i64::from(run.steps))
    .bind(i64::from(run.tool_calls))
    .bind(&new.usage)
    .bind(count(&new.events))
    .bind(new.worker.as_deref().map(stored))
    .bind(i64::from(run.crashes))
    .bind(run.created_at.as_millis())
    .bind(new.status.started_at)
    .bind(new.status.deadline_at)
    .bind(new.status.time_left_ms)
    .bind(new.status.waiting_until)
    .bind(run.cancel_requested_at.map(Timestamp::as_millis))
    .bind(new.status.finished_at)
    .bind(new.status.pending.as_deref())
    .bind(new.status.ending.as_deref())
    .bind(new.state.as_deref().map(stored))
    .bind(&new.spec)
    .bind(keys)
    .bind(values)
    .bind(kinds)
    .bind(bodies);
    let added = match &new.key {
        None => query.fetch_optional(&mut *connection).await?,
        Some(KeyUse { key, fingerprint, at }) => {
            let query = query
                .bind(stored(key))
                .bind(stored(fingerprint))
                .bind(kept::answer(&created.run)?)
                .bind(at.as_millis())
                .bind(kept::oldest(*at));
            query.fetch_optional(&mut *connection).await?
        }
    };
    match (&added, &new.key) {
        (None, Some(used)) => {
            key::refuse_taken(connection, &run.tenant, Some(used)).await?;
            Err(key::vanished(used))
        }
        (Some(_), _) | (None, None) => Ok(()),
    }
}
