//! Base backups, and the return to one: a restore to an earlier point in time.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::{Error, Server, storage};

/// The whole data of a server at one moment. It goes with this value.
#[derive(Debug)]
pub struct Backup {
    folder: TempDir,
}

impl Server {
    /// Takes a base backup of this running server.
    ///
    /// # Errors
    /// When `pg_basebackup` fails.
    pub fn backup(&self) -> Result<Backup, Error> {
        let folder = storage::temporary(&self.account)?;
        storage::run(&mut self.base_backup(&folder.path().join("data")))?;
        Ok(Backup { folder })
    }

    /// Replaces all data by those of `backup` and starts on the same port, as a restore to that point in time does: the server
    /// takes writes when this returns, on a new timeline.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn restore(&mut self, backup: &Backup) -> Result<(), Error> {
        self.stop_fast()?;
        storage::empty(&self.data_dir)?;
        storage::run(
            self.account
                .command(Path::new("cp"))
                .arg("-a")
                .arg(backup.folder.path().join("data/."))
                .arg(&self.data_dir),
        )?;
        self.forget_log()?;
        self.want_recovery()
            .map_err(Error::io(format!("write to {}", self.data_dir.display())))?;
        self.account.give(&self.data_dir.join("recovery.signal"))?;
        self.launch()?;
        self.until("did not end its recovery", "SELECT NOT pg_is_in_recovery()")?;
        let mut sql = self.sql("postgres")?;
        for key in [
            "restore_command",
            "recovery_target",
            "recovery_target_action",
        ] {
            sql.run(&format!("ALTER SYSTEM RESET {key}"))?;
        }
        Ok(())
    }

    /// The backup has all the WAL that it needs, so there is no archive to ask.
    fn want_recovery(&self) -> io::Result<()> {
        fs::File::create(self.data_dir.join("recovery.signal"))?;
        fs::OpenOptions::new()
            .append(true)
            .open(self.data_dir.join("postgresql.auto.conf"))?
            .write_all(
                b"restore_command = 'false'\nrecovery_target = 'immediate'\nrecovery_target_action = 'promote'\n",
            )
    }

    /// `pg_basebackup` from this server into `data_dir`.
    pub(crate) fn base_backup(&self, data_dir: &Path) -> Command {
        let mut command = self.program("pg_basebackup");
        command
            .args(["--host=127.0.0.1", "--username=postgres"])
            .arg(format!("--port={}", self.port))
            .args(["--checkpoint=fast", "--wal-method=stream", "--no-sync"])
            .arg("--pgdata")
            .arg(data_dir);
        command
    }

    /// Removes the log that came with a copy: it is that of another server.
    pub(crate) fn forget_log(&self) -> Result<(), Error> {
        let log = self.log_file();
        match fs::remove_file(&log) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", log.display()))(error))
            }
            _ => Ok(()),
        }
    }
}
