//! One process of a fleet, as its jobs see it: what it is given, what it is told, and how each job learns of its end.
//!
//! Invariant: each job that was given learns of its end once, by an answer or by the death of the process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_core::crew::{Fate, Leave, ProcessId};
use tenure_protocol::lines;
use tenure_protocol::output::Capped;
use tenure_protocol::verdict::Ended;
use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

/// How a job in a process came to its end.
#[derive(Debug)]
pub(super) enum Over {
    /// The process answered.
    Answered {
        /// What.
        ended: Box<Ended>,
        /// What it logged meanwhile.
        log: Option<String>,
    },
    /// The process died.
    Died {
        /// What that means for this job.
        fate: Fate,
        /// How it was.
        death: Death,
        /// What it logged meanwhile.
        log: Option<String>,
    },
}

/// How a process died.
#[derive(Debug, Clone)]
pub(super) struct Death {
    /// For people.
    pub(super) why: String,
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<i32>,
}

/// One process, as its jobs see it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: ProcessId,
    talk: Mutex<Talk>,
    /// There is something to write, or an order.
    pub(super) wake: Notify,
}

#[derive(Debug, Default)]
pub(super) struct Talk {
    /// Lines that are to be written.
    pub(super) out: Vec<u8>,
    /// How many bytes were ever put there.
    queued: u64,
    /// The jobs that it was told to stop work on and has answered for: who says that a cancelled job is over may still work on it.
    cancelled: VecDeque<Uuid>,
    /// The jobs in it.
    pub(super) open: HashMap<Uuid, Open>,
    /// Takes nothing any more.
    pub(super) closed: bool,
    /// It has to go after its last job, and why.
    pub(super) leave: Option<Leave>,
    /// It has to die, and why.
    pub(super) kill: Option<String>,
}

/// A job in a process.
#[derive(Debug)]
pub(super) struct Open {
    /// Who waits for it.
    pub(super) answer: oneshot::Sender<Over>,
    /// What the process logged meanwhile.
    pub(super) log: Capped,
    /// The run.
    pub(super) token: Uuid,
    /// Of all bytes that were put into `out`, its line is the last up to here.
    pub(super) line_end: u64,
    /// It was told to stop work on it.
    cancelled: bool,
}

impl Member {
    pub(super) fn new(id: ProcessId) -> Self {
        Self {
            id,
            talk: Mutex::default(),
            wake: Notify::new(),
        }
    }

    /// Gives it a job; `None` when it is dying. Of its log meanwhile at most `log` bytes are kept.
    pub(super) fn give(
        &self,
        job: Uuid,
        token: Uuid,
        line: &str,
        log: usize,
    ) -> Option<oneshot::Receiver<Over>> {
        let (answer, over) = oneshot::channel();
        let mut talk = self.talk();
        // What it still does for an earlier run must not meet this one.
        if talk.closed || talk.cancelled.contains(&job) {
            return None;
        }
        talk.queue(line);
        let open = Open {
            answer,
            log: Capped::new(log),
            token,
            line_end: talk.queued,
            cancelled: false,
        };
        talk.open.insert(job, open);
        drop(talk);
        self.wake.notify_one();
        Some(over)
    }

    /// Tells it to stop work on a job.
    pub(super) fn cancel(&self, job: Uuid) {
        let mut talk = self.talk();
        if let Some(open) = talk.open.get_mut(&job) {
            open.cancelled = true;
            talk.queue(&lines::cancel(job));
        }
        drop(talk);
        self.wake.notify_one();
    }

    /// It goes when its last job is over.
    pub(super) fn leave(&self, why: Leave) {
        let mut talk = self.talk();
        talk.leave = Some(why);
        talk.closed = true;
        drop(talk);
        self.wake.notify_one();
    }

    /// It has to die at once, and why: what is in it is given back.
    pub(super) fn kill(&self, why: String) {
        let mut talk = self.talk();
        talk.kill.get_or_insert(why);
        talk.closed = true;
        drop(talk);
        self.wake.notify_one();
    }

    /// Until it has to die at once.
    pub(super) async fn until_killed(&self) {
        while self.talk().kill.is_none() {
            self.wake.notified().await;
        }
    }

    /// It gets no further job.
    pub(super) fn close(&self) {
        self.talk().closed = true;
    }

    pub(super) fn talk(&self) -> MutexGuard<'_, Talk> {
        // No change of it can be left half done by a panic.
        self.talk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cancelled jobs are remembered up to so many; a process that has more is rare, and old ones are over by then.
const CANCELLED: usize = 1000;

/// What an answer is for.
pub(super) enum Answered {
    /// A job that is open.
    Open(Open),
    /// A run that is over: its work went on after a word to stop, or it was another run.
    Late,
    /// A job that the process does not have.
    Unknown,
}

impl Talk {
    /// Puts a line where it will be written.
    pub(super) fn queue(&mut self, line: &str) {
        self.out.extend_from_slice(line.as_bytes());
        self.queued += line.len() as u64;
    }

    /// The process has answered for a job, perhaps for this run of it.
    pub(super) fn answered(&mut self, job: Uuid, token: Option<Uuid>) -> Answered {
        let Some(open) = self.open.get(&job) else {
            return match self.cancelled.contains(&job) || token.is_some() {
                true => Answered::Late,
                false => Answered::Unknown,
            };
        };
        if token.is_some_and(|token| token != open.token) {
            return Answered::Late;
        }
        if open.cancelled {
            self.cancelled.push_back(job);
            if self.cancelled.len() > CANCELLED {
                self.cancelled.pop_front();
            }
        }
        self.open
            .remove(&job)
            .map_or(Answered::Unknown, Answered::Open)
    }
}
