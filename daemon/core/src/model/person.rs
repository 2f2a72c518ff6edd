//! What people do with jobs.

use super::{Database, Gate, Job, Outcome, Place, Refused, Status, Stop};
use crate::ids::{JobId, Run};

/// What a person decides about a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Review {
    /// The job runs again.
    Retry,
    /// It will never run.
    Discard,
    /// A person has done it.
    Fixed,
}

impl Review {
    /// Its name in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Discard => "discard",
            Self::Fixed => "fixed",
        }
    }
}

impl Database {
    /// While workers re-attach, the database may not show what became of a job from before. Times do not tell which those are:
    /// the clock of this server may be behind that of the last one.
    pub(super) fn assert_gate(&self, id: JobId) -> Result<&Job, Refused> {
        let job = self.jobs.get(&id).ok_or(Refused::NotFound)?;
        // A follow-up job that a re-attach put in again stands beyond the mark, and its worker may be about to say what became of it.
        let doubtful = job.repeated && matches!(job.place, Place::Ready { .. });
        let from_before = self.gate == Gate::Window
            && (doubtful || job.first_pos.is_none_or(|pos| pos <= self.mark));
        match self.gate {
            _ if !self.here || from_before => Err(Refused::Reattaching),
            Gate::Hold => Err(Refused::OnHold),
            _ => Ok(job),
        }
    }

    /// Cancels a job, or moves it to the dead letters: a waiting one at once, a running one when its handler was stopped.
    /// The answer is its status then.
    ///
    /// # Errors
    /// [`Refused::NotFound`], [`Refused::Reattaching`], [`Refused::OnHold`].
    pub fn stop(&mut self, id: JobId, stop: Stop) -> Result<&'static str, Refused> {
        match &self.assert_gate(id)?.place {
            Place::Ended(outcome) => return Ok(outcome.status.name()),
            Place::Leased(_) => {
                self.ask_stop(id, stop);
                return Ok("stopping");
            }
            Place::Ready { .. } | Place::Later { .. } => {}
        }
        self.end_waiting(id, stop);
        Ok(stop.status().name())
    }

    /// Runs a job again that did not complete.
    ///
    /// # Errors
    /// [`Refused::State`] when it has not ended, has completed, or its unique key has a new owner; and those of the gate.
    pub fn retry(&mut self, id: JobId) -> Result<(), Refused> {
        match &self.assert_gate(id)?.place {
            Place::Ended(outcome) if outcome.status != Status::Completed => {
                self.run_again(id, None)
            }
            _ => Err(Refused::State),
        }
    }

    pub(super) fn run_again(&mut self, id: JobId, edit: Option<String>) -> Result<(), Refused> {
        if let Some(key) = self.jobs[&id].asked.key() {
            if self.keys.contains_key(&key) {
                return Err(Refused::State);
            }
            self.keys.insert(key, id);
        }
        self.reopen(id, Review::Retry);
        let pos = self.next_pos();
        let repeated = self.gate != Gate::Open;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.run.0 += 1;
            job.attempts = 0;
            job.repeated = repeated;
            job.keyed = job.asked.unique_key.is_some();
            job.edit = edit.or_else(|| job.edit.take());
            job.place = Place::Ready { pos };
        }
        Ok(())
    }

    /// The outcome becomes history, and with it the letter of the death that it may have been.
    pub(super) fn reopen(&mut self, id: JobId, review: Review) {
        let job = &self.jobs[&id];
        if let Place::Ended(Outcome {
            token: Some(token),
            status,
            ..
        }) = job.place
        {
            let attempt = (id, job.run, token, true);
            self.attempts.entry(attempt).or_insert(status.name());
        }
        // What was asked of the life that has ended.
        self.stops.remove(&id);
        let letters = self
            .letters
            .range_mut((id, Run(i32::MIN))..=(id, Run(i32::MAX)));
        for (_, letter) in letters.filter(|(_, letter)| letter.review.is_none()) {
            letter.review = Some(review);
        }
    }

    /// Decides a dead letter, once.
    ///
    /// # Errors
    /// [`Refused::NotFound`], [`Refused::Input`] for data without a retry, those of the gate, and [`Refused::State`] when the
    /// letter was reviewed before.
    pub fn review(
        &mut self,
        id: JobId,
        run: Run,
        review: Review,
        edit: Option<String>,
    ) -> Result<&'static str, Refused> {
        if edit.is_some() && review != Review::Retry {
            return Err(Refused::Input);
        }
        let letter = *self.letters.get(&(id, run)).ok_or(Refused::NotFound)?;
        let job = self.assert_gate(id)?;
        let failed = matches!(&job.place, Place::Ended(it) if it.status == Status::Failed);
        if letter.review.is_some() || !failed {
            return Err(Refused::State);
        }
        let status = match review {
            Review::Retry => {
                self.run_again(id, edit)?;
                return Ok("pending");
            }
            Review::Discard => Status::Discarded,
            Review::Fixed => Status::Completed,
        };
        self.end_anew(id, status, review);
        Ok(status.name())
    }

    fn end_anew(&mut self, id: JobId, status: Status, review: Review) {
        self.reopen(id, review);
        let epoch_no = self.epoch_no;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.run.0 += 1;
            job.place = Place::Ended(Outcome {
                status,
                token: None,
                worker: None,
                epoch_no,
                result: None,
            });
        }
    }

    /// A person has done the job, whatever it waits for or died of.
    ///
    /// # Errors
    /// [`Refused::State`] when it has completed; those of the gate.
    pub fn complete_manually(&mut self, id: JobId) -> Result<&'static str, Refused> {
        match &self.assert_gate(id)?.place {
            Place::Ended(outcome) if outcome.status == Status::Completed => Err(Refused::State),
            Place::Ended(_) => {
                self.end_anew(id, Status::Completed, Review::Fixed);
                Ok("completed")
            }
            _ => self.stop(id, Stop::Complete),
        }
    }

    /// No job of this type is claimed until [`Database::resume`].
    pub fn pause(&mut self, job_type: &str) {
        self.job_types.insert(job_type.to_owned());
        self.paused.insert(job_type.to_owned());
    }

    /// Ends a pause.
    ///
    /// # Errors
    /// [`Refused::NotFound`] for a job type that never had a job or a pause.
    pub fn resume(&mut self, job_type: &str) -> Result<(), Refused> {
        self.paused.remove(job_type);
        self.job_types
            .contains(job_type)
            .then_some(())
            .ok_or(Refused::NotFound)
    }
}
