//! What runs for which job type.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use tenure_core::pattern::{self, Pattern};
use tenure_core::retry::Policy;
use tenure_protocol::verdict::ExitCodes;
use tenure_store::claim::Durability;

use super::{Confinement, Secret};

/// Wait after the first failed attempt, where no rule says it.
pub const DEFAULT_DELAY: Duration = Duration::from_secs(60);
/// The longest wait between attempts, where no rule says it.
pub const DEFAULT_MAX_DELAY: Duration = Duration::from_secs(3600);

/// How long a job that was accepted is its handler's without a word from it, where nothing says it.
pub const DEFAULT_HOLD: Duration = Duration::from_secs(3600);

/// Where a handler's process looks for programs when its `env` does not name `PATH`.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What runs for which job type.
///
/// A rule may say only part of what a handler needs. **For a job type, each single setting comes from the most
/// specific rule that matches and says it**: the exact name first, then the pattern with the longest literal text
/// before its first `*`. So `[handlers."report-*".retry]` gives a retry policy to the handlers that
/// `[handlers.report-daily]` and `[handlers.report-weekly]` describe. The command or address with its own settings
/// (`exec`, `http`, `noop`) is one setting and is never mixed from two rules.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Handlers {
    /// In any order; no two of them match the same job type equally well.
    pub rules: Vec<Rule>,
}

impl Handlers {
    /// What runs for `job_type`; `None` if no rule says it, and then this daemon must not claim such jobs.
    #[must_use]
    pub fn resolve(&self, job_type: &str) -> Option<Handler> {
        Some(Handler {
            kind: self.setting(job_type, |rule| rule.kind.clone())?,
            retry: self.retry(job_type),
            after_lost_commits: self
                .setting(job_type, |rule| rule.after_lost_commits)
                .unwrap_or_default(),
            durability: self.setting(job_type, |rule| rule.durability),
        })
    }

    /// Handlers that accept jobs are told to say how they ended at this address, with the id of the job behind it.
    pub fn call_back_at(&mut self, before: &str) {
        for rule in &mut self.rules {
            if let Some(HandlerKind::Http(http)) = &mut rule.kind {
                http.callback = Some(before.to_owned());
            }
        }
    }

    /// The section that says what runs for `job_type`.
    #[must_use]
    pub fn section(&self, job_type: &str) -> Option<&Pattern> {
        self.setting(job_type, |rule| rule.kind.as_ref().map(|_| &rule.pattern))
    }

    /// The longest time from TERM to KILL of any of them; zero where none is a process.
    #[must_use]
    pub fn longest_grace(&self) -> Duration {
        let graces = self.rules.iter().filter_map(|rule| match &rule.kind {
            Some(HandlerKind::Exec(exec)) => Some(exec.kill_grace),
            Some(HandlerKind::Process(process)) => Some(process.kill_grace),
            _ => None,
        });
        graces.max().unwrap_or_default()
    }

    /// Whether any of them is a process on this machine.
    #[must_use]
    pub fn start_processes(&self) -> bool {
        let kinds = || self.rules.iter().filter_map(|rule| rule.kind.as_ref());
        kinds().any(|kind| matches!(kind, HandlerKind::Exec(_) | HandlerKind::Process(_)))
    }

    /// The patterns of the job types that this daemon can run, as it registers them.
    pub fn job_types(&self) -> impl Iterator<Item = &Pattern> {
        self.rules
            .iter()
            .filter(|rule| rule.kind.is_some())
            .map(|rule| &rule.pattern)
    }

    /// The numbers about retries that hold for `job_type`, all of them filled in. A `max_delay` that another rule than the
    /// one of `delay` gives is raised to it.
    #[must_use]
    pub fn retry_rule(&self, job_type: &str) -> RetryRule {
        let max_attempts = self.setting(job_type, |rule| rule.retry.max_attempts);
        let delay = self
            .setting(job_type, |rule| rule.retry.delay)
            .unwrap_or(DEFAULT_DELAY);
        let max_delay = self
            .setting(job_type, |rule| rule.retry.max_delay)
            .unwrap_or(DEFAULT_MAX_DELAY);
        RetryRule {
            max_attempts: Some(max_attempts.unwrap_or_else(|| Policy::default().max_attempts())),
            delay: Some(delay),
            max_delay: Some(max_delay.max(delay)),
        }
    }

    fn retry(&self, job_type: &str) -> Policy {
        let RetryRule {
            max_attempts: Some(max_attempts),
            delay: Some(delay),
            max_delay: Some(max_delay),
        } = self.retry_rule(job_type)
        else {
            return Policy::default();
        };
        // Each number was checked on its own when the settings were read.
        Policy::new(max_attempts, delay, max_delay).unwrap_or_default()
    }

