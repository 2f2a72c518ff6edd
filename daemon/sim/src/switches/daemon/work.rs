//! Claims, handlers, and the ends of runs.

use super::super::network::{Event as Outer, Happening, Network, Notice, Seen, Ticket};
use super::super::server::{Answer, JOB_TYPE, Statement};
use super::super::world::Fault;
use super::{Daemon, Ended, Handler, Open};
use tenure_core::ids::{Beat, Call, JobId, Token};
use tenure_core::lease::command::Start;
use tenure_core::lease::event::Event;
use tenure_core::model::{
    Asked, Claimed, End, EndAnswer, Memory, Moment, NewJob, Refused, RunEnd, Statement as Said,
};
use tenure_core::time::Mono;
use uuid::Uuid;

const SLOTS: usize = 3;
/// How long the daemon waits for claims and ends.
const STATEMENT_TIMEOUT: u64 = 5_000;
const RETRY_AFTER: i64 = 1_500;

/// The follow-up job of a run, if it has one: its id is made once, by the run.
pub(crate) fn follow_up(token: Token) -> Option<JobId> {
    let number = token.0.as_u128();
    number
        .is_multiple_of(3)
        .then_some(JobId(Uuid::from_u128(1 << 101 | number)))
}

/// Whether a job is a follow-up, and of which run.
pub(crate) fn followed(job: JobId) -> Option<Token> {
    let number = job.0.as_u128();
    (number >> 101 == 1).then_some(Token(Uuid::from_u128(number & !(1 << 101))))
}

impl Daemon {
    pub(super) fn sweep(&mut self, net: &mut Network) {
        if let Some((worker, epoch)) = self.keeper.member() {
            self.say(
                net,
                Ticket::Sweep { worker, epoch },
                Statement::Sweep { epoch },
                STATEMENT_TIMEOUT,
            );
        }
        let again = net.now + net.random.within(900..1_100);
        self.notice_at(net, again, Notice::SweepTime);
    }

    /// Claims what there is a slot for, and says what has ended.
    pub(super) fn dispatch(&mut self, net: &mut Network) {
        let now = self.mono(net);
        if self.handlers.len() < SLOTS
            && self.claims.is_empty()
            && !self.draining
            && let Some((worker, epoch)) = self.keeper.member()
            && let Some(call) = self.keeper.claim(now)
        {
            self.claims.insert(call);
            let limit = i32::try_from(SLOTS - self.handlers.len()).unwrap_or(0);
            let statement = Statement::Claim {
                worker,
                epoch,
                call,
                limit,
            };
            self.say(
                net,
                Ticket::Claim {
                    worker,
                    epoch,
                    call,
                },
                statement,
                STATEMENT_TIMEOUT,
            );
        }
        self.say_ends(net);
        if self.draining
            && self.handlers.is_empty()
            && self.open.is_empty()
            && self.claims.is_empty()
        {
            if let Some((worker, epoch)) = self.keeper.member() {
                let statement = Statement::Leave { worker, epoch };
                self.say(net, Ticket::Leave, statement, STATEMENT_TIMEOUT);
            }
            self.exit(net);
            return;
        }
        let again = net.now + net.random.within(150..900);
        self.notice_at(net, again, Notice::Dispatch);
    }

    fn say_ends(&mut self, net: &mut Network) {
        let Some((worker, epoch)) = self.keeper.member() else {
            return;
        };
        let mut ends = Vec::new();
        for open in self.open.values_mut().filter(|open| !open.under_way) {
            // It may be locked by a user's transaction: busy, and said again.
            if !net.mishap(10) {
                open.under_way = true;
                ends.push(open.ended.end.clone());
            }
        }
        if !ends.is_empty() {
            let ticket = Ticket::End {
                worker,
                epoch,
                connection: self.connection,
                tokens: ends.iter().map(|end| end.token).collect(),
            };
            self.say(
                net,
                ticket,
                Statement::End { epoch, ends },
                STATEMENT_TIMEOUT,
            );
        }
    }

