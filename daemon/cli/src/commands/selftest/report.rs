//! The result of a self-test, fault by fault.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;
use tenure_verdict::switches::{Enqueue, Judgement, Switch};
use tenure_verdict::{Fault, Line, Times, What};

use super::crew::Use;
use super::notes::State;
use crate::output::{Report, View};

/// A fault that was injected.
#[derive(Debug, Clone)]
pub(super) struct Injected {
    pub(super) name: String,
    pub(super) at: Duration,
}

/// See the module.
#[derive(Debug, Serialize)]
pub(super) struct Result {
    seed: u64,
    acknowledged: usize,
    lost: usize,
    twice: usize,
    faults: Vec<Row>,
    /// What the largest daemon used early and at the end, when no daemon was struck.
    pub(super) used: Option<(Use, Use)>,
    /// What must not be, in words, and what else went wrong.
    pub(super) violations: Vec<String>,
}

/// All faults of one kind.
#[derive(Debug, Default, Serialize)]
struct Row {
    name: String,
    runs: usize,
    /// Acknowledged by the old primary, and not on the new one: replication had not taken it over, and no daemon had it.
    lost_by_cluster: usize,
    lost: usize,
    twice: usize,
    /// Jobs that started later than they would have by the longest wait for a dead daemon.
    late: usize,
    #[serde(rename = "without_primary_seconds")]
    without_primary: Vec<f64>,
    #[serde(rename = "first_claim_seconds")]
    first_claim: Vec<f64>,
    #[serde(rename = "new_job_seconds")]
    new_job: Vec<f64>,
}

impl Result {
    /// Sums up: each job and switch belongs to the fault that was the last one before it showed.
    pub(super) fn new(
        seed: u64,
        injected: &[Injected],
        state: &State,
        lines: &[Line],
        judgement: &Judgement,
        late_after: Duration,
    ) -> Self {
        let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
        for fault in injected {
            let row = rows.entry(&fault.name).or_default();
            row.name.clone_from(&fault.name);
            row.runs += 1;
        }
        let last_before = |at: Duration| injected.iter().rev().find(|fault| fault.at <= at);
        for enqueue in &state.enqueues {
            let by_cluster = judgement.lost_by_cluster.contains(&enqueue.id);
            let lost = judgement.lost.contains(&enqueue.id);
            if !by_cluster && !lost {
                continue;
            }
            let gone_at = gone_with(enqueue, &state.switches).map_or(enqueue.at, |it| it.fault);
            if let Some(row) = last_before(gone_at).and_then(|fault| rows.get_mut(&*fault.name)) {
                row.lost_by_cluster += usize::from(by_cluster);
                row.lost += usize::from(lost);
            }
        }
        for (job, at) in starts_again(lines) {
            let twice = judgement.twice.contains(job);
            if let Some(row) = last_before(at).and_then(|fault| rows.get_mut(&*fault.name)) {
                row.twice += usize::from(twice);
            }
        }
        for at in late(state, lines, late_after) {
            if let Some(row) = last_before(at).and_then(|fault| rows.get_mut(&*fault.name)) {
                row.late += 1;
            }
        }
        for switch in &state.switches {
            let Some(row) = last_before(switch.fault).and_then(|fault| rows.get_mut(&*fault.name))
            else {
                continue;
            };
            let times = Times::of(switch, &[], 0, lines, &state.enqueues);
            let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
            // Without a fault that was under way nobody knows when it began.
            let outage = times.outage.filter(|outage| !outage.is_zero());
            row.without_primary.extend(seconds(outage));
            row.first_claim.extend(seconds(times.first_claim));
            row.new_job.extend(seconds(times.new_job));
        }
        Self {
            seed,
            acknowledged: state.enqueues.len(),
            lost: judgement.lost.len(),
            twice: judgement.twice.len(),
            faults: rows.into_values().collect(),
            used: None,
            violations: judgement.faults.iter().map(Fault::to_string).collect(),
        }
    }
}

impl Result {
    /// For people.
    pub(super) fn sentence(&self) -> String {
        let Self {
            acknowledged,
            lost,
            twice,
            seed,
            ..
        } = self;
        format!(
            "{acknowledged} enqueues were acknowledged: {lost} jobs lost, {twice} run twice. (seed {seed})"
        )
    }
}

