//! The clock and the source of ids, passed in wherever they are needed.
//!
//! Durations are measured with [`tokio::time::Instant`], which never goes back and which tests can pause;
//! the [`Clock`] gives the times that are stored and published.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::{ContextV7, Uuid};

use crate::domain::Timestamp;

/// Tells the time of day.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now, in UTC.
    fn now(&self) -> Timestamp;
}

/// The operating system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the wall clock")]
    fn now(&self) -> Timestamp {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_millis(0).plus(since_epoch)
    }
}

/// A clock that moves only when told to.
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    /// A clock that stands at `start`.
    pub const fn new(start: Timestamp) -> Self {
        Self(AtomicI64::new(start.as_millis()))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let millis = i64::try_from(by.as_millis()).unwrap_or(i64::MAX);
        self.0.fetch_add(millis, Ordering::SeqCst);
    }

    /// Sets the clock, backwards too.
    pub fn set(&self, to: Timestamp) {
        self.0.store(to.as_millis(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}

/// The operating system has no randomness to give.
#[derive(Debug, thiserror::Error)]
#[error("the operating system's random source failed: {0}")]
pub struct NoRandomness(#[from] rustix::io::Errno);

/// Fills a buffer from the operating system's random source.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let rest = bytes.get_mut(filled..).unwrap_or_default();
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Makes ids: uuids v7 of the time they are asked for. Those of one source rise strictly, within a millisecond and
/// after the clock stepped back too, so that order of ids is order of making.
#[derive(Debug, Default)]
pub struct Ids(Mutex<ContextV7>);

impl Ids {
    /// The next id.
    pub fn next(&self, now: Timestamp) -> Uuid {
        let millis = u64::try_from(now.as_millis()).unwrap_or(0);
        let nanos = u32::try_from(millis % 1_000).unwrap_or(0) * 1_000_000;
        // The counter is whole whatever a thread was doing that panicked.
        let context = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Uuid::new_v7(uuid::Timestamp::from_unix(&*context, millis / 1_000, nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_rise_within_a_millisecond_and_when_the_clock_steps_back() {
        let ids = Ids::default();
        let now = SystemClock.now();
        let times = [now, now, now, now.plus(Duration::from_millis(1)), now, Timestamp::from_millis(0)];
        let made: Vec<Uuid> = times.into_iter().cycle().take(6_000).map(|time| ids.next(time)).collect();
        assert!(made.is_sorted_by(|one, next| one < next));
        assert_eq!(made[0].get_version_num(), 7);
        assert_eq!(made[0].as_u128() >> 80, u128::try_from(now.as_millis()).unwrap());
    }
}
