//! Migrations: numbered files, each in one transaction (two of them together in one), under one lock.
//!
//! The files are part of the program. What was applied stands in `migration` with a checksum; a database that has a breaking
//! migration which this program does not know is refused.

use std::time::Duration;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio_postgres::types::Type;

use crate::error::StoreError;
use crate::session::Session;

/// One migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Its number and name, as its file is called.
    pub name: &'static str,
    /// What it does.
    pub sql: &'static str,
}

macro_rules! migrations {
    ($($name:literal)*) => {
        /// All migrations, in order.
        pub const MIGRATIONS: &[Migration] = &[$(Migration {
            name: $name,
            sql: include_str!(concat!("../../../migrations/", $name, ".sql")),
        }),*];
    };
}
migrations! {
    "0001_tables" "0002_enqueue" "0003_worker" "0004_ends" "0005_sweep" "0006_reattach" "0007_person" "0008_views" "0009_roles"
    "0010_switches" "0011_effects" "0012_replay" "0013_corrections" "0014_ran_twice" "0015_watermarks" "0016_crash_marks" "0017_bulk"
    "0018_open_jobs"
}

impl Migration {
    /// Whether programs that do not know it can no longer work with the database: its first line says so.
    #[must_use]
    pub fn breaking(&self) -> bool {
        self.sql.lines().next() == Some("-- breaking: yes")
    }

    /// SHA-256 of its text, in hexadecimal.
    #[must_use]
    pub fn checksum(&self) -> String {
        Sha256::digest(self.sql)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// Where one migration stands.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Line {
    /// Its number and name.
    pub name: String,
    /// Whether programs that do not know it can no longer work with the database.
    pub breaking: bool,
    /// `applied`, `pending`, or `unknown` (applied by a newer program).
    pub state: &'static str,
    /// When it was applied.
    pub applied_at: Option<String>,
}

/// Why the database cannot be migrated or used.
#[derive(Debug, Error)]
pub enum MigrateError {
    /// It has breaking migrations that this program does not know.
    #[error(
        "the database is newer than this program: it has the breaking migration {0}; use the version of tenure that brought it"
    )]
    Newer(String),
    /// A migration was changed after it had been applied.
    #[error(
        "migration {0} was applied with another text than this program has; the database and this program do not belong together"
    )]
    Changed(String),
    /// Migrations are missing.
    #[error("the database lacks {0} migrations; run `tenure migrate up`")]
    Missing(usize),
    /// The server is a standby.
    #[error("this server is a standby; migrate on the primary")]
    Standby,
    /// One failed. None of it was kept; those before it were.
    #[error("migration {name} failed: {error}")]
    Failed {
        /// Which.
        name: String,
        /// Why.
        error: StoreError,
    },
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The sweep of the first needs what the second makes, and daemons work on between two steps.
const ONE_STEP: [&str; 2] = ["0010_switches", "0011_effects"];

/// Where the roles are there, gives them what this migration made, and nobody else anything.
const GRANT: &str = "DO $grant$ BEGIN IF pg_catalog.to_regprocedure('grant_roles()') IS NOT NULL THEN PERFORM grant_roles(); END IF; END $grant$";

/// How long a migration waits for the locks of others before it tries again.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// How often it tries.
const TRIES: u32 = 10;

/// Migrates one installation. The session must be one of its own, without a pooler.
pub struct Migrator<'s> {
    session: &'s Session,
    schema: &'s str,
}

impl<'s> Migrator<'s> {
    /// For the installation in `schema`.
    #[must_use]
    pub fn new(session: &'s Session, schema: &'s str) -> Self {
        Self { session, schema }
    }

