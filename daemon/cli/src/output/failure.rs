//! Why a command did not do what was asked, and the exit code that says it.

use std::fmt;
use std::io::{self, Write};

use serde::Serialize;
use tenure_store::error::StoreError;

use super::cell;
use crate::config::ConfigError;

/// The exit codes, the same for all commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Something failed, or a job that was waited for did.
    Failed = 1,
    /// Wrong usage or configuration.
    Usage = 2,
    /// No such job, dead letter or worker.
    NotFound = 3,
    /// The present state does not allow it.
    Refused = 4,
    /// The database cannot be reached.
    Unreachable = 5,
    /// The database was migrated by a newer program that this one cannot work beside.
    Newer = 6,
}

/// A failure as it is told to a person or a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Failure {
    code: String,
    message: String,
    hint: Option<String>,
    #[serde(skip)]
    exit: Exit,
    #[serde(skip)]
    printed: bool,
}

impl Failure {
    /// A failure of the kind `exit`; `code` names it for programs.
    pub(crate) fn new(exit: Exit, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            message: message.into(),
            hint: None,
            exit,
            printed: false,
        }
    }

    /// Something failed.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, "failed", message)
    }

    /// Wrong usage.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, "usage", message)
    }

    /// Adds what to do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds what to do where nothing says it yet.
    pub(crate) fn or_hint(mut self, hint: impl FnOnce() -> String) -> Self {
        self.hint.get_or_insert_with(hint);
        self
    }

    /// Marks what stands on the screen already.
    pub(crate) fn printed(mut self) -> Self {
        self.printed = true;
        self
    }

    /// Tells a person, on standard error.
    pub(crate) fn tell(&self) {
        // Nobody is left to tell when standard error cannot be written.
        let _ = io::stderr().lock().write_all(self.to_string().as_bytes());
    }

    pub(crate) fn is_printed(&self) -> bool {
        self.printed
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.message.lines() {
            writeln!(f, "error: {}", cell::shown(line))?;
        }
        for line in self.hint.iter().flat_map(|hint| hint.lines()) {
            writeln!(f, "hint: {}", cell::shown(line))?;
        }
        Ok(())
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(Exit::Usage, "configuration", error.to_string())
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        let (exit, code, hint) = match error {
            StoreError::Refused { code, hint, .. } => match code.as_str() {
                "TN005" => (Exit::NotFound, "not_found", hint),
                "TN007" => (Exit::Usage, "input", hint),
                _ => (Exit::Refused, "refused", hint),
            },
            StoreError::BadValue(_) => (Exit::Usage, "input", None),
            StoreError::OtherEpoch(_) | StoreError::DeadWorker(_) | StoreError::Repeat(_) => {
                (Exit::Refused, "refused", Some("try again".to_owned()))
            }
            StoreError::Unmigrated(_) => (Exit::Refused, "unmigrated", None),
            StoreError::Unreachable(_) | StoreError::Timeout(_) | StoreError::ReadOnly(_) => {
                let hint = "try again; if it stays so, check the server";
                (Exit::Unreachable, "unreachable", Some(hint.to_owned()))
            }
            StoreError::Unreplicated(_) => {
                let hint = "repeat it with the same --id: it is put in once";
                (Exit::Failed, "unreplicated", Some(hint.to_owned()))
            }
            StoreError::Failed(_) => (Exit::Failed, "failed", None),
        };
        Self {
            hint,
            ..Self::new(exit, code, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_reads_as_a_sentence_and_a_hint() {
        let failure = Failure::usage("a\u{1b}[2Jb").hint("do this");
        assert_eq!(failure.to_string(), "error: a\\u{1b}[2Jb\nhint: do this\n");
        assert_eq!(failure.exit() as i32, 2);
    }
}
