//! Time: what becomes due, who is lost, what is recovered.

use super::{Database, End, Expected, Gate, Moment, Outcome, Place, Refused, Stop, WorkerStatus};
use crate::ids::{Epoch, JobId, Run, WorkerId};

/// Sweeps come each second. After a longer pause than this nobody can be blamed for a late beat, in milliseconds.
const GAP: i64 = 3_000;
/// So soon after a sweep there is no other one, in milliseconds.
const JUST_SWEPT: i64 = 500;
/// For so long a worker can be told that its lease was taken, in milliseconds.
const REVOCATIONS_KEPT: i64 = 3_600_000;
/// For so long workers that ended are shown, in milliseconds.
const WORKERS_KEPT: i64 = 86_400_000;

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// `false`: somebody had just swept.
    pub swept: bool,
    /// Due jobs that became ready.
    pub promoted: usize,
    /// Leases that nobody renewed.
    pub recovered: usize,
    /// Workers that were declared lost.
    pub lost: usize,
}

impl Database {
    /// The clock of recovery. A pause of the sweeps, or a clock that went back, means that nobody could renew: it counts against
    /// nobody, and all that was good at the last sweep starts anew.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`].
    pub fn sweep(&mut self, now: Moment, epoch: Epoch) -> Result<Swept, Refused> {
        self.assert_epoch(epoch)?;
        let before = self.swept_at;
        let gap = now - before;
        if (0..=JUST_SWEPT).contains(&gap) {
            return Ok(Swept::default());
        }
        self.swept_at = now;
        let mut swept = Swept {
            swept: true,
            ..Swept::default()
        };
        if !(0..=GAP).contains(&gap) {
            self.excuse(before, now);
            return Ok(swept);
        }
        self.close_window(now, true);
        if self.gate == Gate::Open {
            let late = |worker: &&super::Worker| {
                worker.is_there() && worker.beat_at + worker.lease_ttl < now
            };
            let lost: Vec<WorkerId> = self
                .workers
                .iter()
                .filter(|(_, worker)| late(worker))
                .map(|(id, _)| *id)
                .collect();
            swept.lost = lost.len();
            if !lost.is_empty() {
                self.declare(&lost, WorkerStatus::Lost, now);
                swept.recovered = self.recover(now);
            }
            swept.recovered += self.recover(now);
            self.carry_out_stops(now);
            swept.promoted = self.promote_due(now);
            self.revocations
                .retain(|_, at| *at >= now - REVOCATIONS_KEPT);
            self.workers
                .retain(|_, worker| worker.ended_at.is_none_or(|at| at >= now - WORKERS_KEPT));
        }
        Ok(swept)
    }

    fn excuse(&mut self, before: Moment, now: Moment) {
        for worker in self.workers.values_mut() {
            if worker.is_there() && worker.beat_at + worker.lease_ttl >= before {
                worker.beat_at = now;
            }
        }
        for job in self.jobs.values_mut() {
            if let Place::Leased(lease) = &mut job.place {
                lease.until = lease.until.map(|until| {
                    if until >= before {
                        until + now - before
                    } else {
                        until
                    }
                });
            }
        }
        if self.gate == Gate::Window {
            // The window's time, too, is the time in which its workers could speak.
            self.opened_at = now;
        }
    }

    /// The window closes when all have spoken. Whoever has not, or not to the end, is waited for until its leases have surely ended,
    /// which only a sweep may judge.
    pub(super) fn close_window(&mut self, now: Moment, by_time: bool) -> bool {
        let opened_at = self.opened_at;
        let waited = |it: &Expected| {
            let heard_at = it.heard_at.filter(|heard_at| *heard_at <= now);
            by_time && opened_at.max(heard_at.unwrap_or(opened_at)) + it.lease_ttl <= now
        };
        let all = self.expected.values().all(|it| it.spoken || waited(it));
        let closes = self.gate == Gate::Window && all;
        if closes {
            self.gate = Gate::Open;
            for it in self.expected.values_mut().filter(|it| !it.spoken) {
                it.absent = true;
            }
            if let Some(switch) = self.switches.get_mut(&self.epoch_no) {
                switch.closed = true;
            }
        }
        closes
    }

    /// These workers are no more. What they hold is recovered, at once when nobody re-attaches.
    pub(super) fn declare(&mut self, gone: &[WorkerId], status: WorkerStatus, now: Moment) {
        for id in gone {
            if let Some(worker) = self.workers.get_mut(id).filter(|worker| worker.is_there()) {
                worker.status = status;
                worker.ended_at = Some(now);
            }
            if let Some(expected) = self.expected.get_mut(id).filter(|it| !it.spoken) {
                expected.spoken = true;
                expected.absent = status == WorkerStatus::Lost;
            }
        }
    }

