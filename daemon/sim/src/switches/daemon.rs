//! One daemon around the real keeper, the real choice of the primary and the real memory, with its guard and its handlers.
//!
//! It stands for the runtime's loops. The guard kills all handlers when the daemon is gone or has not renewed its trust. What
//! stands on the disk of a daemon with a `state_dir` outlives it: who it was, its open ends, and what it remembers of others.
//!
//! - `heart`: registers, beats, re-attaches, probes.
//! - `work`: claims, handlers, ends.

mod heart;
mod work;

pub(crate) use work::{follow_up, followed, new_job};

use std::collections::{BTreeMap, BTreeSet};

use super::cluster::SERVERS;
use super::network::{Event as Outer, Happening, Network, Notice, Seen};
use super::world::World;
use tenure_core::ids::{Beat, Call, Epoch, JobId, Token, WorkerId};
use tenure_core::lease::command::{Command, Why};
use tenure_core::lease::event::Event;
use tenure_core::lease::keeper::Keeper;
use tenure_core::model::{Memory, Registration, RunEnd};
use tenure_core::primary::{self, Primaries, Sight};
use tenure_core::replay::{Bounds, Record, Replay};
use tenure_core::time::Mono;

/// A handler's own grace, used when one job is revoked.
const KILL_GRACE: u64 = 10_000;
/// A stopped daemon lets its handlers work for so long.
const DRAIN: u64 = 15_000;
/// And is gone after this, whatever is left to say.
const DRAIN_TIMEOUT: u64 = 30_000;

/// How a run ended.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    memory: Memory,
    end: RunEnd,
}

impl Record for Ended {
    fn size(&self) -> usize {
        1
    }

    fn reduce(&mut self) {}
}

#[derive(Debug)]
struct Handler {
    job: JobId,
    /// Ends at TERM, some time within its grace; otherwise only KILL ends it.
    obeys: bool,
}

#[derive(Debug)]
struct Open {
    ended: Ended,
    under_way: bool,
}

/// What a `state_dir` holds of the daemon that is gone.
#[derive(Debug, Default)]
struct Disk {
    worker: Option<WorkerId>,
    ends: Vec<Ended>,
    remembered: Vec<Ended>,
    seen: primary::Seen,
}

/// A round of probes.
#[derive(Debug)]
struct Round {
    number: u64,
    sent: u64,
    worker: Option<WorkerId>,
    sights: Vec<Option<Sight>>,
}

/// The machine and what runs on it.
#[derive(Debug)]
pub(crate) struct Daemon {
    index: usize,
    world: World,
    pub(crate) incarnation: u32,
    pub(crate) running: bool,
    pub(crate) thaws: u64,
    state_dir: bool,
    disk: Disk,
    keeper: Keeper,
    primaries: Primaries,
    memory: Replay<Ended>,
    /// Where statements go.
    host: Option<usize>,
    /// Rises when answers to what was said before mean nothing any more.
    connection: u64,
    round: Option<Round>,
    rounds: u64,
    /// The highest beat that each host has shown.
    shown: [Option<Beat>; SERVERS],
    roster: Vec<WorkerId>,
    sent: Beat,
    answered: Beat,
    beat_under_way: Option<Beat>,
    epoch_no: i64,
    predecessors: Vec<WorkerId>,
    /// A registration that was answered, while what is to be said with it was not.
    registered: Option<(WorkerId, Epoch, i64)>,
    /// One registration at a time: the keeper asks again while an answer is out.
    registering: Option<Mono>,
    /// The re-attach that is under way.
    rejoining: Option<(WorkerId, Mono)>,
    claims: BTreeSet<Call>,
    /// Claimed and not yet started.
    waiting: BTreeMap<Token, Memory>,
    held: BTreeMap<Token, Memory>,
    open: BTreeMap<Token, Open>,
    draining: bool,
    leaving: bool,
    wake: Option<u64>,
    guard_until: Option<Mono>,
    handlers: BTreeMap<Token, Handler>,
}

