//! What tenure decides, and nothing that it does.
//!
//! Every module here is pure: facts and a time come in, commands go out. There is no clock, no input or output and no
//! source of randomness, so the same code runs in the daemon, under the seeded simulation (`tenure-sim`) and in property
//! tests. A machine has one door, `on(now, event) -> commands`, and says by `wake_at()` when only time matters to it.

pub mod breaker;
pub mod claim;
pub mod crew;
pub mod drain;
pub mod explain;
pub mod ids;
pub mod lease;
pub mod model;
pub mod pattern;
pub mod poll;
pub mod primary;
pub mod replay;
pub mod retry;
pub mod time;
