//! When a failed attempt runs again.
//!
//! The nominal delay after attempt *n* is `delay * 2^(n-1)`, at most `cap`. What is used lies evenly between half of the
//! nominal delay and a tenth above it, and never above the cap: jobs that failed together spread over at least half of the
//! delay. A receiver's `Retry-After` raises the result and spreads it upwards only. Whatever the numbers, the result
//! neither overflows nor lies in the past.

use std::time::Duration;
use thiserror::Error;

/// How a handler's failed attempts are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    max_attempts: i32,
    delay: Duration,
    cap: Duration,
}

/// A policy that cannot be meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PolicyError {
    /// Fewer than one attempt.
    #[error("max_attempts is {0}: set it to 1 (never repeat) or more")]
    MaxAttempts(i32),
    /// The cap lies below the first delay.
    #[error(
        "max_delay ({cap:?}) is shorter than delay ({delay:?}): raise max_delay or lower delay"
    )]
    CapBelowDelay {
        /// The first delay.
        delay: Duration,
        /// The cap.
        cap: Duration,
    },
    /// A cap nobody waits for.
    #[error("max_delay is {0:?}: set it to at most 366 days")]
    CapTooLong(Duration),
}

/// The longest cap that is accepted.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

impl Default for Policy {
    /// 5 attempts, 60 s, 120 s, 240 s, 480 s apart, at most 1 h.
    fn default() -> Self {
        Self {
            max_attempts: 5,
            delay: Duration::from_secs(60),
            cap: Duration::from_secs(3600),
        }
    }
}

impl Policy {
    /// A policy of `max_attempts` attempts, `delay` after the first, at most `cap` after any. A delay of zero repeats at
    /// once, for as long as there are attempts.
    ///
    /// # Errors
    /// When there would be no attempt, or the cap is below the delay or above 366 days.
    pub fn new(max_attempts: i32, delay: Duration, cap: Duration) -> Result<Self, PolicyError> {
        if max_attempts < 1 {
            return Err(PolicyError::MaxAttempts(max_attempts));
        }
        if cap < delay {
            return Err(PolicyError::CapBelowDelay { delay, cap });
        }
        if cap > LONGEST {
            return Err(PolicyError::CapTooLong(cap));
        }
        Ok(Self {
            max_attempts,
            delay,
            cap,
        })
    }

    /// After how many attempts a job goes to the dead letters, where the job does not say so itself.
    #[must_use]
    pub fn max_attempts(&self) -> i32 {
        self.max_attempts
    }

    /// How long after the failed attempt number `attempt` (from 1) the next one may start. `random` is from [0, 1);
    /// `not_before` is what the receiver asked for (`Retry-After`), which the cap does not bind.
    #[must_use]
    pub fn delay_after(&self, attempt: i32, random: f64, not_before: Option<Duration>) -> Duration {
        let random = if random.is_finite() {
            random.clamp(0.0, 1.0)
        } else {
            0.0
        };
        let nominal = self.nominal(attempt);
        let lowest = nominal / 2;
        let highest = (nominal + nominal / 10).min(self.cap);
        // Multiplying may round up by some nanoseconds.
        let backoff = (lowest + (highest - lowest).mul_f64(random)).min(highest);
        let asked = not_before.unwrap_or_default().min(LONGEST);
        backoff.max(asked + (asked / 2).mul_f64(random))
    }

    fn nominal(&self, attempt: i32) -> Duration {
        let doublings = u32::try_from(attempt.saturating_sub(1)).unwrap_or(0);
        let factor = 2_u32.checked_pow(doublings).unwrap_or(u32::MAX);
        self.delay.saturating_mul(factor).min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const fn secs(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn doubles_up_to_the_cap() {
        let policy = Policy::default();
        let nominal: Vec<u64> = (1..=8).map(|n| policy.nominal(n).as_secs()).collect();
        assert_eq!(nominal, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
    }

    #[test]
    fn tiny_delays_reach_a_long_cap() {
        let policy = Policy::new(100, Duration::from_millis(1), secs(3_000_000)).unwrap();
        assert_eq!(policy.nominal(60), secs(3_000_000));
    }

    #[test]
    fn spreads_over_at_least_half_of_the_nominal_delay() {
        let policy = Policy::default();
        for attempt in [1, 3, 7, 50] {
            let first = policy.delay_after(attempt, 0.0, None);
            let last = policy.delay_after(attempt, 1.0, None);
            assert!(last - first >= policy.nominal(attempt) / 2);
        }
    }

    #[test]
    fn retry_after_raises_and_spreads_upwards_only() {
        let policy = Policy::new(5, secs(1), secs(10)).unwrap();
        assert_eq!(policy.delay_after(1, 0.0, Some(secs(120))), secs(120));
        assert_eq!(policy.delay_after(1, 0.5, Some(secs(120))), secs(150));
        assert_eq!(policy.delay_after(4, 0.0, Some(secs(1))), secs(4));
    }

    #[test]
    fn refuses_what_cannot_be_meant() {
        assert_eq!(
            Policy::new(0, secs(1), secs(1)),
            Err(PolicyError::MaxAttempts(0))
        );
        assert!(matches!(
            Policy::new(1, secs(2), secs(1)),
            Err(PolicyError::CapBelowDelay { .. })
        ));
        assert!(matches!(
            Policy::new(1, secs(2), Duration::MAX),
            Err(PolicyError::CapTooLong(_))
        ));
        assert!(Policy::new(1, Duration::ZERO, Duration::ZERO).is_ok());
    }

    #[test]
    fn rounding_does_not_pass_the_cap() {
        let cap = Duration::from_millis(31_229_178_640);
        let policy = Policy::new(1, Duration::from_millis(29_039_735_932), cap).unwrap();
        assert_eq!(policy.delay_after(1, 1.0, None), cap);
    }

    proptest! {
        #[test]
        fn stays_within_half_of_the_nominal_delay_and_the_cap(
            attempt in any::<i32>(), delay in 0_u64..100_000_000_000, above in 0_u64..100_000_000_000,
            random in any::<f64>(), asked in any::<Option<u64>>(),
        ) {
            let cap = Duration::from_millis((delay + above).min(31_622_400_000));
            let delay = Duration::from_millis(delay).min(cap);
            let policy = Policy::new(1, delay, cap).unwrap();
            let alone = policy.delay_after(attempt, random, None);
            prop_assert!(alone >= delay / 2 && alone <= cap);
            let asked = asked.map(Duration::from_millis);
            let both = policy.delay_after(attempt, random, asked);
            prop_assert!(both >= alone && both >= asked.unwrap_or_default().min(LONGEST));
        }
    }
}
