//! The circuit breaker of a handler: one that cannot be reached, or whose installation is wrong, gets no jobs whose attempts it
//! would only burn.
//!
//! ```text
//!             5 failures in a row                    its wait is over
//!   Closed ───────────────────────► Open ─────────────────────────────► Probing
//!   all jobs      ▲                no job  ◄──────────────────────────  one job at a time
//!                 │                         a failure: twice the wait       │
//!                 └────────── any answer, or a probe that goes on ──────────┘
//! ```
//!
//! Invariants, whatever the order of events:
//! - While it is not closed, at most one job is under way that was started as a probe.
//! - Only an answer of the handler closes it, or a probe that has not failed for as long as a connection may take: that one has
//!   reached the handler, and may work for hours.
//! - A failure counts once: what was started before it opened neither opens it again nor lengthens its wait.

use crate::time::Mono;
use std::time::Duration;

/// So many failures in a row open the circuit.
pub const FAILURES: u32 = 5;
/// From opening to the first probe. Doubled after each that fails.
pub const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait.
pub const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What the end of an attempt says of its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It works: whether the job went well is another matter.
    Answer,
    /// It was not reached, or answered that its installation is wrong.
    Failure,
    /// Nothing: the attempt was stopped by us.
    Nothing,
}

/// Which jobs may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admits {
    /// As many as there are slots.
    All,
    /// One, as a probe.
    One,
    /// None.
    None,
}

/// Whether a job may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// It may.
    Go,
    /// It may, and [`Breaker::ended`] is told that it was a probe.
    Probe,
    /// Not now: it goes back, for so long.
    Wait(Duration),
}

/// What people are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing more is claimed but probes.
    Opened,
    /// All jobs are claimed again.
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        wait: Duration,
        until: Mono,
    },
    Probing {
        wait: Duration,
        /// When the probe that is under way started.
        since: Option<Mono>,
    },
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Breaker {
    state: State,
    /// A connection is made in less than this.
    connects_within: Duration,
}

impl Breaker {
    /// A closed one of a handler to which a connection is made, or fails, in less than `connects_within`.
    #[must_use]
    pub fn new(connects_within: Duration) -> Self {
        Self {
            state: State::Closed { failures: 0 },
            connects_within,
        }
    }

    /// Whether it is not closed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    /// What may be asked for now.
    #[must_use]
    pub fn admits(&self, now: Mono) -> Admits {
        match self.state {
            State::Closed { .. } => Admits::All,
            State::Open { until, .. } if now < until => Admits::None,
            State::Open { .. } | State::Probing { since: None, .. } => Admits::One,
            State::Probing { since: Some(_), .. } => Admits::None,
        }
    }

    /// A job was claimed and could start now.
    pub fn start(&mut self, now: Mono) -> Start {
        match self.state {
            State::Closed { .. } => Start::Go,
            State::Open { wait, until } if now >= until => self.probe(now, wait),
            State::Open { until, .. } => Start::Wait(until - now),
            State::Probing { wait, since: None } => self.probe(now, wait),
            State::Probing { wait, .. } => Start::Wait(wait),
        }
    }

    fn probe(&mut self, now: Mono, wait: Duration) -> Start {
        self.state = State::Probing {
            wait,
            since: Some(now),
        };
        Start::Probe
    }

