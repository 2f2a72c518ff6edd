//! What the lease keeper commands and only the heart can carry out.

use tenure_core::ids::{Beat, Call, Epoch, WorkerId};
use tenure_core::time::Mono;

/// What the heart is to say to the database.
#[derive(Debug)]
pub(crate) enum Order {
    /// Become a worker.
    Register {
        /// For the answer.
        asked_at: Mono,
    },
    /// Say everything in a new epoch.
    Reattach {
        /// As whom.
        worker: WorkerId,
        /// For the answer.
        asked_at: Mono,
    },
    /// A heartbeat.
    Beat {
        /// Of whom.
        worker: WorkerId,
        /// In which epoch.
        epoch: Epoch,
        /// Its number.
        beat: Beat,
        /// Claim calls up to this one are settled.
        settled: Call,
        /// Of these, those that still have jobs.
        open: Vec<Call>,
    },
}
