//! The configuration: read from file, variables and flags, checked, and put in force.
//!
//! `sources` knows who said what, `schema` which keys there are, `resolve` what they mean together; every
//! [`problem::Problem`] names the place that must be changed.

mod address;
mod binary;
mod confinement;
mod handlers;
mod locate;
mod problem;
mod resolve;
mod schema;
mod show;
mod sources;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
mod value;

use std::path::Path;

use tenure_runtime::settings::{Database, Settings};

pub(crate) use problem::ConfigError;
pub(crate) use show::shown;
pub(crate) use sources::{DEFAULT_FILE, Sources};
pub(crate) use value::parse_span;

/// Where the database is, for commands that need nothing else.
pub(crate) fn database(file: Option<&Path>, flags: &[String]) -> Result<Database, ConfigError> {
    let sources = Sources::read(file, std::env::vars_os(), flags)?;
    resolve::database(&sources, &sources.schema()?.database)
}

/// Everything that a daemon is told, and from where.
pub(crate) fn settings(
    file: Option<&Path>,
    flags: &[String],
) -> Result<(Settings, Sources), ConfigError> {
    let sources = Sources::read(file, std::env::vars_os(), flags)?;
    let settings = settings_of(&sources)?;
    Ok((settings, sources))
}

/// What these sources say together.
pub(crate) fn settings_of(sources: &Sources) -> Result<Settings, ConfigError> {
    resolve::settings(sources, sources.schema()?)
}
