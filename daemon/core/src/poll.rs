//! When to claim.
//!
//! Polling is always on and alone keeps everything correct; being woken only makes it fast.
//!
//! ```text
//!          a full batch, or jobs less than 20 ms apart
//!   Idle ───────────────────────────────────────────────► Busy
//!    ▲ flagged as a sleeper: commits notify it.            │ no flag: commits do without NOTIFY and its lock.
//!    │ Claims when woken, and at each idle poll (± 25 %).  │ Claims again at once after a full batch, else after
//!    │                                                     │ 5 ms, twice as long each time that brings nothing,
//!    └─────────────────────────────────────────────────────┘ up to 50 ms
//!          none so for 500 ms
//! ```
//!
//! One poller serves all pools of a worker. A sleeper writes its flag, looks once more and then sleeps, so a job that became
//! ready in between is found. The flag is written at most twice a second, whatever the mode does. One claim is under way at a
//! time, and none without a free slot. A job that comes alone costs one claim and no write of the flag.

use crate::time::Mono;
use std::time::Duration;

/// Jobs closer together than this make a busy poller.
const CLOSE: Duration = Duration::from_millis(20);
/// After a full batch: jobs that end at once free their slots together, and one claim for all of them costs a tenth of many.
const GATHER: Duration = Duration::from_millis(1);
const SHORTEST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(50);
/// Without such jobs for this long, a busy poller goes to sleep.
const QUIET: Duration = Duration::from_millis(500);
/// Between two writes of the flag.
const FLAG_PAUSE: Duration = Duration::from_millis(500);

/// Something that the shell has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A notification came, or something else that makes a look worth while (a pool or pause changed).
    Woken,
    /// A slot has become free, or (`false`) none is free any more.
    Free(bool),
    /// A lane that was left out for want of room can be claimed from again.
    Room,
    /// The claim was answered.
    Answered {
        /// It brought jobs.
        brought: bool,
        /// It brought some pool as many as it asked for, so there may be more.
        full: bool,
    },
    /// The claim failed.
    Failed,
    /// The sleeper's flag was written so.
    FlagWritten(bool),
    /// Writing the flag failed.
    FlagFailed,
    /// There are new lanes: the flag has to name them, and they may have a job.
    LanesChanged,
    /// The worker has registered: it has no flag, and whatever was under way is over.
    Registered,
    /// Time has passed.
    Tick,
}

/// Something that the shell is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Claim for the free slots, and answer with `Answered` or `Failed`.
    Claim,
    /// Write the sleeper's flag, and answer with `FlagWritten` or `FlagFailed`.
    SetSleeping(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Idle,
    Busy { wait: Duration },
}

/// Decides when to claim. See the module for its modes.
#[derive(Debug)]
pub struct Poller {
    idle_poll: Duration,
    mode: Mode,
    free: bool,
    claiming: bool,
    /// Woken while a claim was under way, which may have looked too early.
    again: bool,
    due: Mono,
    last_job: Option<Mono>,
    /// When jobs last came in a full batch or close together.
    last_close: Mono,
    /// What the database has; unknown after a failed write.
    flag: Option<bool>,
    writing: bool,
    /// The flag that is being written does not name the newest lanes.
    outdated: bool,
    write_from: Mono,
}

impl Poller {
    /// An idle poller with free slots, whose worker has just registered. Idle, it looks every `idle_poll` ± 25 %.
    #[must_use]
    pub fn new(idle_poll: Duration) -> Self {
        Self {
            idle_poll,
            mode: Mode::Idle,
            free: true,
            claiming: false,
            again: false,
            due: Mono::ZERO,
            last_job: None,
            last_close: Mono::ZERO,
            flag: Some(false),
            writing: false,
            outdated: false,
            write_from: Mono::ZERO,
        }
    }

    /// When the poller wants to be called even if nothing happens.
    #[must_use]
    pub fn wake_at(&self) -> Option<Mono> {
        let claim = (self.free && !self.claiming).then_some(self.due);
        let flag =
            (!self.writing && self.flag != Some(self.wants_flag())).then_some(self.write_from);
        claim.into_iter().chain(flag).min()
    }

