//! What a daemon is told to do: plain values, checked and complete.
//!
//! The command line reads them from file, environment and flags and fills in every default; whoever holds a
//! [`Settings`] need not ask again whether it makes sense. Nothing here reads a file, a clock or the environment.
//! Secrets stand in [`Secret`], which never prints itself.

mod confinement;
mod handlers;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tenure_core::pattern::Pattern;

pub use confinement::{Account, Confinement, Exceeded, ProcessLimits};
pub use handlers::{
    Accepts, AfterLostCommits, Authorities, DEFAULT_DELAY, DEFAULT_HOLD, DEFAULT_MAX_DELAY,
    DEFAULT_PATH, ExecSettings, Handler, HandlerKind, Handlers, HttpSettings, ProcessSettings,
    RetryRule, Rule,
};
pub use tenure_protocol::lines::MOST_JOBS;
pub use tenure_protocol::verdict::ExitMeaning;
pub use tenure_store::claim::Durability;

/// Everything that one daemon is told.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where the jobs are.
    pub database: Database,
    /// This daemon as a worker.
    pub worker: Worker,
    /// Slots reserved for some job types; whatever no pool names runs in the slots of `worker.concurrency`.
    pub pools: Vec<Pool>,
    /// What runs for which job type.
    pub handlers: Handlers,
    /// The HTTP interface.
    pub api: Api,
    /// The log.
    pub log: Log,
}

impl Settings {
    /// A daemon that only measures: these handlers in `schema`, on so many connections with so many slots, and nothing else.
    #[must_use]
    pub fn for_bench(
        database: Database,
        schema: &str,
        connections: usize,
        concurrency: u32,
        handlers: Handlers,
    ) -> Self {
        Self {
            database: Database {
                schema: schema.to_owned(),
                pool_size: connections,
                ..database
            },
            worker: Worker {
                name: "bench".to_owned(),
                version: String::new(),
                concurrency,
                lease_ttl: Duration::from_secs(60),
                heartbeat: Duration::from_secs(3),
                state_dir: None,
                drain_timeout: Duration::from_secs(25),
                poll_interval: Duration::from_secs(3),
                max_result: 1 << 20,
                log_tail: 16 << 10,
            },
            pools: Vec::new(),
            handlers,
            api: Api {
                listen: None,
                token: None,
                max_body: 4 << 20,
                public_url: None,
            },
            log: Log {
                format: LogFormat::Auto,
                level: "info".to_owned(),
            },
        }
    }
}

/// Where the jobs are, and how to get there.
#[derive(Debug, Clone, PartialEq)]
pub struct Database {
    /// `postgres://user@host1,host2:port/name?parameter=value`; it may hold a password.
    pub url: Secret,
    /// Past the pooler: for LISTEN, the heart and migrations. `None`: `url` serves for them too.
    pub direct_url: Option<Secret>,
    /// Password for both addresses; wins over one that stands in them.
    pub password: Option<Secret>,
    /// The schema that holds tenure's tables.
    pub schema: String,
    /// Connections of the pool that claims and completes; the heart has its own.
    pub pool_size: usize,
    /// What stands between this daemon and PostgreSQL.
    pub pooler: Pooler,
    /// From the first packet until the server is ready for a query, for each attempt to connect.
    pub connect_timeout: Duration,
    /// The longest that one statement may take on the server.
    pub statement_timeout: Duration,
}

/// What stands between this daemon and PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pooler {
    /// Nothing, or a pooler in session mode.
    #[default]
    None,
    /// A pooler that hands the connection on after each transaction, such as PgBouncer: no named statements.
    Transaction,
}

/// This daemon as a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    /// A label for people. The identity is a fresh random id at each start.
    pub name: String,
    /// The version on which a release routes.
    pub version: String,
    /// Jobs that run at once outside the named pools.
    pub concurrency: u32,
    /// For how long the database leaves this worker its jobs after a heartbeat.
    pub lease_ttl: Duration,
    /// From one heartbeat to the next.
    pub heartbeat: Duration,
    /// Keeps what has ended and is not yet proven safe; `None`: only memory does.
    pub state_dir: Option<PathBuf>,
    /// How long a stop waits for running jobs before it ends their handlers.
    pub drain_timeout: Duration,
    /// How often an idle worker looks for jobs, whatever the notifications say.
    pub poll_interval: Duration,
    /// The longest result that is kept whole, in bytes; a longer one is kept as a text without its middle.
    pub max_result: usize,
    /// How much of the end of a handler's log is kept with each attempt, in bytes.
    pub log_tail: usize,
}

/// Slots reserved for some job types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Names the pool in metrics and in the list of workers.
    pub name: String,
    /// Which job types; no two pools name the same type equally well.
    pub job_types: Vec<Pattern>,
    /// Jobs that run at once in this pool.
    pub concurrency: u32,
}

/// The HTTP interface.
#[derive(Debug, Clone, PartialEq)]
pub struct Api {
    /// Where it listens; `None`: nowhere.
    pub listen: Option<Listen>,
    /// What `Authorization: Bearer` must hold. Always there when `listen` is reachable from other machines.
    pub token: Option<Secret>,
    /// The longest body of a request, in bytes.
    pub max_body: usize,
    /// Under which address handlers reach it, without a slash at the end.
    pub public_url: Option<String>,
}

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// An IP address and port.
    Tcp(std::net::SocketAddr),
    /// A Unix socket, for this user and group only.
    Unix(PathBuf),
}

/// The log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// How it is written.
    pub format: LogFormat,
    /// A level, or directives such as `info,tenure_runtime::heart=debug`.
    pub level: String,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// To the journal under systemd, as text on a terminal, else as JSON.
    #[default]
    Auto,
    /// One JSON object a line on standard error.
    Json,
    /// Text on standard error.
    Text,
}

/// A text that never prints itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that sends it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_never_print_themselves() {
        let text = format!("{:?}", Secret::new("hunter2"));
        assert!(!text.contains("hunter2"), "{text}");
    }
}
