//! Runs end. Every end passes through [`Database::end_run`], whoever says it.

use super::{
    Database, DeadLetter, Gate, Job, Moment, NewJob, Outcome, Place, Refused, Status, Waits,
    Watermark,
};
use crate::ids::{Epoch, JobId, Run, Token};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Well.
    Completed,
    /// Badly: again after the delay, unless that was the last attempt.
    Failed {
        /// Never again.
        last: bool,
    },
    /// It was given back unfinished; no attempt is used.
    Released,
    /// The process that had it and others died; no attempt is used, and it runs alone from now on.
    Crashed,
    /// It wants to be tried again after the delay; no attempt is used.
    Snoozed,
    /// Nobody read the answer of its claim; no attempt is used.
    Ghost,
    /// Its worker died, or its time ran out.
    Lost,
}

impl End {
    /// Its name in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed { .. } => "failed",
            Self::Released => "released",
            Self::Crashed => "crashed",
            Self::Snoozed => "snoozed",
            Self::Ghost => "ghost",
            Self::Lost => "lost",
        }
    }

    fn uses_attempt(self) -> bool {
        !matches!(
            self,
            Self::Released | Self::Crashed | Self::Snoozed | Self::Ghost
        )
    }
}

/// What is said about the end of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEnd {
    /// The job.
    pub job: JobId,
    /// Its run.
    pub run: Run,
    /// The lease's name.
    pub token: Token,
    /// How it ended.
    pub end: End,
    /// Not again before so many milliseconds.
    pub delay: i64,
    /// Of a completed run; JSON.
    pub result: Option<String>,
    /// Jobs that come in with the completion.
    pub follow_ups: Vec<NewJob>,
    /// Of a completed run: how far its series has come; JSON.
    pub watermark: Option<String>,
}

impl RunEnd {
    pub(super) fn plain(job: JobId, run: Run, token: Token) -> Self {
        let (result, follow_ups, watermark) = (None, Vec::new(), None);
        Self {
            job,
            run,
            token,
            end: End::Ghost,
            delay: 0,
            result,
            follow_ups,
            watermark,
        }
    }
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndAnswer {
    /// It counts, and the job has this status now.
    Done(&'static str),
    /// It counted before.
    Known,
    /// The run had lost its lease: nothing was changed.
    History,
}

/// A lease is to last by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The job.
    pub job: JobId,
    /// The lease's name.
    pub token: Token,
    /// For how long from now, in milliseconds.
    pub for_ms: i64,
    /// Its time is never shortened.
    pub at_least: bool,
}

impl Database {
    /// A worker says how runs ended. Whose leases they are is not asked: the token is the right.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`].
    pub fn finish(
        &mut self,
        now: Moment,
        epoch: Epoch,
        ends: &[RunEnd],
    ) -> Result<Vec<EndAnswer>, Refused> {
        self.assert_epoch(epoch)?;
        let mut after = self.clone();
        let answers = after.end_runs(now, ends)?;
        *self = after;
        Ok(answers)
    }

    /// Ends runs at one moment, and then puts their follow-ups in.
    fn end_runs(&mut self, now: Moment, ends: &[RunEnd]) -> Result<Vec<EndAnswer>, Refused> {
        let mut follow_ups = Vec::new();
        let mut answers = Vec::new();
        let mut moving = Vec::new();
        for said in ends {
            let given_back = RunEnd {
                end: End::Released,
                ..RunEnd::plain(said.job, said.run, said.token)
            };
            let ended = matches!(said.end, End::Completed | End::Failed { .. });
            let lost = ended && self.is_given_up(said.job, said.token);
            let said = if lost { &given_back } else { said };
            let answer = self.end_run(now, said, false);
            if answer == EndAnswer::Done("completed") && said.end == End::Completed {
                follow_ups.extend_from_slice(&said.follow_ups);
                moving.push(said.clone());
            }
            answers.push(answer);
        }
        self.last_pos += 1;
        self.enqueue_together(now, &follow_ups)?;
        self.move_watermarks(&moving);
        Ok(answers)
    }

    /// Carries out the end of one run, or keeps it as history when the run has no lease any more. `replay`: it ended in an
    /// earlier epoch, so the outcome bears the epoch of the claim.
    pub(super) fn end_run(&mut self, now: Moment, said: &RunEnd, replay: bool) -> EndAnswer {
        let (id, end) = (said.job, said.end);
        let Some(job) = self.jobs.get(&id) else {
            return EndAnswer::History;
        };
        let lease = match &job.place {
            Place::Leased(lease) if lease.token == said.token && job.run == said.run => {
                lease.clone()
            }
            _ => return self.too_late(said),
        };
        let mut run = job.run;
        let last_attempt = job.attempts >= lease.max_attempts;
        let attempts = job.attempts - i32::from(!end.uses_attempt());
        let stop = self.stops.remove(&id);
        let status = match (stop, end) {
            (Some(stop), _) => Some(stop.status()),
            (None, End::Completed) => Some(Status::Completed),
            (None, End::Failed { last: true }) => Some(Status::Failed),
            (None, End::Failed { .. } | End::Lost) if last_attempt => Some(Status::Failed),
            _ => None,
        };
        if (stop.is_some() || status.is_none()) && end != End::Ghost {
            self.note(said, true);
        }
        let Some(status) = status else {
            let place = self.place_after(now, said);
            let answer = match place {
                Place::Ready { .. } => "pending",
                _ => "scheduled",
            };
            self.put_in(id, |job| {
                job.attempts = attempts;
                job.place = place;
                job.alone |= end == End::Crashed;
            });
            return EndAnswer::Done(answer);
        };
        if stop.is_some() {
            run.0 += 1;
        }
        let outcome = Outcome {
            status,
            token: stop.is_none().then_some(lease.token),
            worker: Some(lease.worker),
            epoch_no: if replay {
                lease.epoch_no
            } else {
                self.epoch_no
            },
            result: said.result.clone().filter(|_| end == End::Completed),
        };
        self.end_job(id, run, attempts, outcome);
        EndAnswer::Done(status.name())
    }

