//! The settings in force, as people and programs read them. Secrets are never among them.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tenure_runtime::settings::{
    AfterLostCommits, ExitMeaning, HandlerKind, Handlers, LogFormat, Pooler, ProcessLimits, Rule,
    Secret, Settings,
};

use super::address;

/// All settings, with the keys of the file.
pub(crate) fn shown(settings: &Settings) -> Value {
    let Settings {
        database,
        worker,
        pools,
        handlers,
        api,
        log,
    } = settings;
    json!({
        "database": {
            "servers": address::servers(database.url.expose()),
            "direct_url": database.direct_url.as_ref().map(hidden),
            "password": database.password.as_ref().map(hidden),
            "schema": database.schema,
            "pool_size": database.pool_size,
            "pooler": match database.pooler { Pooler::None => "none", Pooler::Transaction => "transaction" },
            "connect_timeout": span(database.connect_timeout),
            "statement_timeout": span(database.statement_timeout),
        },
        "worker": {
            "name": worker.name,
            "version": worker.version,
            "concurrency": worker.concurrency,
            "lease_ttl": span(worker.lease_ttl),
            "heartbeat": span(worker.heartbeat),
            "state_dir": worker.state_dir,
            "drain_timeout": span(worker.drain_timeout),
            "poll_interval": span(worker.poll_interval),
            "max_result": size(worker.max_result),
            "log_tail": size(worker.log_tail),
        },
        "pools": pools.iter().map(|pool| json!({
            "name": pool.name,
            "job_types": pool.job_types.iter().map(|pattern| pattern.as_str()).collect::<Vec<_>>(),
            "concurrency": pool.concurrency,
        })).collect::<Vec<_>>(),
        "handlers": all(handlers),
        "api": {
            "listen": api.listen.as_ref().map_or_else(|| "off".to_owned(), ToString::to_string),
            "token": api.token.as_ref().map(hidden),
            "max_body": size(api.max_body),
            "public_url": api.public_url,
        },
        "log": {
            "format": match log.format { LogFormat::Auto => "auto", LogFormat::Json => "json", LogFormat::Text => "text" },
            "level": log.level,
        },
    })
}

/// What holds for each pattern, put together from all rules that match it.
fn all(handlers: &Handlers) -> Value {
    handlers
        .rules
        .iter()
        .map(|rule| (rule.pattern.to_string(), one(handlers, rule)))
        .collect::<Map<_, _>>()
        .into()
}

fn one(handlers: &Handlers, rule: &Rule) -> Value {
    let Some(handler) = handlers.resolve(rule.pattern.as_str()) else {
        return json!({"runs": null});
    };
    let retry = handlers.retry_rule(rule.pattern.as_str());
    let (name, kind) = match &handler.kind {
        HandlerKind::Exec(exec) => (
            "exec",
            json!({
                "command": exec.command,
                "cwd": exec.cwd,
                "env": exec.env,
                "user": exec.confinement.account.as_ref().map(|account| &account.name),
                "group": exec.confinement.account.as_ref().map(|account| account.group),
                "nice": exec.confinement.nice,
                "private_tmp": exec.confinement.private_tmp,
                "limits": limits(&exec.confinement.limits),
                "timeout": span(exec.timeout),
                "kill_grace": span(exec.kill_grace),
                "exit_codes": exec.exit_codes.iter().map(|(code, meaning)| (code.to_string(), meant(*meaning).into())).collect::<Map<_, _>>(),
            }),
        ),
        HandlerKind::Http(http) => (
            "http",
            json!({
                "url": without_secrets(http.url.expose()),
                "socket": http.socket,
                "timeout": span(http.timeout),
                "connect_timeout": span(http.connect_timeout),
                "body_timeout": http.body_timeout.map(span),
                "idle_timeout": span(http.idle_timeout),
                "max_response": (http.max_response != usize::MAX).then(|| size(http.max_response)),
                "max_headers": size(http.max_headers),
                "ca_file": http.authorities.as_ref().map(|authorities| &authorities.file),
                "allow": http.allow.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "hold": span(http.accepts.hold),
                "max_open": http.accepts.max_open,
                "callback": http.callback.as_ref().map(|before| format!("{before}ID")),
                "secret": http.secret.as_ref().map(hidden),
                "headers": http.headers.keys().collect::<Vec<_>>(),
            }),
        ),
        HandlerKind::Process(process) => (
            "process",
            json!({
                "command": process.command,
                "cwd": process.cwd,
                "env": process.env,
                "user": process.confinement.account.as_ref().map(|account| &account.name),
                "group": process.confinement.account.as_ref().map(|account| account.group),
                "nice": process.confinement.nice,
                "private_tmp": process.confinement.private_tmp,
                "limits": limits(&process.confinement.limits),
                "processes": process.processes,
                "concurrency": process.concurrency,
                "timeout": span(process.timeout),
                "kill_grace": span(process.kill_grace),
                "hello_timeout": span(process.hello_timeout),
                "max_jobs": process.max_jobs,
                "max_age": process.max_age.map(span),
                "max_memory": process.max_memory.and_then(|bytes| usize::try_from(bytes).ok()).map(size),
            }),
        ),
        HandlerKind::Noop => ("noop", json!({})),
    };
    json!({
        name: kind,
        "retry": {
            "max_attempts": retry.max_attempts,
            "delay": retry.delay.map(span),
            "max_delay": retry.max_delay.map(span),
        },
        "after_lost_commits": match handler.after_lost_commits { AfterLostCommits::Keep => "keep", AfterLostCommits::Rerun => "rerun" },
        "durability": handler.durability,
    })
}

