//! What must never be, looked for after each step.

use std::collections::{BTreeMap, BTreeSet};

use super::cluster::{Cluster, SERVERS};
use super::daemon::{Daemon, follow_up, followed};
use super::network::Seen;
use super::server::{Answer, Statement};
use super::world::{Report, Violation};
use tenure_core::ids::{Epoch, JobId, Token, WorkerId};
use tenure_core::model::{
    Database, EndAnswer, Gate, Kept, Outcome, Place, ReattachAnswer, Statement as Said, Status,
    WorkerStatus,
};

/// A standby that lacks the sweeps of so many milliseconds shows none.
const UNSWEPT: i64 = 2_500;

#[derive(Debug)]
struct Living {
    daemon: usize,
    token: Token,
    /// Led by an old primary or a false proof, or unknown to all others.
    led: Option<Led>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Led {
    Astray,
    Misled,
    Stranger,
}

/// Who knows something that must not be lost.
#[derive(Clone, Copy, Debug)]
struct Knows {
    daemon: usize,
    /// It is dead, came too late, or was led by an old primary.
    excused: bool,
}

/// Sees everything.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    pub(crate) report: Report,
    living: BTreeMap<JobId, Vec<Living>>,
    led: BTreeMap<usize, Led>,
    claimed: BTreeMap<JobId, Knows>,
    completed: BTreeMap<JobId, Knows>,
    spoke: BTreeSet<(Epoch, usize)>,
    /// Admitted though not all others had heard of them.
    strangers: BTreeSet<WorkerId>,
    /// Jobs that an old primary gave out: that run is higher than those of the new side, and wins when its worker comes over.
    strayed: BTreeSet<JobId>,
}

/// What the database showed before a statement.
#[derive(Debug)]
pub(crate) struct Before {
    gate: Gate,
    here: bool,
    places: Vec<Shown>,
    known: bool,
    admitted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Missing,
    Leased,
    Other,
}

impl Judge {
    /// A primary is about to be succeeded, or to lose its epoch.
    pub(crate) fn switches(&mut self, cluster: &Cluster) {
        let last = cluster.shows(cluster.latest);
        self.report.counts.second_switches += u64::from(last.gate == Gate::Window || !last.here);
    }

    pub(crate) fn promoted(&mut self, lost: usize) {
        self.report.counts.promotions += 1;
        self.lost(lost);
    }

    pub(crate) fn lost(&mut self, commits: usize) {
        self.report.counts.lost_commits += commits as u64;
    }

    /// Takes in what the daemons did.
    pub(crate) fn see(&mut self, at: u64, seen: Seen, cluster: &Cluster, daemons: &[Daemon]) {
        let counts = &mut self.report.counts;
        match seen {
            Seen::Claimed {
                daemon,
                job,
                astray,
            } => {
                if astray {
                    self.strayed.insert(job);
                }
                let excused = astray;
                self.claimed.insert(job, Knows { daemon, excused });
            }
            Seen::Started {
                daemon,
                host,
                job,
                token,
                astray,
            } => {
                counts.started += 1;
                let led = astray.then_some(Led::Astray);
                let led = led.or(self.led.get(&daemon).copied());
                let present = host == cluster.latest && led.is_none();
                if present {
                    self.check_lease(at, daemon, job, token, cluster, daemons);
                }
                self.check_overlap(at, job, led);
                self.check_again(at, job, led);
                let living = Living { daemon, token, led };
                self.living.entry(job).or_default().push(living);
            }
            Seen::Dead { job, token } => {
                if let Some(living) = self.living.get_mut(&job) {
                    living.retain(|one| one.token != token);
                }
            }
            Seen::Completed {
                daemon,
                job,
                token,
                astray,
            } => {
                let shows = cluster.shows(cluster.latest).jobs.get(&job);
                // It may have been cancelled meanwhile; so this run had ended, and this answer was lost.
                let cancelled = shows.is_some_and(|job| match &job.place {
                    Place::Ended(outcome) => outcome.token != Some(token),
                    _ => false,
                });
                if !cancelled {
                    let excused = astray;
                    self.completed.insert(job, Knows { daemon, excused });
                }
            }
            Seen::Confirmed { daemon, astray } => {
                counts.astray += u64::from(astray);
                self.leads(daemon, astray.then_some(Led::Astray));
            }
            Seen::Proved { daemon, asked } => {
                counts.proofs += 1;
                if unseen_primary(cluster, at, asked) {
                    counts.false_proofs += 1;
                    self.leads(daemon, Some(Led::Misled));
                }
            }
            Seen::Ended {
                daemon,
                keeps,
                forgets,
            } => {
                let claimed = self.claimed.iter_mut();
                // Of what was running nothing stands on a disk.
                for (job, knows) in claimed.filter(|(_, knows)| knows.daemon == daemon) {
                    knows.excused |= !keeps.contains(job);
                }
                if forgets {
                    self.excuse(daemon, |_| true);
                }
            }
            Seen::Distrusted(handlers) => counts.distrusted += handlers,
            Seen::Succeeded => counts.successions += 1,
        }
    }

