//! Leases: how long this process may believe that a job is its own.
//!
//! The database alone decides who owns a job. A daemon renews all its leases by one heartbeat, and believes in them by its
//! own monotonic clock: from the moment it **sent** a beat that was answered, for `lease_ttl` minus a margin. When that
//! trust ends unrenewed it kills its handlers, and the margin is long enough for them to be dead before the database gives
//! their jobs away.
//!
//! - [`limits`]: the lengths, derived from three settings, and which settings cannot work.
//! - `calls`: the account of claim calls, by which the database finds leases nobody knows of.
//! - [`keeper`]: the machine that decides, told by [`event`]s, answering with [`command`]s.

mod ask;
mod calls;
pub mod command;
pub mod event;
pub mod keeper;
pub mod limits;
