//! One machine: a daemon around the real keeper, its guard and its handlers.
//!
//! The daemon stands for the runtime's loops: it claims, starts, kills and writes ends until they are confirmed. The guard
//! kills all handlers when the daemon is gone or has not renewed its trust. Handlers live on without either.

use crate::database::{Answer, End, Item, Statement};
use crate::network::{Event as Outer, Happening, Network, Notice, Ticket};
use crate::world::World;
use std::collections::{BTreeMap, BTreeSet};
use tenure_core::ids::{Call, Epoch, JobId, Run, Token, WorkerId};
use tenure_core::lease::command::{Command, Start, Why};
use tenure_core::lease::event::{Event, Refusal};
use tenure_core::lease::keeper::Keeper;
use tenure_core::time::Mono;
use uuid::Uuid;

const SLOTS: usize = 3;
const EPOCH: Epoch = Epoch(Uuid::from_u128(1));
/// How long the daemon waits for claims and ends. The keeper itself gives up beats and registrations.
const STATEMENT_TIMEOUT: u64 = 5_000;
/// A handler's own grace, used when one job is revoked.
const KILL_GRACE: u64 = 10_000;

#[derive(Debug)]
struct Handler {
    job: JobId,
    /// Ends at TERM, some time within its grace; otherwise only KILL ends it.
    obeys: bool,
}

#[derive(Debug)]
struct Unconfirmed {
    item: Item,
    under_way: bool,
}

#[derive(Debug)]
pub(crate) struct Machine {
    index: usize,
    world: World,
    pub(crate) incarnation: u32,
    pub(crate) running: bool,
    pub(crate) daemon_thaws: u64,
    pub(crate) machine_thaws: u64,
    /// By how much the monotonic clock is behind because it stood still in a freeze.
    pub(crate) clock_behind: u64,
    /// Handlers told to die because trust had ended.
    pub(crate) distrusted: u64,
    keeper: Keeper,
    predecessor: Option<WorkerId>,
    wake: Option<u64>,
    claims: BTreeSet<Call>,
    waiting: Vec<(JobId, Run, Token)>,
    known: BTreeMap<Token, (JobId, Run)>,
    unconfirmed: BTreeMap<Token, Unconfirmed>,
    guard_until: Option<Mono>,
    handlers: BTreeMap<Token, Handler>,
}

impl Machine {
    pub(crate) fn new(index: usize, world: World) -> Self {
        Self {
            index,
            world,
            incarnation: 0,
            running: false,
            daemon_thaws: 0,
            machine_thaws: 0,
            clock_behind: 0,
            distrusted: 0,
            keeper: Keeper::new(world.limits),
            predecessor: None,
            wake: None,
            claims: BTreeSet::new(),
            waiting: Vec::new(),
            known: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            guard_until: None,
            handlers: BTreeMap::new(),
        }
    }

    /// The daemon starts. With a `state_dir` it knows its predecessor, and waits until that one's guard is done.
    pub(crate) fn start(&mut self, net: &mut Network) {
        let state_dir = net.random.chance(50);
        if state_dir && !self.handlers.is_empty() {
            net.at(
                net.now + 500,
                Outer::Restart {
                    machine: self.index,
                },
            );
            return;
        }
        if !state_dir {
            self.predecessor = None;
        }
        self.running = true;
        self.tell(net, Event::Tick);
        self.notice_at(net, net.now, Notice::Dispatch);
        self.notice_at(net, net.now, Notice::SweepTime);
    }

    /// The daemon dies by `kill -9`: its guard kills the handlers, all else is forgotten.
    pub(crate) fn crash(&mut self, net: &mut Network) {
        self.incarnation += 1;
        self.running = false;
        self.daemon_thaws = 0;
        self.predecessor = self.keeper.member().map(|(worker, _)| worker);
        self.keeper = Keeper::new(self.world.limits);
        self.wake = None;
        self.claims.clear();
        self.waiting.clear();
        self.known.clear();
        self.unconfirmed.clear();
        self.guard_kills(net);
    }

    pub(crate) fn happens(&mut self, net: &mut Network, happening: Happening) {
        match happening {
            Happening::HandlerFinished(token) => self.handler_ends(net, token, false),
            Happening::HandlerDies(token) => self.handler_ends(net, token, true),
            Happening::GuardLooks => {
                if self
                    .guard_until
                    .is_some_and(|until| self.mono(net) >= until)
                {
                    self.guard_kills(net);
                }
            }
        }
    }

