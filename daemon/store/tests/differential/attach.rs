//! After a switch: a daemon learns the present epoch and says what it holds and what it finished.

use tenure_core::ids::Token;
use tenure_core::model::{
    Covers, Database, End, EndAnswer, Gate, Kept, Memory, Place, Reattach, ReattachAnswer, RunEnd,
    Statement,
};

use super::play::Play;
use super::{sql, state};

impl Play<'_> {
    /// Learns the present epoch, opens it if need be, and says what it holds and what it finished.
    pub(crate) fn attach(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        let (id, seen) = (daemon.id, daemon.epoch_no);
        let before = self.model.gate;
        let opened = self.model.open_epoch(self.now, id, seen);
        self.count_hold(before);
        let beat = opened.beat.map_or("-".to_owned(), |beat| beat.to_string());
        let rest = format!("{} {} {beat}", opened.epoch_no, state::gate(opened.gate));
        self.named(&sql::open_epoch(id, seen), &[(opened.epoch.0, rest)]);
        let daemon = &mut self.daemons[nth];
        if daemon.epoch != Some(opened.epoch) {
            (daemon.spoken, daemon.attached) = (false, false);
        }
        daemon.epoch = Some(opened.epoch);
        daemon.epoch_no = opened.epoch_no;
        // What the shown beat proves need not be said, but may.
        let all = self.random.chance(20) || self.daemons[nth].replay;
        self.reattach(nth, opened.beat.filter(|_| !all));
    }

    /// All that the daemon has to say, later runs of a job after earlier ones.
    fn statements(&mut self, nth: usize, shown: Option<i64>) -> Vec<Statement> {
        let daemon = &self.daemons[nth];
        let mut statements: Vec<Statement> =
            daemon.held.values().cloned().map(Statement::Hold).collect();
        for (bucket, memory, end) in &daemon.said {
            if shown.is_none_or(|shown| *bucket > shown) {
                statements.push(Statement::Ended {
                    memory: memory.clone(),
                    end: end.clone(),
                    confirmed: true,
                });
            }
        }
        for (memory, end) in &daemon.unsaid {
            statements.push(Statement::Ended {
                memory: memory.clone(),
                end: end.clone(),
                confirmed: false,
            });
        }
        self.random.shuffle(&mut statements);
        statements
    }

    /// Says all, in one call or in several. Others act between these, and the daemon may stop short and begin anew.
    pub(crate) fn reattach(&mut self, nth: usize, shown: Option<i64>) {
        let mut statements = self.statements(nth, shown);
        let mut rest = Vec::new();
        if self.random.chance(30) {
            self.met.several_calls += 1;
            statements.sort_by_key(|it| it.memory().run);
            rest = statements.split_off(self.random.below(statements.len() + 1));
        } else {
            std::mem::swap(&mut statements, &mut rest);
        }
        let tokens: Vec<Token> = statements.iter().map(|it| it.memory().token).collect();
        let id = self.daemons[nth].id;
        if !statements.is_empty() {
            if !self.say(nth, statements, true, Vec::new()) {
                return;
            }
            for _ in 0..self.random.between(0, 2) {
                let other = self.random.below(self.daemons.len());
                match self.random.below(4) {
                    0 if other != nth => self.attach_if_late(other),
                    1 if other != nth => self.claim(other),
                    2 => {
                        let ms = self.random.between(0, 1_500);
                        self.pass(ms);
                        self.sweep();
                    }
                    _ => {}
                }
            }
            if self.daemons[nth].id != id || self.random.chance(10) {
                return;
            }
        }
        self.say(nth, rest, false, tokens);
    }

    /// Re-attaches until the answers have come.
    pub(crate) fn attach_surely(&mut self, nth: usize) {
        self.daemons[nth].attached = false;
        while !self.daemons[nth].attached {
            self.attach(nth);
        }
    }

    /// A daemon that has not re-attached yet does so.
    pub(crate) fn attach_if_late(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        let behind = daemon.epoch != Some(self.model.epoch) || !self.model.here;
        let late = daemon.epoch.is_some() && (behind || !daemon.attached) && !daemon.dead;
        if late && self.mono >= daemon.silent_until && self.mono < daemon.trusted_until {
            self.attach(nth);
        }
    }

    /// One call. `false`: it was refused, or its answer did not come.
    fn say(
        &mut self,
        nth: usize,
        statements: Vec<Statement>,
        more: bool,
        held: Vec<Token>,
    ) -> bool {
        let (now, sent) = (self.now, self.mono);
        let daemon = &self.daemons[nth];
        let Some(epoch) = daemon.epoch else {
            return false;
        };
        let id = daemon.id;
        let inherited = daemon.inherited.iter().map(|(worker, from)| Covers {
            worker: *worker,
            from: *from,
            predecessor: true,
        });
        let own = Covers {
            worker: id,
            from: daemon.from,
            predecessor: false,
        };
        let said = Reattach {
            beat: daemon.beat,
            statements,
            roster: daemon.roster.iter().copied().collect(),
            registration: Some(daemon.registration),
            predecessors: daemon.predecessor.into_iter().collect(),
            more,
            held,
            covers: inherited.chain([own]).collect(),
        };
        let before = self.model.clone();
        let answers = self.model.reattach(now, id, epoch, &said);
        self.count_hold(before.gate);
        let statement = sql::reattach(&self.names, id, epoch, &said);
        let lines = answers.clone().map(|answers| {
            let pairs = said.statements.iter().zip(&answers);
            pairs
                .map(|(statement, answer)| sql::reattach_line(statement, answer))
                .collect()
        });
        self.same(&statement, lines);
        let Ok(answers) = answers else {
            return false;
        };
        self.present_epoch_stands(&before, &said);
        self.nobody_is_forgotten(&said);
        self.count(&before, &said);
        for (statement, answer) in said.statements.iter().zip(&answers) {
            self.completion_stands(statement, answer);
        }
        let alive = self
            .model
            .workers
            .get(&id)
            .is_some_and(|it| it.ended_at.is_none());
        self.daemons[nth].spoken |= !more;
        if self.random.chance(8) {
            self.met.answers_lost += 1;
            self.note("  -- the answer does not come".to_owned());
            return false;
        }
        for (statement, answer) in said.statements.iter().zip(&answers) {
            self.take_answer(nth, statement, answer);
        }
        let daemon = &mut self.daemons[nth];
        if !more {
            daemon.attached = true;
            daemon.replay = false;
            daemon.predecessor = None;
            daemon.inherited.clear();
            if alive {
                daemon.confirmed(sent);
            }
        }
        true
    }

    fn count(&mut self, before: &Database, said: &Reattach) {
        for statement in &said.statements {
            let job = &statement.memory().job;
            let put_back = !before.jobs.contains_key(job) && self.model.jobs.contains_key(job);
            self.met.put_back += u64::from(put_back);
        }
        self.met.taken_over += (self.model.revocations.len() - before.revocations.len()) as u64;
        self.met.windows_left +=
            u64::from(before.gate == Gate::Window && self.model.gate == Gate::Open);
        let noted = |model: &Database, what: &str| {
            let noted = model.switch_jobs.keys();
            noted.filter(|key| key.3.name() == what).count() as u64
        };
        self.met.written_again +=
            noted(&self.model, "written_again") - noted(before, "written_again");
        self.met.rerun += noted(&self.model, "rerun") - noted(before, "rerun");
    }

    /// What the daemon makes of one answer.
    fn take_answer(&mut self, nth: usize, statement: &Statement, answer: &ReattachAnswer) {
        let memory = statement.memory();
        let daemon = &mut self.daemons[nth];
        match (statement, answer) {
            (Statement::Hold(_), ReattachAnswer::Held(Kept::Keep)) => self.met.restored += 1,
            (Statement::Hold(_), answer) => {
                // Its handler is killed. Without its effects the job is to run again.
                let held = daemon.held.remove(&memory.job).is_some();
                if held && *answer == ReattachAnswer::Held(Kept::Rerun) {
                    daemon.unsaid.push((memory.clone(), released(memory)));
                }
            }
            (Statement::Ended { end, .. }, answer) => {
                daemon.forget(memory.token);
                let ReattachAnswer::Ended(answer) = answer else {
                    return;
                };
                // What is only history has been overruled, and what was given back has not ended.
                let given_back = matches!(answer, EndAnswer::Done("pending" | "scheduled"));
                if *answer != EndAnswer::History && !(end.end == End::Completed && given_back) {
                    daemon.remember(memory.clone(), end.clone());
                }
            }
        }
    }

    /// While a window or a hold is on, every living worker that somebody named is waited for, or has spoken.
    fn nobody_is_forgotten(&self, said: &Reattach) {
        if self.model.gate == Gate::Open {
            return;
        }
        for id in &said.roster {
            let known = self.model.workers.contains_key(id);
            if !known && !self.model.expected.contains_key(id) {
                self.fail(&format!("{id} is named and not waited for"));
            }
        }
    }

    /// What was claimed or ended in the present epoch is not changed by what is said about an earlier one.
    fn present_epoch_stands(&self, before: &Database, said: &Reattach) {
        for (id, job) in &before.jobs {
            let named = |token: Token| said.statements.iter().any(|it| it.memory().token == token);
            let stands = match &job.place {
                Place::Ended(outcome) => outcome.epoch_no == before.epoch_no,
                Place::Leased(lease) => {
                    lease.epoch_no == before.epoch_no
                        && !named(lease.token)
                        && !said.predecessors.contains(&lease.worker)
                }
                _ => false,
            };
            let lost = |place: &Place| match place {
                Place::Leased(lease) => {
                    before
                        .workers
                        .get(&lease.worker)
                        .is_none_or(|it| it.ended_at.is_some())
                        || lease.until.is_some()
                }
                _ => false,
            };
            if stands && self.model.jobs.get(id) != Some(job) && !lost(&job.place) {
                self.fail(&format!(
                    "job {id} of the present epoch was changed by a re-attach: {job:?} to {:?}",
                    self.model.jobs.get(id)
                ));
            }
        }
    }
}

/// The end of a run whose handler was killed to run again.
fn released(memory: &Memory) -> RunEnd {
    RunEnd {
        job: memory.job,
        run: memory.run,
        token: memory.token,
        end: End::Released,
        delay: 0,
        result: None,
        follow_ups: Vec::new(),
        watermark: None,
    }
}
