//! How a daemon stops.
//!
//! ```text
//!   Running ── signal ──► Draining ── deadline or signal ──► Killing
//!                             │ no handler lives                │ no handler lives, or its time is over
//!                             └──────────► Releasing ◄──────────┘
//!                                              │ all is confirmed, its time is over, or signal
//!                                              ▼
//!                                           Stopped
//! ```
//!
//! *Draining*: nothing is claimed, what waits is given back at once, handlers finish. *Killing*: they get TERM, their grace,
//! KILL. *Releasing*: what ended is written and what did not finish is given back; only now, because a job may start
//! elsewhere as soon as it is given back. A handler that cannot be killed is never given back: its lease ends by itself.
//!
//! Each signal after the first shortens what goes on, so the third or fourth ends the process whatever happens.

use crate::time::Mono;
use std::time::Duration;

/// What the killing takes beyond the grace: signals, reaping.
const REAP: Duration = Duration::from_secs(2);
/// How long the last statements may take when the drain's own time is over.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Something that the shell has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// SIGTERM, SIGINT or a request through the API.
    Signal,
    /// How things stand; sent at each change.
    Left {
        /// Handlers that are not known to be dead.
        handlers: usize,
        /// Ended or waiting jobs whose end or return the database has not confirmed.
        unconfirmed: usize,
    },
    /// Time has passed.
    Tick,
}

/// Something that the shell is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Claim nothing more, and give back what was claimed and has not started.
    StopClaiming,
    /// Kill all handlers that live with at most this grace; a second one may only shorten it.
    Kill {
        /// Between TERM and KILL.
        grace: Duration,
    },
    /// Give back what was killed, and send what is not confirmed.
    Release,
    /// Leave: `clean` when every job that was held is ended or given back, and the database has confirmed it.
    Exit {
        /// Exit code 0, else 1.
        clean: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Draining {
        deadline: Mono,
    },
    Killing {
        until: Mono,
        deadline: Mono,
        sharp: bool,
    },
    Releasing {
        until: Mono,
    },
    Stopped,
}

/// Decides how a daemon stops. See the module for its states.
#[derive(Debug)]
pub struct Drain {
    timeout: Duration,
    kill_grace: Duration,
    state: State,
    handlers: usize,
    unconfirmed: usize,
}

impl Drain {
    /// With `worker.drain_timeout` and the longest `kill_grace` of any handler.
    #[must_use]
    pub fn new(timeout: Duration, kill_grace: Duration) -> Self {
        Self {
            timeout,
            kill_grace,
            state: State::Running,
            handlers: 0,
            unconfirmed: 0,
        }
    }