    /// One setting, from the most specific rule that matches and says it.
    fn setting<'a, T>(&'a self, job_type: &str, get: impl Fn(&'a Rule) -> Option<T>) -> Option<T> {
        let saying: Vec<(&Pattern, T)> = self
            .rules
            .iter()
            .filter_map(|rule| Some((&rule.pattern, get(rule)?)))
            .collect();
        let index = pattern::select(saying.iter().map(|(pattern, _)| *pattern), job_type)?;
        saying.into_iter().nth(index).map(|(_, value)| value)
    }
}

/// One `[handlers.PATTERN]` section.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// The job types that it is about.
    pub pattern: Pattern,
    /// What runs; `None`: a less specific rule says it.
    pub kind: Option<HandlerKind>,
    /// What this rule says about retries.
    pub retry: RetryRule,
    /// What becomes of a completion that a switch lost; `None`: a less specific rule says it.
    pub after_lost_commits: Option<AfterLostCommits>,
    /// What claims and completions wait for; `None`: a less specific rule says it.
    pub durability: Option<Durability>,
}

/// What one rule says about retries; `None`: a less specific rule, or the default, says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetryRule {
    /// Attempts until the job is a dead letter.
    pub max_attempts: Option<i32>,
    /// Wait after the first failed attempt; it doubles with each further one.
    pub delay: Option<Duration>,
    /// The longest wait.
    pub max_delay: Option<Duration>,
}

/// What runs, and how.
#[derive(Debug, Clone, PartialEq)]
pub enum HandlerKind {
    /// One process for each job.
    Exec(ExecSettings),
    /// One `POST` for each job.
    Http(HttpSettings),
    /// Processes that do many jobs each.
    Process(ProcessSettings),
    /// Nothing: the job is completed at once. For `bench` and for tests.
    Noop,
}

/// One process for each job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecSettings {
    /// Program and arguments, never through a shell. The program was there when the settings were checked.
    pub command: Vec<String>,
    /// Working directory; `None`: the daemon's.
    pub cwd: Option<PathBuf>,
    /// Names of the daemon's environment variables that the process gets. `PATH` is [`DEFAULT_PATH`] unless it is named.
    pub env: Vec<String>,
    /// As whom it runs, and what it may use.
    pub confinement: Box<Confinement>,
    /// From the start of the process until it is ended.
    pub timeout: Duration,
    /// From TERM to KILL.
    pub kill_grace: Duration,
    /// What an exit code means, where it differs from the defaults (0, 65, 75, others).
    pub exit_codes: ExitCodes,
}

/// Processes that do many jobs each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Program and arguments, never through a shell. The program was there when the settings were checked.
    pub command: Vec<String>,
    /// Working directory; `None`: the daemon's.
    pub cwd: Option<PathBuf>,
    /// Names of the daemon's environment variables that a process gets. `PATH` is [`DEFAULT_PATH`] unless it is named.
    pub env: Vec<String>,
    /// As whom each runs, and what each may use.
    pub confinement: Box<Confinement>,
    /// So many processes at most; at least 1.
    pub processes: usize,
    /// So many jobs at once in each, if the process says that it takes as many; at least 1.
    pub concurrency: usize,
    /// From when a process has a job until the job is cancelled.
    pub timeout: Duration,
    /// From the word that a job is cancelled, or that no further one comes, until the process is killed.
    pub kill_grace: Duration,
    /// From the start of a process until it has to say that it is ready.
    pub hello_timeout: Duration,
    /// A process is replaced after so many jobs.
    pub max_jobs: Option<u64>,
    /// A process is replaced when it is so old.
    pub max_age: Option<Duration>,
    /// A process is replaced when it holds more memory than that, in bytes.
    pub max_memory: Option<u64>,
}

/// One `POST` for each job.
#[derive(Debug, Clone, PartialEq)]
pub struct HttpSettings {
    /// Where to post; it may hold a secret in its query.
    pub url: Secret,
    /// The Unix socket to connect to, whatever host the address names.
    pub socket: Option<PathBuf>,
    /// From sending until the last byte of the answer.
    pub timeout: Duration,
    /// Until the connection stands.
    pub connect_timeout: Duration,
    /// From the head of the answer until its last byte; `None`: only `timeout` bounds it.
    pub body_timeout: Option<Duration>,
    /// How long a connection is kept for another request; zero: each request has its own.
    pub idle_timeout: Duration,
    /// The most of an answer that is read, in bytes; no more than results may have.
    pub max_response: usize,
    /// The most that the headers of an answer may have together, in bytes.
    pub max_headers: usize,
    /// Sign each request by the Standard Webhooks rules, one secret a line.
    pub secret: Option<Secret>,
    /// The authorities to trust, instead of the system's.
    pub authorities: Option<Authorities>,
    /// Where connections may lead; empty: anywhere.
    pub allow: Vec<IpNet>,
    /// What becomes of jobs that it accepts and finishes later.
    pub accepts: Accepts,
    /// Where it says so, before the id of the job: `https://host/v1/jobs/`.
    pub callback: Option<String>,
    /// Further headers of each request.
    pub headers: BTreeMap<String, Secret>,
}

