//! The process group of a handler: signalled and ended as a whole.
//!
//! Invariant: it is signalled only while its leader has not been reaped, so that its number cannot be another's.

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::guard::Guard;

/// The process group of a handler whose leader has not been reaped. Dropping it kills it.
pub(super) struct Group<'a> {
    leader: Pid,
    guard: Option<&'a Guard>,
    over: bool,
}

impl<'a> Group<'a> {
    /// The group that `leader` leads, which `guard` knows.
    pub(super) fn new(leader: Pid, guard: Option<&'a Guard>) -> Self {
        Self {
            leader,
            guard,
            over: false,
        }
    }

    /// Its leader.
    pub(super) fn leader(&self) -> Pid {
        self.leader
    }

    /// Who ends it if this daemon cannot.
    pub(super) fn guard(&self) -> Option<&'a Guard> {
        self.guard
    }

    pub(super) fn signal(&self, signal: Signal) {
        // Fails when nobody is left to signal, which is as good.
        let _ = killpg(self.leader, signal);
    }

    /// Kills what is left of the group and tells the guard that it is over.
    pub(super) fn end(&mut self) {
        self.signal(Signal::SIGKILL);
        if let Some(guard) = self.guard {
            guard.forget(self.leader.as_raw());
        }
        self.over = true;
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.end();
        }
    }
}
