//! Answers that are kept under an `Idempotency-Key`.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteExecutor;

use crate::domain::{Run, TenantId, Timestamp};
use crate::store::{KeptAnswer, KeyUse, kept};

/// What was answered under a key, if that is not too long ago at `now`.
pub(super) async fn find(
    executor: impl SqliteExecutor<'_>,
    tenant: &TenantId,
    key: &str,
    now: Timestamp,
) -> Result<Option<KeptAnswer>, sqlx::Error> {
    let row = sqlx::query(
        "SELECT fingerprint, run, answer FROM idempotency_keys WHERE tenant = ? AND key = ? AND created_at > ?",
    )
    .bind(tenant.as_str())
    .bind(key)
    .bind(kept::oldest(now))
    .fetch_optional(executor)
    .await?;
    row.map(|row| kept::read(&row)).transpose()
}

/// The same for a key that is about to be used.
pub(super) async fn taken(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    key: &KeyUse,
) -> Result<Option<KeptAnswer>, sqlx::Error> {
    find(connection, tenant, &key.key, key.at).await
}

/// Keeps a run as the answer under a key. One that is too old gives way.
pub(super) async fn keep(connection: &mut SqliteConnection, key: &KeyUse, run: &Run) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT OR REPLACE INTO idempotency_keys (tenant, key, fingerprint, run, answer, created_at) \
         VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(run.tenant.as_str())
    .bind(&key.key)
    .bind(&key.fingerprint)
    .bind(run.id.to_string())
    .bind(kept::answer(run)?)
    .bind(key.at.as_millis())
    .execute(connection)
    .await?;
    Ok(())
}

/// Forgets those that are too old at `now`.
pub(super) async fn forget_old(connection: &mut SqliteConnection, now: Timestamp) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM idempotency_keys WHERE created_at <= ?")
        .bind(kept::oldest(now))
        .execute(connection)
        .await?;
    Ok(())
}
