//! A blocking client of a few lines: it waits until a server is up, and lets tests look from outside.
//!
//! It speaks version 3 of PostgreSQL's protocol: start-up without a password, then simple queries.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// One row, each value as text; `None` is NULL.
pub type Row = Vec<Option<String>>;

/// How long a server may take to answer a log-in. A frozen one never does.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(5);

/// An open connection.
pub struct Sql {
    stream: Box<dyn Stream>,
}

trait Stream: Read + Write + Send {
    /// How long an answer is waited for; `None` is for ever.
    fn limit(&self, limit: Option<Duration>) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(limit)
    }
}

impl Stream for UnixStream {
    fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(limit)
    }
}

/// Why a statement or a log-in failed.
#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    /// The server refused it.
    #[error("{message} (SQLSTATE {code}){}", hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default())]
    Refused {
        /// The five characters of the SQLSTATE.
        code: String,
        /// PostgreSQL's message.
        message: String,
        /// PostgreSQL's hint.
        hint: Option<String>,
    },
    /// The connection could not be made, or broke.
    #[error("no connection to the server")]
    Connection(#[from] io::Error),
    /// The server wants a password.
    #[error(
        "the server asks for a password, which this client cannot give; allow `trust` in its pg_hba.conf"
    )]
    Password,
}

impl SqlError {
    /// The SQLSTATE, where the server gave one.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Refused { code, .. } => Some(code),
            _ => None,
        }
    }
}

impl Sql {
    /// Logs in over 127.0.0.1. Fails with [`SqlError::Connection`] when the server does not answer within 5 seconds.
    pub fn connect(port: u16, database: &str, user: &str) -> Result<Self, SqlError> {
        let sql = Self::connect_within(LOGIN_TIMEOUT, port, database, user)?;
        sql.stream.limit(None)?;
        Ok(sql)
    }

    /// The same with a limit of one's own, which stays: no answer takes longer. After one that would have, the connection is of no
    /// more use.
    pub fn connect_within(
        limit: Duration,
        port: u16,
        database: &str,
        user: &str,
    ) -> Result<Self, SqlError> {
        let stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), limit)?;
        stream.set_nodelay(true)?;
        stream.limit(Some(limit))?;
        Self::log_in(stream, database, user)
    }

    /// The same over the Unix socket in `socket_dir`.
    pub fn connect_socket(
        socket_dir: &Path,
        port: u16,
        database: &str,
        user: &str,
    ) -> Result<Self, SqlError> {
        let stream = UnixStream::connect(socket_dir.join(format!(".s.PGSQL.{port}")))?;
        stream.limit(Some(LOGIN_TIMEOUT))?;
        let sql = Self::log_in(stream, database, user)?;
        sql.stream.limit(None)?;
        Ok(sql)
    }

    /// Runs one or more statements, for as long as they take, and gives the rows of all of them.
    /// After an error the connection can be used again, unless it is [`SqlError::Connection`].
    pub fn run(&mut self, sql: &str) -> Result<Vec<Row>, SqlError> {
        self.send(b'Q', &[sql.as_bytes(), &[0]])?;
        self.answer()
    }

    fn log_in(stream: impl Stream + 'static, database: &str, user: &str) -> Result<Self, SqlError> {
        let mut body = 196_608_u32.to_be_bytes().to_vec();
        for text in [
            "user",
            user,
            "database",
            database,
            "application_name",
            "tenure-embedded",
            "",
        ] {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        let mut sql = Self {
            stream: Box::new(stream),
        };
        sql.stream.write_all(&length(body.len())?)?;
        sql.stream.write_all(&body)?;
        sql.answer()?;
        Ok(sql)
    }

    fn send(&mut self, kind: u8, parts: &[&[u8]]) -> io::Result<()> {
        let body = parts.concat();
        let mut message = vec![kind];
        message.extend_from_slice(&length(body.len())?);
        message.extend_from_slice(&body);
        self.stream.write_all(&message)
    }

    /// Reads until the server is ready for the next query.
    fn answer(&mut self) -> Result<Vec<Row>, SqlError> {
        let mut rows = Vec::new();
        let mut refused = None;
        loop {
            let mut head = [0; 5];
            if let Err(error) = self.stream.read_exact(&mut head) {
                // A refused log-in, and a session that is being ended, close after the error.
                return Err(refused.unwrap_or(SqlError::Connection(error)));
            }
            let [kind, size @ ..] = head;
            let size = u32::from_be_bytes(size)
                .checked_sub(4)
                .ok_or_else(|| broken("a length"))?;
            let mut body = vec![0; size as usize];
            self.stream.read_exact(&mut body)?;
            match kind {
                b'D' => rows.push(row(&body).ok_or_else(|| broken("a row"))?),
                b'E' => refused = Some(refusal(&body)),
                b'R' if !body.starts_with(&[0; 4]) => return Err(SqlError::Password),
                // COPY FROM STDIN: we have nothing to give.
                b'G' => self.send(b'f', &[b"this client has no data to copy\0"])?,
                b'Z' => return refused.map_or(Ok(rows), Err),
                _ => {}
            }
        }
    }
}

impl fmt::Debug for Sql {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sql").finish_non_exhaustive()
    }
}

/// A message's length counts itself.
fn length(body: usize) -> io::Result<[u8; 4]> {
    u32::try_from(body + 4).map(u32::to_be_bytes).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "a statement is longer than 4 GiB",
        )
    })
}

fn broken(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what} in the server's answer makes no sense"),
    )
}

fn row(body: &[u8]) -> Option<Row> {
    let (columns, mut rest) = body.split_first_chunk()?;
    let mut row = Row::new();
    for _ in 0..u16::from_be_bytes(*columns) {
        let (size, tail) = rest.split_first_chunk()?;
        rest = tail;
        row.push(match usize::try_from(i32::from_be_bytes(*size)) {
            Ok(size) => {
                let (value, tail) = rest.split_at_checked(size)?;
                rest = tail;
                Some(String::from_utf8_lossy(value).into_owned())
            }
            // A length of -1 is NULL.
            Err(_) => None,
        });
    }
    Some(row)
}

fn refusal(body: &[u8]) -> SqlError {
    let field = |letter| {
        body.split(|&byte| byte == 0)
            .find_map(|field| field.strip_prefix(&[letter]))
            .map(|text| String::from_utf8_lossy(text).into_owned())
    };
    SqlError::Refused {
        code: field(b'C').unwrap_or_default(),
        message: field(b'M').unwrap_or_default(),
        hint: field(b'H'),
    }
}