    pub(super) fn claimed(
        &mut self,
        net: &mut Network,
        call: Call,
        jobs: Vec<(Claimed, Asked)>,
        at: Moment,
        astray: bool,
    ) {
        self.claims.remove(&call);
        let pairs: Vec<_> = jobs.iter().map(|(job, _)| (job.job, job.token)).collect();
        for (claimed, asked) in jobs {
            let memory = Memory {
                job: claimed.job,
                run: claimed.run,
                token: claimed.token,
                call,
                attempt: claimed.attempt,
                max_attempts: claimed.max_attempts,
                epoch_no: self.epoch_no,
                started_at: at,
                until_ms: None,
                asked: Some(asked),
                rerun: false,
            };
            self.waiting.insert(claimed.token, memory);
        }
        let jobs = pairs.clone();
        self.tell(net, Event::ClaimAnswered { call, jobs });
        let now = self.mono(net);
        for (_, token) in pairs {
            // What is no longer waiting was given back by the keeper's order just now.
            let Some(memory) = self.waiting.remove(&token) else {
                continue;
            };
            match self.keeper.try_start(now, token) {
                Start::Go => {
                    self.see_claimed(net, memory.job, astray);
                    self.spawn(net, memory, astray);
                }
                Start::Release => {
                    self.see_claimed(net, memory.job, astray);
                    let mut end = run_end(&memory, End::Released);
                    end.delay = 1_000;
                    self.end(Ended { memory, end });
                }
                Start::Gone => {}
            }
        }
    }

    /// These are given back: they have not started and will not.
    pub(super) fn release(&mut self, tokens: &[Token]) {
        for token in tokens {
            if let Some(memory) = self.waiting.remove(token) {
                let end = run_end(&memory, End::Released);
                self.end(Ended { memory, end });
            }
        }
    }

    fn see_claimed(&self, net: &mut Network, job: JobId, astray: bool) {
        let daemon = self.index;
        net.seen.push(Seen::Claimed {
            daemon,
            job,
            astray,
        });
    }

    fn spawn(&mut self, net: &mut Network, memory: Memory, astray: bool) {
        let (job, token) = (memory.job, memory.token);
        self.held.insert(token, memory);
        let obeys = net.random.chance(50);
        self.handlers.insert(token, Handler { job, obeys });
        net.seen.push(Seen::Started {
            daemon: self.index,
            host: self.host.unwrap_or_default(),
            job,
            token,
            astray,
        });
        let longest = match net.random.within(0..10) {
            _ if net.now > net.peace_at => 2_000,
            0..6 => 4_000,
            6..9 => 30_000,
            _ => 120_000,
        };
        let end = net.now + net.random.within(100..longest);
        let (daemon, happening) = (self.index, Happening::HandlerFinished(token));
        net.at(end, Outer::Machine { daemon, happening });
    }

    pub(super) fn handler_ends(&mut self, net: &mut Network, token: Token, killed: bool) {
        if let Some(handler) = self.handlers.remove(&token) {
            let job = handler.job;
            net.seen.push(Seen::Dead { job, token });
            let reaped = net.now + net.random.within(0..50);
            self.notice_at(net, reaped, Notice::Reaped { token, killed });
        }
    }

    pub(super) fn reaped(&mut self, net: &mut Network, token: Token, killed: bool) {
        let kind = match killed {
            true => End::Released,
            false if net.now < net.peace_at => match net.random.within(0..100) {
                0..15 => End::Failed {
                    last: net.random.chance(20),
                },
                15..20 => End::Snoozed,
                _ => End::Completed,
            },
            false => End::Completed,
        };
        if let Some(memory) = self.held.remove(&token) {
            let end = run_end(&memory, kind);
            self.end(Ended { memory, end });
        }
        self.tell(net, Event::Ended { token });
    }

    fn end(&mut self, ended: Ended) {
        let under_way = false;
        self.open.insert(ended.end.token, Open { ended, under_way });
    }

