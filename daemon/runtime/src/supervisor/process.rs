//! The supervisor's own process: one thread, no runtime, all signals blocked and taken one by one.

use std::ffi::OsString;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::Duration;

use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, killpg, raise, sigprocmask};
use nix::unistd::{Pid, getpid};

use super::descendants::kill_all_below;
use super::usage::Limits;
use super::{KILL, LINGER, REPORT, TERM, code};
use crate::guard::now_ms;
use crate::settings::Exceeded;

/// Between looks while there is something to kill.
const LOOK: Duration = Duration::from_millis(5);

/// How often it is looked at what is used, where that has a limit.
const MEASURE: Duration = Duration::from_millis(50);

/// Supervises a handler, a child of this process, and ends as it did. The arguments are numbers: the handler's process, and its
/// limits of processor time in seconds, of memory in bytes and of processes, 0 for none; and, if it has ended, its status plus 1, else 0.
///
/// This is all of the hidden subcommand `tenure supervise`.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let numbers: Vec<i64> = arguments
        .filter_map(|argument| argument.to_str()?.parse().ok())
        .collect();
    let [handler, cpu, memory, processes, ended] = numbers[..] else {
        return ExitCode::from(2);
    };
    let Ok(handler) = i32::try_from(handler) else {
        return ExitCode::from(2);
    };
    // Started as /proc/self/exe, it would be called `exe`.
    let _ = prctl::set_name(c"tenure-supervis");
    // Among thousands of processes that want the processor this one has to come first. It mostly sleeps.
    // SAFETY: the call takes no pointer. Without the right to do it things stay as they are.
    #[expect(unsafe_code, reason = "there is no safe form of this call")]
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, -20);
    }
    let mut supervising = Supervising {
        handler: Pid::from_raw(handler),
        limits: Limits {
            cpu: cpu.unsigned_abs(),
            memory: memory.unsigned_abs(),
            processes: processes.unsigned_abs(),
        },
        end: i32::try_from(ended - 1)
            .ok()
            .filter(|status| *status >= 0)
            .map(how),
        told: false,
        killing: false,
    };
    supervising.run();
    match supervising.end {
        Some(How::Signal(signal)) => die_of(signal),
        Some(How::Exit(code)) => ExitCode::from(code),
        // There was no such child: this was started by hand.
        None => ExitCode::from(2),
    }
}

/// How the handler ended, and since when it has.
#[derive(Debug, Clone, Copy)]
enum How {
    Exit(u8),
    Signal(i32),
}

struct Supervising {
    handler: Pid,
    limits: Limits,
    end: Option<How>,
    told: bool,
    killing: bool,
}

impl Supervising {
    fn run(&mut self) {
        let mut linger_until = None;
        while self.reap() {
            if self.end.is_some() {
                let until =
                    *linger_until.get_or_insert_with(|| now_ms().saturating_add(millis(LINGER)));
                self.killing |= self.told || now_ms() >= until;
            }
            if !self.killing
                && !self.limits.are_none()
                && let Some(exceeded) = self.limits.exceeded_below(getpid().as_raw())
            {
                report(exceeded);
                self.killing = true;
            }
            if self.killing {
                if self.end.is_none() {
                    // The quick way for most of it; the number is the handler's until it is reaped.
                    let _ = killpg(self.handler, Signal::SIGKILL);
                }
                kill_all_below(getpid().as_raw());
            }
            let wait = match (self.killing, linger_until) {
                (true, _) => Some(LOOK),
                (false, Some(until)) => Some(Duration::from_millis(until.saturating_sub(now_ms()))),
                (false, None) if self.limits.are_none() => None,
                (false, None) => Some(MEASURE),
            };
            self.hear(wait);
        }
    }

    /// Reaps all that has ended. `false`: nothing is left.
    fn reap(&mut self) -> bool {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a whole number that outlives the call. The safe form knows no real-time signals.
            #[expect(
                unsafe_code,
                reason = "the safe form loses the end of a process that a real-time signal killed"
            )]
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
            match pid {
                0 => return true,
                -1 => return false,
                pid if pid == self.handler.as_raw() => self.end = Some(how(status)),
                _ => {}
            }
        }
    }

    /// Waits for one signal, and does what it means.
    fn hear(&mut self, wait: Option<Duration>) {
        let signals = SigSet::all();
        let time = wait.map(|wait| libc::timespec {
            tv_sec: libc::time_t::try_from(wait.as_secs()).unwrap_or(1),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the set and the time are whole and outlive the call.
        #[expect(unsafe_code, reason = "there is no safe form of this call")]
        let signal = unsafe { libc::sigtimedwait(signals.as_ref(), null_mut(), time) };
        match Signal::try_from(signal) {
            Ok(TERM) => {
                self.told = true;
                if self.end.is_none() {
                    let _ = killpg(self.handler, Signal::SIGTERM);
                }
            }
            Ok(KILL) => self.killing = true,
            _ => {}
        }
    }
}

fn how(status: i32) -> How {
    match libc::WIFEXITED(status) {
        true => How::Exit(u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX)),
        false => How::Signal(libc::WTERMSIG(status)),
    }
}

/// Tells the daemon, if there is still one, which limit was exceeded.
fn report(exceeded: Exceeded) {
    // SAFETY: the byte outlives the call; nobody else writes there.
    #[expect(unsafe_code, reason = "the descriptor came by its number only")]
    unsafe {
        libc::write(REPORT, [code(exceeded)].as_ptr().cast(), 1);
    }
}

/// Ends this process by `signal`, as the handler did.
fn die_of(signal: i32) -> ExitCode {
    // The handler's core dump is enough.
    let _ = prctl::set_dumpable(false);
    if let Ok(signal) = Signal::try_from(signal) {
        let mut one = SigSet::empty();
        one.add(signal);
        // SAFETY: the default action runs no code of this process; the standard library has one of its own for SIGSEGV.
        #[expect(unsafe_code, reason = "there is no safe form of this call")]
        let _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        let _ = raise(signal);
        let _ = sigprocmask(SigmaskHow::SIG_UNBLOCK, Some(&one), None);
    }
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
