//! What happens around the daemons: persons act, time passes, and somebody makes calls that no daemon makes.

use tenure_core::ids::{Call, Epoch, JobId, Run, WorkerId};
use tenure_core::model::{Heartbeat, Place, Refused, Registration, Review, Status, Stop};

use super::play::Play;
use super::sql;
use super::steps::JOB_TYPES;

impl Play<'_> {
    pub(crate) fn by_person(&mut self) {
        let Some(job) = self.random.pick(&self.jobs) else {
            return;
        };
        let word = |answer: Result<&'static str, Refused>| answer.map(|it| vec![it.to_owned()]);
        match self.random.below(22) {
            20..=21 => self.decide(),
            0..=3 => {
                let answer = self.model.stop(job, Stop::Cancel);
                self.same(&sql::stop(&self.names, job, Stop::Cancel), word(answer));
            }
            4..=5 => {
                let answer = self.model.stop(job, Stop::Dead);
                self.same(&sql::stop(&self.names, job, Stop::Dead), word(answer));
            }
            6..=7 => {
                let answer = self.model.complete_manually(job);
                self.same(&sql::stop(&self.names, job, Stop::Complete), word(answer));
            }
            8..=11 => {
                let ended: Vec<JobId> = self
                    .jobs
                    .iter()
                    .copied()
                    .filter(|id| {
                        self.model
                            .jobs
                            .get(id)
                            .is_some_and(|it| matches!(it.place, Place::Ended(_)))
                    })
                    .collect();
                let job = self
                    .random
                    .pick(&ended)
                    .filter(|_| self.random.chance(80))
                    .unwrap_or(job);
                let answer = self.model.retry(job);
                self.reopened.extend(answer.is_ok().then_some(job));
                let id = self.names.database(job.0);
                self.same(
                    &format!("SELECT retry('{id}')"),
                    word(answer.map(|()| "pending")),
                );
            }
            12..=16 => self.review_one(),
            17 => {
                let job_type = self.random.pick(&JOB_TYPES).unwrap();
                self.model.pause(job_type);
                self.same(
                    &format!("SELECT pause('{job_type}')"),
                    Ok(vec![String::new()]),
                );
            }
            _ => {
                let job_type = self.random.pick(&JOB_TYPES).unwrap();
                let answer = self.model.resume(job_type).map(|()| vec![String::new()]);
                self.same(&format!("SELECT resume('{job_type}')"), answer);
            }
        }
    }

    fn review_one(&mut self) {
        let letters = self.failed_letters();
        let unknown = self
            .random
            .chance(5)
            .then(|| (JobId(self.random.uuid()), Run(1)));
        let Some((job, run)) = unknown.or_else(|| self.random.pick(&letters)) else {
            return;
        };
        let review = self
            .random
            .pick(&[Review::Retry, Review::Retry, Review::Discard, Review::Fixed])
            .unwrap();
        let edit = self
            .random
            .chance(25)
            .then(|| self.random.between(1, 99).to_string());
        let answer = self.model.review(job, run, review, edit.clone());
        self.reopened
            .extend((review == Review::Retry && answer.is_ok()).then_some(job));
        let statement = sql::review(&self.names, job, run, review, edit.as_deref());
        self.same(&statement, answer.map(|it| vec![it.to_owned()]));
    }

    pub(crate) fn sweep(&mut self) {
        let known = self.epochs();
        let present = Some(self.model.epoch).filter(|it| known.contains(it));
        let any = self.random.chance(10) || present.is_none();
        let Some(epoch) = (if any {
            self.random.pick(&known)
        } else {
            present
        }) else {
            return;
        };
        let swept = self.model.sweep(self.now, epoch);
        if let Ok(swept) = swept {
            self.met.lost_workers += swept.lost as u64;
            self.met.recovered += swept.recovered as u64;
        }
        let name = self.names.database(epoch.0);
        let lines = swept.map(|it| {
            let swept = if it.swept { "t" } else { "f" };
            vec![format!(
                "{swept} {} {} {}",
                it.promoted, it.recovered, it.lost
            )]
        });
        self.same(
            &format!("SELECT swept, promoted, recovered, lost FROM sweep('{name}')"),
            lines,
        );
    }

    pub(crate) fn promote(&mut self) {
        let Some(epoch) = self.random.pick(&self.epochs()) else {
            return;
        };
        let promoted = self.model.promote(self.now, epoch);
        let name = self.names.database(epoch.0);
        let lines = promoted.map(|it| vec![it.to_string()]);
        self.same(&format!("SELECT promoted FROM promote('{name}')"), lines);
    }

    /// The epochs that living daemons know.
    fn epochs(&self) -> Vec<Epoch> {
        let awake = self
            .daemons
            .iter()
            .filter(|it| !it.dead && self.mono >= it.silent_until);
        awake.filter_map(|it| it.epoch).collect()
    }

    pub(crate) fn time(&mut self) {
        match self.random.below(12) {
            0..=4 => {
                let ms = self.random.between(300, 2_900);
                self.pass(ms);
                self.sweep();
            }
            5..=6 => self.promote(),
            7..=8 => self.quiet_time(),
            9 => {
                // Nobody reaches the server, or it is frozen.
                let ms = self.random.between(3_001, 40_000);
                self.pass(ms);
                self.sweep();
            }
            10 => {
                // Somebody sets the server's clock.
                self.now += self.random.between(-60_000, 60_000);
                self.sweep();
            }
            _ => self.pass(1_000),
        }
    }

    /// Calls that a well-behaved daemon never makes.
    pub(crate) fn unusual(&mut self) {
        let nth = self.random.below(self.daemons.len());
        let (id, epoch) = (self.daemons[nth].id, self.model.epoch);
        match self.random.below(4) {
            3 => {
                if self.random.chance(10) {
                    self.move_to_other_system();
                }
            }
            0 => {
                let unknown = WorkerId(self.random.uuid());
                let said = Heartbeat {
                    beat: 0,
                    settled: Call(0),
                    open: Vec::new(),
                    draining: false,
                };
                let answer = self.model.heartbeat(self.now, unknown, epoch, &said);
                let lines = answer.map(|it| sql::heartbeat_lines(&it));
                self.same(
                    &sql::plain_beat(&self.names, unknown, epoch, Call(0)),
                    lines,
                );
            }
            1 => {
                let wrong = Epoch(self.random.uuid());
                let said = Heartbeat {
                    beat: 0,
                    settled: Call(0),
                    open: Vec::new(),
                    draining: false,
                };
                let answer = self.model.heartbeat(self.now, id, wrong, &said);
                let lines = answer.map(|it| sql::heartbeat_lines(&it));
                self.same(&sql::plain_beat(&self.names, id, wrong, Call(0)), lines);
            }
            _ => {
                let bad = Registration {
                    lease_ttl: 5_000,
                    heartbeat: 2_000,
                };
                let other = WorkerId(self.random.uuid());
                let answer = self.model.register(self.now, other, bad);
                self.same(&sql::register(other, bad), answer.map(|_| Vec::new()));
            }
        }
    }

    pub(crate) fn failed_letters(&self) -> Vec<(JobId, Run)> {
        let failed = |id: &JobId| matches!(&self.model.jobs[id].place, Place::Ended(it) if it.status == Status::Failed);
        self.model
            .letters
            .keys()
            .filter(|(id, _)| failed(id) || id.0.as_u128() % 3 == 0)
            .copied()
            .collect()
    }
}
