//! Which troubles a simulated world has, and what was found in it.

use crate::database::Counts;
use std::time::Duration;
use tenure_core::lease::limits::{Limits, LimitsError};

/// The troubles of a world. Partitions, late and lost messages are in each.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// How long a lease lives in the database.
    pub ttl: Duration,
    /// What the workers were told: longer than `ttl` in a world that must go wrong.
    pub limits: Limits,
    /// Daemons crash and are started again.
    pub crashes: bool,
    /// Daemons are stopped and go on (SIGSTOP); their handlers and guard are not.
    pub frozen_daemons: bool,
    /// Whole machines are stopped and go on, some with a clock that did not run meanwhile.
    pub frozen_machines: bool,
    /// The server is stopped and goes on, and its clock is set.
    pub server_troubles: bool,
}

impl World {
    /// All troubles but frozen machines, with these settings.
    ///
    /// # Errors
    /// What [`Limits::new`] refuses.
    pub fn new(
        ttl: Duration,
        heartbeat: Duration,
        kill_grace: Duration,
    ) -> Result<Self, LimitsError> {
        Ok(Self {
            ttl,
            limits: Limits::new(ttl, heartbeat, kill_grace)?,
            crashes: true,
            frozen_daemons: true,
            frozen_machines: false,
            server_troubles: true,
        })
    }
}

/// What must never happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two handlers of one job lived at once.
    TwoHandlers {
        /// When, in milliseconds.
        at: u64,
    },
    /// A handler started whose lease the database did not have.
    NoLease {
        /// When, in milliseconds.
        at: u64,
    },
    /// Two completions of one job were accepted.
    CompletedTwice {
        /// When, in milliseconds.
        at: u64,
    },
    /// A job had not ended after the time of peace.
    Unfinished,
}

/// What one run has found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What must not happen and did.
    pub violations: Vec<Violation>,
    /// How often the database's rules were needed.
    pub counts: Counts,
    /// Handlers that started.
    pub started: u64,
    /// Handlers that were told to die because trust had ended.
    pub distrusted: u64,
    /// How often two handlers of one job lived at once; a violation unless machines freeze.
    pub doubles: u64,
}

impl Report {
    /// Adds what another run has found.
    pub fn add(&mut self, other: Self) {
        self.violations.extend(other.violations);
        self.counts.ghosts += other.counts.ghosts;
        self.counts.deaths += other.counts.deaths;
        self.counts.recovered += other.counts.recovered;
        self.counts.gaps += other.counts.gaps;
        self.counts.refused += other.counts.refused;
        self.started += other.started;
        self.distrusted += other.distrusted;
        self.doubles += other.doubles;
    }
}
