//! Daemons, PostgreSQL and handlers as they are in earnest, and what befalls them: kill, stop, crash, freeze.
//!
//! A [`Lab`] has a server, a migrated database and as many [`Daemon`]s as a scenario starts, each the real binary with its
//! own configuration. Their handlers are witnesses (`handlers/witness.sh`): all write to one file. The verdict is
//! computed ([`tenure_verdict`]) from that file, from the enqueues that were acknowledged and from what the database shows, never from logs.
//!
//! A [`Cluster`] is a lab whose server has standbys: there the primary changes, and each run ends in a [`Report`].
//!
//! Everything waits for states, with one long patience, and fails by panicking, as assertions do.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a rig fails by panicking, and measures by the clock on the wall"
)]

mod balancer;
mod cluster;
mod daemon;
mod enclosure;
mod fleet;
mod http;
mod lab;
mod managed;
mod patroni;
mod plan;
mod pooler;
mod producers;
mod proxy;
mod random;
mod receiver;
mod report;
pub mod servers;
mod service;
mod watch;

pub use cluster::Cluster;
pub use daemon::Daemon;
pub use enclosure::{Disk, Network};
pub use fleet::Fleet;
pub use lab::{Lab, PATIENCE, UNFINISHED, enqueue_many};
pub use managed::{Managed, Way};
pub use patroni::Patroni;
pub use plan::{MIX, Plan, Route};
pub use pooler::Pooler;
pub use producers::{Enqueue, Notes, Producers, enqueue};
pub use proxy::Proxy;
pub use random::Random;
pub use receiver::Receiver;
pub use report::Report;
pub use servers::Servers;
pub use tenure_verdict::{What, uptime};
