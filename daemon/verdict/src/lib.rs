//! Whether jobs were lost or ran twice: computed from what handlers and producers noted and from what the database shows at the
//! end, never from what a daemon says of itself.
//!
//! Handlers are witnesses: each writes a [`Line`] when it starts, while it lives, and when it ends, all into one file. [`judge`]
//! reads a history without switches of the primary, [`switches::judge`] one with them, and [`Times`] how long one took.
//! The chaos tests and `tenure selftest` share all of it.

mod fault;
pub mod switches;
mod times;
mod witness;

pub use fault::{Fault, OUTCOMES, Shown, judge};
pub use times::{Said, Times};
pub use witness::{Line, What, read, uptime};
