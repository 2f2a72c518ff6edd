//! From the configuration to a connection, for one command.

use tenure_runtime::daemon::targets;
use tenure_store::address::Address;
use tenure_store::error::StoreError;
use tenure_store::migrate::MigrateError;
use tenure_store::session::Session;

use super::Context;
use crate::config;
use crate::output::{Exit, Failure};

impl Context {
    /// Opens a connection to the configured database.
    pub(super) async fn connect(&self) -> Result<Session, Failure> {
        self.open(false).await
    }

    /// Opens a connection past the pooler.
    pub(super) async fn connect_directly(&self) -> Result<Session, Failure> {
        self.open(true).await
    }

    async fn open(&self, direct: bool) -> Result<Session, Failure> {
        let database = config::database(self.common.config.as_deref(), &self.common.set)?;
        let (pooled, past_pooler) = targets(&database).map_err(|error| {
            Failure::new(
                Exit::Usage,
                "configuration",
                format!("database.url: {error}"),
            )
        })?;
        let target = if direct { past_pooler } else { pooled };
        let opened = Session::open(&target).await;
        let (session, _) = opened.map_err(|error| unreachable(&error, &target.address))?;
        Ok(session)
    }
}

/// No connection: whatever the reason, it is the server or the address that must be looked at.
fn unreachable(error: &StoreError, address: &Address) -> Failure {
    let message = format!(
        "no connection to the database at {}: {error}",
        address.servers()
    );
    Failure::new(Exit::Unreachable, "unreachable", message)
        .hint("check that the server runs there, and that database.url has the right host, database, user and password")
}

impl From<MigrateError> for Failure {
    fn from(error: MigrateError) -> Self {
        match error {
            MigrateError::Store(error) => error.into(),
            MigrateError::Newer(_) => Self::new(Exit::Newer, "newer_database", error.to_string()),
            MigrateError::Changed(_) => {
                Self::new(Exit::Refused, "changed_migration", error.to_string())
            }
            MigrateError::Missing(_) => Self::new(Exit::Refused, "unmigrated", error.to_string()),
            MigrateError::Standby => Self::new(Exit::Unreachable, "standby", error.to_string()),
            MigrateError::Failed { .. } => Self::failed(error.to_string()),
        }
    }
}
