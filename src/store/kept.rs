//! Answers that are kept under an `Idempotency-Key`: the same for every database.

use super::row::Cells;
use super::{KEY_LIFETIME, KeptAnswer};
use crate::domain::{Run, RunView, Timestamp};

/// Keys of this time and of those before are too old at `now`.
pub(super) fn oldest(now: Timestamp) -> i64 {
    let lifetime = i64::try_from(KEY_LIFETIME.as_millis()).unwrap_or(i64::MAX);
    now.as_millis().saturating_sub(lifetime)
}

/// What is kept of a run: its public form.
pub(super) fn answer(run: &Run) -> Result<String, sqlx::Error> {
    serde_json::to_string(&RunView::from(run)).map_err(|error| sqlx::Error::Encode(error.into()))
}

/// Reads an answer from a row with `fingerprint, run, answer`.
pub(super) fn read(row: &impl Cells) -> Result<KeptAnswer, sqlx::Error> {
    Ok(KeptAnswer { fingerprint: row.text("fingerprint")?, run: row.run_id("run")?, answer: row.text("answer")? })
}
