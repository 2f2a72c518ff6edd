//! The queue of events, and the fate of each message.
//!
//! Most messages take some milliseconds, some take seconds, a few are lost. Within a partition all are lost, and some are
//! carried out long after nobody waits for the answer any more, as on a half-open connection.

use crate::database::{Answer, Statement};
use crate::queue::Queue;
use crate::random::Random;
use std::collections::BTreeMap;
use std::ops::Range;
use tenure_core::ids::{Beat, Call, JobId, Token, WorkerId};
use tenure_core::time::Mono;

/// What a statement was about, so that its answer finds its way.
#[derive(Clone, Debug)]
pub(crate) enum Ticket {
    Register { worker: WorkerId, asked_at: Mono },
    Beat { worker: WorkerId, beat: Beat },
    Claim { worker: WorkerId, call: Call },
    End { tokens: Vec<Token> },
    Sweep,
}

/// What a daemon's process notices.
#[derive(Clone, Debug)]
pub(crate) enum Notice {
    Wake,
    Dispatch,
    SweepTime,
    Answer(Ticket, Answer),
    GivenUp(Ticket),
    Reaped { token: Token, killed: bool },
    GraceOver(Token),
}

/// What happens on a machine whether or not its daemon runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happening {
    HandlerFinished(Token),
    HandlerDies(Token),
    GuardLooks,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    FreezeDaemon {
        machine: usize,
        until: u64,
    },
    FreezeMachine {
        machine: usize,
        until: u64,
        clock_runs: bool,
    },
    Crash {
        machine: usize,
    },
    FreezeServer {
        until: u64,
    },
    SetClock {
        by: i64,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Arrives {
        machine: usize,
        incarnation: u32,
        ticket: Ticket,
        statement: Statement,
        answer_after: Option<u64>,
    },
    Process {
        machine: usize,
        incarnation: u32,
        notice: Notice,
    },
    Machine {
        machine: usize,
        happening: Happening,
    },
    Restart {
        machine: usize,
    },
    Trouble(Trouble),
    Enqueue,
    Cancel {
        job: usize,
    },
}

/// The outside of the machines: time, messages, chance, and the register of living handlers.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) now: u64,
    pub(crate) random: Random,
    /// From then on nothing goes wrong.
    pub(crate) peace_at: u64,
    /// When each machine is cut off.
    pub(crate) partitions: Vec<Vec<Range<u64>>>,
    /// Handlers started since the simulation last looked.
    pub(crate) starts: Vec<(JobId, Token)>,
    /// How many handlers of each job live.
    pub(crate) living: BTreeMap<JobId, u32>,
    queue: Queue<Event>,
    last_worker: u128,
}

impl Network {
    pub(crate) fn new(random: Random, peace_at: u64) -> Self {
        Self {
            now: 0,
            random,
            peace_at,
            partitions: Vec::new(),
            starts: Vec::new(),
            living: BTreeMap::new(),
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
        WorkerId(uuid::Uuid::from_u128(self.last_worker))
    }

    /// How late a timer is noticed: hardly, or almost by the second that the margin allows.
    pub(crate) fn lag(&mut self) -> u64 {
        let late = self.now < self.peace_at && self.random.chance(20);
        self.random.within(if late { 0..1_000 } else { 0..5 })
    }

    pub(crate) fn send(
        &mut self,
        machine: usize,
        incarnation: u32,
        ticket: Ticket,
        statement: Statement,
    ) {
        let trouble = self.now < self.peace_at;
        let cut_until = self.cut(machine, self.now);
        let (arrival, answer_after) = match cut_until {
            Some(until) if self.random.chance(30) => {
                let late = self.now + self.random.within(1_000..15_000);
                (if self.random.chance(50) { late } else { until }, None)
            }
            Some(_) => return,
            None if trouble && self.random.chance(2) => return,
            None => {
                let answer = (!trouble || self.random.chance(97)).then(|| self.delay());
                (self.now + self.delay(), answer)
            }
        };
        self.at(
            arrival,
            Event::Arrives {
                machine,
                incarnation,
                ticket,
                statement,
                answer_after,
            },
        );
    }

    pub(crate) fn answer(
        &mut self,
        machine: usize,
        incarnation: u32,
        after: u64,
        ticket: Ticket,
        answer: Answer,
    ) {
        let arrival = self.now + after;
        if self.cut(machine, self.now).is_none() && self.cut(machine, arrival).is_none() {
            let notice = Notice::Answer(ticket, answer);
            self.at(
                arrival,
                Event::Process {
                    machine,
                    incarnation,
                    notice,
                },
            );
        }
    }

    fn delay(&mut self) -> u64 {
        let slow = self.now < self.peace_at && self.random.chance(12);
        self.random.within(if slow { 30..8_000 } else { 1..30 })
    }

    fn cut(&self, machine: usize, time: u64) -> Option<u64> {
        let cut = self.partitions[machine]
            .iter()
            .find(|cut| cut.contains(&time));
        cut.map(|cut| cut.end)
    }
}
