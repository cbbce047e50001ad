//! The verb that stores an accepted run.

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::key;
use super::script::{Portion, Script, portions, rows};
use super::write::{Appended, request_cancel, size};
use super::writer::Write;
use crate::domain::{RunId, Timestamp};
use crate::store::prepared::{Place, PreparedRun, count};
use crate::store::row::Cells;
use crate::store::{Created, NewRun, StoreError};

/// Most rows of one statement.
const ROWS_PER_STATEMENT: usize = 64;

/// Stores an accepted run.
pub(super) struct CreateRun(PreparedRun);

impl CreateRun {
    /// `worker` is the process that has the run at work when it is running.
    pub(super) fn new(new: NewRun, worker: &str) -> Result<Self, StoreError> {
        Ok(Self(PreparedRun::new(new, worker)?))
    }

    /// Whether other rows decide what becomes of it.
    const fn is_conditional(&self) -> bool {
        self.0.key.is_some() || self.0.run.thread.is_some() || self.0.run.continues.is_some()
    }

    /// Stores it if its key is not taken and its thread allows it.
    async fn create_on_condition(&self, script: &mut Script<'_>) -> Result<Result<Created, StoreError>, sqlx::Error> {
        let connection = script.connection().await?;
        let Self(new) = self;
        if let Some(key) = &new.key
            && let Some(kept) = key::taken(connection, &new.run.tenant, key).await?
        {
            return Ok(Err(StoreError::KeyTaken(kept)));
        }
        let place = match self.find_place(connection).await? {
            Ok(place) => place,
            Err(error) => return Ok(Err(error)),
        };
        insert_runs(Portion { items: &[Row { new, continues: place.continues }], rows: 1 }, script).await?;
        insert_specs(Portion { items: &[new], rows: 1 }, script).await?;
        insert_metadata(&[new], script).await?;
        let created = new.created(place);
        let mut appended = Appended::default();
        appended.add(&created.events);
        appended.insert(script).await?;
        let connection = script.connection().await?;
        if let Some(key) = &new.key {
            key::keep(connection, key, &created.run).await?;
        }
        for id in &created.interrupted {
            request_cancel(connection, *id, new.run.created_at).await?;
        }
        Ok(Ok(created))
    }

    /// Where it comes in its thread, or after the run that it names.
    async fn find_place(&self, connection: &mut SqliteConnection) -> Result<Result<Place, StoreError>, sqlx::Error> {
        let Self(PreparedRun { run, .. }) = self;
        let tenant = run.tenant.as_str();
        let newest = match (&run.continues, &run.thread) {
            (Some(named), _) => {
                let found = sqlx::query("SELECT id FROM runs WHERE id = ? AND tenant = ?")
                    .bind(named.to_string())
                    .bind(tenant)
                    .fetch_optional(&mut *connection)
                    .await?;
                if found.is_none() {
                    return Ok(Err(StoreError::NoPredecessor { run: *named }));
                }
                found
            }
            (None, Some(thread)) => {
                // Ids are given before runs are stored, so the run with the highest one may have been stored first.
                sqlx::query(
                    "SELECT id FROM runs WHERE tenant = ?1 AND thread = ?2 AND NOT EXISTS \
                     (SELECT 1 FROM runs AS later WHERE later.continues = runs.id AND later.thread = ?2) \
                     ORDER BY id DESC LIMIT 1",
                )
                .bind(tenant)
                .bind(thread)
                .fetch_optional(&mut *connection)
                .await?
            }
            (None, None) => None,
        };
        let Some(newest) = newest else { return Ok(Ok(Place::default())) };
        let newest = newest.run_id("id")?;
        let active = sqlx::query(
            "SELECT id FROM runs WHERE tenant = ?1 AND finished_at IS NULL AND (id = ?2 OR thread = ?3) ORDER BY id",
        )
        .bind(tenant)
        .bind(newest.to_string())
        .bind(run.thread.as_deref())
        .fetch_all(&mut *connection)
        .await?;
        let active: Vec<RunId> = active.iter().map(|row| row.run_id("id")).collect::<Result<_, _>>()?;
        Ok(self.0.place(newest, active))
    }
}

/// A run as it is inserted.
struct Row<'a> {
    new: &'a PreparedRun,
    continues: Option<RunId>,
}

#[async_trait]
impl Write for CreateRun {
    type Output = Created;

