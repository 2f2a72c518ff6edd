//! Notices that a child has ended and leaves it a zombie.
//!
//! While it is one, its process id and group cannot be given to another process, so the group can be signalled and the guard
//! told without a race; reaping comes last.

use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

/// How often the child is looked at where the system gives no signal handler.
const LOOK: Duration = Duration::from_millis(50);

/// Waits for the end of one child.
pub(super) struct Exit {
    child: Pid,
    some_child_ended: Option<Signal>,
}

impl Exit {
    pub(super) fn of(child: Pid) -> Self {
        Self {
            child,
            some_child_ended: signal(SignalKind::child()).ok(),
        }
    }

    /// Waits until the child has ended. Can be dropped and called again at any time.
    pub(super) async fn wait(&mut self) {
        while !self.has_ended() {
            match &mut self.some_child_ended {
                Some(signal) => drop(signal.recv().await),
                None => sleep(LOOK).await,
            }
        }
    }

    fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        // Without waiting the call is not interrupted; an error means that there is no such child any more.
        !matches!(
            waitid(Id::Pid(self.child), flags),
            Ok(WaitStatus::StillAlive)
        )
    }
}
