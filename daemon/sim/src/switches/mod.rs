//! A seeded simulation of switches of the primary: the real keeper, the real choice of the primary and the real memory of what has
//! ended, against three servers that keep the true rules (`tenure_core::model`).
//!
//! A primary is killed, frozen, handed over, overtaken, restarted; a standby that may lack its last commits is promoted, and
//! perhaps falls while workers re-attach to it. Replication lags and is cut. Daemons crash, freeze, are stopped and succeed each
//! other, with and without a `state_dir`. Then there is peace. After every step:
//! - no two handlers of one job live, and none starts without its job's present lease,
//! - no job runs again that a living daemon knows to be complete,
//! - a window closes only when all living daemons have spoken, or the leases of those who have not have ended;
//!
//! and at the end every job that the primary has, or that a living daemon had claimed, has one outcome; what such a daemon had
//! completed is complete, and its follow-up is there once.
//!
//! Some things are no promise and counted apart: who reaches an old primary that still takes writes is *astray*; a proof that
//! there is no primary is *false* where one lives on for others while it is cut off from every standby and from who proves; and a
//! *stranger* is a worker that was admitted though not all others had heard of it, and whose registration was lost then.
//!
//! - `world`: which troubles there are, and what a run found.
//! - `simulation`, `troubles`: the order of events, and what goes wrong.
//! - `cluster`, `server`: servers and replication; statements.
//! - `network`: the fate of each message.
//! - `daemon`: what the shell around the pure parts does.
//! - `judge`: what must never be.

mod cluster;
mod daemon;
mod judge;
mod network;
mod server;
mod simulation;
mod troubles;
mod world;

pub use simulation::run;
pub use world::{Counts, Fault, Report, Violation, World};
