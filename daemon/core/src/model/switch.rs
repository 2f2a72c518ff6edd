//! Switches of the primary: what a person has to decide about them, and the record of what was found.

use super::{Database, Gate, Job, Memory, Moment, Outcome, Place, Refused, RunEnd, Status, Waits};
use crate::ids::{Epoch, JobId, Run, WorkerId};

/// The record shows the first claim that comes within this time after the opening, in milliseconds.
const FIRST_CLAIM: i64 = 3_600_000;

/// A worker that a window waits for, or that has spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Its leases have ended so long after the opening, in milliseconds.
    pub lease_ttl: i64,
    /// It has re-attached, or is known to be dead.
    pub spoken: bool,
    /// It is known to be dead, or the window closed before it spoke.
    pub absent: bool,
    /// When it last said something of it.
    pub heard_at: Option<Moment>,
}

impl Expected {
    pub(super) fn silent(lease_ttl: i64) -> Self {
        Self {
            lease_ttl,
            spoken: false,
            absent: false,
            heard_at: None,
        }
    }
}

/// An epoch that was opened after a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switch {
    /// The database had been copied to another system.
    pub other_system: bool,
    /// More was lost than a worker remembered.
    pub uncovered: bool,
    /// A person has decided.
    pub decided: bool,
    /// Its window was closed.
    pub closed: bool,
    /// Something was claimed since, with the gate open.
    pub claimed: bool,
}

/// What became of a run in a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// Its end had been lost, and a worker remembered it.
    WrittenAgain,
    /// Its claim had been lost.
    ClaimedAgain,
    /// Its job had been lost.
    PutBack,
    /// Its worker did not come back.
    Recovered,
    /// It was given back, since its effects had been lost.
    Rerun,
    /// Its job had gone on elsewhere.
    Stopped,
    /// A person made a dead letter of its job.
    SetAside,
}

impl What {
    /// Its name in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WrittenAgain => "written_again",
            Self::ClaimedAgain => "claimed_again",
            Self::PutBack => "put_back",
            Self::Recovered => "recovered",
            Self::Rerun => "rerun",
            Self::Stopped => "stopped",
            Self::SetAside => "set_aside",
        }
    }
}

/// What a server shows to a worker that looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The epoch.
    pub epoch: Epoch,
    /// Its number.
    pub epoch_no: i64,
    /// What claims may take.
    pub gate: Gate,
    /// The epoch is good here.
    pub in_epoch: bool,
    /// The last beat of the worker; `None`: it is unknown.
    pub beat: Option<i64>,
}

/// What became of a job that was to run again after a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retried {
    /// It runs again.
    Pending,
    /// It had gone on, and has this status.
    GoneOn(&'static str),
    /// Another live job has its unique key.
    KeyTaken,
}

impl Job {
    fn status(&self) -> &'static str {
        match &self.place {
            Place::Ready { .. } => "pending",
            Place::Later { .. } => "scheduled",
            Place::Leased(_) => "running",
            Place::Ended(outcome) => outcome.status.name(),
        }
    }
}

impl Database {
    /// A copy on another system goes on from here. Nobody notices before somebody opens an epoch.
    pub fn copy_to_other_system(&mut self) {
        self.elsewhere = true;
    }

    /// What this server shows.
    #[must_use]
    pub fn probe(&self, worker: WorkerId) -> Probe {
        Probe {
            epoch: self.epoch,
            epoch_no: self.epoch_no,
            gate: self.gate,
            in_epoch: self.here && !self.elsewhere,
            beat: self.workers.get(&worker).map(|worker| worker.beat),
        }
    }

    /// Notes what became of a run in the switch that opened the present epoch.
    pub(super) fn note_switch(&mut self, said: &Memory, what: What, worker: Option<WorkerId>) {
        self.note_job(said.job, said.run, what, worker);
    }

    fn note_job(&mut self, job: JobId, run: Run, what: What, worker: Option<WorkerId>) {
        if self.switches.contains_key(&self.epoch_no) {
            let key = (self.epoch_no, job, run, what);
            self.switch_jobs.entry(key).or_insert(worker);
        }
    }

    /// A lease is about to be recovered: by the switch, if its worker did not come back after it.
    pub(super) fn note_recovered(&mut self, run: &RunEnd) {
        let Some(Place::Leased(lease)) = self.jobs.get(&run.job).map(|job| &job.place) else {
            return;
        };
        let absent = self.expected.get(&lease.worker).is_some_and(|it| it.absent);
        if absent && lease.until.is_none() && lease.epoch_no < self.epoch_no {
            let worker = lease.worker;
            self.note_job(run.job, run.run, What::Recovered, Some(worker));
        }
    }

