//! Standbys: servers that stream from another, are promoted, and come back after they were primaries.
//!
//! Which server is the primary is known to the servers alone; nothing here remembers it. Replication is asynchronous unless
//! [`Server::set_synchronous`] says otherwise.

use std::fs;
use std::time::Duration;

use crate::processes::wait_until;
use crate::{Error, Server, SqlError, storage};

/// How long a change of role or of replication may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How a server became a standby of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Followed {
    /// It was a standby already, and reads from the other now, without a restart.
    Repointed,
    /// It kept its data; what the other does not have was taken back by `pg_rewind`.
    Rewound,
    /// It has lost all its data, and got that of the other.
    Copied,
}

impl Server {
    /// Settings of a primary whose standbys reconnect quickly and which can be taken back by `pg_rewind`. For
    /// [`Options::settings`](crate::Options::settings); standbys inherit them.
    #[must_use]
    pub fn cluster_settings() -> Vec<(String, String)> {
        [
            ("wal_level", "replica"),
            ("max_wal_senders", "10"),
            ("hot_standby", "on"),
            // Whoever was away for a moment finds what it missed.
            ("wal_keep_size", "256MB"),
            ("wal_retrieve_retry_interval", "100ms"),
            // pg_rewind wants both.
            ("wal_log_hints", "on"),
            ("full_page_writes", "on"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .to_vec()
    }

    /// Starts a standby that streams from this server, in a temporary folder and on a port of its own, with the same settings.
    ///
    /// # Errors
    /// As [`Server::start`], and when `pg_basebackup` fails.
    pub fn standby(&self) -> Result<Self, Error> {
        let folder = storage::temporary(&self.account)?;
        let mut standby = Self {
            postmaster: None,
            installation: self.installation.clone(),
            account: self.account.clone(),
            settings: self.settings.clone(),
            environment: self.environment.clone(),
            port: 0,
            data_dir: folder.path().join("data"),
            folder,
        };
        standby.copy_from(self)?;
        standby.launch_on_a_free_port()?;
        Ok(standby)
    }

    /// Makes this standby a primary, and returns when it takes writes.
    ///
    /// # Errors
    /// When it cannot be reached, is none (SQLSTATE 55000), or takes over a minute.
    pub fn promote(&self) -> Result<(), Error> {
        let mut sql = self.sql("postgres")?;
        sql.run("SELECT pg_promote(wait => false)")?;
        self.until("was not promoted", "SELECT NOT pg_is_in_recovery()")
    }

    /// Whether it is a standby.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn is_standby(&self) -> Result<bool, SqlError> {
        Ok(self.ask("SELECT pg_is_in_recovery()")? == "t")
    }

    /// The number of its timeline, also right after a promotion or while it streams.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn timeline(&self) -> Result<u32, SqlError> {
        let text = self.ask(
            "SELECT CASE WHEN pg_is_in_recovery() \
             THEN coalesce((SELECT received_tli FROM pg_stat_wal_receiver), (SELECT min_recovery_end_timeline FROM pg_control_recovery())) \
             ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END",
        )?;
        Ok(text.parse().unwrap_or_default())
    }

