//! What the keeper decides.

#[cfg(doc)]
use super::limits::Limits;
use crate::ids::{Beat, Call, Epoch, Token, WorkerId};
use crate::time::Mono;

/// Something that the shell is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Register under a fresh id, and answer with `Registered` or `RegisterFailed`.
    Register {
        /// To be given back.
        asked_at: Mono,
    },
    /// Re-attach with all that is held, and answer with `Registered` or `RegisterFailed`.
    Reattach {
        /// Who re-attaches.
        worker: WorkerId,
        /// To be given back.
        asked_at: Mono,
    },
    /// Send a heartbeat, and answer with `BeatAnswered` or `BeatFailed` (or `Refused`).
    Beat {
        /// Who beats.
        worker: WorkerId,
        /// In which epoch.
        epoch: Epoch,
        /// The number of the beat.
        beat: Beat,
        /// All claim calls up to this one were answered or given up.
        settled: Call,
        /// Those of them that still have jobs.
        open: Vec<Call>,
    },
    /// Kill these handlers, and answer with `Ended` for each when it is reaped. A later kill may only be sharper.
    Kill {
        /// Whose handlers.
        tokens: Vec<Token>,
        /// Why, and so how much grace there is.
        why: Why,
    },
    /// Give these jobs back: they have not started and will not. `Confirmed` for each when the database has answered.
    Release {
        /// Which.
        tokens: Vec<Token>,
    },
}

/// Why a handler is killed, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// A person or another worker has taken this job: the handler's own grace.
    Revoked,
    /// No beat was confirmed in time: [`Limits::lost_grace`].
    TrustEnded,
    /// The database may already have given the jobs away: no grace.
    DeclaredDead,
}

/// Whether a job may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Spawn the handler now; `Ended` when it is dead and reaped, or could not be spawned.
    Go,
    /// Do not start it, give it back; `Confirmed` when the database has answered.
    Release,
    /// Do not start it; whatever had to be done about it was commanded before.
    Gone,
}