/// What becomes of jobs that a handler accepts (202) and finishes later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepts {
    /// How long such a job is its handler's without a word from it.
    pub hold: Duration,
    /// The most that it may have at once by way of one daemon; beyond that no more are claimed for it.
    pub max_open: usize,
}

impl Default for Accepts {
    fn default() -> Self {
        Self {
            hold: DEFAULT_HOLD,
            max_open: 10_000,
        }
    }
}

/// Certificates of authorities.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Authorities {
    /// Where they were read.
    pub file: PathBuf,
    /// In PEM.
    pub pem: String,
}

impl HttpSettings {
    /// A handler at this address, with all else as it is when the configuration does not say it.
    #[must_use]
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: Secret::new(url),
            socket: None,
            timeout: Duration::from_secs(3600),
            connect_timeout: Duration::from_secs(10),
            body_timeout: None,
            idle_timeout: Duration::from_millis(500),
            max_response: usize::MAX,
            max_headers: 64 << 10,
            secret: None,
            authorities: None,
            allow: Vec::new(),
            accepts: Accepts::default(),
            callback: None,
            headers: BTreeMap::new(),
        }
    }
}

/// What becomes of a job whose completion a switch of the primary lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AfterLostCommits {
    /// The completion is written again: the job's effects are outside this database.
    #[default]
    Keep,
    /// The job runs again: its effects were in this database and were lost with the completion.
    Rerun,
}

/// What runs for one job type, put together from all rules that match it.
#[derive(Debug, Clone, PartialEq)]
pub struct Handler {
    /// What runs.
    pub kind: HandlerKind,
    /// When it runs again after a failure.
    pub retry: Policy,
    /// What becomes of a completion that a switch lost.
    pub after_lost_commits: AfterLostCommits,
    /// What claims and completions wait for; `None`: what the database is configured for.
    pub durability: Option<Durability>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn exec(program: &str) -> HandlerKind {
        HandlerKind::Exec(ExecSettings {
            command: vec![program.to_owned()],
            cwd: None,
            env: Vec::new(),
            confinement: Box::default(),
            timeout: Duration::from_secs(3600),
            kill_grace: Duration::from_secs(10),
            exit_codes: BTreeMap::new(),
        })
    }

    fn rule(pattern: &str, kind: Option<HandlerKind>, retry: RetryRule) -> Rule {
        Rule {
            pattern: Pattern::new(pattern).unwrap(),
            kind,
            retry,
            after_lost_commits: None,
            durability: None,
        }
    }

    #[test]
    fn each_setting_comes_from_the_most_specific_rule_that_says_it() {
        let five = RetryRule {
            max_attempts: Some(5),
            delay: Some(Duration::from_secs(7)),
            ..RetryRule::default()
        };
        let two = RetryRule {
            max_attempts: Some(2),
            ..RetryRule::default()
        };
        let handlers = Handlers {
            rules: vec![
                rule("*", Some(HandlerKind::Noop), RetryRule::default()),
                rule("report-*", None, five),
                rule("report-daily", Some(exec("daily")), two),
                rule(
                    "report-generation",
                    Some(exec("generate")),
                    RetryRule::default(),
                ),
            ],
        };
        let policy = |attempts, delay| {
            Policy::new(attempts, Duration::from_secs(delay), DEFAULT_MAX_DELAY).unwrap()
        };
        let of = |job_type| {
            handlers
                .resolve(job_type)
                .map(|handler| (handler.kind, handler.retry))
                .unwrap()
        };
        assert_eq!(of("report-daily"), (exec("daily"), policy(2, 7)));
        assert_eq!(of("report-generation"), (exec("generate"), policy(5, 7)));
        assert_eq!(of("report-other"), (HandlerKind::Noop, policy(5, 7)));
        assert_eq!(of("mail"), (HandlerKind::Noop, Policy::default()));
        let runnable: Vec<&str> = handlers.job_types().map(Pattern::as_str).collect();
        assert_eq!(runnable, ["*", "report-daily", "report-generation"]);
    }

    #[test]
    fn a_rule_about_retries_alone_runs_nothing() {
        let handlers = Handlers {
            rules: vec![rule("report-*", None, RetryRule::default())],
        };
        assert_eq!(handlers.resolve("report-daily"), None);
    }

    #[test]
    fn a_long_delay_raises_the_default_cap() {
        let delay = DEFAULT_MAX_DELAY * 2;
        let retry = RetryRule {
            delay: Some(delay),
            ..RetryRule::default()
        };
        let handlers = Handlers {
            rules: vec![rule("slow", Some(HandlerKind::Noop), retry)],
        };
        assert_eq!(
            handlers.resolve("slow").unwrap().retry,
            Policy::new(5, delay, delay).unwrap()
        );
    }
}
