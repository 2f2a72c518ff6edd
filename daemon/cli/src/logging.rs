//! Where the daemon's log goes.
//!
//! Under systemd to the journal with all fields, else to standard error: as text where a person reads it, as JSON where a
//! program does.

use std::io::{self, IsTerminal};

use tenure_runtime::settings::{Log, LogFormat};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::output::Failure;

/// Starts the log of this process. Once only.
pub(crate) fn start(log: &Log) -> Result<(), Failure> {
    let level = EnvFilter::try_new(&log.level)
        .map_err(|error| Failure::usage(format!("log.level: {error}")))?;
    // The pool tells each connection that it loses; the daemon tells once that the database is away.
    let level = match "deadpool=error".parse() {
        Ok(quiet) if !log.level.contains("deadpool") => level.add_directive(quiet),
        _ => level,
    };
    tracing_subscriber::registry()
        .with(destination(log.format).with_filter(level))
        .try_init()
        .map_err(|error| Failure::failed(format!("the log cannot be started: {error}")))
}

fn destination(format: LogFormat) -> Box<dyn Layer<Registry> + Send + Sync> {
    let under_systemd = std::env::var_os("JOURNAL_STREAM").is_some();
    match format {
        LogFormat::Auto if under_systemd => match tracing_journald::layer() {
            Ok(journal) => journal.with_field_prefix(Some("TENURE".to_owned())).boxed(),
            Err(_) => json(),
        },
        LogFormat::Auto if io::stderr().is_terminal() => text(),
        LogFormat::Text => text(),
        LogFormat::Auto | LogFormat::Json => json(),
    }
}

fn text() -> Box<dyn Layer<Registry> + Send + Sync> {
    let colours = io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(colours)
        .with_target(false)
        .boxed()
}

fn json() -> Box<dyn Layer<Registry> + Send + Sync> {
    fmt::layer()
        .json()
        .flatten_event(true)
        .with_writer(io::stderr)
        .boxed()
}
