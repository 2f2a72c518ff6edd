//! One running daemon.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lab::{PATIENCE, nap};

/// A process of `tenure run`. Dropping it kills it, and with it its handlers.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts it. What it logs is in the file `log`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn spawn(mut command: Command, log: PathBuf) -> Self {
        let child = command.spawn().expect("the daemon starts");
        Self { child, log }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Sends it, and nobody else, a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the daemon can be signalled");
    }

    /// Kills it, so that it can say nothing, and waits until it is gone.
    pub fn kill9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait();
    }

    /// Whether it lives.
    pub fn is_running(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("the daemon is our child")
            .is_none()
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("the daemon is our child") {
                return status;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "the daemon does not end:\n{}",
                self.log()
            );
            nap();
        }
    }

    /// Asks it to stop, waits, and returns its exit code.
    pub fn stop(&mut self) -> i32 {
        self.signal(Signal::SIGTERM);
        self.wait().code().unwrap_or(-1)
    }

    /// What it and those before it of the same name have logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("the log can be read")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Gone already, in most scenarios.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