impl Daemon {
    pub(crate) fn new(index: usize, world: World, state_dir: bool) -> Self {
        Self {
            index,
            world,
            incarnation: 0,
            running: false,
            thaws: 0,
            state_dir,
            disk: Disk::default(),
            keeper: Keeper::new(world.limits),
            primaries: Primaries::new(SERVERS, primary::Seen::default()),
            memory: Replay::new(Mono::ZERO, Bounds::default(), Beat(0)),
            host: None,
            connection: 0,
            round: None,
            rounds: 0,
            shown: [None; SERVERS],
            roster: Vec::new(),
            sent: Beat(0),
            answered: Beat(0),
            beat_under_way: None,
            epoch_no: 0,
            predecessors: Vec::new(),
            registered: None,
            registering: None,
            rejoining: None,
            claims: BTreeSet::new(),
            waiting: BTreeMap::new(),
            held: BTreeMap::new(),
            open: BTreeMap::new(),
            draining: false,
            leaving: false,
            wake: None,
            guard_until: None,
            handlers: BTreeMap::new(),
        }
    }

    /// The worker that it is now.
    fn worker(&self) -> Option<WorkerId> {
        self.keeper.member().map(|(worker, _)| worker)
    }

    /// Whether it runs and trusts its leases.
    pub(crate) fn trusts(&self, now: u64) -> bool {
        let trusted = self.keeper.trusted_until();
        self.running && trusted.is_some_and(|until| until.millis() > now)
    }

    /// Whether a beat has told it of this worker.
    pub(crate) fn has_heard_of(&self, worker: WorkerId) -> bool {
        self.roster.contains(&worker)
    }

    /// Whether this is its present epoch.
    pub(crate) fn is_in(&self, epoch: Epoch) -> bool {
        self.keeper.member().is_some_and(|(_, mine)| mine == epoch)
    }

    /// The daemon starts. With a `state_dir` it waits until its predecessor's guard is done.
    pub(crate) fn start(&mut self, net: &mut Network) {
        if self.state_dir && !self.handlers.is_empty() {
            let daemon = self.index;
            net.at(net.now + 500, Outer::Restart { daemon });
            return;
        }
        let now = self.mono(net);
        let disk = std::mem::take(&mut self.disk);
        let handlers = std::mem::take(&mut self.handlers);
        let (incarnation, guard_until) = (self.incarnation, self.guard_until);
        *self = Self {
            incarnation,
            guard_until,
            handlers,
            running: true,
            primaries: Primaries::new(SERVERS, disk.seen),
            memory: Replay::new(now, Bounds::default(), Beat(0)),
            predecessors: disk.worker.into_iter().collect(),
            ..Self::new(self.index, self.world, self.state_dir)
        };
        if !disk.ends.is_empty() || !disk.remembered.is_empty() {
            net.seen.push(Seen::Succeeded);
        }
        for ended in disk.remembered {
            self.remember(now, ended);
        }
        for ended in disk.ends {
            let under_way = false;
            self.open.insert(ended.end.token, Open { ended, under_way });
        }
        self.notice_at(net, net.now, Notice::ProbeTime);
        self.tell(net, Event::Tick);
        self.notice_at(net, net.now, Notice::Dispatch);
        self.notice_at(net, net.now + 300, Notice::SweepTime);
    }

