//! Opens a database: connects, sets and checks what every connection has to have, brings the schema up to date.

use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{ConnectOptions, Connection, PgConnection, Row};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::error::{Severity, severity};
use crate::config::{Durability, StoreConfig, StoreUrl};
use crate::store::{StoreError, schema};

/// What is used here exists since then, in the form of `server_version_num`.
const OLDEST_SERVER: i32 = 130_000;
/// How long a server is waited for that has just been started itself.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Between attempts.
const RETRY: Duration = Duration::from_millis(250);
/// Most time for bringing the schema up to date, waiting for another server that does it included.
const MIGRATE_TIMEOUT: Duration = Duration::from_secs(300);
/// The server gives up a statement after that. Longer than anybody waits here: it is for statements that nobody waits
/// for any more.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);

/// What every connection has to have: milliseconds or seconds as the setting wants them.
const SETTINGS: [(&str, &str); 9] = [
    ("statement_timeout", "10000"),
    // Nobody holds a lock for longer than a few statements.
    ("lock_timeout", "700"),
    // A transaction whose client is gone lets go of its locks.
    ("idle_in_transaction_session_timeout", "10000"),
    // Fences are conditions of an UPDATE: it has to look at the row as it is once its lock is had.
    ("default_transaction_isolation", "read committed"),
    ("tcp_keepalives_idle", "10"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "3"),
    ("tcp_user_timeout", "10000"),
    // Every statement is short.
    ("jit", "off"),
];

/// How to connect to the database of the settings.
pub(super) fn options(url: &StoreUrl) -> Result<PgConnectOptions, StoreError> {
    let options = PgConnectOptions::from_str(url.expose()).map_err(|error| {
        // Errors of an address tell what is wrong with it and not what it is.
        unusable(format!("[store] url is no address of a Postgres database: {error}"))
    })?;
    Ok(options.application_name("hames").disable_statement_logging())
}

/// Waits for the server, checks it, and brings the schema up to date.
pub(super) async fn open(config: &StoreConfig) -> Result<PgConnectOptions, StoreError> {
    let options = options(&config.url)?;
    let place = config.url.to_string();
    let mut connection = first(&options, config.durability, &place).await?;
    check(&mut connection, &options, &place).await?;
    migrate(&mut connection, &place).await?;
    if let Err(error) = connection.close().await {
        tracing::debug!(%error, "a database connection did not close properly");
    }
    Ok(options)
}

async fn first(options: &PgConnectOptions, durability: Durability, place: &str) -> Result<PgConnection, StoreError> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let error = match timeout_at(deadline, connect(options, durability)).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => error,
            Err(_) => return Err(unusable(format!("the database {place} does not answer"))),
        };
        let may_pass = match severity(&error) {
            Severity::Away | Severity::Busy | Severity::Conflict => true,
            Severity::Broken | Severity::Statement => false,
        };
        if !may_pass || Instant::now() + RETRY >= deadline {
            return Err(unusable(format!("cannot connect to the database {place}: {error}")));
        }
        tracing::debug!(%error, "the database is not to be had yet");
        sleep(RETRY).await;
    }
}

/// Opens a connection, sets what it has to have, and reads that back.
pub(super) async fn connect(options: &PgConnectOptions, durability: Durability) -> Result<PgConnection, sqlx::Error> {
    let mut connection = options.connect().await?;
    let mut sql = String::from("SELECT set_config('synchronous_commit', ");
    sql.push_str(match durability {
        // A standby that has to have it as well is asked for by the server's own settings.
        Durability::Full => {
            "CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END"
        }
        Durability::Process => "'off'",
    });
    sql.push_str(", false) AS synchronous_commit");
    for (name, value) in SETTINGS {
        sql.push_str(&format!(", set_config('{name}', '{value}', false)"));
    }
    sql.push_str(", pg_is_in_recovery() AS is_standby");
    let row = sqlx::query(sqlx::AssertSqlSafe(sql)).persistent(false).fetch_one(&mut connection).await?;
    let synchronous: String = row.try_get("synchronous_commit")?;
    let expected: &[&str] = match durability {
        Durability::Full => &["on", "remote_apply"],
        Durability::Process => &["off"],
    };
    if !expected.contains(&synchronous.as_str()) {
        let words = format!("the server did not take a setting: synchronous_commit is `{synchronous}`");
        return Err(sqlx::Error::Configuration(words.into()));
    }
    if row.try_get("is_standby")? {
        // After a failover an address may still lead to the former primary.
        let words = "the server is a standby, which takes no writes";
        return Err(sqlx::Error::Io(std::io::Error::other(words)));
    }
    Ok(connection)
}

