//! The running server process. It is our direct child, so its end is seen at once: an orphan would stay a zombie
//! until PID 1 looks, and a zombie keeps `postmaster.pid` locked.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::leash::Leash;
use crate::{Error, processes};

/// How long a server may take to stop before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Dropping it stops the server, as quickly as can be without asking clients.
#[derive(Debug)]
pub(crate) struct Postmaster {
    child: Child,
    pid: i32,
    _leash: Leash,
}

impl Postmaster {
    /// Starts `command`, with its output to `log`; `folder` is removed should we die before the server.
    pub(crate) fn spawn(mut command: Command, log: &File, folder: &Path) -> Result<Self, Error> {
        let log = |stream| {
            log.try_clone()
                .map_err(Error::io(format!("open the server's {stream}")))
        };
        let mut child = command
            .stdout(log("stdout")?)
            .stderr(log("stderr")?)
            .spawn()
            .map_err(Error::io("start postgres"))?;
        let pid = child.id().cast_signed();
        match Leash::tie(pid, folder) {
            Ok(leash) => Ok(Self {
                child,
                pid,
                _leash: leash,
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The exit status in words, once it has ended by itself.
    pub(crate) fn ended(&mut self) -> Result<Option<String>, Error> {
        let status = self
            .child
            .try_wait()
            .map_err(Error::io("wait for postgres"))?;
        Ok(status.map(|status| format!("ended by itself ({status})")))
    }

    /// Stops it by `signal` and waits. A frozen server goes on first.
    pub(crate) fn stop(&mut self, signal: Signal) -> Result<(), Error> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        processes::send(self.pid, signal)?;
        self.thaw()?;
        if processes::wait_until(STOP_LIMIT, || !matches!(self.child.try_wait(), Ok(None))) {
            return Ok(());
        }
        self.kill()
    }

    /// Kills the server and all its processes as a crash of the machine would, and waits until they are gone.
    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        // A stopped postmaster starts no more processes.
        processes::freeze(self.pid)?;
        let children = processes::children(self.pid);
        for &pid in children.iter().chain([&self.pid]) {
            processes::send(pid, Signal::SIGKILL)?;
        }
        self.child.wait().map_err(Error::io("wait for postgres"))?;
        // The next start in this data folder is refused while one of them still has the shared memory.
        for pid in children {
            processes::wait_for_end(pid);
        }
        Ok(())
    }

    /// Stops all its processes where they stand.
    pub(crate) fn freeze(&self) -> Result<(), Error> {
        // The postmaster first: it must not start one more while we look at the others.
        processes::freeze(self.pid)?;
        processes::children(self.pid)
            .into_iter()
            .try_for_each(processes::freeze)
    }

    /// Lets a frozen server go on.
    pub(crate) fn thaw(&self) -> Result<(), Error> {
        processes::children(self.pid)
            .into_iter()
            .chain([self.pid])
            .try_for_each(|pid| processes::send(pid, Signal::SIGCONT))
    }
}

impl Drop for Postmaster {
    fn drop(&mut self) {
        // Nothing is left to try when even this fails; the leash is released after it.
        let _ = self.stop(Signal::SIGQUIT);
    }
}