    /// Ends the leases that nobody renews: their own time has passed, or without one their worker is not there.
    pub(super) fn recover(&mut self, now: Moment) -> usize {
        self.forget_effects();
        let orphans = self.leases(|lease| match lease.until {
            Some(until) => until < now,
            None => !self
                .workers
                .get(&lease.worker)
                .is_some_and(super::Worker::is_there),
        });
        for run in &orphans {
            self.note_recovered(run);
        }
        // What a worker that left still holds comes from a claim whose answer it never read.
        let (ghosts, lost): (Vec<_>, Vec<_>) = orphans
            .into_iter()
            .partition(|run| self.is_of_a_leaver(run.job));
        self.end_all(now, &ghosts, End::Ghost);
        self.end_all(now, &lost, End::Lost);
        ghosts.len() + lost.len()
    }

    fn is_of_a_leaver(&self, id: JobId) -> bool {
        let Place::Leased(lease) = &self.jobs[&id].place else {
            return false;
        };
        let left = self
            .workers
            .get(&lease.worker)
            .is_some_and(|worker| worker.status == WorkerStatus::Stopped);
        lease.until.is_none() && left
    }

    /// Requests about runs that ended without carrying them out, and about jobs that go on elsewhere and whose worker is gone.
    fn carry_out_stops(&mut self, now: Moment) {
        let alone = self.leases(|lease| {
            let worker = self.workers.get(&lease.worker);
            lease.until.is_some() && !worker.is_some_and(super::Worker::is_there)
        });
        let asked: Vec<_> = alone
            .into_iter()
            .filter(|run| self.stops.contains_key(&run.job))
            .collect();
        if !asked.is_empty() {
            self.end_all(now, &asked, End::Released);
        }
        let leased = |id: &JobId| matches!(self.jobs[id].place, Place::Leased(_));
        let left: Vec<(JobId, Stop)> = self
            .stops
            .iter()
            .filter(|(id, _)| !leased(id))
            .map(|(id, stop)| (*id, *stop))
            .collect();
        for (id, stop) in left {
            self.stops.remove(&id);
            self.end_waiting(id, stop);
        }
    }

    /// Ends a job that neither runs nor has ended. `false`: there is no such job.
    pub(super) fn end_waiting(&mut self, id: JobId, stop: Stop) -> bool {
        let Some(job) = self.jobs.get(&id) else {
            return false;
        };
        if matches!(job.place, Place::Leased(_) | Place::Ended(_)) {
            return false;
        }
        let outcome = Outcome {
            status: stop.status(),
            token: None,
            worker: None,
            epoch_no: self.epoch_no,
            result: None,
        };
        self.end_job(id, Run(job.run.0 + 1), job.attempts, outcome);
        true
    }

    /// Makes due jobs ready, in the order in which they became due.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`].
    pub fn promote(&mut self, now: Moment, epoch: Epoch) -> Result<usize, Refused> {
        self.assert_epoch(epoch)?;
        Ok(self.promote_due(now))
    }

    pub(super) fn promote_due(&mut self, now: Moment) -> usize {
        if self.gate != Gate::Open {
            return 0;
        }
        let first = self.last_pos + 1;
        let mut dues = Vec::new();
        for job in self.jobs.values() {
            if let Place::Later { due, .. } = job.place
                && due <= now
            {
                dues.push(due);
            }
        }
        dues.sort_unstable();
        for job in self.jobs.values_mut() {
            if let Place::Later { due, .. } = job.place
                && due <= now
            {
                // Those with the same due time share a position.
                let pos = first + dues.partition_point(|it| *it < due) as u64;
                job.place = Place::Ready { pos: (pos, 0) };
                self.last_pos = self.last_pos.max(pos);
            }
        }
        dues.len()
    }

    /// The worker leaves; what it still holds is recovered as lost.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`].
    pub fn deregister(&mut self, now: Moment, id: WorkerId, epoch: Epoch) -> Result<(), Refused> {
        self.assert_epoch(epoch)?;
        self.leave(&[id], WorkerStatus::Stopped, now);
        Ok(())
    }

    pub(super) fn leave(&mut self, gone: &[WorkerId], status: WorkerStatus, now: Moment) {
        self.declare(gone, status, now);
        if self.gate == Gate::Open {
            self.recover(now);
        }
    }
}