    /// Where a job goes that runs again. During a window it may not be claimed, so it waits.
    fn place_after(&mut self, now: Moment, said: &RunEnd) -> Place {
        let open = self.gate == Gate::Open;
        let waits = match said.end {
            End::Failed { .. } => Waits::Retry,
            End::Snoozed => Waits::Snooze,
            _ if !open => Waits::Window,
            _ if said.delay > 0 => Waits::Time,
            _ => {
                return Place::Ready {
                    pos: (self.last_pos + 1, 0),
                };
            }
        };
        Place::Later {
            due: now + said.delay,
            waits,
        }
    }

    fn put_in(&mut self, id: JobId, change: impl FnOnce(&mut Job)) {
        if let Some(job) = self.jobs.get_mut(&id) {
            change(job);
        }
    }

    /// The one way to an outcome: the key is free, and a dead letter waits for review.
    pub(super) fn end_job(&mut self, id: JobId, run: Run, attempts: i32, outcome: Outcome) {
        if outcome.status == Status::Failed {
            self.letters.insert(
                (id, run),
                DeadLetter {
                    attempts,
                    review: None,
                },
            );
        }
        self.free_key(id);
        self.put_in(id, |job| {
            job.run = run;
            job.attempts = attempts;
            job.place = Place::Ended(outcome);
            job.alone = false;
        });
    }

    /// Completions that count move the watermarks of their series; of several in one call the last counts.
    pub(super) fn move_watermarks(&mut self, completions: &[RunEnd]) {
        completions
            .iter()
            .for_each(|said| self.move_watermark(said));
    }

    /// What a run of a later epoch has set stays.
    fn move_watermark(&mut self, said: &RunEnd) {
        let Some(Job {
            asked,
            place: Place::Ended(outcome),
            ..
        }) = self.jobs.get(&said.job)
        else {
            return;
        };
        let (Some(name), Some(value)) = (&asked.watermark, &said.watermark) else {
            return;
        };
        let moved = Watermark {
            value: value.clone(),
            job: said.job,
            epoch_no: outcome.epoch_no,
        };
        let key = (asked.tenant.clone(), name.clone());
        let stands = self.watermarks.entry(key).or_insert_with(|| moved.clone());
        if moved.epoch_no >= stands.epoch_no {
            *stands = moved;
        }
    }

    /// All these runs end in the same way, at one moment.
    pub(super) fn end_all(&mut self, now: Moment, runs: &[RunEnd], end: End) {
        for run in runs {
            let said = RunEnd { end, ..run.clone() };
            self.end_run(now, &said, false);
        }
        self.last_pos += 1;
    }

    fn too_late(&mut self, said: &RunEnd) -> EndAnswer {
        let ended = match &self.jobs[&said.job] {
            Job {
                run,
                place: Place::Ended(outcome),
                ..
            } if *run == said.run && outcome.token == Some(said.token) => {
                Some(outcome.status.name())
            }
            _ => None,
        };
        let counted = self.attempts.get(&(said.job, said.run, said.token, true));
        if ended.or(counted.copied()) == Some(said.end.name()) {
            return EndAnswer::Known;
        }
        self.note(said, false);
        EndAnswer::History
    }

    fn note(&mut self, said: &RunEnd, applied: bool) {
        let attempt = (said.job, said.run, said.token, applied);
        self.attempts.entry(attempt).or_insert(said.end.name());
    }

    /// Leases get a time of their own; from then on they do not depend on any worker's beats. `false`: the lease is gone.
    ///
    /// # Errors
    /// [`Refused::OtherEpoch`]; [`Refused::Input`] for a time that is not above zero.
    pub fn hold(
        &mut self,
        now: Moment,
        epoch: Epoch,
        holds: &[Hold],
    ) -> Result<Vec<bool>, Refused> {
        self.assert_epoch(epoch)?;
        if holds.iter().any(|hold| hold.for_ms <= 0) {
            return Err(Refused::Input);
        }
        Ok(holds.iter().map(|hold| self.hold_one(now, hold)).collect())
    }

    fn hold_one(&mut self, now: Moment, hold: &Hold) -> bool {
        match self.jobs.get_mut(&hold.job).map(|job| &mut job.place) {
            Some(Place::Leased(lease)) if lease.token == hold.token => {
                let until = now + hold.for_ms;
                if !(hold.at_least && lease.until.is_some_and(|before| before >= until)) {
                    lease.until = Some(until);
                }
                true
            }
            _ => false,
        }
    }
}
