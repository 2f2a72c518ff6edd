//! A server, from its options to its end.
//!
//! States: running (it accepts connections), frozen, or down after [`Server::stop_fast`] or [`Server::kill9`].
//! [`Server::restart`] leads from all of them back to running, with the same data and the same port. What only clusters know,
//! standbys and restored backups, is in `standby.rs` and `backup.rs`.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::account::Account;
use crate::installation::Installation;
use crate::port::free_port;
use crate::postmaster::Postmaster;
use crate::{Error, Sql, SqlError, processes, storage};

/// A start may have to recover from a crash first.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How to start a server.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Folder of `initdb` and `postgres`; by default `TENURE_PG_BIN`, else the highest version in /usr/lib/postgresql,
    /// else the first in PATH.
    pub bin_dir: Option<PathBuf>,
    /// A folder that keeps the data between starts; by default a temporary one that goes with the server.
    /// Temporary servers have WAL segments of 1 MB, lasting ones the usual 16 MB.
    pub data_dir: Option<PathBuf>,
    /// Port on 127.0.0.1; 0 for a free one.
    pub port: u16,
    /// Settings for `postgres -c`; they win over all others.
    pub settings: Vec<(String, String)>,
    /// Without fsync: what committed survives a crash of the server, not one of the machine.
    pub fast: bool,
}

impl Options {
    /// A temporary server without fsync.
    #[must_use]
    pub fn for_tests() -> Self {
        Self {
            fast: true,
            ..Self::default()
        }
    }
}

/// A PostgreSQL server that ends when this is dropped, and also when this process dies.
#[derive(Debug)]
pub struct Server {
    // Fields are dropped in this order: the process before its folders.
    pub(crate) postmaster: Option<Postmaster>,
    pub(crate) installation: Installation,
    pub(crate) account: Account,
    pub(crate) settings: Vec<(String, String)>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) port: u16,
    pub(crate) data_dir: PathBuf,
    pub(crate) folder: TempDir,
}

impl Server {
    /// Starts a server and waits until it accepts connections.
    ///
    /// # Errors
    /// When PostgreSQL is not installed, cannot run in these folders or on this port, or already runs there. Each
    /// [`Error`] says what to do.
    pub fn start(options: Options) -> Result<Self, Error> {
        let installation = Installation::find(options.bin_dir.as_deref())?;
        let account = Account::choose(options.data_dir.as_deref())?;
        account.must_reach(&installation.program("postgres"))?;
        let folder = storage::temporary(&account)?;
        let data_dir = if let Some(dir) = options.data_dir {
            storage::prepare_lasting(&account, &installation, &dir, !options.fast)?
        } else {
            let dir = folder.path().join("data");
            storage::copy_template(&account, &installation, &dir)?;
            dir
        };
        let mut settings = Vec::new();
        if options.fast {
            settings.extend(
                ["fsync", "full_page_writes"].map(|key| (key.to_owned(), "off".to_owned())),
            );
        }
        settings.extend(options.settings);
        let mut server = Self {
            postmaster: None,
            installation,
            account,
            settings,
            environment: Vec::new(),
            port: options.port,
            data_dir,
            folder,
        };
        if options.port == 0 {
            server.launch_on_a_free_port()?;
        } else {
            server.launch()?;
        }
        Ok(server)
    }

    /// `postgres://user@127.0.0.1:port/database`. Names must not need escaping.
    #[must_use]
    pub fn url(&self, database: &str, user: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{database}", self.port)
    }

