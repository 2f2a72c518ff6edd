//! From what was written to what holds: defaults that depend on others, files that are named, values that must fit.
//!
//! Every problem is collected, so that one run of `check-config` shows all of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tenure_core::lease::limits::{Limits, LimitsError};
use tenure_runtime::settings::{
    Api, Database, Listen, Log, LogFormat, Pool, Pooler, Secret, Settings, Worker,
};

use tracing_subscriber::EnvFilter;

use super::address;
use super::handlers;
use super::problem::{ConfigError, Problem};
use super::schema::{
    ApiSection, DatabaseSection, LogFormatName, LogSection, PoolSection, PoolerName, Schema,
    WorkerSection,
};
use super::sources::Sources;

/// Where the database is; the rest of the configuration is read but not looked into.
pub(crate) fn database(
    sources: &Sources,
    schema: &DatabaseSection,
) -> Result<Database, ConfigError> {
    let mut check = Check::new(sources);
    let database = check.database(schema);
    check.end(database)
}

/// Everything that a daemon is told. Files that are named are read, programs are looked for.
pub(crate) fn settings(sources: &Sources, schema: Schema) -> Result<Settings, ConfigError> {
    let mut check = Check::new(sources);
    let database = check.database(&schema.database);
    let one_host = database
        .as_ref()
        .is_some_and(|database| address::names_one_host(database.url.expose()));
    let worker = check.worker(schema.worker, one_host);
    let pools = check.pools(schema.pools);
    let mut handlers = handlers::resolve(&mut check, schema.handlers);
    if let Err(error) = Limits::new(worker.lease_ttl, worker.heartbeat, handlers.longest_grace()) {
        let key = if matches!(error, LimitsError::TtlTooShort { .. }) {
            "lease_ttl"
        } else {
            "heartbeat"
        };
        check.refuse(&["worker", key], error.to_string());
    }
    let api = check.api(&schema.api);
    if let Some(url) = api.as_ref().and_then(|api| api.public_url.as_ref()) {
        handlers.call_back_at(&format!("{url}/v1/jobs/"));
    }
    let log = check.log(schema.log);
    let settings = database.zip(api).map(|(database, api)| Settings {
        database,
        worker,
        pools,
        handlers,
        api,
        log,
    });
    check.end(settings)
}

/// Collects what is wrong.
pub(crate) struct Check<'a> {
    sources: &'a Sources,
    problems: Vec<Problem>,
}

impl<'a> Check<'a> {
    fn new(sources: &'a Sources) -> Self {
        Self {
            sources,
            problems: Vec::new(),
        }
    }

    /// Notes that the value at `path` cannot be used.
    pub(crate) fn refuse(&mut self, path: &[&str], what: impl Into<String>) {
        let path: Vec<String> = path.iter().map(|part| (*part).to_owned()).collect();
        self.problems.push(self.sources.problem(&path, what));
    }

