//! The rules that the SQL functions keep, as a database of plain values.
//!
//! Every method is one statement in a transaction of its own: it changes all that it says, or refuses and changes nothing.
//! The server's time is an argument, in milliseconds, and may jump. A job is in one [`Place`], so "exactly one state" holds
//! by its type; the same random statements go to this model and to PostgreSQL, and both must say and show the same.
//!
//! The model draws names (ids, tokens, epochs) from a counter that no loss of commits sets back. Random names of the real
//! database are compared with them up to renaming.

mod claim;
mod effect;
mod end;
mod enqueue;
mod epoch;
mod person;
mod reattach;
mod sweep;
mod switch;

pub use claim::{Claim, Claimed};
pub use end::{End, EndAnswer, Hold, RunEnd};
pub use enqueue::NewJob;
pub use epoch::{BeatAnswer, Heartbeat, Opened, Registration};
pub use person::Review;
pub use reattach::{Covers, Kept, Memory, Reattach, ReattachAnswer, Statement};
pub use sweep::Swept;
pub use switch::{Expected, Probe, Retried, Switch, What};

use crate::ids::{Call, Epoch, JobId, Run, Token, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// A time of the server's clock, in milliseconds.
pub type Moment = i64;

/// Why a statement was refused. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The caller's epoch is not the present one.
    OtherEpoch,
    /// Workers re-attach: what a person sees may not be what is.
    Reattaching,
    /// A person must decide about the gate first.
    OnHold,
    /// The worker is unknown or was declared dead.
    WorkerGone,
    /// No such job, dead letter or job type.
    NotFound,
    /// The present state does not allow it.
    State,
    /// What was given makes no sense.
    Input,
}

impl Refused {
    /// The SQLSTATE of the same refusal.
    #[must_use]
    pub fn sqlstate(self) -> &'static str {
        match self {
            Self::OtherEpoch => "TN001",
            Self::Reattaching => "TN002",
            Self::OnHold => "TN003",
            Self::WorkerGone => "TN004",
            Self::NotFound => "TN005",
            Self::State => "TN006",
            Self::Input => "TN007",
        }
    }
}

/// Whose unique key: job type, tenant, key.
pub type Key = (String, String, String);

/// What was asked for. Never changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Selects lane and handler.
    pub job_type: String,
    /// Whose job it is.
    pub tenant: String,
    /// Lower numbers run first.
    pub priority: i32,
    /// Admits one live job.
    pub unique_key: Option<String>,
    /// `None`: as the claimer says.
    pub max_attempts: Option<i32>,
    /// The series of jobs that it belongs to.
    pub watermark: Option<String>,
    /// When it was enqueued.
    pub created_at: Moment,
}

impl Asked {
    fn key(&self) -> Option<Key> {
        let key = self.unique_key.clone()?;
        Some((self.job_type.clone(), self.tenant.clone(), key))
    }
}

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// What was asked for.
    pub asked: Asked,
    /// How many claims and acts of persons it has seen.
    pub run: Run,
    /// Attempts used, with the running one.
    pub attempts: i32,
    /// Where it stands.
    pub place: Place,
    /// Data that a person put in place of its own, as JSON.
    pub edit: Option<String>,
    /// It is to keep its unique key, and has it while it lives.
    pub keyed: bool,
    /// It came with an id of its own, or was retried, while workers re-attached: it may repeat an enqueue that was lost, of a job
    /// that one of them still holds.
    pub repeated: bool,
    /// A process died while it had this job and others: it runs in one that has no other.
    pub alone: bool,
    /// Its position at the enqueue, if it was ready then.
    pub first_pos: Option<u64>,
}

/// Where a job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// It can run now. Lower positions first; jobs that came together by one statement may share one.
    Ready {
        /// Its position: the moment of becoming ready, and the order within it.
        pos: (u64, u64),
    },
    /// Its time has not come.
    Later {
        /// When it comes.
        due: Moment,
        /// For what it waits.
        waits: Waits,
    },
    /// It runs.
    Leased(Lease),
    /// It has ended.
    Ended(Outcome),
}

/// For what a job in [`Place::Later`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// The time that its producer gave.
    Time,
    /// The delay after a failure.
    Retry,
    /// The delay that its handler asked for.
    Snooze,
    /// The end of the re-attach window.
    Window,
}

