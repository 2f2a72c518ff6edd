//! The guard's own process: one thread, no runtime, the standard library and a few system calls.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, setsid};

use super::watch::{Order, Watch};
use super::{Message, PACKET, READY, now_ms};
use crate::supervisor::{self, tell};

/// The longest sleep while there is something to guard: the kernel's timer does not count a suspend, [`now_ms`] does.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How often those that were told to end are looked at, so that the guard need not wait out their grace.
const LOOK: Duration = Duration::from_millis(50);

/// Guards the handlers of the daemon at the other end of standard input, until both it and they are gone.
///
/// This is all of the hidden subcommand `tenure guard`. `lock` is held for as long: whoever succeeds the daemon waits for it,
/// and so finds no handler of its predecessor alive.
pub fn main(lock: Option<&Path>) -> ExitCode {
    // Signals for the daemon's group or terminal are not for the guard, which has to outlive it. Blocked, not ignored: the
    // guard has one thread and starts no process.
    let mut blocked = SigSet::empty();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        blocked.add(signal);
    }
    let _ = blocked.thread_block();
    // Fails only where the guard leads a group already, and then no signal of the daemon's group reaches it either.
    let _ = setsid();
    // Started as /proc/self/exe, it would be called `exe`.
    let _ = nix::sys::prctl::set_name(c"tenure-guard");
    match guard(lock) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!(
                "cannot guard: {error}; `tenure guard` is started by `tenure run` only"
            ));
            ExitCode::FAILURE
        }
    }
}

fn guard(lock: Option<&Path>) -> io::Result<()> {
    let _held = lock.map(super::hold).transpose()?;
    let daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    daemon.set_read_timeout(None)?;
    io::stdout().write_all(READY)?;
    io::stdout().flush()?;
    Guarding::default().run(daemon)
}

/// What the guard knows, and the system calls that follow from it.
#[derive(Default)]
struct Guarding {
    watch: Watch,
    /// When each supervisor started, in ticks since the machine did.
    started: BTreeMap<i32, u64>,
}

impl Guarding {
    fn run(mut self, mut daemon: UnixStream) -> io::Result<()> {
        let mut packet = [0; PACKET];
        loop {
            daemon.set_read_timeout(self.sleep())?;
            match daemon.read(&mut packet) {
                Ok(0) => break,
                Ok(length) => self.hear(&String::from_utf8_lossy(&packet[..length])),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.look(),
                    io::ErrorKind::Interrupted => {}
                    _ => break,
                },
            }
            self.act();
        }
        self.watch.abandon();
        loop {
            self.act();
            self.look();
            if self.watch.is_over() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    fn hear(&mut self, packet: &str) {
        for message in packet.lines().filter_map(Message::parse) {
            match message {
                Message::Add(pid) => {
                    // A child that is gone already has no start, and is then forgotten at the next look.
                    self.started
                        .extend(stat(pid).map(|stat| (pid, stat.started)));
                }
                Message::Remove(pid) => drop(self.started.remove(&pid)),
                Message::Trust(_) | Message::Grace(_) => {}
            }
            self.watch.hear(message);
        }
    }

    /// How long to wait for a word of the daemon; `None` is for ever.
    fn sleep(&self) -> Option<Duration> {
        let wait = self.watch.wake_at()?.saturating_sub(now_ms());
        let longest = if self.watch.is_ending() {
            LOOK
        } else {
            LONGEST_SLEEP
        };
        Some(Duration::from_millis(wait).clamp(Duration::from_millis(1), longest))
    }

    fn act(&mut self) {
        let orders = self.watch.due(now_ms());
        if orders.iter().any(|order| matches!(order, Order::Term(_))) {
            say("the daemon is gone or has lost its leases; its handlers are ended");
        }
        for order in orders {
            match order {
                Order::Term(pid) => self.tell(pid, supervisor::Order::Term),
                Order::Kill(pid) => self.tell(pid, supervisor::Order::Kill),
            }
        }
    }

    /// Forgets those that are gone: those that have obeyed, and children that registered and then found no program to become.
    fn look(&mut self) {
        for pid in self.watch.supervisors() {
            if !self.lives(pid) {
                self.watch.hear(Message::Remove(pid));
                self.started.remove(&pid);
            }
        }
    }

    /// Tells a supervisor, unless its number has gone to a process that is none of ours.
    fn tell(&self, pid: i32, order: supervisor::Order) {
        if self.lives(pid) {
            tell(Pid::from_raw(pid), order);
        }
    }

    /// Whether this supervisor is there: no other process has its number, and it is no zombie, which has nothing below it.
    fn lives(&self, pid: i32) -> bool {
        match (stat(pid), self.started.get(&pid)) {
            (Some(Stat { zombie: true, .. }) | None, _) => false,
            (Some(now), Some(then)) => *then == now.started,
            // It registered and was gone before this guard could look.
            (Some(_), None) => false,
        }
    }
}

struct Stat {
    zombie: bool,
    started: u64,
}

/// Of process `pid`: the fields after its name, which may hold anything; the start is the 22nd of all.
fn stat(pid: i32) -> Option<Stat> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let zombie = matches!(fields.next()?, "Z" | "X");
    let started = fields.nth(18)?.parse().ok()?;
    Some(Stat { zombie, started })
}

/// Writes to the log of whoever started the daemon; there may be none any more.
fn say(words: &str) {
    let _ = writeln!(io::stderr(), "tenure guard: {words}");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn starts_are_told_apart() {
        let own = i32::try_from(std::process::id()).unwrap();
        let start = |pid| stat(pid).map(|stat| stat.started);
        assert!(start(own).unwrap() > 0);
        assert_eq!(start(own), start(own));
        assert_eq!(start(-1), None);
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let mut guarding = Guarding::default();
        guarding.hear("trust 1\n+2147483647\n");
        assert!(guarding.sleep().is_some());
        guarding.look();
        assert_eq!(guarding.sleep(), None);
    }
}
