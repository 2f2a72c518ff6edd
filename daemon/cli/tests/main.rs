//! The real binary against a real PostgreSQL: what a person types, what comes back, and the exit code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bulk;
mod cluster;
mod commands;
mod daemon;
mod explain;
mod house;
mod isolation;
mod manual;
mod passwords;
mod readme;
mod selftest;
