//! The verb that commits a step of a run.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::script::{Script, portions, rows};
use super::write::{Appended, count, size};
use super::writer::Write;
use crate::domain::{EncodedBody, Generation, RunId, Timestamp};
use crate::store::row::{self, Cells, StatusColumns};
use crate::store::{Committed, StepCommit, StoreError};

/// Most rows of one statement.
const ROWS_PER_STATEMENT: usize = 32;

/// Commits one step.
pub(super) struct CommitStep {
    run: RunId,
    name: String,
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
            name: commit.run.to_string(),
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

/// A row that took a step.
struct Taken {
    last_seq: i64,
    cancel_requested_at: Option<Timestamp>,
}

#[async_trait]
impl Write for CommitStep {
    type Output = Committed;

    fn bytes(&self) -> usize {
        self.state.as_ref().map_or(0, String::len)
            + self.status.ending.as_ref().map_or(0, String::len)
            + size(&self.events)
    }

    async fn apply_all(
        steps: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Committed, StoreError>>, sqlx::Error> {
        if let [step] = steps {
            return Ok(vec![step.commit_alone(script).await?]);
        }
        let mut answers: Vec<_> = steps.iter().map(|_| None).collect();
        let mut appended = Appended::default();
        let mut left: Vec<(&&Self, &mut Option<_>)> = steps.iter().zip(&mut answers).collect();
        // One statement has one step of a run; a second one is of a worker that lost it, or took it.
        while !left.is_empty() {
            let mut runs = HashSet::new();
            let (now, later): (Vec<_>, Vec<_>) = left.into_iter().partition(|(step, _)| runs.insert(step.run));
            left = later;
            let mut taken = HashMap::new();
            for portion in portions(&now, ROWS_PER_STATEMENT) {
                let steps: Vec<&Self> = portion.iter().map(|(step, _)| **step).collect();
                update(&steps, &mut taken, script).await?;
            }
            for (step, answer) in now {
                *answer = Some(match taken.remove(&step.run) {
                    Some(row) => {
                        let before = row.last_seq - count(&step.events);
                        let events = appended.number(step.run, before, step.time, &step.events)?;
                        Ok(Committed { events, cancel_requested_at: row.cancel_requested_at })
                    }
                    None => Err(step.refusal(script.connection().await?).await?),
                });
            }
        }
        appended.insert(script).await?;
        Ok(answers.into_iter().flatten().collect())
    }
}

/// Brings the rows up to these steps, each of another run, and notes which took theirs.
async fn update(
    steps: &[&CommitStep],
    taken: &mut HashMap<RunId, Taken>,
    script: &mut Script<'_>,
) -> Result<(), sqlx::Error> {
    add_update(steps, script).await?;
    for row in script.fetch_all().await? {
        let id = row::run_id(&row, "id").map_err(|error| sqlx::Error::Decode(error.into()))?;
        taken.insert(id, Taken::read(&row)?);
    }
    Ok(())
}

async fn add_update(steps: &[&CommitStep], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for step in steps {
        values
            .bind(&step.name)?
            .bind(step.fence)?
            .bind(step.status.status)?
            .bind(step.status.started_at)?
            .bind(step.status.deadline_at)?
            .bind(step.status.finished_at)?
            .bind(step.status.ending.as_deref())?
            .bind(i64::from(step.steps))?
            .bind(i64::from(step.tool_calls))?
            .bind(&step.usage)?
            .bind(step.state.as_deref())?
            .bind(count(&step.events))?
            .bind(step.cancel_requested_at)?;
    }
    script.add(&format!(
        "WITH step (id, generation, status, started_at, deadline_at, finished_at, ending, steps, tool_calls, usage, \
         state, events, cancel_requested_at) AS (VALUES {}) \
         UPDATE runs SET status = step.status, started_at = step.started_at, deadline_at = step.deadline_at, \
         finished_at = step.finished_at, ending = step.ending, steps = step.steps, tool_calls = step.tool_calls, \
         usage = step.usage, state = step.state, last_seq = last_seq + step.events \
         FROM step WHERE runs.id = step.id AND runs.generation = step.generation AND runs.finished_at IS NULL \
         AND (step.finished_at IS NULL OR runs.cancel_requested_at IS step.cancel_requested_at) \
         RETURNING id, last_seq, cancel_requested_at",
        rows(steps.len(), 13)
    ));
    Ok(())
}

impl Taken {
    fn read(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let cancel_requested_at = row.optional_integer("cancel_requested_at")?.map(Timestamp::from_millis);
        Ok(Self { last_seq: row.integer("last_seq")?, cancel_requested_at })
    }
}

impl CommitStep {
    /// Does it in one trip: its events are numbered by the database, if its row took it.
    async fn commit_alone(&self, script: &mut Script<'_>) -> Result<Result<Committed, StoreError>, sqlx::Error> {
        add_update(&[self], script).await?;
        if !self.events.is_empty() {
            let mut values = script.begin().await?;
            for (following, body) in (0..count(&self.events)).rev().zip(&self.events) {
                values.bind(following)?.bind(self.time.as_millis())?.bind(body.kind.as_str())?.bind(&body.json[..])?;
            }
            values.bind(&self.name)?;
            script.add(&format!(
                "INSERT INTO run_events (run, seq, time, kind, body) \
                 SELECT id, last_seq - column1, column2, column3, column4 FROM runs, (VALUES {}) \
                 WHERE id = ? AND changes() > 0",
                rows(self.events.len(), 4)
            ));
        }
        let Some(row) = script.fetch_last().await?.pop() else {
            return Ok(Err(self.refusal(script.connection().await?).await?));
        };
        let row = Taken::read(&row)?;
        let before = row.last_seq - count(&self.events);
        let events = Appended::default().number(self.run, before, self.time, &self.events)?;
        Ok(Ok(Committed { events, cancel_requested_at: row.cancel_requested_at }))
    }

    /// Why no row took the step.
    async fn refusal(&self, connection: &mut SqliteConnection) -> Result<StoreError, sqlx::Error> {
        let requested =
            sqlx::query("SELECT cancel_requested_at FROM runs WHERE id = ? AND generation = ? AND finished_at IS NULL")
                .bind(&self.name)
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
