//! The outside of the daemons: time, chance, messages, and what the judge has to see.
//!
//! Most messages take some milliseconds, some take seconds, a few are lost. While a daemon is cut off from a server all between
//! them are lost, and some are carried out long after nobody waits for the answer any more, as on a half-open connection.

use std::collections::BTreeSet;
use std::ops::Range;

use super::cluster::SERVERS;
use super::server::{Answer, Statement};
use crate::queue::Queue;
use crate::random::Random;
use tenure_core::ids::{Beat, Call, Epoch, JobId, Token, WorkerId};
use tenure_core::primary::Sight;
use tenure_core::time::Mono;
use uuid::Uuid;

/// What a statement was about, so that its answer finds its way.
#[derive(Clone, Debug)]
pub(crate) enum Ticket {
    Register {
        worker: WorkerId,
        asked_at: Mono,
    },
    /// What a predecessor, or the same process as another worker, left to say.
    Succeed {
        worker: WorkerId,
        epoch: Epoch,
        epoch_no: i64,
        asked_at: Mono,
    },
    Open {
        worker: WorkerId,
        asked_at: Mono,
    },
    Reattach {
        worker: WorkerId,
        epoch: Epoch,
        epoch_no: i64,
        asked_at: Mono,
        /// The beat that the database showed before.
        found: Option<Beat>,
        tokens: Vec<Token>,
    },
    Beat {
        worker: WorkerId,
        epoch: Epoch,
        beat: Beat,
    },
    Claim {
        worker: WorkerId,
        epoch: Epoch,
        call: Call,
    },
    End {
        worker: WorkerId,
        epoch: Epoch,
        connection: u64,
        tokens: Vec<Token>,
    },
    Sweep {
        worker: WorkerId,
        epoch: Epoch,
    },
    Leave,
}

/// What a daemon's process notices.
#[derive(Clone, Debug)]
pub(crate) enum Notice {
    Wake,
    Dispatch,
    SweepTime,
    ProbeTime,
    Sighted {
        round: u64,
        host: usize,
        sight: Sight,
    },
    RoundOver(u64),
    /// `astray`: from a primary that was none any more.
    Answer {
        ticket: Ticket,
        answer: Answer,
        astray: bool,
    },
    GivenUp(Ticket),
    Reaped {
        token: Token,
        killed: bool,
    },
    GraceOver(Token),
    Stop,
    StopNow,
}

/// What happens to a machine whether or not its daemon runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happening {
    HandlerFinished(Token),
    HandlerDies(Token),
    GuardLooks,
}

/// What goes wrong, or right again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    FreezeDaemon {
        daemon: usize,
        until: u64,
    },
    Crash {
        daemon: usize,
    },
    Stop {
        daemon: usize,
    },
    Cut {
        host: usize,
    },
    Heal {
        host: usize,
    },
    Fall(Fall),
    Promote {
        old: usize,
    },
    Follow {
        host: usize,
    },
    /// A server that is down, or should be no primary any more, is there again.
    Return {
        host: usize,
        lacks: usize,
    },
    ReturnClean {
        host: usize,
    },
    Peace,
}

/// What happens to the present primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fall {
    /// It is killed and another is promoted.
    Killed,
    /// Its host is lost: connections are not even refused. Another is promoted.
    Frozen,
    /// It hands over to a standby that has all.
    Demoted,
    /// It stays writable beside the one that is promoted.
    Overtaken,
    /// It is killed and comes up again itself.
    Crashed,
    /// It is stopped and started.
    Restarted,
    /// It is frozen and goes on.
    Paused,
}

/// An event.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Arrives {
        daemon: usize,
        incarnation: u32,
        host: usize,
        ticket: Ticket,
        statement: Statement,
        answers: bool,
    },
    Probed {
        daemon: usize,
        incarnation: u32,
        host: usize,
        round: u64,
        worker: Option<WorkerId>,
    },
    Process {
        daemon: usize,
        incarnation: u32,
        notice: Notice,
    },
    Machine {
        daemon: usize,
        happening: Happening,
    },
    Restart {
        daemon: usize,
    },
    Trouble(Trouble),
    Enqueue {
        named: bool,
        id: JobId,
    },
    Cancel,
    RetryDead,
}