    /// Whether a stop has begun: nothing may be claimed or started any more.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.state != State::Running
    }

    /// When the drain wants to be called even if nothing happens.
    #[must_use]
    pub fn wake_at(&self) -> Option<Mono> {
        match self.state {
            State::Draining { deadline: at }
            | State::Killing { until: at, .. }
            | State::Releasing { until: at } => Some(at),
            State::Running | State::Stopped => None,
        }
    }

    /// Takes in an event and says what to do.
    pub fn on(&mut self, now: Mono, event: Event) -> Vec<Command> {
        let mut out = Vec::new();
        match event {
            Event::Signal => self.signal(now, &mut out),
            Event::Left {
                handlers,
                unconfirmed,
            } => (self.handlers, self.unconfirmed) = (handlers, unconfirmed),
            Event::Tick => {}
        }
        if let State::Draining { deadline } = self.state
            && self.handlers > 0
            && now >= deadline
        {
            self.kill(now, deadline, self.kill_grace, &mut out);
        }
        let after_handlers = match self.state {
            State::Draining { deadline } if self.handlers == 0 => Some(deadline),
            State::Killing {
                until, deadline, ..
            } if self.handlers == 0 || now >= until => Some(deadline),
            _ => None,
        };
        if let Some(deadline) = after_handlers {
            self.state = State::Releasing {
                until: deadline.max(now + LAST_WORDS),
            };
            out.push(Command::Release);
        }
        if let State::Releasing { until } = self.state
            && (self.handlers == 0 && self.unconfirmed == 0 || now >= until)
        {
            self.exit(&mut out);
        }
        out
    }

    fn signal(&mut self, now: Mono, out: &mut Vec<Command>) {
        match self.state {
            State::Running => {
                self.state = State::Draining {
                    deadline: now + self.timeout,
                };
                out.push(Command::StopClaiming);
            }
            State::Draining { .. } if self.handlers > 0 => {
                self.kill(now, now, self.kill_grace, out);
            }
            State::Killing {
                deadline,
                sharp: false,
                ..
            } => {
                self.kill(now, deadline, Duration::ZERO, out);
            }
            State::Killing { sharp: true, .. } | State::Releasing { .. } => self.exit(out),
            State::Draining { .. } | State::Stopped => {}
        }
    }

    fn kill(&mut self, now: Mono, deadline: Mono, grace: Duration, out: &mut Vec<Command>) {
        let sharp = grace.is_zero();
        self.state = State::Killing {
            until: now + grace + REAP,
            deadline,
            sharp,
        };
        out.push(Command::Kill { grace });
    }

    fn exit(&mut self, out: &mut Vec<Command>) {
        self.state = State::Stopped;
        out.push(Command::Exit {
            clean: self.handlers == 0 && self.unconfirmed == 0,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRACE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Mono {
        Mono::from_millis(seconds * 1000)
    }

    fn left(handlers: usize, unconfirmed: usize) -> Event {
        Event::Left {
            handlers,
            unconfirmed,
        }
    }

    /// Signalled at 0 with these left; the deadline is at 25 s.
    fn draining(handlers: usize, unconfirmed: usize) -> (Drain, Vec<Command>) {
        let mut drain = Drain::new(Duration::from_secs(25), GRACE);
        drain.on(at(0), left(handlers, unconfirmed));
        let commands = drain.on(at(0), Event::Signal);
        (drain, commands)
    }

    #[test]
    fn with_nothing_to_do_it_leaves_at_once() {
        let (_, commands) = draining(0, 0);
        assert_eq!(
            commands,
            [
                Command::StopClaiming,
                Command::Release,
                Command::Exit { clean: true }
            ]
        );
    }

    #[test]
    fn handlers_that_finish_in_time_are_written_and_left_in_peace() {
        let (mut drain, commands) = draining(2, 3);
        assert_eq!(commands, [Command::StopClaiming]);
        assert_eq!(drain.on(at(7), left(0, 2)), [Command::Release]);
        assert_eq!(drain.on(at(8), left(0, 0)), [Command::Exit { clean: true }]);
    }

    #[test]
    fn the_deadline_kills_and_gives_back_when_all_are_dead() {
        let (mut drain, _) = draining(1, 0);
        assert_eq!(drain.wake_at(), Some(at(25)));
        assert_eq!(
            drain.on(at(25), Event::Tick),
            [Command::Kill { grace: GRACE }]
        );
        assert_eq!(drain.on(at(35), left(0, 1)), [Command::Release]);
        assert_eq!(
            drain.on(at(36), left(0, 0)),
            [Command::Exit { clean: true }]
        );
    }

    #[test]
    fn without_a_primary_it_tries_until_the_deadline() {
        let (mut drain, _) = draining(0, 4);
        assert_eq!(drain.on(at(24), Event::Tick), []);
        assert_eq!(
            drain.on(at(25), Event::Tick),
            [Command::Exit { clean: false }]
        );
    }

    #[test]
    fn each_further_signal_shortens() {
        let (mut drain, _) = draining(1, 0);
        assert_eq!(
            drain.on(at(1), Event::Signal),
            [Command::Kill { grace: GRACE }]
        );
        assert_eq!(
            drain.on(at(2), Event::Signal),
            [Command::Kill {
                grace: Duration::ZERO
            }]
        );
        assert_eq!(
            drain.on(at(2), Event::Signal),
            [Command::Exit { clean: false }]
        );
        assert_eq!(drain.on(at(2), Event::Signal), []);
    }

    #[test]
    fn a_handler_that_cannot_be_killed_is_not_waited_for_without_end() {
        let (mut drain, _) = draining(1, 0);
        drain.on(at(25), Event::Tick);
        assert_eq!(drain.on(at(37), Event::Tick), [Command::Release]);
        assert_eq!(
            drain.on(at(42), Event::Tick),
            [Command::Exit { clean: false }]
        );
    }

    proptest! {
        #[test]
        fn it_ends_in_bounded_time_and_once(
            events in prop::collection::vec((0_u64..9, prop_oneof![
                1 => Just(Event::Signal),
                6 => (0_usize..3, 0_usize..3).prop_map(|(h, u)| left(h, u)),
            ]), 0..60),
        ) {
            let mut drain = Drain::new(Duration::from_secs(25), GRACE);
            let (mut now, mut exits) = (0, 0);
            let mut exit = |commands: Vec<Command>| {
                exits += commands.iter().filter(|c| matches!(c, Command::Exit { .. })).count();
            };
            for (wait, event) in events {
                now += wait;
                exit(drain.on(at(now), event));
            }
            exit(drain.on(at(now), Event::Signal));
            for _ in 0..3 {
                if let Some(wake) = drain.wake_at() {
                    exit(drain.on(wake, Event::Tick));
                }
            }
            prop_assert_eq!(exits, 1);
            prop_assert!(drain.has_begun() && drain.wake_at().is_none());
        }
    }
}
