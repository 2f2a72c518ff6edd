//! One random history: each statement goes to the model and to the server, and both must answer the same.

use std::collections::BTreeSet;

use tenure_core::ids::{JobId, Token};
use tenure_core::model::{Database, Refused};
use tenure_embedded::Row;
use uuid::Uuid;

use super::daemon::Daemon;
use super::names::Names;
use super::postgres::Postgres;
use super::random::Random;
use super::state;

/// 2030-01-01, in milliseconds since 1970.
pub(crate) const START: i64 = 1_893_456_000_000;

/// What a history met, to show that it is about something.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Met {
    pub(crate) statements: u64,
    pub(crate) refusals: u64,
    pub(crate) claimed: u64,
    pub(crate) ghosts: u64,
    pub(crate) lost_workers: u64,
    pub(crate) recovered: u64,
    pub(crate) switches: u64,
    pub(crate) restored: u64,
    pub(crate) put_back: u64,
    pub(crate) taken_over: u64,
    pub(crate) history: u64,
    pub(crate) windows_left: u64,
    pub(crate) written_again: u64,
    pub(crate) rerun: u64,
    pub(crate) effects: u64,
    pub(crate) holds: u64,
    pub(crate) accepted: u64,
    pub(crate) resumed: u64,
    pub(crate) set_aside: u64,
    pub(crate) retried: u64,
    pub(crate) several_calls: u64,
    pub(crate) answers_lost: u64,
}

impl std::ops::AddAssign for Met {
    fn add_assign(&mut self, more: Self) {
        self.statements += more.statements;
        self.refusals += more.refusals;
        self.claimed += more.claimed;
        self.ghosts += more.ghosts;
        self.lost_workers += more.lost_workers;
        self.recovered += more.recovered;
        self.switches += more.switches;
        self.restored += more.restored;
        self.put_back += more.put_back;
        self.taken_over += more.taken_over;
        self.history += more.history;
        self.windows_left += more.windows_left;
        self.written_again += more.written_again;
        self.rerun += more.rerun;
        self.effects += more.effects;
        self.holds += more.holds;
        self.accepted += more.accepted;
        self.resumed += more.resumed;
        self.set_aside += more.set_aside;
        self.retried += more.retried;
        self.several_calls += more.several_calls;
        self.answers_lost += more.answers_lost;
    }
}

/// A server that has fallen behind, and may become the primary.
pub(crate) struct Standby {
    database: Option<String>,
    pub(crate) model: Database,
    effects: BTreeSet<Token>,
}

pub(crate) struct Play<'p> {
    pub(crate) random: Random,
    pub(crate) model: Database,
    pub(crate) postgres: Option<&'p mut Postgres>,
    pub(crate) names: Names,
    /// The server's clock, which may jump, and that of the daemons, which does not.
    pub(crate) now: i64,
    pub(crate) mono: i64,
    pub(crate) daemons: Vec<Daemon>,
    /// What producers and persons know of.
    pub(crate) jobs: Vec<JobId>,
    /// Jobs that a person has opened again, which may run again.
    pub(crate) reopened: BTreeSet<JobId>,
    /// What handlers have written into this database beside their jobs, by run. A lost tail takes it along.
    pub(crate) effects: BTreeSet<Token>,
    /// The runs whose handlers have written so, which no loss changes.
    pub(crate) asserted: BTreeSet<Token>,
    pub(crate) standby: Option<Standby>,
    pub(crate) met: Met,
    seed: u64,
    log: Vec<String>,
}

impl<'p> Play<'p> {
    /// Without a server only the model plays, much faster, and what it promises is checked.
    pub(crate) fn new(seed: u64, mut postgres: Option<&'p mut Postgres>) -> Self {
        if let Some(postgres) = &mut postgres {
            postgres.clear(START);
        }
        let mut play = Self {
            random: Random::new(seed),
            model: Database::new(START),
            postgres,
            names: Names::default(),
            now: START,
            mono: 0,
            daemons: Vec::new(),
            jobs: Vec::new(),
            reopened: BTreeSet::new(),
            effects: BTreeSet::new(),
            asserted: BTreeSet::new(),
            standby: None,
            met: Met::default(),
            seed,
            log: Vec::new(),
        };
        let epoch = play.model.epoch.0;
        play.named("SELECT epoch FROM cluster", &[(epoch, String::new())]);
        play
    }

    pub(crate) fn fail(&self, what: &str) -> ! {
        let from = self.log.len().saturating_sub(120);
        panic!(
            "seed {}: {what}\nthe last statements:\n{}",
            self.seed,
            self.log[from..].join("\n")
        );
    }

    pub(crate) fn note(&mut self, text: String) {
        self.log.push(text);
    }

    /// Sends it to the server, if there is one.
    fn rows(&mut self, statement: &str) -> Option<Result<Vec<Row>, String>> {
        self.met.statements += 1;
        self.log
            .push(format!("{statement};  -- at {}", self.now - START));
        let postgres = self.postgres.as_mut()?;
        let result = postgres.run(self.now, statement);
        if let Err(code) = &result {
            self.log.push(format!("  -- {code}"));
        }
        Some(result)
    }