    /// Where each migration stands.
    ///
    /// # Errors
    /// See [`MigrateError`].
    pub async fn status(&self) -> Result<Vec<Line>, MigrateError> {
        let found = "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                     WHERE n.nspname = $1 AND c.relname = 'migration') AS found";
        let rows = self
            .session
            .rows("migrate", found, &[(&self.schema, Type::TEXT)])
            .await?;
        let exists = rows
            .first()
            .is_some_and(|row| row.try_get("found").unwrap_or(false));
        let applied = if exists {
            self.session.rows("migrate", "SELECT name, checksum, breaking, applied_at::text AS at FROM %migration ORDER BY name", &[]).await?
        } else {
            Vec::new()
        };
        let text = |row: &tokio_postgres::Row, column: &str| {
            row.try_get::<_, String>(column).map_err(StoreError::from)
        };
        let mut lines = Vec::new();
        for row in &applied {
            let name = text(row, "name")?;
            let known = MIGRATIONS.iter().find(|migration| migration.name == name);
            if known.is_some_and(|migration| {
                text(row, "checksum").is_ok_and(|sum| sum != migration.checksum())
            }) {
                return Err(MigrateError::Changed(name));
            }
            lines.push(Line {
                breaking: row.try_get("breaking").map_err(StoreError::from)?,
                state: if known.is_some() {
                    "applied"
                } else {
                    "unknown"
                },
                applied_at: Some(text(row, "at")?),
                name,
            });
        }
        for migration in MIGRATIONS {
            if !lines.iter().any(|line| line.name == migration.name) {
                lines.push(Line {
                    name: migration.name.to_owned(),
                    breaking: migration.breaking(),
                    state: "pending",
                    applied_at: None,
                });
            }
        }
        Ok(lines)
    }

    /// Whether this program can work with the database as it is.
    ///
    /// # Errors
    /// `Newer`, `Changed` or `Missing` say why not.
    pub async fn check(&self) -> Result<(), MigrateError> {
        let lines = self.status().await?;
        refuse_newer(&lines)?;
        match lines.iter().filter(|line| line.state == "pending").count() {
            0 => Ok(()),
            missing => Err(MigrateError::Missing(missing)),
        }
    }

    /// Applies what is pending and returns the names. Of several that run at once, one works and the others wait.
    ///
    /// # Errors
    /// See [`MigrateError`].
    pub async fn up(&self) -> Result<Vec<String>, MigrateError> {
        let standby = self
            .session
            .rows(
                "migrate",
                "SELECT pg_catalog.pg_is_in_recovery() AS standby",
                &[],
            )
            .await?;
        if standby
            .first()
            .is_some_and(|row| row.try_get("standby").unwrap_or(true))
        {
            return Err(MigrateError::Standby);
        }
        let quoted = format!("\"{}\"", self.schema.replace('"', "\"\""));
        let mut applied = Vec::new();
        refuse_newer(&self.status().await?)?;
        let mut rest = MIGRATIONS;
        while let Some(first) = rest.first() {
            let count = if first.name == ONE_STEP[0] {
                ONE_STEP.len()
            } else {
                1
            };
            let (step, later) = rest.split_at(count.min(rest.len()));
            applied.extend(self.apply(&quoted, step).await?);
            rest = later;
        }
        Ok(applied)
    }

