//! The guard: a small process that ends all handlers when their daemon dies, stops or hangs.
//!
//! Without it, `kill -9` or SIGSTOP of a daemon leaves its handlers running while the database gives their jobs to other
//! workers. The guard is the same binary, started first, in a session of its own, and knows two things: which processes
//! are supervisors of handlers, and until when the daemon trusts its leases. It has the handlers ended (TERM, grace, KILL)
//! when the socket to the daemon closes, or when that time passes unrenewed.
//!
//! Invariant: no handler runs that a living guard does not know. The forked child itself registers before it becomes a
//! supervisor, and cannot become one if that fails; a guard that died is replaced and told all of them. The daemon says that one
//! is over while it is still a zombie, so a number in the guard's list cannot have been given away.
//!
//! Messages are lines, one or more in a packet: `+PID`, `-PID`, `trust MS` (a time of [`now_ms`]), `grace MS`.

mod client;
mod process;
mod watch;

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

pub use client::{Guard, GuardError};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{MsgFlags, send};
use nix::time::{ClockId, clock_gettime};
pub use process::main;

/// The longest packet.
const PACKET: usize = 4096;

/// What the guard prints when it guards.
const READY: &[u8] = b"ready\n";

/// Milliseconds since the machine started, the time it slept included: after a suspend a lease is as old as the database
/// thinks it is. The same in all processes.
pub fn now_ms() -> u64 {
    let Ok(now) = clock_gettime(ClockId::CLOCK_BOOTTIME) else {
        // Only a kernel older than this clock (2.6.39) gets here. Time that stands still would keep handlers alive for ever.
        return u64::MAX;
    };
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    part(now.tv_sec()) * 1000 + part(now.tv_nsec()) / 1_000_000
}

/// Holds the lock of the guards of one `state_dir`; waits until the one before is gone, which ends its handlers first.
///
/// # Errors
/// When the file cannot be made or locked.
pub fn hold(lock: &Path) -> io::Result<Flock<File>> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(lock)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}

/// One line to the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// The process supervises a handler.
    Add(i32),
    /// It is over.
    Remove(i32),
    /// Handlers may live until this time.
    Trust(u64),
    /// From TERM to KILL, in milliseconds.
    Grace(u64),
}

impl Message {
    fn line(self) -> String {
        let mut line = String::new();
        // Writing to a string cannot fail.
        let _ = match self {
            Self::Add(pid) => writeln!(line, "+{pid}"),
            Self::Remove(pid) => writeln!(line, "-{pid}"),
            Self::Trust(until) => writeln!(line, "trust {until}"),
            Self::Grace(grace) => writeln!(line, "grace {grace}"),
        };
        line
    }

    fn parse(line: &str) -> Option<Self> {
        if let Some(pid) = line.strip_prefix('+') {
            return Some(Self::Add(pid.parse().ok()?));
        }
        if let Some(pid) = line.strip_prefix('-') {
            return Some(Self::Remove(pid.parse().ok()?));
        }
        match line.split_once(' ')? {
            ("trust", until) => Some(Self::Trust(until.parse().ok()?)),
            ("grace", grace) => Some(Self::Grace(grace.parse().ok()?)),
            _ => None,
        }
    }
}

/// Registers the calling process, which becomes a supervisor, with the guard behind `socket`.
///
/// Runs between fork and exec: it allocates nothing, takes no lock and never blocks.
///
/// # Errors
/// `EPIPE` when the guard is gone, `EAGAIN` when it does not read.
pub(crate) fn register_self(socket: RawFd) -> io::Result<()> {
    let mut packet = [0u8; 16];
    let mut rest = &mut packet[..];
    writeln!(rest, "+{}", std::process::id())?;
    let unused = rest.len();
    let line = &packet[..packet.len() - unused];
    send(
        socket,
        line,
        MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_written() {
        for message in [
            Message::Add(7),
            Message::Remove(7),
            Message::Trust(u64::MAX),
            Message::Grace(0),
        ] {
            assert_eq!(Message::parse(message.line().trim_end()), Some(message));
        }
        for other in ["", "+", "+x", "trust", "trust -1", "bye 1"] {
            assert_eq!(Message::parse(other), None, "{other}");
        }
    }
}
