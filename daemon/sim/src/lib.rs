//! A seeded simulation of several workers: the real lease keeper against a model of the database, under a virtual clock,
//! a network that loses, delays and half delivers, and machines that stop, crash and come back.
//!
//! A run has two minutes of trouble and then peace. After every step:
//! - no two handlers of one job live at once, and none starts without its job's present lease (unless whole machines freeze),
//! - no completion is accepted twice;
//!
//! and at the end of the peace every job has ended: none was lost, and no lease was left to nobody.
//!
//! - `world`: which troubles there are, and what a run found.
//! - `simulation`: the order of events, the troubles, the verdict.
//! - `network`: the queue of events, and the fate of each message.
//! - `machine`: one daemon with its guard and handlers: what the shell around the keeper does.
//! - `database`: the rules of the SQL functions.
//! - `queue`, `random`: events in the order of time, and chance from a seed.
//!
//! [`switches`] is another such simulation: of three servers, one of which is the primary.

mod database;
mod machine;
mod network;
mod queue;
mod random;
mod simulation;
pub mod switches;
mod world;

pub use database::Counts;
pub use simulation::run;
pub use world::{Report, Violation, World};
