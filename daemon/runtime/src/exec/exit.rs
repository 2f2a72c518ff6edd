//! Notices that a child has ended and leaves it a zombie; and says how it ended.
//!
//! While it is one, its process id cannot be given to another process, so it can be signalled and the guard
//! told without a race; reaping comes last.

use std::fmt;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::Signal as Number;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use crate::settings::{Exceeded, ProcessLimits};

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

/// How a process ended.
pub(super) enum How {
    Exit(i32),
    Signal(i32),
    Unknown(String),
}

impl How {
    /// Of a child that has ended; reaps it.
    pub(super) async fn of(child: &mut Child) -> Self {
        use std::os::unix::process::ExitStatusExt as _;
        match child.wait().await {
            Ok(status) => match (status.code(), status.signal()) {
                (Some(code), _) => Self::Exit(code),
                (None, Some(signal)) => Self::Signal(signal),
                (None, None) => Self::Unknown(status.to_string()),
            },
            Err(error) => Self::Unknown(error.to_string()),
        }
    }

    /// Which limit of the kernel's ended it.
    pub(super) fn exceeded(&self, limits: &ProcessLimits) -> Option<Exceeded> {
        match self {
            Self::Signal(libc::SIGXCPU) => limits.cpu.map(|_| Exceeded::Cpu),
            Self::Signal(libc::SIGXFSZ) => limits.file_size.map(|_| Exceeded::FileSize),
            _ => None,
        }
    }

    /// Its exit code and the signal that ended it.
    pub(super) fn numbers(&self) -> (Option<i32>, Option<i32>) {
        match self {
            Self::Exit(code) => (Some(*code), None),
            Self::Signal(signal) => (None, Some(*signal)),
            Self::Unknown(_) => (None, None),
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => {
                match Number::try_from(*signal) {
                    Ok(signal) => write!(f, "killed by {signal}")?,
                    Err(_) => write!(f, "killed by signal {signal}")?,
                }
                if *signal == Number::SIGKILL as i32 {
                    f.write_str(" from outside, perhaps for want of memory")?;
                }
                Ok(())
            }
            Self::Unknown(what) => f.write_str(what),
        }
    }
}
