//! What the rig has to know of a queue.

use chaos_tests::{Daemon, Enqueue, Lab};

/// How many jobs a worker runs at a time.
pub(crate) const CONCURRENCY: usize = 4;

/// A queue over PostgreSQL.
pub(crate) trait Queue {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Makes its schema in the empty database of the lab.
    fn install(&self, lab: &Lab);

    /// Starts a worker process, which finds the database at the lab's URL.
    fn start(&self, lab: &Lab, name: &str) -> Daemon;

    /// The statement that puts in a job.
    fn enqueue(&self) -> Enqueue;

    /// The query of all jobs: id, status in the words of [`tenure_verdict::OUTCOMES`] or any other that is none, and the token that
    /// the completing run left.
    fn shown(&self) -> &'static str;
}