/// A worker's right to run a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Names this lease; compared for equality only.
    pub token: Token,
    /// Who has it.
    pub worker: WorkerId,
    /// The claim call that took it.
    pub call: Call,
    /// The epoch of the claim.
    pub epoch_no: i64,
    /// The attempt with this number is the last.
    pub max_attempts: i32,
    /// It ends then; `None`: with its worker's beats.
    pub until: Option<Moment>,
    /// When it was claimed.
    pub started_at: Moment,
    /// Its handler works in this database: whoever asserts the lease leaves an effect.
    pub leaves_effects: bool,
    /// A re-attach found that its effects were lost: it may not be asserted any more.
    pub given_up: bool,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// In what way.
    pub status: Status,
    /// Of the run that ended it; `None`: a person did.
    pub token: Option<Token>,
    /// Who ran it last, if its end came from a run.
    pub worker: Option<WorkerId>,
    /// The epoch of the end.
    pub epoch_no: i64,
    /// JSON.
    pub result: Option<String>,
}

/// The status of a job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Completed,
    /// A dead letter that waits for review.
    Failed,
    /// A person decided that it will never run.
    Discarded,
    /// A person did not want it any more.
    Cancelled,
}

impl Status {
    /// Its name in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Discarded => "discarded",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What a person asked of a running job. Whoever ends the run carries it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It is not wanted any more.
    Cancel,
    /// A person has done it.
    Complete,
    /// Off to the dead letters.
    Dead,
}

impl Stop {
    /// How the job ends by it.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            Self::Cancel => Status::Cancelled,
            Self::Complete => Status::Completed,
            Self::Dead => Status::Failed,
        }
    }
}

/// A run, by its lease's name; `true`: it ended without ending its job, `false`: this was said too late to count.
pub type Attempt = (JobId, Run, Token, bool);

/// The review of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Attempts used when it died.
    pub attempts: i32,
    /// What a person, or a later run, decided.
    pub review: Option<Review>,
}

/// A worker as the database knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Whether it is there.
    pub status: WorkerStatus,
    /// How long its leases last after a beat, in milliseconds.
    pub lease_ttl: i64,
    /// From beat to beat, in milliseconds.
    pub heartbeat: i64,
    /// It may claim: the others know of it.
    pub admitted: bool,
    /// Nobody registered since a beat told it who the others are.
    pub told: bool,
    /// When it registered.
    pub started_at: Moment,
    /// The number of its last beat.
    pub beat: i64,
    /// When that came.
    pub beat_at: Moment,
    /// Its claim calls up to this one have been answered or given up.
    pub settled: Call,
    /// When it left or was declared lost.
    pub ended_at: Option<Moment>,
}

/// Whether a worker is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerStatus {
    /// It beats.
    Live,
    /// It beats and claims nothing more.
    Draining,
    /// It left.
    Stopped,
    /// Its beats failed to come for its lease_ttl.
    Lost,
}

impl Worker {
    fn is_there(&self) -> bool {
        matches!(self.status, WorkerStatus::Live | WorkerStatus::Draining)
    }
}

/// What claims may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// All.
    Open,
    /// Workers re-attach: only what was enqueued since.
    Window,
    /// Nothing until a person decides.
    Hold,
}

/// How far a series of jobs has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watermark {
    /// JSON.
    pub value: String,
    /// The job that moved it there.
    pub job: JobId,
    /// The epoch of that job's end.
    pub epoch_no: i64,
}