    pub(crate) fn notices(&mut self, net: &mut Network, notice: Notice) {
        match notice {
            Notice::Wake => {
                self.wake = None;
                self.tell(net, Event::Tick);
            }
            Notice::Dispatch => self.dispatch(net),
            Notice::SweepTime => {
                net.send(
                    self.index,
                    self.incarnation,
                    Ticket::Sweep,
                    Statement::Sweep,
                );
                self.notice_at(net, net.now + 1_000, Notice::SweepTime);
            }
            Notice::Answer(ticket, answer) => self.answered(net, ticket, answer),
            Notice::GivenUp(Ticket::Claim { call, .. }) => {
                if self.claims.remove(&call) {
                    self.tell(net, Event::ClaimGivenUp { call });
                }
            }
            Notice::GivenUp(Ticket::End { tokens }) => self.send_again(&tokens),
            Notice::GivenUp(_) => {}
            Notice::Reaped { token, killed } => {
                let end = match killed {
                    true => End::Released,
                    false if net.now < net.peace_at && net.random.chance(20) => End::Failed,
                    false => End::Completed,
                };
                self.tell(net, Event::Ended { token });
                self.write_end(token, end);
            }
            Notice::GraceOver(token) => self.happens(net, Happening::HandlerDies(token)),
        }
    }

    fn mono(&self, net: &Network) -> Mono {
        Mono::from_millis(net.now - self.clock_behind)
    }

    fn notice_at(&self, net: &mut Network, time: u64, notice: Notice) {
        net.at(
            time,
            Outer::Process {
                machine: self.index,
                incarnation: self.incarnation,
                notice,
            },
        );
    }

    /// Tells the keeper, carries out what it says, renews the guard, and sets the next alarm.
    fn tell(&mut self, net: &mut Network, event: Event) {
        for command in self.keeper.on(self.mono(net), event) {
            self.carry_out(net, command);
        }
        let trusted_until = self.keeper.trusted_until();
        if trusted_until.is_some() && trusted_until != self.guard_until {
            self.guard_until = trusted_until;
            let look = trusted_until.unwrap_or_default().millis() + self.clock_behind + net.lag();
            net.at(
                look,
                Outer::Machine {
                    machine: self.index,
                    happening: Happening::GuardLooks,
                },
            );
        }
        if let Some(wake) = self.keeper.wake_at() {
            let wake = (wake.millis() + self.clock_behind).max(net.now);
            if self.wake.is_none_or(|set| wake < set) {
                self.wake = Some(wake);
                let late = wake + net.lag();
                self.notice_at(net, late, Notice::Wake);
            }
        }
    }

    fn carry_out(&mut self, net: &mut Network, command: Command) {
        match command {
            Command::Register { asked_at } => {
                let worker = net.fresh_worker();
                let predecessor = self.predecessor.take();
                let ticket = Ticket::Register { worker, asked_at };
                net.send(
                    self.index,
                    self.incarnation,
                    ticket,
                    Statement::Register {
                        worker,
                        predecessor,
                    },
                );
            }
            // There is one epoch here.
            Command::Reattach { .. } => {}
            Command::Beat {
                worker,
                beat,
                settled,
                open,
                ..
            } => {
                let ticket = Ticket::Beat { worker, beat };
                net.send(
                    self.index,
                    self.incarnation,
                    ticket,
                    Statement::Beat {
                        worker,
                        settled,
                        open,
                    },
                );
            }
            Command::Kill { tokens, why } => {
                let grace = match why {
                    Why::Revoked => KILL_GRACE,
                    Why::TrustEnded => self.lost_grace(),
                    Why::DeclaredDead => 0,
                };
                self.distrusted += if why == Why::TrustEnded {
                    tokens.len() as u64
                } else {
                    0
                };
                for token in tokens {
                    self.kill(net, token, grace, false);
                }
            }
            Command::Release { tokens } => tokens
                .into_iter()
                .for_each(|token| self.write_end(token, End::Released)),
        }
    }

    fn lost_grace(&self) -> u64 {
        u64::try_from(self.world.limits.lost_grace().as_millis()).unwrap_or(u64::MAX)
    }

    /// TERM now, KILL after the grace. The KILL of a daemon comes only if the daemon runs then.
    fn kill(&self, net: &mut Network, token: Token, grace: u64, by_guard: bool) {
        let Some(handler) = self.handlers.get(&token) else {
            return;
        };
        let happening = Happening::HandlerDies(token);
        let machine = self.index;
        if handler.obeys {
            let at = net.now + net.random.within(0..grace + 1);
            net.at(at, Outer::Machine { machine, happening });
        }
        if by_guard {
            net.at(net.now + grace, Outer::Machine { machine, happening });
        } else {
            self.notice_at(net, net.now + grace, Notice::GraceOver(token));
        }
    }

    fn guard_kills(&mut self, net: &mut Network) {
        for token in self.handlers.keys() {
            self.kill(net, *token, self.lost_grace(), true);
        }
    }

