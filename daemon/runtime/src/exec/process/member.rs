//! One process of a fleet, as its jobs see it: what it is given, what it is told, and how each job learns of its end.
//!
//! Invariant: each job that was given learns of its end once, by an answer or by the death of the process.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_core::crew::{Fate, Leave, ProcessId};
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
        line: &str,
        log: usize,
    ) -> Option<oneshot::Receiver<Over>> {
        let (answer, over) = oneshot::channel();
        let mut talk = self.talk();
        if talk.closed {
            return None;
        }
        let log = Capped::new(log);
        talk.open.insert(job, Open { answer, log });
        talk.out.extend_from_slice(line.as_bytes());
        drop(talk);
        self.wake.notify_one();
        Some(over)
    }

    /// Writes a line to it, sooner or later.
    pub(super) fn say(&self, line: &str) {
        self.talk().out.extend_from_slice(line.as_bytes());
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

    pub(super) fn talk(&self) -> MutexGuard<'_, Talk> {
        // No change of it can be left half done by a panic.
        self.talk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
