//! A model of what the SQL functions do with leases, beats, claims and recovery.
//!
//! Every statement is one transaction. Times are the server's, in milliseconds; they may jump.

use std::collections::BTreeMap;
use tenure_core::ids::{Call, JobId, Run, Token, WorkerId};
use tenure_core::lease::limits::SWEEP_GAP;
use uuid::Uuid;

/// A worker's statement, as it travels.
#[derive(Clone, Debug)]
pub(crate) enum Statement {
    Register {
        worker: WorkerId,
        predecessor: Option<WorkerId>,
    },
    Beat {
        worker: WorkerId,
        settled: Call,
        open: Vec<Call>,
    },
    Claim {
        worker: WorkerId,
        call: Call,
        limit: usize,
    },
    End {
        items: Vec<Item>,
    },
    Sweep,
}

/// What a worker says about the end of one lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    pub(crate) job: JobId,
    pub(crate) run: Run,
    pub(crate) token: Token,
    pub(crate) end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Completed,
    Failed,
    Released,
}

/// What comes back.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Registered,
    Beaten {
        revoked: Vec<Token>,
    },
    Claimed(Vec<(JobId, Run, Token)>),
    /// Those that were answered with done or history; the rest is busy.
    Ended {
        confirmed: Vec<Token>,
        busy: Vec<Token>,
    },
    Swept,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ready,
    Later(i64),
    Leased {
        worker: WorkerId,
        call: Call,
        token: Token,
    },
    Ended,
}

#[derive(Debug)]
struct Job {
    place: Place,
    run: Run,
    attempts: u32,
    stop: bool,
    completed: bool,
}

#[derive(Debug)]
struct Worker {
    beat_at: i64,
    settled: Call,
    dead: bool,
}

/// How often each rule was needed, to show that a simulation meets what it is about.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Jobs taken back because their worker did not know of them.
    pub ghosts: u64,
    /// Workers declared dead.
    pub deaths: u64,
    /// Jobs taken from dead workers.
    pub recovered: u64,
    /// Sweeps that recovered nothing because time had jumped.
    pub gaps: u64,
    /// Completions that came too late and were history only.
    pub refused: u64,
}

#[derive(Debug)]
pub(crate) struct Database {
    ttl: i64,
    jobs: Vec<Job>,
    workers: BTreeMap<WorkerId, Worker>,
    swept_at: i64,
    last_token: u128,
    /// Whether a second completion of a job was accepted since this was last looked at.
    pub(crate) completed_twice: bool,
    pub(crate) counts: Counts,
}

const MAX_ATTEMPTS: u32 = 20;
const RETRY_AFTER: i64 = 2_000;

impl Database {
    pub(crate) fn new(ttl: i64) -> Self {
        Self {
            ttl,
            jobs: Vec::new(),
            workers: BTreeMap::new(),
            swept_at: 0,
            last_token: 0,
            completed_twice: false,
            counts: Counts::default(),
        }
    }

    pub(crate) fn enqueue(&mut self) {
        let (place, run) = (Place::Ready, Run(0));
        self.jobs.push(Job {
            place,
            run,
            attempts: 0,
            stop: false,
            completed: false,
        });
    }

    /// A person asks for the job to be stopped. One that is not running ends at once.
    pub(crate) fn cancel(&mut self, index: usize) {
        let Some(job) = self.jobs.get_mut(index) else {
            return;
        };
        match job.place {
            Place::Leased { .. } => job.stop = true,
            Place::Ready | Place::Later(_) => job.place = Place::Ended,
            Place::Ended => {}
        }
    }

    pub(crate) fn all_ended(&self) -> bool {
        self.jobs.iter().all(|job| job.place == Place::Ended)
    }

    /// Whether this lease is the job's present one.
    pub(crate) fn holds(&self, job: JobId, token: Token) -> bool {
        matches!(self.jobs[index(job)].place, Place::Leased { token: present, .. } if present == token)
    }

    /// Carries out one statement. `busy` says whether a user's transaction holds the lease rows just now.
    pub(crate) fn execute(&mut self, now: i64, statement: &Statement, busy: bool) -> Answer {
        match statement {
            Statement::Register {
                worker,
                predecessor,
            } => {
                let registered = Worker {
                    beat_at: now,
                    settled: Call(0),
                    dead: false,
                };
                self.workers.insert(*worker, registered);
                if let Some(before) = predecessor {
                    self.declare_dead(|worker, _| worker == before);
                    self.recover();
                }
                Answer::Registered
            }
            Statement::Beat {
                worker,
                settled,
                open,
            } => self.beat(now, *worker, *settled, open),
            Statement::Claim {
                worker,
                call,
                limit,
            } => self.claim(*worker, *call, *limit),
            Statement::End { items } => self.end(now, items, busy),
            Statement::Sweep => {
                self.sweep(now);
                Answer::Swept
            }
        }
    }

