//! What can go wrong with a server, and what to do about it.

use std::io;
use std::path::PathBuf;

use crate::SqlError;

/// Why a server could not be started, stopped or asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No folder with PostgreSQL's server programs was found.
    #[error(
        "PostgreSQL's server programs were not found (looked in {searched}); install them with \
         `apt-get install postgresql`, or set TENURE_PG_BIN to the folder that holds `initdb` and `postgres`"
    )]
    NotInstalled {
        /// The places that were searched.
        searched: String,
    },
    /// The folder that was named does not hold this program.
    #[error(
        "{path} does not exist: the folder must hold PostgreSQL's `initdb` and `postgres` \
         (Debian: `apt-get install postgresql`, then /usr/lib/postgresql/VERSION/bin)"
    )]
    ProgramMissing {
        /// The program that was looked for.
        path: PathBuf,
    },
    /// We are root, and there is nobody to run the server as.
    #[error(
        "PostgreSQL does not run as root, and this machine has no user `postgres` to run it as; \
         create one with `useradd --system postgres`, or start this as an ordinary user"
    )]
    NoAccount,
    /// The server's user cannot enter a folder that it needs.
    #[error(
        "the user `{user}`, who runs PostgreSQL here, cannot enter {folder}; choose a place that everyone may enter, \
         such as one below /var/lib or /tmp"
    )]
    Unreachable {
        /// Name of the user.
        user: String,
        /// The first folder on the way that is closed to it.
        folder: PathBuf,
    },
    /// Another server runs on the same data.
    #[error(
        "a PostgreSQL server (process {pid}) already runs in {data_dir}; stop it first, or use another folder"
    )]
    AlreadyRunning {
        /// Its postmaster.
        pid: i32,
        /// The data folder of both.
        data_dir: PathBuf,
    },
    /// The folder holds something, but not a PostgreSQL database.
    #[error(
        "{data_dir} is not empty and holds no PostgreSQL data (PG_VERSION is missing); choose another folder"
    )]
    NotOurs {
        /// The folder.
        data_dir: PathBuf,
    },
    /// The data was written by another major version.
    #[error(
        "{data_dir} was made by PostgreSQL {found}, but {programs} is version {installed}; \
         set TENURE_PG_BIN to the programs of version {found}, or use another folder"
    )]
    OtherVersion {
        /// The folder.
        data_dir: PathBuf,
        /// Version that made the data.
        found: String,
        /// Folder of the programs.
        programs: PathBuf,
        /// Their version.
        installed: String,
    },
    /// A helper program (`initdb`, `cp`) failed.
    #[error("{program} failed: {output}")]
    Program {
        /// Its name.
        program: String,
        /// What it wrote.
        output: String,
    },
    /// The server ended by itself, or did not come up in time.
    #[error("the PostgreSQL server in {data_dir} {what}; the end of its log:\n{log}")]
    Failed {
        /// Its data folder.
        data_dir: PathBuf,
        /// What happened.
        what: String,
        /// The last lines of its log.
        log: String,
    },
    /// The server refused a statement.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// The operating system refused something.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: names what was tried when `source` came back.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}