    pub(super) fn note_claim(&mut self, now: Moment) {
        if self.gate == Gate::Open
            && now < self.opened_at + FIRST_CLAIM
            && let Some(switch) = self.switches.get_mut(&self.epoch_no)
        {
            switch.claimed = true;
        }
    }

    /// A person says that this copy, on another system than before, is the one to use.
    ///
    /// # Errors
    /// [`Refused::Input`] without a reason; [`Refused::State`] when there is nothing to accept.
    pub fn accept_cluster(&mut self, now: Moment, reason: &str) -> Result<Gate, Refused> {
        if reason.trim().is_empty() {
            return Err(Refused::Input);
        }
        if !std::mem::take(&mut self.unaccepted) {
            return Err(Refused::State);
        }
        Ok(self.leave_hold(now))
    }

    /// A person ends the hold after a loss that nobody remembers. What can have run in the lost span becomes dead letters, or runs
    /// as it stands. Answers with the gate and the number of dead letters.
    ///
    /// # Errors
    /// [`Refused::Reattaching`] before an epoch was opened; [`Refused::State`] when nothing waits for this.
    pub fn resume_cluster(&mut self, now: Moment, rerun: bool) -> Result<(Gate, usize), Refused> {
        if !self.here {
            return Err(Refused::Reattaching);
        }
        if !self.uncovered {
            return Err(Refused::State);
        }
        let aside = if rerun { 0 } else { self.set_aside() };
        self.uncovered = false;
        Ok((self.leave_hold(now), aside))
    }

    /// All jobs that can have run in the span that nobody remembers.
    fn set_aside(&mut self) -> usize {
        let spoken = |worker: &WorkerId| {
            let expected = self.expected.get(worker);
            expected.is_some_and(|it| it.spoken && !it.absent)
        };
        let doubtful = |job: &Job| match &job.place {
            Place::Ready { pos } => pos.0 <= self.mark,
            Place::Later { due, waits } => *due <= self.opened_at && *waits != Waits::Window,
            Place::Leased(lease) => {
                lease.until.is_none() && lease.epoch_no < self.epoch_no && !spoken(&lease.worker)
            }
            Place::Ended(_) => false,
        };
        let chosen = self.jobs.iter().filter(|(_, job)| doubtful(job));
        let chosen: Vec<(JobId, Run, i32)> = chosen
            .map(|(id, job)| (*id, Run(job.run.0 + 1), job.attempts))
            .collect();
        for (id, run, attempts) in &chosen {
            let outcome = Outcome {
                status: Status::Failed,
                token: None,
                worker: None,
                epoch_no: self.epoch_no,
                result: None,
            };
            self.end_job(*id, *run, *attempts, outcome);
            self.note_job(*id, *run, What::SetAside, None);
        }
        chosen.len()
    }

    /// After a decision: open when nobody is waited for, else a window that begins now.
    fn leave_hold(&mut self, now: Moment) -> Gate {
        if let Some(switch) = self.switches.get_mut(&self.epoch_no) {
            switch.decided = true;
        }
        if self.gate == Gate::Hold && !self.unaccepted && !self.uncovered {
            self.gate = Gate::Window;
            self.opened_at = now;
        }
        self.close_window(now, false);
        self.gate
    }

    /// The jobs whose end was written again in a switch.
    #[must_use]
    pub fn written_again(&self, epoch_no: i64) -> Vec<JobId> {
        let noted = self.switch_jobs.keys();
        let mut jobs: Vec<JobId> = noted
            .filter(|(no, _, _, what)| *no == epoch_no && *what == What::WrittenAgain)
            .map(|(_, job, ..)| *job)
            .collect();
        jobs.dedup();
        jobs
    }

    /// Runs all jobs again whose end was written again in this switch, where that is still how they stand. `order`: that in which
    /// they are tried, since the first of several has their unique key then.
    ///
    /// # Errors
    /// [`Refused::NotFound`] without such a switch; those of the gate.
    pub fn retry_switch(
        &mut self,
        epoch_no: i64,
        order: &[JobId],
    ) -> Result<Vec<Retried>, Refused> {
        if !self.switches.contains_key(&epoch_no) {
            return Err(Refused::NotFound);
        }
        for id in order {
            self.assert_gate(*id)?;
        }
        let mut answers = Vec::new();
        for id in order {
            let job = &self.jobs[id];
            let noted = (epoch_no, *id, job.run, What::WrittenAgain);
            let ended = matches!(job.place, Place::Ended(_));
            answers.push(if !ended || !self.switch_jobs.contains_key(&noted) {
                Retried::GoneOn(job.status())
            } else if self.run_again(*id, None).is_err() {
                Retried::KeyTaken
            } else {
                Retried::Pending
            });
        }
        Ok(answers)
    }
}
