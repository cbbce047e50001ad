//! The verb that commits a step of a run: one statement, unless an answer is kept under a key.

use sqlx::PgConnection;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;

use super::error::Halt;
use super::key;
use super::read::log;
use super::text::{read, stored};
use crate::domain::TenantId;
use crate::store::prepared::{PreparedStep, Standing, Told, standing_columns};
use crate::store::row::{self, run_columns};
use crate::store::{Committed, KeyUse};

/// Brings the row up to the step if it is the one that its writer knows; what else the step does, it does only then.
/// While another write holds the row this one waits, and looks at what that one left.
macro_rules! take_step {
    ($returned:expr) => {
        concat!(
            "WITH taken AS (UPDATE runs SET status = $4, started_at = $5, deadline_at = $6, time_left_ms = $7, \
             waiting_until = $8, finished_at = $9, pending = $10, ending = $11, steps = $12, tool_calls = $13, \
             usage = $14, crashes = $15, state = $17, last_seq = $3 + $18, \
             worker = CASE WHEN $4 = 'running' THEN worker END, \
             generation = generation + CASE WHEN $4 IN ('queued', 'waiting') THEN 1 ELSE 0 END \
             WHERE id = $1 AND generation = $2 AND last_seq = $3 AND finished_at IS NULL \
             AND ($9 IS NULL OR cancel_requested_at IS NOT DISTINCT FROM $19) AND ($16 IS NULL OR inbox = $16) \
             RETURNING ",
            $returned,
            "), log AS (INSERT INTO run_events (run, seq, time, kind, body) \
             SELECT taken.id, $3 + event.number, $22, event.kind, event.body \
             FROM taken, unnest($20::text[], $21::bytea[]) WITH ORDINALITY AS event (kind, body, number)), \
             heard AS (DELETE FROM run_inbox USING taken WHERE run_inbox.run = taken.id AND run_inbox.number <= $23) \
             SELECT * FROM taken"
        )
    };
}

const TAKE: &str = take_step!("id, cancel_requested_at, inbox");
const TAKE_AND_SHOW: &str = take_step!(concat!(run_columns!(), ", inbox"));

/// Commits one step, or finds that it was committed before.
pub(super) async fn commit(connection: &mut PgConnection, step: &PreparedStep) -> Result<Committed, Halt> {
    match bound(TAKE, step).fetch_optional(&mut *connection).await? {
        Some(row) => Ok(step.committed(&Told::read(&row)?)),
        None => not_taken(connection, step).await,
    }
}

/// The same if its key is not taken; keeps the run as it then stands under the key. `again` says that it may have been
/// committed by an attempt whose answer was lost, and its key be taken by that.
pub(super) async fn commit_with_key(
    connection: &mut PgConnection,
    step: &PreparedStep,
    used: &KeyUse,
    again: bool,
) -> Result<Committed, Halt> {
    if again {
        match not_taken(connection, step).await {
            Err(Halt::Refused(_)) => {}
            done => return done,
        }
    }
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    let owner = sqlx::query_scalar("SELECT tenant FROM runs WHERE id = $1").bind(&step.name);
    let Some(tenant) = owner.fetch_optional(&mut *connection).await? else {
        return end(connection, step).await;
    };
    let tenant = TenantId::new(read(tenant));
    key::refuse_taken(connection, &tenant, Some(used)).await?;
    let Some(row) = bound(TAKE_AND_SHOW, step).fetch_optional(&mut *connection).await? else {
        // Whoever was faster may have used the same key.
        key::refuse_taken(connection, &tenant, Some(used)).await?;
        return end(connection, step).await;
    };
    key::keep(connection, used, &row::run(&row)?).await?;
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(step.committed(&Told::read(&row)?))
}

async fn end(connection: &mut PgConnection, step: &PreparedStep) -> Result<Committed, Halt> {
    let found = not_taken(connection, step).await?;
    sqlx::raw_sql("COMMIT").execute(connection).await?;
    Ok(found)
}

fn bound<'s>(sql: &'static str, step: &'s PreparedStep) -> Query<'s, sqlx::Postgres, PgArguments> {
    let (kinds, bodies): (Vec<_>, Vec<_>) = step.events.iter().map(|body| (body.kind.as_str(), &body.json[..])).unzip();
    sqlx::query(sql)
        .bind(&step.name)
        .bind(step.fence)
        .bind(step.before)
        .bind(step.status.status)
        .bind(step.status.started_at)
        .bind(step.status.deadline_at)
        .bind(step.status.time_left_ms)
        .bind(step.status.waiting_until)
        .bind(step.status.finished_at)
        .bind(step.status.pending.as_deref())
        .bind(step.status.ending.as_deref())
        .bind(i64::from(step.steps))
        .bind(i64::from(step.tool_calls))
        .bind(&step.usage)
        .bind(i64::from(step.crashes))
        .bind(step.all_read())
        .bind(step.state.as_deref().map(stored))
        .bind(step.count())
        .bind(step.cancel_requested_at)
        .bind(kinds)
        .bind(bodies)
        .bind(step.time.as_millis())
        .bind(step.inbox_read)
}

/// What a step has met that the row did not take. Each reason for it lasts, so it is still there to be seen.
async fn not_taken(connection: &mut PgConnection, step: &PreparedStep) -> Result<Committed, Halt> {
    let row: Option<PgRow> = sqlx::query(concat!("SELECT ", standing_columns!(), " FROM runs WHERE id = $1"))
        .bind(&step.name)
        .fetch_optional(&mut *connection)
        .await?;
    let standing = row.map(|row| Standing::read(&row)).transpose()?;
    let logged = log(connection, step.run, step.before, step.count()).await?;
    Ok(step.not_taken(standing.as_ref(), &logged)?)
}
