//! The verbs that write one thing at a time, and the events that every write of a run appends.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::key;
use super::script::{Script, Trips, portions, rows};
use super::writer::{Halt, Single};
use crate::domain::{EncodedBody, Event, InboxItem, Run, RunId, Seq, TenantId, Timestamp};
use crate::store::prepared::numbered;
use crate::store::row::{self, run_columns};
use crate::store::{Post, StoreError};

/// Most events of one statement.
const EVENTS_PER_STATEMENT: usize = 256;

/// Stores the wish to end a run.
pub(super) struct RequestCancel {
    pub(super) tenant: TenantId,
    pub(super) id: RunId,
    pub(super) at: Timestamp,
}

#[async_trait]
impl Single for RequestCancel {
    type Output = Option<Run>;

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Option<Run>, Halt> {
        if read_run(connection, &self.tenant, self.id).await?.is_some() {
            request_cancel(connection, self.id, self.at).await?;
        }
        read_run(connection, &self.tenant, self.id).await
    }
}

/// Stores the wish to end a run that has not ended; the first one stays.
pub(super) async fn request_cancel(
    connection: &mut SqliteConnection,
    id: RunId,
    at: Timestamp,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "UPDATE runs SET cancel_requested_at = ? \
         WHERE id = ? AND cancel_requested_at IS NULL AND finished_at IS NULL",
    )
    .bind(at.as_millis())
    .bind(id.to_string())
    .execute(&mut *connection)
    .await?;
    Ok(())
}

/// Reads a run inside the transaction.
async fn read_run(connection: &mut SqliteConnection, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Halt> {
    let row = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = ? AND tenant = ?"))
        .bind(id.to_string())
        .bind(tenant.as_str())
        .fetch_optional(&mut *connection)
        .await?;
    Ok(row.map(|row| row::run(&row)).transpose()?)
}

/// Stores something said to a run.
pub(super) struct PostItem {
    post: Post,
    item: String,
}

impl PostItem {
    pub(super) fn new(post: Post) -> Result<Self, StoreError> {
        Ok(Self { item: row::encode(&post.item)?, post })
    }
}

#[async_trait]
impl Single for PostItem {
    type Output = Option<Run>;

    fn bytes(&self) -> usize {
        self.item.len()
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Option<Run>, Halt> {
        let Post { tenant, run: id, item, key } = &self.post;
        if let Some(key) = key
            && let Some(kept) = key::taken(connection, tenant, key).await?
        {
            return Err(StoreError::KeyTaken(kept).into());
        }
        let Some(mut run) = read_run(connection, tenant, *id).await? else { return Ok(None) };
        if run.status.is_finished() {
            return Ok(Some(run));
        }
        let id = id.to_string();
        sqlx::query("UPDATE runs SET inbox = inbox + 1 WHERE id = ?").bind(&id).execute(&mut *connection).await?;
        sqlx::query("INSERT INTO run_inbox (run, number, item) SELECT id, inbox, ? FROM runs WHERE id = ?")
            .bind(&self.item)
            .bind(&id)
            .execute(&mut *connection)
            .await?;
        match item {
            InboxItem::Message { .. } => {}
            InboxItem::Amendment { limits, metadata } => {
                if let Some(limits) = limits {
                    run.limits = run.limits.raised_to(*limits);
                    sqlx::query("UPDATE runs SET limits = ? WHERE id = ?")
                        .bind(row::encode(&run.limits)?)
                        .bind(&id)
                        .execute(&mut *connection)
                        .await?;
                }
                if let Some(metadata) = metadata {
                    relabel(connection, tenant, &id, metadata).await?;
                    run.metadata.clone_from(metadata);
                }
            }
        }
        if let Some(key) = key {
            key::keep(connection, key, &run).await?;
        }
        Ok(Some(run))
    }
}

/// Replaces the labels of a run.
async fn relabel(
    connection: &mut SqliteConnection,
    tenant: &TenantId,
    id: &str,
    metadata: &BTreeMap<String, String>,
) -> Result<(), Halt> {
    sqlx::query("UPDATE runs SET metadata = ? WHERE id = ?")
        .bind(row::encode(metadata)?)
        .bind(id)
        .execute(&mut *connection)
        .await?;
    sqlx::query("DELETE FROM run_metadata WHERE run = ?").bind(id).execute(&mut *connection).await?;
    for (key, value) in metadata {
        sqlx::query("INSERT INTO run_metadata (tenant, key, value, run) VALUES (?, ?, ?, ?)")
            .bind(tenant.as_str())
            .bind(key)
            .bind(value)
            .bind(id)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

/// Writes nothing: that the transaction could begin and end is the answer.
pub(super) struct Probe;

#[async_trait]
impl Single for Probe {
    type Output = ();

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, _connection: &mut SqliteConnection) -> Result<(), Halt> {
        Ok(())
    }
}

/// Events that are numbered and about to be stored.
#[derive(Default)]
pub(super) struct Appended {
    events: Vec<Event>,
}

impl Appended {
    /// Adds events to those that are stored together.
    pub(super) fn add(&mut self, events: &[Event]) {
        self.events.extend_from_slice(events);
    }

    /// Stores them all.
    pub(super) async fn insert(self, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
        for portion in portions(&self.events, EVENTS_PER_STATEMENT) {
            let mut values = script.begin().await?;
            for event in portion.items {
                let seq = i64::try_from(event.seq).map_err(|error| sqlx::Error::Encode(error.into()))?;
                values
                    .bind(event.run.to_string())?
                    .bind(seq)?
                    .bind(event.time.as_millis())?
                    .bind(event.body.kind.as_str())?
                    .bind(&event.body.json[..])?;
            }
            values.fill_up(portion, 5)?;
            script.add(&format!(
                "INSERT INTO run_events (run, seq, time, kind, body) SELECT * FROM (VALUES {}) WHERE column1 NOTNULL",
                rows(portion.rows, 5)
            ));
            script.end_part();
        }
        Ok(())
    }
}

/// Appends events of one run, numbered from `before + 1`.
pub(super) async fn append(
    connection: &mut SqliteConnection,
    run: RunId,
    before: i64,
    time: Timestamp,
    bodies: &[EncodedBody],
) -> Result<(), sqlx::Error> {
    let before = Seq::try_from(before).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let appended = Appended { events: numbered(run, before, time, bodies) };
    let mut script = Script::new(connection, Trips::Parts);
    appended.insert(&mut script).await?;
    script.flush().await
}

/// Bytes of events.
pub(super) fn size(events: &[EncodedBody]) -> usize {
    events.iter().map(|body| body.json.len()).sum()
}
