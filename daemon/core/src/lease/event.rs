//! What the keeper is told.

#[cfg(doc)]
use super::{command::Command, keeper::Keeper};
use crate::ids::{Beat, Call, Epoch, JobId, Token, WorkerId};
use crate::time::Mono;

/// Something that the shell has learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A registration or re-attach was answered; `asked_at` as the command said.
    Registered {
        /// The id under which the shell has registered.
        worker: WorkerId,
        /// The database's epoch.
        epoch: Epoch,
        /// From [`Command::Register`] or [`Command::Reattach`].
        asked_at: Mono,
    },
    /// A registration or re-attach failed; it is repeated one heartbeat after it was asked for.
    RegisterFailed {
        /// From the command.
        asked_at: Mono,
    },
    /// A beat was answered.
    BeatAnswered {
        /// From [`Command::Beat`].
        beat: Beat,
        /// Leases that a person or another worker has taken: their handlers are stopped. May name any, repeatedly.
        revoked: Vec<Token>,
    },
    /// A beat failed, or its answer did not come in time.
    BeatFailed {
        /// From [`Command::Beat`].
        beat: Beat,
    },
    /// A beat is wanted at once, or the next try to register: the database asks for it (a stop request, a new worker), or it has
    /// just been found again.
    BeatNow,
    /// It is proven that no server was a primary when this was asked (see [`crate::primary`]): nobody could take a lease away, and
    /// whoever becomes one waits for this worker. As good as a beat that was sent then and answered.
    NoPrimary {
        /// When the servers were asked.
        asked_at: Mono,
    },
    /// Any statement of `worker` in `epoch` was refused.
    Refused {
        /// The worker that the statement named.
        worker: WorkerId,
        /// The epoch that the statement named.
        epoch: Epoch,
        /// Why.
        refusal: Refusal,
    },
    /// A claim was answered with these jobs, perhaps none.
    ClaimAnswered {
        /// From [`Keeper::claim`].
        call: Call,
        /// What was leased.
        jobs: Vec<(JobId, Token)>,
    },
    /// A claim failed or is not waited for any longer. It may still be carried out.
    ClaimGivenUp {
        /// From [`Keeper::claim`].
        call: Call,
    },
    /// The handler is dead and reaped, or was never started and will not be.
    Ended {
        /// Its lease.
        token: Token,
    },
    /// The database has answered the statements about these ends with done or history.
    Confirmed {
        /// Their leases.
        tokens: Vec<Token>,
    },
    /// Time has passed.
    Tick,
}

/// Why the database refuses a worker's statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The worker is unknown or was declared dead (TN004).
    Dead,
    /// The database has another epoch (TN001).
    OtherEpoch,
}
