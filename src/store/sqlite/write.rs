//! The verbs that write, each a [`Write`]: encoded by its caller, applied by the writer.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, QueryBuilder, SqliteConnection};

use super::writer::{Halt, Write};
use crate::domain::{EncodedBody, Event, Generation, Run, RunId, Seq, TenantId, Timestamp};
use crate::store::row::{self, Cells, StatusColumns, run_columns};
use crate::store::{Committed, NewRun, StepCommit, StoreError};

/// Most events of one statement.
const EVENTS_PER_STATEMENT: usize = 32;

/// Stores an accepted run.
pub(super) struct CreateRun {
    id: RunId,
    tenant: String,
    generation: i64,
    status: StatusColumns,
    agent: String,
    model: String,
    limits: String,
    metadata: BTreeMap<String, String>,
    metadata_json: String,
    steps: u32,
    tool_calls: u32,
    usage: String,
    created_at: Timestamp,
    cancel_requested_at: Option<Timestamp>,
    spec: String,
    state: Option<String>,
    events: Vec<EncodedBody>,
}

impl CreateRun {
    pub(super) fn new(new: NewRun) -> Result<Self, StoreError> {
        let NewRun { run, spec, state, events } = new;
        Ok(Self {
            id: run.id,
            tenant: run.tenant.as_str().to_owned(),
            generation: row::signed(run.generation)?,
            status: StatusColumns::of(&run.status)?,
            agent: run.agent,
            model: run.model.to_string(),
            limits: row::encode(&run.limits)?,
            metadata_json: row::encode(&run.metadata)?,
            metadata: run.metadata,
            steps: run.steps,
            tool_calls: run.tool_calls,
            usage: row::encode(&run.usage)?,
            created_at: run.created_at,
            cancel_requested_at: run.cancel_requested_at,
            spec: row::encode(&spec)?,
            state,
            events,
        })
    }
}

#[async_trait]
impl Write for CreateRun {
    type Output = Vec<Event>;

