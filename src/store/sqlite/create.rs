//! The verb that stores an accepted run.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::script::{Script, portions, rows};
use super::write::{Appended, count, size};
use super::writer::Write;
use crate::domain::{EncodedBody, Event, RunId, Timestamp};
use crate::store::row::{self, StatusColumns};
use crate::store::{NewRun, StoreError};

/// Most rows of one statement.
const ROWS_PER_STATEMENT: usize = 16;

/// Stores an accepted run.
pub(super) struct CreateRun {
    id: RunId,
    name: String,
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
            name: run.id.to_string(),
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

    async fn apply_all(
        runs: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Vec<Event>, StoreError>>, sqlx::Error> {
        for runs in portions(runs, ROWS_PER_STATEMENT) {
            insert_runs(runs, script).await?;
            insert_specs(runs, script).await?;
            script.end_part();
        }
        insert_metadata(runs, script).await?;
        let mut appended = Appended::default();
        let answers: Result<_, sqlx::Error> =
            runs.iter().map(|run| Ok(Ok(appended.number(run.id, 0, run.created_at, &run.events)?))).collect();
        appended.insert(script).await?;
        answers
    }
}

async fn insert_runs(runs: &[&CreateRun], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for run in runs {
        values
            .bind(&run.name)?
            .bind(&run.tenant)?
            .bind(run.generation)?
            .bind(run.status.status)?
            .bind(&run.agent)?
            .bind(&run.model)?
            .bind(&run.limits)?
            .bind(&run.metadata_json)?
            .bind(i64::from(run.steps))?
            .bind(i64::from(run.tool_calls))?
            .bind(&run.usage)?
            .bind(count(&run.events))?
            .bind(run.created_at.as_millis())?
            .bind(run.status.started_at)?
            .bind(run.status.deadline_at)?
            .bind(run.cancel_requested_at.map(Timestamp::as_millis))?
            .bind(run.status.finished_at)?
            .bind(run.status.ending.as_deref())?
            .bind(run.state.as_deref())?;
    }
    let sql = format!(
        "INSERT INTO runs (id, tenant, generation, status, agent, model, limits, metadata, steps, tool_calls, usage, \
         last_seq, created_at, started_at, deadline_at, cancel_requested_at, finished_at, ending, state) VALUES {}",
        rows(runs.len(), 19)
    );
    script.add(&sql);
    Ok(())
}

async fn insert_specs(runs: &[&CreateRun], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for run in runs {
        values.bind(&run.name)?.bind(&run.spec)?;
    }
    script.add(&format!("INSERT INTO run_specs (run, spec) VALUES {}", rows(runs.len(), 2)));
    Ok(())
}

async fn insert_metadata(runs: &[&CreateRun], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let labels: Vec<_> = runs.iter().flat_map(|run| run.metadata.iter().map(move |label| (run, label))).collect();
    for labels in portions(&labels, ROWS_PER_STATEMENT) {
        let mut values = script.begin().await?;
        for (run, (key, value)) in labels {
            values.bind(&run.tenant)?.bind(key.as_str())?.bind(value.as_str())?.bind(&run.name)?;
        }
        let rows = rows(labels.len(), 4);
        script.add(&format!("INSERT INTO run_metadata (tenant, key, value, run) VALUES {rows}"));
        script.end_part();
    }
    Ok(())
}