/// What the judge has to see.
#[derive(Clone, Debug)]
pub(crate) enum Seen {
    Claimed {
        daemon: usize,
        job: JobId,
        astray: bool,
    },
    Started {
        daemon: usize,
        host: usize,
        job: JobId,
        token: Token,
        astray: bool,
    },
    Dead {
        job: JobId,
        token: Token,
    },
    /// The completion of this run was confirmed.
    Completed {
        daemon: usize,
        job: JobId,
        token: Token,
        astray: bool,
    },
    /// Trust was renewed by a primary; by one that is none any more, if `astray`.
    Confirmed {
        daemon: usize,
        astray: bool,
    },
    /// Trust was renewed by a proof, for which the servers were asked then.
    Proved {
        daemon: usize,
        asked: u64,
    },
    /// The process has ended, and its disk keeps the ends of these jobs; `forgets`: it has none.
    Ended {
        daemon: usize,
        keeps: BTreeSet<JobId>,
        forgets: bool,
    },
    Distrusted(u64),
    Succeeded,
}

#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) now: u64,
    pub(crate) random: Random,
    /// From then on nothing goes wrong.
    pub(crate) peace_at: u64,
    pub(crate) bad: bool,
    /// When each daemon is cut off from each server.
    pub(crate) partitions: Vec<[Vec<Range<u64>>; SERVERS]>,
    pub(crate) seen: Vec<Seen>,
    queue: Queue<Event>,
    last_worker: u128,
}

impl Network {
    pub(crate) fn new(random: Random, peace_at: u64, bad: bool) -> Self {
        Self {
            now: 0,
            random,
            peace_at,
            bad,
            partitions: Vec::new(),
            seen: Vec::new(),
            queue: Queue::new(),
            last_worker: 0,
        }
    }

    pub(crate) fn at(&mut self, time: u64, event: Event) {
        self.queue.at(time.max(self.now), event);
    }

    /// The next event up to `end`, with its time as the present.
    pub(crate) fn next(&mut self, end: u64) -> Option<Event> {
        let (time, event) = self.queue.next()?;
        if time > end {
            return None;
        }
        self.now = time;
        Some(event)
    }

    pub(crate) fn fresh_worker(&mut self) -> WorkerId {
        self.last_worker += 1;
        WorkerId(Uuid::from_u128(1 << 102 | self.last_worker))
    }

    fn trouble(&self) -> bool {
        self.bad && self.now < self.peace_at
    }

    /// True in `percent` of a hundred cases while there is trouble.
    pub(crate) fn mishap(&mut self, percent: u64) -> bool {
        self.trouble() && self.random.chance(percent)
    }

    /// How late a timer is noticed: hardly, or almost by the second that the margin allows.
    pub(crate) fn lag(&mut self) -> u64 {
        let late = self.mishap(15);
        self.random.within(if late { 0..1_000 } else { 0..5 })
    }

    /// Sends a statement on its way.
    pub(crate) fn send(
        &mut self,
        (daemon, incarnation): (usize, u32),
        host: usize,
        ticket: Ticket,
        statement: Statement,
    ) {
        let (arrival, answers) = match self.cut(daemon, host) {
            Some(until) if self.random.chance(25) => {
                let late = self.now + self.random.within(1_000..15_000);
                (if self.random.chance(50) { late } else { until }, false)
            }
            Some(_) => return,
            None if self.mishap(2) => return,
            None => (self.now + self.delay(), !self.mishap(3)),
        };
        self.at(
            arrival,
            Event::Arrives {
                daemon,
                incarnation,
                host,
                ticket,
                statement,
                answers,
            },
        );
    }

    /// Lets a daemon's process notice what came from a server.
    pub(crate) fn bring(
        &mut self,
        (daemon, incarnation): (usize, u32),
        host: usize,
        notice: Notice,
    ) {
        let arrival = self.now + self.delay();
        let cuts = &self.partitions[daemon][host];
        if self.cut(daemon, host).is_none() && !cuts.iter().any(|cut| cut.contains(&arrival)) {
            let event = Event::Process {
                daemon,
                incarnation,
                notice,
            };
            self.at(arrival, event);
        }
    }

    /// Sends a probe.
    pub(crate) fn probe(
        &mut self,
        (daemon, incarnation): (usize, u32),
        host: usize,
        round: u64,
        worker: Option<WorkerId>,
    ) {
        if self.cut(daemon, host).is_none() && !self.mishap(1) {
            let arrival = self.now + self.delay();
            let event = Event::Probed {
                daemon,
                incarnation,
                host,
                round,
                worker,
            };
            self.at(arrival, event);
        }
    }

    fn delay(&mut self) -> u64 {
        let slow = self.mishap(6);
        self.random.within(if slow { 30..8_000 } else { 1..30 })
    }

    /// Until when this daemon is cut off from this server, if it is now.
    fn cut(&self, daemon: usize, host: usize) -> Option<u64> {
        let cut = self.partitions[daemon][host]
            .iter()
            .find(|cut| cut.contains(&self.now));
        cut.map(|cut| cut.end)
    }
}