    /// Takes in an event and says what to do. `random` is from [0, 1) and new at each call.
    pub fn on(&mut self, now: Mono, event: Event, random: f64) -> Vec<Command> {
        let idle_poll = self.idle_poll.mul_f64(0.75 + random.clamp(0.0, 1.0) / 2.0);
        match event {
            Event::Woken if self.mode == Mode::Idle => self.look(now),
            Event::Woken | Event::Tick => {}
            Event::Free(free) => self.free = free,
            Event::Room => {
                self.again = self.claiming;
                self.due = self.due.min(now + GATHER);
            }
            Event::Answered { brought, full } => {
                self.claiming = false;
                self.answered(now, brought, full, idle_poll);
            }
            Event::Failed => {
                self.claiming = false;
                self.again = false;
                self.mode = Mode::Idle;
                self.due = now + idle_poll;
            }
            Event::FlagWritten(flag) => {
                self.writing = false;
                self.flag = (!std::mem::take(&mut self.outdated)).then_some(flag);
                if flag {
                    self.look(now);
                }
            }
            Event::FlagFailed => {
                self.writing = false;
                self.flag = None;
                self.write_from = now + idle_poll;
            }
            Event::LanesChanged => {
                self.outdated = self.writing;
                self.flag = None;
                self.look(now);
            }
            Event::Registered => {
                let free = self.free;
                *self = Self {
                    free,
                    due: now,
                    write_from: self.write_from,
                    ..Self::new(self.idle_poll)
                };
            }
        }
        let mut out = Vec::new();
        if !self.writing && self.flag != Some(self.wants_flag()) && now >= self.write_from {
            self.writing = true;
            self.write_from = now + FLAG_PAUSE;
            out.push(Command::SetSleeping(self.wants_flag()));
        }
        if self.free && !self.claiming && now >= self.due {
            self.claiming = true;
            out.push(Command::Claim);
        }
        out
    }

    fn wants_flag(&self) -> bool {
        self.mode == Mode::Idle
    }

    fn look(&mut self, now: Mono) {
        self.again = self.claiming;
        self.due = now;
    }

