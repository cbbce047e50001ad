//! Answers that are kept under an `Idempotency-Key`.

use sqlx::PgConnection;

use super::error::Halt;
use super::text::stored;
use crate::domain::{Run, TenantId, Timestamp};
use crate::store::{KeptAnswer, KeyUse, StoreError, kept};

/// What was answered under a key, if that is not too long ago at `now`.
pub(super) async fn find(
    connection: &mut PgConnection,
    tenant: &TenantId,
    key: &str,
    now: Timestamp,
) -> Result<Option<KeptAnswer>, Halt> {
    let row = sqlx::query(
        "SELECT fingerprint, run, answer FROM idempotency_keys WHERE tenant = $1 AND key = $2 AND created_at > $3",
    )
    .bind(stored(tenant.as_str()))
    .bind(stored(key))
    .bind(kept::oldest(now))
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| kept::read(&row)).transpose()?)
}

/// Refuses a key that is used, if one is given.
pub(super) async fn refuse_taken(
    connection: &mut PgConnection,
    tenant: &TenantId,
    key: Option<&KeyUse>,
) -> Result<(), Halt> {
    let Some(key) = key else { return Ok(()) };
    match find(connection, tenant, &key.key, key.at).await? {
        Some(kept) => Err(StoreError::KeyTaken(kept).into()),
        None => Ok(()),
    }
}

/// Keeps a run as the answer under a key. One that is too old gives way; one that somebody else used in the meantime
/// is waited for and refused.
pub(super) async fn keep(connection: &mut PgConnection, key: &KeyUse, run: &Run) -> Result<(), Halt> {
    let done = sqlx::query(
        "INSERT INTO idempotency_keys (tenant, key, fingerprint, run, answer, created_at) \
         VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (tenant, key) DO UPDATE SET fingerprint = excluded.fingerprint, \
         run = excluded.run, answer = excluded.answer, created_at = excluded.created_at \
         WHERE idempotency_keys.created_at <= $7",
    )
    .bind(stored(run.tenant.as_str()))
    .bind(stored(&key.key))
    .bind(stored(&key.fingerprint))
    .bind(run.id.to_string())
    .bind(stored(&kept::answer(run)?))
    .bind(key.at.as_millis())
    .bind(kept::oldest(key.at))
    .execute(&mut *connection)
    .await?;
    if done.rows_affected() == 0 {
        refuse_taken(connection, &run.tenant, Some(key)).await?;
        return Err(vanished(key));
    }
    Ok(())
}

/// A key was there and is gone: its run was erased in between.
pub(super) fn vanished(key: &KeyUse) -> Halt {
    StoreError::Unavailable(format!("the idempotency key {:?} was let go of just now", key.key).into()).into()
}
