//! What is said to a server, and what it answers: each statement is one of the model's.

use tenure_core::ids::{Call, Epoch, Token, WorkerId};
use tenure_core::model::{
    Asked, BeatAnswer, Claim, Claimed, Database, EndAnswer, Heartbeat, Moment, Opened, Reattach,
    ReattachAnswer, Refused, Registration, RunEnd,
};

/// The only job type.
pub(crate) const JOB_TYPE: &str = "job";
/// An attempt with this number is the last.
const MAX_ATTEMPTS: i32 = 6;

/// A worker's statement, as it travels.
#[derive(Clone, Debug)]
pub(crate) enum Statement {
    Open {
        worker: WorkerId,
        seen: i64,
    },
    Register {
        worker: WorkerId,
        registration: Registration,
    },
    Reattach {
        worker: WorkerId,
        epoch: Epoch,
        said: Reattach,
    },
    Beat {
        worker: WorkerId,
        epoch: Epoch,
        said: Heartbeat,
    },
    Claim {
        worker: WorkerId,
        epoch: Epoch,
        call: Call,
        limit: i32,
    },
    End {
        epoch: Epoch,
        ends: Vec<RunEnd>,
    },
    Sweep {
        epoch: Epoch,
    },
    Leave {
        worker: WorkerId,
        epoch: Epoch,
    },
}

/// What comes back.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Opened(Opened),
    Reattached(Vec<ReattachAnswer>),
    Beaten(BeatAnswer),
    /// With what was asked for, and when they were claimed.
    Claimed(Vec<(Claimed, Asked)>, Moment),
    Ended(Vec<(Token, EndAnswer)>),
    Fine,
    Refused(Refused),
    /// No such server, or it takes no writes.
    Failed,
}

impl Statement {
    /// Carries it out. Also says whether anything was changed.
    pub(crate) fn execute(&self, database: &mut Database, now: Moment) -> (Answer, bool) {
        let answer = self.answer(database, now);
        match answer {
            Ok(done) => done,
            Err(refused) => (Answer::Refused(refused), false),
        }
    }

    fn answer(&self, database: &mut Database, now: Moment) -> Result<(Answer, bool), Refused> {
        Ok(match self {
            Self::Open { worker, seen } => {
                let opens = !database.here;
                let opened = database.open_epoch(now, *worker, *seen);
                (Answer::Opened(opened), opens)
            }
            Self::Register {
                worker,
                registration,
            } => {
                let opened = database.register(now, *worker, *registration)?;
                (Answer::Opened(opened), true)
            }
            Self::Reattach {
                worker,
                epoch,
                said,
            } => {
                let answers = database.reattach(now, *worker, *epoch, said)?;
                (Answer::Reattached(answers), true)
            }
            Self::Beat {
                worker,
                epoch,
                said,
            } => {
                let answer = database.heartbeat(now, *worker, *epoch, said)?;
                (Answer::Beaten(answer), true)
            }
            Self::Claim {
                worker,
                epoch,
                call,
                limit,
            } => Self::claim(database, now, *worker, *epoch, *call, *limit)?,
            Self::End { epoch, ends } => {
                let answers = database.finish(now, *epoch, ends)?;
                let tokens = ends.iter().map(|end| end.token);
                (Answer::Ended(tokens.zip(answers).collect()), true)
            }
            Self::Sweep { epoch } => {
                let swept = database.sweep(now, *epoch)?;
                (Answer::Fine, swept.swept)
            }
            Self::Leave { worker, epoch } => {
                database.deregister(now, *worker, *epoch)?;
                (Answer::Fine, true)
            }
        })
    }

    fn claim(
        database: &mut Database,
        now: Moment,
        worker: WorkerId,
        epoch: Epoch,
        call: Call,
        limit: i32,
    ) -> Result<(Answer, bool), Refused> {
        let admitted = |database: &Database| database.workers.get(&worker).map(|it| it.admitted);
        let before = admitted(database);
        let claim = Claim {
            call,
            lanes: vec![(JOB_TYPE.into(), limit, MAX_ATTEMPTS)],
            total: None,
            rerun: Vec::new(),
        };
        let claimed = database.claim(now, worker, epoch, &claim)?;
        let changed = !claimed.is_empty() || before != admitted(database);
        let jobs = claimed
            .into_iter()
            .map(|claimed| (claimed, database.jobs[&claimed.job].asked.clone()))
            .collect();
        Ok((Answer::Claimed(jobs, now), changed))
    }
}
