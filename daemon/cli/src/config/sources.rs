//! Where a configuration comes from: the file, then `TENURE_SECTION__KEY` variables, then `--set SECTION.KEY=VALUE`.
//!
//! What comes later wins, key by key. Texts arrive exactly as they are written, so that a password like `{x}` or
//! `0012` stays what it is; only keys that hold numbers, lists or tables are read as such ([`is_typed`]).

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use figment::providers::{Format, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::locate;
use super::problem::{ConfigError, Problem, dotted, explain, is_secret};
use super::schema::Schema;

/// The file that is read when no other is named, and need not be there.
pub(crate) const DEFAULT_FILE: &str = "/etc/tenure/tenure.toml";

/// What was said, and where.
#[derive(Debug)]
pub(crate) struct Sources {
    file: Option<(PathBuf, String)>,
    environment: Overrides,
    flags: Overrides,
    credentials: Option<PathBuf>,
}

type Overrides = BTreeMap<Vec<String>, String>;

impl Sources {
    /// Reads `file` (or the default one if it is there), takes what concerns tenure from `environment`, and `flags` of
    /// the form `section.key=value`.
    pub(crate) fn read(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        flags: &[String],
    ) -> Result<Self, ConfigError> {
        let environment: BTreeMap<OsString, OsString> = environment.into_iter().collect();
        Ok(Self {
            file: read_file(file)?,
            credentials: environment
                .get(OsStr::new("CREDENTIALS_DIRECTORY"))
                .map(PathBuf::from),
            environment: variables(environment)?,
            flags: assignments(flags)?,
        })
    }

    /// The file of a credential that systemd gave to this service.
    pub(crate) fn credential(&self, name: &str) -> Option<PathBuf> {
        self.credentials
            .as_ref()
            .map(|folder| folder.join(name))
            .filter(|file| file.exists())
    }

    /// The file that was read.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_ref().map(|(path, _)| path.as_path())
    }

    /// Puts the sources together and reads the keys; unknown ones and wrong types are refused.
    pub(crate) fn schema(&self) -> Result<Schema, ConfigError> {
        let mut figment = Figment::new();
        if let Some((_, text)) = &self.file {
            figment = figment.merge(Toml::string(text));
        }
        for overrides in [&self.environment, &self.flags] {
            figment = figment.merge(Assigned(overrides));
        }
        figment.extract().map_err(|errors| {
            ConfigError(
                errors
                    .into_iter()
                    .map(|error| self.explain(error))
                    .collect(),
            )
        })
    }

    /// Something wrong with the key at `path`.
    pub(crate) fn problem(&self, path: &[String], what: impl Into<String>) -> Problem {
        Problem {
            place: self.place(path),
            key: dotted(path),
            what: what.into(),
        }
    }

    fn explain(&self, error: figment::Error) -> Problem {
        let mut path = error.path;
        let (what, key) = explain(&error.kind, is_secret(&path));
        if path.last() != key.as_ref() {
            path.extend(key);
        }
        self.problem(&path, what)
    }

    /// Who said what stands at `path`: the strongest source that has it.
    fn place(&self, path: &[String]) -> Option<String> {
        let said_in =
            |overrides: &Overrides| overrides.keys().find(|key| path.starts_with(key)).cloned();
        if let Some(key) = said_in(&self.flags) {
            return Some(format!("--set {}", key.join(".")));
        }
        if let Some(key) = said_in(&self.environment) {
            return Some(variable(&key));
        }
        let (file, text) = self.file.as_ref()?;
        let file = file.display();
        Some(match locate::line_of(text, path) {
            Some(line) => format!("{file}:{line}"),
            None => file.to_string(),
        })
    }
}

fn read_file(named: Option<&Path>) -> Result<Option<(PathBuf, String)>, ConfigError> {
    let path = named.unwrap_or(Path::new(DEFAULT_FILE));
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => {
            return Ok(None);
        }
        Err(error) => {
            return Err(whole(
                path.display().to_string(),
                format!("cannot be read: {error}"),
            ));
        }
    };
    if let Err(error) = toml_edit::ImDocument::parse(text.as_str()) {
        let line = error
            .span()
            .map_or(1, |span| locate::line_at(&text, span.start));
        let what = error.message().replace('\n', ", ");
        return Err(whole(
            format!("{}:{line}", path.display()),
            format!("not valid TOML: {what}"),
        ));
    }
    Ok(Some((path.to_owned(), text)))
}

