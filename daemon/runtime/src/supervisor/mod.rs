//! The supervisor: a process between the daemon and each handler, from which nothing that the handler starts can escape.
//!
//! The kernel gives it, and not init, whatever loses its parent below it (a *subreaper*): background processes, double forks,
//! sessions of their own. So everything that a handler ever started is a descendant of its supervisor, and of no other.
//!
//! States: handler runs → told (TERM went to the handler's group) → handler has ended → the rest may finish, for [`LINGER`] →
//! the rest is killed → gone, with the handler's own exit code or signal. Invariant: it ends when nothing is left below it, so
//! whoever waits for the supervisor has waited for all of it.
//!
//! It is the same binary, started by the child that the daemon forks (see [`Supervisor::split`]) when the handler is not over within
//! a moment; it has no memory, variable or descriptor of the daemon's. Who has the handler's rights can kill it; then the handler dies too, but not what left the handler.

mod descendants;
mod process;
mod split;
mod usage;

use std::ffi::{CString, NulError};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::settings::{Exceeded, ProcessLimits};
pub use process::main;
pub(crate) use split::Deaf;

/// The descriptor on which it reports, in one byte, which limit was exceeded.
const REPORT: i32 = 3;

/// How long the rest may go on after the handler has ended (a pipeline's last part may still flush).
const LINGER: Duration = Duration::from_millis(500);

/// The signal that means [`Order::Term`]. Not TERM: who sends that to everything that is called tenure means the daemon, which
/// then lets its handlers finish.
const TERM: Signal = Signal::SIGUSR1;

/// The signal that means [`Order::Kill`].
const KILL: Signal = Signal::SIGUSR2;

/// How supervisors are started.
#[derive(Debug, Clone)]
pub struct Supervisor {
    program: Arc<CString>,
    verb: Arc<CString>,
}

impl Supervisor {
    /// They are `program verb …`, which has to call [`main`] with what follows the verb. `/proc/self/exe` is this binary, also
    /// after it was replaced on disk.
    ///
    /// # Errors
    /// When one of them holds a NUL.
    pub fn new(program: &Path, verb: &str) -> Result<Self, NulError> {
        Ok(Self {
            program: Arc::new(CString::new(program.as_os_str().as_bytes())?),
            verb: Arc::new(CString::new(verb)?),
        })
    }
}

/// What a supervisor is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// TERM to the handler's process group.
    Term,
    /// KILL to everything.
    Kill,
}

/// Tells the supervisor `pid`, which nobody must have reaped. To one that is gone nothing is said, which is as good.
pub(crate) fn tell(pid: Pid, order: Order) {
    let _ = match order {
        Order::Term => kill(pid, TERM),
        Order::Kill => kill(pid, KILL),
    };
    // A handler that stops everything it can reach has stopped this one too.
    let _ = kill(pid, Signal::SIGCONT);
}

/// The handler of the supervisor `pid`; `None` for a moment after its start.
pub(crate) fn handler_of(pid: i32) -> Option<i32> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    line.split('\0').nth(2)?.parse().ok()
}

/// The limits of one handler, as its supervisor is told them.
#[derive(Debug, Clone)]
pub(crate) struct Told([CString; 3]);

impl Told {
    pub(crate) fn new(limits: &ProcessLimits) -> Self {
        let text =
            |limit: Option<u64>| CString::new(limit.unwrap_or(0).to_string()).unwrap_or_default();
        let cpu = limits.cpu.map(|cpu| cpu.as_secs().max(1));
        Self([text(cpu), text(limits.memory), text(limits.processes)])
    }
}

/// What the byte means that a supervisor reports.
pub(crate) fn reported(byte: u8) -> Option<Exceeded> {
    KINDS.into_iter().find(|kind| code(*kind) == byte)
}

/// What supervisors look after.
const KINDS: [Exceeded; 3] = [Exceeded::Cpu, Exceeded::Memory, Exceeded::Processes];

fn code(exceeded: Exceeded) -> u8 {
    match exceeded {
        Exceeded::Cpu => b'c',
        Exceeded::Memory => b'm',
        Exceeded::Processes => b'p',
        Exceeded::FileSize => b'f',
        Exceeded::Output => b'o',
    }
}
