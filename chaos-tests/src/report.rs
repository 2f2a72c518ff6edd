//! What one run of a scenario has shown, as one line of JSON.

use std::collections::BTreeSet;
use std::env;
use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::verdict::switches::{Enqueue, Judgement, Switch};
use crate::watch::Said;
use crate::witness::{Line, What};

/// Numbers of one run. Times are absent where the run did not show them; no test asserts on them.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The scenario.
    pub scenario: String,
    /// What decided its delays.
    pub seed: u64,
    /// What was lost, and what ran twice.
    pub judgement: Judgement,
    /// The times of its last switch.
    pub times: Times,
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
    pub(crate) fn of(
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
            new_job: first(&|enqueue| enqueue.at >= switch.writable && enqueue.port == switch.port),
        }
    }
}

impl Report {
    /// One line of JSON.
    #[must_use]
    pub fn line(&self) -> String {
        let seconds = |time: Option<Duration>| -> Value {
            // Hundredths are all that the clock has.
            time.map_or(Value::Null, |time| {
                json!((time.as_secs_f64() * 100.0).round() / 100.0)
            })
        };
        let (judgement, times) = (&self.judgement, &self.times);
        json!({
            "scenario": self.scenario,
            "seed": self.seed,
            "acknowledged": judgement.acknowledged,
            "cut_off": judgement.cut_off.len(),
            "unwritten": judgement.unwritten.len(),
            "lost_by_cluster": judgement.lost_by_cluster,
            "lost": judgement.lost,
            "twice": judgement.twice,
            "rerun": judgement.rerun,
            "faults": judgement.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "detection": seconds(times.detection),
            "detection_by_all": seconds(times.detection_by_all),
            "outage": seconds(times.outage),
            "first_claim": seconds(times.first_claim),
            "new_job": seconds(times.new_job),
        })
        .to_string()
    }

    /// Appends it to the file that `TENURE_CHAOS_REPORT` names, if any.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self) {
        if let Some(path) = env::var_os("TENURE_CHAOS_REPORT") {
            let file = File::options().create(true).append(true).open(path);
            file.and_then(|mut file| file.write_all(format!("{}\n", self.line()).as_bytes()))
                .expect("the report can be written");
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

    fn enqueue(id: &str, at: u64, port: u16) -> Enqueue {
        Enqueue {
            id: id.to_owned(),
            job_type: "ticks-1".to_owned(),
            at: millis(at),
            port,
        }
    }

    #[test]
    fn times_are_those_between_fault_writes_and_starts() {
        let switch = Switch {
            fault: millis(10_000),
            writable: millis(12_000),
            port: 2,
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
        );
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

    #[test]
    fn a_report_is_one_line() {
        let report = Report {
            scenario: "s".to_owned(),
            seed: 7,
            judgement: Judgement::default(),
            times: Times {
                outage: Some(millis(1_234)),
                ..Times::default()
            },
        };
        let line = report.line();
        assert!(
            !line.contains('\n') && line.contains(r#""outage":1.23"#),
            "{line}"
        );
        assert!(line.contains(r#""detection":null"#), "{line}");
    }
}
