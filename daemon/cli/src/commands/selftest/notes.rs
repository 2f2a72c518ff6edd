//! What is known of a self-test while it goes on, for the verdict at its end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_verdict::switches::{Enqueue, Switch};
use tenure_verdict::uptime;

/// Shared by all that runs.
#[derive(Debug, Default)]
pub(super) struct Notes(Mutex<State>);

#[derive(Debug, Default, Clone)]
pub(super) struct State {
    /// What was acknowledged.
    pub(super) enqueues: Vec<Enqueue>,
    /// Each server that became the primary, or the same one after a restart.
    pub(super) switches: Vec<Switch>,
    /// When a server was struck, until another one takes writes.
    pub(super) struck_at: Option<Duration>,
}

impl Notes {
    pub(super) fn enqueued(&self, enqueue: Enqueue) {
        self.state().enqueues.push(enqueue);
    }

    /// A server is struck now.
    pub(super) fn struck(&self) {
        self.state().struck_at = Some(uptime());
    }

    /// Work goes on: a switch after this is another matter.
    pub(super) fn calm(&self) {
        self.state().struck_at = None;
    }

    /// A server has become the primary, and this is what it has.
    pub(super) fn switched(&self, mut switch: Switch) {
        let mut state = self.state();
        switch.fault = state.struck_at.take().unwrap_or(switch.writable);
        state.switches.push(switch);
    }

    /// How many switches there were.
    pub(super) fn switches(&self) -> usize {
        self.state().switches.len()
    }

    /// How many enqueues were acknowledged.
    pub(super) fn enqueues(&self) -> usize {
        self.state().enqueues.len()
    }

    /// All of it.
    pub(super) fn all(&self) -> State {
        self.state().clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