    fn leads(&mut self, daemon: usize, led: Option<Led>) {
        match led {
            Some(led) => {
                self.led.insert(daemon, led);
                let handlers = self.living.values_mut().flatten();
                for living in handlers.filter(|living| living.daemon == daemon) {
                    living.led = Some(led);
                }
            }
            None => {
                self.led.remove(&daemon);
            }
        }
    }

    fn check_lease(
        &mut self,
        at: u64,
        daemon: usize,
        job: JobId,
        token: Token,
        cluster: &Cluster,
        daemons: &[Daemon],
    ) {
        let shown = cluster.shows(cluster.latest);
        let same = shown.here && daemons[daemon].is_in(shown.epoch);
        let place = shown.jobs.get(&job).map(|job| &job.place);
        let holds = matches!(place, Some(Place::Leased(lease)) if lease.token == token);
        if same && !holds {
            self.report.violations.push(Violation::NoLease { at });
        }
    }

    fn check_overlap(&mut self, at: u64, job: JobId, led: Option<Led>) {
        let others = self.living.get(&job).into_iter().flatten();
        let mut violates = false;
        for other in others {
            match led.or(other.led) {
                Some(Led::Astray) => self.report.counts.overlaps_astray += 1,
                Some(Led::Misled) => self.report.counts.overlaps_misled += 1,
                Some(Led::Stranger) => self.report.counts.overlaps_strange += 1,
                None => violates = true,
            }
        }
        if violates {
            self.report.violations.push(Violation::TwoHandlers { at });
        }
    }

    fn check_again(&mut self, at: u64, job: JobId, led: Option<Led>) {
        let Some(knows) = self.completed.remove(&job) else {
            return;
        };
        if knows.excused || led.is_some() || self.strayed.contains(&job) {
            self.report.counts.ran_again_excused += 1;
        } else {
            self.report.violations.push(Violation::RunsAgain { at });
        }
    }

    /// What this daemon knew need not be known any more, where `chosen`.
    fn excuse(&mut self, daemon: usize, chosen: impl Fn(JobId) -> bool) {
        let all = self.claimed.iter_mut().chain(&mut self.completed);
        for (job, knows) in all.filter(|(_, knows)| knows.daemon == daemon) {
            knows.excused |= chosen(*job);
        }
    }

    /// To be asked before a statement is carried out.
    pub(crate) fn before(database: &Database, statement: &Statement) -> Before {
        let mut places = Vec::new();
        let mut known = true;
        if let Statement::Reattach { worker, said, .. } = statement {
            known = database.workers.contains_key(worker);
            places.extend(said.statements.iter().map(|said| shown(database, said)));
        }
        let admitted = match statement {
            Statement::Claim { worker, .. } => is_admitted(database, *worker),
            _ => true,
        };
        Before {
            admitted,
            gate: database.gate,
            here: database.here,
            places,
            known,
        }
    }

