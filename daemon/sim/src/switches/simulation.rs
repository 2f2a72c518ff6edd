//! The order of events.

use super::cluster::{Cluster, SERVERS};
use super::daemon::Daemon;
use super::judge::{Judge, all_ended};
use super::network::{Event, Network, Notice, Ticket};
use super::server::{Answer, Statement};
use super::troubles;
use super::world::{Report, World};
use crate::random::Random;
use std::ops::Range;
use tenure_core::model::{Place, Status, Stop};

pub(super) const DAEMONS: usize = 3;
pub(super) const JOBS: u32 = 9;
/// So long after the trouble every job has to have ended.
const PEACE: u64 = 300_000;

/// Plays one world from one seed. The same seed gives the same report.
#[must_use]
pub fn run(seed: u64, world: World) -> Report {
    let mut simulation = Simulation::new(seed, world);
    simulation.plan();
    simulation.play();
    simulation.judge.report
}

#[derive(Debug)]
pub(super) struct Simulation {
    pub(super) world: World,
    pub(super) net: Network,
    pub(super) cluster: Cluster,
    pub(super) daemons: Vec<Daemon>,
    pub(super) judge: Judge,
}

impl Simulation {
    fn new(seed: u64, world: World) -> Self {
        let mut random = Random::new(seed);
        let mut clock = || i64::try_from(random.within(0..8_000)).unwrap_or(0) + 1_000_000;
        let clocks = [clock(), clock(), clock()];
        let cluster = Cluster::new(clocks, random.chance(60));
        let peace_at = troubles::until(world.outage);
        let mut net = Network::new(random, peace_at, world.bad_network);
        let daemons = (0..DAEMONS).map(|index| {
            let state_dir = net.random.chance(50);
            Daemon::new(index, world, state_dir)
        });
        Self {
            world,
            cluster,
            daemons: daemons.collect(),
            judge: Judge::default(),
            net,
        }
    }

    fn play(&mut self) {
        let end = self.net.peace_at + PEACE;
        while let Some(event) = self.net.next(end) {
            self.happen(event);
            let at = self.net.now;
            for seen in std::mem::take(&mut self.net.seen) {
                self.judge.see(at, seen, &self.cluster, &self.daemons);
            }
            let peace = at > self.net.peace_at + 1_000;
            if peace && all_ended(self.cluster.shows(self.cluster.latest)) && self.all_said() {
                break;
            }
        }
        let database = self.cluster.shows(self.cluster.latest);
        self.judge.at_the_end(database);
    }

    fn all_said(&self) -> bool {
        let database = self.cluster.shows(self.cluster.latest);
        let in_step = |daemon: &Daemon| daemon.is_in(database.epoch);
        database.here && self.daemons.iter().all(in_step)
    }

    fn happen(&mut self, event: Event) {
        let now = self.net.now;
        match event {
            Event::Arrives {
                daemon,
                incarnation,
                host,
                ticket,
                statement,
                answers,
            } => {
                let server = &self.cluster.servers[host];
                if !server.down && server.frozen_until > now {
                    let thaw = server.frozen_until + self.net.random.within(0..20);
                    let event = Event::Arrives {
                        daemon,
                        incarnation,
                        host,
                        ticket,
                        statement,
                        answers,
                    };
                    self.net.at(thaw, event);
                } else {
                    self.arrives((daemon, incarnation), host, ticket, &statement, answers);
                }
            }
            Event::Probed {
                daemon,
                incarnation,
                host,
                round,
                worker,
            } => {
                let sight = self.cluster.sight(host, now, worker);
                if self.cluster.servers[host].frozen_until <= now {
                    let notice = Notice::Sighted { round, host, sight };
                    self.net.bring((daemon, incarnation), host, notice);
                }
            }
            Event::Process {
                daemon,
                incarnation,
                notice,
            } => self.process(daemon, incarnation, notice),
            Event::Machine { daemon, happening } => {
                self.daemons[daemon].happens(&mut self.net, happening);
            }
            Event::Restart { daemon } => {
                if !self.daemons[daemon].running {
                    self.daemons[daemon].start(&mut self.net);
                }
            }
            Event::Trouble(trouble) => self.trouble(trouble),
            Event::Enqueue { named, id } => self.enqueue(named, id),
            Event::Cancel | Event::RetryDead => self.person(&event),
        }
    }

    fn arrives(
        &mut self,
        from: (usize, u32),
        host: usize,
        ticket: Ticket,
        statement: &Statement,
        answers: bool,
    ) {
        let now = self.net.now;
        let latest = host == self.cluster.latest;
        let time = self.cluster.time(host, now);
        let mut answer = Answer::Failed;
        if self.cluster.writable(host, now)
            && let Some(database) = self.cluster.primary(host)
        {
            let before = Judge::before(database, statement);
            let (said, changed) = statement.execute(database, time);
            answer = said;
            if latest {
                let what = (from.0, statement, &answer);
                let when = (now, time);
                self.judge
                    .after(when, database, &before, what, &self.daemons);
            }
            if changed {
                self.cluster.commit(host, now);
            }
        }
        if answers {
            let astray = !latest;
            let notice = Notice::Answer {
                ticket,
                answer,
                astray,
            };
            self.net.bring(from, host, notice);
        }
    }

    /// What was meant for a daemon that is gone reaches nobody; one that is frozen notices later.
    fn process(&mut self, daemon: usize, incarnation: u32, notice: Notice) {
        let now = self.net.now;
        let body = &mut self.daemons[daemon];
        if incarnation != body.incarnation || !body.running {
            return;
        }
        if now < body.thaws {
            let event = Event::Process {
                daemon,
                incarnation,
                notice,
            };
            self.net.at(body.thaws, event);
        } else {
            body.notices(&mut self.net, notice);
        }
    }

    /// A person, at the present primary if there is one.
    fn person(&mut self, event: &Event) {
        let (now, latest) = (self.net.now, self.cluster.latest);
        if !self.cluster.writable(latest, now) {
            return;
        }
        let Some(database) = self.cluster.primary(latest) else {
            return;
        };
        let wanted = |place: &Place| match (event, place) {
            (Event::RetryDead, Place::Ended(outcome)) => outcome.status == Status::Failed,
            (Event::RetryDead, _) => false,
            (_, place) => !matches!(place, Place::Ended(_)),
        };
        let jobs = database
            .jobs
            .iter()
            .filter(|(_, job)| wanted(&job.place))
            .map(|(id, _)| *id);
        let jobs: Vec<_> = jobs.collect();
        if jobs.is_empty() {
            return;
        }
        let nth = self.net.random.within(0..jobs.len() as u64);
        let job = jobs[usize::try_from(nth).unwrap_or(0)];
        let _ = match event {
            Event::RetryDead => database.retry(job),
            _ => database.stop(job, Stop::Cancel).map(|_| ()),
        };
        self.cluster.commit(latest, now);
    }
}

impl Network {
    /// A span of at most `longest`, often nearly that, that ends before the peace.
    pub(super) fn some_time(&mut self, longest: u64) -> Range<u64> {
        let start = self.random.within(0..self.peace_at - 1_000);
        let shortest = if self.random.chance(50) {
            longest * 3 / 4
        } else {
            500
        };
        let end = start + self.random.within(shortest..longest);
        start..end.min(self.peace_at)
    }
}

/// One in three hosts is the primary at first.
const _: () = assert!(SERVERS == 3);
