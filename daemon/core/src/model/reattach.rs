//! After a switch, a crash or a restart each worker says what it holds and what it finished. Here is what wins.

use super::epoch::NOBODY_KNOWN;
use super::{
    Asked, Database, End, EndAnswer, Expected, Gate, Job, Lease, Moment, Place, Refused,
    Registration, Review, RunEnd, Stop, What, WorkerStatus,
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
    /// Its handler has its effects in this database.
    pub rerun: bool,
}

/// What a worker says about a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Its handler runs.
    Hold(Memory),
    /// It has ended.
    Ended {
        /// The claim.
        memory: Memory,
        /// The end.
        end: RunEnd,
        /// The end had been answered before.
        confirmed: bool,
    },
}

impl Statement {
    /// What the worker remembers of the claim.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        let (Self::Hold(memory) | Self::Ended { memory, .. }) = self;
        memory
    }

    /// It says that effects are here that may have been lost.
    pub(super) fn asks_for_effects(&self) -> bool {
        match self {
            Self::Hold(memory) => memory.rerun,
            Self::Ended { memory, end, .. } => memory.rerun && end.end == End::Completed,
        }
    }
}

/// How far back a worker's memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covers {
    /// The worker, or one whose memory it took over.
    pub worker: WorkerId,
    /// All ends are remembered that were answered after this beat was sent.
    pub from: i64,
    /// It is one whose memory was taken over.
    pub predecessor: bool,
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
    /// Further statements follow in another call.
    pub more: bool,
    /// The leases named in other calls than this one.
    pub held: Vec<Token>,
    /// How far back its memory goes; empty: it says nothing of that.
    pub covers: Vec<Covers>,
}

/// The answer to [`Statement::Hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The handler runs on.
    Keep,
    /// It must be stopped.
    Stop,
    /// It must be stopped and the job released: its effects were lost.
    Rerun,
}

