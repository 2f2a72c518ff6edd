//! A configuration: the file, variables and `--set`.
//!
//! Input: TOML, a line `%%%`, then lines `NAME=VALUE` for variables and `--set KEY=VALUE` for flags.
#![no_main]

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use tempfile::TempDir;
use tenure_runtime::daemon::Daemon;
use tenure_runtime::settings::{HandlerKind, Secret, Settings};

// The binary has no library; its configuration stands by itself.
#[allow(dead_code, unused_imports)]
#[path = "../../daemon/cli/src/config/mod.rs"]
mod config;

use config::{ConfigError, Sources, settings_of, shown};

const FILE: &str = "tenure.toml";

thread_local! {
    static FOLDER: TempDir = folder();
}

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    // Files that are named are read, and these have no end.
    if ["/dev", "/proc", "/sys"]
        .iter()
        .any(|path| text.contains(path))
    {
        return;
    }
    FOLDER.with(|_| ());
    let (file, overrides) = text.split_once("\n%%%\n").unwrap_or((text, ""));
    let mut variables = Vec::new();
    let mut flags = Vec::new();
    for line in overrides.lines() {
        if let Some(flag) = line.strip_prefix("--set ") {
            flags.push(flag.to_owned());
        } else if let Some((name, value)) = line.split_once('=') {
            variables.push((OsString::from(name), OsString::from(value)));
        }
    }
    match read(file, variables, &flags) {
        Err(error) => assert_places(file, &error),
        Ok(settings) => {
            if let Ok(daemon) = Daemon::new(settings.clone()) {
                let _ = daemon.caution();
            }
            let seen = shown(&settings);
            let again = read(&as_written(&settings, seen.clone()), Vec::new(), &[]);
            let again = again.unwrap_or_else(|error| panic!("what is shown is refused: {error}"));
            assert_eq!(with_own_kind(shown(&again)), with_own_kind(seen));
        }
    }
});

fn read(
    file: &str,
    variables: Vec<(OsString, OsString)>,
    flags: &[String],
) -> Result<Settings, ConfigError> {
    fs::write(FILE, file).unwrap();
    settings_of(&Sources::read(Some(Path::new(FILE)), variables, flags)?)
}

/// Demands that each problem says where it is and what it is.
fn assert_places(file: &str, error: &ConfigError) {
    assert!(!error.0.is_empty());
    for problem in &error.0 {
        assert!(!problem.what.is_empty(), "{problem:?}");
        let place = problem.place.as_deref().unwrap_or_default();
        assert!(!place.is_empty(), "{problem:?}");
        if let Some(line) = place.strip_prefix("tenure.toml:") {
            let line: usize = line.parse().unwrap();
            let last = file.bytes().filter(|byte| *byte == b'\n').count() + 1;
            assert!((1..=last).contains(&line), "{problem:?}");
        }
    }
}

/// What `check-config` shows as a file, with the secrets put back that it hides.
fn as_written(settings: &Settings, mut seen: Value) -> String {
    let database = seen["database"].as_object_mut().unwrap();
    database.remove("servers");
    let mut put = |key: &str, secret: Option<&Secret>| {
        database.insert(key.to_owned(), json!(secret.map(Secret::expose)));
    };
    put("url", Some(&settings.database.url));
    put("direct_url", settings.database.direct_url.as_ref());
    put("password", settings.database.password.as_ref());
    let api = seen["api"].as_object_mut().unwrap();
    if !api.remove("token").unwrap().is_null() {
        api.insert("token_file".to_owned(), json!("secret"));
    }
    seen = with_own_kind(seen);
    for (pattern, rule) in seen["handlers"].as_object_mut().unwrap() {
        let handler = settings.handlers.resolve(pattern).unwrap();
        let HandlerKind::Http(http) = handler.kind else {
            continue;
        };
        let headers = http.headers.iter();
        rule["http"]["headers"] = headers.map(|(key, value)| (key, value.expose())).collect();
        rule["http"]["url"] = json!(http.url.expose());
        let secret = rule["http"].as_object_mut().unwrap().remove("secret");
        rule["http"]["secret_file"] =
            json!(secret.filter(|secret| !secret.is_null()).map(|_| "secret"));
    }
    toml::to_string(&without_nulls(seen)).unwrap()
}

/// Without the rules that are only part of others.
fn with_own_kind(mut seen: Value) -> Value {
    let rules = seen["handlers"].as_object_mut().unwrap();
    rules.retain(|_, rule| rule.get("runs").is_none());
    seen
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => members
            .into_iter()
            .filter(|(_, member)| !member.is_null())
            .map(|(key, member)| (key, without_nulls(member)))
            .collect(),
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// Paths lead into a folder with a secret in it.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    std::env::set_current_dir(folder.path()).unwrap();
    fs::write("secret", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
    fs::write("empty", "").unwrap();
    folder
}