    fn live(&mut self, worker: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&worker).filter(|row| !row.dead)
    }

    fn beat(&mut self, now: i64, worker: WorkerId, settled: Call, open: &[Call]) -> Answer {
        let Some(row) = self.live(worker) else {
            return Answer::Dead;
        };
        row.beat_at = now;
        row.settled = row.settled.max(settled);
        let mut revoked = Vec::new();
        for job in &mut self.jobs {
            match job.place {
                Place::Leased {
                    worker: holder,
                    call,
                    ..
                } if holder == worker && call <= settled && !open.contains(&call) => {
                    self.counts.ghosts += 1;
                    job.attempts -= 1;
                    job.give_back();
                }
                Place::Leased {
                    worker: holder,
                    token,
                    ..
                } if holder == worker && job.stop => revoked.push(token),
                _ => {}
            }
        }
        Answer::Beaten { revoked }
    }

    fn claim(&mut self, worker: WorkerId, call: Call, limit: usize) -> Answer {
        let Some(row) = self.live(worker) else {
            return Answer::Dead;
        };
        if call <= row.settled {
            return Answer::Claimed(vec![]);
        }
        let mut claimed = Vec::new();
        let ready = self
            .jobs
            .iter_mut()
            .enumerate()
            .filter(|(_, job)| job.place == Place::Ready);
        for (index, job) in ready.take(limit) {
            self.last_token += 1;
            let token = Token(Uuid::from_u128(self.last_token));
            job.place = Place::Leased {
                worker,
                call,
                token,
            };
            job.run.0 += 1;
            job.attempts += 1;
            claimed.push((id(index), job.run, token));
        }
        Answer::Claimed(claimed)
    }

    fn end(&mut self, now: i64, items: &[Item], busy: bool) -> Answer {
        let (mut confirmed, mut left) = (Vec::new(), Vec::new());
        for item in items {
            let holds = self.holds(item.job, item.token);
            let job = &mut self.jobs[index(item.job)];
            if holds && busy {
                left.push(item.token);
                continue;
            }
            confirmed.push(item.token);
            if !holds || job.run != item.run {
                self.counts.refused += u64::from(item.end == End::Completed);
                continue;
            }
            self.completed_twice |=
                item.end == End::Completed && std::mem::replace(&mut job.completed, true);
            job.place = match item.end {
                _ if job.stop => Place::Ended,
                End::Completed => Place::Ended,
                End::Failed if job.attempts >= MAX_ATTEMPTS => Place::Ended,
                End::Failed => Place::Later(now + RETRY_AFTER),
                End::Released => {
                    job.attempts -= 1;
                    Place::Ready
                }
            };
        }
        Answer::Ended {
            confirmed,
            busy: left,
        }
    }

    /// The clock of recovery: when time has jumped nobody could renew, so it counts against nobody.
    fn sweep(&mut self, now: i64) {
        let gap = now - self.swept_at;
        let swept_at = std::mem::replace(&mut self.swept_at, now);
        let ttl = self.ttl;
        if gap < 0 || u128::try_from(gap).is_ok_and(|gap| gap > SWEEP_GAP.as_millis()) {
            self.counts.gaps += 1;
            for row in self
                .workers
                .values_mut()
                .filter(|row| row.beat_at + ttl >= swept_at)
            {
                row.beat_at = now;
            }
        } else {
            self.declare_dead(|_, row| row.beat_at + ttl < now);
            self.recover();
        }
        for job in &mut self.jobs {
            if matches!(job.place, Place::Later(due) if due <= now) {
                job.place = Place::Ready;
            }
        }
    }

    fn declare_dead(&mut self, chosen: impl Fn(&WorkerId, &Worker) -> bool) {
        for (_, row) in self
            .workers
            .iter_mut()
            .filter(|(id, row)| !row.dead && chosen(id, row))
        {
            row.dead = true;
            self.counts.deaths += 1;
        }
    }

    /// Takes back every lease without a living worker, whenever it was declared dead.
    fn recover(&mut self) {
        for job in &mut self.jobs {
            if let Place::Leased { worker, .. } = job.place
                && self.workers.get(&worker).is_none_or(|row| row.dead)
            {
                self.counts.recovered += 1;
                job.give_back();
            }
        }
    }
}

impl Job {
    fn give_back(&mut self) {
        let over = self.stop || self.attempts >= MAX_ATTEMPTS;
        self.place = if over { Place::Ended } else { Place::Ready };
    }
}

fn id(index: usize) -> JobId {
    JobId(Uuid::from_u128(index as u128))
}

fn index(job: JobId) -> usize {
    usize::try_from(job.0.as_u128()).unwrap_or(usize::MAX)
}