    fn bytes(&self) -> usize {
        self.spec.len() + self.metadata_json.len() + self.state.as_ref().map_or(0, String::len) + size(&self.events)
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Vec<Event>, Halt> {
        let id = self.id.to_string();
        sqlx::query(
            "INSERT INTO runs (id, tenant, generation, status, agent, model, limits, metadata, steps, tool_calls, \
             usage, last_seq, created_at, started_at, deadline_at, cancel_requested_at, finished_at, ending, state) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&id)
        .bind(&self.tenant)
        .bind(self.generation)
        .bind(self.status.status)
        .bind(&self.agent)
        .bind(&self.model)
        .bind(&self.limits)
        .bind(&self.metadata_json)
        .bind(i64::from(self.steps))
        .bind(i64::from(self.tool_calls))
        .bind(&self.usage)
        .bind(count(&self.events)?)
        .bind(self.created_at.as_millis())
        .bind(self.status.started_at)
        .bind(self.status.deadline_at)
        .bind(self.cancel_requested_at.map(Timestamp::as_millis))
        .bind(self.status.finished_at)
        .bind(self.status.ending.as_deref())
        .bind(self.state.as_deref())
        .execute(&mut *connection)
        .await?;
        sqlx::query("INSERT INTO run_specs (run, spec) VALUES (?, ?)")
            .bind(&id)
            .bind(&self.spec)
            .execute(&mut *connection)
            .await?;
        if !self.metadata.is_empty() {
            let mut sql = QueryBuilder::new("INSERT INTO run_metadata (tenant, key, value, run) ");
            sql.push_values(&self.metadata, |mut row, (key, value)| {
                row.push_bind(&self.tenant).push_bind(key).push_bind(value).push_bind(&id);
            });
            sql.build().execute(&mut *connection).await?;
        }
        Ok(append(connection, self.id, 0, self.created_at, &self.events).await?)
    }
}

/// Commits one step.
pub(super) struct CommitStep {
    run: RunId,
    generation: Generation,
    fence: i64,
    time: Timestamp,
    status: StatusColumns,
    cancel_requested_at: Option<i64>,
    steps: u32,
    tool_calls: u32,
    usage: String,
    state: Option<String>,
    events: Vec<EncodedBody>,
}

impl CommitStep {
    pub(super) fn new(commit: StepCommit) -> Result<Self, StoreError> {
        Ok(Self {
            run: commit.run,
            generation: commit.generation,
            fence: row::signed(commit.generation)?,
            time: commit.time,
            status: StatusColumns::of(&commit.status)?,
            cancel_requested_at: commit.cancel_requested_at.map(Timestamp::as_millis),
            steps: commit.steps,
            tool_calls: commit.tool_calls,
            usage: row::encode(&commit.usage)?,
            state: commit.state,
            events: commit.events,
        })
    }
}

#[async_trait]
impl Write for CommitStep {
    type Output = Committed;

    fn bytes(&self) -> usize {
        self.state.as_ref().map_or(0, String::len)
            + self.status.ending.as_ref().map_or(0, String::len)
            + size(&self.events)
    }

    async fn apply(&self, connection: &mut SqliteConnection) -> Result<Committed, Halt> {
        let count = count(&self.events)?;
        let held = sqlx::query(
            "UPDATE runs SET status = ?, started_at = ?, deadline_at = ?, finished_at = ?, ending = ?, steps = ?, \
             tool_calls = ?, usage = ?, state = ?, last_seq = last_seq + ? \
             WHERE id = ? AND generation = ? AND finished_at IS NULL AND (? IS NULL OR cancel_requested_at IS ?) \
             RETURNING last_seq, cancel_requested_at",
        )
        .bind(self.status.status)
        .bind(self.status.started_at)
        .bind(self.status.deadline_at)
        .bind(self.status.finished_at)
        .bind(self.status.ending.as_deref())
        .bind(i64::from(self.steps))
        .bind(i64::from(self.tool_calls))
        .bind(&self.usage)
        .bind(self.state.as_deref())
        .bind(count)
        .bind(self.run.to_string())
        .bind(self.fence)
        .bind(self.status.finished_at)
        .bind(self.cancel_requested_at)
        .fetch_optional(&mut *connection)
        .await?;
        let Some(row) = held else { return Err(self.refusal(connection).await?.into()) };
        let before = row.integer("last_seq")? - count;
        let cancel_requested_at = row.optional_integer("cancel_requested_at")?.map(Timestamp::from_millis);
        let events = append(connection, self.run, before, self.time, &self.events).await?;
        Ok(Committed { events, cancel_requested_at })
    }
}

impl CommitStep {
    /// Why no row took the step.
    async fn refusal(&self, connection: &mut SqliteConnection) -> Result<StoreError, Halt> {
        let requested =
            sqlx::query("SELECT cancel_requested_at FROM runs WHERE id = ? AND generation = ? AND finished_at IS NULL")
                .bind(self.run.to_string())
                .bind(self.fence)
                .fetch_optional(&mut *connection)
                .await?
                .map(|row| row.optional_integer("cancel_requested_at"))
                .transpose()?
                .flatten();
        Ok(match requested {
            Some(at) => StoreError::CancelRequested { run: self.run, at: Timestamp::from_millis(at) },
            None => StoreError::Fenced { run: self.run, generation: self.generation },
        })
    }
}

/// Stores the wish to end a run.
pub(super) struct RequestCancel {
    pub(super) tenant: TenantId,
    pub(super) id: RunId,
    pub(super) at: Timestamp,
}

#[async_trait]
impl Write for RequestCancel {
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
impl Write for Probe {
    type Output = ();

    fn bytes(&self) -> usize {
        0
    }

    async fn apply(&self, _connection: &mut SqliteConnection) -> Result<(), Halt> {
        Ok(())
    }
}

/// Appends events numbered from `before + 1` and returns them as they will be read.
pub(super) async fn append(
    connection: &mut SqliteConnection,
    run: RunId,
    before: i64,
    time: Timestamp,
    bodies: &[EncodedBody],
) -> Result<Vec<Event>, sqlx::Error> {
    let id = run.to_string();
    let mut events = Vec::with_capacity(bodies.len());
    let mut seq = before;
    for chunk in bodies.chunks(EVENTS_PER_STATEMENT) {
        let mut sql = String::from("INSERT INTO run_events (run, time, seq, kind, body) VALUES ");
        for row in 0..chunk.len() {
            let separator = if row == 0 { "" } else { ", " };
            let first = 3 + row * 3;
            sql.push_str(&format!("{separator}(?1, ?2, ?{first}, ?{}, ?{})", first + 1, first + 2));
        }
        // The text depends on the number of rows only, so the prepared statement is found again.
        let mut statement = sqlx::query(AssertSqlSafe(sql)).bind(&id).bind(time.as_millis());
        for body in chunk {
            seq += 1;
            statement = statement.bind(seq).bind(body.kind.as_str()).bind(&body.json[..]);
            events.push(Event { run, seq: number(seq)?, time, body: body.clone() });
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(events)
}

/// Reads the number of an event from its column.
fn number(seq: i64) -> Result<Seq, sqlx::Error> {
    Seq::try_from(seq).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn count(events: &[EncodedBody]) -> Result<i64, StoreError> {
    i64::try_from(events.len()).map_err(|error| StoreError::Failed(error.into()))
}

fn size(events: &[EncodedBody]) -> usize {
    events.iter().map(|body| body.json.len()).sum()
}
