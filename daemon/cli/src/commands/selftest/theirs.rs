//! A cluster of the user's, and the commands by which it is struck.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tenure_verdict::uptime;

use crate::arguments::SelftestArguments;
use crate::output::Failure;

/// A fault and the command that injects it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Injection {
    pub(super) name: String,
    pub(super) command: String,
    /// Another server takes writes after it.
    pub(super) switches: bool,
}

/// How long a command may take.
const PATIENCE: Duration = Duration::from_secs(300);

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
            switches: true,
        })
    });
    let others = arguments.faults.iter().map(|(name, command)| Injection {
        name: name.clone(),
        command: command.clone(),
        switches: false,
    });
    named.chain(others).collect()
}

/// Runs a command to its end. What it prints goes to standard error, since standard output is for the result; nobody waits for what
/// it leaves in the background.
pub(super) fn run(what: &str, command: &str, primary: &str, hosts: &str) -> Result<(), Failure> {
    let failed = |why: String| {
        Failure::failed(format!("{what}: `{command}` {why}")).hint(
            "it gets $TENURE_PRIMARY and $TENURE_HOSTS, and must exit with 0 within five minutes",
        )
    };
    let mut child = Command::new("sh")
        .args(["-c", command])
        .env("TENURE_PRIMARY", primary)
        .env("TENURE_HOSTS", hosts)
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .spawn()
        .map_err(|error| failed(format!("does not start: {error}")))?;
    let begun = uptime();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(failed(format!("failed ({status})"))),
            Ok(None) if uptime().saturating_sub(begun) > PATIENCE => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed("does not end".to_owned()));
            }
            Ok(None) => thread::sleep(super::LOOK),
            Err(error) => return Err(failed(error.to_string())),
        }
    }
}
