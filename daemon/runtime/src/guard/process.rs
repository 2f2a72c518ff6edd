//! The guard's own process: one thread, no runtime, the standard library and a few system calls.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::{Pid, setsid};

use super::watch::{Order, Watch};
use super::{Message, PACKET, READY, now_ms};

/// The longest sleep while there is something to guard: the kernel's timer does not count a suspend, [`now_ms`] does.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How often a group that was told to end is looked at, so that the guard need not wait out its grace.
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
    /// When each group's leader started, in ticks since the machine did.
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
                Message::Add(group) => {
                    // A child that is gone already has no start; its group is then taken as it is.
                    self.started
                        .extend(start_of(group).map(|start| (group, start)));
                }
                Message::Remove(group) => drop(self.started.remove(&group)),
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
                Order::Term(group) => self.signal(group, Signal::SIGTERM),
                Order::Kill(group) => {
                    self.signal(group, Signal::SIGKILL);
                    self.started.remove(&group);
                }
            }
        }
    }

    /// Forgets the groups that nobody is in: those that have obeyed, and children that registered and then found no program
    /// to become.
    fn look(&mut self) {
        for group in self.watch.groups() {
            if killpg(Pid::from_raw(group), None) == Err(Errno::ESRCH) {
                self.watch.hear(Message::Remove(group));
                self.started.remove(&group);
            }
        }
    }

    /// Signals a group, unless its number has gone to a process that is none of ours.
    fn signal(&self, group: i32, signal: Signal) {
        let ours = match (self.started.get(&group), start_of(group)) {
            (Some(then), Some(now)) => *then == now,
            _ => true,
        };
        if ours {
            // Fails when nobody is left in it, which is what is wanted.
            let _ = killpg(Pid::from_raw(group), signal);
        }
    }
}

/// When process `pid` started: the 22nd field of its `stat`, counted after the name, which may hold anything.
fn start_of(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
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
        assert!(start_of(own).unwrap() > 0);
        assert_eq!(start_of(own), start_of(own));
        assert_eq!(start_of(-1), None);
    }

    #[test]
    fn groups_without_anybody_are_forgotten() {
        let mut guarding = Guarding::default();
        guarding.hear("trust 1\n+2147483647\n");
        assert!(guarding.sleep().is_some());
        guarding.look();
        assert_eq!(guarding.sleep(), None);
    }
}