    fn end<T>(self, value: Option<T>) -> Result<T, ConfigError> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => Err(ConfigError(self.problems)),
        }
    }

    /// Reads a secret from the file that the key at `path` names.
    pub(crate) fn secret_file(&mut self, path: &[&str], file: &Path) -> Option<Secret> {
        match read_secret(file) {
            Ok(secret) => Some(secret),
            Err(why) => {
                self.refuse(path, format!("{} {why}", file.display()));
                None
            }
        }
    }

    fn database(&mut self, section: &DatabaseSection) -> Option<Database> {
        let Some(url) = &section.url else {
            self.refuse(
                &["database", "url"],
                "no database is named; set it in the file, or TENURE_DATABASE__URL=postgres://user@host:5432/name",
            );
            return None;
        };
        for (key, url) in [
            ("url", Some(url)),
            ("direct_url", section.direct_url.as_ref()),
        ] {
            if let Some(Err(why)) = url.map(|url| address::check(url)) {
                self.refuse(&["database", key], why);
            }
        }
        if let Err(why) = schema_name(&section.schema) {
            self.refuse(&["database", "schema"], why);
        }
        Some(Database {
            url: Secret::new(url),
            direct_url: section.direct_url.as_ref().map(Secret::new),
            password: self.password(section),
            schema: section.schema.clone(),
            pool_size: section.pool_size.0 as usize,
            pooler: match section.pooler {
                PoolerName::None => Pooler::None,
                PoolerName::Transaction => Pooler::Transaction,
            },
            connect_timeout: self
                .positive(&["database", "connect_timeout"], section.connect_timeout.0),
            statement_timeout: self.statement_timeout(section.statement_timeout.0),
        })
    }

    /// The server counts it in milliseconds up to 2^31, and takes zero of them for none at all.
    fn statement_timeout(&mut self, value: Duration) -> Duration {
        if !(1..=i32::MAX.unsigned_abs().into()).contains(&value.as_millis()) {
            self.refuse(
                &["database", "statement_timeout"],
                "must be from 1ms to 24 days",
            );
        }
        value
    }

    /// The password by `password`, by `password_file`, or by the systemd credential `tenure-database-password`.
    fn password(&mut self, section: &DatabaseSection) -> Option<Secret> {
        match (&section.password, &section.password_file) {
            (Some(_), Some(_)) => {
                self.refuse(
                    &["database", "password_file"],
                    "give either `password` or `password_file`, not both",
                );
                None
            }
            (Some(password), None) => Some(Secret::new(password)),
            (None, Some(file)) => self.secret_file(&["database", "password_file"], file),
            (None, None) => {
                let file = self.sources.credential("tenure-database-password")?;
                self.secret_file(&["database", "password"], &file)
            }
        }
    }

    fn worker(&mut self, section: WorkerSection, one_host: bool) -> Worker {
        let name = section.name.unwrap_or_else(host_name);
        if name.trim().is_empty()
            || name.chars().count() > 200
            || name.chars().any(char::is_control)
        {
            self.refuse(
                &["worker", "name"],
                "a name of 1 to 200 printable characters is expected",
            );
        }
        let alone = Duration::from_secs(if one_host { 60 } else { 30 });
        Worker {
            name,
            version: section.version,
            concurrency: section.concurrency.0,
            lease_ttl: section.lease_ttl.map_or(alone, |span| span.0),
            heartbeat: section.heartbeat.0,
            state_dir: section.state_dir,
            drain_timeout: section.drain_timeout.0,
            poll_interval: self.positive(&["worker", "poll_interval"], section.poll_interval.0),
            max_result: section.max_result.0,
            log_tail: section.log_tail.0,
        }
    }

    fn pools(&mut self, sections: Vec<PoolSection>) -> Vec<Pool> {
        let mut names = BTreeSet::new();
        let mut pools = Vec::new();
        let mut wanted = Vec::new();
        for (index, section) in sections.into_iter().enumerate() {
            let index = index.to_string();
            if section.name.trim().is_empty() || section.name == "default" {
                self.refuse(
                    &["pools", &index, "name"],
                    "a name other than \"\" and \"default\" is expected",
                );
            }
            if !names.insert(section.name.clone()) {
                self.refuse(
                    &["pools", &index, "name"],
                    format!("two pools are called \"{}\"", section.name),
                );
            }
            if section.job_types.is_empty() {
                self.refuse(
                    &["pools", &index, "job_types"],
                    "at least one job type or pattern is expected",
                );
            }
            pools.push((section.name, section.concurrency.0));
            for (place, text) in section.job_types.into_iter().enumerate() {
                wanted.push((pools.len() - 1, place, text));
            }
        }
        let texts: Vec<String> = wanted.iter().map(|(_, _, text)| text.clone()).collect();
        let mut job_types = vec![Vec::new(); pools.len()];
        for ((pool, place, _), pattern) in wanted.into_iter().zip(handlers::patterns(&texts)) {
            match pattern {
                Ok(pattern) => job_types[pool].push(pattern),
                Err(why) => self.refuse(
                    &["pools", &pool.to_string(), "job_types", &place.to_string()],
                    why,
                ),
            }
        }
        let pools = pools.into_iter().zip(job_types);
        pools
            .map(|((name, concurrency), job_types)| Pool {
                name,
                job_types,
                concurrency,
            })
            .collect()
    }

    fn api(&mut self, section: &ApiSection) -> Option<Api> {
        let token = section
            .token_file
            .as_ref()
            .and_then(|file| self.secret_file(&["api", "token_file"], file));
        let listen = match listen(&section.listen) {
            Ok(listen) => listen,
            Err(why) => {
                self.refuse(&["api", "listen"], why);
                return None;
            }
        };
        if let Some(Listen::Tcp(address)) = &listen
            && !address.ip().is_loopback()
            && section.token_file.is_none()
        {
            self.refuse(
                &["api", "listen"],
                format!("{address} can be reached from other machines, so api.token_file must name a file with a token"),
            );
        }
        Some(Api {
            listen,
            token,
            max_body: section.max_body.0,
            public_url: section
                .public_url
                .as_ref()
                .and_then(|url| self.public_url(url)),
        })
    }

    /// What handlers are told to post to, without the slash at its end.
    fn public_url(&mut self, text: &str) -> Option<String> {
        let url = text.trim_end_matches('/');
        let host = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"));
        if host.is_some_and(|host| {
            !host.is_empty()
                && !host.contains(['?', '#', '@', ' '])
                && !host.starts_with(['/', ':'])
        }) {
            return Some(url.to_owned());
        }
        self.refuse(
            &["api", "public_url"],
            "the address under which handlers reach this daemon's HTTP interface is expected, such as \"http://10.0.0.5:7171\", without \
             user and query",
        );
        None
    }

    fn log(&mut self, section: LogSection) -> Log {
        if let Err(error) = EnvFilter::try_new(&section.level) {
            self.refuse(
                &["log", "level"],
                format!("{error}; error, warn, info, debug or trace is expected"),
            );
        }
        Log {
            format: match section.format {
                LogFormatName::Auto => LogFormat::Auto,
                LogFormatName::Json => LogFormat::Json,
                LogFormatName::Text => LogFormat::Text,
            },
            level: section.level,
        }
    }

    /// Refuses zero, where waiting for nothing makes no sense.
    pub(crate) fn positive(&mut self, path: &[&str], value: Duration) -> Duration {
        if value.is_zero() {
            self.refuse(path, "must be longer than zero");
        }
        value
    }
}

