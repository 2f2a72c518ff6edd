//! The lengths of a lease.
//!
//! ```text
//! beat sent                                          trust ends              lease_ttl: recovery may begin
//!     |----------------- trust ---------------------------|------ margin ----------|
//!     |-- try --|-- try --|-- try --|                     | tick | lost grace | 3 s |
//! ```
//!
//! Margin = grace at a lost lease + one tick (the daemon or its guard may notice that much late) + the gap that recovery
//! does not notice (a jump of the server's clock up to that size counts against the lease). Three beats, or three waits for
//! an answer, fit into the trust, so one lost beat never ends it.

use std::time::Duration;
use thiserror::Error;

/// How late the daemon or its guard may notice that trust has ended.
pub const TICK: Duration = Duration::from_secs(1);
/// The longest gap between two sweeps that recovery takes for ordinary.
pub const SWEEP_GAP: Duration = Duration::from_secs(3);

/// The lengths that the keeper works with. Made from settings that can work, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    ttl: Duration,
    heartbeat: Duration,
    lost_grace: Duration,
}

/// Settings with which leases cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitsError {
    /// A heartbeat of no length.
    #[error("heartbeat is zero: set it to 1s or more")]
    NoHeartbeat,
    /// Too few beats in a lease.
    #[error("heartbeat ({heartbeat:?}) is more than a third of lease_ttl ({ttl:?}), so one late beat could lose every lease: set heartbeat to {:.1?} or less, or lease_ttl to {:?} or more", *ttl / 3, heartbeat.saturating_mul(3))]
    HeartbeatTooSlow {
        /// The setting `worker.heartbeat`.
        heartbeat: Duration,
        /// The setting `worker.lease_ttl`.
        ttl: Duration,
    },
    /// Nothing left of the lease to work in.
    #[error(
        "lease_ttl ({ttl:?}) is too short: {margin:?} of it are the margin in which handlers are killed, and the heartbeat takes {heartbeat:?}: set lease_ttl to more than {needed:?}"
    )]
    TtlTooShort {
        /// The setting `worker.lease_ttl`.
        ttl: Duration,
        /// What would be the margin.
        margin: Duration,
        /// The setting `worker.heartbeat`.
        heartbeat: Duration,
        /// `lease_ttl` must be longer than this.
        needed: Duration,
    },
}

impl Limits {
    /// From `worker.lease_ttl`, `worker.heartbeat` and the longest `kill_grace` of any handler.
    ///
    /// # Errors
    /// When the heartbeat is zero or over a third of the lease, or when the lease is not longer than margin and heartbeat.
    pub fn new(
        ttl: Duration,
        heartbeat: Duration,
        kill_grace: Duration,
    ) -> Result<Self, LimitsError> {
        if heartbeat.is_zero() {
            return Err(LimitsError::NoHeartbeat);
        }
        if heartbeat > ttl / 3 {
            return Err(LimitsError::HeartbeatTooSlow { heartbeat, ttl });
        }
        let limits = Self {
            ttl,
            heartbeat,
            lost_grace: kill_grace.min(ttl / 5),
        };
        let margin = limits.margin();
        if ttl <= margin + heartbeat {
            let rest = TICK + SWEEP_GAP + heartbeat;
            let needed = rest.saturating_add(kill_grace).min(rest * 5 / 4);
            return Err(LimitsError::TtlTooShort {
                ttl,
                margin,
                heartbeat,
                needed,
            });
        }
        Ok(limits)
    }

    /// How long a lease lives in the database after a beat.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// What a handler gets between TERM and KILL when its lease is lost: its own grace, but at most a fifth of the lease.
    #[must_use]
    pub fn lost_grace(&self) -> Duration {
        self.lost_grace
    }

    /// By how much trust is shorter than the lease.
    #[must_use]
    pub fn margin(&self) -> Duration {
        self.lost_grace + TICK + SWEEP_GAP
    }

    /// How long a beat is trusted, from when it was sent.
    #[must_use]
    pub fn trust(&self) -> Duration {
        self.ttl - self.margin()
    }

    /// Whether the proof that there is no primary comes before trust ends, and handlers live through an outage: standbys must have
    /// stood still for longer than [`SWEEP_GAP`] by then, and the last beat may have been one beat ago.
    #[must_use]
    pub fn outlast_outages(&self) -> bool {
        self.trust() > SWEEP_GAP + self.beat_every() + TICK
    }

    /// From the sending of one beat to the next: `worker.heartbeat`, but at least three in a trust.
    #[must_use]
    pub fn beat_every(&self) -> Duration {
        self.heartbeat.min(self.trust() / 3)
    }

    /// How long the answer to a beat or a registration is waited for: three waits fit into a trust.
    #[must_use]
    pub fn answer_within(&self) -> Duration {
        self.trust() / 3
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
    fn the_usual_settings() {
        for (ttl, grace, trust) in [(10, 10, 4), (30, 10, 20), (60, 10, 46), (30, 1, 25)] {
            let limits = Limits::new(secs(ttl), secs(3), secs(grace)).unwrap();
            assert_eq!(limits.trust(), secs(trust), "lease_ttl {ttl} s");
        }
    }

    #[test]
    fn short_leases_do_not_outlast_an_outage() {
        for (ttl, grace, outlasts) in [
            (30, 10, true),
            (10, 10, false),
            (10, 0, true),
            (60, 10, true),
        ] {
            let limits = Limits::new(secs(ttl), secs(1), secs(grace)).unwrap();
            assert_eq!(limits.outlast_outages(), outlasts, "{ttl} s, {grace} s");
        }
    }

    #[test]
    fn refuses_what_cannot_work_and_says_what_would() {
        let slow = Limits::new(secs(10), secs(4), secs(1))
            .unwrap_err()
            .to_string();
        assert!(
            slow.contains("set heartbeat to 3.3s or less, or lease_ttl to 12s or more"),
            "{slow}"
        );
        let short = Limits::new(secs(5), secs(1), secs(10))
            .unwrap_err()
            .to_string();
        assert!(
            short.contains("set lease_ttl to more than 6.25s"),
            "{short}"
        );
        assert_eq!(
            Limits::new(secs(5), secs(0), secs(1)),
            Err(LimitsError::NoHeartbeat)
        );
        assert!(Limits::new(secs(0), secs(1), secs(1)).is_err());
    }

    proptest! {
        #[test]
        fn three_tries_fit_and_advice_is_good(ttl in 0_u64..200_000, beat in 1_u64..60_000, grace in 0_u64..100_000) {
            let ms = Duration::from_millis;
            match Limits::new(ms(ttl), ms(beat), ms(grace)) {
                Ok(limits) => {
                    prop_assert!(limits.beat_every() * 3 <= limits.trust());
                    prop_assert!(limits.trust() + limits.lost_grace() + TICK + SWEEP_GAP <= limits.ttl());
                }
                Err(LimitsError::TtlTooShort { needed, .. }) => {
                    prop_assert!(Limits::new(needed.max(ms(beat) * 3) + ms(1), ms(beat), ms(grace)).is_ok());
                }
                Err(error) => prop_assert!(ms(beat) > ms(ttl) / 3, "{error}"),
            }
        }
    }
}
