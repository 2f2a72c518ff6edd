//! A primary with two standbys, three daemons that know all of them, and producers: the place where switches happen.
//!
//! A scenario goes: [`Cluster::start`], [`Cluster::load`], [`Cluster::strike`], [`Cluster::promote`], [`Cluster::finish`], with
//! whatever it is about in between. The cluster notes what it does to whom and when, since the verdict needs it.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure_embedded::{Options, Server, free_port};

use crate::daemon::Daemon;
use crate::lab::{Lab, UNFINISHED};
use crate::plan::{Plan, way};
use crate::producers::{Notes, Producers};
use crate::proxy::Proxy;
use crate::random::Random;
use crate::report::{Report, Times};
use crate::verdict::switches::{Absence, Enqueue, History, Switch, judge};
use crate::watch::{Said, Watch};
use crate::witness::{Line, What, uptime};

/// The daemons' names.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// That nobody is a primary is proven when all standbys have stood still for three seconds; leases must be trusted for longer than
/// that from the last beat on, or no handler lives through an outage. Of this lease five and a half seconds are trusted.
const LEASE_TTL: &str = "worker.lease_ttl=10s";

/// A daemon and what it is started with.
#[derive(Debug)]
struct Member {
    daemon: Daemon,
    set: Vec<String>,
}

/// See the module. Everything in it ends when it is dropped.
#[derive(Debug)]
pub struct Cluster<'a> {
    producers: Option<Producers>,
    watch: Watch,
    members: Vec<Member>,
    /// The lab around the present primary.
    pub lab: Lab,
    /// The other servers: standbys, and old primaries, also dead ones.
    pub others: Vec<Server>,
    /// What the daemons go through, in the order of the hosts at the start; empty for [`Route::Direct`].
    pub proxies: Vec<Proxy>,
    /// Decides, by the seed, what a scenario leaves open.
    pub random: Random,
    plan: Plan<'a>,
    scenario: &'a str,
    seed: u64,
    notes: Notes,
    switches: Vec<Switch>,
    absences: Vec<Absence>,
    fault: Option<Duration>,
    unreplicated: Option<Duration>,
}

impl<'a> Cluster<'a> {
    /// Starts everything but the producers, and waits until all daemons live.
    ///
    /// # Panics
    /// When something does not start.
    #[must_use]
    pub fn start(scenario: &'a str, plan: Plan<'a>) -> Self {
        let seed = Random::seed();
        let random = Random::new(seed);
        let primary = Server::start(Self::options()).expect("PostgreSQL starts");
        let others: Vec<Server> = thread::scope(|scope| {
            let started = [(); 2].map(|()| scope.spawn(|| primary.standby()));
            started
                .into_iter()
                .map(|thread| thread.join().expect("no panic").expect("a standby starts"))
                .collect()
        });
        let ports = [primary.port(), others[0].port(), others[1].port()];
        let (url, proxies) = way(plan.route, &ports);
        let mut lab = Lab::on(primary, url);
        lab.add_handlers(plan.handlers);
        let api = free_ports();
        let members = NAMES
            .iter()
            .zip(&api)
            .map(|(name, port)| {
                let mut set = vec![
                    format!("api.listen=127.0.0.1:{port}"),
                    lab.state_dir(name),
                    "worker.concurrency=4".to_owned(),
                    LEASE_TTL.to_owned(),
                ];
                set.extend(plan.set.iter().map(|&setting| setting.to_owned()));
                let daemon = daemon(&lab, name, &set);
                Member { daemon, set }
            })
            .collect();
        lab.until_live(NAMES.len());
        Self {
            producers: None,
            watch: Watch::start(&api),
            members,
            notes: Notes::new(lab.path("acknowledged")),
            lab,
            others,
            proxies,
            random,
            plan,
            scenario,
            seed,
            switches: Vec::new(),
            absences: Vec::new(),
            fault: None,
            unreplicated: None,
        }
    }

