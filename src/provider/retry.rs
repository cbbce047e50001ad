//! When a failed model call is worth another attempt, and how long to wait for it: a pure decision.
//!
//! The waiting times are those of the official OpenAI SDKs: 0.5 s doubling to 8 s, up to a quarter less by
//! chance. `backon` computes such delays too, but draws its own random numbers and knows neither the
//! provider's wish nor the time that is left, so nothing of it would remain.

use std::time::Duration;

use crate::config::DEFAULT_MAX_RETRIES;
use crate::domain::ModelFailure;

/// How often and how patiently a call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Most attempts after the first.
    pub max_retries: u32,
    /// Wait before the second attempt; each later one is twice as long.
    pub base: Duration,
    /// Longest wait that is not the provider's own wish.
    pub cap: Duration,
}

/// What to do after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Wait, then try again.
    Retry {
        /// How long to wait.
        delay: Duration,
    },
    /// The failure stands.
    GiveUp,
}

impl Policy {
    /// The usual waits with this number of further attempts.
    pub const fn new(max_retries: u32) -> Self {
        Self { max_retries, base: Duration::from_millis(500), cap: Duration::from_secs(8) }
    }

    /// Decides after attempt number `attempt` (from 1) failed, with `remaining` time before the run must end.
    ///
    /// `jitter` is a random number from 0 to 1. The wait is never shorter than the provider asked for, and
    /// a wait that would use up the remaining time is not begun.
    pub fn next(&self, failure: &ModelFailure, attempt: u32, remaining: Duration, jitter: f64) -> Decision {
        if !failure.class.is_transient() || attempt > self.max_retries {
            return Decision::GiveUp;
        }
        let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 0.0 };
        let delay = match failure.retry_after {
            // Callers that were told the same moment should not all come at it.
            Some(asked) => asked.saturating_add(self.base.mul_f64(jitter)),
            None => {
                let doublings = attempt.saturating_sub(1).min(31);
                let backoff = self.base.saturating_mul(1 << doublings).min(self.cap);
                backoff.mul_f64(1.0 - jitter / 4.0)
            }
        };
        if delay < remaining { Decision::Retry { delay } } else { Decision::GiveUp }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::new(DEFAULT_MAX_RETRIES)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::FailureClass;

    const HOUR: Duration = Duration::from_secs(3600);

    fn failure(class: FailureClass, retry_after: Option<u64>) -> ModelFailure {
        ModelFailure { retry_after: retry_after.map(Duration::from_millis), ..ModelFailure::new(class, "x") }
    }

    fn retry(millis: u64) -> Decision {
        Decision::Retry { delay: Duration::from_millis(millis) }
    }

    #[test]
    fn waits_double_up_to_the_cap_and_end_with_the_attempts() {
        let policy = Policy::new(6);
        let down = failure(FailureClass::Unavailable, None);
        let waits: Vec<_> = (1..=7).map(|attempt| policy.next(&down, attempt, HOUR, 0.0)).collect();
        assert_eq!(
            waits,
            [retry(500), retry(1000), retry(2000), retry(4000), retry(8000), retry(8000), Decision::GiveUp]
        );
        assert_eq!(policy.next(&down, 1, HOUR, 1.0), retry(375));
    }

    #[test]
    fn only_passing_failures_are_tried_again() {
        use FailureClass::*;
        for (class, again) in [
            (Unavailable, true),
            (RateLimited, true),
            (TimedOut, true),
            (Truncated, true),
            (Empty, true),
            (QuotaExhausted, false),
            (Protocol, false),
            (ContextTooLong, false),
            (Refused, false),
            (Authentication, false),
            (InvalidRequest, false),
        ] {
            let decision = Policy::default().next(&failure(class, Some(1)), 1, HOUR, 0.0);
            assert_eq!(decision, if again { retry(1) } else { Decision::GiveUp }, "{class:?}");
        }
    }

    #[test]
    fn the_providers_wish_is_kept_and_a_past_moment_means_soon() {
        let policy = Policy::default();
        assert_eq!(policy.next(&failure(FailureClass::RateLimited, Some(30_000)), 1, HOUR, 0.0), retry(30_000));
        assert_eq!(policy.next(&failure(FailureClass::RateLimited, Some(0)), 1, HOUR, 0.5), retry(250));
        let left = Duration::from_secs(30);
        assert_eq!(policy.next(&failure(FailureClass::RateLimited, Some(30_000)), 1, left, 0.0), Decision::GiveUp);
    }

    proptest! {
        #[test]
        fn a_wait_never_reaches_the_end_of_the_time(
            attempt in any::<u32>(), asked in proptest::option::of(any::<u64>()), left in any::<u64>(), jitter in any::<f64>(),
        ) {
            let remaining = Duration::from_millis(left);
            let decision = Policy::new(u32::MAX).next(&failure(FailureClass::RateLimited, asked), attempt, remaining, jitter);
            if let Decision::Retry { delay } = decision {
                prop_assert!(delay < remaining);
                prop_assert!(delay >= Duration::from_millis(asked.unwrap_or(0)));
            }
        }
    }
}