    /// To be told after it was carried out on the present primary.
    pub(crate) fn after(
        &mut self,
        (at, time): (u64, i64),
        database: &Database,
        before: &Before,
        (daemon, statement, answer): (usize, &Statement, &Answer),
        daemons: &[Daemon],
    ) {
        self.report.counts.windows += u64::from(!before.here && database.here);
        if let (Statement::Reattach { said, .. }, Answer::Reattached(answers)) = (statement, answer)
        {
            self.spoke.insert((database.epoch, daemon));
            self.report.counts.reattached += 1;
            self.report.counts.registered_again +=
                u64::from(!before.known && !said.roster.is_empty());
            for ((said, answer), shown) in said.statements.iter().zip(answers).zip(&before.places) {
                self.count(said, *answer, *shown);
            }
        }
        if let Statement::Claim { worker, .. } = statement
            && !before.admitted
            && is_admitted(database, *worker)
        {
            self.admitted(database, *worker, daemons);
        }
        if before.gate == Gate::Window && database.gate == Gate::Open {
            self.closed((at, time), database, daemons);
        }
    }

    fn count(&mut self, said: &Said, answer: ReattachAnswer, shown: Shown) {
        let counts = &mut self.report.counts;
        let lacked = shown != Shown::Leased;
        match (said, answer) {
            (Said::Hold(_), ReattachAnswer::Held(Kept::Keep)) => {
                counts.restored_leases += u64::from(lacked);
                counts.put_back += u64::from(shown == Shown::Missing);
            }
            (Said::Ended { .. }, ReattachAnswer::Ended(EndAnswer::Done(_))) => {
                counts.written_again += 1;
                counts.put_back += u64::from(shown == Shown::Missing);
            }
            (Said::Ended { .. }, _) => counts.said_in_vain += 1,
            _ => {}
        }
    }

    /// A worker may claim. The others have been told of it, or had the time to ask; but has the answer reached them?
    fn admitted(&mut self, database: &Database, worker: WorkerId, daemons: &[Daemon]) {
        let there = |id: &WorkerId| {
            let row = database.workers.get(id);
            row.is_some_and(|it| matches!(it.status, WorkerStatus::Live | WorkerStatus::Draining))
        };
        let unheard = |daemon: &Daemon| {
            let other = daemon.worker_asked_for().filter(|it| *it != worker);
            other.is_some_and(|it| there(&it)) && !daemon.has_heard_of(worker)
        };
        if daemons.iter().any(unheard) {
            self.strangers.insert(worker);
        }
    }

    /// Jobs from before are claimed from now on: have all been heard that live and have something to say?
    fn closed(&mut self, (at, time): (u64, i64), database: &Database, daemons: &[Daemon]) {
        let waits = database.expected.values().any(|it| !it.spoken);
        self.report.counts.closed_by_time += u64::from(waits);
        self.report.counts.closed_by_all += u64::from(!waits);
        for (daemon, body) in daemons.iter().enumerate() {
            if self.spoke.contains(&(database.epoch, daemon)) {
                continue;
            }
            let worker = body.worker_asked_for();
            let expected = worker.and_then(|worker| database.expected.get(&worker));
            let unknown = worker.filter(|it| !database.workers.contains_key(it));
            if expected.is_none() && unknown.is_some_and(|it| self.strangers.contains(&it)) {
                self.report.counts.closed_on_strangers += 1;
                self.leads(daemon, Some(Led::Stranger));
            }
            let absent =
                expected.is_some_and(|it| !it.spoken && database.opened_at + it.lease_ttl <= time);
            let present = body.trusts(at) && !absent && !self.led.contains_key(&daemon);
            let lacks = |job: JobId| lacks(database, job, self.completed.contains_key(&job));
            let all = self.claimed.iter().chain(&self.completed);
            let knows = all
                .filter(|(_, knows)| knows.daemon == daemon && !knows.excused)
                .any(|(job, _)| lacks(*job));
            let holds = self.living.iter().any(|(_, living)| {
                living
                    .iter()
                    .any(|one| one.daemon == daemon && one.led.is_none())
            });
            if present && (knows || holds) {
                self.report.violations.push(Violation::ClosedEarly { at });
            } else {
                let completed: BTreeSet<JobId> = self.completed.keys().copied().collect();
                self.excuse(daemon, |job| {
                    self::lacks(database, job, completed.contains(&job))
                });
            }
        }
    }