/// Whether the lease that a statement speaks of stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restored {
    /// It stood.
    Stood,
    /// It was made again.
    Again(What),
    /// Something else wins.
    Refused,
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
        let uncovered = self.note_uncovered(&said.covers);
        self.register_again(now, id, said);
        self.wait_for(now, id, said);
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
            let lost = statement.asks_for_effects() && self.effects_lost(statement.memory());
            let restored = self.restore(now, id, statement.memory());
            if let Restored::Again(what) = restored {
                self.note_switch(statement.memory(), what, Some(id));
            }
            let refused = restored == Restored::Refused;
            answers[nth] = match statement {
                Statement::Hold(memory) => {
                    let kept = self.hear_hold(id, memory, refused || !alive, lost);
                    ReattachAnswer::Held(kept)
                }
                Statement::Ended {
                    memory,
                    end,
                    confirmed,
                } => {
                    let given_back = RunEnd {
                        end: End::Released,
                        ..RunEnd::plain(end.job, end.run, end.token)
                    };
                    let lost = lost && !refused;
                    let end = if lost { &given_back } else { end };
                    let answer = self.end_run(now, end, true);
                    if answer == EndAnswer::Done("completed") && end.end == End::Completed {
                        follow_ups.extend_from_slice(&end.follow_ups);
                    }
                    if matches!(answer, EndAnswer::Done(_)) && (lost || *confirmed) {
                        let what = if lost {
                            What::Rerun
                        } else {
                            What::WrittenAgain
                        };
                        self.note_switch(memory, what, Some(id));
                    }
                    ReattachAnswer::Ended(answer)
                }
            };
        }
        self.last_pos += 1;
        self.enqueue_together(now, &follow_ups)?;
        let said_in_order = said.statements.iter().zip(&answers);
        let moving = said_in_order.filter_map(|(statement, answer)| match (statement, answer) {
            (Statement::Ended { end, .. }, ReattachAnswer::Ended(EndAnswer::Done("completed")))
                if end.end == End::Completed =>
            {
                Some(end.clone())
            }
            _ => None,
        });
        let moving: Vec<RunEnd> = moving.collect();
        self.move_watermarks(&moving);
        if let Some(switch) = self.switches.get_mut(&self.epoch_no) {
            switch.uncovered |= uncovered;
        }
        if said.more {
            return Ok(answers);
        }
        let epoch_no = self.epoch_no;
        let named = |token| said.statements.iter().any(|it| it.memory().token == token);
        let ghosts = self.leases(|lease| {
            lease.worker == id
                && lease.until.is_none()
                && lease.epoch_no < epoch_no
                && !named(lease.token)
                && !said.held.contains(&lease.token)
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

    /// An end whose effects may be lost is not carried out, and a run not gone on with; its handler may not write them any more.
    fn hear_hold(&mut self, id: WorkerId, memory: &Memory, stop: bool, lost: bool) -> Kept {
        if stop {
            if !self.has_ended(memory) {
                self.note_switch(memory, What::Stopped, Some(id));
            }
            return Kept::Stop;
        }
        if !lost {
            return Kept::Keep;
        }
        if let Some(Place::Leased(lease)) = self.jobs.get_mut(&memory.job).map(|job| &mut job.place)
        {
            lease.given_up = true;
        }
        self.note_switch(memory, What::Rerun, Some(id));
        Kept::Rerun
    }

    /// What ended between a worker's last beat here and the beginning of its memory nobody can write again.
    fn note_uncovered(&mut self, covers: &[Covers]) -> bool {
        let uncovered = covers.iter().any(|it| match self.workers.get(&it.worker) {
            Some(worker) => worker.beat < it.from,
            // One that ended long ago is forgotten by right.
            None => it.from > 0 && !it.predecessor,
        });
        if uncovered && !self.uncovered {
            self.uncovered = true;
            self.gate = Gate::Hold;
        }
        uncovered
    }

    fn register_again(&mut self, now: Moment, id: WorkerId, said: &Reattach) {
        // The beat is the proof that all before it is here, so it counts only with the last statement.
        let beat = if said.more { 0 } else { said.beat };
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.beat = worker.beat.max(beat);
            worker.beat_at = now;
        } else if let Some(registration) = said.registration {
            // It was there before what was lost. If a beat told it who the others are, it knows all that could claim.
            let told = said.roster.contains(&id);
            if let Some(unknown) = self.expected.get_mut(&NOBODY_KNOWN).filter(|_| told) {
                unknown.spoken = true;
            }
            self.insert_worker(now, id, registration, beat);
        }
    }

    /// Whoever a speaker knows to be there must speak too, though the table has lost it; and so must the speaker, until its last
    /// statement.
    fn wait_for(&mut self, now: Moment, me: WorkerId, said: &Reattach) {
        let lease_ttl = self.longest_lease();
        let named = said.roster.iter().filter(|_| self.gate != Gate::Open);
        for id in named.filter(|id| !self.workers.contains_key(*id)) {
            let unknown = Expected::silent(lease_ttl);
            self.expected.entry(*id).or_insert(unknown);
        }
        if let Some(worker) = self.workers.get(&me) {
            let speaker = Expected::silent(worker.lease_ttl);
            self.expected.entry(me).or_insert(speaker);
        }
        if let Some(me) = self.expected.get_mut(&me) {
            me.heard_at = Some(now);
            if !said.more {
                (me.spoken, me.absent) = (true, false);
            }
        }
    }

    /// The merge rule. A statement wins when the job is missing, when its run is higher than the database's, or when it is
    /// equal and the lease has its token. What was claimed or ended in the present epoch is never changed by it.
    /// A winner's lease then stands in the database.
    fn restore(&mut self, now: Moment, worker: WorkerId, said: &Memory) -> Restored {
        let id = said.job;
        let alive = self
            .workers
            .get(&worker)
            .is_some_and(super::Worker::is_there);
        let Some(job) = self.jobs.get(&id) else {
            return match &said.asked {
                Some(asked) => {
                    self.put_back(id, asked);
                    self.let_hold(now, worker, said);
                    Restored::Again(What::PutBack)
                }
                None => Restored::Refused,
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
                    return Restored::Refused;
                };
                // A successor takes over what its dead predecessor had ended. The dead take nothing.
                if lease.worker != worker && alive {
                    (lease.worker, lease.call) = (worker, said.call);
                }
                return Restored::Stood;
            }
            Ordering::Greater if !present => {}
            _ => return Restored::Refused,
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
        Restored::Again(What::ClaimedAgain)
    }

    fn let_hold(&mut self, now: Moment, worker: WorkerId, said: &Memory) {
        let epoch_no = said.epoch_no.min(self.epoch_no - 1);
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
                leaves_effects: said.rerun,
                given_up: false,
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
            alone: false,
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
