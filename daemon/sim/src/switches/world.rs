//! Which troubles a world has, and what was found in it.

use std::ops::AddAssign;
use std::time::Duration;

use tenure_core::lease::limits::{Limits, LimitsError};

/// The troubles of a world.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// What the workers were told.
    pub limits: Limits,
    /// Messages are late or lost, and daemons are cut off from single servers.
    pub bad_network: bool,
    /// Replication is cut and heals, or lags by seconds.
    pub bad_replication: bool,
    /// Daemons crash, are frozen or stopped, and start again.
    pub daemon_troubles: bool,
    /// An old primary may stay writable beside the new one.
    pub two_primaries: bool,
    /// Nothing happens to servers but that the primary is paused, and its clock with it, as that of a virtual machine may be; one
    /// daemon is cut off from it before and after.
    pub clock_stands: bool,
    /// One primary falls for so long and nothing else happens to servers; `None`: they fall as they like.
    pub outage: Option<Duration>,
    /// What the daemons do wrong, to show that it is found.
    pub fault: Fault,
}

/// A rule that the daemons break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// None.
    None,
    /// A re-attach names no other workers.
    RostersIgnored,
    /// A daemon that has to become another worker forgets whom the one that it was knew.
    RosterForgotten,
    /// What all hosts but the primary have shown is forgotten, also when the primary has just been promoted.
    PrimaryUnasked,
    /// The answer to a re-attach is taken also when the daemon is about to become another worker.
    LateReattach,
    /// What the database has confirmed is forgotten.
    MemoryOff,
    /// Statements are ordered by the number of the attempt, not by the run.
    OrderedByAttempt,
    /// That no other host takes writes is taken for proof, though sweeps go on.
    ProofTooEasy,
    /// An end is thought to be proven by the beat that had been sent when it was answered.
    BucketTooEarly,
}

impl World {
    /// All troubles but two primaries.
    ///
    /// # Errors
    /// What [`Limits::new`] refuses.
    pub fn new(
        ttl: Duration,
        heartbeat: Duration,
        kill_grace: Duration,
    ) -> Result<Self, LimitsError> {
        Ok(Self {
            limits: Limits::new(ttl, heartbeat, kill_grace)?,
            bad_network: true,
            bad_replication: true,
            daemon_troubles: true,
            two_primaries: false,
            clock_stands: false,
            outage: None,
            fault: Fault::None,
        })
    }
}

/// What must never happen. Times in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two handlers of one job lived at once.
    TwoHandlers {
        /// When.
        at: u64,
    },
    /// A handler started whose lease the primary did not have.
    NoLease {
        /// When.
        at: u64,
    },
    /// A job was started again though a living daemon knew that it had completed.
    RunsAgain {
        /// When.
        at: u64,
    },
    /// A window closed before a living daemon with something to say had spoken, and before its leases had ended.
    ClosedEarly {
        /// When.
        at: u64,
    },
    /// A job that a living daemon had completed was not complete at the end.
    OpenAgain,
    /// A job that a living daemon had claimed was gone at the end.
    Lost,
    /// A job had not ended after the time of peace.
    Unfinished,
    /// The follow-up of a completion was missing, or that of another run was there.
    FollowUp,
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// How often things happened, to show that a simulation meets what it is about.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl AddAssign for Counts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// Handlers that started.
    started,
    /// Handlers that were told to die because trust had ended.
    distrusted,
    /// Standbys that became primaries.
    promotions,
    /// Commits that a promotion or crash lost.
    lost_commits,
    /// Windows that opened.
    windows,
    /// Windows that closed because all had spoken.
    closed_by_all,
    /// Windows that closed by time.
    closed_by_time,
    /// Switches while the window of the one before was open.
    second_switches,
    /// Re-attaches.
    reattached,
    /// Running jobs whose leases had been lost and were put in place again.
    restored_leases,
    /// Jobs whose enqueue had been lost and that were put back.
    put_back,
    /// Confirmed completions that had been lost and were written again.
    written_again,
    /// Ends that were said again and known.
    said_in_vain,
    /// Workers whose registration had been lost.
    registered_again,
    /// Beats confirmed by proof that there is no primary.
    proofs,
    /// Of these, those while a primary lived unseen: cut off from the standbys and from who proved.
    false_proofs,
    /// Daemons that started with what a predecessor had left on its disk.
    successions,
    /// Follow-up jobs at the end.
    follow_ups,
    /// Confirmations by a primary that was none any more.
    astray,
    /// Overlaps of handlers where one of them was led by an old primary.
    overlaps_astray,
    /// Overlaps of handlers where one of them was led by a false proof.
    overlaps_misled,
    /// Windows that closed without a living worker whose registration was lost and of whom nobody else had heard: it had been
    /// admitted when the others had had time to beat, and they had not, or had not got the answer.
    closed_on_strangers,
    /// Overlaps of handlers where one of them was such a worker's.
    overlaps_strange,
    /// Completed jobs that a person cancelled in the window, before who had completed them spoke: the follow-up of a completion that
    /// was written again seems to be new.
    cancelled_over,
    /// Completed jobs that ran again, as who knew it was dead, absent or led by an old primary.
    ran_again_excused,
}

/// What one run has found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What must not happen and did.
    pub violations: Vec<Violation>,
    /// What happened.
    pub counts: Counts,
}

impl Report {
    /// Adds what another run has found.
    pub fn add(&mut self, other: Self) {
        self.violations.extend(other.violations);
        self.counts += other.counts;
    }
}
