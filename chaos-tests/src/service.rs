//! Programs that run beside the daemons: etcd, Patroni, HAProxy, PgBouncer.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use tenure_embedded::Leash;

use crate::lab::{PATIENCE, nap};

/// A running program with a folder that goes with it. Dropping it kills it, and so does the death of this process.
#[derive(Debug)]
pub(crate) struct Service {
    name: &'static str,
    child: Child,
    _leash: Leash,
    log: PathBuf,
}

impl Service {
    /// Starts `command`, whose output goes to a file in `folder`.
    pub(crate) fn start(name: &'static str, command: Command, folder: &Path) -> Self {
        Self::start_with(name, command, Stdio::null(), folder)
    }

    /// The same with something to read.
    pub(crate) fn start_with(
        name: &'static str,
        mut command: Command,
        input: impl Into<Stdio>,
        folder: &Path,
    ) -> Self {
        let log = folder.join("log");
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("a log can be made");
        let other = file.try_clone().expect("a file can be opened twice");
        let child = command
            .stdin(input)
            .stdout(file)
            .stderr(other)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{name} does not start ({error}); scripts/setup test installs it")
            });
        let leash = Leash::tie(child.id().cast_signed(), folder).expect("a shell starts");
        Self {
            name,
            child,
            _leash: leash,
            log,
        }
    }

    /// Waits until it has done what it is for.
    ///
    /// # Panics
    /// When it ends, or does not get there, with its log.
    pub(crate) fn until(&mut self, what: &str, mut ready: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !ready() {
            let ended = self.child.try_wait().expect("it is our child");
            assert!(
                ended.is_none() && begun.elapsed() < PATIENCE,
                "{} {what}: not yet, {ended:?}\n{}",
                self.name,
                self.logged()
            );
            nap();
        }
    }

    /// Waits until it listens on this port.
    pub(crate) fn until_it_listens(&mut self, port: u16) {
        self.until("listens", || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        });
    }

    /// Its process.
    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// What it has logged.
    pub(crate) fn logged(&self) -> String {
        let log = fs::read(&self.log).expect("the log can be read");
        String::from_utf8_lossy(&log).into_owned()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Gone already, maybe.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
