//! Query parameters: each known, given once unless it may repeat, and named in its error.

use axum::extract::{FromRequestParts, Query as Pairs};
use axum::http::Uri;
use axum::http::request::Parts;

use super::problem::{Problem, ProblemCode, shown};
use crate::domain::FieldError;
use crate::domain::text::nearest;

/// The parameters of one route.
pub(super) trait FromQuery: Sized {
    /// Takes what it knows; what is left over is refused by the caller.
    fn from_query(query: &mut QueryReader) -> Result<Self, Problem>;
}

/// A route without parameters.
pub(super) struct NoQuery;

impl FromQuery for NoQuery {
    fn from_query(_: &mut QueryReader) -> Result<Self, Problem> {
        Ok(Self)
    }
}

/// Extracts the parameters of a route, and refuses those it does not have.
pub(super) struct Query<T>(pub(super) T);

impl<S: Sync, T: FromQuery> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        Self::read(&parts.uri)
    }
}

impl<T: FromQuery> Query<T> {
    /// Reads the parameters of an address.
    pub(super) fn read(uri: &Uri) -> Result<Self, Problem> {
        let pairs = Pairs::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|error| Problem::new(ProblemCode::InvalidQuery, format!("The query cannot be read: {error}.")))?;
        let mut reader = QueryReader { pairs: pairs.0, known: Vec::new() };
        let read = T::from_query(&mut reader)?;
        reader.finish()?;
        Ok(Self(read))
    }
}

/// The parameters of a request that nobody took yet.
pub(super) struct QueryReader {
    pairs: Vec<(String, String)>,
    known: Vec<&'static str>,
}

impl QueryReader {
    /// Takes a parameter that occurs at most once. `parse` says in words what was expected.
    pub(super) fn one<T>(
        &mut self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Problem> {
        let mut values = self.all(name);
        match (values.pop(), values.len()) {
            (None, _) => Ok(None),
            (Some(value), 0) => parse(&value).map(Some).map_err(|message| invalid(name, message)),
            (Some(_), _) => Err(invalid(name, "is given more than once")),
        }
    }

    /// Takes every occurrence of a parameter, in order.
    pub(super) fn all(&mut self, name: &'static str) -> Vec<String> {
        self.known.push(name);
        self.pairs.extract_if(.., |(key, _)| key == name).map(|(_, value)| value).collect()
    }

    /// Takes every parameter whose name starts with `prefix`, without the prefix. Each name occurs once.
    pub(super) fn prefixed(&mut self, prefix: &'static str) -> Result<Vec<(String, String)>, Problem> {
        self.known.push(prefix);
        let mut taken: Vec<(String, String)> = Vec::new();
        for (key, value) in self.pairs.extract_if(.., |(key, _)| key.starts_with(prefix)) {
            let name = key.strip_prefix(prefix).unwrap_or_default();
            if name.is_empty() {
                return Err(invalid(&key, format!("names no key; expected {prefix}KEY=VALUE")));
            }
            if taken.iter().any(|(other, _)| other == name) {
                return Err(invalid(&key, "is given more than once"));
            }
            taken.push((name.to_owned(), value));
        }
        Ok(taken)
    }

    fn finish(self) -> Result<(), Problem> {
        let Some((name, _)) = self.pairs.first() else { return Ok(()) };
        // What ends in a dot is the beginning of many names.
        let written = |known: &&str| format!("{known}{}", if known.ends_with('.') { "KEY" } else { "" });
        let message = match nearest(name, self.known.iter().copied()) {
            Some(meant) => format!("is not a parameter of this route; did you mean `{}`?", written(&meant)),
            None if self.known.is_empty() => "is not a parameter of this route, which has none".to_owned(),
            None => {
                let known: Vec<_> = self.known.iter().map(written).collect();
                format!("is not a parameter of this route; known here: {}", known.join(", "))
            }
        };
        Err(invalid(name, message))
    }
}

fn invalid(name: &str, message: impl Into<String>) -> Problem {
    Problem::field(ProblemCode::InvalidQuery, FieldError::new(format!("?{}", shown(name)), message))
}

/// Reads a whole number between bounds.
pub(super) fn whole_number(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits
        .then(|| text.parse().ok())
        .flatten()
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| format!("is `{}`; expected a whole number from {min} to {max}", shown(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sample {
        wait: Option<u64>,
        tags: Vec<String>,
        metadata: Vec<(String, String)>,
    }

    impl FromQuery for Sample {
        fn from_query(query: &mut QueryReader) -> Result<Self, Problem> {
            Ok(Self {
                wait: query.one("wait", |text| whole_number(text, 1, 60))?,
                tags: query.all("tag"),
                metadata: query.prefixed("metadata.")?,
            })
        }
    }

    fn read(query: &str) -> Result<Sample, String> {
        let uri = format!("/x{query}").parse().unwrap();
        Query::read(&uri).map(|Query(sample)| sample).map_err(|problem| problem.detail().to_owned())
    }

    #[test]
    fn known_parameters_are_read() {
        let sample = read("?tag=a&wait=5&tag=b%20c&metadata.k.l=v&metadata.%C3%A9=").unwrap();
        assert_eq!(sample.wait, Some(5));
        assert_eq!(sample.tags, ["a", "b c"]);
        assert_eq!(sample.metadata, [("k.l".to_owned(), "v".to_owned()), ("é".to_owned(), String::new())]);
        assert_eq!(read("").unwrap().wait, None);
        assert_eq!(read("?").unwrap().wait, None);
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (query, detail) in [
            ("?wiat=5", "?wiat: is not a parameter of this route; did you mean `wait`?"),
            ("?thread=5", "?thread: is not a parameter of this route; known here: wait, tag, metadata.KEY"),
            ("?metadata=5", "?metadata: is not a parameter of this route; did you mean `metadata.KEY`?"),
            ("?wait=5&wait=5", "?wait: is given more than once"),
            ("?wait=", "?wait: is ``; expected a whole number from 1 to 60"),
            ("?wait=61", "?wait: is `61`; expected a whole number from 1 to 60"),
            ("?wait=-1", "?wait: is `-1`; expected a whole number from 1 to 60"),
            ("?wait=%2B1", "?wait: is `+1`; expected a whole number from 1 to 60"),
            ("?wait=99999999999999999999", "?wait: is `99999999999999999999`; expected a whole number from 1 to 60"),
            ("?metadata.=1", "?metadata.: names no key; expected metadata.KEY=VALUE"),
            ("?metadata.a=1&metadata.a=2", "?metadata.a: is given more than once"),
        ] {
            assert_eq!(read(query).err().as_deref(), Some(detail), "{query}");
        }
        let uri = "/x?a=1".parse().unwrap();
        let problem = Query::<NoQuery>::read(&uri).err().unwrap();
        assert_eq!(problem.detail(), "?a: is not a parameter of this route, which has none");
    }
}
