//! Control groups (version 2): the kernel itself holds a handler to its limits, and kills all of it at once.
//!
//! Where this daemon's own control group is given into its care (*delegated*), each handler that has limits runs in one of its own,
//! below one of the daemon's that it has locked for as long as it lives. Whoever starts later removes those of dead daemons, with what
//! still runs in them. Invariant: nothing is written outside the delegated group.

mod place;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use uuid::Uuid;

use crate::settings::{HandlerKind, Handlers, ProcessLimits};

/// How the groups of daemons begin.
const PREFIX: &str = "tenure-";

/// How far the kernel lets a handler go beyond its number of processes, so that it is seen and killed for it.
const SEEN: u64 = 16;

/// How often a group is looked at that was killed, and for how long.
const LOOK: Duration = Duration::from_millis(2);
const LOOKS: u32 = 1000;

/// The groups of a daemon's handlers; clones make them in the same place.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<Base>);

#[derive(Debug)]
struct Base {
    path: PathBuf,
    memory: bool,
    processes: bool,
    _lock: Flock<File>,
}

/// The group of one handler. Dropping it kills what is in it, and removes it.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    _base: Cgroups,
}

impl Cgroups {
    /// Groups for these handlers, if any has limits. Says once in the log what the kernel cannot hold here.
    pub(crate) fn for_handlers(handlers: &Handlers) -> Option<Self> {
        let confinements = handlers.rules.iter().filter_map(|rule| match &rule.kind {
            Some(HandlerKind::Exec(exec)) => Some(&exec.confinement),
            Some(HandlerKind::Process(process)) => Some(&process.confinement),
            _ => None,
        });
        let mut asked = ProcessLimits::default();
        for limits in confinements.map(|confinement| confinement.limits) {
            asked.cpu = asked.cpu.or(limits.cpu);
            asked.memory = asked.memory.or(limits.memory);
            asked.processes = asked.processes.or(limits.processes);
            asked.open_files = asked.open_files.or(limits.open_files);
        }
        if asked.are_none() {
            return None;
        }
        let (groups, why) = match Self::delegated() {
            Ok(groups) => (
                Some(groups),
                "the controller is not enabled here".to_owned(),
            ),
            Err(why) => (None, why),
        };
        let lacking = groups.as_ref().map_or_else(
            || lacking(&asked, false, false),
            |groups| groups.lacks(&asked),
        );
        if !lacking.is_empty() {
            tracing::warn!(
                limits = lacking.join(", "),
                %why,
                "Handlers can go beyond these limits for a moment: the supervisor checks them twenty times a second, but the kernel does not hold \
                 them here. It does where a control group of version 2 is delegated with its controllers (Delegate=yes in a systemd unit)."
            );
        }
        groups
    }

    /// Groups below the one that is delegated to this daemon.
    ///
    /// # Errors
    /// Why there are none, for people.
    pub fn delegated() -> Result<Self, String> {
        Self::below(&place::delegated()?)
    }

    /// Groups below `place`, a control group that nobody else cares for.
    ///
    /// # Errors
    /// Why there are none, for people.
    pub fn below(place: &Path) -> Result<Self, String> {
        let failed = |what: &str, error: io::Error| format!("{what} {}: {error}", place.display());
        remove_left_overs(place);
        let path = place.join(format!("{PREFIX}{}", Uuid::new_v4().simple()));
        fs::create_dir(&path).map_err(|error| failed("no control group can be made in", error))?;
        let lock = open(&path)
            .and_then(|folder| {
                Flock::lock(folder, FlockArg::LockSharedNonblock).map_err(|(_, errno)| errno.into())
            })
            .map_err(|error| {
                let _ = fs::remove_dir(&path);
                failed("no control group can be locked in", error)
            })?;
        let enabled = |controller| {
            let written = format!("+{controller}");
            fs::write(place.join("cgroup.subtree_control"), &written).is_ok()
                && fs::write(path.join("cgroup.subtree_control"), &written).is_ok()
        };
        let (memory, processes) = (enabled("memory"), enabled("pids"));
        let base = Base {
            path,
            memory,
            processes,
            _lock: lock,
        };
        if !base.path.join("cgroup.kill").exists() {
            return Err("this kernel has no cgroup.kill; it came with Linux 5.14".to_owned());
        }
        Ok(Self(Arc::new(base)))
    }

    /// Which of the limits that are asked for the kernel cannot hold here.
    #[must_use]
    pub fn lacks(&self, limits: &ProcessLimits) -> Vec<&'static str> {
        lacking(limits, self.0.memory, self.0.processes)
    }

    /// Makes a group with these limits.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn make(&self, limits: &ProcessLimits) -> io::Result<Cgroup> {
        let path = self.0.path.join(Uuid::new_v4().simple().to_string());
        fs::create_dir(&path)?;
        let group = Cgroup {
            path,
            _base: self.clone(),
        };
        if let Some(memory) = limits.memory
            && self.0.memory
        {
            fs::write(group.path.join("memory.max"), memory.to_string())?;
            // All of it or nothing; and what is swapped out is memory too. There need not be swap.
            fs::write(group.path.join("memory.oom.group"), "1")?;
            let _ = fs::write(group.path.join("memory.swap.max"), "0");
        }
        if let Some(processes) = limits.processes
            && self.0.processes
        {
            let most = processes.saturating_add(SEEN);
            fs::write(group.path.join("pids.max"), most.to_string())?;
        }
        Ok(group)
    }
}

fn lacking(limits: &ProcessLimits, memory: bool, processes: bool) -> Vec<&'static str> {
    let asked = [
        (limits.memory.is_some() && !memory, "memory"),
        (limits.processes.is_some() && !processes, "processes"),
    ];
    asked
        .into_iter()
        .filter_map(|(lacks, name)| lacks.then_some(name))
        .collect()
}

impl Drop for Base {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

impl Cgroup {
    /// Where a process enters by writing `0`.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn entry(&self) -> io::Result<OwnedFd> {
        let file = OpenOptions::new()
            .write(true)
            .open(self.path.join("cgroup.procs"))?;
        Ok(file.into())
    }

    /// Whether the kernel has killed in it for want of memory.
    pub(crate) fn ran_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        events
            .lines()
            .filter_map(|line| line.strip_prefix("oom_kill "))
            .any(|count| count.trim() != "0")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::warn!(group = %self.path.display(), %error, "A handler's control group could not be removed.");
        }
    }
}

/// Kills what is in a group, and removes it. A killed process is in it until it was reaped.
fn remove(path: &Path) -> io::Result<()> {
    let mut looks = 0;
    loop {
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && looks < LOOKS => {
                fs::write(path.join("cgroup.kill"), "1")?;
                looks += 1;
                sleep(LOOK);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => return other,
        }
    }
}

/// Removes what dead daemons have left in `place`, with what still runs in it.
fn remove_left_overs(place: &Path) {
    for path in folders(place).filter(|path| is_ours(path)) {
        // The lock of a daemon ends with it.
        let Ok(folder) = open(&path) else { continue };
        let Ok(_lock) = Flock::lock(folder, FlockArg::LockExclusiveNonblock) else {
            continue;
        };
        for group in folders(&path).chain([path.clone()]) {
            if let Err(error) = remove(&group) {
                tracing::warn!(group = %group.display(), %error, "A control group of a dead daemon could not be removed.");
            }
        }
    }
}

fn folders(path: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let id = name.and_then(|name| name.strip_prefix(PREFIX));
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
}
