//! The numbers of one run, computed from its history by the verdict that the chaos tests share.
//!
//! The verdict knows what a queue that survives a switch must not do. Here nothing is an error; it is counted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::json;
use tenure_verdict::switches::{self, Absence, Enqueue, Switch, judge};
use tenure_verdict::{Fault, Line, OUTCOMES, Shown, Times, What};

/// All that is known when everything is over.
#[derive(Debug)]
pub(crate) struct History<'a> {
    /// What the witnesses wrote.
    pub(crate) lines: &'a [Line],
    /// What the producers noted.
    pub(crate) enqueues: &'a [Enqueue],
    /// What the queue's table shows.
    pub(crate) shown: &'a BTreeMap<String, Shown>,
    /// When something was struck.
    pub(crate) fault: Duration,
    /// The switch of the primary, if there was one.
    pub(crate) switch: Option<&'a Switch>,
    /// Workers that were killed.
    pub(crate) absences: &'a [Absence],
    /// Whether each job came to an outcome in time.
    pub(crate) rests: bool,
    /// How many workers ended that nobody had killed.
    pub(crate) died: usize,
}

/// See the module.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// Enqueues.
    acknowledged: usize,
    /// Of those, the ones that the new primary has never heard of.
    cut_off: BTreeSet<String>,
    /// Of those, the ones that nobody has run to its end: their work is not done.
    lost_by_cluster: BTreeSet<String>,
    /// And the ones whose work is done, but the queue does not know of it.
    unrecorded: BTreeSet<String>,
    /// All others that came to no outcome.
    lost: BTreeSet<String>,
    /// Started again although a run had ended, or a living worker held it.
    twice: BTreeSet<String>,
    /// Of which two runs lived at one time.
    at_once: BTreeSet<String>,
    /// From the new primary's first write to the first start of a job that was enqueued after.
    new_job: Option<Duration>,
    /// From there, or without a switch from the fault, to the last end of a job from before.
    old_jobs: Option<Duration>,
    rests: bool,
    died: usize,
}

impl Numbers {
    /// Computes them.
    pub(crate) fn of(history: &History<'_>) -> Self {
        let judgement = judge(&switches::History {
            lines: history.lines,
            enqueues: history.enqueues,
            shown: history.shown,
            switches: history.switch.map_or(&[], std::slice::from_ref),
            absences: history.absences,
            rerun: &[],
            uncovered: false,
            interruptions: false,
        });
        let ended: BTreeSet<&str> = history
            .lines
            .iter()
            .filter(|line| line.what == What::End)
            .map(|line| line.job.as_str())
            .collect();
        let is_over = |id: &str| {
            let shown = history.shown.get(id);
            shown.is_some_and(|job| OUTCOMES.contains(&job.status.as_str()))
        };
        let (gone, kept): (Vec<&Enqueue>, Vec<&Enqueue>) = history
            .enqueues
            .iter()
            .partition(|enqueue| judgement.cut_off.contains(&enqueue.id));
        let ids = |enqueues: &[&Enqueue], wanted: &dyn Fn(&str) -> bool| -> BTreeSet<String> {
            let ids = enqueues.iter().map(|enqueue| &enqueue.id);
            ids.filter(|id| wanted(id)).cloned().collect()
        };
        let since = history
            .switch
            .map_or(history.fault, |switch| switch.writable);
        let times = history
            .switch
            .map(|switch| Times::of(switch, &[], 0, history.lines, history.enqueues));
        let old = ids(&kept, &|id| {
            let mut enqueues = history.enqueues.iter();
            enqueues.any(|enqueue| enqueue.id == id && enqueue.at < history.fault)
        });
        Self {
            acknowledged: judgement.acknowledged,
            lost_by_cluster: ids(&gone, &|id| !is_over(id) && !ended.contains(id)),
            unrecorded: ids(&gone, &|id| !is_over(id) && ended.contains(id)),
            lost: ids(&kept, &|id| !is_over(id)),
            cut_off: judgement.cut_off,
            twice: judgement.twice,
            at_once: judgement
                .faults
                .into_iter()
                .filter_map(|fault| match fault {
                    Fault::Overlap(job, _) => Some(job),
                    _ => None,
                })
                .collect(),
            new_job: times.and_then(|times| times.new_job),
            old_jobs: history
                .lines
                .iter()
                .filter(|line| line.what == What::End && old.contains(&line.job))
                .map(|line| line.at.saturating_sub(since))
                .max(),
            rests: history.rests,
            died: history.died,
        }
    }

