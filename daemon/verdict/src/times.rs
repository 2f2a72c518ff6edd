//! How long a switch took, for those who wait for their jobs.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::switches::{Enqueue, Switch};
use crate::witness::{Line, What};

/// A daemon changed what it says of its primary (`GET /readyz`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// When it was heard, as [`uptime`](crate::uptime).
    pub at: Duration,
    /// Which daemon, by its place in a list.
    pub daemon: usize,
    /// Whether it has a primary that answers; nothing when it does not say.
    pub primary: Option<bool>,
}

/// How long things took at a switch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times {
    /// From the fault until the first daemon said that it has no primary.
    pub detection: Option<Duration>,
    /// The same until the last daemon had said it.
    pub detection_by_all: Option<Duration>,
    /// From the fault until the new primary took writes.
    pub outage: Option<Duration>,
    /// From there until a job from before the fault started that had not started before.
    pub first_claim: Option<Duration>,
    /// From there until a job started that was enqueued after.
    pub new_job: Option<Duration>,
}

impl Times {
    /// Of this switch; `daemons` is how many could speak.
    #[must_use]
    pub fn of(
        switch: &Switch,
        said: &[Said],
        daemons: usize,
        lines: &[Line],
        enqueues: &[Enqueue],
    ) -> Self {
        let without: Vec<&Said> = said
            .iter()
            .filter(|said| said.primary == Some(false) && said.at >= switch.fault)
            .collect();
        let mut heard = BTreeSet::new();
        let all = without
            .iter()
            .find(|said| heard.insert(said.daemon) && heard.len() == daemons);
        let since_fault = |said: &&Said| said.at - switch.fault;
        let started_before: BTreeSet<&str> = lines
            .iter()
            .filter(|line| line.what == What::Start && line.at < switch.writable)
            .map(|line| line.job.as_str())
            .collect();
        let first = |wanted: &dyn Fn(&Enqueue) -> bool| {
            let jobs: BTreeSet<&str> = enqueues
                .iter()
                .filter(|enqueue| wanted(enqueue))
                .map(|enqueue| enqueue.id.as_str())
                .collect();
            lines
                .iter()
                .find(|line| {
                    line.what == What::Start
                        && line.at >= switch.writable
                        && jobs.contains(line.job.as_str())
                })
                .map(|line| line.at - switch.writable)
        };
        Self {
            detection: without.first().map(since_fault),
            detection_by_all: all.map(since_fault),
            outage: switch.writable.checked_sub(switch.fault),
            first_claim: first(&|enqueue| {
                enqueue.at < switch.fault && !started_before.contains(enqueue.id.as_str())
            }),
            new_job: first(&|enqueue| {
                enqueue.at >= switch.writable && enqueue.server == switch.server
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::witness::read;

    fn millis(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn said(at: u64, daemon: usize, primary: Option<bool>) -> Said {
        Said {
            at: millis(at),
            daemon,
            primary,
        }
    }

    fn enqueue(id: &str, at: u64, server: u16) -> Enqueue {
        Enqueue {
            id: id.to_owned(),
            job_type: "ticks-1".to_owned(),
            at: millis(at),
            server,
        }
    }

    #[test]
    fn times_are_those_between_fault_writes_and_starts() {
        let switch = Switch {
            fault: millis(10_000),
            writable: millis(12_000),
            server: 2,
            ..Switch::default()
        };
        let said = [
            said(1_000, 0, Some(true)),
            said(2_000, 1, Some(false)),
            said(10_300, 0, Some(false)),
            said(10_350, 0, Some(true)),
            said(10_400, 0, Some(false)),
            said(10_800, 1, None),
            said(10_900, 1, Some(false)),
        ];
        // One had started, one is run again, one waited, one is new.
        let lines = read(
            "start ran 1 a 1 9.0 7\nstart ran 1 b 2 12.1 7\nstart waited 1 c 3 12.5 7\nstart new 1 d 4 12.75 7",
        ).unwrap();
        let enqueues = [
            enqueue("ran", 5_000, 1),
            enqueue("waited", 6_000, 1),
            enqueue("new", 12_200, 2),
        ];
        let times = Times::of(&switch, &said, 2, &lines, &enqueues);
        assert_eq!(
            times,
            Times {
                detection: Some(millis(300)),
                detection_by_all: Some(millis(900)),
                outage: Some(millis(2_000)),
                first_claim: Some(millis(500)),
                new_job: Some(millis(750)),
            }
        );
        let unknown = Times::of(&switch, &[], 2, &[], &[]);
        assert_eq!((unknown.detection, unknown.first_claim), (None, None));
    }
}