/// Checks what does not change from one connection to the next.
async fn check(connection: &mut PgConnection, options: &PgConnectOptions, place: &str) -> Result<(), StoreError> {
    let failed = |error: sqlx::Error| unusable(format!("cannot use the database {place}: {error}"));
    let row = sqlx::query(
        "SELECT current_setting('server_version_num')::int4 AS version, current_setting('server_version') AS named, \
         current_setting('server_encoding') AS encoding, current_setting('fsync') AS fsync",
    )
    .fetch_one(connection)
    .await
    .map_err(failed)?;
    check_version(row.try_get("version").map_err(failed)?, row.try_get("named").map_err(failed)?, place)?;
    let encoding: String = row.try_get("encoding").map_err(failed)?;
    if encoding != "UTF8" {
        return Err(unusable(format!(
            "the database {place} has the encoding {encoding}, which cannot hold every text; create it with ENCODING \
             'UTF8'"
        )));
    }
    let fsync: String = row.try_get("fsync").map_err(failed)?;
    if fsync != "on" {
        tracing::warn!("the server of {place} runs with fsync = {fsync}: a power cut loses runs or all data");
    }
    match options.get_ssl_mode() {
        PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer | PgSslMode::Require
            if options.get_socket().is_none() && !is_loopback(options.get_host()) =>
        {
            tracing::warn!(
                "the certificate of the server of {place} is not checked; add ?sslmode=verify-full to [store] url"
            );
        }
        PgSslMode::Disable
        | PgSslMode::Allow
        | PgSslMode::Prefer
        | PgSslMode::Require
        | PgSslMode::VerifyCa
        | PgSslMode::VerifyFull => {}
    }
    Ok(())
}

fn check_version(version: i32, named: &str, place: &str) -> Result<(), StoreError> {
    if version < OLDEST_SERVER {
        return Err(unusable(format!("the server of {place} is Postgres {named}; 13 or newer is needed")));
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

/// Of several servers that start at once one changes the schema, and the others wait for it.
async fn migrate(connection: &mut PgConnection, place: &str) -> Result<(), StoreError> {
    let failed = |error: sqlx::Error| unusable(format!("cannot bring the schema of {place} up to date: {error}"));
    let unbounded = "SELECT set_config('lock_timeout', '0', false), set_config('statement_timeout', '0', false)";
    sqlx::raw_sql(unbounded).execute(&mut *connection).await.map_err(failed)?;
    // `run` would do, were its future `Send` for a borrowed connection.
    match timeout(MIGRATE_TIMEOUT, schema::POSTGRES.migrator().run_direct(None, connection, false)).await {
        Ok(outcome) => outcome.map_err(|error| schema::POSTGRES.refusal(&error, place)),
        Err(_) => Err(unusable(format!("the schema of {place} is not brought up to date in {MIGRATE_TIMEOUT:?}"))),
    }
}

fn unusable(text: String) -> StoreError {
    StoreError::Unusable(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_servers_are_refused() {
        check_version(130_000, "13.0", "db").unwrap();
        let error = check_version(120_022, "12.22", "db").unwrap_err().to_string();
        assert_eq!(error, "the server of db is Postgres 12.22; 13 or newer is needed");
    }

    #[test]
    fn an_address_that_does_not_read_is_not_repeated() {
        for url in ["postgres://ann:s3cret@h:port/d", "postgres://ann:s3cret@[/d", "postgres://h/d?port=s3cret"] {
            let error = options(&url.into()).unwrap_err().to_string();
            assert!(error.contains("[store] url") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn the_longest_wait_of_a_call_is_that_of_the_server() {
        assert_eq!(SETTINGS[0], ("statement_timeout", STATEMENT_TIMEOUT.as_millis().to_string().as_str()));
    }
}