    fn handler_ends(&mut self, net: &mut Network, token: Token, killed: bool) {
        if let Some(handler) = self.handlers.remove(&token) {
            if let Some(living) = net.living.get_mut(&handler.job) {
                *living -= 1;
            }
            let reaped = net.now + net.random.within(0..50);
            self.notice_at(net, reaped, Notice::Reaped { token, killed });
        }
    }

    fn write_end(&mut self, token: Token, end: End) {
        if let Some((job, run)) = self.known.get(&token) {
            let item = Item {
                job: *job,
                run: *run,
                token,
                end,
            };
            self.unconfirmed.insert(
                token,
                Unconfirmed {
                    item,
                    under_way: false,
                },
            );
        }
    }

    fn dispatch(&mut self, net: &mut Network) {
        while self.handlers.len() < SLOTS && !self.waiting.is_empty() {
            let (job, _, token) = self.waiting.remove(0);
            match self.keeper.try_start(self.mono(net), token) {
                Start::Go => self.spawn(net, job, token),
                Start::Release => self.write_end(token, End::Released),
                Start::Gone => {}
            }
        }
        if self.handlers.len() < SLOTS
            && self.claims.len() < 2
            && let Some((worker, _)) = self.keeper.member()
            && let Some(call) = self.keeper.claim(self.mono(net))
        {
            self.claims.insert(call);
            let limit = SLOTS - self.handlers.len();
            let ticket = Ticket::Claim { worker, call };
            net.send(
                self.index,
                self.incarnation,
                ticket.clone(),
                Statement::Claim {
                    worker,
                    call,
                    limit,
                },
            );
            self.notice_at(net, net.now + STATEMENT_TIMEOUT, Notice::GivenUp(ticket));
        }
        let mut items = Vec::new();
        for unconfirmed in self.unconfirmed.values_mut().filter(|one| !one.under_way) {
            unconfirmed.under_way = true;
            items.push(unconfirmed.item);
        }
        if !items.is_empty() {
            let ticket = Ticket::End {
                tokens: items.iter().map(|item| item.token).collect(),
            };
            net.send(
                self.index,
                self.incarnation,
                ticket.clone(),
                Statement::End { items },
            );
            self.notice_at(net, net.now + STATEMENT_TIMEOUT, Notice::GivenUp(ticket));
        }
        let again = net.now + net.random.within(100..900);
        self.notice_at(net, again, Notice::Dispatch);
    }

    fn spawn(&mut self, net: &mut Network, job: JobId, token: Token) {
        let obeys = net.random.chance(50);
        self.handlers.insert(token, Handler { job, obeys });
        net.starts.push((job, token));
        *net.living.entry(job).or_default() += 1;
        let longest = if net.random.chance(50) { 5_000 } else { 90_000 };
        let end = net.now + net.random.within(100..longest);
        let happening = Happening::HandlerFinished(token);
        net.at(
            end,
            Outer::Machine {
                machine: self.index,
                happening,
            },
        );
    }

    fn answered(&mut self, net: &mut Network, ticket: Ticket, answer: Answer) {
        let refused = |worker| Event::Refused {
            worker,
            epoch: EPOCH,
            refusal: Refusal::Dead,
        };
        match (ticket, answer) {
            (Ticket::Register { worker, asked_at }, Answer::Registered) => {
                self.tell(
                    net,
                    Event::Registered {
                        worker,
                        epoch: EPOCH,
                        asked_at,
                    },
                );
            }
            (Ticket::Beat { beat, .. }, Answer::Beaten { revoked }) => {
                self.tell(net, Event::BeatAnswered { beat, revoked });
            }
            (Ticket::Beat { worker, .. }, Answer::Dead) => self.tell(net, refused(worker)),
            (Ticket::Claim { call, .. }, Answer::Claimed(jobs)) => {
                self.claims.remove(&call);
                self.known
                    .extend(jobs.iter().map(|(job, run, token)| (*token, (*job, *run))));
                self.waiting.extend(&jobs);
                let jobs = jobs
                    .into_iter()
                    .map(|(job, _, token)| (job, token))
                    .collect();
                self.tell(net, Event::ClaimAnswered { call, jobs });
            }
            (Ticket::Claim { worker, call }, Answer::Dead) => {
                self.claims.remove(&call);
                self.tell(net, Event::ClaimGivenUp { call });
                self.tell(net, refused(worker));
            }
            (Ticket::End { .. }, Answer::Ended { confirmed, busy }) => {
                self.send_again(&busy);
                for token in &confirmed {
                    self.unconfirmed.remove(token);
                }
                self.tell(net, Event::Confirmed { tokens: confirmed });
            }
            _ => {}
        }
    }

    fn send_again(&mut self, tokens: &[Token]) {
        for token in tokens {
            if let Some(unconfirmed) = self.unconfirmed.get_mut(token) {
                unconfirmed.under_way = false;
            }
        }
    }
}
