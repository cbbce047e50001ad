//! Identifiers and counters that name things across modules.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

/// The position of a durable event in its run: 1, 2, 3, … without gap. Zero means "before the first".
pub type Seq = u64;

/// The fence of a run: raised by one each time a worker claims the run. A write that carries an
/// older generation than the stored one is refused.
pub type Generation = u64;

/// Names one run: `run_` followed by a uuid v7 in simple form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(Uuid);

/// The text does not name a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a run id; expected `run_` followed by 32 lower-case hexadecimal digits")]
pub struct InvalidRunId;

impl RunId {
    /// Wraps a uuid (v7 by convention; nothing depends on the version).
    pub const fn new(uuid: Uuid) -> Self {
        Self(uuid)
    }

    /// The bare uuid.
    pub const fn uuid(self) -> Uuid {
        self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run_{}", self.0.simple())
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RunId {
    type Err = InvalidRunId;

    /// Accepts exactly the canonical form, so that one run has one spelling everywhere.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("run_").ok_or(InvalidRunId)?;
        let canonical =
            digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        if !canonical {
            return Err(InvalidRunId);
        }
        Uuid::try_parse(digits).map(Self).map_err(|_| InvalidRunId)
    }
}

impl Serialize for RunId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RunId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Who a run belongs to. Every query carries it; another tenant's run does not exist.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TenantId(String);

impl TenantId {
    /// A tenant by name.
    pub fn new(name: impl Into<String>) -> Self {
        Self(name.into())
    }

    /// The tenant of a server without keys, which serves its own machine only.
    pub fn local() -> Self {
        Self("local".to_owned())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_id_has_one_spelling() {
        let id = RunId::new(Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_00ab));
        let text = id.to_string();
        assert_eq!(text, "run_019000000000700080000000000000ab");
        assert_eq!(text.parse(), Ok(id));
        for other in [
            "019000000000700080000000000000ab",
            "run_019000000000700080000000000000AB",
            "run_01900000-0000-7000-8000-0000000000ab",
            "run_019000000000700080000000000000ab ",
            "run_",
            "",
        ] {
            assert_eq!(other.parse::<RunId>(), Err(InvalidRunId), "{other}");
        }
    }
}