/// The whole state.
#[derive(Clone, Debug)]
pub struct Database {
    /// All jobs.
    pub jobs: BTreeMap<JobId, Job>,
    /// The live job that owns each unique key.
    pub keys: BTreeMap<Key, JobId>,
    /// How runs ended: the kind of the end, or the status of an outcome that was opened again.
    pub attempts: BTreeMap<Attempt, &'static str>,
    /// How far each series of jobs has come, by tenant and name.
    pub watermarks: BTreeMap<(String, String), Watermark>,
    /// Deaths of jobs, by the run of the outcome.
    pub letters: BTreeMap<(JobId, Run), DeadLetter>,
    /// What persons asked of running jobs.
    pub stops: BTreeMap<JobId, Stop>,
    /// Leases that a better claim took away, and when.
    pub revocations: BTreeMap<(WorkerId, JobId, Token), Moment>,
    /// All workers.
    pub workers: BTreeMap<WorkerId, Worker>,
    /// All job types that ever had a job or were paused.
    pub job_types: BTreeSet<String>,
    /// The job types of which nothing is claimed.
    pub paused: BTreeSet<String>,
    /// The present epoch, or the last one.
    pub epoch: Epoch,
    /// Its number.
    pub epoch_no: i64,
    /// No crash, switch or restore since the epoch was opened.
    pub here: bool,
    /// What claims may take.
    pub gate: Gate,
    /// When the epoch was opened.
    pub opened_at: Moment,
    /// Those that the window waits for, and all that have spoken.
    pub expected: BTreeMap<WorkerId, Expected>,
    /// It is a copy on another system, and no person has said that it is the one to use.
    pub unaccepted: bool,
    /// More was lost than a worker remembers, and no person has decided.
    pub uncovered: bool,
    /// It was copied to another system since an epoch was opened.
    pub elsewhere: bool,
    /// One for each epoch that was opened after a loss.
    pub switches: BTreeMap<i64, Switch>,
    /// What became of single runs in each switch, and who said so.
    pub switch_jobs: BTreeMap<(i64, JobId, Run, What), Option<WorkerId>>,
    /// The runs whose effects are here.
    pub effects: BTreeSet<(Token, JobId)>,
    /// When the last sweep was.
    pub swept_at: Moment,
    mark: u64,
    last_pos: u64,
    last_name: u128,
}

impl Database {
    /// An empty database.
    #[must_use]
    pub fn new(now: Moment) -> Self {
        Self {
            jobs: BTreeMap::new(),
            keys: BTreeMap::new(),
            attempts: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            letters: BTreeMap::new(),
            stops: BTreeMap::new(),
            revocations: BTreeMap::new(),
            workers: BTreeMap::new(),
            job_types: BTreeSet::new(),
            paused: BTreeSet::new(),
            epoch: Epoch(Uuid::from_u128(1)),
            epoch_no: 1,
            here: true,
            gate: Gate::Open,
            opened_at: now,
            expected: BTreeMap::new(),
            unaccepted: false,
            uncovered: false,
            elsewhere: false,
            switches: BTreeMap::new(),
            switch_jobs: BTreeMap::new(),
            effects: BTreeSet::new(),
            swept_at: now,
            mark: 0,
            last_pos: 0,
            last_name: 1,
        }
    }

    /// Loses all that was committed since `earlier`, as after a switch to a server that did not have it.
    pub fn fall_back_to(&mut self, earlier: &Self) {
        *self = Self {
            here: false,
            last_name: self.last_name,
            ..earlier.clone()
        };
    }

    /// Jobs that became ready together stand in this order. The rules leave it open, so whoever compares tells it.
    pub fn settle_order(&mut self, order: &[JobId]) {
        for (nth, id) in (1..).zip(order) {
            if let Some(Place::Ready { pos }) = self.jobs.get_mut(id).map(|job| &mut job.place) {
                pos.1 = nth;
            }
        }
    }

    /// The jobs that became ready together with others, and are in no order yet.
    #[must_use]
    pub fn unordered(&self) -> Vec<JobId> {
        let place = |id| match self.jobs.get(id)? {
            Job {
                place: Place::Ready { pos },
                ..
            } => Some(*pos),
            _ => None,
        };
        let ready = self.jobs.keys().filter_map(|id| Some((place(id)?, *id)));
        let mut at: BTreeMap<(u64, u64), Vec<JobId>> = BTreeMap::new();
        for (pos, id) in ready {
            at.entry(pos).or_default().push(id);
        }
        at.into_values()
            .filter(|group| group.len() > 1)
            .flatten()
            .collect()
    }

    fn name(&mut self) -> Uuid {
        self.last_name += 1;
        Uuid::from_u128(self.last_name)
    }

    fn next_pos(&mut self) -> (u64, u64) {
        self.last_pos += 1;
        (self.last_pos, 0)
    }

    /// Every call of a worker names its epoch.
    fn assert_epoch(&self, epoch: Epoch) -> Result<(), Refused> {
        if self.here && self.epoch == epoch {
            Ok(())
        } else {
            Err(Refused::OtherEpoch)
        }
    }

    /// A job that has ended, or gives its key up, owns it no longer.
    fn free_key(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get(&id)
            && let Some(key) = job.asked.key()
            && self.keys.get(&key) == Some(&id)
        {
            self.keys.remove(&key);
        }
    }
}
