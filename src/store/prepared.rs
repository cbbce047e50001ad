//! Writes in the form of their columns, and what a step that no row took has met: the same for every database.

use super::row::{self, Cells, StatusColumns};
use super::{Committed, Created, KeyUse, NewRun, StepCommit, StoreError};
use crate::domain::{EncodedBody, Event, Generation, InboxNumber, OnBusy, Run, RunId, RunStatus, Seq, Timestamp};

/// A run to be stored.
pub(super) struct PreparedRun {
    pub(super) run: Run,
    pub(super) name: String,
    pub(super) generation: i64,
    pub(super) status: StatusColumns,
    pub(super) worker: Option<String>,
    pub(super) model: String,
    pub(super) limits: String,
    pub(super) metadata: String,
    pub(super) usage: String,
    pub(super) spec: String,
    pub(super) state: Option<String>,
    pub(super) events: Vec<EncodedBody>,
    pub(super) on_busy: OnBusy,
    pub(super) key: Option<KeyUse>,
}

/// Where a run comes among the others of its conversation.
#[derive(Default)]
pub(super) struct Place {
    pub(super) continues: Option<RunId>,
    /// Those that have to end for it.
    pub(super) interrupted: Vec<RunId>,
}

impl PreparedRun {
    /// `worker` is the process that has the run at work when it is running.
    pub(super) fn new(new: NewRun, worker: &str) -> Result<Self, StoreError> {
        let NewRun { run, spec, state, events, on_busy, key } = new;
        Ok(Self {
            name: run.id.to_string(),
            generation: row::signed(run.generation)?,
            status: StatusColumns::of(&run.status)?,
            worker: matches!(run.status, RunStatus::Running { .. }).then(|| worker.to_owned()),
            model: run.model.to_string(),
            limits: row::encode(&run.limits)?,
            metadata: row::encode(&run.metadata)?,
            usage: row::encode(&run.usage)?,
            spec: row::encode(&spec)?,
            run,
            state,
            events,
            on_busy,
            key,
        })
    }

    /// What comes of it given the newest run before it and those of its conversation that have not ended, oldest first.
    pub(super) fn place(&self, newest: RunId, active: Vec<RunId>) -> Result<Place, StoreError> {
        match (self.on_busy, active.first()) {
            (OnBusy::Reject, Some(run)) => Err(StoreError::ThreadBusy { run: *run }),
            (OnBusy::Reject | OnBusy::Queue, _) => Ok(Place { continues: Some(newest), interrupted: Vec::new() }),
            (OnBusy::Interrupt, _) => Ok(Place { continues: Some(newest), interrupted: active }),
        }
    }

    /// Its events, numbered.
    pub(super) fn numbered(&self) -> Vec<Event> {
        numbered(self.run.id, 0, self.run.created_at, &self.events)
    }

    /// What its caller gets.
    pub(super) fn created(&self, place: Place) -> Created {
        let run = Run { last_seq: seq_of(self.events.len()), continues: place.continues, ..self.run.clone() };
        Created { run, events: self.numbered(), interrupted: place.interrupted }
    }
}

/// A step to be committed.
pub(super) struct PreparedStep {
    pub(super) run: RunId,
    pub(super) name: String,
    pub(super) generation: Generation,
    pub(super) fence: i64,
    pub(super) after: Seq,
    /// `after` as its column.
    pub(super) before: i64,
    pub(super) time: Timestamp,
    pub(super) status: StatusColumns,
    pub(super) cancel_requested_at: Option<i64>,
    pub(super) steps: u32,
    pub(super) tool_calls: u32,
    pub(super) usage: String,
    pub(super) crashes: u32,
    pub(super) inbox_read: i64,
    pub(super) state: Option<String>,
    pub(super) events: Vec<EncodedBody>,
    pub(super) key: Option<KeyUse>,
}

impl PreparedStep {
    pub(super) fn new(commit: StepCommit) -> Result<Self, StoreError> {
        Ok(Self {
            run: commit.run,
            name: commit.run.to_string(),
            generation: commit.generation,
            fence: row::signed(commit.generation)?,
            after: commit.after,
            before: row::signed(commit.after)?,
            time: commit.time,
            status: StatusColumns::of(&commit.status)?,
            cancel_requested_at: commit.cancel_requested_at.map(Timestamp::as_millis),
            steps: commit.steps,
            tool_calls: commit.tool_calls,
            usage: row::encode(&commit.usage)?,
            crashes: commit.crashes,
            inbox_read: row::signed(commit.inbox_read)?,
            key: commit.key,
            state: commit.state,
            events: commit.events,
        })
    }