    /// One line of JSON.
    pub(crate) fn line(&self, queue: &str, fault: &str, seed: u64) -> String {
        let seconds = |time: Option<Duration>| {
            // Hundredths are all that the clock has.
            time.map(|time| (time.as_secs_f64() * 100.0).round() / 100.0)
        };
        json!({
            "queue": queue,
            "fault": fault,
            "seed": seed,
            "acknowledged": self.acknowledged,
            "cut_off": self.cut_off.len(),
            "lost_by_cluster": self.lost_by_cluster.len(),
            "unrecorded": self.unrecorded.len(),
            "lost": self.lost,
            "twice": self.twice,
            "at_once": self.at_once,
            "new_job": seconds(self.new_job),
            "old_jobs": seconds(self.old_jobs),
            "rests": self.rests,
            "died": self.died,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use tenure_verdict::read;

    use super::*;

    fn enqueue(id: &str, at: u64) -> Enqueue {
        Enqueue {
            id: id.to_owned(),
            job_type: "ticks-1".to_owned(),
            at: Duration::from_secs(at),
            server: if at < 10 { 1 } else { 2 },
        }
    }

    fn set(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|&id| id.to_owned()).collect()
    }

    #[test]
    fn each_is_counted_where_it_belongs() {
        let switch = Switch {
            fault: Duration::from_secs(10),
            writable: Duration::from_secs(11),
            server: 2,
            jobs: set(&["good", "again", "both", "stuck"]),
            outcomes: set(&["good"]),
            since: Duration::ZERO,
        };
        let lines = read(
            "start good 1 a 1 8.0 7\nend good 1 a 1 8.1 7\nstart again 1 b 2 8.0 7\nend again 1 b 2 8.5 7\n\
             start done 1 c 3 9.0 7\nend done 1 c 3 9.5 7\nstart both 1 d 4 9.0 7\nstart both 2 e 5 11.2 8\ntick both 1 d 4 11.3 7\n\
             end both 2 e 5 11.5 8\nstart again 2 f 6 12.0 8\nend again 2 f 6 12.5 8\nstart new 1 g 9 11.7 8\nend new 1 g 9 11.9 8",
        )
        .unwrap();
        let shown = |id: &str, status: &str, token: &str| {
            let shown = Shown {
                status: status.to_owned(),
                token: Some(token.to_owned()),
            };
            (id.to_owned(), shown)
        };
        let numbers = Numbers::of(&History {
            lines: &lines,
            enqueues: &[
                enqueue("good", 7),
                enqueue("again", 7),
                enqueue("both", 7),
                enqueue("stuck", 7),
                enqueue("done", 9),
                enqueue("gone", 9),
                enqueue("new", 11),
            ],
            shown: &BTreeMap::from([
                shown("good", "completed", "a"),
                shown("again", "completed", "f"),
                shown("both", "completed", "e"),
                shown("stuck", "active", ""),
                shown("new", "completed", "g"),
            ]),
            fault: switch.fault,
            switch: Some(&switch),
            absences: &[],
            rests: false,
            died: 0,
        });
        let expected = Numbers {
            acknowledged: 7,
            cut_off: set(&["done", "gone"]),
            lost_by_cluster: set(&["gone"]),
            unrecorded: set(&["done"]),
            lost: set(&["stuck"]),
            twice: set(&["again", "both"]),
            at_once: set(&["both"]),
            new_job: Some(Duration::from_millis(700)),
            old_jobs: Some(Duration::from_millis(1500)),
            rests: false,
            died: 0,
        };
        assert_eq!(numbers, expected);
        let line = numbers.line("q", "f", 3);
        assert!(
            line.contains(r#""new_job":0.7"#) && !line.contains('\n'),
            "{line}"
        );
    }
}
