//! A point in time with the resolution the wire contract publishes.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Milliseconds since the Unix epoch, UTC.
///
/// Serialised as RFC 3339 with exactly three fractional digits and a `Z`
/// (`2026-11-30T16:17:10.000Z`); stored in databases as the integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// The text is not an RFC 3339 time in the years 0–9999.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an RFC 3339 time such as 2026-11-30T16:17:10.000Z")]
pub struct InvalidTimestamp(pub String);

impl Timestamp {
    /// Milliseconds since the Unix epoch.
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the Unix epoch.
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// This time plus `duration`, saturating at the far end of the range.
    pub fn plus(self, duration: Duration) -> Self {
        let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(millis))
    }

    /// A duration earlier, in whole milliseconds; the earliest there is when that is before it.
    pub fn minus(self, duration: Duration) -> Self {
        let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(millis))
    }

    /// How long after `earlier` this is; zero when it is not after it.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nearest = self.0.clamp(jiff::Timestamp::MIN.as_millisecond(), jiff::Timestamp::MAX.as_millisecond());
        match jiff::Timestamp::from_millisecond(nearest) {
            Ok(time) => write!(f, "{time:.3}"),
            Err(_) => Err(fmt::Error),
        }
    }
}

impl std::str::FromStr for Timestamp {
    type Err = InvalidTimestamp;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<jiff::Timestamp>()
            .map(|time| Self(time.as_millisecond()))
            .map_err(|_| InvalidTimestamp(text.to_owned()))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_three_fractional_digits_and_reads_itself_back() {
        for millis in [0, 1, 999, 1_796_055_430_120, -1] {
            let time = Timestamp::from_millis(millis);
            let text = time.to_string();
            assert!(text.ends_with('Z') && text.len() == "2026-11-30T16:17:10.000Z".len(), "{text}");
            assert_eq!(text.parse::<Timestamp>().unwrap(), time);
        }
        assert_eq!(Timestamp::from_millis(1_796_055_430_120).to_string(), "2026-11-30T16:17:10.120Z");
    }

    #[test]
    fn a_clock_that_steps_back_gives_no_negative_duration() {
        assert_eq!(Timestamp::from_millis(5).since(Timestamp::from_millis(9)), Duration::ZERO);
    }
}
