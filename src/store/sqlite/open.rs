//! Opens a database file: takes it for this process, sets and checks its pragmas, brings its schema up to date.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Row, SqliteConnection};

use crate::config::{Durability, StoreConfig};
use crate::store::{StoreError, schema};

/// Older engines can corrupt a database in WAL mode when two connections write or checkpoint at once
/// (<https://sqlite.org/wal.html#the_wal_reset_bug>).
const OLDEST_ENGINE: [u32; 3] = [3, 51, 3];

/// How long a statement waits for another process's lock before it fails with "busy". With the attempts of the writer
/// it stays below a second until a caller hears that the database is not to be had; a step of a run waits longer, by
/// being handed in again.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_millis(300);
/// How long the lock of another process is waited for, and how often it is tried.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
const LOCK_LOOK: Duration = Duration::from_millis(20);
/// How long a read waits for a connection.
pub(super) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// The WAL file is cut back to this after a checkpoint, in bytes.
const WAL_SIZE_LIMIT: &str = "67108864";

/// An open database that belongs to this process.
#[derive(Debug)]
pub(super) struct Opened {
    /// The one connection that writes.
    pub(super) connection: SqliteConnection,
    /// How to open it again.
    pub(super) writing: SqliteConnectOptions,
    /// How to open connections that read.
    pub(super) reading: SqliteConnectOptions,
    /// Keeps other servers out for as long as it lives.
    pub(super) lock: FileLock,
}

/// Opens the database that the settings name.
pub(super) async fn open(config: &StoreConfig) -> Result<Opened, StoreError> {
    let path = create_file(&path_of(config.url.expose())?)?;
    let lock = FileLock::take(&path).await?;
    let base = SqliteConnectOptions::new()
        .filename(&path)
        .busy_timeout(BUSY_TIMEOUT)
        .foreign_keys(true)
        // No temporary files: none can be missing when file descriptors run out.
        .pragma("temp_store", "MEMORY")
        .disable_statement_logging();
    let synchronous = match config.durability {
        Durability::Full => SqliteSynchronous::Full,
        Durability::Process => SqliteSynchronous::Normal,
    };
    let writing = base
        .clone()
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(synchronous)
        .pragma("journal_size_limit", WAL_SIZE_LIMIT)
        // What is erased is erased.
        .pragma("secure_delete", "ON");
    let mut connection = writing.connect().await.map_err(|error| cannot_open(&path, &error))?;
    let version = sqlx::query("SELECT sqlite_version()").fetch_one(&mut connection).await;
    let version: String = version.and_then(|row| row.try_get(0)).map_err(|error| cannot_open(&path, &error))?;
    check_engine(&version)?;
    check_pragmas(&mut connection, &path, config.durability).await?;
    migrate(&mut connection, &path).await?;
    Ok(Opened { connection, writing, reading: base.read_only(true), lock })
}

/// Opens another connection like the one in `options` and checks it.
pub(super) async fn reopen(
    options: &SqliteConnectOptions,
    durability: Durability,
) -> Result<SqliteConnection, StoreError> {
    let path = options.get_filename().to_owned();
    let mut connection = options.connect().await.map_err(super::error::store_error)?;
    check_pragmas(&mut connection, &path, durability).await?;
    Ok(connection)
}

fn unusable(text: impl Into<String>) -> StoreError {
    StoreError::Unusable(text.into())
}

fn cannot_open(path: &Path, error: &sqlx::Error) -> StoreError {
    unusable(format!("cannot open the database {}: {error}", path.display()))
}

fn path_of(url: &str) -> Result<PathBuf, StoreError> {
    let Some(rest) = url.strip_prefix("sqlite:") else {
        // Other addresses may hold a password.
        return Err(unusable("[store] url names no SQLite database; expected `sqlite:PATH`"));
    };
    let refuse = |why: &str| Err(unusable(format!("[store] url is `{url}`: {why}; expected `sqlite:PATH`")));
    let path = rest.strip_prefix("//").unwrap_or(rest);
    if path.is_empty() || path.contains('\0') {
        return refuse("it names no file");
    }
    if path == ":memory:" {
        return refuse("a database in memory has no write-ahead log and one connection only, so a file is needed");
    }
    if path.contains('?') {
        return refuse("parameters are not supported");
    }
    Ok(PathBuf::from(path))
}

/// Makes sure the file exists and gives its one true path. A new file can be read by its owner alone; SQLite
/// gives its side files the same mode.
fn create_file(path: &Path) -> Result<PathBuf, StoreError> {
    let failed =
        |error: std::io::Error| unusable(format!("cannot open or create the database {}: {error}", path.display()));
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => {
            // The new name must survive a power cut as well as what is written into the file.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    let path = path.canonicalize().map_err(failed)?;
    match path.to_str() {
        Some(_) => Ok(path),
        None => Err(unusable(format!("the path of the database, {}, is not UTF-8", path.display()))),
    }
}

/// An advisory lock beside the database. The kernel lets go of it when the process ends, however it ends; the
/// file stays, since removing it would let two servers lock two different files.
#[derive(Debug)]
pub(super) struct FileLock {
    _file: File,
}

impl FileLock {
    /// A process that was killed may leave a child behind which was about to start a command, and holds what its parent
    /// held until it does: so there are a few attempts.
    async fn take(database: &Path) -> Result<Self, StoreError> {
        let mut path = database.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let failed = |error: std::io::Error| unusable(format!("cannot lock {}: {error}", path.display()));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        let begun = tokio::time::Instant::now();
        let locked = loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < LOCK_PATIENCE => {
                    tokio::time::sleep(LOCK_LOOK).await;
                }
                locked => break locked,
            }
        };
        match locked {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let holder = match file.read_to_string(&mut text).map(|_| text.trim().parse::<u32>()) {
                    Ok(Ok(pid)) => format!("process {pid}"),
                    Ok(Err(_)) | Err(_) => "another process".to_owned(),
                };
                return Err(unusable(format!(
                    "the database {} is in use by {holder}, which holds {}; one server per file: stop that one \
                     or choose another [store] url",
                    database.display(),
                    path.display()
                )));
            }
            Err(error) => return Err(failed(error.into())),
        }
        let write_holder = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write_holder(&mut file).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

