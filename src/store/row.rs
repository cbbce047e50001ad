//! What the columns mean: the mapping between rows and domain types, the same for every database.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Backlog, StoreError};
use crate::domain::{
    EncodedBody, Event, EventKind, Generation, InboxItem, InboxNumber, InvalidRunId, Pause, Run, RunId, RunSpec,
    RunStatus, RunStatusName, Seq, TenantId, Timestamp,
};

/// The columns [`run`] reads, as an SQL list.
macro_rules! run_columns {
    () => {
        "id, tenant, generation, status, agent, model, thread, continues, limits, metadata, steps, tool_calls, usage, \
         last_seq, crashes, created_at, started_at, deadline_at, time_left_ms, waiting_until, cancel_requested_at, \
         finished_at, pending, ending"
    };
}
pub(super) use run_columns;

/// A row of a database, read by column name.
pub(super) trait Cells {
    /// A column that holds text.
    fn text(&self, column: &str) -> Result<String, sqlx::Error>;
    /// A column that holds text or nothing.
    fn optional_text(&self, column: &str) -> Result<Option<String>, sqlx::Error>;
    /// A column that holds a number.
    fn integer(&self, column: &str) -> Result<i64, sqlx::Error>;
    /// A column that holds a number or nothing.
    fn optional_integer(&self, column: &str) -> Result<Option<i64>, sqlx::Error>;
    /// A column that holds bytes.
    fn bytes(&self, column: &str) -> Result<Vec<u8>, sqlx::Error>;

    /// A column that holds the id of a run.
    fn run_id(&self, column: &str) -> Result<RunId, sqlx::Error> {
        read_id(&self.text(column)?)
    }

    /// A column that holds the id of a run or nothing.
    fn optional_run_id(&self, column: &str) -> Result<Option<RunId>, sqlx::Error> {
        self.optional_text(column)?.map(|text| read_id(&text)).transpose()
    }
}

fn read_id(text: &str) -> Result<RunId, sqlx::Error> {
    text.parse().map_err(|error: InvalidRunId| sqlx::Error::Decode(error.into()))
}

/// Reads a run from a row with [`run_columns`].
pub(super) fn run(row: &impl Cells) -> Result<Run, StoreError> {
    let id = run_id(row, "id")?;
    read_run(row, id).map_err(|reason| StoreError::Corrupt { run: id, reason })
}

/// Reads the id of a run.
pub(super) fn run_id(row: &impl Cells, column: &str) -> Result<RunId, StoreError> {
    let text = row.text(column).map_err(|error| StoreError::Failed(error.into()))?;
    text.parse().map_err(|_| StoreError::Failed(format!("the stored run id `{text}` is not one").into()))
}

/// Reads an event of a run from a row with `seq, time, kind, body`.
pub(super) fn event(row: &impl Cells, run: RunId) -> Result<Event, StoreError> {
    let read = || -> Result<Event, String> {
        let seq = unsigned(row, "seq")?;
        let kind_text = row.text("kind").map_err(words)?;
        let kind = EventKind::parse(&kind_text).ok_or_else(|| format!("event {seq} has unknown kind `{kind_text}`"))?;
        let json = row.bytes("body").map_err(words)?;
        if !is_of_kind(&json, kind) {
            return Err(format!("the body of event {seq} is not a `{kind_text}` event"));
        }
        let time = Timestamp::from_millis(row.integer("time").map_err(words)?);
        Ok(Event { run, seq, time, body: EncodedBody { kind, json: json.into() } })
    };
    read().map_err(|reason| StoreError::Corrupt { run, reason })
}

/// Reads an item of the inbox of a run from a row with `number, item`.
pub(super) fn inbox_item(row: &impl Cells, run: RunId) -> Result<(InboxNumber, InboxItem), StoreError> {
    let read = || Ok((unsigned(row, "number")?, json("item", &row.text("item").map_err(words)?)?));
    read().map_err(|reason| StoreError::Corrupt { run, reason })
}

/// Reads a spec from its column; `None` is a row that should be there and is not.
pub(super) fn spec(text: Option<&str>, run: RunId) -> Result<RunSpec, StoreError> {
    match text {
        None => Err(StoreError::Corrupt { run, reason: "its spec is missing".to_owned() }),
        Some(text) => json("spec", text).map_err(|reason| StoreError::Corrupt { run, reason }),
    }
}

/// Encodes a value of ours for a JSON column.
pub(super) fn encode(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Failed(error.into()))
}

/// A counter as its column; no counter of ours comes near the end of the range.
pub(super) fn signed(value: u64) -> Result<i64, StoreError> {
    i64::try_from(value).map_err(|error| StoreError::Failed(error.into()))
}

/// The columns that together tell the status.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StatusColumns {
    pub(super) status: &'static str,
    pub(super) started_at: Option<i64>,
    pub(super) deadline_at: Option<i64>,
    pub(super) time_left_ms: Option<i64>,
    pub(super) waiting_until: Option<i64>,
    pub(super) finished_at: Option<i64>,
    pub(super) pending: Option<String>,
    pub(super) ending: Option<String>,
}

impl StatusColumns {
    /// The columns of a status.
    pub(super) fn of(status: &RunStatus) -> Result<Self, StoreError> {
        let mut columns = Self {
            status: status.name().as_str(),
            started_at: None,
            deadline_at: None,
            time_left_ms: None,
            waiting_until: None,
            finished_at: None,
            pending: None,
            ending: None,
        };
        match status {
            RunStatus::Queued { paused: None } => {}
            RunStatus::Queued { paused: Some(paused) } => columns.pause(paused)?,
            RunStatus::Running { started_at, deadline_at } => {
                columns.started_at = Some(started_at.as_millis());
                columns.deadline_at = Some(deadline_at.as_millis());
            }
            RunStatus::Waiting { paused, until, calls } => {
                columns.pause(paused)?;
                columns.waiting_until = Some(until.as_millis());
                columns.pending = Some(encode(calls)?);
            }
            RunStatus::Finished { started_at, deadline_at, finished_at, end } => {
                columns.started_at = started_at.map(Timestamp::as_millis);
                columns.deadline_at = deadline_at.map(Timestamp::as_millis);
                columns.finished_at = Some(finished_at.as_millis());
                columns.ending = Some(encode(end)?);
            }
        }
        Ok(columns)
    }