    /// Applies the migrations of one step that do not stand already, all or none, and says which these were. Waits for locks only
    /// briefly and tries again, so that it never holds up the claims that queue behind it.
    async fn apply(&self, quoted: &str, step: &[Migration]) -> Result<Vec<String>, MigrateError> {
        let start = format!(
            "SET lock_timeout = '{}ms'; SET statement_timeout = 0; BEGIN; \
             SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('tenure migrate'), pg_catalog.hashtext({})); \
             DO $migrate$ BEGIN IF pg_catalog.to_regnamespace({}) IS NULL THEN CREATE SCHEMA {quoted}; END IF; END $migrate$; SET LOCAL search_path = {quoted}, pg_temp; SET LOCAL check_function_bodies = on; \
             CREATE TABLE IF NOT EXISTS migration (name text PRIMARY KEY, checksum text NOT NULL, breaking boolean NOT NULL, \
             applied_at timestamptz NOT NULL DEFAULT now())",
            LOCK_TIMEOUT.as_millis(),
            literal(self.schema),
            // Not CREATE SCHEMA IF NOT EXISTS: that asks for the right to make one also when it is there.
            literal(quoted)
        );
        let mut tries = 0;
        loop {
            tries += 1;
            let result = self.attempt(&start, step).await;
            let end = if matches!(&result, Ok(done) if !done.is_empty()) {
                "COMMIT"
            } else {
                "ROLLBACK"
            };
            let ended = self.session.batch("migrate", end).await;
            let failed = |name: &str, error| MigrateError::Failed {
                name: name.to_owned(),
                error,
            };
            match (result, ended) {
                (Ok(done), Ok(())) => return Ok(done),
                (Err((_, StoreError::Repeat(_))), _) if tries < TRIES => {}
                (Err((name, error)), _) => return Err(failed(name, error)),
                (Ok(_), Err(error)) => {
                    return Err(failed(step.first().map_or("", |it| it.name), error));
                }
            }
        }
    }

    /// Says which one failed.
    async fn attempt<'m>(
        &self,
        start: &str,
        step: &'m [Migration],
    ) -> Result<Vec<String>, (&'m str, StoreError)> {
        let mut done = Vec::new();
        for (at, migration) in step.iter().enumerate() {
            let start = if at == 0 { start } else { "" };
            let applied = self.attempt_one(start, migration).await;
            if applied.map_err(|error| (migration.name, error))? {
                done.push(migration.name.to_owned());
            }
        }
        Ok(done)
    }

    async fn attempt_one(&self, start: &str, migration: &Migration) -> Result<bool, StoreError> {
        self.session.batch("migrate", start).await?;
        let known = self
            .session
            .rows(
                "migrate",
                "SELECT FROM %migration WHERE name = $1",
                &[(&migration.name, Type::TEXT)],
            )
            .await?;
        if !known.is_empty() {
            return Ok(false);
        }
        self.session.batch("migrate", migration.sql).await?;
        // PostgreSQL lets everybody call a new function.
        self.session.batch("migrate", GRANT).await?;
        let note = "INSERT INTO %migration (name, checksum, breaking) VALUES ($1, $2, $3)";
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] = [
            (&migration.name, Type::TEXT),
            (&migration.checksum(), Type::TEXT),
            (&migration.breaking(), Type::BOOL),
        ];
        self.session.rows("migrate", note, &parameters).await?;
        Ok(true)
    }

    /// The roles of the contract that the server lacks.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn missing_roles(&self) -> Result<Vec<String>, StoreError> {
        let sql = "SELECT r FROM unnest('{tenure_producer,tenure_worker,tenure_monitor,tenure_admin}'::text[]) r \
                   WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles p WHERE p.rolname = r)";
        let rows = self.session.rows("migrate", sql, &[]).await?;
        rows.iter()
            .map(|row| row.try_get("r").map_err(StoreError::from))
            .collect()
    }

    /// Removes the installation with all its jobs.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn drop_everything(&self) -> Result<(), StoreError> {
        self.session
            .batch(
                "migrate",
                &format!(
                    "DROP SCHEMA \"{}\" CASCADE",
                    self.schema.replace('"', "\"\"")
                ),
            )
            .await
    }
}

fn refuse_newer(lines: &[Line]) -> Result<(), MigrateError> {
    match lines
        .iter()
        .find(|line| line.state == "unknown" && line.breaking)
    {
        Some(line) => Err(MigrateError::Newer(line.name.clone())),
        None => Ok(()),
    }
}

/// A string constant of SQL.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_migration_says_whether_it_breaks_and_they_are_in_order() {
        for migration in MIGRATIONS {
            let first = migration.sql.lines().next();
            assert!(
                matches!(first, Some("-- breaking: yes" | "-- breaking: no")),
                "{}",
                migration.name
            );
        }
        assert!(MIGRATIONS.is_sorted_by_key(|migration| migration.name));
    }
}