    /// How its servers are started.
    #[must_use]
    pub fn options() -> Options {
        let mut options = Lab::options();
        options.settings.extend(Server::cluster_settings());
        options
    }

    /// Lets producers enqueue, and waits until jobs run, more wait, and the standbys have all of it.
    pub fn load(&mut self) {
        let ports: Vec<u16> = self.ports();
        self.producers = Some(Producers::start(
            &ports,
            self.plan.mix,
            &mut self.random,
            &self.notes,
        ));
        self.enqueue("ticks-60", 3);
        self.lab.until_witnessed(What::End, 20);
        self.backlog();
        self.random.dawdle(500);
    }

    /// Puts in more than can run at once, so that a switch finds jobs that nobody has started; waits until the standbys have it.
    pub fn backlog(&mut self) {
        self.enqueue("ticks-4", 60);
        let target = self.lab.server.position().expect("the primary answers");
        let streaming: Vec<&Server> = self
            .others
            .iter()
            .filter(|server| streams(server))
            .collect();
        self.lab.wait_for(|| {
            let behind = streaming
                .iter()
                .find(|server| server.position().unwrap_or_default() < target);
            behind.map_or(Ok(()), |server| {
                Err(format!("the standby {} is behind", server.port()))
            })
        });
    }

    /// Puts jobs in at the primary, as a producer does.
    pub fn enqueue(&mut self, job_type: &str, count: usize) -> Vec<String> {
        let ids = self.lab.enqueue_many(job_type, count);
        for id in &ids {
            self.notes.write(id, job_type, self.lab.server.port());
        }
        ids
    }

    /// What was acknowledged so far.
    #[must_use]
    pub fn acknowledged(&self) -> Vec<Enqueue> {
        self.notes.read()
    }

    /// Waits until so many more enqueues were acknowledged than now.
    pub fn until_more_acknowledged(&self, count: usize) {
        let before = self.notes.read().len();
        self.lab
            .wait_for(|| match self.notes.read().len() - before {
                more if more >= count => Ok(()),
                more => Err(format!("{more} more are acknowledged")),
            });
    }

    /// Waits until the witnesses have written so many more lines of this kind than now.
    pub fn until_more_witnessed(&self, what: What, count: usize) {
        self.lab.until_witnessed(what, self.lab.count(what) + count);
    }

    /// Does this to the primary. It is the fault from which on a switch is measured, if there is none already.
    pub fn strike<T>(&mut self, blow: impl FnOnce(&mut Server) -> T) -> T {
        let at = uptime();
        self.fault.get_or_insert(at);
        self.unreplicated.get_or_insert(at);
        blow(&mut self.lab.server)
    }

    /// Waits until a daemon has said, after the blow, that it has no primary: a silent server may also only be slow, so that takes a
    /// while, and is measured only where nobody is promoted before.
    pub fn until_detected(&self) {
        let fault = self.fault.unwrap_or_default();
        self.lab.wait_for(|| {
            let said = self.watch.said();
            let without = |said: &&Said| said.at >= fault && said.primary == Some(false);
            let first = said.iter().find(without);
            first.map_or(Err("no daemon misses the primary".to_owned()), |_| Ok(()))
        });
    }

    /// Ends replication to all standbys: what commits now is lost by the next switch.
    pub fn cut_replication(&mut self) {
        self.unreplicated.get_or_insert(uptime());
        for standby in self.others.iter().filter(|server| streams(server)) {
            standby.cut_replication().expect("replication can be cut");
        }
    }

