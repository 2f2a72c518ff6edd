//! Three servers behind one proxy, three workers of one queue, and producers.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use chaos_tests::{
    Cluster, Daemon, Lab, MIX, Notes, PATIENCE, Producers, Proxy, Random, What, servers, uptime,
};
use tenure_embedded::{Server, Sql};
use tenure_verdict::switches::{Absence, Enqueue, Switch};
use tenure_verdict::{OUTCOMES, Shown};

use crate::numbers::{History, Numbers};
use crate::queue::Queue;

/// How long jobs go on coming after the first new one has ended.
const AFTERMATH: Duration = Duration::from_secs(3);

/// See the module. Everything in it ends when it is dropped.
pub(crate) struct Rig<'a> {
    queue: &'a dyn Queue,
    producers: Producers,
    workers: Vec<Daemon>,
    lab: Lab,
    /// The servers that are not the present primary.
    pub(crate) others: Vec<Server>,
    /// The only host that workers know.
    pub(crate) proxy: Proxy,
    /// Decides, by the seed, what a fault leaves open.
    pub(crate) random: Random,
    notes: Notes,
    fault: Option<Duration>,
    switch: Option<Switch>,
    absences: Vec<Absence>,
}

impl<'a> Rig<'a> {
    /// Starts everything, and waits until all workers work, more waits than can run at once, and the standbys have all of it.
    pub(crate) fn start(queue: &'a dyn Queue, seed: u64) -> Self {
        let primary = Server::start(Cluster::options()).expect("PostgreSQL starts");
        let others = servers::two_standbys(&primary);
        let ports = [primary.port(), others[0].port(), others[1].port()];
        let proxy = Proxy::to(primary.port());
        let lab = Lab::bare(primary, proxy.url("app", "postgres"));
        queue.install(&lab);
        let workers: Vec<Daemon> = ["a", "b", "c"].map(|name| queue.start(&lab, name)).into();
        let notes = Notes::new(lab.path("acknowledged"));
        let mut random = Random::new(seed);
        let producers = Producers::start(&ports, &MIX, queue.enqueue(), &mut random, &notes);
        let mut rig = Self {
            queue,
            producers,
            workers,
            lab,
            others,
            proxy,
            random,
            notes,
            fault: None,
            switch: None,
            absences: Vec::new(),
        };
        rig.until_all_work();
        rig.enqueue("ticks-60", 3);
        rig.until_more_witnessed(What::End, 20);
        rig.enqueue("ticks-4", 60);
        let target = rig.lab.server.position().expect("the primary answers");
        rig.lab.wait_for(|| servers::have_all(&rig.others, target));
        rig.random.dawdle(500);
        rig
    }

    /// Waits until each worker has begun a job.
    fn until_all_work(&self) {
        let all: BTreeSet<i32> = self.workers.iter().map(Daemon::pid).collect();
        self.lab.wait_for(|| {
            let lines = self.lab.witnesses();
            let seen: BTreeSet<i32> = lines.iter().map(|line| line.parent).collect();
            match all.difference(&seen).count() {
                0 => Ok(()),
                idle => Err(format!("{idle} workers have not begun a job")),
            }
        });
    }

    /// Puts jobs in at the primary, as a producer does.
    fn enqueue(&self, job_type: &str, count: usize) {
        let port = self.lab.server.port();
        let mut sql = self.lab.sql();
        for _ in 0..count {
            let rows = sql
                .run(&(self.queue.enqueue())(job_type, false))
                .expect("the database takes jobs");
            let id = rows.into_iter().flatten().flatten().next();
            self.notes.write(&id.expect("an id"), job_type, port);
        }
    }

    /// Does this to the primary.
    pub(crate) fn strike(&mut self, blow: impl FnOnce(&mut Server)) {
        self.fault = Some(uptime());
        blow(&mut self.lab.server);
    }

    /// Ends replication to all standbys.
    pub(crate) fn cut_replication(&self) {
        servers::cut_replication(&self.others);
    }

    /// Promotes the standby that is furthest, notes what it has, and points the proxy to it. Returns where among the others the old
    /// primary is now.
    pub(crate) fn promote(&mut self) -> usize {
        let index = servers::furthest(&self.others);
        self.others[index]
            .promote()
            .expect("the standby becomes the primary");
        let writable = uptime();
        std::mem::swap(&mut self.lab.server, &mut self.others[index]);
        // No worker reaches it before the proxy leads there.
        let shown = self.shown();
        let outcomes = shown.iter().filter(|(_, job)| is_outcome(job));
        self.switch = Some(Switch {
            fault: self.fault.unwrap_or(writable),
            writable,
            server: self.lab.server.port(),
            outcomes: outcomes.map(|(id, _)| id.clone()).collect(),
            since: Duration::ZERO,
            jobs: shown.into_keys().collect(),
        });
        self.proxy.point_to(self.lab.server.port());
        servers::follow(&self.others, index, &self.lab.server);
        index
    }

