//! Scenarios with the whole daemon, each with a server of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod astray;
mod certificates;
mod clocks;
mod connections;
mod deaths;
mod drain;
mod durability;
mod everything;
mod managed;
mod obstacles;
mod open;
mod outages;
mod persons;
mod processes;
mod storm;
mod surroundings;
mod switches;
