//! From the forked child to a supervisor and the handler below it, before either is its program.
//!
//! All of this runs between fork and exec of a process with threads: system calls on memory of its own stack, no lock, no
//! allocation.

use std::io::{self, Write as _};
use std::os::fd::RawFd;
use std::ptr::null;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid, setpgid};

use super::{REPORT, Supervisor, Told};

/// What a forked child begins with: it has all signals blocked.
///
/// A handler of the daemon's must never run in it, and what it is told has to wait until the supervisor can hear it.
pub(crate) struct Deaf(SigSet);

/// The handler's half of a process that was split.
pub(crate) struct Below {
    supervisor: Pid,
    signals: SigSet,
}

impl Deaf {
    /// Blocks all signals.
    ///
    /// # Errors
    /// That of the system call.
    pub(crate) fn become_deaf() -> io::Result<Self> {
        let mut before = SigSet::empty();
        sigprocmask(
            SigmaskHow::SIG_SETMASK,
            Some(&SigSet::all()),
            Some(&mut before),
        )?;
        Ok(Self(before))
    }
}

impl Supervisor {
    /// Splits the calling process: it becomes the supervisor, and this returns in a child of it, which leads a process group and
    /// has all signals blocked until [`Below::release`]. The supervisor looks after `limits`, and reports at `report`.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn split(
        &self,
        Deaf(signals): Deaf,
        limits: &Told,
        report: RawFd,
    ) -> io::Result<Below> {
        prctl::set_child_subreaper(true)?;
        let supervisor = getpid();
        // SAFETY: the process has one thread (it is itself the child of a fork), and both halves only do what the head of this
        // file says until they are other programs.
        #[expect(unsafe_code, reason = "there is no safe fork")]
        let half = unsafe { fork() }?;
        match half {
            ForkResult::Parent { child } => self.supervise(child, limits, report),
            ForkResult::Child => {
                setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
                Ok(Below {
                    supervisor,
                    signals,
                })
            }
        }
    }

    /// Becomes the supervisor of `handler`.
    fn supervise(&self, handler: Pid, Told([cpu, memory, processes]): &Told, report: RawFd) -> ! {
        // Both do it: whoever comes first needs the group.
        let _ = setpgid(handler, handler);
        close_all_but(report);
        let pid = number(handler.as_raw().unsigned_abs());
        let argv = [
            c"tenure".as_ptr(),
            self.verb.as_ptr(),
            pid.as_ptr().cast(),
            cpu.as_ptr(),
            memory.as_ptr(),
            processes.as_ptr(),
            null(),
        ];
        let environment = [null()];
        // SAFETY: all are texts that end with NUL, in arrays that end with a null pointer, and live until the call is over.
        #[expect(unsafe_code, reason = "the safe form allocates")]
        unsafe {
            libc::execve(self.program.as_ptr(), argv.as_ptr(), environment.as_ptr());
        }
        // The machine is out of memory or descriptors. Without a supervisor there is no handler.
        let _ = kill(handler, Signal::SIGKILL);
        let _ = kill(getpid(), Signal::SIGKILL);
        // SAFETY: it does not return and touches nothing.
        #[expect(
            unsafe_code,
            reason = "the safe form runs what was registered for an exit"
        )]
        unsafe {
            libc::_exit(127)
        }
    }
}

impl Below {
    /// The last step before the handler's program: the usual signals, and the handler dies with its supervisor.
    ///
    /// # Errors
    /// `ESRCH` when that one is gone, and those of the system calls. To be called after a change of the user, which would undo it.
    pub(crate) fn release(self) -> io::Result<()> {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != self.supervisor {
            return Err(Errno::ESRCH.into());
        }
        default_signals();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.signals), None)?;
        Ok(())
    }
}

/// Takes back the handlers of the daemon, which would write to its pipes. Ignored signals stay ignored.
fn default_signals() {
    for signal in 1..=31 {
        // SAFETY: both structures are whole, and the default action is set for no other process.
        #[expect(unsafe_code, reason = "the safe form does not read what is set")]
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, null(), &raw mut action) == 0
                && action.sa_sigaction != libc::SIG_IGN
            {
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    }
}

/// Closes every descriptor, so that the handler's pipes end with the handler, but `kept`, which becomes [`REPORT`].
fn close_all_but(kept: RawFd) {
    // SAFETY: nothing in this process uses another descriptor any more. A descriptor that dup2 has made stays open over exec.
    #[expect(unsafe_code, reason = "there is no safe form of these calls")]
    unsafe {
        if kept == REPORT {
            libc::fcntl(kept, libc::F_SETFD, 0);
        } else {
            libc::dup2(kept, REPORT);
        }
        for descriptor in 0..REPORT {
            libc::close(descriptor);
        }
        let first = REPORT + 1;
        if libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) == 0 {
            return;
        }
        // Linux before 5.9.
        let most = libc::sysconf(libc::_SC_OPEN_MAX).clamp(1024, 1 << 20);
        for descriptor in first..i32::try_from(most).unwrap_or(1024) {
            libc::close(descriptor);
        }
    }
}

/// `value` in decimal, ended by NUL.
fn number(value: u32) -> [u8; 11] {
    let mut text = [0; 11];
    // Ten digits fit.
    let _ = write!(&mut text[..10], "{value}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_whole() {
        assert_eq!(&number(0)[..2], b"0\0");
        assert_eq!(&number(u32::MAX), b"4294967295\0");
    }
}
