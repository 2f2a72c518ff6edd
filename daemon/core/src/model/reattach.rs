//! After a switch, a crash or a restart each worker says what it holds and what it finished. Here is what wins.

use super::epoch::NOBODY_KNOWN;
use super::{
    Asked, Database, End, EndAnswer, Expected, Gate, Job, Lease, Moment, Place, Refused,
    Registration, Review, RunEnd, Stop, WorkerStatus,
};
use crate::ids::{Call, Epoch, JobId, Run, Token, WorkerId};
use std::cmp::Ordering;

/// What a worker remembers of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The job.
    pub job: JobId,
    /// Its run.
    pub run: Run,
    /// The lease's name.
    pub token: Token,
    /// The claim call.
    pub call: Call,
    /// The number of the attempt.
    pub attempt: i32,
    /// The last attempt has this number.
    pub max_attempts: i32,
    /// The epoch of the claim.
    pub epoch_no: i64,
    /// When it was claimed.
    pub started_at: Moment,
    /// The lease's own time from now on, in milliseconds.
    pub until_ms: Option<i64>,
    /// What was asked for, for when the job has to be put back.
    pub asked: Option<Asked>,
}

/// What a worker says about a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Its handler runs.
    Hold(Memory),
    /// It has ended.
    Ended(Memory, RunEnd),
}

impl Statement {
    /// What the worker remembers of the claim.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        let (Self::Hold(memory) | Self::Ended(memory, _)) = self;
        memory
    }
}

/// All that a worker says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reattach {
    /// The number of its last beat.
    pub beat: i64,
    /// What it holds and what it finished.
    pub statements: Vec<Statement>,
    /// The workers that it knows to be there.
    pub roster: Vec<WorkerId>,
    /// Its registration, which may be lost.
    pub registration: Option<Registration>,
    /// Workers that are dead for sure.
    pub predecessors: Vec<WorkerId>,
}

/// The answer to [`Statement::Hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The handler runs on.
    Keep,
    /// It must be stopped.
    Stop,
}

/// The answer to one statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReattachAnswer {
    /// To a hold.
    Held(Kept),
    /// To an end.
    Ended(EndAnswer),
}

impl Database {
    /// Hears a worker out, in the order of the runs of each job. Answers in the order in which the statements were given.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`].
    pub fn reattach(
        &mut self,
        now: Moment,
        id: WorkerId,
        epoch: Epoch,
        said: &Reattach,
    ) -> Result<Vec<ReattachAnswer>, Refused> {
        self.assert_epoch(epoch)?;
        let mut after = self.clone();
        let answers = after.hear(now, id, said)?;
        *self = after;
        Ok(answers)
    }

    fn hear(
        &mut self,
        now: Moment,
        id: WorkerId,
        said: &Reattach,
    ) -> Result<Vec<ReattachAnswer>, Refused> {
        self.register_again(now, id, said);
        self.expect(&said.roster);
        if let Some(me) = self.expected.get_mut(&id) {
            me.spoken = true;
        }
        let alive = self.worker_there(id).is_ok();
        let mut order: Vec<usize> = (0..said.statements.len()).collect();
        order.sort_by_key(|&nth| {
            let memory = said.statements[nth].memory();
            (memory.job, memory.run)
        });
        let mut answers = vec![ReattachAnswer::Held(Kept::Stop); order.len()];
        let mut follow_ups = Vec::new();
        for nth in order {
            let statement = &said.statements[nth];
            let ours = self.restore(now, id, statement.memory());
            answers[nth] = match statement {
                Statement::Hold(_) if ours && alive => ReattachAnswer::Held(Kept::Keep),
                Statement::Hold(_) => ReattachAnswer::Held(Kept::Stop),
                Statement::Ended(_, end) => {
                    let answer = self.end_run(now, end, true);
                    if answer == EndAnswer::Done("completed") && end.end == End::Completed {
                        follow_ups.extend_from_slice(&end.follow_ups);
                    }
                    ReattachAnswer::Ended(answer)
                }
            };
        }
        self.last_pos += 1;
        self.enqueue_together(now, &follow_ups)?;
        let epoch_no = self.epoch_no;
        let named = |token| said.statements.iter().any(|it| it.memory().token == token);
        let ghosts = self.leases(|lease| {
            lease.worker == id
                && lease.until.is_none()
                && lease.epoch_no < epoch_no
                && !named(lease.token)
        });
        self.end_all(now, &ghosts, End::Ghost);
        if !said.predecessors.is_empty() {
            self.leave(&said.predecessors, WorkerStatus::Lost, now);
        }
        if self.close_window(now, false) {
            self.promote_due(now);
        }
        Ok(answers)
    }

