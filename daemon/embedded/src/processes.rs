//! Signals to a process and its children, and what /proc says about them.

use std::time::Duration;
use std::{fs, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::Error;

/// What a process is doing, as far as we care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It runs, sleeps or is stopped.
    Alive,
    /// It has ended, and its parent has not asked for its exit code yet.
    Zombie,
    /// There is none with this id.
    Gone,
}

/// Looks a process up.
pub(crate) fn state(pid: i32) -> State {
    match stat(pid) {
        None => State::Gone,
        Some((b'Z' | b'X', _)) => State::Zombie,
        Some(_) => State::Alive,
    }
}

/// The processes that `parent` has started and that have not ended.
#[must_use]
pub fn children(parent: i32) -> Vec<i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&pid| matches!(stat(pid), Some((state, of)) if of == parent && state != b'Z'))
        .collect()
}

/// Sends a signal. A process that is gone is not an error.
pub(crate) fn send(pid: i32, signal: Signal) -> Result<(), Error> {
    match signal::kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
        Err(errno) => Err(Error::io(format!("send {signal} to process {pid}"))(
            errno.into(),
        )),
    }
}

/// Sends SIGSTOP and waits until it has taken effect.
pub(crate) fn freeze(pid: i32) -> Result<(), Error> {
    send(pid, Signal::SIGSTOP)?;
    wait_until(Duration::from_secs(10), || {
        matches!(stat(pid), None | Some((b'T' | b'Z' | b'X', _)))
    });
    Ok(())
}

/// Waits until `pid` is no longer [`State::Alive`]; false if it still is after ten seconds.
pub(crate) fn wait_for_end(pid: i32) -> bool {
    wait_until(Duration::from_secs(10), || state(pid) != State::Alive)
}

/// Asks `done` every few milliseconds until it says yes; false when `limit` has passed.
pub(crate) fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    const STEP: Duration = Duration::from_millis(5);
    let mut waited = Duration::ZERO;
    while !done() {
        if waited >= limit {
            return false;
        }
        thread::sleep(STEP);
        waited += STEP;
    }
    true
}

/// State letter and parent of a process.
fn stat(pid: i32) -> Option<(u8, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "17 (any (name)) S 1 …": the name may hold spaces and brackets.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some((state, fields.next()?.parse().ok()?))
}
