//! What else a test needs to run around PostgreSQL: its programs, the user who may run them, a folder of that user's.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::account::Account;
use crate::installation::Installation;
use crate::{Error, storage};

/// The PostgreSQL of this machine, and the user who runs it, for those who start it by other means than
/// [`Server`](crate::Server).
#[derive(Debug, Clone)]
pub struct Programs {
    installation: Installation,
    account: Account,
}

impl Programs {
    /// Finds them as [`Server::start`](crate::Server::start) does.
    ///
    /// # Errors
    /// When PostgreSQL is not installed, or root has no other user to become.
    pub fn find() -> Result<Self, Error> {
        Ok(Self {
            installation: Installation::find(None)?,
            account: Account::choose(None)?,
        })
    }

    /// The folder of `initdb`, `postgres` and the others.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        self.installation.bin_dir()
    }

    /// Any program, to be run as that user.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        self.account.command(program)
    }

    /// The name of that user, when it is another than the present one.
    #[must_use]
    pub fn other_user(&self) -> Option<&str> {
        self.account.other()
    }

    /// A temporary folder of that user's.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self) -> Result<TempDir, Error> {
        storage::temporary(&self.account)
    }
}