    fn register_again(&mut self, now: Moment, id: WorkerId, said: &Reattach) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.beat = worker.beat.max(said.beat);
            worker.beat_at = now;
        } else if let Some(registration) = said.registration {
            // It was there before what was lost. If a beat told it who the others are, it knows all that could claim.
            let told = said.roster.contains(&id);
            if let Some(unknown) = self.expected.get_mut(&NOBODY_KNOWN).filter(|_| told) {
                unknown.spoken = true;
            }
            self.insert_worker(now, id, registration, said.beat);
        }
    }

    /// Whoever a speaker knows to be there must speak too, though the table has lost it.
    fn expect(&mut self, roster: &[WorkerId]) {
        if self.gate != Gate::Window {
            return;
        }
        let lease_ttl = self.longest_lease();
        for id in roster {
            if !self.workers.contains_key(id) {
                self.expected.entry(*id).or_insert(Expected {
                    lease_ttl,
                    spoken: false,
                });
            }
        }
    }

    /// The merge rule. A statement wins when the job is missing, when its run is higher than the database's, or when it is
    /// equal and the lease has its token. What was claimed or ended in the present epoch is never changed by it.
    /// A winner's lease then stands in the database.
    fn restore(&mut self, now: Moment, worker: WorkerId, said: &Memory) -> bool {
        let id = said.job;
        let Some(job) = self.jobs.get(&id) else {
            return match &said.asked {
                Some(asked) => {
                    self.put_back(id, asked);
                    self.let_hold(now, worker, said);
                    true
                }
                None => false,
            };
        };
        let present = match &job.place {
            Place::Leased(lease) => lease.epoch_no >= self.epoch_no,
            Place::Ended(outcome) => outcome.epoch_no >= self.epoch_no,
            Place::Ready { .. } | Place::Later { .. } => false,
        };
        match said.run.cmp(&job.run) {
            Ordering::Equal => {
                let place = self.jobs.get_mut(&id).map(|job| &mut job.place);
                let Some(Place::Leased(lease)) = place.filter(
                    |place| matches!(place, Place::Leased(lease) if lease.token == said.token),
                ) else {
                    return false;
                };
                // A successor takes over what its dead predecessor had ended.
                if lease.worker != worker {
                    (lease.worker, lease.call) = (worker, said.call);
                }
                return true;
            }
            Ordering::Greater if !present => {}
            _ => return false,
        }
        let (run, place) = (job.run, job.place.clone());
        match place {
            Place::Leased(lease) => {
                self.revocations
                    .entry((lease.worker, id, lease.token))
                    .or_insert(now);
                self.attempts
                    .entry((id, run, lease.token, true))
                    .or_insert(End::Lost.name());
            }
            Place::Ended(_) => {
                self.reopen(id, Review::Retry);
                self.retake_key(id);
            }
            Place::Ready { .. } | Place::Later { .. } => {}
        }
        self.let_hold(now, worker, said);
        true
    }

    fn let_hold(&mut self, now: Moment, worker: WorkerId, said: &Memory) {
        let epoch_no = said.epoch_no.min(self.epoch_no);
        if let Some(job) = self.jobs.get_mut(&said.job) {
            job.run = said.run;
            job.attempts = said.attempt;
            job.place = Place::Leased(Lease {
                token: said.token,
                worker,
                call: said.call,
                epoch_no,
                max_attempts: said.max_attempts,
                until: said.until_ms.map(|ms| now + ms),
                started_at: said.started_at,
            });
        }
    }

    /// The enqueue was lost: what its holder remembers of it is the job now.
    fn put_back(&mut self, id: JobId, asked: &Asked) {
        self.job_types.insert(asked.job_type.clone());
        let job = Job {
            asked: asked.clone(),
            run: Run(0),
            attempts: 0,
            place: Place::Ready { pos: (0, 0) },
            edit: None,
            keyed: asked.unique_key.is_some(),
            repeated: false,
            first_pos: None,
        };
        self.jobs.insert(id, job);
        self.retake_key(id);
    }

    /// A job that lives again wants its unique key. A newer owner that has not begun gives way: it becomes cancelled. One that
    /// runs keeps the key.
    fn retake_key(&mut self, id: JobId) {
        let Some(key) = self.jobs[&id].asked.key().filter(|_| self.jobs[&id].keyed) else {
            return;
        };
        if let Some(owner) = self.keys.get(&key).copied()
            && owner != id
            && !self.end_waiting(owner, Stop::Cancel)
        {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.keyed = false;
            }
            return;
        }
        self.keys.insert(key, id);
    }
}
