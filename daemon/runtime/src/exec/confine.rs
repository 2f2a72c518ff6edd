//! What the forked child does to itself before it becomes the handler: limits, niceness, user.
//!
//! Everything is prepared before the fork; [`Confined::apply`] only makes system calls.

use std::io;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};

use crate::settings::Confinement;

/// How much longer a process lives that catches SIGXCPU, in seconds.
const LAST_CPU: u64 = 2;

/// A process that grows faster than its supervisor looks is refused memory beyond so many times the limit.
const BURST: u64 = 2;

/// A user may have so many times the processes that one handler may run: its handlers run side by side, and a fork bomb that is quicker
/// than the look of its supervisor still has an end.
const SIDE_BY_SIDE: u64 = 32;

/// What is applied.
pub(super) struct Confined {
    limits: Vec<(Resource, u64, u64)>,
    nice: Option<i32>,
    account: Option<(libc::uid_t, libc::gid_t, Vec<libc::gid_t>)>,
}

impl Confined {
    pub(super) fn new(confinement: &Confinement) -> Self {
        let limits = &confinement.limits;
        // A core dump would hold data of the job, and lie where nobody looks.
        let mut applied = vec![(Resource::RLIMIT_CORE, 0, 0)];
        applied.extend(limits.cpu.map(|cpu| {
            let seconds = cpu.as_secs().max(1);
            (Resource::RLIMIT_CPU, seconds, seconds + LAST_CPU)
        }));
        let both = |resource, limit: u64| (resource, limit, limit);
        applied.extend(
            limits
                .memory
                .map(|memory| both(Resource::RLIMIT_DATA, memory.saturating_mul(BURST))),
        );
        applied.extend(
            limits
                .open_files
                .map(|files| both(Resource::RLIMIT_NOFILE, files)),
        );
        applied.extend(
            limits
                .file_size
                .map(|size| both(Resource::RLIMIT_FSIZE, size)),
        );
        // The kernel counts by user, and does not count root's.
        if confinement
            .account
            .as_ref()
            .is_some_and(|account| account.user != 0)
        {
            let most = limits
                .processes
                .map(|most| most.saturating_mul(SIDE_BY_SIDE));
            applied.extend(most.map(|most| both(Resource::RLIMIT_NPROC, most)));
        }
        Self {
            limits: applied,
            nice: confinement.nice,
            account: confinement
                .account
                .as_ref()
                .map(|account| (account.user, account.group, account.groups.clone())),
        }
    }

    /// Confines the calling process, which must have one thread.
    ///
    /// # Errors
    /// Those of the system calls: the handler must not run then.
    pub(super) fn apply(&self) -> io::Result<()> {
        for (resource, soft, hard) in &self.limits {
            // Who may not raise a limit stays below the one that it has.
            match setrlimit(*resource, *soft, *hard) {
                Err(Errno::EPERM) => lower(*resource, *soft)?,
                other => other?,
            }
        }
        if let Some(nice) = self.nice {
            // SAFETY: the call takes no pointer.
            #[expect(unsafe_code, reason = "there is no safe form of this call")]
            Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) })?;
        }
        let Some((user, group, groups)) = &self.account else {
            return Ok(());
        };
        // Groups first: the user may not change them. The system calls and not the C library's functions, which wait for other threads.
        // SAFETY: the list is as long as is said; the calls change nothing but who this process is.
        #[expect(unsafe_code, reason = "the safe forms are for processes with threads")]
        unsafe {
            Errno::result(libc::syscall(
                libc::SYS_setgroups,
                groups.len(),
                groups.as_ptr(),
            ))?;
            Errno::result(libc::syscall(libc::SYS_setresgid, *group, *group, *group))?;
            Errno::result(libc::syscall(libc::SYS_setresuid, *user, *user, *user))?;
        }
        // No set-uid program gives back what was just given up.
        prctl::set_no_new_privs()?;
        Ok(())
    }
}

fn lower(resource: Resource, limit: u64) -> nix::Result<()> {
    let (_, hard) = nix::sys::resource::getrlimit(resource)?;
    setrlimit(resource, limit.min(hard), hard.min(limit))
}
