//! What befalls a queue: the same for each.

use std::thread;
use std::time::Duration;

use chaos_tests::What;

use crate::rig::Rig;

/// How long whoever decides on a promotion looks at a silent primary first.
const DOUBT: Duration = Duration::from_secs(2);

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The primary is killed, then a standby is promoted.
    Killed,
    /// The same while replication is cut, so that the last commits are lost.
    KilledWhileCut,
    /// The primary freezes, a standby is promoted, and the old primary goes on for a while. Old connections still lead there.
    Frozen,
    /// The same with a proxy that ends old connections at the promotion.
    FrozenAndCutOff,
    /// One of three workers is killed; the primary lives.
    WorkerKilled,
}

impl Fault {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [
        Self::Killed,
        Self::KilledWhileCut,
        Self::Frozen,
        Self::FrozenAndCutOff,
        Self::WorkerKilled,
    ];

    /// The one of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::KilledWhileCut => "killed-while-cut",
            Self::Frozen => "frozen",
            Self::FrozenAndCutOff => "frozen-and-cut-off",
            Self::WorkerKilled => "worker-killed",
        }
    }

    /// Lets it happen.
    pub(crate) fn strike(self, rig: &mut Rig<'_>) {
        match self {
            Self::Killed => {
                rig.strike(|primary| primary.kill9().unwrap());
                rig.random.dawdle(1500);
                rig.promote();
            }
            Self::KilledWhileCut => {
                rig.cut_replication();
                rig.until_more_acknowledged(10);
                rig.until_more_witnessed(What::End, 10);
                rig.random.dawdle(1000);
                rig.strike(|primary| primary.kill9().unwrap());
                rig.random.dawdle(1000);
                rig.promote();
            }
            Self::Frozen | Self::FrozenAndCutOff => {
                rig.strike(|primary| primary.freeze().unwrap());
                thread::sleep(DOUBT);
                rig.random.dawdle(500);
                let old = rig.promote();
                if self == Self::FrozenAndCutOff {
                    rig.proxy.cut();
                }
                rig.random.dawdle(2000);
                rig.others[old].thaw().unwrap();
                rig.random.dawdle(1000);
                rig.rejoin(old);
            }
            Self::WorkerKilled => rig.kill_worker(),
        }
    }
}
