//! The verbs that erase. A run's other rows go with it.

use sqlx::PgConnection;

use super::error::Halt;
use super::text::stored;
use crate::domain::{RunId, TenantId, Timestamp};
use crate::store::{ERASED_LIFETIME, Erasure, kept};

/// Erases one run.
pub(super) async fn erase(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
    now: Timestamp,
) -> Result<Erasure, Halt> {
    let gone = sqlx::query(
        "WITH gone AS (DELETE FROM runs WHERE id = $1 AND tenant = $2 AND finished_at IS NOT NULL RETURNING id, tenant) \
         INSERT INTO erased_runs (run, tenant, erased_at) SELECT id, tenant, $3 FROM gone",
    )
    .bind(id.to_string())
    .bind(stored(tenant.as_str()))
    .bind(now.as_millis())
    .execute(&mut *connection)
    .await?;
    if gone.rows_affected() > 0 || is_erased(connection, tenant, id).await? {
        return Ok(Erasure::Erased);
    }
    let active: Option<i32> = sqlx::query_scalar("SELECT 1 FROM runs WHERE id = $1 AND tenant = $2")
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_optional(connection)
        .await?;
    Ok(if active.is_some() { Erasure::Active } else { Erasure::Unknown })
}

pub(super) async fn is_erased(connection: &mut PgConnection, tenant: &TenantId, id: RunId) -> Result<bool, Halt> {
    let erased: Option<i32> = sqlx::query_scalar("SELECT 1 FROM erased_runs WHERE run = $1 AND tenant = $2")
        .bind(id.to_string())
        .bind(stored(tenant.as_str()))
        .fetch_optional(connection)
        .await?;
    Ok(erased.is_some())
}

/// Forgets what is too old at `now` besides runs: keys, erased runs, processes that have been gone for a day.
pub(super) async fn forget(connection: &mut PgConnection, now: Timestamp) -> Result<(), Halt> {
    let lifetime = i64::try_from(ERASED_LIFETIME.as_millis()).unwrap_or(i64::MAX);
    for (sql, oldest) in [
        ("DELETE FROM idempotency_keys WHERE created_at <= $1", kept::oldest(now)),
        ("DELETE FROM erased_runs WHERE erased_at <= $1", now.as_millis().saturating_sub(lifetime)),
    ] {
        sqlx::query(sql).bind(oldest).execute(&mut *connection).await?;
    }
    // One that is not there is as gone as one whose lease has ended.
    sqlx::query("DELETE FROM workers WHERE lease_until < now() - interval '1 day'").execute(connection).await?;
    Ok(())
}

/// Erases runs that ended before `before`, oldest first, at most `limit`.
pub(super) async fn sweep(
    connection: &mut PgConnection,
    before: Timestamp,
    now: Timestamp,
    limit: u32,
) -> Result<u64, Halt> {
    // A run that another one goes on from is a part of that one's conversation.
    let gone = sqlx::query(
        "WITH old AS (SELECT id FROM runs WHERE finished_at < $1 \
         AND NOT EXISTS (SELECT 1 FROM runs AS later WHERE later.continues = runs.id) \
         ORDER BY finished_at LIMIT $2 FOR UPDATE OF runs SKIP LOCKED), \
         gone AS (DELETE FROM runs USING old WHERE runs.id = old.id RETURNING runs.id, runs.tenant) \
         INSERT INTO erased_runs (run, tenant, erased_at) SELECT id, tenant, $3 FROM gone",
    )
    .bind(before.as_millis())
    .bind(i64::from(limit))
    .bind(now.as_millis())
    .execute(connection)
    .await?;
    Ok(gone.rows_affected())
}