    /// The inbox that has to be the newest for the step to be taken, if that matters.
    pub(super) fn all_read(&self) -> Option<i64> {
        self.status.finished_at.is_some().then_some(self.inbox_read)
    }

    /// How many events it has, as a column counts them.
    pub(super) fn count(&self) -> i64 {
        count(&self.events)
    }

    /// Its events, numbered.
    pub(super) fn numbered(&self) -> Vec<Event> {
        numbered(self.run, self.after, self.time, &self.events)
    }

    /// What its caller gets once it is stored.
    pub(super) fn committed(&self, told: &Told) -> Committed {
        Committed { events: self.numbered(), cancel_requested_at: told.cancel_requested_at, inbox: told.inbox }
    }

    /// What a step has met that the run's row did not take: it is refused, or it was taken before. `standing` is the
    /// run as it stands; `logged` are its events from [`PreparedStep::after`] on, as many as the step has or fewer.
    pub(super) fn not_taken(&self, standing: Option<&Standing>, logged: &[Event]) -> Result<Committed, StoreError> {
        let fenced = StoreError::Fenced { run: self.run, generation: self.generation };
        let Some(standing) = standing else { return Err(fenced) };
        if self.was_taken(standing, logged) {
            return Ok(self.committed(&standing.told));
        }
        let is_held = standing.generation == self.fence && standing.finished_at.is_none();
        if !is_held || standing.last_seq != self.before {
            return Err(fenced);
        }
        match standing.told.cancel_requested_at {
            Some(at) if self.status.finished_at.is_some() && Some(at.as_millis()) != self.cancel_requested_at => {
                Err(StoreError::CancelRequested { run: self.run, at })
            }
            Some(_) | None if self.status.finished_at.is_some() => {
                Err(StoreError::Unread { run: self.run, inbox: standing.told.inbox })
            }
            Some(_) | None => Err(fenced),
        }
    }

    /// Whether the run stands where this step leads, with the same events: its writer asks again since no answer
    /// reached it.
    fn was_taken(&self, standing: &Standing, logged: &[Event]) -> bool {
        let raised = i64::from(matches!(self.status.status, "queued" | "waiting"));
        standing.generation == self.fence + raised
            && standing.status == self.status.status
            && standing.finished_at == self.status.finished_at
            && standing.last_seq == self.before + self.count()
            && logged == self.numbered()
    }
}

/// What a row tells whoever commits a step.
#[derive(Clone, Copy)]
pub(super) struct Told {
    pub(super) cancel_requested_at: Option<Timestamp>,
    pub(super) inbox: InboxNumber,
}

impl Told {
    /// From a row with `cancel_requested_at, inbox`.
    pub(super) fn read(row: &impl Cells) -> Result<Self, sqlx::Error> {
        let cancel_requested_at = row.optional_integer("cancel_requested_at")?.map(Timestamp::from_millis);
        let inbox = InboxNumber::try_from(row.integer("inbox")?).map_err(|error| sqlx::Error::Decode(error.into()))?;
        Ok(Self { cancel_requested_at, inbox })
    }
}

/// The columns that [`Standing::read`] reads, as an SQL list.
macro_rules! standing_columns {
    () => {
        "generation, status, finished_at, last_seq, cancel_requested_at, inbox"
    };
}
pub(super) use standing_columns;

/// A run as far as its fence is concerned.
pub(super) struct Standing {
    generation: i64,
    status: String,
    finished_at: Option<i64>,
    last_seq: i64,
    told: Told,
}

impl Standing {
    pub(super) fn read(row: &impl Cells) -> Result<Self, sqlx::Error> {
        Ok(Self {
            generation: row.integer("generation")?,
            status: row.text("status")?,
            finished_at: row.optional_integer("finished_at")?,
            last_seq: row.integer("last_seq")?,
            told: Told::read(row)?,
        })
    }
}

/// Numbers the events of a run from the number after `after` on.
pub(super) fn numbered(run: RunId, after: Seq, time: Timestamp, bodies: &[EncodedBody]) -> Vec<Event> {
    let number = |(seq, body): (Seq, &EncodedBody)| Event { run, seq, time, body: body.clone() };
    (after.saturating_add(1)..).zip(bodies).map(number).collect()
}

/// How many events there are, as a column counts them.
pub(super) fn count(events: &[EncodedBody]) -> i64 {
    // A slice never has more items than the type can count.
    i64::try_from(events.len()).unwrap_or(i64::MAX)
}

fn seq_of(count: usize) -> Seq {
    Seq::try_from(count).unwrap_or(Seq::MAX)
}
