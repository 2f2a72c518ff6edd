//! As whom a handler's process runs, and what it may use.

use std::fmt;
use std::time::Duration;

/// As whom a handler's process runs, and what it may use. The default: as the daemon, and without limits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Confinement {
    /// Whom it runs as; `None`: the daemon's user and groups.
    pub account: Option<Account>,
    /// How it yields to others, from -20 to 19; `None`: as the daemon does.
    pub nice: Option<i32>,
    /// It has a folder of its own for temporary files, removed after it.
    pub private_tmp: bool,
    /// What it may use.
    pub limits: ProcessLimits,
}

/// A user with its groups, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// As it was written, for people.
    pub name: String,
    /// The user.
    pub user: u32,
    /// Its first group.
    pub group: u32,
    /// All its groups.
    pub groups: Vec<u32>,
}

/// What a handler may use, all its processes together where nothing else is said; `None`: any amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProcessLimits {
    /// Time of processors, whole seconds.
    pub cpu: Option<Duration>,
    /// Memory, in bytes.
    pub memory: Option<u64>,
    /// Processes and threads at once.
    pub processes: Option<u64>,
    /// Open files, for each process.
    pub open_files: Option<u64>,
    /// The length of a file that it writes, in bytes.
    pub file_size: Option<u64>,
    /// What it may write to its standard output and standard error, in bytes. Of an `exec` handler only.
    pub output: Option<u64>,
}

/// A limit that a handler went beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exceeded {
    /// [`ProcessLimits::cpu`].
    Cpu,
    /// [`ProcessLimits::memory`].
    Memory,
    /// [`ProcessLimits::processes`].
    Processes,
    /// [`ProcessLimits::file_size`].
    FileSize,
    /// [`ProcessLimits::output`].
    Output,
}

impl ProcessLimits {
    /// Whether there is none.
    #[must_use]
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Why a handler was killed, for people.
    #[must_use]
    pub fn explain(&self, exceeded: Exceeded) -> String {
        let bytes = |limit: Option<u64>| Bytes(limit.unwrap_or(0)).to_string();
        let (did, key, limit) = match exceeded {
            Exceeded::Cpu => {
                let limit = self.cpu.unwrap_or_default();
                let limit = humantime::format_duration(limit).to_string();
                ("using more processor time", "cpu", limit)
            }
            Exceeded::Memory => ("using more memory", "memory", bytes(self.memory)),
            Exceeded::Processes => {
                let limit = self.processes.unwrap_or(0).to_string();
                ("running more processes", "processes", limit)
            }
            Exceeded::FileSize => ("writing a longer file", "file_size", bytes(self.file_size)),
            Exceeded::Output => ("writing more output", "output", bytes(self.output)),
        };
        format!("killed for {did} than limits.{key} ({limit})")
    }
}

/// A number of bytes as it is written in the configuration.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = [(30, "GiB"), (20, "MiB"), (10, "KiB")]
            .into_iter()
            .find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift)
            .unwrap_or((0, "B"));
        write!(f, "{}{unit}", self.0 >> shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_was_exceeded_is_named_as_it_was_written() {
        let limits = ProcessLimits {
            cpu: Some(Duration::from_secs(90)),
            memory: Some(512 << 20),
            ..ProcessLimits::default()
        };
        let said = |exceeded| limits.explain(exceeded);
        assert_eq!(
            said(Exceeded::Memory),
            "killed for using more memory than limits.memory (512MiB)"
        );
        assert_eq!(
            said(Exceeded::Cpu),
            "killed for using more processor time than limits.cpu (1m 30s)"
        );
    }
}