    pub(super) fn ended(
        &mut self,
        net: &mut Network,
        connection: u64,
        answers: Vec<(Token, EndAnswer)>,
        astray: bool,
    ) {
        // A new primary has been told that these are held: what the old one says of them comes too late.
        if connection != self.connection {
            return;
        }
        let now = self.mono(net);
        let tokens = answers.iter().map(|(token, _)| *token).collect();
        for (token, answer) in answers {
            let Some(Open { ended, .. }) = self.open.remove(&token) else {
                continue;
            };
            let counts = match answer {
                EndAnswer::Done(status) => status == "completed",
                EndAnswer::Known => true,
                EndAnswer::History => false,
            };
            if counts && ended.end.end == End::Completed {
                net.seen.push(Seen::Completed {
                    daemon: self.index,
                    job: ended.end.job,
                    token,
                    astray,
                });
            }
            if answer != EndAnswer::History {
                self.remember(now, ended);
            }
        }
        self.tell(net, Event::Confirmed { tokens });
    }

    pub(super) fn remember(&mut self, now: Mono, ended: Ended) {
        let sent = match self.world.fault {
            Fault::MemoryOff => return,
            Fault::BucketTooEarly => Beat(self.sent.0 - 1),
            _ => self.sent,
        };
        self.memory.answered(now, sent, ended);
    }

    /// Everything that is not answered will be said again.
    pub(super) fn say_again(&mut self, tokens: &[Token]) {
        for token in tokens {
            if let Some(open) = self.open.get_mut(token) {
                open.under_way = false;
            }
        }
    }

    /// What a re-attach says of what is held and of what has ended but is not confirmed. No claim call is ever as high as that of
    /// the latter, so that no beat takes it for an unanswered one.
    pub(super) fn holds(&self) -> Vec<Said> {
        let held = self.held.values().cloned();
        let open = self.open.values().map(|open| Memory {
            call: Call(i64::MAX),
            ..open.ended.memory.clone()
        });
        held.chain(open)
            .map(|memory| self.said(Said::Hold(memory)))
            .collect()
    }

    /// What a server that shows this beat may lack.
    pub(super) fn remembered(&self, found: Option<Beat>) -> Vec<Said> {
        let ended = self.memory.after(found);
        ended
            .map(|ended| {
                self.said(Said::Ended {
                    memory: ended.memory.clone(),
                    end: ended.end.clone(),
                    confirmed: true,
                })
            })
            .collect()
    }

    fn said(&self, mut said: Said) -> Said {
        if self.world.fault == Fault::OrderedByAttempt {
            match &mut said {
                Said::Hold(memory) => memory.run.0 = memory.attempt,
                Said::Ended { memory, end, .. } => {
                    memory.run.0 = memory.attempt;
                    end.run.0 = memory.attempt;
                }
            }
        }
        said
    }

    pub(super) fn claim_failed(&mut self, net: &mut Network, call: Call) {
        if self.claims.remove(&call) {
            self.tell(net, Event::ClaimGivenUp { call });
        }
    }
}

/// The end of a run. A completion has its follow-up with it.
fn run_end(memory: &Memory, end: End) -> RunEnd {
    let follow_ups =
        follow_up(memory.token).filter(|_| end == End::Completed && followed(memory.job).is_none());
    RunEnd {
        job: memory.job,
        run: memory.run,
        token: memory.token,
        end,
        delay: match end {
            End::Failed { .. } | End::Snoozed => RETRY_AFTER,
            _ => 0,
        },
        result: None,
        follow_ups: follow_ups.map(|id| new_job(Some(id))).into_iter().collect(),
        watermark: None,
    }
}

/// A job as producers and handlers enqueue it.
pub(crate) fn new_job(id: Option<JobId>) -> NewJob {
    NewJob {
        id,
        job_type: JOB_TYPE.into(),
        tenant: String::new(),
        priority: 0,
        run_at: None,
        unique_key: None,
        max_attempts: None,
        watermark: None,
    }
}

/// Whether this answer says that the worker is gone.
pub(super) fn is_gone(answer: &Answer) -> bool {
    matches!(answer, Answer::Refused(Refused::WorkerGone))
}