    /// Promotes the standby that is furthest, and lets the others follow it where they can. The old primary is left as it is.
    pub fn promote(&mut self) {
        let place = |index: &usize| self.others[*index].position().unwrap_or_default();
        let furthest = (0..self.others.len())
            .filter(|&index| self.others[index].is_standby().unwrap_or(false))
            .max_by_key(place)
            .expect("there is a standby");
        self.promote_this(furthest);
        // In its place there is the old primary now, which may be frozen: nobody asks it.
        let others = self.others.iter().enumerate();
        for (_, standby) in others.filter(|(index, _)| *index != furthest) {
            if standby.is_standby().unwrap_or(false) {
                let healed = standby.heal_replication(&self.lab.server);
                healed.expect("the other standby follows");
            }
        }
    }

    /// Promotes this one of the others, and no more.
    pub fn promote_this(&mut self, index: usize) {
        // Without a blow of its own the promotion is the fault: two primaries.
        self.fault.get_or_insert(uptime());
        self.others[index]
            .promote()
            .expect("the standby becomes the primary");
        let writable = uptime();
        std::mem::swap(&mut self.lab.server, &mut self.others[index]);
        self.note_switch(writable);
    }

    /// The present primary is one from now on that takes writes, on whatever server: notes what it has.
    pub fn note_switch(&mut self, writable: Duration) {
        let ids = |query: &str| -> BTreeSet<String> {
            let rows = self.lab.rows(query);
            rows.into_iter().flatten().flatten().collect()
        };
        self.switches.push(Switch {
            fault: self.fault.take().unwrap_or(writable),
            writable,
            port: self.lab.server.port(),
            jobs: ids("SELECT id FROM tenure.job"),
            outcomes: ids("SELECT id FROM tenure.outcome"),
        });
        self.unreplicated = None;
    }

    /// Makes one of the others, an old primary that runs or not, a standby of the present one on its old address.
    pub fn rejoin(&mut self, index: usize) {
        self.others[index]
            .follow(&self.lab.server)
            .expect("the old primary becomes a standby");
    }

    /// Where in the list of others the server with this port is.
    #[must_use]
    pub fn index_of(&self, port: u16) -> usize {
        let place = self.others.iter().position(|server| server.port() == port);
        place.expect("it is one of the others")
    }

    /// A daemon.
    #[must_use]
    pub fn daemon(&self, index: usize) -> &Daemon {
        &self.members[index].daemon
    }

    /// The number of one daemon, by the seed.
    pub fn any_daemon(&mut self) -> usize {
        *self.random.choose(&[0, 1, 2])
    }

    /// SIGKILL. What it had not safely written is lost with it.
    pub fn kill_daemon(&mut self, index: usize) {
        self.absent(index, Duration::MAX);
        self.members[index].daemon.kill9();
    }

    /// SIGSTOP, for as long as `meanwhile` takes, and SIGCONT.
    pub fn stop_daemon<T>(&mut self, index: usize, meanwhile: impl FnOnce(&mut Self) -> T) -> T {
        self.absent(index, Duration::MAX);
        let absence = self.absences.len() - 1;
        self.members[index].daemon.signal(Signal::SIGSTOP);
        let result = meanwhile(self);
        self.absences[absence].until = uptime();
        self.members[index].daemon.signal(Signal::SIGCONT);
        result
    }

    /// SIGTERM, and waits for its end. What ended is safe; what did not is released. Returns its exit code.
    pub fn leave(&mut self, index: usize) -> i32 {
        self.absences.push(Absence {
            daemon: self.members[index].daemon.pid(),
            safe_before: Duration::MAX,
            until: Duration::MAX,
        });
        self.members[index].daemon.stop()
    }

    /// Starts a daemon again that was killed or has left, with the memory that it had.
    pub fn start_daemon(&mut self, index: usize) {
        let daemon = daemon(&self.lab, NAMES[index], &self.members[index].set);
        self.members[index].daemon = daemon;
    }

    /// Lets daemons started from now on have this setting too.
    pub fn set(&mut self, index: usize, setting: &str) {
        self.members[index].set.push(setting.to_owned());
    }

