//! All that tenure says to PostgreSQL. No other crate knows SQL.
//!
//! The rules live in the SQL functions of `migrations/`; here they are called, with bounds on every wait and errors by what
//! they imply.

pub mod address;
pub mod bulk;
pub mod claim;
pub mod cluster;
pub mod error;
pub mod explain;
pub mod finish;
mod hosts;
mod look;
pub mod migrate;
pub mod open;
pub mod person;
pub mod probe;
pub mod route;
mod row;
pub mod session;
pub mod tls;
pub mod value;
pub mod view;
mod wire;
pub mod worker;
