//! Lists in pages: how many, and where the next one starts.

use super::problem::{Problem, shown};
use super::query::{QueryReader, whole_number};
use crate::domain::{Run, RunId};

/// Most entries of a page.
pub(super) const MAX_LIMIT: u32 = 200;

/// Entries of a page when the caller does not say.
pub(super) const DEFAULT_LIMIT: u32 = 50;

/// Takes `limit`.
pub(super) fn limit(query: &mut QueryReader) -> Result<u32, Problem> {
    Ok(optional_limit(query)?.unwrap_or(DEFAULT_LIMIT))
}

/// Takes `limit` where its absence matters.
pub(super) fn optional_limit(query: &mut QueryReader) -> Result<Option<u32>, Problem> {
    let limit = query.one("limit", |text| whole_number(text, 1, u64::from(MAX_LIMIT)))?;
    Ok(limit.and_then(|limit| u32::try_from(limit).ok()))
}

/// Takes `cursor`: the `next_cursor` of the page before. It stays good when runs come or the filter changes, since
/// it names the last run that was seen.
pub(super) fn cursor(query: &mut QueryReader) -> Result<Option<RunId>, Problem> {
    query.one("cursor", |text| {
        let hint =
            || format!("`{}` is not a cursor; expected `next_cursor` of an earlier page, unchanged", shown(text));
        let id = text.strip_prefix("before_").ok_or_else(hint)?;
        format!("run_{id}").parse().map_err(|_| hint())
    })
}

/// Cuts a list that was read one entry beyond the page, and gives the cursor of the next page if there is one.
pub(super) fn cut(mut runs: Vec<Run>, limit: u32) -> (Vec<Run>, Option<String>) {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if runs.len() <= limit {
        return (runs, None);
    }
    runs.truncate(limit);
    let next = runs.last().map(|run| format!("before_{}", run.id.uuid().simple()));
    (runs, next)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::domain::{Limits, RunStatus, TenantId, Timestamp, Usage};
    use crate::http::query::{FromQuery, Query};

    struct Sample(u32, Option<RunId>);

    impl FromQuery for Sample {
        fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
            Ok(Self(limit(query)?, cursor(query)?))
        }
    }

    fn read(query: &str) -> Result<(u32, Option<RunId>), String> {
        let uri = format!("/x?{query}").parse().unwrap();
        match Query::read(&uri) {
            Ok(Query(Sample(limit, cursor))) => Ok((limit, cursor)),
            Err(problem) => Err(problem.detail().to_owned()),
        }
    }

    fn run(number: u128) -> Run {
        Run {
            id: RunId::new(uuid::Uuid::from_u128(number)),
            tenant: TenantId::local(),
            generation: 0,
            status: RunStatus::Queued { paused: None },
            agent: "a".into(),
            model: "p/m".parse().unwrap(),
            thread: None,
            continues: None,
            limits: Limits::default(),
            metadata: BTreeMap::new(),
            steps: 0,
            tool_calls: 0,
            usage: Usage::default(),
            created_at: Timestamp::from_millis(0),
            cancel_requested_at: None,
            last_seq: 1,
            crashes: 0,
        }
    }

    #[test]
    fn the_cursor_of_a_page_names_its_last_run() {
        let runs = vec![run(5), run(4), run(3)];
        let (page, next) = cut(runs.clone(), 2);
        assert_eq!(page, runs[..2]);
        assert_eq!(read(&format!("cursor={}", next.unwrap())), Ok((50, Some(runs[1].id))));
        assert_eq!(cut(runs.clone(), 3), (runs.clone(), None));
        assert_eq!(cut(vec![], 3), (vec![], None));
    }

    #[test]
    fn limits_have_bounds_and_cursors_one_spelling() {
        assert_eq!(read(""), Ok((50, None)));
        assert_eq!(read("limit=200"), Ok((200, None)));
        for bad in ["limit=0", "limit=201", "limit=x"] {
            assert!(read(bad).unwrap_err().contains("expected a whole number from 1 to 200"), "{bad}");
        }
        for bad in ["cursor=", "cursor=before_", "cursor=run_00000000000000000000000000000001", "cursor=before_%00"] {
            let told = read(bad).unwrap_err();
            assert!(
                told.starts_with("?cursor: `") && told.contains("` is not a cursor; expected `next_cursor`"),
                "{told}"
            );
        }
    }
}