    fn pause(&mut self, paused: &Pause) -> Result<(), StoreError> {
        self.started_at = Some(paused.started_at.as_millis());
        self.time_left_ms = Some(signed(paused.left_ms)?);
        Ok(())
    }
}

fn read_run(row: &impl Cells, id: RunId) -> Result<Run, String> {
    let model = row.text("model").map_err(words)?;
    let cancel_requested_at = row.optional_integer("cancel_requested_at").map_err(words)?;
    let generation: Generation = unsigned(row, "generation")?;
    let last_seq: Seq = unsigned(row, "last_seq")?;
    Ok(Run {
        id,
        tenant: TenantId::new(row.text("tenant").map_err(words)?),
        generation,
        status: status(row)?,
        agent: row.text("agent").map_err(words)?,
        model: model.parse()?,
        limits: json("limits", &row.text("limits").map_err(words)?)?,
        metadata: json("metadata", &row.text("metadata").map_err(words)?)?,
        thread: row.optional_text("thread").map_err(words)?,
        continues: match row.optional_text("continues").map_err(words)? {
            None => None,
            Some(text) => Some(text.parse().map_err(|_| format!("`continues` is `{text}`, which is no run id"))?),
        },
        steps: unsigned(row, "steps")?,
        tool_calls: unsigned(row, "tool_calls")?,
        usage: json("usage", &row.text("usage").map_err(words)?)?,
        created_at: Timestamp::from_millis(row.integer("created_at").map_err(words)?),
        cancel_requested_at: cancel_requested_at.map(Timestamp::from_millis),
        last_seq,
        crashes: unsigned(row, "crashes")?,
    })
}

fn status(row: &impl Cells) -> Result<RunStatus, String> {
    let name = row.text("status").map_err(words)?;
    let time = |column| row.optional_integer(column).map(|time| time.map(Timestamp::from_millis)).map_err(words);
    let (started_at, deadline_at, finished_at) = (time("started_at")?, time("deadline_at")?, time("finished_at")?);
    let (until, left) = (time("waiting_until")?, row.optional_integer("time_left_ms").map_err(words)?);
    let pending = row.optional_text("pending").map_err(words)?;
    let ending = row.optional_text("ending").map_err(words)?;
    let pause = |started_at, left: i64| match u64::try_from(left) {
        Ok(left_ms) => Ok(Pause { started_at, left_ms }),
        Err(_) => Err(format!("`time_left_ms` is {left}, which is out of range")),
    };
    let status = match (finished_at, &ending, until, &pending, started_at, deadline_at, left) {
        (Some(finished_at), Some(ending), None, None, started_at, deadline_at, None) => {
            RunStatus::Finished { started_at, deadline_at, finished_at, end: json("ending", ending)? }
        }
        (None, None, Some(until), Some(calls), Some(started_at), None, Some(left)) => {
            RunStatus::Waiting { paused: pause(started_at, left)?, until, calls: json("pending", calls)? }
        }
        (None, None, None, None, Some(started_at), Some(deadline_at), None) => {
            RunStatus::Running { started_at, deadline_at }
        }
        (None, None, None, None, None, None, None) => RunStatus::Queued { paused: None },
        (None, None, None, None, Some(started_at), None, Some(left)) => {
            RunStatus::Queued { paused: Some(pause(started_at, left)?) }
        }
        (finished_at, ending, until, pending, started_at, deadline_at, left) => {
            return Err(format!(
                "its times do not fit together: started {started_at:?}, deadline {deadline_at:?}, left {left:?}, \
                 waiting until {until:?}, finished {finished_at:?}, with an ending: {}, with pending calls: {}",
                ending.is_some(),
                pending.is_some()
            ));
        }
    };
    if status.name().as_str() == name {
        Ok(status)
    } else if RunStatusName::ALL.iter().any(|known| known.as_str() == name) {
        Err(format!("its status is `{name}` and its other columns say `{}`", status.name().as_str()))
    } else {
        Err(format!("its status `{name}` is unknown"))
    }
}

fn is_of_kind(json: &[u8], kind: EventKind) -> bool {
    json.strip_prefix(br#"{"type":""#)
        .and_then(|rest| rest.strip_prefix(kind.as_str().as_bytes()))
        .is_some_and(|rest| rest.starts_with(b"\"") && rest.ends_with(b"}"))
}

fn unsigned<T: TryFrom<i64>>(row: &impl Cells, column: &str) -> Result<T, String> {
    let value = row.integer(column).map_err(words)?;
    T::try_from(value).map_err(|_| format!("`{column}` is {value}, which is out of range"))
}

fn json<T: DeserializeOwned>(column: &str, text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("`{column}` does not read back: {error}"))
}

fn words(error: sqlx::Error) -> String {
    error.to_string()
}

/// Reads how many runs wait from a row with `free` (queued ones and those without a worker) and `blocked`.
pub(super) fn backlog(row: &impl Cells) -> Result<Backlog, sqlx::Error> {
    let count = |name| u64::try_from(row.integer(name)?).map_err(|error| sqlx::Error::Decode(error.into()));
    let (free, blocked) = (count("free")?, count("blocked")?);
    Ok(Backlog { ready: free.saturating_sub(blocked), blocked })
}
