//! Handlers that write into the database of the jobs, and what must hold between their effects and the ends of their jobs.

use tenure_core::model::{End, EndAnswer, Memory, Place, ReattachAnswer, Statement, Status};

use super::play::Play;

impl Play<'_> {
    /// The handler writes all its effects in one transaction, once, beside its claim to the job.
    pub(crate) fn write_effects(&mut self, memory: &Memory) {
        if self.asserted.contains(&memory.token) {
            return;
        }
        let written = self.model.assert_lease(memory.job, memory.token);
        let job = self.names.database(memory.job.0);
        let token = self.names.database(memory.token.0);
        let lines = written.map(|()| vec![String::new()]);
        if self.same(&format!("SELECT assert_lease('{job}', '{token}')"), lines) && memory.rerun {
            self.met.effects += 1;
            self.effects.insert(memory.token);
            self.asserted.insert(memory.token);
        }
    }

    /// A job is completed by a run that wrote effects only while these are there.
    pub(crate) fn completed_with_its_effect(&self) {
        for (id, job) in &self.model.jobs {
            if let Place::Ended(outcome) = &job.place
                && outcome.status == Status::Completed
                && let Some(token) = outcome.token
                && self.asserted.contains(&token)
                && !self.effects.contains(&token)
            {
                self.fail(&format!(
                    "job {id} is completed by {token}, whose effects were lost"
                ));
            }
        }
    }

    /// What a worker said of a completion that counted, or that nothing overrules, stands: with its follow-ups, and unless its
    /// effects were lost.
    pub(crate) fn completion_stands(&self, statement: &Statement, answer: &ReattachAnswer) {
        let (Statement::Ended { memory, end, .. }, ReattachAnswer::Ended(answer)) =
            (statement, answer)
        else {
            return;
        };
        if end.end != End::Completed {
            return;
        }
        let token = memory.token;
        let given_back = matches!(answer, EndAnswer::Done("pending" | "scheduled"));
        let has_effects = self.effects.contains(&token);
        if given_back && (!memory.rerun || has_effects) {
            self.fail(&format!("{statement:?} is to run again"));
        }
        let job = self.model.jobs.get(&memory.job);
        let by_this_run = job.is_some_and(
            |job| matches!(&job.place, Place::Ended(it) if it.token == Some(token) && it.status == Status::Completed),
        );
        // A person, a later run or the present epoch has gone on from there.
        let overruled = job.is_none_or(|job| match &job.place {
            Place::Ended(it) => {
                let by_person = it.token.is_none() && job.run >= memory.run;
                by_person || job.run > memory.run || it.epoch_no == self.model.epoch_no
            }
            Place::Leased(it) => job.run > memory.run || it.epoch_no == self.model.epoch_no,
            Place::Ready { .. } | Place::Later { .. } => job.run >= memory.run,
        });
        match answer {
            EndAnswer::Done("completed") | EndAnswer::Known if !by_this_run && !overruled => {
                self.fail(&format!("{statement:?} counted, but the job is {job:?}"));
            }
            EndAnswer::History if !overruled && !by_this_run => {
                self.fail(&format!("{statement:?} is history, but the job is {job:?}"));
            }
            EndAnswer::Done("completed") if by_this_run => {
                let missing = |id| !self.model.jobs.contains_key(id);
                let ids: Vec<_> = end.follow_ups.iter().filter_map(|it| it.id).collect();
                if ids.iter().any(missing) {
                    self.fail(&format!("{statement:?} stands without its follow-ups"));
                }
            }
            _ => {}
        }
    }
}
