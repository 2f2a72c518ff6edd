//! What is used below a supervisor, and whether that is too much.
//!
//! The kernel's own limits are for single processes, or for all of a user; these are for everything that a handler started.

use std::fs;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use nix::unistd::{SysconfVar, sysconf};

use super::descendants::all_below;
use crate::settings::Exceeded;

/// Limits; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Limits {
    /// Processor time, in seconds.
    pub(super) cpu: u64,
    /// Memory, in bytes.
    pub(super) memory: u64,
    /// Processes and threads.
    pub(super) processes: u64,
}

/// What all processes use together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Usage {
    /// Processor time, those that have ended included.
    cpu: Duration,
    /// Memory of their own, in bytes; what several share counts for each.
    memory: u64,
    /// Processes and threads.
    processes: u64,
}

impl Limits {
    pub(super) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Which limit is exceeded now by what is below the process `root`, the calling one.
    pub(super) fn exceeded_below(&self, root: i32) -> Option<Exceeded> {
        let below = all_below(root);
        let mut usage = Usage {
            cpu: ended(),
            ..Usage::default()
        };
        for pid in &below {
            usage.add(*pid);
        }
        match self.exceeded_by(&usage) {
            // Forked processes share most of their memory: look again, exactly.
            Some(Exceeded::Memory) => {
                usage.memory = below.iter().map(|pid| exactly(*pid)).sum();
                self.exceeded_by(&usage)
            }
            other => other,
        }
    }

    fn exceeded_by(&self, usage: &Usage) -> Option<Exceeded> {
        let over = |limit: u64, used: u64| limit > 0 && used > limit;
        if over(self.memory, usage.memory) {
            return Some(Exceeded::Memory);
        }
        if over(self.processes, usage.processes) {
            return Some(Exceeded::Processes);
        }
        (self.cpu > 0 && usage.cpu >= Duration::from_secs(self.cpu)).then_some(Exceeded::Cpu)
    }
}

impl Usage {
    /// Adds process `pid`; one that has ended meanwhile adds nothing.
    fn add(&mut self, pid: i32) {
        let Some((ticks, threads)) = times_and_threads(pid) else {
            return;
        };
        let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100))
            .unwrap_or(100);
        self.cpu += Duration::from_millis(ticks.saturating_mul(1000) / per_second.max(1));
        self.processes += threads;
        self.memory += own_memory(pid).unwrap_or(0);
    }
}

/// Processor time of those whom this process has reaped, and whom they had.
fn ended() -> Duration {
    let time = |time: TimeVal| {
        Duration::new(
            u64::try_from(time.tv_sec()).unwrap_or(0),
            u32::try_from(time.tv_usec())
                .unwrap_or(0)
                .saturating_mul(1000),
        )
    };
    getrusage(UsageWho::RUSAGE_CHILDREN).map_or(Duration::ZERO, |usage| {
        time(usage.user_time()) + time(usage.system_time())
    })
}

/// Processor time, in ticks, of a process and its reaped children, and the number of its threads: fields 14 to 17 and 20 of `stat`.
fn times_and_threads(pid: i32) -> Option<(u64, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<u64> = fields
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let ticks = fields.get(11..15)?.iter().sum();
    Some((ticks, *fields.get(17)?))
}

/// Resident memory that is of no file, in bytes.
fn own_memory(pid: i32) -> Option<u64> {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = pages
        .split(' ')
        .skip(1)
        .map(|pages| pages.parse::<u64>().unwrap_or(0));
    let own = pages.next()?.saturating_sub(pages.next()?);
    let page = u64::try_from(sysconf(SysconfVar::PAGE_SIZE).ok()??).ok()?;
    own.checked_mul(page)
}

/// As [`own_memory`], but of what several share only a share, where this may be seen.
fn exactly(pid: i32) -> u64 {
    proportional(pid).or_else(|| own_memory(pid)).unwrap_or(0)
}

/// Memory that is of no file, in bytes, what is shared by its share; `None` where this may not be seen.
fn proportional(pid: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Pss_Anon:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_limit_is_exceeded_beyond_it_and_none_is_never() {
        let limits = Limits {
            cpu: 2,
            memory: 100,
            processes: 3,
        };
        let usage = Usage {
            cpu: Duration::from_millis(1999),
            memory: 100,
            processes: 3,
        };
        let with = |change: fn(&mut Usage)| {
            let mut usage = usage;
            change(&mut usage);
            limits.exceeded_by(&usage)
        };
        assert_eq!(with(|_| ()), None);
        assert_eq!(
            with(|usage| usage.cpu += Duration::from_millis(1)),
            Some(Exceeded::Cpu)
        );
        assert_eq!(with(|usage| usage.memory += 1), Some(Exceeded::Memory));
        assert_eq!(
            with(|usage| usage.processes += 1),
            Some(Exceeded::Processes)
        );
        assert_eq!(Limits::default().exceeded_by(&usage), None);
    }

    #[test]
    fn this_process_is_seen_to_use_something() {
        let own = i32::try_from(std::process::id()).unwrap();
        let (_, threads) = times_and_threads(own).unwrap();
        assert!(threads >= 1);
        assert!(own_memory(own).unwrap() > 0);
        assert!(proportional(own).unwrap() > 0);
    }
}
