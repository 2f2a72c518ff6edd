//! The choice of the next statement.

use tenure_core::ids::{JobId, Run, Token, WorkerId};
use tenure_core::model::{End, EndAnswer, Gate, Hold, Memory, NewJob, RunEnd};
use uuid::Uuid;

use super::play::Play;
use super::sql;

pub(crate) const JOB_TYPES: [&str; 3] = ["mail", "report", "score"];
/// Its handlers have their effects in the database of the jobs.
pub(crate) const RERUN: &str = "score";
const KEYS: [&str; 3] = ["a", "b", "c"];

impl Play<'_> {
    /// Daemons, and something for them to do.
    pub(crate) fn begin(&mut self) {
        for _ in 0..self.random.between(2, 4) {
            let daemon = self.new_daemon();
            self.daemons.push(daemon);
        }
        for nth in 0..self.daemons.len() {
            self.register(nth);
            self.enqueue_some();
        }
        for nth in 0..self.daemons.len() {
            self.beat(nth, false);
        }
    }

    /// A time without trouble for the server, in which some daemons beat and others do not.
    pub(crate) fn quiet_time(&mut self) {
        let beating: Vec<bool> = self
            .daemons
            .iter()
            .map(|_| self.random.chance(50))
            .collect();
        for _ in 0..self.random.between(3, 9) {
            let ms = self.random.between(1_000, 3_000);
            self.pass(ms);
            self.sweep();
            for (nth, beats) in beating.iter().enumerate() {
                let daemon = &self.daemons[nth];
                let current = daemon.epoch == Some(self.model.epoch) && self.model.here;
                if *beats && !daemon.dead && current && self.mono >= daemon.silent_until {
                    self.beat(nth, false);
                }
            }
        }
    }

    /// All daemons that can send a beat.
    pub(crate) fn all_beat(&mut self) {
        for nth in 0..self.daemons.len() {
            let daemon = &self.daemons[nth];
            let current = daemon.epoch == Some(self.model.epoch) && self.model.here;
            if current && !daemon.dead && self.mono >= daemon.silent_until {
                self.beat(nth, false);
            }
        }
    }

    /// One random statement, or a few that belong together.
    pub(crate) fn step(&mut self) {
        let ms = self.random.between(0, 150);
        self.pass(ms);
        let nth = self.random.below(self.daemons.len());
        let something = self.model.gate == Gate::Hold || !self.model.switch_jobs.is_empty();
        if something && self.random.chance(7) {
            return self.decide();
        }
        match self.random.below(100) {
            0..=15 => self.enqueue_some(),
            16..=29 => self.by_person(),
            30..=37 => self.time(),
            38..=40 => self.unusual(),
            _ => self.by_daemon(nth),
        }
    }

    /// What a daemon does next, by what it knows.
    fn by_daemon(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        if daemon.dead || self.mono < daemon.silent_until {
            return;
        }
        if daemon.epoch.is_none() {
            return self.register(nth);
        }
        // It learns of another epoch by a refusal, and of that at any call.
        if daemon.epoch != Some(self.model.epoch) || !self.model.here || !daemon.attached {
            if self.random.chance(20) {
                self.beat(nth, false);
            }
            if self.mono < self.daemons[nth].trusted_until {
                return self.attach(nth);
            }
            // It was cut off for so long that it may have been declared lost, and then it does not know who came since. What it
            // says must not close a window, so it speaks under a new id, and the old one is waited for.
            self.start_anew(nth);
            return self.register(nth);
        }
        if self.model.elsewhere && self.random.chance(30) {
            // It looks at its server at each beat, and sees that it is another one.
            return self.attach(nth);
        }
        let trusted = self.mono < daemon.trusted_until;
        match self.random.below(100) {
            0..=11 => self.beat(nth, false),
            12..=14 => self.trim(nth),
            15..=17 => self.probe(nth),
            18..=54 if trusted => self.claim(nth),
            55..=84 => self.finish_some(nth),
            85..=88 => self.repeat(nth),
            89..=92 => self.hold_one(nth),
            93 => self.attach(nth),
            94..=95 => self.assert_lease(nth),
            96 => self.restart(nth),
            97 => self.leave(nth),
            98 => self.beat(nth, true),
            _ => self.beat(nth, false),
        }
    }

    fn new_job(&mut self) -> NewJob {
        let known = self
            .random
            .pick(&self.jobs)
            .filter(|_| self.random.chance(6));
        let fresh = self
            .random
            .chance(30)
            .then(|| JobId(self.random.uuid_v7(self.now)));
        NewJob {
            id: known.or(fresh),
            job_type: self.random.pick(&JOB_TYPES).unwrap().to_owned(),
            tenant: if self.random.chance(80) {
                "default"
            } else {
                "other"
            }
            .to_owned(),
            priority: i32::try_from(self.random.between(-1, 1)).unwrap(),
            run_at: self
                .random
                .chance(20)
                .then(|| self.now + self.random.between(-2_000, 20_000)),
            unique_key: self
                .random
                .chance(30)
                .then(|| self.random.pick(&KEYS).unwrap().to_owned()),
            max_attempts: self
                .random
                .chance(50)
                .then(|| i32::try_from(self.random.between(1, 3)).unwrap()),
            watermark: self
                .random
                .chance(25)
                .then(|| self.random.pick(&KEYS).unwrap().to_owned()),
        }
    }

    fn enqueue_some(&mut self) {
        let count = if self.random.chance(40) {
            1
        } else {
            self.random.between(0, 5)
        };
        let mut jobs: Vec<NewJob> = (0..count).map(|_| self.new_job()).collect();
        if jobs.len() > 1 && self.random.chance(20) {
            // The same id twice in one batch.
            let id = Some(JobId(self.random.uuid_v7(self.now)));
            let (one, other) = (self.random.below(jobs.len()), self.random.below(jobs.len()));
            jobs[one].id = id;
            jobs[other].id = id;
        }
        if self.random.chance(4)
            && let Some(job) = jobs.first_mut()
        {
            match self.random.below(3) {
                0 => job.max_attempts = Some(0),
                1 => job.unique_key = Some(String::new()),
                _ => job.job_type = "mail*".to_owned(),
            }
        }
        self.enqueue(&jobs);
    }

    pub(crate) fn enqueue(&mut self, jobs: &[NewJob]) {
        let ids = self.model.enqueue(self.now, jobs);
        let statement = match jobs {
            [job] if self.random.chance(50) => sql::enqueue(&self.names, job),
            [job] if self.random.chance(30) => sql::insert(&self.names, job),
            jobs => sql::enqueue_many(&self.names, jobs),
        };
        match ids {
            Ok(ids) => {
                let names: Vec<(Uuid, String)> =
                    ids.iter().map(|id| (id.0, String::new())).collect();
                self.named(&statement, &names);
                self.jobs.extend(ids);
            }
            Err(refused) => {
                self.same(&statement, Err(refused));
            }
        }
    }

    fn end(&mut self, memory: &Memory) -> RunEnd {
        let end = match self.random.below(10) {
            _ if self.asserted.contains(&memory.token) => End::Completed,
            0..=3 => End::Completed,
            4..=5 => End::Failed {
                last: self.random.chance(30),
            },
            6 => End::Released,
            7 => End::Crashed,
            _ => End::Snoozed,
        };
        let mut follow_ups = Vec::new();
        if end == End::Completed && self.random.chance(25) {
            for _ in 0..self.random.between(1, 2) {
                let id = JobId(self.random.uuid_v7(self.now));
                let unique_key = None;
                follow_ups.push(NewJob {
                    id: Some(id),
                    unique_key,
                    ..self.new_job()
                });
                self.jobs.push(id);
            }
        }
        RunEnd {
            job: memory.job,
            run: memory.run,
            token: memory.token,
            end,
            delay: if self.random.chance(50) {
                0
            } else {
                self.random.between(1, 5_000)
            },
            result: (end == End::Completed).then(|| self.random.between(1, 99).to_string()),
            follow_ups,
            watermark: self
                .random
                .chance(40)
                .then(|| self.random.between(1, 99).to_string()),
        }
    }

    fn finish_some(&mut self, nth: usize) {
        let daemon = &mut self.daemons[nth];
        // What had no answer is said again first, in a batch of its own or with the rest.
        let mut ends = std::mem::take(&mut daemon.unsaid);
        let held: Vec<Memory> = daemon.held.values().cloned().collect();
        for memory in held {
            if ends.len() < 4 && self.random.chance(60) {
                if memory.rerun && self.random.chance(60) {
                    self.write_effects(&memory);
                }
                let end = self.end(&memory);
                ends.push((memory, end));
            }
        }
        if !ends.is_empty() {
            let confirmed = self.random.chance(85);
            self.finish(nth, ends, confirmed);
        }
    }

    /// A statement that was answered long ago comes again, as from a connection that hung, or one that nobody may make.
    fn repeat(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        let (id, Some(epoch)) = (daemon.id, daemon.epoch) else {
            return;
        };
        let Some((_, memory, mut end)) = self.random.pick(&daemon.said) else {
            return;
        };
        match self.random.below(4) {
            0 => end.token = Token(self.random.uuid()),
            1 => end.run = Run(end.run.0 + 1),
            2 => {
                end = RunEnd {
                    follow_ups: end.follow_ups.clone(),
                    ..self.end(&memory)
                }
            }
            _ => {}
        }
        if self
            .model
            .jobs
            .get(&end.job)
            .is_some_and(|job| job.run == end.run)
            && self.random.chance(50)
        {
            return;
        }
        let answers = self
            .model
            .finish(self.now, epoch, std::slice::from_ref(&end));
        self.met.history += u64::from(answers == Ok(vec![EndAnswer::History]));
        let lines =
            answers.map(|answers| answers.iter().map(|it| sql::end_line(&end, *it)).collect());
        let statement = sql::finish(&self.names, id, epoch, std::slice::from_ref(&end));
        self.same(&statement, lines);
    }

    fn hold_one(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        let (id, Some(epoch)) = (daemon.id, daemon.epoch) else {
            return;
        };
        let held: Vec<Memory> = daemon.held.values().cloned().collect();
        let Some(memory) = self.random.pick(&held) else {
            return;
        };
        let for_ms = self.random.between(0, 4) * 2_500;
        let holds = [Hold {
            job: memory.job,
            token: memory.token,
            for_ms,
            at_least: self.random.chance(50),
        }];
        let answers = self.model.hold(self.now, epoch, &holds);
        let lines = answers.map(|answers| {
            let word = |held: bool| if held { "done" } else { "history" };
            vec![format!("{} {}", memory.job, word(answers[0]))]
        });
        if self.same(&sql::hold(&self.names, id, epoch, &holds), lines) && for_ms > 0 {
            // The handler lives elsewhere from now on, and the daemon does not speak for it.
            self.daemons[nth].held.remove(&memory.job);
        }
    }

    fn assert_lease(&mut self, nth: usize) {
        let held: Vec<Memory> = self.daemons[nth].held.values().cloned().collect();
        let Some(memory) = self.random.pick(&held) else {
            return;
        };
        if self.random.chance(70) {
            return self.write_effects(&memory);
        }
        let token = Token(self.random.uuid());
        let lines = self
            .model
            .assert_lease(memory.job, token)
            .map(|()| vec![String::new()]);
        let (job, token) = (
            self.names.database(memory.job.0),
            self.names.database(token.0),
        );
        self.same(&format!("SELECT assert_lease('{job}', '{token}')"), lines);
    }

    /// The process dies. Another one starts on its state_dir, now or never.
    fn restart(&mut self, nth: usize) {
        self.note(format!("  -- {} dies", self.daemons[nth].id));
        let id = WorkerId(self.random.uuid());
        let next = self.daemons[nth].successor(id);
        if self.random.chance(60) {
            self.daemons[nth] = next;
        } else {
            let other = self.new_daemon();
            self.daemons[nth] = other;
        }
    }

    /// A drain: its handlers are dead and it gives all back, but for some that a kill left over.
    fn leave(&mut self, nth: usize) {
        if self.random.chance(70) {
            let held: Vec<Memory> = self.daemons[nth].held.values().cloned().collect();
            let released = held.iter().map(|it| {
                let end = RunEnd {
                    end: End::Released,
                    result: None,
                    follow_ups: Vec::new(),
                    watermark: None,
                    ..self.end(it)
                };
                (it.clone(), end)
            });
            let released: Vec<_> = released.collect();
            self.finish(nth, released, true);
        }
        let daemon = &self.daemons[nth];
        let (id, Some(epoch)) = (daemon.id, daemon.epoch) else {
            return;
        };
        let left = self.model.deregister(self.now, id, epoch);
        let (name, lines) = (
            self.names.database(epoch.0),
            left.map(|()| vec![String::new()]),
        );
        self.same(
            &format!("SELECT deregister_worker('{id}', '{name}')"),
            lines,
        );
        let other = self.new_daemon();
        self.daemons[nth] = other;
    }
}