    /// The daemon dies: its guard kills the handlers, and what is not on the disk is forgotten.
    pub(crate) fn die(&mut self, net: &mut Network) {
        if self.state_dir {
            let worker = self.worker().or(self.registered.map(|(worker, ..)| worker));
            self.disk = Disk {
                worker: worker.or_else(|| self.predecessors.first().copied()),
                ends: self.open.values().map(|open| open.ended.clone()).collect(),
                remembered: self.memory.after(None).cloned().collect(),
                seen: self.primaries.seen(),
            };
        }
        self.incarnation += 1;
        self.running = false;
        self.thaws = 0;
        self.guard_kills(net);
        let left = self.disk.ends.iter().chain(&self.disk.remembered);
        net.seen.push(Seen::Ended {
            daemon: self.index,
            keeps: left.map(|ended| ended.end.job).collect(),
            forgets: !self.state_dir,
        });
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
            Notice::SweepTime => self.sweep(net),
            Notice::ProbeTime => self.probe(net),
            Notice::Sighted { round, host, sight } => self.sighted(net, round, host, sight),
            Notice::RoundOver(round) => self.round_over(net, round),
            Notice::Answer {
                ticket,
                answer,
                astray,
            } => self.answered(net, ticket, answer, astray),
            Notice::GivenUp(ticket) => self.given_up(net, ticket),
            Notice::Reaped { token, killed } => self.reaped(net, token, killed),
            Notice::GraceOver(token) => self.happens(net, Happening::HandlerDies(token)),
            Notice::Stop => {
                self.draining = true;
                self.notice_at(net, net.now + DRAIN, Notice::StopNow);
            }
            Notice::StopNow if !self.leaving => {
                self.leaving = true;
                for token in self.handlers.keys().copied().collect::<Vec<_>>() {
                    self.kill(net, token, KILL_GRACE, false);
                }
                self.notice_at(net, net.now + DRAIN_TIMEOUT - DRAIN, Notice::StopNow);
            }
            Notice::StopNow => self.exit(net),
        }
    }

    /// It is asked to stop.
    pub(crate) fn stop(&self, net: &mut Network) {
        if self.running {
            self.notice_at(net, net.now, Notice::Stop);
        }
    }

    /// The process ends by itself, and is started again somewhat later.
    fn exit(&mut self, net: &mut Network) {
        self.die(net);
        let again = net.now + net.random.within(500..20_000);
        let daemon = self.index;
        net.at(again, Outer::Restart { daemon });
    }

    fn mono(&self, net: &Network) -> Mono {
        Mono::from_millis(net.now)
    }

    fn here(&self) -> (usize, u32) {
        (self.index, self.incarnation)
    }

    fn notice_at(&self, net: &mut Network, time: u64, notice: Notice) {
        let (daemon, incarnation) = self.here();
        net.at(
            time,
            Outer::Process {
                daemon,
                incarnation,
                notice,
            },
        );
    }

    fn registration(&self) -> Registration {
        let millis = |span: std::time::Duration| i64::try_from(span.as_millis()).unwrap_or(0);
        Registration {
            lease_ttl: millis(self.world.limits.ttl()),
            heartbeat: millis(self.world.limits.beat_every()),
        }
    }

    /// Tells the keeper, carries out what it says, renews the guard, and sets the next alarm.
    fn tell(&mut self, net: &mut Network, event: Event) {
        for command in self.keeper.on(self.mono(net), event) {
            self.carry_out(net, command);
        }
        let trusted_until = self.keeper.trusted_until();
        if trusted_until.is_some() && trusted_until != self.guard_until {
            self.guard_until = trusted_until;
            let look = trusted_until.unwrap_or_default().millis() + net.lag();
            let (daemon, happening) = (self.index, Happening::GuardLooks);
            net.at(look, Outer::Machine { daemon, happening });
        }
        if let Some(wake) = self.keeper.wake_at() {
            let wake = wake.millis().max(net.now);
            if self.wake.is_none_or(|set| wake < set) {
                self.wake = Some(wake);
                let late = wake + net.lag();
                self.notice_at(net, late, Notice::Wake);
            }
        }
    }

    fn carry_out(&mut self, net: &mut Network, command: Command) {
        match command {
            Command::Register { asked_at } => self.register(net, asked_at),
            Command::Reattach { worker, asked_at } => self.open_epoch(net, worker, asked_at),
            Command::Beat {
                worker,
                epoch,
                beat,
                settled,
                open,
            } => self.beat(net, (worker, epoch, beat), settled, open),
            Command::Kill { tokens, why } => {
                let grace = match why {
                    Why::Revoked => KILL_GRACE,
                    Why::TrustEnded => self.lost_grace(),
                    Why::DeclaredDead => 0,
                };
                if why == Why::TrustEnded {
                    net.seen.push(Seen::Distrusted(tokens.len() as u64));
                }
                for token in tokens {
                    self.kill(net, token, grace, false);
                }
            }
            Command::Release { tokens } => self.release(&tokens),
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
        let daemon = self.index;
        if handler.obeys {
            let at = net.now + net.random.within(0..grace + 1);
            net.at(at, Outer::Machine { daemon, happening });
        }
        if by_guard {
            net.at(net.now + grace, Outer::Machine { daemon, happening });
        } else {
            self.notice_at(net, net.now + grace, Notice::GraceOver(token));
        }
    }

    fn guard_kills(&mut self, net: &mut Network) {
        for token in self.handlers.keys() {
            self.kill(net, *token, self.lost_grace(), true);
        }
    }
}
