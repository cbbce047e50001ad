//! Every schema change of every database, in order.

use sqlx::SqlSafeStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};

use super::StoreError;

/// One change: number, name, SQL.
type Change = (i64, &'static str, &'static str);

/// The changes of a database.
#[derive(Clone, Copy)]
pub(super) struct Schema(&'static [Change]);

/// A number and a name mean the same in both.
pub(super) const SQLITE: Schema = Schema(&[(1, "runs", include_str!("../../migrations/sqlite/0001_runs.sql"))]);
/// See [`SQLITE`].
pub(super) const POSTGRES: Schema = Schema(&[(1, "runs", include_str!("../../migrations/postgres/0001_runs.sql"))]);

impl Schema {
    /// What carries them out.
    pub(super) fn migrator(self) -> Migrator {
        let migration = |&(version, name, sql): &Change| {
            Migration::new(version, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
        };
        Migrator::with_migrations(self.0.iter().map(migration).collect())
    }

    /// Why the schema of the database `place` is not brought up to date.
    pub(super) fn refusal(self, error: &MigrateError, place: &str) -> StoreError {
        let newest = self.0.iter().map(|(version, ..)| *version).max().unwrap_or(0);
        StoreError::Unusable(match error {
            MigrateError::VersionMissing(version) => format!(
                "the database {place} has schema version {version} and this version of hames knows {newest}: start the \
                 version that wrote it, or choose another [store] url",
            ),
            MigrateError::VersionMismatch(version) => format!(
                "schema version {version} of the database {place} is not the one of this version of hames: it was made \
                 by an unreleased build; choose another [store] url",
            ),
            other => format!("cannot bring the schema of {place} up to date: {other}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_migration_file_is_embedded() {
        for (folder, Schema(changes)) in [("sqlite", SQLITE), ("postgres", POSTGRES)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(folder);
            let mut files: Vec<(String, String)> = std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .map(|path| {
                    (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(path).unwrap())
                })
                .collect();
            files.sort();
            let embedded: Vec<_> = changes
                .iter()
                .map(|(version, name, sql)| (format!("{version:04}_{name}.sql"), (*sql).to_owned()))
                .collect();
            assert_eq!(embedded, files);
        }
        let names = |Schema(changes): Schema| changes.iter().map(|&(n, name, _)| (n, name)).collect::<Vec<_>>();
        assert_eq!(names(SQLITE), names(POSTGRES));
    }
}
