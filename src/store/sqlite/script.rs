//! The statements of one transaction, on their way to the thread that SQLite works in.
//!
//! Each trip there and back costs two wake-ups, more than most statements do, so statements go there together. How many
//! is a balance: the text of a trip is prepared anew when it was not seen lately. A transaction of a single write goes
//! there as few times as it has answers to wait for, and its texts are always the same. A larger one writes many rows
//! with each statement, and goes there with each part of it: the rows of a part are filled up with empty ones to one of a
//! few sizes, so that a few prepared texts serve groups of every size.

use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Arguments, AssertSqlSafe, Encode, Sqlite, SqliteConnection, Type};

/// A transaction being carried out.
pub(super) struct Script<'c> {
    connection: &'c mut SqliteConnection,
    trips: Trips,
    /// Statements that wait for the next trip, with their values in order.
    sql: String,
    values: SqliteArguments,
    /// Whether what waits goes before anything is added to it.
    is_whole: bool,
    end: End,
}

/// Whether the transaction is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Open,
    Committed,
}

/// When statements are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trips {
    /// Together, once an answer is needed.
    Few,
    /// Part by part.
    Parts,
}

impl<'c> Script<'c> {
    pub(super) fn new(connection: &'c mut SqliteConnection, trips: Trips) -> Self {
        Self {
            connection,
            trips,
            sql: String::new(),
            values: SqliteArguments::default(),
            is_whole: false,
            end: End::Open,
        }
    }

    /// Begins a statement with the values of its placeholders `?`, in order. What was handed in as a whole part before
    /// is carried out first.
    pub(super) async fn begin(&mut self) -> Result<Values<'_>, sqlx::Error> {
        if self.is_whole {
            self.flush().await?;
        }
        Ok(Values(&mut self.values))
    }

    /// Adds a statement that has no answer. It is carried out later; what fails may be said by whatever follows.
    pub(super) fn add(&mut self, sql: &str) {
        if !self.sql.is_empty() {
            self.sql.push_str("; ");
        }
        self.sql.push_str(sql);
    }

    /// What was added so far is a part.
    pub(super) fn end_part(&mut self) {
        self.is_whole = self.trips == Trips::Parts;
    }

    /// Carries out all that waits and gives its rows.
    pub(super) async fn fetch_all(&mut self) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let (sql, values) = self.take();
        sqlx::query_with(AssertSqlSafe(sql), values).fetch_all(&mut *self.connection).await
    }

    /// The same for the last rows that a write asks for: when it is the only one, it is committed on the same trip.
    pub(super) async fn fetch_last(&mut self) -> Result<Vec<SqliteRow>, sqlx::Error> {
        match self.trips {
            Trips::Few => self.end(),
            Trips::Parts => {}
        }
        self.fetch_all().await
    }

    /// Ends the transaction.
    pub(super) async fn commit(mut self) -> Result<(), sqlx::Error> {
        self.end();
        self.flush().await
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.end, End::Committed) == End::Open {
            self.add("COMMIT");
        }
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

    fn take(&mut self) -> (String, SqliteArguments) {
        self.is_whole = false;
        (std::mem::take(&mut self.sql), std::mem::take(&mut self.values))
    }
}

/// The values of a statement.
pub(super) struct Values<'s>(&'s mut SqliteArguments);

impl Values<'_> {
    /// Adds a value for the next placeholder.
    pub(super) fn bind<'q, T: Encode<'q, Sqlite> + Type<Sqlite>>(
        &mut self,
        value: T,
    ) -> Result<&mut Self, sqlx::Error> {
        self.0.add(value).map_err(sqlx::Error::Encode)?;
        Ok(self)
    }

    /// Fills a portion up with rows of so many columns of `NULL`. The statement has to pass them over.
    pub(super) fn fill_up(&mut self, portion: Portion<'_, impl Sized>, columns: usize) -> Result<(), sqlx::Error> {
        for _ in 0..(portion.rows - portion.items.len()) * columns {
            self.bind(None::<i64>)?;
        }
        Ok(())
    }
}

/// Items that are the rows of one statement.
pub(super) struct Portion<'i, T> {
    pub(super) items: &'i [T],
    /// How many rows the statement has: those of the items, and empty ones after them.
    pub(super) rows: usize,
}

impl<T> Clone for Portion<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Portion<'_, T> {}

/// Cuts items into portions of at most `max`. The rows of a portion are 1, 2, 3, 4, 6, 8, 12, 16, 24, …: a power of two,
/// or one and a half.
pub(super) fn portions<T>(items: &[T], max: usize) -> impl Iterator<Item = Portion<'_, T>> {
    items.chunks(max).map(|items| {
        let power = items.len().next_power_of_two();
        let less = power / 4 * 3;
        Portion { items, rows: if power >= 4 && items.len() <= less { less } else { power } }
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
    fn portions_are_all_items_in_order_in_a_few_sizes() {
        let mut sizes = std::collections::BTreeSet::new();
        for len in 0..200_usize {
            let items: Vec<_> = (0..len).collect();
            let cut: Vec<_> = portions(&items, 64).collect();
            assert_eq!(cut.iter().flat_map(|portion| portion.items).copied().collect::<Vec<_>>(), items);
            assert_eq!(cut.len(), len.div_ceil(64));
            for Portion { items, rows } in cut {
                assert!(items.len() <= rows && rows * 2 <= items.len() * 3, "{} in {rows}", items.len());
                sizes.insert(rows);
            }
        }
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
    }

    #[test]
    fn rows_have_a_placeholder_for_each_column() {
        assert_eq!(rows(2, 3), "(?, ?, ?), (?, ?, ?)");
    }
}
