//! What an error of SQLite means for the write that met it and for those that follow.
//! Result codes: <https://sqlite.org/rescode.html>.

use std::fmt;
use std::sync::Arc;

use crate::store::StoreError;

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// Somebody else holds what is needed: the same work may succeed later.
    Busy,
    /// The disk or the file does not do its work: no later write can be trusted.
    Broken,
    /// This statement cannot be done; others can.
    Statement,
}

/// Sorts an error of the driver.
pub(super) fn severity(error: &sqlx::Error) -> Severity {
    match error {
        sqlx::Error::Database(error) => {
            let extended: Option<u32> = error.code().and_then(|code| code.parse().ok());
            extended.map_or(Severity::Statement, of_code)
        }
        sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed => Severity::Broken,
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => Severity::Busy,
        // The driver's enum is open; what is left are values that do not fit their columns.
        _ => Severity::Statement,
    }
}

/// The primary code is the low byte of an extended one.
const fn of_code(extended: u32) -> Severity {
    match extended & 0xff {
        // BUSY, LOCKED
        5 | 6 => Severity::Busy,
        // READONLY, IOERR, CORRUPT, FULL, NOTADB
        8 | 10 | 11 | 13 | 26 => Severity::Broken,
        // Among them CANTOPEN, which passes when it comes from a lack of file descriptors.
        _ => Severity::Statement,
    }
}

/// An error of the driver for a caller.
pub(super) fn store_error(error: sqlx::Error) -> StoreError {
    match severity(&error) {
        Severity::Busy => StoreError::Unavailable(error.into()),
        Severity::Broken | Severity::Statement => StoreError::Failed(error.into()),
    }
}

/// One error of the driver that is the answer to several callers.
#[derive(Clone, Debug)]
pub(super) struct Shared(Arc<sqlx::Error>);

impl Shared {
    pub(super) fn new(error: sqlx::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Shared {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted_by_their_low_byte() {
        // BUSY, BUSY_RECOVERY, BUSY_SNAPSHOT, LOCKED
        for code in [5, 261, 517, 6] {
            assert_eq!(of_code(code), Severity::Busy, "{code}");
        }
        // FULL, IOERR, IOERR_FSYNC, IOERR_WRITE, CORRUPT, NOTADB, READONLY
        for code in [13, 10, 1034, 778, 11, 26, 8] {
            assert_eq!(of_code(code), Severity::Broken, "{code}");
        }
        // ERROR, CONSTRAINT_PRIMARYKEY, CONSTRAINT_FOREIGNKEY, TOOBIG, MISMATCH, CANTOPEN
        for code in [1, 1555, 787, 18, 20, 14] {
            assert_eq!(of_code(code), Severity::Statement, "{code}");
        }
    }
}
