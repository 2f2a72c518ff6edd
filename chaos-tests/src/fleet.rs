//! Three daemons on a database whose primary changes, and producers: whoever plays a scenario with switches has one.
//!
//! A fleet notes what is done to whom and when, since the verdict needs it. What its servers are, and how they are struck, is
//! said by whoever owns it: [`Cluster`](crate::Cluster) or [`Patroni`](crate::Patroni).

use std::collections::BTreeSet;
use std::time::Duration;

use nix::sys::signal::Signal;
use tenure_embedded::{Server, free_port};
use tenure_verdict::switches::{Absence, Enqueue, History, Switch, judge};
use tenure_verdict::{Line, Said, Times, What, uptime};

use crate::daemon::Daemon;
use crate::http;
use crate::lab::{Lab, UNFINISHED};
use crate::plan::Plan;
use crate::producers::{Notes, Producers, enqueue};
use crate::random::Random;
use crate::report::Report;
use crate::servers::Servers;
use crate::watch::Watch;

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
pub struct Fleet<'a, S: Servers = Server> {
    producers: Option<Producers>,
    watch: Watch,
    /// The ports of the daemons' interfaces.
    api: Vec<u16>,
    members: Vec<Member>,
    /// The lab around the servers.
    pub lab: Lab<S>,
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

impl<'a, S: Servers> Fleet<'a, S> {
    /// Starts the daemons, and waits until all live. `set` overrides their configuration, and the plan overrides that.
    pub(crate) fn start(
        scenario: &'a str,
        plan: Plan<'a>,
        mut lab: Lab<S>,
        set: &[String],
    ) -> Self {
        lab.add_handlers(plan.handlers);
        let api = free_ports(NAMES.len());
        let more = set;
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
                set.extend_from_slice(more);
                set.extend(plan.set.iter().map(|&setting| setting.to_owned()));
                let daemon = daemon(&lab, name, &set);
                Member { daemon, set }
            })
            .collect();
        lab.until_live(NAMES.len());
        let seed = Random::seed();
        Self {
            producers: None,
            watch: Watch::start(&api),
            api,
            members,
            notes: Notes::new(lab.path("acknowledged")),
            lab,
            random: Random::new(seed),
            plan,
            scenario,
            seed,
            switches: Vec::new(),
            absences: Vec::new(),
            fault: None,
            unreplicated: None,
        }
    }

    /// Lets producers enqueue at each of these servers that takes writes, and waits until jobs run.
    pub fn produce(&mut self, ports: &[u16]) {
        self.producers = Some(Producers::start(
            ports,
            self.plan.mix,
            enqueue,
            &mut self.random,
            &self.notes,
        ));
        self.enqueue("ticks-60", 3);
        self.lab.until_witnessed(What::End, 20);
    }

    /// This is the fault from which on a switch is measured, if there is none already.
    pub fn note_fault(&mut self) {
        self.fault.get_or_insert(uptime());
    }

    /// What commits from now on is lost with the primary, unless there was such a moment already.
    pub fn note_unreplicated(&mut self) {
        self.unreplicated.get_or_insert(uptime());
    }

    /// Puts jobs in at the primary, as a producer does.
    pub fn enqueue(&mut self, job_type: &str, count: usize) -> Vec<String> {
        let ids = self.lab.enqueue_many(job_type, count);
        for id in &ids {
            self.notes.write(id, job_type, self.lab.server.primary());
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

    /// The present primary is one from now on that takes writes, on whatever server: notes what it has.
    pub fn note_switch(&mut self, writable: Duration) {
        let ids = |query: &str| -> BTreeSet<String> {
            let rows = self.lab.rows(query);
            rows.into_iter().flatten().flatten().collect()
        };
        self.switches.push(Switch {
            fault: self.fault.take().unwrap_or(writable),
            writable,
            server: self.lab.server.primary(),
            jobs: ids("SELECT id FROM tenure.job"),
            outcomes: ids("SELECT id FROM tenure.outcome"),
            since: Duration::ZERO,
        });
        self.unreplicated = None;
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

    /// SIGSTOP, until [`Fleet::thaw_daemon`].
    pub fn freeze_daemon(&mut self, index: usize) {
        self.absent(index, Duration::MAX);
        self.members[index].daemon.signal(Signal::SIGSTOP);
    }

    /// SIGCONT.
    pub fn thaw_daemon(&mut self, index: usize) {
        let pid = self.members[index].daemon.pid();
        let mut absences = self.absences.iter_mut();
        let last = absences.rfind(|absence| absence.daemon == pid);
        last.expect("it was frozen").until = uptime();
        self.members[index].daemon.signal(Signal::SIGCONT);
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

    /// The value of a metric of a daemon, as its interface shows it.
    #[must_use]
    pub fn metric(&self, daemon: usize, name: &str) -> Option<f64> {
        let text = http::text(self.api[daemon], "/metrics", Duration::from_secs(2))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line?.trim().parse().ok()
    }

    /// What the daemons have said of their primary, in order.
    #[must_use]
    pub fn said(&self) -> Vec<Said> {
        self.watch.said()
    }

    /// Waits until a job that the present primary has taken since it is one has ended, and so have those from before.
    pub fn until_all_flows(&mut self) {
        let (port, since) = match self.switches.last() {
            Some(switch) => (switch.server, switch.writable),
            None => (self.lab.server.primary(), uptime()),
        };
        self.lab.wait_for(|| {
            let new: BTreeSet<String> = self
                .notes
                .read()
                .into_iter()
                .filter(|enqueue| enqueue.at >= since && enqueue.server == port)
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
        let report = self.conclude();
        self.lab.assert_none(&report.judgement.faults);
        report
    }

    /// The same for a scenario in which something may be wrong: faults are in the report alone.
    pub fn conclude(&mut self) -> Report {
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

fn daemon<S: Servers>(lab: &Lab<S>, name: &str, set: &[String]) -> Daemon {
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    lab.daemon(name, &set)
}

/// So many ports that are free, each another one.
pub(crate) fn free_ports(count: usize) -> Vec<u16> {
    let mut ports = BTreeSet::new();
    while ports.len() < count {
        ports.insert(free_port().expect("a port is free"));
    }
    ports.into_iter().collect()
}