    /// The server must answer as the model did. Answers without an order are compared as sets.
    pub(crate) fn same(&mut self, statement: &str, expected: Result<Vec<String>, Refused>) -> bool {
        let mut expected = expected.map_err(|refused| refused.sqlstate().to_owned());
        self.met.refusals += u64::from(expected.is_err());
        if let Some(found) = self.rows(statement) {
            let mut found = found.map(|rows| {
                let lines = rows.iter().map(|row| self.line(row));
                lines.collect::<Vec<_>>()
            });
            if let (Ok(expected), Ok(found)) = (&mut expected, &mut found) {
                expected.sort();
                found.sort();
            }
            if expected != found {
                self.fail(&format!(
                    "the model says {expected:#?}\nPostgreSQL says {found:#?}"
                ));
            }
        }
        self.settle_order();
        expected.is_ok()
    }

    /// The server must answer with the same rows in the same order. The first column of each is a name that it has just given;
    /// from now on it goes for the model's.
    pub(crate) fn named(&mut self, statement: &str, expected: &[(Uuid, String)]) {
        let Some(found) = self.rows(statement) else {
            return;
        };
        let found = found.unwrap_or_else(|code| self.fail(&code));
        if found.len() != expected.len() {
            self.fail(&format!(
                "the model says {expected:#?}, PostgreSQL {found:#?}"
            ));
        }
        for ((model, rest), row) in expected.iter().zip(&found) {
            let name = row[0].as_deref().and_then(|it| Uuid::try_parse(it).ok());
            let bound = name.is_some_and(|name| self.names.bind(*model, name));
            if !bound || self.line(&row[1..]) != *rest {
                self.fail(&format!(
                    "the model says {model} {rest}, PostgreSQL {row:?}"
                ));
            }
        }
        self.settle_order();
    }

    fn line(&self, row: &[Option<String>]) -> String {
        let words: Vec<&str> = row.iter().map(|it| it.as_deref().unwrap_or("-")).collect();
        self.names.translate(&words.join(" "))
    }

    /// Jobs that became ready together: their order is PostgreSQL's choice, or chance.
    fn settle_order(&mut self) {
        let mut jobs = self.model.unordered();
        if jobs.is_empty() {
            return;
        }
        if let Some(postgres) = &mut self.postgres {
            let ids: Vec<String> = jobs
                .iter()
                .map(|id| self.names.database(id.0).to_string())
                .collect();
            let query = format!(
                "SELECT id FROM ready WHERE id = ANY ('{{{}}}') ORDER BY pos",
                ids.join(",")
            );
            let rows = postgres.run(self.now, &query).unwrap_or_default();
            let ids = rows
                .iter()
                .filter_map(|row| Uuid::try_parse(row[0].as_deref()?).ok());
            jobs = ids.map(|id| JobId(self.names.model(id))).collect();
        } else {
            self.random.shuffle(&mut jobs);
        }
        self.model.settle_order(&jobs);
    }

    /// Both show the same, and every job stands in one place.
    pub(crate) fn compare(&mut self) {
        self.completed_with_its_effect();
        let Some(postgres) = &mut self.postgres else {
            return;
        };
        let rows = postgres.run(self.now, "EXECUTE state");
        let rows = rows.unwrap_or_else(|code| self.fail(&code));
        let mut found: Vec<String> = rows
            .iter()
            .map(|row| self.names.translate(row[0].as_deref().unwrap_or("")))
            .collect();
        found.sort();
        let expected = state::of_model(&self.model);
        if expected != found {
            let only = |these: &[String], those: &[String]| {
                let lines: Vec<String> = these
                    .iter()
                    .filter(|it| !those.contains(it))
                    .cloned()
                    .collect();
                lines.join("\n  ")
            };
            self.fail(&format!(
                "the states differ\nonly in the model:\n  {}\nonly in PostgreSQL:\n  {}",
                only(&expected, &found),
                only(&found, &expected)
            ));
        }
    }

    /// Server's time and everybody's time go on.
    pub(crate) fn pass(&mut self, ms: i64) {
        self.now += ms;
        self.mono += ms;
        for daemon in &mut self.daemons {
            daemon.tick(self.mono);
        }
    }

    /// From now on a standby falls behind.
    pub(crate) fn take_copy(&mut self) {
        self.standby = Some(Standby {
            database: self.postgres.as_mut().map(|postgres| postgres.copy()),
            model: self.model.clone(),
            effects: self.effects.clone(),
        });
    }

    /// The standby becomes the primary, after an outage. Some daemons never come back.
    pub(crate) fn lose_tail(&mut self) {
        let Some(standby) = self.standby.take() else {
            self.fail("there is no standby");
        };
        self.log.push("  -- the tail is lost".to_owned());
        if let (Some(postgres), Some(copy)) = (&mut self.postgres, &standby.database) {
            postgres.fall_back_to(copy);
        }
        self.model.fall_back_to(&standby.model);
        self.effects = standby.effects;
        self.met.switches += 1;
        if self.random.chance(12) {
            self.move_to_other_system();
        }
        let outage = self.random.between(0, 4) * 1_000;
        self.pass(outage);
        for nth in 0..self.daemons.len() {
            let late = self.random.between(0, 4) * self.random.between(0, 3) * 1_000;
            let dies = self.random.chance(12);
            let daemon = &mut self.daemons[nth];
            daemon.silent_until = self.mono + late;
            daemon.dead |= dies;
        }
    }
}