    fn absent(&mut self, index: usize, until: Duration) {
        // What ended a second ago is written, unless nothing has been for longer.
        let lately = uptime().saturating_sub(Duration::from_secs(1));
        self.absences.push(Absence {
            daemon: self.members[index].daemon.pid(),
            safe_before: self.unreplicated.map_or(lately, |since| since.min(lately)),
            until,
        });
    }

    /// What the daemons have said of their primary, in order.
    #[must_use]
    pub fn said(&self) -> Vec<Said> {
        self.watch.said()
    }

    /// The ports of all servers, the primary's first.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        let others = self.others.iter().map(Server::port);
        std::iter::once(self.lab.server.port())
            .chain(others)
            .collect()
    }

    /// Waits until a job that the present primary has taken since it is one has ended, and so have those from before.
    pub fn until_all_flows(&mut self) {
        let (port, since) = match self.switches.last() {
            Some(switch) => (switch.port, switch.writable),
            None => (self.lab.server.port(), uptime()),
        };
        self.lab.wait_for(|| {
            let new: BTreeSet<String> = self
                .notes
                .read()
                .into_iter()
                .filter(|enqueue| enqueue.at >= since && enqueue.port == port)
                .map(|enqueue| enqueue.id)
                .collect();
            let lines = self.lab.witnesses();
            let ended = |line: &&Line| line.what == What::End && new.contains(&line.job);
            lines.iter().find(ended).map_or(
                Err(format!("none of {} new jobs has ended", new.len())),
                |_| Ok(()),
            )
        });
    }

    /// Lets everything come to its end, judges it, and reports.
    ///
    /// # Panics
    /// When there is a fault.
    pub fn finish(&mut self) -> Report {
        if self.producers.is_some() {
            self.until_all_flows();
        }
        if let Some(mut producers) = self.producers.take() {
            producers.stop();
        }
        let open = if self.plan.uncovered {
            // What a person did not want to run again is a dead letter.
            "SELECT count(*) FROM tenure.jobs WHERE status NOT IN ('completed', 'failed')"
        } else {
            UNFINISHED
        };
        self.lab.until(open, "0");
        let codes: Vec<i32> = self
            .members
            .iter_mut()
            .map(|member| {
                if member.daemon.is_running() {
                    member.daemon.stop()
                } else {
                    0
                }
            })
            .collect();
        let report = self.report();
        report.write();
        self.lab.assert_none(&report.judgement.faults);
        self.lab.assert_consistent();
        assert_eq!(codes, [0, 0, 0], "a daemon did not end well");
        report
    }

    fn report(&self) -> Report {
        let (lines, enqueues) = (self.lab.witnesses(), self.notes.read());
        let judgement = judge(&History {
            lines: &lines,
            enqueues: &enqueues,
            shown: &self.lab.shown(),
            switches: &self.switches,
            absences: &self.absences,
            rerun: self.plan.rerun,
            uncovered: self.plan.uncovered,
            interruptions: self.plan.interruptions,
        });
        let said = self.watch.said();
        let times = self.switches.last().map(|switch| {
            let struck: BTreeSet<i32> =
                self.absences.iter().map(|absence| absence.daemon).collect();
            Times::of(
                switch,
                &said,
                NAMES.len().saturating_sub(struck.len()),
                &lines,
                &enqueues,
            )
        });
        Report {
            scenario: self.scenario.to_owned(),
            seed: self.seed,
            judgement,
            times: times.unwrap_or_default(),
        }
    }
}

fn daemon(lab: &Lab, name: &str, set: &[String]) -> Daemon {
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    lab.daemon(name, &set)
}

fn streams(server: &Server) -> bool {
    server.pid().is_some() && server.is_standby().unwrap_or(false)
}

/// One for each daemon.
fn free_ports() -> Vec<u16> {
    let mut ports = BTreeSet::new();
    while ports.len() < NAMES.len() {
        ports.insert(free_port().expect("a port is free"));
    }
    ports.into_iter().collect()
}
