//! The verbs that write one thing at a time, and the events that every write of a run appends.

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::script::{Script, Trips, portions, rows};
use super::writer::{Halt, Single};
use crate::domain::{EncodedBody, Event, Run, RunId, Seq, TenantId, Timestamp};
use crate::store::row::{self, run_columns};

/// Most events of one statement.
const EVENTS_PER_STATEMENT: usize = 64;

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
        let id = self.id.to_string();
        sqlx::query(
            "UPDATE runs SET cancel_requested_at = ? \
             WHERE id = ? AND tenant = ? AND cancel_requested_at IS NULL AND finished_at IS NULL",
        )
        .bind(self.at.as_millis())
        .bind(&id)
        .bind(self.tenant.as_str())
        .execute(&mut *connection)
        .await?;
        let row = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = ? AND tenant = ?"))
            .bind(&id)
            .bind(self.tenant.as_str())
            .fetch_optional(&mut *connection)
            .await?;
        Ok(row.map(|row| row::run(&row)).transpose()?)
    }
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
    /// Numbers the events of a run from `before + 1` and gives them as they will be read.
    pub(super) fn number(
        &mut self,
        run: RunId,
        before: i64,
        time: Timestamp,
        bodies: &[EncodedBody],
    ) -> Result<Vec<Event>, sqlx::Error> {
        let first = Seq::try_from(before).map_err(|error| sqlx::Error::Decode(error.into()))? + 1;
        let events: Vec<_> =
            bodies.iter().zip(first..).map(|(body, seq)| Event { run, seq, time, body: body.clone() }).collect();
        self.events.extend_from_slice(&events);
        Ok(events)
    }

    /// Stores them all.
    pub(super) async fn insert(self, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
        for portion in portions(&self.events, EVENTS_PER_STATEMENT) {
            let mut values = script.begin().await?;
            for event in portion {
                let seq = i64::try_from(event.seq).map_err(|error| sqlx::Error::Encode(error.into()))?;
                values
                    .bind(event.run.to_string())?
                    .bind(seq)?
                    .bind(event.time.as_millis())?
                    .bind(event.body.kind.as_str())?
                    .bind(&event.body.json[..])?;
            }
            let rows = rows(portion.len(), 5);
            script.add(&format!("INSERT INTO run_events (run, seq, time, kind, body) VALUES {rows}"));
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
    let mut appended = Appended::default();
    appended.number(run, before, time, bodies)?;
    let mut script = Script::new(connection, Trips::Parts);
    appended.insert(&mut script).await?;
    script.flush().await
}

/// How many events there are, as a column counts them.
pub(super) fn count(events: &[EncodedBody]) -> i64 {
    // A slice never has more items than the type can count.
    i64::try_from(events.len()).unwrap_or(i64::MAX)
}

/// Bytes of events.
pub(super) fn size(events: &[EncodedBody]) -> usize {
    events.iter().map(|body| body.json.len()).sum()
}
