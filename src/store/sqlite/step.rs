//! The verb that commits a step of a run.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::key;
use super::read::log;
use super::script::{Portion, Script, portions, rows};
use super::write::{Appended, size};
use super::writer::Write;
use crate::domain::{RunId, TenantId};
use crate::store::prepared::{PreparedStep, Standing, Told, standing_columns};
use crate::store::row::{self, Cells, run_columns};
use crate::store::{Committed, KeyUse, StepCommit, StoreError};

/// Most rows of one statement.
const ROWS_PER_STATEMENT: usize = 128;

/// Commits one step.
pub(super) struct CommitStep(PreparedStep);

impl CommitStep {
    pub(super) fn new(commit: StepCommit) -> Result<Self, StoreError> {
        Ok(Self(PreparedStep::new(commit)?))
    }
}

#[async_trait]
impl Write for CommitStep {
    type Output = Committed;

    fn bytes(&self) -> usize {
        let Self(step) = self;
        step.state.as_ref().map_or(0, String::len)
            + step.status.ending.as_ref().map_or(0, String::len)
            + size(&step.events)
    }

    async fn apply_all(
        steps: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Committed, StoreError>>, sqlx::Error> {
        if let [Self(step)] = steps
            && step.key.is_none()
        {
            return Ok(vec![commit_alone(step, script).await?]);
        }
        let mut answers: Vec<_> = steps.iter().map(|_| None).collect();
        for (Self(step), answer) in steps.iter().zip(&mut answers) {
            if let Some(key) = &step.key {
                *answer = Some(commit_with_key(step, key, script).await?);
            }
        }
        let mut appended = Appended::default();
        let mut left: Vec<(&PreparedStep, &mut Option<_>)> =
            steps.iter().map(|Self(step)| step).zip(&mut answers).filter(|(_, answer)| answer.is_none()).collect();
        // One statement has one step of a run; a second one is of a worker that lost it, or took it, or asks again.
        while !left.is_empty() {
            let mut runs = HashSet::new();
            let (now, later): (Vec<_>, Vec<_>) = left.into_iter().partition(|(step, _)| runs.insert(step.run));
            left = later;
            let mut taken = HashMap::new();
            for portion in portions(&now, ROWS_PER_STATEMENT) {
                let items: Vec<&PreparedStep> = portion.items.iter().map(|(step, _)| *step).collect();
                update(Portion { items: &items, rows: portion.rows }, &mut taken, script).await?;
            }
            for (step, answer) in now {
                *answer = Some(match taken.remove(&step.run) {
                    Some(told) => {
                        let committed = step.committed(&told);
                        appended.add(&committed.events);
                        if step.inbox_read > 0 {
                            clear_inbox(step, script).await?;
                        }
                        Ok(committed)
                    }
                    None => {
                        // What the step is compared with has to be there.
                        std::mem::take(&mut appended).insert(script).await?;
                        not_taken(step, script.connection().await?).await?
                    }
                });
            }
        }
        appended.insert(script).await?;
        Ok(answers.into_iter().flatten().collect())
    }
}

/// Brings the rows up to these steps, each of another run, and notes which took theirs.
async fn update(
    steps: Portion<'_, &PreparedStep>,
    taken: &mut HashMap<RunId, Told>,
    script: &mut Script<'_>,
) -> Result<(), sqlx::Error> {
    add_update(steps, script).await?;
    for row in script.fetch_all().await? {
        let id = row::run_id(&row, "id").map_err(|error| sqlx::Error::Decode(error.into()))?;
        taken.insert(id, Told::read(&row)?);
    }
    Ok(())
}

async fn add_update(steps: Portion<'_, &PreparedStep>, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for step in steps.items {
        values
            .bind(&step.name)?
            .bind(step.fence)?
            .bind(step.status.status)?
            .bind(step.status.started_at)?
            .bind(step.status.deadline_at)?
            .bind(step.status.time_left_ms)?
            .bind(step.status.waiting_until)?
            .bind(step.status.finished_at)?
            .bind(step.status.pending.as_deref())?
            .bind(step.status.ending.as_deref())?
            .bind(i64::from(step.steps))?
            .bind(i64::from(step.tool_calls))?
            .bind(&step.usage)?
            .bind(i64::from(step.crashes))?
            .bind(step.all_read())?
            .bind(step.state.as_deref())?
            .bind(step.before)?
            .bind(step.count())?
            .bind(step.cancel_requested_at)?;
    }
    values.fill_up(steps, 19)?;
    script.add(&format!(
        "WITH step (id, generation, status, started_at, deadline_at, time_left_ms, waiting_until, finished_at, \
         pending, ending, steps, tool_calls, usage, crashes, all_read, state, before, events, cancel_requested_at) \
         AS (VALUES {}) \
         UPDATE runs SET status = step.status, started_at = step.started_at, deadline_at = step.deadline_at, \
         time_left_ms = step.time_left_ms, waiting_until = step.waiting_until, finished_at = step.finished_at, \
         pending = step.pending, ending = step.ending, steps = step.steps, tool_calls = step.tool_calls, \
         usage = step.usage, crashes = step.crashes, state = step.state, last_seq = last_seq + step.events, \
         worker = iif(step.status = 'running', worker, NULL), \
         generation = runs.generation + (step.status IN ('queued', 'waiting')) \
         FROM step WHERE runs.id = step.id AND runs.generation = step.generation AND runs.finished_at IS NULL \
         AND runs.last_seq = step.before \
         AND (step.finished_at IS NULL OR runs.cancel_requested_at IS step.cancel_requested_at) \
         AND (step.all_read IS NULL OR runs.inbox = step.all_read) \
         RETURNING id, cancel_requested_at, inbox",
        rows(steps.rows, 19)
    ));
    Ok(())
}