    /// At the end of the peace.
    pub(crate) fn at_the_end(&mut self, database: &Database) {
        let violations = &mut self.report.violations;
        if !all_ended(database) {
            violations.push(Violation::Unfinished);
        }
        for (job, knows) in &self.claimed {
            if !knows.excused && !database.jobs.contains_key(job) {
                violations.push(Violation::Lost);
            }
        }
        for (job, knows) in &self.completed {
            let cancelled = database.jobs.get(job).is_some_and(
                |job| matches!(&job.place, Place::Ended(it) if it.status == Status::Cancelled),
            );
            if cancelled && !knows.excused {
                self.report.counts.cancelled_over += 1;
            } else if !knows.excused && lacks(database, *job, true) {
                violations.push(Violation::OpenAgain);
            }
        }
        for (id, job) in &database.jobs {
            if let Place::Ended(Outcome {
                status: Status::Completed,
                token: Some(token),
                ..
            }) = job.place
                && followed(*id).is_none()
                && follow_up(token).is_some_and(|next| !database.jobs.contains_key(&next))
            {
                violations.push(Violation::FollowUp);
            }
            let Some(run) = followed(*id) else {
                continue;
            };
            self.report.counts.follow_ups += 1;
            let parents = database.jobs.values().filter(
                |job| matches!(&job.place, Place::Ended(outcome) if outcome.token == Some(run)),
            );
            // One that was claimed before its enqueue was lost is put back, whatever became of the run that it follows.
            if parents.count() != 1 && !self.claimed.contains_key(id) {
                violations.push(Violation::FollowUp);
            }
        }
    }
}

fn is_admitted(database: &Database, worker: WorkerId) -> bool {
    let row = database.workers.get(&worker);
    row.is_some_and(|row| row.admitted)
}

/// Whether all jobs have ended.
pub(crate) fn all_ended(database: &Database) -> bool {
    let mut jobs = database.jobs.values();
    jobs.all(|job| matches!(job.place, Place::Ended(_)))
}

/// Whether the database does not show the job, or not that it has completed.
fn lacks(database: &Database, job: JobId, completed: bool) -> bool {
    let place = database.jobs.get(&job).map(|job| &job.place);
    match place {
        None => true,
        Some(Place::Ended(outcome)) => completed && outcome.status != Status::Completed,
        Some(_) => completed,
    }
}

fn shown(database: &Database, said: &Said) -> Shown {
    let memory = said.memory();
    match database.jobs.get(&memory.job).map(|job| &job.place) {
        None => Shown::Missing,
        Some(Place::Leased(lease)) if lease.token == memory.token => Shown::Leased,
        Some(_) => Shown::Other,
    }
}

/// Whether a primary was at work when the servers were asked, and no standby showed it: it was cut off from all of them.
fn unseen_primary(cluster: &Cluster, now: u64, asked: u64) -> bool {
    let mut primaries = (0..SERVERS)
        .filter(|host| cluster.writable(*host, now) && cluster.servers[*host].since <= asked);
    primaries.any(|primary| {
        let swept = cluster.shows(primary).swept_at;
        (0..SERVERS).filter(|host| *host != primary).all(|standby| {
            !cluster.follows(standby, primary) || cluster.shows(standby).swept_at < swept - UNSWEPT
        })
    })
}
