//! The sections and keys of `tenure.toml`, with their defaults, as they are written.
//!
//! Whatever is not named here is refused. What the values mean together is decided in `resolve`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::confinement::{LimitsSection, Name, Nice};
use super::value::{Count, Size, Span};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Schema {
    pub(crate) database: DatabaseSection,
    pub(crate) worker: WorkerSection,
    pub(crate) pools: Vec<PoolSection>,
    pub(crate) handlers: BTreeMap<String, HandlerSection>,
    pub(crate) api: ApiSection,
    pub(crate) log: LogSection,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DatabaseSection {
    pub(crate) url: Option<String>,
    pub(crate) direct_url: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) password_file: Option<PathBuf>,
    pub(crate) schema: String,
    pub(crate) pool_size: Count,
    pub(crate) pooler: PoolerName,
    pub(crate) connect_timeout: Span,
    pub(crate) statement_timeout: Span,
}

impl Default for DatabaseSection {
    fn default() -> Self {
        Self {
            url: None,
            direct_url: None,
            password: None,
            password_file: None,
            schema: "tenure".to_owned(),
            pool_size: Count(2),
            pooler: PoolerName::None,
            connect_timeout: seconds(5),
            statement_timeout: seconds(10),
        }
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PoolerName {
    None,
    Transaction,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct WorkerSection {
    pub(crate) name: Option<String>,
    pub(crate) version: String,
    pub(crate) concurrency: Count,
    pub(crate) lease_ttl: Option<Span>,
    pub(crate) heartbeat: Span,
    pub(crate) state_dir: Option<PathBuf>,
    pub(crate) drain_timeout: Span,
    pub(crate) poll_interval: Span,
    pub(crate) max_result: Size,
    pub(crate) log_tail: Size,
}

impl Default for WorkerSection {
    fn default() -> Self {
        Self {
            name: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            concurrency: Count(16),
            lease_ttl: None,
            heartbeat: seconds(3),
            state_dir: None,
            drain_timeout: seconds(25),
            poll_interval: seconds(3),
            max_result: Size(1 << 20),
            log_tail: Size(16 << 10),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PoolSection {
    pub(crate) name: String,
    pub(crate) job_types: Vec<String>,
    pub(crate) concurrency: Count,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HandlerSection {
    pub(crate) exec: Option<ExecSection>,
    pub(crate) http: Option<HttpSection>,
    pub(crate) process: Option<ProcessSection>,
    pub(crate) noop: Option<NoopSection>,
    pub(crate) retry: RetrySection,
    pub(crate) after_lost_commits: Option<AfterLostCommitsName>,
    pub(crate) durability: Option<DurabilityName>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExecSection {
    pub(crate) command: Vec<String>,
    #[serde(default)]
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: Vec<String>,
    #[serde(default)]
    pub(crate) user: Option<Name>,
    #[serde(default)]
    pub(crate) group: Option<Name>,
    #[serde(default)]
    pub(crate) nice: Option<Nice>,
    #[serde(default)]
    pub(crate) private_tmp: bool,
    #[serde(default)]
    pub(crate) limits: LimitsSection,
    #[serde(default = "an_hour")]
    pub(crate) timeout: Span,
    #[serde(default = "ten_seconds")]
    pub(crate) kill_grace: Span,
    #[serde(default)]
    pub(crate) exit_codes: BTreeMap<String, ExitName>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ExitName {
    Done,
    Retry,
    Dead,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HttpSection {
    pub(crate) url: String,
    #[serde(default)]
    pub(crate) socket: Option<PathBuf>,
    #[serde(default = "an_hour")]
    pub(crate) timeout: Span,
    #[serde(default = "ten_seconds")]
    pub(crate) connect_timeout: Span,
    #[serde(default)]
    pub(crate) body_timeout: Option<Span>,
    #[serde(default = "half_a_second")]
    pub(crate) idle_timeout: Span,
    #[serde(default)]
    pub(crate) max_response: Option<Size>,
    #[serde(default = "kib_64")]
    pub(crate) max_headers: Size,
    #[serde(default)]
    pub(crate) secret_file: Option<PathBuf>,
    #[serde(default)]
    pub(crate) ca_file: Option<PathBuf>,
    #[serde(default)]
    pub(crate) allow: Vec<String>,
    #[serde(default = "an_hour")]
    pub(crate) hold: Span,
    #[serde(default = "ten_thousand")]
    pub(crate) max_open: Count,
    #[serde(default)]
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProcessSection {
    pub(crate) command: Vec<String>,
    #[serde(default)]
    pub(crate) cwd: Option<PathBuf>,
    #[serde(default)]
    pub(crate) env: Vec<String>,
    #[serde(default)]
    pub(crate) user: Option<Name>,
    #[serde(default)]
    pub(crate) group: Option<Name>,
    #[serde(default)]
    pub(crate) nice: Option<Nice>,
    #[serde(default)]
    pub(crate) private_tmp: bool,
    #[serde(default)]
    pub(crate) limits: LimitsSection,
    #[serde(default = "one")]
    pub(crate) processes: Count,
    #[serde(default = "one")]
    pub(crate) concurrency: Count,
    #[serde(default = "an_hour")]
    pub(crate) timeout: Span,
    #[serde(default = "ten_seconds")]
    pub(crate) kill_grace: Span,
    #[serde(default = "ten_seconds")]
    pub(crate) hello_timeout: Span,
    #[serde(default)]
    pub(crate) max_jobs: Option<Count>,
    #[serde(default)]
    pub(crate) max_age: Option<Span>,
    #[serde(default)]
    pub(crate) max_memory: Option<Size>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoopSection {}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RetrySection {
    pub(crate) max_attempts: Option<Count>,
    pub(crate) delay: Option<Span>,
    pub(crate) max_delay: Option<Span>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DurabilityName {
    Local,
    Replicated,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AfterLostCommitsName {
    Keep,
    Rerun,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ApiSection {
    pub(crate) listen: String,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) max_body: Size,
    pub(crate) public_url: Option<String>,
}

impl Default for ApiSection {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7171".to_owned(),
            token_file: None,
            max_body: Size(4 << 20),
            public_url: None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LogSection {
    pub(crate) format: LogFormatName,
    pub(crate) level: String,
}

impl Default for LogSection {
    fn default() -> Self {
        Self {
            format: LogFormatName::Auto,
            level: "info".to_owned(),
        }
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormatName {
    Auto,
    Json,
    Text,
}

const fn seconds(count: u64) -> Span {
    Span(Duration::from_secs(count))
}

const fn one() -> Count {
    Count(1)
}

const fn an_hour() -> Span {
    seconds(3600)
}

const fn ten_seconds() -> Span {
    seconds(10)
}

const fn half_a_second() -> Span {
    Span(Duration::from_millis(500))
}

const fn kib_64() -> Size {
    Size(64 << 10)
}

const fn ten_thousand() -> Count {
    Count(10_000)
}
