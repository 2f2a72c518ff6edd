//! Jobs are given out.

use super::{Database, Gate, Lease, Moment, Place, Refused, WorkerStatus};
use crate::ids::{Call, Epoch, JobId, Run, Token, WorkerId};
use std::collections::BTreeMap;

/// What a worker asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// A number that grows with each call of the worker.
    pub call: Call,
    /// Job types, at most how many of each, and the number of attempts for jobs that name none.
    pub lanes: Vec<(String, i32, i32)>,
    /// At most so many of all; `None`: the sum of the limits.
    pub total: Option<i32>,
    /// Job types whose handlers have their effects in this database.
    pub rerun: Vec<String>,
}

/// A job that was given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The job.
    pub job: JobId,
    /// Its run.
    pub run: Run,
    /// The lease's name.
    pub token: Token,
    /// The number of this attempt.
    pub attempt: i32,
    /// The last attempt has this number.
    pub max_attempts: i32,
}

impl Database {
    /// Gives jobs out: the lowest priority number first, then in the order in which they became ready.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`]; [`Refused::WorkerGone`]; [`Refused::State`] when the call is settled, so nobody would read
    /// the answer.
    pub fn claim(
        &mut self,
        now: Moment,
        id: WorkerId,
        epoch: Epoch,
        claim: &Claim,
    ) -> Result<Vec<Claimed>, Refused> {
        self.assert_epoch(epoch)?;
        let worker = self.worker_there(id)?;
        if claim.call <= worker.settled {
            return Err(Refused::State);
        }
        let total = claim
            .total
            .unwrap_or_else(|| claim.lanes.iter().map(|lane| lane.1).sum());
        if total <= 0 || self.gate == Gate::Hold || !self.admit(now, id) {
            return Ok(Vec::new());
        }
        let mut left: BTreeMap<&str, i32> = claim
            .lanes
            .iter()
            .map(|(lane, limit, _)| (lane.as_str(), *limit))
            .collect();
        let mut chosen = Vec::new();
        for (_, _, job) in self.claimable() {
            let lane = left.get_mut(self.jobs[&job].asked.job_type.as_str());
            if chosen.len() == usize::try_from(total).unwrap_or(0) {
                break;
            }
            if let Some(lane) = lane.filter(|left| **left > 0) {
                *lane -= 1;
                chosen.push(job);
            }
        }
        if !chosen.is_empty() {
            self.note_claim(now);
        }
        Ok(chosen
            .into_iter()
            .map(|job| self.lease(now, id, claim, job))
            .collect())
    }

    /// What may be claimed now, in its order. In a window all that stood in ready at its opening may have been claimed or
    /// finished in the lost tail, the owner of a unique key may yet come back, and so may a job whose enqueue was lost.
    fn claimable(&self) -> Vec<(i32, (u64, u64), JobId)> {
        let window = self.gate == Gate::Window;
        let mut ready = Vec::new();
        for (id, job) in &self.jobs {
            if let Place::Ready { pos } = job.place
                && !self.paused.contains(&job.asked.job_type)
                && !(window && (pos.0 <= self.mark || job.keyed || job.repeated))
            {
                ready.push((job.asked.priority, pos, *id));
            }
        }
        ready.sort_unstable();
        ready
    }

    /// A new worker claims when all others know of it, since after a switch that loses its registration they must name it. They
    /// are told by their beats; it waits for them no longer than they have time to.
    fn admit(&mut self, now: Moment, id: WorkerId) -> bool {
        let Some(me) = self
            .workers
            .get(&id)
            .filter(|me| me.status == WorkerStatus::Live)
        else {
            return false;
        };
        let known = self
            .workers
            .iter()
            .all(|(other, worker)| *other == id || !worker.is_there() || worker.told);
        let waited = 2 * (now - me.started_at) >= 3 * me.heartbeat;
        let admitted = me.admitted || known || waited;
        if let Some(me) = self.workers.get_mut(&id) {
            me.admitted = admitted;
        }
        admitted
    }

    fn lease(&mut self, now: Moment, worker: WorkerId, claim: &Claim, id: JobId) -> Claimed {
        let token = Token(self.name());
        let epoch_no = self.epoch_no;
        let mut claimed = Claimed {
            job: id,
            run: Run(0),
            token,
            attempt: 0,
            max_attempts: 5,
        };
        if let Some(job) = self.jobs.get_mut(&id) {
            let policy = claim.lanes.iter().find(|lane| lane.0 == job.asked.job_type);
            let policy = policy.map_or(5, |lane| lane.2);
            job.run.0 += 1;
            job.attempts += 1;
            claimed.run = job.run;
            claimed.attempt = job.attempts;
            claimed.max_attempts = job.asked.max_attempts.unwrap_or(policy);
            job.place = Place::Leased(Lease {
                token,
                worker,
                call: claim.call,
                epoch_no,
                max_attempts: claimed.max_attempts,
                until: None,
                started_at: now,
                leaves_effects: claim.rerun.contains(&job.asked.job_type),
                given_up: false,
            });
        }
        claimed
    }
}
