//! What can go wrong between the daemon and the database, by what it implies.

use std::error::Error as _;

use thiserror::Error;
use tokio_postgres::error::SqlState;

/// Why a call did not succeed. Unless it says otherwise, a statement that failed has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    /// No connection, or none in time, or it broke: whether the statement was carried out is not known.
    #[error("the database cannot be reached: {0}")]
    Unreachable(String),
    /// No answer within the bound: whether the statement was carried out is not known.
    #[error("the database gave no answer to {0} in time")]
    Timeout(&'static str),
    /// It was carried out, but an administrator ended the wait for the synchronous standby: a switch can lose it.
    #[error("the server carried out {0} without its synchronous standby")]
    Unreplicated(&'static str),
    /// The server does not take writes: it is a standby, or set to read only.
    #[error("the server takes no writes: {0}")]
    ReadOnly(String),
    /// TN001: the database is in another epoch.
    #[error("{0}")]
    OtherEpoch(String),
    /// TN004: the worker is unknown to the database, or was declared dead.
    #[error("{0}")]
    DeadWorker(String),
    /// TN002, TN003, TN005, TN006, TN007: tenure refuses it; `code` says which.
    #[error("{message}")]
    Refused {
        /// The SQLSTATE.
        code: String,
        /// What stands against it.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
    /// A deadlock, a serialization failure or a lock that was not free: the same statement may succeed at once.
    #[error("the database asks to repeat it: {0}")]
    Repeat(String),
    /// The schema is missing or older than this program.
    #[error("the database lacks what this program needs ({0}); run `tenure migrate up`")]
    Unmigrated(String),
    /// A value that PostgreSQL does not take (class 22): the statement fails each time.
    #[error("a value was refused: {0}")]
    BadValue(String),
    /// Login, rights, or anything else.
    #[error("{0}")]
    Failed(String),
}

impl StoreError {
    /// Whether the connection may be of no use any more.
    #[must_use]
    pub fn breaks_connection(&self) -> bool {
        matches!(
            self,
            Self::Unreachable(_) | Self::Timeout(_) | Self::ReadOnly(_)
        )
    }

    /// A value of our own making was refused: the answer is to split the batch, not to repeat it.
    #[must_use]
    pub fn is_about_input(&self) -> bool {
        match self {
            Self::BadValue(_) => true,
            Self::Refused { code, .. } => code == "TN007",
            _ => false,
        }
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            let text = chain(&error);
            // A value that does not fit its parameter fails before anything is sent; all else without a code is the connection.
            if text.contains("server does not support TLS") {
                return Self::Unreachable(format!(
                    "{text}; if the network to it is safe, add sslmode=disable to the address"
                ));
            }
            return if text.starts_with("error serializing")
                || text.starts_with("error deserializing")
            {
                Self::Failed(text)
            } else {
                Self::Unreachable(text)
            };
        };
        let message = db.message().to_owned();
        let code = db.code().code();
        match db.code() {
            &SqlState::READ_ONLY_SQL_TRANSACTION => return Self::ReadOnly(message),
            &SqlState::T_R_DEADLOCK_DETECTED
            | &SqlState::T_R_SERIALIZATION_FAILURE
            | &SqlState::LOCK_NOT_AVAILABLE => {
                return Self::Repeat(message);
            }
            &SqlState::UNDEFINED_FUNCTION
            | &SqlState::UNDEFINED_TABLE
            | &SqlState::UNDEFINED_COLUMN
            | &SqlState::INVALID_SCHEMA_NAME => return Self::Unmigrated(message),
            _ => {}
        }
        match code {
            "TN001" => Self::OtherEpoch(message),
            "TN004" => Self::DeadWorker(message),
            _ if code.starts_with("TN") => Self::Refused {
                code: code.to_owned(),
                message,
                hint: db.hint().filter(|hint| !hint.is_empty()).map(str::to_owned),
            },
            // 57014 is a statement_timeout; the other 57Pxx, 08xxx and 53300 say that this server does not serve us now.
            "57014" => Self::Timeout("a statement"),
            _ if code.starts_with("57P") || code.starts_with("08") || code == "53300" => {
                Self::Unreachable(message)
            }
            // Not of the form of its type, or beyond what the server can hold: too deep, or too long a text in JSON.
            _ if code.starts_with("22") || code.starts_with("54") => Self::BadValue(message),
            _ => Self::Failed(format!("{message} (SQLSTATE {code})")),
        }
    }
}

/// The error with all its causes: tokio-postgres prints none of them by itself.
pub(crate) fn chain(error: &tokio_postgres::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
