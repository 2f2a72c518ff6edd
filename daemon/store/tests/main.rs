//! The schema on a real PostgreSQL: what each function does in each state, and what happens when two act at once.
//!
//! Most tests speak SQL over two plain connections, as a worker or a program of a user's own would.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr
)]

mod claims;
mod differential;
mod durability;
mod effects;
mod ends;
mod enqueue;
mod handlers;
mod merge;
mod migrate;
mod open;
mod persons;
mod races;
mod reattach;
mod replay;
mod roles;
mod sessions;
mod stops;
mod storm;
mod support;
mod sweep;
mod switches;
mod uncovered;
mod upgrade;
mod wakeups;
mod window;