/// Any name that PostgreSQL takes for a schema; it is quoted wherever it stands.
fn schema_name(name: &str) -> Result<(), String> {
    if (1..=63).contains(&name.len())
        && !name.contains(char::is_control)
        && !name.starts_with("pg_")
    {
        return Ok(());
    }
    Err("a name of 1 to 63 bytes is expected, not beginning with pg_".to_owned())
}

/// Reads an address: `IP:PORT`, `localhost:PORT`, `unix:/PATH`, or `off`.
fn listen(text: &str) -> Result<Option<Listen>, String> {
    if text == "off" {
        return Ok(None);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        let path = PathBuf::from(path);
        return if path.is_absolute() {
            Ok(Some(Listen::Unix(path)))
        } else {
            Err("a full path is expected, such as \"unix:/run/tenure/api.sock\"".to_owned())
        };
    }
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric.parse::<SocketAddr>().map(|address| Some(Listen::Tcp(address))).map_err(|_| {
        "an address and port such as \"127.0.0.1:7171\", \"unix:/run/tenure/api.sock\" or \"off\" is expected".to_owned()
    })
}

/// A secret's file without the line end that editors leave.
fn read_secret(file: &Path) -> Result<Secret, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("cannot be read: {error}"))?;
    let text = text.strip_suffix('\n').map_or(text.as_str(), |line| {
        line.strip_suffix('\r').unwrap_or(line)
    });
    if text.is_empty() {
        return Err("is empty".to_owned());
    }
    Ok(Secret::new(text))
}

/// The machine's name.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "worker".to_owned(),
        name => name.to_owned(),
    }
}
