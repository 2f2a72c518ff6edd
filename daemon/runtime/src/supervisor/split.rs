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

use super::{KILL, REPORT, Supervisor, TERM, Told};
use crate::guard::now_ms;

/// How long a supervisor waits for a short handler before it becomes a program of its own, in milliseconds.
const MOMENT: u64 = 50;

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
    fn supervise(&self, handler: Pid, limits: &Told, report: RawFd) -> ! {
        // Both do it: whoever comes first needs the group.
        let _ = setpgid(handler, handler);
        close_all_but(report);
        default_signals();
        let status = first_moment(handler);
        let Told([cpu, memory, processes]) = limits;
        let pid = number(handler.as_raw().unsigned_abs());
        let ended = number(status.map_or(0, |status| status.unsigned_abs() + 1));
        let argv = [
            c"tenure".as_ptr(),
            self.verb.as_ptr(),
            pid.as_ptr().cast(),
            cpu.as_ptr(),
            memory.as_ptr(),
            processes.as_ptr(),
            ended.as_ptr().cast(),
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

/// Most handlers are short, and leave nothing: for them no program is started. Does not return then. Else the handler's status, if it
/// has ended and left something.
fn first_moment(handler: Pid) -> Option<i32> {
    let mut awaited = SigSet::empty();
    for signal in [Signal::SIGCHLD, TERM, KILL] {
        awaited.add(signal);
    }
    let until = now_ms().saturating_add(MOMENT);
    loop {
        if let Some(status) = reap(handler.as_raw()) {
            // What is left and has ended too is nobody's.
            while reap(-1).is_some() {}
            return match Errno::last() {
                Errno::ECHILD => end_as(status),
                _ => Some(status),
            };
        }
        let left = until.saturating_sub(now_ms());
        if left == 0 {
            return None;
        }
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: libc::c_long::try_from(left.min(999) * 1_000_000).unwrap_or(0),
        };
        // SAFETY: the set and the time are whole and outlive the call.
        #[expect(unsafe_code, reason = "there is no safe form of this call")]
        let signal =
            unsafe { libc::sigtimedwait(awaited.as_ref(), std::ptr::null_mut(), &raw const time) };
        if let Ok(word @ (TERM | KILL)) = Signal::try_from(signal) {
            // It waits for the program.
            let _ = kill(getpid(), word);
            return None;
        }
    }
}

/// The status of this child, or of any for -1, if it has ended. `None` sets the error to `ECHILD` where there is no such child.
fn reap(pid: i32) -> Option<i32> {
    Errno::clear();
    let mut status = 0;
    // SAFETY: `status` is a whole number that outlives the call.
    #[expect(unsafe_code, reason = "the safe form knows no real-time signals")]
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG | libc::__WALL) };
    (reaped > 0).then_some(status)
}

/// Ends this process as another ended.
fn end_as(status: i32) -> ! {
    let code = if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        let signal = libc::WTERMSIG(status);
        // The handler's core dump is enough.
        let _ = prctl::set_dumpable(false);
        if let Ok(signal) = Signal::try_from(signal) {
            let mut one = SigSet::empty();
            one.add(signal);
            let _ = kill(getpid(), signal);
            let _ = sigprocmask(SigmaskHow::SIG_UNBLOCK, Some(&one), None);
        }
        128 + signal
    };
    // SAFETY: it does not return and touches nothing.
    #[expect(
        unsafe_code,
        reason = "the safe form runs what was registered for an exit"
    )]
    unsafe {
        libc::_exit(code)
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