    fn bytes(&self) -> usize {
        let Self(new) = self;
        new.spec.len() + new.metadata.len() + new.state.as_ref().map_or(0, String::len) + size(&new.events)
    }

    async fn apply_all(
        runs: &[&Self],
        script: &mut Script<'_>,
    ) -> Result<Vec<Result<Created, StoreError>>, sqlx::Error> {
        let free: Vec<&PreparedRun> =
            runs.iter().filter(|run| !run.is_conditional()).map(|CreateRun(new)| new).collect();
        for runs in portions(&free, ROWS_PER_STATEMENT) {
            let items: Vec<_> = runs.items.iter().map(|new| Row { new, continues: None }).collect();
            insert_runs(Portion { items: &items, rows: runs.rows }, script).await?;
            insert_specs(runs, script).await?;
            script.end_part();
        }
        insert_metadata(&free, script).await?;
        let mut appended = Appended::default();
        let mut answers = Vec::with_capacity(runs.len());
        for run in runs {
            answers.push(match run.is_conditional() {
                false => {
                    let created = run.0.created(Place::default());
                    appended.add(&created.events);
                    Ok(created)
                }
                true => run.create_on_condition(script).await?,
            });
        }
        appended.insert(script).await?;
        Ok(answers)
    }
}

async fn insert_runs(runs: Portion<'_, Row<'_>>, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for Row { new, continues } in runs.items {
        let run = &new.run;
        values
            .bind(&new.name)?
            .bind(run.tenant.as_str())?
            .bind(new.generation)?
            .bind(new.status.status)?
            .bind(&run.agent)?
            .bind(&new.model)?
            .bind(run.thread.as_deref())?
            .bind(continues.map(|id| id.to_string()))?
            .bind(&new.limits)?
            .bind(&new.metadata)?
            .bind(i64::from(run.steps))?
            .bind(i64::from(run.tool_calls))?
            .bind(&new.usage)?
            .bind(count(&new.events))?
            .bind(new.worker.as_deref())?
            .bind(i64::from(run.crashes))?
            .bind(run.created_at.as_millis())?
            .bind(new.status.started_at)?
            .bind(new.status.deadline_at)?
            .bind(new.status.time_left_ms)?
            .bind(new.status.waiting_until)?
            .bind(run.cancel_requested_at.map(Timestamp::as_millis))?
            .bind(new.status.finished_at)?
            .bind(new.status.pending.as_deref())?
            .bind(new.status.ending.as_deref())?
            .bind(new.state.as_deref())?
            .bind(0)?;
    }
    values.fill_up(runs, 27)?;
    let sql = format!(
        "INSERT INTO runs (id, tenant, generation, status, agent, model, thread, continues, limits, metadata, steps, \
         tool_calls, usage, last_seq, worker, crashes, created_at, started_at, deadline_at, time_left_ms, \
         waiting_until, cancel_requested_at, finished_at, pending, ending, state, inbox) \
         SELECT * FROM (VALUES {}) WHERE column1 NOTNULL",
        rows(runs.rows, 27)
    );
    script.add(&sql);
    Ok(())
}

async fn insert_specs(runs: Portion<'_, &PreparedRun>, script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let mut values = script.begin().await?;
    for run in runs.items {
        values.bind(&run.name)?.bind(&run.spec)?;
    }
    values.fill_up(runs, 2)?;
    script.add(&format!(
        "INSERT INTO run_specs (run, spec) SELECT * FROM (VALUES {}) WHERE column1 NOTNULL",
        rows(runs.rows, 2)
    ));
    Ok(())
}

async fn insert_metadata(runs: &[&PreparedRun], script: &mut Script<'_>) -> Result<(), sqlx::Error> {
    let labels: Vec<_> = runs.iter().flat_map(|new| new.run.metadata.iter().map(move |label| (new, label))).collect();
    for labels in portions(&labels, ROWS_PER_STATEMENT) {
        let mut values = script.begin().await?;
        for (new, (key, value)) in labels.items {
            values.bind(new.run.tenant.as_str())?.bind(key.as_str())?.bind(value.as_str())?.bind(&new.name)?;
        }
        values.fill_up(labels, 4)?;
        script.add(&format!(
            "INSERT INTO run_metadata (tenant, key, value, run) SELECT * FROM (VALUES {}) WHERE column1 NOTNULL",
            rows(labels.rows, 4)
        ));
        script.end_part();
    }
    Ok(())
}
