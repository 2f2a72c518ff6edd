//! What the first process of a container owes the others.
//!
//! Process 1 gets every process that loses its parent, and has to reap them; signals without a handler do not reach it. So where
//! `tenure run` would be process 1, a child of it is the daemon, and process 1 passes signals on, reaps, and ends as the daemon does.
//! Then the kernel kills all that is left in the container.

use std::process::ExitCode;

use nix::libc;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{ForkResult, Pid, fork, getpid, setpgid, tcsetpgrp};

/// Signals that end or freeze a process whatever it wants, or that the kernel sends for its own doing.
const OURS: [Signal; 7] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGFPE,
    Signal::SIGILL,
    Signal::SIGTRAP,
    Signal::SIGABRT,
    Signal::SIGSYS,
];

/// Forks where this is process 1, and answers there when the daemon has ended; elsewhere, and in the child, `None` at once.
///
/// To be called before there is a second thread.
pub(crate) fn first_process() -> Option<ExitCode> {
    if getpid() != Pid::from_raw(1) {
        return None;
    }
    let mut signals = SigSet::all();
    for signal in OURS {
        signals.remove(signal);
    }
    let before = signals
        .thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)
        .ok()?;
    // SAFETY: there is only one thread, so the child finds every lock free.
    #[expect(unsafe_code, reason = "there is no safe fork")]
    let half = unsafe { fork() };
    match half {
        Ok(ForkResult::Parent { child }) => Some(serve(child, &signals)),
        Ok(ForkResult::Child) => {
            // A Ctrl-C is for the daemon alone: it would else come twice, and a second one means something.
            let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
            let _ = tcsetpgrp(std::io::stdin(), getpid());
            let _ = before.thread_set_mask();
            None
        }
        // Better a daemon that does not reap than none.
        Err(_) => {
            let _ = before.thread_set_mask();
            None
        }
    }
}

fn serve(daemon: Pid, signals: &SigSet) -> ExitCode {
    loop {
        match signals.wait() {
            Ok(Signal::SIGCHLD) => {
                if let Some(code) = reap(daemon) {
                    return code;
                }
            }
            Ok(signal) => drop(kill(daemon, signal)),
            Err(_) => {}
        }
    }
}

/// Reaps all that has ended; the exit code of the daemon if it was among them.
fn reap(daemon: Pid) -> Option<ExitCode> {
    let mut code = None;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a whole number that outlives the call. The safe form knows no real-time signals.
        #[expect(
            unsafe_code,
            reason = "the safe form loses the end of a process that a real-time signal killed"
        )]
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
        if pid <= 0 {
            return code;
        }
        if pid == daemon.as_raw() {
            let number = match libc::WIFEXITED(status) {
                true => libc::WEXITSTATUS(status),
                false => 128 + libc::WTERMSIG(status),
            };
            code = Some(ExitCode::from(u8::try_from(number).unwrap_or(u8::MAX)));
        }
    }
}