/// Those that there are.
fn limits(limits: &ProcessLimits) -> Value {
    let bytes = |limit: Option<u64>| {
        limit
            .and_then(|limit| usize::try_from(limit).ok())
            .map(|limit| Value::from(size(limit)))
    };
    let all = [
        ("cpu", limits.cpu.map(|cpu| span(cpu).into())),
        ("memory", bytes(limits.memory)),
        ("processes", limits.processes.map(Value::from)),
        ("open_files", limits.open_files.map(Value::from)),
        ("file_size", bytes(limits.file_size)),
        ("output", bytes(limits.output)),
    ];
    let said = all
        .into_iter()
        .filter_map(|(key, limit)| Some((key.to_owned(), limit?)));
    Value::Object(said.collect())
}

fn meant(meaning: ExitMeaning) -> &'static str {
    match meaning {
        ExitMeaning::Done => "done",
        ExitMeaning::Retry => "retry",
        ExitMeaning::Dead => "dead",
    }
}

/// As it is written in the file, and so without months and years.
fn span(value: Duration) -> String {
    let (seconds, nanos) = (value.as_secs(), u64::from(value.subsec_nanos()));
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3_600 % 24, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
        (nanos / 1_000_000, "ms"),
        (nanos / 1_000 % 1_000, "us"),
        (nanos % 1_000, "ns"),
    ];
    let words: Vec<String> = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, unit)| format!("{count}{unit}"))
        .collect();
    if words.is_empty() {
        return "0s".to_owned();
    }
    words.join(" ")
}

fn size(bytes: usize) -> String {
    let (shift, unit) = [(30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift)
        .unwrap_or((0, "B"));
    format!("{}{unit}", bytes >> shift)
}

fn hidden(_: &Secret) -> &'static str {
    "[secret]"
}

/// An address without user, password and query.
fn without_secrets(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::super::value::parse_span;
    use super::*;

    #[test]
    fn a_duration_reads_as_it_is_written() {
        for (written, seen) in [
            ("0s", "0s"),
            ("90s", "1m 30s"),
            ("400days", "400d"),
            ("1h 1ms 2us 3ns", "1h 1ms 2us 3ns"),
            ("3660days", "3660d"),
        ] {
            let value = parse_span(written).unwrap();
            assert_eq!(span(value), seen);
            assert_eq!(parse_span(seen), Ok(value));
        }
    }

    #[test]
    fn a_size_reads_as_it_is_written() {
        assert_eq!(
            [0, 1000, 65_536, 4 << 20].map(size),
            ["0B", "1000B", "64KiB", "4MiB"]
        );
    }

    #[test]
    fn an_address_is_shown_without_its_secrets() {
        assert_eq!(
            without_secrets("https://user:pw@host:1/jobs?key=secret#x"),
            "https://host:1/jobs"
        );
        assert_eq!(without_secrets("http://host"), "http://host");
    }
}
