//! The local clock as the core sees it.
//!
//! The server's `now()` decides who owns a job; [`Mono`] decides how long this process may believe it. The two are never
//! compared, so the core has no type for the server's time.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A moment of this machine's monotonic clock, in milliseconds since an arbitrary start. Only differences have a meaning.
/// All arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mono(u64);

impl Mono {
    /// The earliest moment.
    pub const ZERO: Self = Self(0);

    /// The moment `ms` milliseconds after the clock's start.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms)
    }

    /// Milliseconds since the clock's start.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0
    }
}

impl Add<Duration> for Mono {
    type Output = Self;

    fn add(self, length: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(length.as_millis()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub<Mono> for Mono {
    type Output = Duration;

    /// How long ago `earlier` was; zero when it lies ahead.
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let end = Mono::from_millis(u64::MAX);
        assert_eq!(end + Duration::MAX, end);
        assert_eq!(Mono::ZERO - end, Duration::ZERO);
        assert_eq!(
            Mono::from_millis(7) - Mono::from_millis(2),
            Duration::from_millis(5)
        );
    }
}