    /// Makes this one of the others a standby of the present primary.
    pub(crate) fn rejoin(&mut self, index: usize) {
        self.others[index]
            .follow(&self.lab.server)
            .expect("the old primary becomes a standby");
    }

    /// SIGKILL to one of the workers. Nobody starts it again.
    pub(crate) fn kill_worker(&mut self) {
        let worker = self.random.choose(&[0, 1, 2]).to_owned();
        let now = uptime();
        self.fault = Some(now);
        self.absences.push(Absence {
            daemon: self.workers[worker].pid(),
            // What ended a second ago is written.
            safe_before: now.saturating_sub(Duration::from_secs(1)),
            until: Duration::MAX,
        });
        self.workers[worker].kill9();
    }

    /// Waits until so many more enqueues were acknowledged than now.
    pub(crate) fn until_more_acknowledged(&self, count: usize) {
        let wanted = self.notes.read().len() + count;
        self.lab.wait_for(|| match self.notes.read().len() {
            now if now >= wanted => Ok(()),
            now => Err(format!("{now} of {wanted} are acknowledged")),
        });
    }

    /// Waits until the witnesses have written so many more lines of this kind than now.
    pub(crate) fn until_more_witnessed(&self, what: What, count: usize) {
        self.lab.until_witnessed(what, self.lab.count(what) + count);
    }

    /// Lets jobs flow for a while, then lets all come to rest, for at most [`PATIENCE`] each, and computes the numbers.
    pub(crate) fn finish(mut self) -> Numbers {
        let fault = self.fault.expect("there was a fault");
        let since = self.switch.as_ref().map_or(fault, |switch| switch.writable);
        let flows = within_patience(|| self.a_new_job_has_ended(since));
        if flows {
            thread::sleep(AFTERMATH);
        }
        self.producers.stop();
        let rests = within_patience(|| self.shown().values().all(is_outcome));
        let died = self.died();
        for worker in &mut self.workers {
            if worker.is_running() {
                worker.stop();
            }
        }
        self.lab.until_handlers_are_dead();
        Numbers::of(&History {
            lines: &self.lab.witnesses(),
            enqueues: &self.notes.read(),
            shown: &self.shown(),
            fault,
            switch: self.switch.as_ref(),
            absences: &self.absences,
            rests,
            died,
        })
    }

    /// Whether a job has ended that the present primary has taken since then.
    fn a_new_job_has_ended(&self, since: Duration) -> bool {
        let port = self.lab.server.port();
        let is_new = |enqueue: &Enqueue| enqueue.at >= since && enqueue.server == port;
        let enqueues = self.notes.read();
        let new = enqueues.iter().filter(|enqueue| is_new(enqueue));
        let new: BTreeSet<&str> = new.map(|enqueue| enqueue.id.as_str()).collect();
        let lines = self.lab.witnesses();
        lines
            .iter()
            .any(|line| line.what == What::End && new.contains(line.job.as_str()))
    }

    /// How many workers have ended that nobody has killed.
    fn died(&mut self) -> usize {
        let killed: BTreeSet<i32> = self.absences.iter().map(|absence| absence.daemon).collect();
        let workers = self.workers.iter_mut();
        workers
            .filter(|worker| !killed.contains(&worker.pid()))
            .map(Daemon::is_running)
            .filter(|running| !running)
            .count()
    }

    /// What the queue's table shows.
    fn shown(&self) -> BTreeMap<String, Shown> {
        let mut sql: Sql = self.lab.sql();
        sql.run(self.queue.shown())
            .expect("the table can be read")
            .into_iter()
            .map(|row| match <[Option<String>; 3]>::try_from(row) {
                Ok([Some(id), Some(status), token]) => (id, Shown { status, token }),
                other => panic!("{other:?}"),
            })
            .collect()
    }
}

fn is_outcome(job: &Shown) -> bool {
    OUTCOMES.contains(&job.status.as_str())
}

/// Whether this comes about within [`PATIENCE`].
fn within_patience(mut check: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if check() {
            return true;
        }
        thread::sleep(Duration::from_millis(100));
    }
    false
}
