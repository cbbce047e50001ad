//! What an error of Postgres means for the call that met it and for those that follow.
//! Codes: <https://www.postgresql.org/docs/current/errcodes-appendix.html>.

use crate::store::StoreError;

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// The database is not to be had, or not on this connection: whether the statement was done is not known.
    Away,
    /// The database cannot do it now, and did not do it.
    Busy,
    /// Others were in the way: the same work succeeds when it is begun anew.
    Conflict,
    /// The disk or the files of the database do not do their work: no later write can be trusted.
    Broken,
    /// This statement cannot be done; others can.
    Statement,
}

/// Why a piece of work does not give its output.
#[derive(Debug)]
pub(super) enum Halt {
    /// It is answered with this error, and nothing of it is stored.
    Refused(StoreError),
    /// The database refused or is away.
    Database(sqlx::Error),
}

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for Halt {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Sorts an error of the driver.
pub(super) fn severity(error: &sqlx::Error) -> Severity {
    match error {
        sqlx::Error::Database(error) => error.code().map_or(Severity::Statement, |code| of_code(&code)),
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => Severity::Busy,
        // What comes instead of an answer when a connection breaks in the middle of one is no message of the protocol.
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => {
            Severity::Away
        }
        // The driver's enum is open; what is left are values that do not fit their columns.
        _ => Severity::Statement,
    }
}

fn of_code(code: &str) -> Severity {
    match code {
        // admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped, idle_session_timeout,
        // idle_in_transaction_session_timeout
        "57P01" | "57P02" | "57P03" | "57P04" | "57P05" | "25P03" => Severity::Away,
        // connection_exception and what belongs to it
        code if code.starts_with("08") => Severity::Away,
        // query_canceled (by statement_timeout), lock_not_available, insufficient_resources, out_of_memory,
        // too_many_connections, configuration_limit_exceeded, read_only_sql_transaction (after a failover)
        "57014" | "55P03" | "53000" | "53200" | "53300" | "53400" | "25006" => Severity::Busy,
        // serialization_failure, deadlock_detected
        "40001" | "40P01" => Severity::Conflict,
        // disk_full, io_error, data_corrupted, index_corrupted
        "53100" | "58030" | "XX001" | "XX002" => Severity::Broken,
        _ => Severity::Statement,
    }
}

/// An error of the driver for a caller.
pub(super) fn store_error(error: sqlx::Error) -> StoreError {
    match severity(&error) {
        Severity::Away | Severity::Busy | Severity::Conflict => StoreError::Unavailable(error.into()),
        Severity::Broken | Severity::Statement => StoreError::Failed(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error as IoError, ErrorKind};

    use super::*;

    #[test]
    fn codes_are_sorted_by_what_they_mean_for_later_calls() {
        for code in ["57P01", "57P02", "57P03", "08000", "08006", "08P01"] {
            assert_eq!(of_code(code), Severity::Away, "{code}");
        }
        for code in ["53300", "55P03", "57014", "25006"] {
            assert_eq!(of_code(code), Severity::Busy, "{code}");
        }
        for code in ["40001", "40P01"] {
            assert_eq!(of_code(code), Severity::Conflict, "{code}");
        }
        for code in ["53100", "58030", "XX001", "XX002"] {
            assert_eq!(of_code(code), Severity::Broken, "{code}");
        }
        // unique_violation, foreign_key_violation, untranslatable_character, syntax_error, insufficient_privilege
        for code in ["23505", "23503", "22P05", "42601", "42501"] {
            assert_eq!(of_code(code), Severity::Statement, "{code}");
        }
    }

    #[test]
    fn a_broken_connection_is_no_failure_of_the_database() {
        for kind in [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof] {
            let error = store_error(sqlx::Error::Io(IoError::from(kind)));
            assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        }
        assert!(matches!(store_error(sqlx::Error::PoolTimedOut), StoreError::Unavailable(_)));
        assert!(matches!(store_error(sqlx::Error::RowNotFound), StoreError::Failed(_)));
    }
}
