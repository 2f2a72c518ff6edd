//! What daemons say, and what they make of the answers.

use tenure_core::ids::{Call, JobId, WorkerId};
use tenure_core::model::{
    Claim, Database, EndAnswer, Gate, Heartbeat, Memory, Refused, Registration, RunEnd,
};
use uuid::Uuid;

use super::daemon::Daemon;
use super::play::Play;
use super::{sql, state};

impl Play<'_> {
    pub(crate) fn new_daemon(&mut self) -> Daemon {
        let heartbeat = self.random.between(2, 5) * 1_000;
        let registration = Registration {
            lease_ttl: heartbeat * self.random.between(3, 4),
            heartbeat,
        };
        Daemon::new(WorkerId(self.random.uuid()), registration)
    }

    /// Daemon `nth` sends a beat, if it is registered.
    pub(crate) fn beat(&mut self, nth: usize, draining: bool) {
        let daemon = &mut self.daemons[nth];
        let Some(epoch) = daemon.epoch else {
            return;
        };
        // Before its last statement was answered a beat would prove what is not here.
        if !daemon.attached {
            return;
        }
        daemon.beat += 1;
        // The last call may still be under way.
        let settled = Call(daemon.call.0 - i64::from(self.random.chance(20)));
        let (id, sent) = (daemon.id, self.mono);
        let said = Heartbeat {
            beat: daemon.beat,
            settled,
            open: daemon.open(),
            draining,
        };
        let answer = self.model.heartbeat(self.now, id, epoch, &said);
        let statement = sql::heartbeat(&self.names, id, epoch, &said);
        let lines = answer.clone().map(|it| sql::heartbeat_lines(&it));
        self.same(&statement, lines);
        if self.random.chance(4) {
            // The answer does not come.
            return;
        }
        match answer {
            Ok(answer) => {
                self.met.ghosts += answer.ghosts as u64;
                let daemon = &mut self.daemons[nth];
                daemon.confirmed(sent);
                daemon.roster = answer.workers;
                // Its handlers are stopped; what they had done is not said.
                daemon.held.retain(|job, memory| {
                    !answer.revoked.contains(&(*job, memory.token))
                        || self.model.stops.contains_key(job)
                });
            }
            Err(Refused::WorkerGone) => self.start_anew(nth),
            Err(_) => {}
        }
    }

    /// The database has declared it dead: it stops its handlers and registers under a new id.
    pub(crate) fn start_anew(&mut self, nth: usize) {
        let id = WorkerId(self.random.uuid());
        let mut next = self.daemons[nth].successor(id);
        next.predecessor = None;
        self.daemons[nth] = next;
    }

    pub(crate) fn register(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        let (id, registration) = (daemon.id, daemon.registration);
        let opened = self.model.register(self.now, id, registration);
        let statement = sql::register(id, registration);
        let sent = self.mono;
        match opened {
            Ok(opened) => {
                let rest = format!("{} {}", opened.epoch_no, state::gate(opened.gate));
                self.named(&statement, &[(opened.epoch.0, rest)]);
                let daemon = &mut self.daemons[nth];
                daemon.epoch = Some(opened.epoch);
                daemon.epoch_no = opened.epoch_no;
                daemon.confirmed(sent);
                (daemon.spoken, daemon.attached) = (true, true);
                if daemon.replay {
                    (daemon.spoken, daemon.attached) = (false, false);
                    self.reattach(nth, None);
                }
            }
            Err(refused) => {
                self.same(&statement, Err(refused));
            }
        }
    }

    pub(crate) fn claim(&mut self, nth: usize) {
        let daemon = &mut self.daemons[nth];
        let Some(epoch) = daemon.epoch else {
            return;
        };
        let late = self.random.chance(3);
        daemon.call = Call(daemon.call.0 + i64::from(!late));
        let lanes: Vec<&str> = super::steps::JOB_TYPES
            .iter()
            .copied()
            .filter(|_| self.random.chance(85))
            .collect();
        let known: Vec<&str> = lanes
            .into_iter()
            .filter(|it| self.model.job_types.contains(*it))
            .collect();
        let claim = Claim {
            call: daemon.call,
            lanes: known
                .iter()
                .map(|it| {
                    (
                        (*it).to_owned(),
                        i32::try_from(self.random.between(0, 6)).unwrap(),
                        3,
                    )
                })
                .collect(),
            rerun: vec![super::steps::RERUN.to_owned()],
            total: self
                .random
                .chance(70)
                .then(|| i32::try_from(self.random.between(0, 8)).unwrap()),
        };
        let id = daemon.id;
        let before = self.model.clone();
        let claimed = self.model.claim(self.now, id, epoch, &claim);
        let statement = sql::claim(&self.names, id, epoch, &claim);
        let jobs = match claimed {
            Ok(jobs) => jobs,
            Err(refused) => {
                self.same(&statement, Err(refused));
                if refused == Refused::WorkerGone {
                    self.start_anew(nth);
                }
                return;
            }
        };
        let expected: Vec<(Uuid, String)> = jobs
            .iter()
            .map(|it| {
                let rest = format!("{} {} {} {}", it.job, it.run, it.attempt, it.max_attempts);
                (it.token.0, rest)
            })
            .collect();
        self.named(&statement, &expected);
        if before.gate == Gate::Hold && !jobs.is_empty() {
            self.fail("a claim under hold");
        }
        for job in &jobs {
            self.may_run(&before, job.job);
        }
        self.met.claimed += jobs.len() as u64;
        let read = self.random.chance(85);
        for job in jobs {
            let asked = self.model.jobs[&job.job].asked.clone();
            let memory = Memory {
                job: job.job,
                run: job.run,
                token: job.token,
                call: claim.call,
                attempt: job.attempt,
                max_attempts: job.max_attempts,
                epoch_no: self.model.epoch_no,
                started_at: self.now,
                until_ms: None,
                rerun: asked.job_type == super::steps::RERUN,
                asked: Some(asked),
            };
            let daemon = &mut self.daemons[nth];
            if read && self.mono < daemon.trusted_until {
                daemon.own.insert(job.token);
                daemon.held.insert(job.job, memory);
            }
        }
    }

    /// No living daemon holds it or has finished it, as far as the daemon has reached this epoch in time.
    fn may_run(&self, before: &Database, job: JobId) {
        for daemon in self.daemons.iter().filter(|daemon| !daemon.dead) {
            let spoken = daemon.spoken && daemon.epoch == Some(before.epoch);
            let here = spoken || self.mono < daemon.trusted_until;
            if daemon.held.contains_key(&job) {
                self.fail(&format!(
                    "job {job} is given out while {} holds it",
                    daemon.id
                ));
            }
            let finished = daemon.finished.iter().any(|(_, it, epoch)| {
                let effects_lost =
                    it.rerun && *epoch != before.epoch && !self.effects.contains(&it.token);
                it.job == job && !effects_lost
            });
            if finished && here && !self.reopened.contains(&job) {
                self.fail(&format!(
                    "job {job} is given out again, {} has finished it",
                    daemon.id
                ));
            }
        }
    }

    /// Says how runs ended. `confirmed`: the answer comes back.
    pub(crate) fn finish(&mut self, nth: usize, ends: Vec<(Memory, RunEnd)>, confirmed: bool) {
        let daemon = &mut self.daemons[nth];
        let Some(epoch) = daemon.epoch else {
            return;
        };
        let id = daemon.id;
        for (memory, _) in &ends {
            daemon.held.remove(&memory.job);
        }
        let items: Vec<RunEnd> = ends.iter().map(|(_, end)| end.clone()).collect();
        let answers = self.model.finish(self.now, epoch, &items);
        let lines = answers.clone().map(|answers| {
            items
                .iter()
                .zip(&answers)
                .map(|(end, answer)| sql::end_line(end, *answer))
                .collect()
        });
        let statement = sql::finish(&self.names, id, epoch, &items);
        let done = self.same(&statement, lines);
        let daemon = &mut self.daemons[nth];
        let answers = answers.unwrap_or_default();
        self.met.history += answers
            .iter()
            .filter(|it| **it == EndAnswer::History)
            .count() as u64;
        for (at, (memory, end)) in ends.into_iter().enumerate() {
            if done && confirmed {
                // What was only history was not finished by this run.
                if answers[at] != EndAnswer::History {
                    daemon.remember(memory, end);
                }
            } else {
                daemon.unsaid.push((memory, end));
            }
        }
    }
}
