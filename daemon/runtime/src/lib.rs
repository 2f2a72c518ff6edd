//! The running daemon: thin tasks around the decisions of `tenure-core`.
//!
//! Start reading at [`daemon`]; `daemon/ARCHITECTURE.md` has the picture.

mod attach;
mod attempt;
pub mod cgroup;
mod circuits;
mod claims;
mod clock;
pub mod completions;
pub mod daemon;
mod dispatch;
mod ends;
pub mod events;
pub mod exec;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod guard;
mod heart;
mod held;
mod journal;
mod lanes;
mod leases;
mod lookout;
mod marks;
mod open;
mod orders;
mod service;
pub mod settings;
mod speaker;
mod stats;
pub mod status;
pub mod supervisor;
mod sweeper;
mod targets;
mod tasks;