fn check_engine(version: &str) -> Result<(), StoreError> {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    let parsed = match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => [major, minor, patch],
        _ => return Err(unusable(format!("the SQLite library says its version is `{version}`"))),
    };
    if parsed < OLDEST_ENGINE {
        return Err(unusable(format!(
            "this program was linked with SQLite {version}, which can corrupt a database in WAL mode; 3.51.3 or \
             newer is needed: build it with the bundled SQLite"
        )));
    }
    Ok(())
}

/// A pragma that does not take effect is not an error in SQLite, so each is read back.
async fn check_pragmas(
    connection: &mut SqliteConnection,
    path: &Path,
    durability: Durability,
) -> Result<(), StoreError> {
    let synchronous = match durability {
        Durability::Full => "2",
        Durability::Process => "1",
    };
    for (statement, name, expected) in [
        ("SELECT journal_mode FROM pragma_journal_mode", "journal_mode", "wal"),
        ("SELECT CAST(synchronous AS TEXT) FROM pragma_synchronous", "synchronous", synchronous),
        ("SELECT CAST(foreign_keys AS TEXT) FROM pragma_foreign_keys", "foreign_keys", "1"),
        ("SELECT CAST(timeout AS TEXT) FROM pragma_busy_timeout", "busy_timeout", "300"),
    ] {
        let row = sqlx::query(statement).fetch_one(&mut *connection).await;
        let actual: String = row.and_then(|row| row.try_get(0)).map_err(|error| cannot_open(path, &error))?;
        if actual != expected {
            return Err(unusable(format!(
                "SQLite did not take a setting for {}: {name} is `{actual}`, expected `{expected}`; is the file on a \
                 network file system or opened read-only?",
                path.display()
            )));
        }
    }
    Ok(())
}

async fn migrate(connection: &mut SqliteConnection, path: &Path) -> Result<(), StoreError> {
    // `run` would do, were its future `Send` for a borrowed connection.
    let outcome = schema::SQLITE.migrator().run_direct(None, connection, false).await;
    outcome.map_err(|error| schema::SQLITE.refusal(&error, &path.display().to_string()))
}

/// Closes a connection that is given up; what goes wrong then is logged, for it can change nothing.
pub(super) async fn close(connection: SqliteConnection) {
    if let Err(error) = connection.close().await {
        tracing::warn!(%error, "a database connection did not close properly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_file() {
        for (url, path) in [
            ("sqlite:hames.db", "hames.db"),
            ("sqlite:///var/lib/h.db", "/var/lib/h.db"),
            ("sqlite:/a b%.db", "/a b%.db"),
        ] {
            assert_eq!(path_of(url).unwrap(), PathBuf::from(path));
        }
        for (url, why) in [
            ("postgres://localhost/h", "names no SQLite database"),
            ("hames.db", "names no SQLite database"),
            ("sqlite:", "`sqlite:`: it names no file"),
            ("sqlite::memory:", "`sqlite::memory:`: a database in memory"),
            ("sqlite:h.db?mode=rwc", "`sqlite:h.db?mode=rwc`: parameters are not supported"),
        ] {
            let error = path_of(url).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn engines_with_the_wal_reset_bug_are_refused() {
        for good in ["3.51.3", "3.51.10", "3.52.0", "4.0.0"] {
            check_engine(good).unwrap();
        }
        for bad in ["3.51.2", "3.40.1", "2.99.99", "3.51", "", "three"] {
            assert!(check_engine(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_setting_that_did_not_take_effect_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("test.db");
        let mode = |mode| {
            SqliteConnectOptions::new()
                .filename(&path)
                .create_if_missing(true)
                .journal_mode(mode)
                .busy_timeout(BUSY_TIMEOUT)
                .synchronous(SqliteSynchronous::Full)
        };
        let check = async |options: SqliteConnectOptions, durability| {
            let mut connection = options.connect().await.unwrap();
            let checked = check_pragmas(&mut connection, &path, durability).await;
            connection.close().await.unwrap();
            checked.map_err(|error| error.to_string())
        };
        let wal = mode(SqliteJournalMode::Wal);
        assert_eq!(check(wal.clone(), Durability::Full).await, Ok(()));
        let delete = mode(SqliteJournalMode::Delete);
        for (options, durability, expected) in [
            (delete, Durability::Full, "journal_mode is `delete`, expected `wal`"),
            (wal.clone(), Durability::Process, "synchronous is `2`, expected `1`"),
            (wal.clone().foreign_keys(false), Durability::Full, "foreign_keys is `0`, expected `1`"),
            (wal.busy_timeout(Duration::ZERO), Durability::Full, "busy_timeout is `0`, expected `300`"),
        ] {
            let error = check(options, durability).await.unwrap_err();
            assert!(error.contains(expected) && error.contains("test.db"), "{error}");
        }
    }
}