    /// Port on 127.0.0.1; the same over all restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Folder of the Unix socket; only the server's user and root may enter it.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        self.folder.path()
    }

    /// The data folder.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The server's log, in its data folder.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.data_dir.join("server.log")
    }

    /// Version of PostgreSQL, such as `15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.installation.version()
    }

    /// Process id of the postmaster, unless the server is down.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.postmaster.as_ref().map(Postmaster::pid)
    }

    /// Variables of the environment for its processes, from the next start on.
    pub fn set_environment(&mut self, environment: Vec<(String, String)>) {
        self.environment = environment;
    }

    /// One of PostgreSQL's programs, such as `pg_dump`, to be run as the server's user.
    #[must_use]
    pub fn program(&self, name: &str) -> Command {
        self.account.command(&self.installation.program(name))
    }

    /// Logs in as the superuser, over the Unix socket.
    ///
    /// # Errors
    /// As [`Sql::connect_socket`].
    pub fn sql(&self, database: &str) -> Result<Sql, SqlError> {
        Sql::connect_socket(self.folder.path(), self.port, database, "postgres")
    }

    /// Makes an empty database.
    ///
    /// # Errors
    /// As [`Sql::run`]; SQLSTATE 42P04 when it exists.
    pub fn create_database(&self, name: &str) -> Result<(), SqlError> {
        let name = name.replace('"', "\"\"");
        self.sql("postgres")?
            .run(&format!("CREATE DATABASE \"{name}\""))?;
        Ok(())
    }

    /// Ends all sessions, writes a checkpoint and stops. Does nothing to a server that is down.
    ///
    /// # Errors
    /// When the operating system refuses to signal it.
    pub fn stop_fast(&mut self) -> Result<(), Error> {
        match self.postmaster.take() {
            Some(mut postmaster) => postmaster.stop(Signal::SIGINT),
            None => Ok(()),
        }
    }

    /// Kills all processes of the server at once. The next start recovers from the WAL.
    ///
    /// # Errors
    /// When the operating system refuses to signal it.
    pub fn kill9(&mut self) -> Result<(), Error> {
        match self.postmaster.take() {
            Some(mut postmaster) => postmaster.kill(),
            None => Ok(()),
        }
    }

    /// Stops all processes of the server where they stand (SIGSTOP): new connections are taken by the kernel and get no answer.
    ///
    /// # Errors
    /// When the operating system refuses to signal it.
    pub fn freeze(&self) -> Result<(), Error> {
        self.postmaster.as_ref().map_or(Ok(()), Postmaster::freeze)
    }

    /// Lets a frozen server go on (SIGCONT).
    ///
    /// # Errors
    /// When the operating system refuses to signal it.
    pub fn thaw(&self) -> Result<(), Error> {
        self.postmaster.as_ref().map_or(Ok(()), Postmaster::thaw)
    }

    /// Stops the server if it runs, starts it again on the same port, and waits until it accepts connections.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn restart(&mut self) -> Result<(), Error> {
        self.stop_fast()?;
        self.launch()
    }

    pub(crate) fn launch_on_a_free_port(&mut self) -> Result<(), Error> {
        // A port that was free a moment ago may have been taken.
        let mut tries = 0;
        loop {
            self.port = free_port()?;
            match self.launch() {
                Err(Error::Failed { log, .. }) if tries < 5 && log.contains("could not bind") => {
                    tries += 1;
                }
                result => return result,
            }
        }
    }

    pub(crate) fn launch(&mut self) -> Result<(), Error> {
        let (log, start) = self.open_log()?;
        let temporary = self.folder.path();
        let mut postmaster = Postmaster::spawn(self.command(), &log, temporary)?;
        let mut ended = Ok(None);
        let mut refused = None;
        let up = processes::wait_until(START_LIMIT, || {
            ended = postmaster.ended();
            match self.sql("postgres") {
                Ok(_) => true,
                // Not listening yet, or "the database system is starting up".
                Err(SqlError::Connection(_)) => !matches!(ended, Ok(None)),
                Err(error) if error.code() == Some("57P03") => !matches!(ended, Ok(None)),
                Err(error) => {
                    refused = Some(error);
                    true
                }
            }
        });
        if let Some(error) = refused {
            return Err(error.into());
        }
        let what = match ended? {
            Some(how) => how,
            None if up => {
                self.postmaster = Some(postmaster);
                return Ok(());
            }
            None => format!("was not ready after {} seconds", START_LIMIT.as_secs()),
        };
        Err(self.failure(what, start))
    }

    /// That something did not happen, with the end of the log.
    pub(crate) fn failed(&self, what: String) -> Error {
        self.failure(what, 0)
    }

    fn failure(&self, what: String, since: u64) -> Error {
        Error::Failed {
            data_dir: self.data_dir.clone(),
            what,
            log: self.log_since(since),
        }
    }

    fn command(&self) -> Command {
        let own = [
            ("listen_addresses", "127.0.0.1".to_owned()),
            ("port", self.port.to_string()),
            (
                "unix_socket_directories",
                self.folder.path().display().to_string(),
            ),
            ("logging_collector", "off".to_owned()),
            ("log_line_prefix", "%m [%p] %a ".to_owned()),
        ];
        let mut command = self.account.command(&self.installation.program("postgres"));
        command.envs(self.environment.iter().map(|(key, value)| (key, value)));
        command.arg("-D").arg(&self.data_dir);
        let given = self
            .settings
            .iter()
            .map(|(key, value)| (key.as_str(), value));
        for (key, value) in own.iter().map(|(key, value)| (*key, value)).chain(given) {
            command.arg("-c").arg(format!("{key}={value}"));
        }
        // Ctrl-C is for us; we end the server when we are through with it.
        command.process_group(0);
        command
    }

    /// The log, opened for more, and its present length.
    fn open_log(&self) -> Result<(File, u64), Error> {
        let path = self.log_file();
        let open = || {
            let log = OpenOptions::new().create(true).append(true).open(&path)?;
            let length = log.metadata()?.len();
            Ok((log, length))
        };
        open().map_err(Error::io(format!("open {}", path.display())))
    }

    fn log_since(&self, start: u64) -> String {
        let mut text = Vec::new();
        if let Ok(mut log) = File::open(self.log_file()) {
            // What cannot be read is missing from an error message, no more.
            let _ = log
                .seek(SeekFrom::Start(start))
                .and_then(|_| log.read_to_end(&mut text));
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}
