//! A cluster of the user's, and the commands by which it is struck.

use std::process::{Command, Stdio};

use crate::arguments::SelftestArguments;
use crate::output::Failure;

/// A fault and the command that injects it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Injection {
    pub(super) name: String,
    pub(super) command: String,
}

/// What the user named, in a fixed order.
pub(super) fn injections(arguments: &SelftestArguments) -> Vec<Injection> {
    let named = [
        ("primary killed", &arguments.kill_primary),
        ("primary frozen", &arguments.freeze_primary),
        ("switchover", &arguments.switch_over),
    ];
    let named = named.into_iter().filter_map(|(name, command)| {
        Some(Injection {
            name: name.to_owned(),
            command: command.clone()?,
        })
    });
    let others = arguments.faults.iter().map(|(name, command)| Injection {
        name: name.clone(),
        command: command.clone(),
    });
    named.chain(others).collect()
}

/// Runs a command to its end. What it prints goes to standard error: standard output is for the result.
pub(super) fn run(what: &str, command: &str, primary: &str, hosts: &str) -> Result<(), Failure> {
    let output = Command::new("sh")
        .args(["-c", command])
        .env("TENURE_PRIMARY", primary)
        .env("TENURE_HOSTS", hosts)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Failure::failed(format!("{what}: `{command}` does not start: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(Failure::failed(format!(
        "{what}: `{command}` failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&said).trim()
    ))
    .hint("the command gets $TENURE_PRIMARY and $TENURE_HOSTS, and must exit with 0"))
}