/// The variables whose name has the prefix and a double underscore; others, such as those that a container platform
/// sets for a service called tenure, are none of ours.
fn variables(
    all: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Overrides, ConfigError> {
    let mut found = Overrides::new();
    for (name, value) in all {
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix("TENURE_")) else {
            continue;
        };
        if !rest.contains("__") {
            continue;
        }
        let path: Vec<String> = rest.split("__").map(str::to_lowercase).collect();
        let Ok(value) = value.into_string() else {
            return Err(whole(variable(&path), "is not valid UTF-8".to_owned()));
        };
        if is_too_deep(&path, &value) {
            return Err(whole(shortened(&variable(&path)), TOO_DEEP.to_owned()));
        }
        found.insert(path, value);
    }
    Ok(found)
}

fn assignments(flags: &[String]) -> Result<Overrides, ConfigError> {
    let mut found = Overrides::new();
    for flag in flags {
        let Some((key, value)) = flag.split_once('=').filter(|(key, _)| key.contains('.')) else {
            return Err(whole(
                "--set".to_owned(),
                "SECTION.KEY=VALUE is expected, such as worker.concurrency=4".to_owned(),
            ));
        };
        let path: Vec<String> = key.split('.').map(str::to_owned).collect();
        if is_too_deep(&path, value) {
            return Err(whole(
                shortened(&format!("--set {key}")),
                TOO_DEEP.to_owned(),
            ));
        }
        found.insert(path, value.to_owned());
    }
    Ok(found)
}

/// The parser of values calls itself for each level, and so would end with the stack. No key and no value needs half as many.
const DEEPEST: usize = 32;
const TOO_DEEP: &str = "is nested more than 32 levels deep";

/// Whether key or value has too many levels. A bracket in a text counts too: the limit leaves room for it.
fn is_too_deep(path: &[String], value: &str) -> bool {
    let levels = value.chars().scan(0_usize, |open, c| {
        match c {
            '[' | '{' => *open += 1,
            ']' | '}' => *open = open.saturating_sub(1),
            _ => {}
        }
        Some(*open)
    });
    path.len() > DEEPEST || levels.max().unwrap_or_default() > DEEPEST
}

/// The begin of a place that may have any length.
fn shortened(place: &str) -> String {
    place.chars().take(100).collect()
}

fn variable(path: &[String]) -> String {
    format!("TENURE_{}", path.join("__").to_uppercase())
}

fn whole(place: String, what: String) -> ConfigError {
    ConfigError(vec![Problem {
        place: Some(place),
        key: String::new(),
        what,
    }])
}

/// Whether what a variable or flag says for the key `leaf` is a number, list or table rather than a text.
fn is_typed(leaf: &str) -> bool {
    const TYPED: [&str; 13] = [
        "command",
        "concurrency",
        "env",
        "exec",
        "exit_codes",
        "handlers",
        "headers",
        "http",
        "job_types",
        "max_attempts",
        "noop",
        "pool_size",
        "pools",
    ];
    TYPED.contains(&leaf)
}

/// Overrides as figment takes them.
struct Assigned<'a>(&'a Overrides);

impl Provider for Assigned<'_> {
    fn metadata(&self) -> Metadata {
        Metadata::named("override")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let mut all = Dict::new();
        for (path, text) in self.0 {
            let leaf = path.last().map(String::as_str).unwrap_or_default();
            let value = if is_typed(leaf) {
                text.parse().unwrap_or_else(|never| match never {})
            } else {
                Value::from(text.as_str())
            };
            put(&mut all, path, value).map_err(|why| {
                let mut error = figment::Error::from(why);
                error.path.clone_from(path);
                error
            })?;
        }
        Ok(Profile::Default.collect(all))
    }
}

/// Puts `value` at `path`, below whatever is there.
fn put(dict: &mut Dict, path: &[String], value: Value) -> Result<(), String> {
    match path {
        [] => Ok(()),
        [leaf] => {
            dict.insert(leaf.clone(), value);
            Ok(())
        }
        [first, rest @ ..] => {
            let below = dict
                .entry(first.clone())
                .or_insert_with(|| Value::from(Dict::new()));
            match below {
                Value::Dict(_, below) => put(below, rest, value),
                _ => Err(format!("`{first}` is already given a value of its own")),
            }
        }
    }
}