/// Removes what the run has taken in.
async fn clear_inbox(step: &PreparedStep, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    script.begin().await?.bind(&step.name)?.bind(step.inbox_read)?;
    script.add("DELETE FROM run_inbox WHERE run = ? AND number <= ?");
    Ok(())
}

/// Does it in one trip: each statement does what it does if the one before it did.
async fn commit_alone(
    step: &PreparedStep,
    script: &mut Script<'_>,
) -> Result<Result<Committed, StoreError>, sqlx::Error> {
    add_update(Portion { items: &[step], rows: 1 }, script).await?;
    if !step.events.is_empty() {
        let mut values = script.begin().await?;
        for (event, body) in (1..).zip(&step.events) {
            let seq = step.before.saturating_add(event);
            values.bind(seq)?.bind(step.time.as_millis())?.bind(body.kind.as_str())?.bind(&body.json[..])?;
        }
        values.bind(&step.name)?;
        script.add(&format!(
            "INSERT INTO run_events (run, seq, time, kind, body) \
             SELECT id, column1, column2, column3, column4 FROM runs, (VALUES {}) WHERE id = ? AND changes() > 0",
            rows(step.events.len(), 4)
        ));
    }
    if step.inbox_read > 0 {
        // It has no rows, so the answer is still that of the update.
        script.begin().await?.bind(&step.name)?.bind(step.inbox_read)?;
        script.add("DELETE FROM run_inbox WHERE run = ? AND number <= ? AND changes() > 0");
    }
    match script.fetch_last().await?.pop() {
        Some(row) => Ok(Ok(step.committed(&Told::read(&row)?))),
        None => not_taken(step, script.connection().await?).await,
    }
}

/// Does it if its key is not taken, and keeps the run as it then stands under the key.
async fn commit_with_key(
    step: &PreparedStep,
    key: &KeyUse,
    script: &mut Script<'_>,
) -> Result<Result<Committed, StoreError>, sqlx::Error> {
    let connection = script.connection().await?;
    let row =
        sqlx::query("SELECT tenant FROM runs WHERE id = ?").bind(&step.name).fetch_optional(&mut *connection).await?;
    let Some(row) = row else { return not_taken(step, connection).await };
    if let Some(kept) = key::taken(connection, &TenantId::new(row.text("tenant")?), key).await? {
        return Ok(Err(StoreError::KeyTaken(kept)));
    }
    let mut taken = HashMap::new();
    update(Portion { items: &[step], rows: 1 }, &mut taken, script).await?;
    let Some(told) = taken.remove(&step.run) else {
        return not_taken(step, script.connection().await?).await;
    };
    let committed = step.committed(&told);
    let mut appended = Appended::default();
    appended.add(&committed.events);
    appended.insert(script).await?;
    clear_inbox(step, script).await?;
    let connection = script.connection().await?;
    let stored = sqlx::query(concat!("SELECT ", run_columns!(), " FROM runs WHERE id = ?"))
        .bind(&step.name)
        .fetch_one(&mut *connection)
        .await?;
    let run = row::run(&stored).map_err(|error| sqlx::Error::Decode(error.into()))?;
    key::keep(connection, key, &run).await?;
    Ok(Ok(committed))
}

/// What a step has met that no row took.
async fn not_taken(
    step: &PreparedStep,
    connection: &mut SqliteConnection,
) -> Result<Result<Committed, StoreError>, sqlx::Error> {
    let row = sqlx::query(concat!("SELECT ", standing_columns!(), " FROM runs WHERE id = ?"))
        .bind(&step.name)
        .fetch_optional(&mut *connection)
        .await?;
    let standing = row.map(|row: SqliteRow| Standing::read(&row)).transpose()?;
    let logged = log(connection, step.run, step.before, step.count()).await?;
    Ok(step.not_taken(standing.as_ref(), &logged))
}
