//! The runtime crate against real processes and sockets.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods
)]

mod corpus;
mod daemon;
mod exec;
mod guard_tests;
