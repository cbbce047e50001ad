//! The verbs that write one thing at a time.

use std::collections::BTreeMap;

use sqlx::PgConnection;

use super::error::Halt;
use super::key;
use super::read::find_run;
use super::text::stored;
use crate::domain::{InboxItem, Limits, Run, RunId, TenantId, Timestamp};
use crate::store::row::{self, run_columns};
use crate::store::{Post, StoreError};

/// Stores the wish to end a run that has not ended; the first one stays. Gives the run as it then stands.
pub(super) async fn request_cancel(
    connection: &mut PgConnection,
    tenant: &TenantId,
    id: RunId,
    at: Timestamp,
) -> Result<Option<Run>, Halt> {
    let row = sqlx::query(concat!(
        "UPDATE runs SET cancel_requested_at = $3 \
         WHERE id = $1 AND tenant = $2 AND cancel_requested_at IS NULL AND finished_at IS NULL RETURNING ",
        run_columns!()
    ))
    .bind(id.to_string())
    .bind(stored(tenant.as_str()))
    .bind(at.as_millis())
    .fetch_optional(&mut *connection)
    .await?;
    match row {
        Some(row) => Ok(Some(row::run(&row)?)),
        None => find_run(connection, tenant, id).await,
    }
}

/// Something said to a run.
pub(super) struct PreparedPost {
    post: Post,
    item: String,
}

impl PreparedPost {
    pub(super) fn new(post: Post) -> Result<Self, StoreError> {
        Ok(Self { item: row::encode(&post.item)?, post })
    }

    /// Whether it takes several statements.
    pub(super) const fn is_transaction(&self) -> bool {
        self.post.key.is_some()
            || match &self.post.item {
                InboxItem::Message { .. } => false,
                InboxItem::Amendment { .. } => true,
            }
    }
}

/// Stores it: one statement, unless an answer is kept under a key, or the run is amended.
pub(super) async fn post(connection: &mut PgConnection, said: &PreparedPost) -> Result<Option<Run>, Halt> {
    let Post { tenant, run: id, item, key: used } = &said.post;
    if said.is_transaction() {
        sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
        key::refuse_taken(connection, tenant, used.as_ref()).await?;
    }
    let row = sqlx::query(concat!(
        "WITH told AS (UPDATE runs SET inbox = inbox + 1 \
         WHERE id = $1 AND tenant = $2 AND finished_at IS NULL RETURNING inbox, ",
        run_columns!(),
        "), said AS (INSERT INTO run_inbox (run, number, item) SELECT id, inbox, $3 FROM told) SELECT * FROM told"
    ))
    .bind(id.to_string())
    .bind(stored(tenant.as_str()))
    .bind(&said.item)
    .fetch_optional(&mut *connection)
    .await?;
    let run = match row {
        None => find_run(connection, tenant, *id).await?,
        Some(row) => {
            let mut run = row::run(&row)?;
            match item {
                InboxItem::Message { .. } => {}
                // Its row is held since it was told.
                InboxItem::Amendment { limits, metadata } => {
                    amend(connection, &mut run, *limits, metadata.as_ref()).await?;
                }
            }
            if let Some(used) = used {
                key::keep(connection, used, &run).await?;
            }
            Some(run)
        }
    };
    if said.is_transaction() {
        sqlx::raw_sql("COMMIT").execute(connection).await?;
    }
    Ok(run)
}

async fn amend(
    connection: &mut PgConnection,
    run: &mut Run,
    limits: Option<Limits>,
    metadata: Option<&BTreeMap<String, String>>,
) -> Result<(), Halt> {
    let id = run.id.to_string();
    if let Some(limits) = limits {
        run.limits = run.limits.raised_to(limits);
        sqlx::query("UPDATE runs SET limits = $2 WHERE id = $1")
            .bind(&id)
            .bind(row::encode(&run.limits)?)
            .execute(&mut *connection)
            .await?;
    }
    let Some(metadata) = metadata else { return Ok(()) };
    run.metadata.clone_from(metadata);
    sqlx::query("UPDATE runs SET metadata = $2 WHERE id = $1")
        .bind(&id)
        .bind(row::encode(metadata)?)
        .execute(&mut *connection)
        .await?;
    sqlx::query("DELETE FROM run_metadata WHERE run = $1").bind(&id).execute(&mut *connection).await?;
    let (keys, values): (Vec<_>, Vec<_>) =
        metadata.iter().map(|(key, value)| (stored(key).into_owned(), stored(value).into_owned())).unzip();
    sqlx::query(
        "INSERT INTO run_metadata (tenant, key, value, run) \
         SELECT $1, label.key, label.value, $2 FROM unnest($3::text[], $4::text[]) AS label (key, value)",
    )
    .bind(stored(run.tenant.as_str()))
    .bind(&id)
    .bind(keys)
    .bind(values)
    .execute(connection)
    .await?;
    Ok(())
}
