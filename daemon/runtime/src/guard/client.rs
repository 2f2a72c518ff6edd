//! The daemon's side of the guard.
//!
//! Invariant: the guard's list is this list, but for what is still in `outbox` (it did not read fast enough) and for
//! children between fork and exec, which register themselves.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::{Message, PACKET, READY, now_ms};

/// How long a guard may take to start.
const START: Duration = Duration::from_secs(10);

/// Between attempts to replace a guard that died.
const AGAIN: Duration = Duration::from_secs(1);

/// Why there is no guard.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The socket or the process could not be made.
    #[error(
        "the guard process {program} cannot be started: {source}; is the system out of processes or descriptors?"
    )]
    Spawn {
        /// What was started.
        program: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// It started and did not say that it guards.
    #[error(
        "the guard process {program} ended or hung before it was ready; is this the tenure binary?"
    )]
    NotReady {
        /// What was started.
        program: PathBuf,
    },
}

/// A running guard. Clones speak to the same one; it ends, with the handlers that are left, when the last is dropped.
#[derive(Debug, Clone)]
pub struct Guard(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    program: PathBuf,
    args: Vec<OsString>,
    grace: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    socket: Arc<OwnedFd>,
    /// The first guard's process, until [`Guard::supervise`] takes it.
    child: Option<Child>,
    pid: Option<u32>,
    supervisors: BTreeSet<i32>,
    trust_until: u64,
    /// How often there was no trust any more, or none yet, when it was given.
    lapses: u64,
    /// What the guard had no room for yet.
    outbox: String,
}

impl Guard {
    /// Starts a guard and waits until it is ready: `program args…` has to call [`super::main`]. `/proc/self/exe` is this
    /// binary, also after it was replaced on disk. From TERM to KILL the guard leaves `grace`.
    ///
    /// No handler lives before [`Guard::trust_until`] was called.
    ///
    /// # Errors
    /// When it cannot be started or is not ready within ten seconds. A daemon must not run handlers then.
    pub async fn start(program: &Path, args: &[&str], grace: Duration) -> Result<Self, GuardError> {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let (socket, child) = launch(program, &args).await?;
        let guard = Self(Arc::new(Shared {
            program: program.to_owned(),
            args,
            grace: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
            state: Mutex::new(State {
                socket: Arc::new(socket),
                pid: child.id(),
                child: Some(child),
                supervisors: BTreeSet::new(),
                trust_until: 0,
                lapses: 0,
                outbox: String::new(),
            }),
        }));
        guard.state().say(Message::Grace(guard.0.grace));
        Ok(guard)
    }

    /// Handlers may live until `ms` on the clock of [`super::now_ms`]; then the guard ends them unless this was called
    /// again. Never blocks.
    pub fn trust_until(&self, ms: u64) {
        let mut state = self.state();
        if state.has_lapsed() {
            state.lapses += 1;
        }
        state.trust_until = ms;
        state.say(Message::Trust(ms));
    }

    /// The guard's process, for people.
    pub fn pid(&self) -> Option<u32> {
        self.state().pid
    }

    /// Replaces the guard whenever it dies, and tells the new one all supervisors; until then no handler can be started. Runs
    /// until it is dropped, and is to be run once.
    pub async fn supervise(&self) {
        // A second guard beside a living one would cost that one its socket, and all handlers with it.
        let Some(mut child) = self.state().child.take() else {
            return pending().await;
        };
        loop {
            let status = child.wait().await;
            tracing::warn!(?status, "the guard process died; a new one is started");
            child = loop {
                match launch(&self.0.program, &self.0.args).await {
                    Ok((socket, child)) => {
                        self.state().replace(socket, child.id(), self.0.grace);
                        break child;
                    }
                    Err(error) => tracing::error!(%error, "no guard, so no handler can be started"),
                }
                sleep(AGAIN).await;
            };
        }
    }

    /// How often handlers were without trust; for [`Guard::has_lapsed_since`].
    pub(crate) fn lapses(&self) -> u64 {
        self.state().lapses
    }

    /// Whether trust has ended at some time since [`Guard::lapses`] said `lapses`: the guard may have ended handlers.
    pub(crate) fn has_lapsed_since(&self, lapses: u64) -> bool {
        let state = self.state();
        state.has_lapsed() || state.lapses != lapses
    }

    /// Where a child registers itself, by [`super::register_self`].
    pub(crate) fn registry(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.state().socket)
    }

    /// Takes over a supervisor that registered itself at `registry`, so that a later guard learns of it too.
    pub(crate) fn adopt(&self, pid: i32, registry: &Arc<OwnedFd>) {
        let mut state = self.state();
        state.supervisors.insert(pid);
        if !Arc::ptr_eq(registry, &state.socket) {
            state.say(Message::Add(pid));
        }
    }

    /// The supervisor has ended. To be said while it is a zombie, so that its number cannot have been given away.
    pub(crate) fn forget(&self, pid: i32) {
        let mut state = self.state();
        state.supervisors.remove(&pid);
        state.say(Message::Remove(pid));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No change of the state can be left half done by a panic.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_lapsed(&self) -> bool {
        now_ms() >= self.trust_until
    }

    fn replace(&mut self, socket: OwnedFd, pid: Option<u32>, grace: u64) {
        self.socket = Arc::new(socket);
        self.pid = pid;
        self.outbox.clear();
        self.outbox.push_str(&Message::Grace(grace).line());
        for pid in &self.supervisors {
            self.outbox.push_str(&Message::Add(*pid).line());
        }
        // Last: a trust that has passed meanwhile must find them all.
        self.say(Message::Trust(self.trust_until));
    }

    /// Sends what waits and `message`. What the guard has no room for is sent with the next word; what a dead guard does
    /// not hear its successor is told.
    fn say(&mut self, message: Message) {
        self.outbox.push_str(&message.line());
        while let Some(length) = whole_lines(&self.outbox) {
            let packet = &self.outbox.as_bytes()[..length];
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match send(self.socket.as_raw_fd(), packet, flags) {
                Ok(_) => drop(self.outbox.drain(..length)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                Err(_) => self.outbox.clear(),
            }
        }
    }
}

/// The length of the lines at the start of `outbox` that fit into one packet; `None` when it is empty.
fn whole_lines(outbox: &str) -> Option<usize> {
    let fitting = &outbox.as_bytes()[..outbox.len().min(PACKET)];
    fitting.iter().rposition(|b| *b == b'\n').map(|end| end + 1)
}

async fn launch(program: &Path, args: &[OsString]) -> Result<(OwnedFd, Child), GuardError> {
    let failed = |source: io::Error| GuardError::Spawn {
        program: program.to_owned(),
        source,
    };
    // Packets keep the words of many writers apart, and the end of the last writer is still seen.
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .map_err(|errno| failed(errno.into()))?;
    let mut child = Command::new(program)
        .args(args)
        .arg0("tenure")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut said = [0; READY.len()];
    let ready = async {
        let mut stdout = child.stdout.take()?;
        stdout.read_exact(&mut said).await.ok()
    };
    match timeout(START, ready).await {
        Ok(Some(_)) if said == READY => Ok((ours, child)),
        _ => {
            // Its socket closes with this function, so it ends by itself if it is a guard; this is for what is not.
            let _ = child.start_kill();
            Err(GuardError::NotReady {
                program: program.to_owned(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_end_with_a_line() {
        assert_eq!(whole_lines(""), None);
        assert_eq!(whole_lines("+1\n-2\n"), Some(6));
        let long = "+12345\n".repeat(1000);
        assert_eq!(whole_lines(&long), Some(PACKET / 7 * 7));
    }
}
