//! The statements of one transaction, on their way to the thread that SQLite works in.
//!
//! Each trip there and back costs two wake-ups, more than most statements do. So a transaction of a single write goes
//! there as few times as it has answers to wait for. A larger one goes there with every statement, but writes many
//! rows with each: statements of several rows have a power of two of them, so that a few prepared ones serve groups of
//! every size.

use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Arguments, AssertSqlSafe, Encode, Sqlite, SqliteConnection, Type};

/// A transaction being carried out.
pub(super) struct Script<'c> {
    connection: &'c mut SqliteConnection,
    trips: Trips,
    /// Statements that wait for the next trip, with their values in order.
    sql: String,
    values: SqliteArguments,
}

/// When statements are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trips {
    /// Together, once an answer is needed.
    Few,
    /// Each when it is handed in.
    Each,
}

impl<'c> Script<'c> {
    pub(super) fn new(connection: &'c mut SqliteConnection, trips: Trips) -> Self {
        Self { connection, trips, sql: String::new(), values: SqliteArguments::default() }
    }

    /// Adds a value for the next placeholder `?` of the statement that is handed in next.
    pub(super) fn bind<'q, T: Encode<'q, Sqlite> + Type<Sqlite>>(
        &mut self,
        value: T,
    ) -> Result<&mut Self, sqlx::Error> {
        self.values.add(value).map_err(sqlx::Error::Encode)?;
        Ok(self)
    }

    /// Carries out a statement that has no answer, now or later.
    pub(super) async fn execute(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        self.add(sql);
        match self.trips {
            Trips::Few => Ok(()),
            Trips::Each => self.flush().await,
        }
    }

    /// Carries out all that waits and this statement, and gives its rows.
    pub(super) async fn fetch_all(&mut self, sql: &str) -> Result<Vec<SqliteRow>, sqlx::Error> {
        self.add(sql);
        let (sql, values) = self.take();
        sqlx::query_with(AssertSqlSafe(sql), values).fetch_all(&mut *self.connection).await
    }

    /// Carries out all that waits.
    pub(super) async fn flush(&mut self) -> Result<(), sqlx::Error> {
        if self.sql.is_empty() {
            return Ok(());
        }
        let (sql, values) = self.take();
        sqlx::query_with(AssertSqlSafe(sql), values).execute(&mut *self.connection).await.map(drop)
    }

    /// The connection, for statements of another form; all that waits is carried out first.
    pub(super) async fn connection(&mut self) -> Result<&mut SqliteConnection, sqlx::Error> {
        self.flush().await?;
        Ok(self.connection)
    }

    fn add(&mut self, sql: &str) {
        if !self.sql.is_empty() {
            self.sql.push_str("; ");
        }
        self.sql.push_str(sql);
    }

    fn take(&mut self) -> (String, SqliteArguments) {
        (std::mem::take(&mut self.sql), std::mem::take(&mut self.values))
    }
}

/// Cuts items into portions of a power of two, at most `max` (one itself), the larger ones first.
pub(super) fn portions<T>(items: &[T], max: usize) -> impl Iterator<Item = &[T]> {
    let mut left = items;
    std::iter::from_fn(move || {
        let size = 1 << left.len().min(max).checked_ilog2()?;
        let (portion, rest) = left.split_at(size);
        left = rest;
        Some(portion)
    })
}

/// Placeholders of so many rows of so many columns: `(?, ?), (?, ?)`.
pub(super) fn rows(rows: usize, columns: usize) -> String {
    let row = format!("({})", ["?"].repeat(columns).join(", "));
    vec![row.as_str(); rows].join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_all_items_in_order_in_powers_of_two() {
        for len in 0..200_usize {
            let items: Vec<_> = (0..len).collect();
            let cut: Vec<&[usize]> = portions(&items, 32).collect();
            assert_eq!(cut.concat(), items);
            assert!(cut.iter().all(|portion| portion.len().is_power_of_two() && portion.len() <= 32));
            assert!(cut.len() <= len / 32 + 5, "{len}");
        }
    }

    #[test]
    fn rows_have_a_placeholder_for_each_column() {
        assert_eq!(rows(2, 3), "(?, ?, ?), (?, ?, ?)");
    }
}
