//! Handlers that work in this database: whether their effects were lost with the commits of a switch is a fact that it shows.

use super::{Database, Memory, Place, Refused};
use crate::ids::{JobId, Token};

impl Database {
    /// A user's transaction writes the effects of this run: it must still have its lease. Where they may be lost with the job's
    /// end, it leaves a mark beside them.
    ///
    /// # Errors
    /// [`Refused::State`] when the lease is gone, or was given up because earlier effects were lost.
    pub fn assert_lease(&mut self, job: JobId, token: Token) -> Result<(), Refused> {
        let Some(Place::Leased(lease)) = self.jobs.get(&job).map(|job| &job.place) else {
            return Err(Refused::State);
        };
        if lease.token != token || lease.given_up {
            return Err(Refused::State);
        }
        if lease.leaves_effects {
            self.effects.insert((token, job));
        }
        Ok(())
    }

    /// Whether they were lost is asked only while the run has a lease.
    pub(super) fn forget_effects(&mut self) {
        let jobs = &self.jobs;
        let leased = |job: &JobId, token: &Token| {
            let place = jobs.get(job).map(|job| &job.place);
            matches!(place, Some(Place::Leased(lease)) if lease.token == *token)
        };
        self.effects.retain(|(token, job)| leased(job, token));
    }

    /// The run, if it has not ended, is of an earlier epoch, and the database does not show its effects. A claim of the present epoch stands
    /// here; its number in the statement proves nothing, since numbers of lost epochs come again.
    pub(super) fn effects_lost(&self, said: &Memory) -> bool {
        let place = self.jobs.get(&said.job).map(|job| &job.place);
        let of_now = matches!(place, Some(Place::Leased(lease)) if lease.token == said.token && lease.epoch_no >= self.epoch_no);
        !of_now && !self.effects.contains(&(said.token, said.job))
    }

    /// A re-attach found its effects lost: how its handler ends means nothing then.
    pub(super) fn is_given_up(&self, job: JobId, token: Token) -> bool {
        let place = self.jobs.get(&job).map(|job| &job.place);
        matches!(place, Some(Place::Leased(lease)) if lease.token == token && lease.given_up)
    }

    /// The database shows the end of this run.
    pub(super) fn has_ended(&self, said: &Memory) -> bool {
        let by_outcome = self
            .jobs
            .get(&said.job)
            .is_some_and(|job| match &job.place {
                Place::Ended(outcome) => {
                    job.run > said.run || job.run == said.run && outcome.token == Some(said.token)
                }
                _ => false,
            });
        let attempt = (said.job, said.run, said.token, true);
        by_outcome || self.attempts.contains_key(&attempt)
    }
}