    /// The end of its WAL in bytes: what it has written as primary, or received as standby.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn position(&self) -> Result<u64, SqlError> {
        let text = self.ask(
            "SELECT (CASE WHEN pg_is_in_recovery() THEN greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) \
             ELSE pg_current_wal_lsn() END) - '0/0'::pg_lsn",
        )?;
        Ok(text.parse().unwrap_or_default())
    }

    /// Makes this server, in whatever state it is, a standby of `primary`, on the address that it has. What it has and the other
    /// has not is lost.
    ///
    /// # Errors
    /// As [`Server::start`], and when neither `pg_rewind` nor a new copy works.
    pub fn follow(&mut self, primary: &Self) -> Result<Followed, Error> {
        if self.postmaster.is_some() && self.is_standby().unwrap_or(false) {
            self.stream_from(Some(primary))?;
            return Ok(Followed::Repointed);
        }
        self.stop_fast()?;
        // pg_rewind reads the other's timeline from its control file, which says it only after a checkpoint.
        primary.sql("postgres")?.run("CHECKPOINT")?;
        let followed = match self.rewind_to(primary) {
            Ok(()) => Followed::Rewound,
            Err(Error::Program { .. }) => {
                storage::empty(&self.data_dir)?;
                self.copy_from(primary)?;
                Followed::Copied
            }
            Err(error) => return Err(error),
        };
        self.launch()?;
        Ok(followed)
    }

    /// Ends this standby's replication: it stays where it is, and its primary is not told.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub fn cut_replication(&self) -> Result<(), Error> {
        self.stream_from(None)
    }

    /// Lets this standby stream from `primary`, again or for the first time. Waits until it does. The standby must not be ahead.
    ///
    /// # Errors
    /// When it cannot be reached, or does not stream within a minute.
    pub fn heal_replication(&self, primary: &Self) -> Result<(), Error> {
        self.stream_from(Some(primary))
    }

    /// Sets `synchronous_standby_names` of this primary, at once: `*` and `ANY 2 (*)` are values, the empty text is none.
    ///
    /// # Errors
    /// When it cannot be reached or refuses the text.
    pub fn set_synchronous(&self, names: &str) -> Result<(), Error> {
        self.set("synchronous_standby_names", names)?;
        let wanted = format!(
            "SELECT current_setting('synchronous_standby_names') = '{}'",
            names.replace('\'', "''")
        );
        // A session has its own copy, read when it is told to; a new one has the new one.
        self.until("did not take its setting", &wanted)
    }

    /// The first value of the first row; empty for NULL and for no row.
    fn ask(&self, query: &str) -> Result<String, SqlError> {
        let rows = self.sql("postgres")?.run(query)?;
        Ok(rows
            .into_iter()
            .flatten()
            .next()
            .flatten()
            .unwrap_or_default())
    }

    fn stream_from(&self, primary: Option<&Self>) -> Result<(), Error> {
        let from = primary.map_or_else(String::new, Self::conninfo);
        self.set("primary_conninfo", &from)?;
        let (what, wanted) = match primary {
            None => (
                "went on streaming",
                "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)".to_owned(),
            ),
            Some(primary) => (
                "does not stream",
                format!(
                    "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming' AND sender_port = {})",
                    primary.port
                ),
            ),
        };
        self.until(what, &wanted)
    }

    fn set(&self, key: &str, value: &str) -> Result<(), Error> {
        let value = value.replace('\'', "''");
        let mut sql = self.sql("postgres")?;
        sql.run(&format!("ALTER SYSTEM SET {key} = '{value}'"))?;
        sql.run("SELECT pg_reload_conf()")?;
        Ok(())
    }

    /// Waits until `query` says true; `what` says what is the matter when it never does.
    pub(crate) fn until(&self, what: &str, query: &str) -> Result<(), Error> {
        let mut answer = Ok(String::new());
        if wait_until(LIMIT, || {
            answer = self.ask(query);
            answer.as_ref().is_ok_and(|answer| answer == "t")
        }) {
            return Ok(());
        }
        answer?;
        Err(self.failed(format!("{what} within {} seconds", LIMIT.as_secs())))
    }

    fn conninfo(&self) -> String {
        format!("host=127.0.0.1 port={} user=postgres", self.port)
    }

    /// Fills the data folder, which must be empty or missing, with a base backup of `primary` that will be a standby of it.
    fn copy_from(&self, primary: &Self) -> Result<(), Error> {
        storage::run(
            primary
                .base_backup(&self.data_dir)
                .arg("--write-recovery-conf"),
        )?;
        self.forget_log()
    }

    fn rewind_to(&self, primary: &Self) -> Result<(), Error> {
        // Whatever the other has beside its tables is copied over ours, its log too.
        let (log, kept) = (self.log_file(), self.folder.path().join("log"));
        let aside = || Error::io(format!("move {}", log.display()));
        fs::rename(&log, &kept).map_err(aside())?;
        let result = storage::run(
            self.program("pg_rewind")
                .arg("--target-pgdata")
                .arg(&self.data_dir)
                .arg("--source-server")
                .arg(format!("{} dbname=postgres", primary.conninfo()))
                .args(["--write-recovery-conf", "--no-sync"]),
        );
        fs::rename(&kept, &log).map_err(aside())?;
        result
    }
}
