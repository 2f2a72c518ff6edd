//! Real PostgreSQL servers for tests and for `tenure demo`.
//!
//! A [`Server`] runs the programs that are installed on this machine, in its own data folder, on its own port of
//! 127.0.0.1 and on a Unix socket in its own folder. It is started as a direct child and never as root. Everyone on the
//! machine may log in as the superuser `postgres` without a password, so it is no place for data that matters.
//!
//! [`Server::standby`] gives a server one that streams from it, so a primary can be lost, promoted and taken back as on a real
//! cluster; [`Server::backup`] and [`Server::restore`] go back in time.
//!
//! ```no_run
//! use tenure_embedded::{Options, Server};
//!
//! let server = Server::start(Options::for_tests())?;
//! server.create_database("app")?;
//! println!("{}", server.url("app", "postgres"));
//! # Ok::<(), tenure_embedded::Error>(())
//! ```

mod account;
mod backup;
mod error;
mod installation;
mod leash;
mod port;
mod postmaster;
mod processes;
mod programs;
mod server;
mod sql;
mod standby;
mod storage;

pub use backup::Backup;
pub use error::Error;
pub use leash::Leash;
pub use port::free_port;
pub use processes::children;
pub use programs::Programs;
pub use server::{Options, Server};
pub use sql::{Row, Sql, SqlError};
pub use standby::Followed;
