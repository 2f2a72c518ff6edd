//! A handler and all that it started: told and ended as a whole, by way of its supervisor.
//!
//! Invariant: the supervisor is signalled only while it has not been reaped, so that its number cannot be another's.

use nix::unistd::Pid;

use crate::guard::Guard;
use crate::supervisor::{Order, tell};

/// What is below a supervisor that has not been reaped. Dropping it has all of it killed.
pub(super) struct Tree<'a> {
    supervisor: Pid,
    guard: Option<&'a Guard>,
    over: bool,
}

impl<'a> Tree<'a> {
    /// What is below `supervisor`, which `guard` knows.
    pub(super) fn new(supervisor: Pid, guard: Option<&'a Guard>) -> Self {
        Self {
            supervisor,
            guard,
            over: false,
        }
    }

    /// The process that ends when nothing is left.
    pub(super) fn supervisor(&self) -> Pid {
        self.supervisor
    }

    /// Who ends it if this daemon cannot.
    pub(super) fn guard(&self) -> Option<&'a Guard> {
        self.guard
    }

    pub(super) fn tell(&self, order: Order) {
        tell(self.supervisor, order);
    }

    /// Has all killed that is left, and tells the guard that it is over.
    pub(super) fn end(&mut self) {
        self.tell(Order::Kill);
        if let Some(guard) = self.guard {
            guard.forget(self.supervisor.as_raw());
        }
        self.over = true;
    }
}

impl Drop for Tree<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.end();
        }
    }
}
