//! The verbs that erase. A run's other rows go with it; the pages they stood on are overwritten (`secure_delete`).

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::key;
use super::writer::{Halt, Single};
use crate::domain::{RunId, TenantId, Timestamp};
use crate::store::row::Cells;
use crate::store::{ERASED_LIFETIME, Erasure};

/// Erases one run.
pub(super) struct Erase {
    pub(super) tenant: TenantId,
    pub(super) id: RunId,
    pub(super) now: Timestamp,
}

#[async_trait]
impl Single for Erase {
    type Output = Erasure;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Erasure, Halt> {
        let found = sqlx::query("SELECT finished_at FROM runs WHERE id = ? AND tenant = ?")
            .bind(self.id.to_string())
            .bind(self.tenant.as_str())
            .fetch_optional(&mut *connection)
            .await?;
        let Some(found) = found else {
            let erased = sqlx::query("SELECT 1 FROM erased_runs WHERE run = ? AND tenant = ?")
                .bind(self.id.to_string())
                .bind(self.tenant.as_str())
                .fetch_optional(&mut *connection)
                .await?;
            return Ok(if erased.is_some() { Erasure::Erased } else { Erasure::Unknown });
        };
        if found.optional_integer("finished_at")?.is_none() {
            return Ok(Erasure::Active);
        }
        erase(connection, self.id, self.now).await?;
        Ok(Erasure::Erased)
    }
}

/// Erases what is too old.
pub(super) struct Sweep {
    pub(super) finished_before: Option<Timestamp>,
    pub(super) now: Timestamp,
    pub(super) limit: u32,
}

#[async_trait]
impl Single for Sweep {
    type Output = u64;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<u64, Halt> {
        key::forget_old(connection, self.now).await?;
        let lifetime = i64::try_from(ERASED_LIFETIME.as_millis()).unwrap_or(i64::MAX);
        sqlx::query("DELETE FROM erased_runs WHERE erased_at <= ?")
            .bind(self.now.as_millis().saturating_sub(lifetime))
            .execute(&mut *connection)
            .await?;
        let Some(before) = self.finished_before else { return Ok(0) };
        // A run that another one goes on from is a part of that one's conversation.
        let old = sqlx::query(
            "SELECT id FROM runs WHERE finished_at < ? \
             AND NOT EXISTS (SELECT 1 FROM runs AS later WHERE later.continues = runs.id) \
             ORDER BY finished_at LIMIT ?",
        )
        .bind(before.as_millis())
        .bind(self.limit)
        .fetch_all(&mut *connection)
        .await?;
        for row in &old {
            erase(connection, row.run_id("id")?, self.now).await?;
        }
        Ok(old.len() as u64)
    }
}

async fn erase(connection: &mut SqliteConnection, id: RunId, now: Timestamp) -> Result<(), sqlx::Error> {
    let id = id.to_string();
    sqlx::query("INSERT INTO erased_runs (run, tenant, erased_at) SELECT id, tenant, ? FROM runs WHERE id = ?")
        .bind(now.as_millis())
        .bind(&id)
        .execute(&mut *connection)
        .await?;
    sqlx::query("DELETE FROM runs WHERE id = ?").bind(&id).execute(&mut *connection).await?;
    Ok(())
}