    fn answered(&mut self, now: Mono, brought: bool, full: bool, idle_poll: Duration) {
        if brought {
            let since = self.last_job.replace(now).map(|last| now - last);
            if full || since.is_some_and(|since| since < CLOSE) {
                self.last_close = now;
                self.mode = Mode::Busy { wait: SHORTEST };
            } else if let Mode::Busy { wait } = &mut self.mode {
                *wait = SHORTEST;
            }
        }
        if now - self.last_close >= QUIET {
            self.mode = Mode::Idle;
        }
        self.due = match &mut self.mode {
            _ if self.again => now,
            _ if brought && full => now + GATHER,
            Mode::Idle => now + idle_poll,
            Mode::Busy { wait } => {
                let due = now + *wait;
                *wait = (*wait * 2).min(LONGEST);
                due
            }
        };
        self.again = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Command::{Claim, SetSleeping};
    use proptest::prelude::*;

    const IDLE_POLL: Duration = Duration::from_secs(3);

    fn ms(ms: u64) -> Mono {
        Mono::from_millis(ms)
    }

    fn answer(got: usize) -> Event {
        Event::Answered {
            brought: got > 0,
            full: got >= 4,
        }
    }

    /// Asleep since 0, next look at 3 s.
    fn sleeper() -> Poller {
        let mut poller = Poller::new(IDLE_POLL);
        assert_eq!(
            poller.on(ms(0), Event::Tick, 0.5),
            [SetSleeping(true), Claim]
        );
        assert_eq!(poller.on(ms(0), answer(0), 0.5), []);
        assert_eq!(
            poller.on(ms(0), Event::FlagWritten(true), 0.5),
            [Claim],
            "looks once more"
        );
        assert_eq!(poller.on(ms(0), answer(0), 0.5), []);
        assert_eq!(poller.wake_at(), Some(ms(3000)));
        poller
    }

    #[test]
    fn a_lone_job_costs_one_claim_and_no_flag() {
        let mut poller = sleeper();
        assert_eq!(poller.on(ms(1000), Event::Woken, 0.5), [Claim]);
        assert_eq!(poller.on(ms(1001), answer(1), 0.5), []);
        assert_eq!(poller.wake_at(), Some(ms(4001)));
    }

    #[test]
    fn woken_during_a_claim_it_looks_again() {
        let mut poller = sleeper();
        poller.on(ms(1000), Event::Woken, 0.5);
        assert_eq!(poller.on(ms(1000), Event::Woken, 0.5), []);
        assert_eq!(poller.on(ms(1001), answer(0), 0.5), [Claim]);
    }

    #[test]
    fn the_idle_look_has_jitter() {
        for (random, due) in [(0.0, 2250), (0.999, 3748)] {
            let mut poller = Poller::new(IDLE_POLL);
            poller.on(ms(0), Event::Tick, random);
            poller.on(ms(0), answer(0), random);
            poller.on(ms(0), Event::FlagWritten(true), random);
            poller.on(ms(0), answer(0), random);
            assert_eq!(poller.wake_at(), Some(ms(due)));
        }
    }

    #[test]
    fn full_batches_follow_each_other_and_quiet_brings_sleep() {
        let mut poller = sleeper();
        poller.on(ms(3000), Event::Tick, 0.5);
        assert_eq!(poller.on(ms(3000), answer(4), 0.5), [SetSleeping(false)]);
        assert_eq!(poller.on(ms(3001), Event::Tick, 0.5), [Claim]);
        poller.on(ms(3000), Event::FlagWritten(false), 0.5);
        let mut now = 3001;
        let mut waits = vec![];
        assert_eq!(poller.on(ms(now), answer(1), 0.5), []);
        while poller.mode != Mode::Idle {
            let due = poller.wake_at().map_or(0, Mono::millis);
            waits.push(due - now);
            now = due;
            assert_eq!(poller.on(ms(now), Event::Tick, 0.5), [Claim]);
            let after = poller.on(ms(now), answer(0), 0.5);
            assert_eq!(
                after.contains(&SetSleeping(true)),
                poller.mode == Mode::Idle
            );
        }
        assert_eq!(waits[..6], [5, 10, 20, 40, 50, 50]);
        assert!((3501..3560).contains(&now), "{now}");
    }

    #[test]
    fn without_a_free_slot_it_waits_and_then_claims_at_once() {
        let mut poller = sleeper();
        poller.on(ms(3000), Event::Tick, 0.5);
        poller.on(ms(3000), Event::Free(false), 0.5);
        assert_eq!(poller.on(ms(3000), answer(4), 0.5), [SetSleeping(false)]);
        poller.on(ms(3000), Event::FlagWritten(false), 0.5);
        assert_eq!(poller.wake_at(), None);
        assert_eq!(poller.on(ms(9000), Event::Free(true), 0.5), [Claim]);
    }

    #[test]
    fn failures_do_not_spin() {
        let mut poller = sleeper();
        poller.on(ms(3000), Event::Tick, 0.5);
        assert_eq!(poller.on(ms(3000), Event::Failed, 0.5), []);
        assert_eq!(poller.wake_at(), Some(ms(6000)));
        assert_eq!(
            poller.on(ms(3001), Event::Registered, 0.5),
            [SetSleeping(true), Claim]
        );
        assert_eq!(poller.on(ms(3001), Event::FlagFailed, 0.5), []);
        assert_eq!(poller.on(ms(3001), answer(0), 0.5), []);
        assert_eq!(poller.wake_at(), Some(ms(6001)));
    }

    #[test]
    fn new_lanes_are_named_by_a_new_flag_and_looked_for_at_once() {
        let mut poller = sleeper();
        assert_eq!(
            poller.on(ms(900), Event::LanesChanged, 0.5),
            [SetSleeping(true), Claim]
        );
        // Newer ones while that flag is being written.
        assert_eq!(poller.on(ms(901), Event::LanesChanged, 0.5), []);
        assert_eq!(poller.on(ms(902), Event::FlagWritten(true), 0.5), []);
        assert_eq!(poller.on(ms(903), answer(0), 0.5), [Claim]);
        assert_eq!(poller.wake_at(), Some(ms(1400)));
        assert_eq!(poller.on(ms(1400), Event::Tick, 0.5), [SetSleeping(true)]);
    }

    fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
        let event = prop_oneof![
            Just(Event::Woken),
            any::<bool>().prop_map(Event::Free),
            (0_usize..5).prop_map(answer),
            Just(Event::Failed),
            any::<bool>().prop_map(Event::FlagWritten),
            Just(Event::FlagFailed),
            Just(Event::LanesChanged),
            Just(Event::Registered),
            Just(Event::Tick),
        ];
        prop::collection::vec((0_u64..300, event), 1..200)
    }

    proptest! {
        #[test]
        fn one_claim_at_a_time_and_two_flags_a_second(events in events(), random in 0.0..1.0) {
            let mut poller = Poller::new(IDLE_POLL);
            let (mut now, mut claiming, mut flags) = (ms(0), false, vec![]);
            for (wait, event) in events {
                now = now + Duration::from_millis(wait);
                if matches!(event, Event::Answered { .. } | Event::Failed | Event::Registered) {
                    claiming = false;
                }
                for command in poller.on(now, event, random) {
                    match command {
                        Claim => prop_assert!(!std::mem::replace(&mut claiming, true) && poller.free),
                        SetSleeping(_) => flags.push(now),
                    }
                }
                prop_assert!(!poller.free || claiming || poller.wake_at() <= Some(now + IDLE_POLL.mul_f64(1.25)));
            }
            for three in flags.windows(3) {
                prop_assert!(three[2] - three[0] >= Duration::from_secs(1));
            }
        }
    }
}
