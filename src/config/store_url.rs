//! The address of the database, which may hold a password.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

/// An address that is shown without its password, and without parameters, which may hold one as well.
#[derive(Clone, Deserialize)]
#[serde(from = "String")]
pub struct StoreUrl(SecretString);

impl StoreUrl {
    /// The whole of it, to connect with.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    /// What stands before the first colon.
    pub fn scheme(&self) -> Option<&str> {
        self.expose().split_once(':').map(|(scheme, _)| scheme)
    }
}

impl From<String> for StoreUrl {
    fn from(url: String) -> Self {
        Self(url.into())
    }
}

impl From<&str> for StoreUrl {
    fn from(url: &str) -> Self {
        Self(url.into())
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.expose();
        if let Some(path) = url.strip_prefix("sqlite:") {
            return write!(f, "sqlite:{path}");
        }
        // What is not an address of a known form may be a secret as a whole.
        let Some((scheme @ ("postgres" | "postgresql"), rest)) = url.split_once("://") else {
            return f.write_str("…");
        };
        let (rest, parameters) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
        if parameters.contains('@') {
            // Whether a password ends there or a parameter goes on cannot be told.
            return write!(f, "{scheme}://…");
        }
        // A password may hold any character, so the last @ ends it.
        let (user, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        let user = user.split(':').next().unwrap_or_default();
        if user.is_empty() { write!(f, "{scheme}://{place}") } else { write!(f, "{scheme}://{user}@{place}") }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_password_is_shown() {
        for (url, shown) in [
            ("sqlite:/var/lib/h.db", "sqlite:/var/lib/h.db"),
            ("postgres://db.example/hames", "postgres://db.example/hames"),
            ("postgres://ann@db.example:5433/hames", "postgres://ann@db.example:5433/hames"),
            ("postgresql://ann:s3cret@db.example/hames", "postgresql://ann@db.example/hames"),
            ("postgres://ann:s3@cret:/s3cret@db.example/hames", "postgres://ann@db.example/hames"),
            ("postgres://:s3cret@db.example/hames", "postgres://db.example/hames"),
            ("postgres://db.example/hames?user=ann&password=s3cret", "postgres://db.example/hames"),
            ("postgres://ann:s3?cret@db.example/hames", "postgres://…"),
            ("postgres://db.example/hames?password=s3@cret", "postgres://…"),
            ("postgres:s3cret", "…"),
            ("s3cret", "…"),
        ] {
            let url = StoreUrl::from(url);
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?} {url}").contains("s3"), "{url:?}");
        }
    }
}
