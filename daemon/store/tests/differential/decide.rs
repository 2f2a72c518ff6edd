//! What persons decide about a switch, and what daemons see of the servers.

use tenure_core::ids::JobId;
use tenure_core::model::{Gate, Retried};

use super::play::Play;
use super::{sql, state};

impl Play<'_> {
    /// The database is now on another system, with all its rows.
    pub(crate) fn move_to_other_system(&mut self) {
        self.note("  -- on another system".to_owned());
        self.model.copy_to_other_system();
        if let Some(postgres) = &mut self.postgres {
            postgres.move_to_other_system();
        }
    }

    pub(crate) fn decide(&mut self) {
        match self.random.below(8) {
            0..=2 => self.accept(),
            3..=5 => self.resume_cluster(),
            _ => self.retry_switch(),
        }
    }

    pub(crate) fn accept(&mut self) {
        let reason = if self.random.chance(5) { " " } else { "moved" };
        let answer = self.model.accept_cluster(self.now, reason);
        self.met.accepted += u64::from(answer.is_ok());
        let lines = answer.map(|it| vec![state::gate(it).to_owned()]);
        self.same(&format!("SELECT accept_cluster('{reason}')"), lines);
    }

    pub(crate) fn resume_cluster(&mut self) {
        let rerun = self.random.chance(50);
        let answer = self.model.resume_cluster(self.now, rerun);
        if let Ok((_, aside)) = answer {
            self.met.resumed += 1;
            self.met.set_aside += aside as u64;
        }
        let lines = answer.map(|(gate, aside)| vec![format!("{} {aside}", state::gate(gate))]);
        self.same(
            &format!("SELECT gate, set_aside FROM resume_cluster('{{\"rerun\": {rerun}}}')"),
            lines,
        );
    }

    pub(crate) fn retry_switch(&mut self) {
        let known = self.model.switches.keys().copied().collect::<Vec<_>>();
        let epoch_no = self
            .random
            .pick(&known)
            .filter(|_| self.random.chance(90))
            .unwrap_or(99);
        // The database goes through them by its own ids.
        let mut jobs: Vec<JobId> = self.model.written_again(epoch_no);
        jobs.sort_by_key(|id| self.names.database(id.0));
        let before = self.model.clone();
        let answers = self.model.retry_switch(epoch_no, &jobs);
        if answers.is_err() {
            self.model = before;
        }
        if let Ok(answers) = &answers {
            for (id, answer) in jobs.iter().zip(answers) {
                if *answer == Retried::Pending {
                    self.met.retried += 1;
                    self.reopened.insert(*id);
                }
            }
        }
        let lines = answers.map(|answers| {
            let pairs = jobs.iter().zip(answers);
            pairs
                .map(|(id, answer)| match answer {
                    Retried::Pending => format!("{id} pending"),
                    Retried::GoneOn(status) => format!("{id} has gone on since: {status}"),
                    Retried::KeyTaken => {
                        format!("{id} refused: another live job has its unique key")
                    }
                })
                .collect()
        });
        self.same(
            &format!("SELECT job_id, answer FROM retry_switch({epoch_no})"),
            lines,
        );
    }

    /// Persons decide, and the daemons speak, until the gate is open.
    pub(crate) fn come_to_rest(&mut self) {
        for _ in 0..40 {
            match self.model.gate {
                Gate::Open if self.model.here => return,
                Gate::Hold if self.random.chance(50) => self.accept(),
                Gate::Hold => self.resume_cluster(),
                _ => {}
            }
            self.pass(2_000);
            for nth in 0..self.daemons.len() {
                self.attach_if_late(nth);
            }
            self.sweep();
        }
    }

    /// A daemon looks at its server.
    pub(crate) fn probe(&mut self, nth: usize) {
        let id = self.daemons[nth].id;
        let line = sql::probe_line(&self.model.probe(id));
        self.same(&sql::probe(id), Ok(vec![line]));
    }

    /// A daemon forgets ends: those that the standby shows, or more than that since it has no room.
    pub(crate) fn trim(&mut self, nth: usize) {
        let daemon = &self.daemons[nth];
        if daemon.replay {
            return;
        }
        let id = daemon.id;
        let shown = self.standby.as_ref().map(|it| it.model.probe(id).beat);
        let proven = self.random.chance(60);
        let bucket = match (proven, shown) {
            (true, Some(Some(beat))) => beat,
            (false, _) => self
                .random
                .between(daemon.from, daemon.beat.max(daemon.from)),
            _ => return,
        };
        self.note(format!(
            "  -- {id} forgets up to {bucket}, proven: {proven}"
        ));
        self.daemons[nth].trim(bucket, proven);
    }

    /// A daemon has no room for what the standby does not show yet.
    pub(crate) fn forget_too_much(&mut self) {
        let nth = self.random.below(self.daemons.len());
        let daemon = &mut self.daemons[nth];
        if !daemon.replay && daemon.attached {
            daemon.trim(daemon.beat, false);
            let (id, beat) = (daemon.id, daemon.beat);
            self.note(format!("  -- {id} forgets up to {beat}"));
        }
    }

    /// How often a person had to be asked.
    pub(crate) fn count_hold(&mut self, before: Gate) {
        self.met.holds += u64::from(before != Gate::Hold && self.model.gate == Gate::Hold);
    }
}