    /// An attempt has ended.
    pub fn ended(&mut self, now: Mono, probe: bool, seen: Seen) -> Option<Change> {
        match (self.state, seen) {
            (_, Seen::Answer) => self.close(),
            (State::Closed { failures }, Seen::Failure) => {
                let failures = failures + 1;
                self.state = State::Closed { failures };
                (failures >= FAILURES).then(|| {
                    self.open(now, FIRST_WAIT);
                    Change::Opened
                })
            }
            (
                State::Probing {
                    wait,
                    since: Some(_),
                },
                Seen::Failure,
            ) if probe => {
                self.open(now, (wait * 2).min(LONGEST_WAIT));
                None
            }
            (
                State::Probing {
                    wait,
                    since: Some(_),
                },
                Seen::Nothing,
            ) if probe => {
                self.state = State::Probing { wait, since: None };
                None
            }
            _ => None,
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Mono) -> Option<Change> {
        match self.state {
            State::Probing {
                since: Some(since), ..
            } if now >= since + self.connects_within => self.close(),
            _ => None,
        }
    }

    /// When [`Breaker::tick`] is to be called, or something more may be asked for, even if nothing happens.
    #[must_use]
    pub fn wake_at(&self) -> Option<Mono> {
        match self.state {
            State::Open { until, .. } => Some(until),
            State::Probing {
                since: Some(since), ..
            } => Some(since + self.connects_within),
            State::Closed { .. } | State::Probing { since: None, .. } => None,
        }
    }

    fn open(&mut self, now: Mono, wait: Duration) {
        self.state = State::Open {
            wait,
            until: now + wait,
        };
    }

    fn close(&mut self) -> Option<Change> {
        let was_open = self.is_open();
        self.state = State::Closed { failures: 0 };
        was_open.then_some(Change::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONNECTS: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> Mono {
        Mono::from_millis(ms)
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::new(CONNECTS);
        for n in 1..FAILURES {
            assert_eq!(breaker.start(at(0)), Start::Go);
            assert_eq!(breaker.ended(at(0), false, Seen::Failure), None, "{n}");
        }
        assert_eq!(
            breaker.ended(at(0), false, Seen::Failure),
            Some(Change::Opened)
        );
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it_and_an_answer_between_them_does_not() {
        let mut breaker = Breaker::new(CONNECTS);
        for _ in 0..FAILURES * 2 {
            assert_eq!(breaker.ended(at(0), false, Seen::Failure), None);
            assert_eq!(breaker.ended(at(0), false, Seen::Answer), None);
        }
        let breaker = opened();
        assert_eq!(breaker.admits(at(999)), Admits::None);
        assert_eq!(breaker.admits(at(1000)), Admits::One);
        assert_eq!(breaker.wake_at(), Some(at(1000)));
    }

    #[test]
    fn one_probe_at_a_time_and_each_failure_doubles_the_wait() {
        let mut breaker = opened();
        assert_eq!(
            breaker.start(at(400)),
            Start::Wait(Duration::from_millis(600))
        );
        let (mut now, mut waits) = (at(1000), Vec::new());
        for _ in 0..7 {
            assert_eq!(breaker.start(now), Start::Probe);
            assert_eq!(breaker.admits(now), Admits::None);
            assert!(matches!(breaker.start(now), Start::Wait(_)));
            // What was started while it was closed says nothing new.
            assert_eq!(breaker.ended(now, false, Seen::Failure), None);
            assert_eq!(breaker.admits(now), Admits::None);
            assert_eq!(breaker.ended(now, true, Seen::Failure), None);
            let until = breaker.wake_at().unwrap_or_default();
            waits.push((until - now).as_secs());
            now = until;
        }
        assert_eq!(waits, [2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(breaker.start(now), Start::Probe);
        assert_eq!(breaker.ended(now, true, Seen::Answer), Some(Change::Closed));
        assert_eq!(breaker.start(now), Start::Go);
    }

    #[test]
    fn a_probe_that_goes_on_has_reached_its_handler() {
        let mut breaker = opened();
        assert_eq!(breaker.start(at(1000)), Start::Probe);
        assert_eq!(breaker.wake_at(), Some(at(11_000)));
        assert_eq!(breaker.tick(at(10_999)), None);
        assert_eq!(breaker.tick(at(11_000)), Some(Change::Closed));
        assert_eq!(breaker.admits(at(11_000)), Admits::All);
        // Its end counts as any other.
        assert_eq!(breaker.ended(at(12_000), true, Seen::Failure), None);
        assert_eq!(breaker.admits(at(12_000)), Admits::All);
    }

    #[test]
    fn a_probe_that_was_stopped_lets_the_next_one_start() {
        let mut breaker = opened();
        assert_eq!(breaker.start(at(1000)), Start::Probe);
        assert_eq!(breaker.ended(at(1001), true, Seen::Nothing), None);
        assert_eq!(breaker.admits(at(1001)), Admits::One);
        assert_eq!(breaker.start(at(1001)), Start::Probe);
    }

    proptest! {
        /// Jobs start and end in any order: never are two probes under way, and it never stays open for ever.
        #[test]
        fn holds_whatever_the_order(steps in proptest::collection::vec((0u8..5, 0u64..3000), 1..200)) {
            let mut breaker = Breaker::new(CONNECTS);
            let (mut now, mut plain, mut probes) = (0, 0u32, 0u32);
            for (step, passed) in steps {
                now += passed;
                if breaker.tick(at(now)) == Some(Change::Closed) {
                    // The probe that goes on is an ordinary job now.
                    plain += probes;
                    probes = 0;
                }
                let seen = match step {
                    0 | 1 => {
                        match breaker.start(at(now)) {
                            Start::Go => plain += 1,
                            Start::Probe => probes += 1,
                            Start::Wait(wait) => prop_assert!(breaker.is_open() && wait <= LONGEST_WAIT),
                        }
                        prop_assert!(probes <= 1);
                        continue;
                    }
                    2 => Seen::Failure,
                    3 => Seen::Answer,
                    _ => Seen::Nothing,
                };
                let probe = probes > 0 && passed % 2 == 0;
                if !probe && plain == 0 {
                    continue;
                }
                if breaker.ended(at(now), probe, seen) == Some(Change::Closed) {
                    plain += probes;
                    probes = 0;
                    plain -= 1;
                } else if probe {
                    probes -= 1;
                } else {
                    plain -= 1;
                }
                prop_assert!(!breaker.is_open() || breaker.wake_at().is_some() || breaker.admits(at(now)) == Admits::One);
            }
            // With nothing more to hear of, a probe is admitted within the longest wait, or the probe that is out counts.
            if breaker.is_open() {
                let later = at(now) + LONGEST_WAIT + CONNECTS;
                prop_assert!(breaker.tick(later).is_some() || breaker.admits(later) == Admits::One);
            }
        }
    }
}
