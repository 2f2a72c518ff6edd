//! What a worker says to be one: it opens epochs, registers and beats.

use super::{Database, Expected, Gate, Moment, Refused, Stop, Switch, Worker, WorkerStatus};
use super::{End, Place, RunEnd};
use crate::ids::{Call, Epoch, JobId, Token, WorkerId};
use std::collections::BTreeSet;
use uuid::Uuid;

/// Stands among the expected when the database knows no worker: one that came alone may be part of what was lost, and nobody else
/// can name it.
pub(super) const NOBODY_KNOWN: WorkerId = WorkerId(Uuid::nil());
/// For a worker of which nothing is known, in milliseconds.
const UNKNOWN_LEASE_TTL: i64 = 60_000;

/// The present epoch, as a worker is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Its name.
    pub epoch: Epoch,
    /// Its number.
    pub epoch_no: i64,
    /// What claims may take.
    pub gate: Gate,
    /// The asking worker's last beat; `None`: it is unknown.
    pub beat: Option<i64>,
}

/// What a worker says of itself. Times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// How long its leases last after a beat.
    pub lease_ttl: i64,
    /// From beat to beat.
    pub heartbeat: i64,
}

/// A beat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Its number.
    pub beat: i64,
    /// Claim calls up to this one have been answered or given up.
    pub settled: Call,
    /// Of these, the calls with jobs that have not ended.
    pub open: Vec<Call>,
    /// The worker claims nothing more.
    pub draining: bool,
}

/// What a beat brings back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BeatAnswer {
    /// The workers that are there.
    pub workers: BTreeSet<WorkerId>,
    /// Leases whose handlers must be stopped.
    pub revoked: BTreeSet<(JobId, Token)>,
    /// What claims may take.
    pub gate: Gate,
    /// How many jobs went back because their claim's answer was never read.
    pub ghosts: usize,
}

impl Database {
    /// The present epoch. After a crash, a switch or a restore the first to ask opens a new one, and with it a window in which
    /// every worker that the database knows must speak before jobs from before are claimed. On another system than before it is
    /// on hold until a person accepts that.
    /// `seen` is the highest epoch number that the caller knows.
    pub fn open_epoch(&mut self, now: Moment, worker: WorkerId, seen: i64) -> Opened {
        if !self.here || self.elsewhere {
            self.here = true;
            self.epoch = Epoch(self.name());
            self.epoch_no = self.epoch_no.max(seen) + 1;
            self.expected = self
                .workers
                .iter()
                .filter(|(_, worker)| worker.is_there())
                .map(|(id, worker)| (*id, Expected::silent(worker.lease_ttl)))
                .collect();
            if self.expected.is_empty() {
                let lease_ttl = self.longest_lease();
                self.expected
                    .insert(NOBODY_KNOWN, Expected::silent(lease_ttl));
            }
            if self.elsewhere {
                self.gate = Gate::Hold;
            } else if self.gate == Gate::Open {
                self.gate = Gate::Window;
            }
            self.unaccepted |= self.elsewhere;
            let switch = Switch {
                other_system: self.elsewhere,
                ..Switch::default()
            };
            self.switches.entry(self.epoch_no).or_insert(switch);
            self.elsewhere = false;
            self.mark = self.next_pos().0;
            self.opened_at = now;
        }
        Opened {
            epoch: self.epoch,
            epoch_no: self.epoch_no,
            gate: self.gate,
            beat: self.workers.get(&worker).map(|worker| worker.beat),
        }
    }

    /// Makes a worker known.
    ///
    /// # Errors
    /// [`Refused::Input`] for a heartbeat above a third of the lease, or an id that is known.
    pub fn register(
        &mut self,
        now: Moment,
        id: WorkerId,
        registration: Registration,
    ) -> Result<Opened, Refused> {
        let Registration {
            lease_ttl,
            heartbeat,
        } = registration;
        if heartbeat <= 0 || heartbeat * 3 > lease_ttl || self.workers.contains_key(&id) {
            return Err(Refused::Input);
        }
        let opened = self.open_epoch(now, id, 0);
        self.insert_worker(now, id, registration, 0);
        Ok(opened)
    }

    /// A new worker, of which no other has been told yet.
    pub(super) fn insert_worker(
        &mut self,
        now: Moment,
        id: WorkerId,
        registration: Registration,
        beat: i64,
    ) {
        for other in self.workers.values_mut() {
            other.told = false;
        }
        let worker = Worker {
            status: WorkerStatus::Live,
            lease_ttl: registration.lease_ttl,
            heartbeat: registration.heartbeat,
            admitted: false,
            told: false,
            started_at: now,
            beat,
            beat_at: now,
            settled: Call(0),
            ended_at: None,
        };
        self.workers.insert(id, worker);
    }

    pub(super) fn worker_there(&mut self, id: WorkerId) -> Result<&mut Worker, Refused> {
        let worker = self.workers.get_mut(&id);
        worker
            .filter(|worker| worker.is_there())
            .ok_or(Refused::WorkerGone)
    }

    pub(super) fn longest_lease(&self) -> i64 {
        let known = self.workers.values().map(|worker| worker.lease_ttl).max();
        known.unwrap_or(UNKNOWN_LEASE_TTL)
    }

    /// Renews a worker and with it its leases. Jobs of settled calls that it does not name go back: nobody runs them.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`] and [`Refused::WorkerGone`].
    pub fn heartbeat(
        &mut self,
        now: Moment,
        id: WorkerId,
        epoch: Epoch,
        said: &Heartbeat,
    ) -> Result<BeatAnswer, Refused> {
        self.assert_epoch(epoch)?;
        let worker = self.worker_there(id)?;
        worker.beat = worker.beat.max(said.beat);
        worker.beat_at = now;
        worker.told = true;
        worker.settled = worker.settled.max(said.settled);
        if said.draining {
            worker.status = WorkerStatus::Draining;
        }
        let ghosts = self.leases(|lease| {
            lease.worker == id
                && lease.until.is_none()
                && lease.call <= said.settled
                && !said.open.contains(&lease.call)
        });
        self.end_all(now, &ghosts, End::Ghost);
        let there = self.workers.iter().filter(|(_, worker)| worker.is_there());
        Ok(BeatAnswer {
            workers: there.map(|(id, _)| *id).collect(),
            revoked: self.revoked(id),
            gate: self.gate,
            ghosts: ghosts.len(),
        })
    }

    fn revoked(&self, id: WorkerId) -> BTreeSet<(JobId, Token)> {
        let stops = self
            .stops
            .keys()
            .filter_map(|job| match &self.jobs.get(job)?.place {
                Place::Leased(lease) if lease.worker == id => Some((*job, lease.token)),
                _ => None,
            });
        let taken = self.revocations.keys().filter(|(worker, ..)| *worker == id);
        stops
            .chain(taken.map(|(_, job, token)| (*job, *token)))
            .collect()
    }

    /// The leases for which `chosen` holds, as ends that still lack their kind.
    pub(super) fn leases(&self, chosen: impl Fn(&super::Lease) -> bool) -> Vec<RunEnd> {
        let mut found = Vec::new();
        for (id, job) in &self.jobs {
            if let Place::Leased(lease) = &job.place
                && chosen(lease)
            {
                found.push(RunEnd::plain(*id, job.run, lease.token));
            }
        }
        found
    }

    /// A person asked for the end of the job while it runs; the first one counts.
    pub(super) fn ask_stop(&mut self, id: JobId, stop: Stop) {
        self.stops.entry(id).or_insert(stop);
    }
}
