//! The environment as it was when the program started, handed to whoever may know it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;

/// What the variables of settings start with.
pub(super) const PREFIX: &str = "HAMES_";

/// What stands between section and key in the name of such a variable.
pub(super) const SEPARATOR: &str = "__";

/// Environment variables by name. `Debug` shows their names and never their values.
#[derive(Clone, Default)]
pub struct Env(BTreeMap<OsString, OsString>);

impl Env {
    /// One variable.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(name)).map(OsString::as_os_str)
    }

    /// All variables.
    pub const fn variables(&self) -> &BTreeMap<OsString, OsString> {
        &self.0
    }

    /// The variables that are settings: `HAMES_SECTION__KEY`, as (name, path in lower case, value). Names without
    /// a double underscore are somebody else's (`HAMES_RUN_ID` of a command, `HAMES_PORT` of a container platform).
    pub(super) fn settings(&self) -> impl Iterator<Item = (&str, Vec<String>, &OsStr)> {
        self.0.iter().filter_map(|(name, value)| {
            let name = name.to_str()?;
            let path = name.strip_prefix(PREFIX)?;
            path.contains(SEPARATOR).then(|| {
                let path = path.split(SEPARATOR).map(str::to_ascii_lowercase).collect();
                (name, path, value.as_os_str())
            })
        })
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Env {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