/// The switch in which an enqueue was lost: the first after it that lacks it, or the one before it if an old primary acknowledged it.
fn gone_with<'a>(enqueue: &Enqueue, switches: &'a [Switch]) -> Option<&'a Switch> {
    let lacks = |switch: &&Switch| !switch.jobs.contains(&enqueue.id);
    let mut later = switches
        .iter()
        .filter(|switch| switch.writable >= enqueue.at);
    let mut before = switches
        .iter()
        .rev()
        .filter(|switch| switch.writable < enqueue.at);
    let acknowledged_late = |switch: &&Switch| switch.server != enqueue.server;
    before
        .next()
        .filter(lacks)
        .filter(acknowledged_late)
        .or_else(|| later.find(lacks))
}

/// Each start of a job but its first.
fn starts_again(lines: &[Line]) -> impl Iterator<Item = (&str, Duration)> {
    let mut started = BTreeSet::new();
    lines
        .iter()
        .filter(move |line| line.what == What::Start && !started.insert(line.job.as_str()))
        .map(|line| (line.job.as_str(), line.at))
}

/// When jobs started for the first time whose start came so long after they were in and after the last switch before it.
fn late(state: &State, lines: &[Line], after: Duration) -> Vec<Duration> {
    let mut since: BTreeMap<&str, Duration> = state
        .enqueues
        .iter()
        .map(|enqueue| (enqueue.id.as_str(), enqueue.at))
        .collect();
    let switched = |at: Duration| {
        let before = |switch: &&Switch| switch.writable <= at;
        let last = state.switches.iter().rev().find(before);
        last.map_or(Duration::ZERO, |switch| switch.writable)
    };
    let first = lines.iter().filter(|line| line.what == What::Start);
    first
        .filter_map(|line| {
            let enqueued = since.remove(line.job.as_str())?;
            (line.at > enqueued.max(switched(line.at)) + after).then_some(line.at)
        })
        .collect()
}

impl Report for Result {
    fn view(&self) -> View {
        const HEAD: &[&str] = &[
            "FAULT",
            "RUNS",
            "LOST BY THE CLUSTER",
            "LOST",
            "TWICE",
            "LATE",
            "WITHOUT PRIMARY",
            "FIRST CLAIM",
            "NEW JOB",
        ];
        let rows = self.faults.iter().map(|row| {
            vec![
                row.name.clone(),
                row.runs.to_string(),
                row.lost_by_cluster.to_string(),
                row.lost.to_string(),
                row.twice.to_string(),
                row.late.to_string(),
                spread(&row.without_primary),
                spread(&row.first_claim),
                spread(&row.new_job),
            ]
        });
        View::Rows(HEAD, rows.collect(), "no fault was injected")
    }
}

/// Median and worst.
fn spread(seconds: &[f64]) -> String {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.get(sorted.len() / 2), sorted.last()) {
        (Some(median), Some(worst)) => format!("{median:.2} / {worst:.2} s"),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tenure_verdict::read;

    use super::*;

    #[test]
    fn each_finding_belongs_to_its_fault() {
        let second = Duration::from_secs;
        let enqueue = |id: &str, at| Enqueue {
            id: id.to_owned(),
            job_type: "selftest-1".to_owned(),
            at: second(at),
            server: 0,
        };
        let state = State {
            enqueues: vec![enqueue("gone", 9), enqueue("slow", 8), enqueue("two", 15)],
            switches: vec![Switch {
                fault: second(10),
                writable: second(12),
                server: 1,
                ..Switch::default()
            }],
            ..State::default()
        };
        let injected = [(10, "kill"), (20, "freeze")].map(|(at, name)| Injected {
            name: name.to_owned(),
            at: second(at),
        });
        let lines = read(
            "start two 1 a 1 16.0 7\nend two 1 a 1 17.0 7\nstart slow 1 b 2 18.5 7\nstart two 1 c 3 21.0 7\n",
        ).unwrap();
        let judgement = Judgement {
            lost: BTreeSet::from(["gone".to_owned()]),
            twice: BTreeSet::from(["two".to_owned()]),
            ..Judgement::default()
        };
        let result = Result::new(1, &injected, &state, &lines, &judgement, second(6));
        let [freeze, kill] = &result.faults[..] else {
            panic!("{result:?}")
        };
        assert_eq!((kill.lost, kill.twice, kill.late), (1, 0, 1));
        assert_eq!((freeze.lost, freeze.twice, freeze.late), (0, 1, 0));
        assert_eq!((kill.without_primary[0], kill.first_claim[0]), (2.0, 6.5));
    }

    #[test]
    fn median_and_worst() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), "2.00 / 3.00 s");
        assert_eq!(spread(&[]), "-");
    }
}
