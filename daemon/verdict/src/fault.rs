//! The verdict: what in a history must not be.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::witness::{Line, What};

/// What the database shows of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// As in the view `jobs`.
    pub status: String,
    /// The token that the completing run left as its result.
    pub token: Option<String>,
}

/// Something that must never happen.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Its enqueue was acknowledged, and the database does not know the job.
    Lost(String),
    /// Its enqueue was acknowledged, and it has come to no outcome.
    Unfinished(String, String),
    /// A handler of an earlier run lived when this run of the job had begun.
    Overlap(String, String),
    /// The same run was started twice.
    StartedTwice(String, String),
    /// It was run again after the run that completed it.
    RunAfterOutcome(String),
    /// It was run again, by this token, though a living daemon held or had finished it.
    Twice(String, String),
    /// It is completed by a run that never came to its end.
    CompletedWithoutEnd(String),
}

impl Fault {
    /// The job that it is about.
    #[must_use]
    pub fn job(&self) -> &str {
        match self {
            Self::Lost(job)
            | Self::Unfinished(job, _)
            | Self::Overlap(job, _)
            | Self::StartedTwice(job, _)
            | Self::RunAfterOutcome(job)
            | Self::Twice(job, _)
            | Self::CompletedWithoutEnd(job) => job,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(job) => write!(f, "job {job} is lost"),
            Self::Unfinished(job, status) => write!(f, "job {job} is still {status}"),
            Self::Overlap(job, token) => {
                write!(f, "job {job}: a run lived on beside its successor {token}")
            }
            Self::StartedTwice(job, token) => write!(f, "job {job}: run {token} started twice"),
            Self::RunAfterOutcome(job) => write!(f, "job {job} ran again after its outcome"),
            Self::Twice(job, token) => {
                write!(f, "job {job} of a living daemon was run again by {token}")
            }
            Self::CompletedWithoutEnd(job) => {
                write!(f, "job {job} is completed, but that run did not end")
            }
        }
    }
}

/// Statuses in which a job stays.
pub const OUTCOMES: [&str; 4] = ["completed", "failed", "discarded", "cancelled"];

/// Judges a history that is over: `lines` of the witnesses, the jobs whose enqueue was `acknowledged`, and what the
/// database shows. No fault is reported twice.
#[must_use]
pub fn judge(
    lines: &[Line],
    acknowledged: &[String],
    shown: &BTreeMap<String, Shown>,
) -> BTreeSet<Fault> {
    let mut faults = overlaps(lines);
    faults.extend(completions(lines, shown));
    for job in acknowledged {
        match shown.get(job) {
            None => faults.insert(Fault::Lost(job.clone())),
            Some(is) if !OUTCOMES.contains(&is.status.as_str()) => {
                faults.insert(Fault::Unfinished(job.clone(), is.status.clone()))
            }
            Some(_) => false,
        };
    }
    faults
}

/// Completions by a run that did not end, or that was not the last one.
pub(crate) fn completions(lines: &[Line], shown: &BTreeMap<String, Shown>) -> BTreeSet<Fault> {
    let mut faults = BTreeSet::new();
    let mut last_started: BTreeMap<&str, &str> = BTreeMap::new();
    let mut ended: BTreeSet<&str> = BTreeSet::new();
    for line in lines {
        match line.what {
            What::Start => drop(last_started.insert(&line.job, &line.token)),
            What::Tick => {}
            What::End => drop(ended.insert(&line.token)),
        }
    }
    for (job, is) in shown.iter().filter(|(_, is)| is.status == "completed") {
        let by = is.token.as_deref().unwrap_or_default();
        if !ended.contains(by) {
            faults.insert(Fault::CompletedWithoutEnd(job.clone()));
        }
        if last_started
            .get(job.as_str())
            .is_some_and(|last| *last != by)
        {
            faults.insert(Fault::RunAfterOutcome(job.clone()));
        }
    }
    faults
}

/// Signs of life of one run after the start of another run of the same job, and runs that started twice.
pub(crate) fn overlaps(lines: &[Line]) -> BTreeSet<Fault> {
    let mut faults = BTreeSet::new();
    let mut present: BTreeMap<&str, &Line> = BTreeMap::new();
    let mut started: BTreeSet<&str> = BTreeSet::new();
    for line in lines {
        if line.what == What::Start {
            if !started.insert(&line.token) {
                faults.insert(Fault::StartedTwice(line.job.clone(), line.token.clone()));
            }
            present.insert(&line.job, line);
        } else if let Some(now) = present.get(line.job.as_str())
            && (now.token != line.token || now.pid != line.pid)
        {
            faults.insert(Fault::Overlap(line.job.clone(), now.token.clone()));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::witness::read;

    /// `what job token pid`, one event after the other.
    fn history(events: &str) -> Vec<Line> {
        let lines: Vec<String> = events
            .split(", ")
            .map(|event| match event.split(' ').collect::<Vec<_>>()[..] {
                [what, job, token, pid] => format!("{what} {job} 1 {token} {pid} 0.0 9"),
                _ => panic!("{event}"),
            })
            .collect();
        read(&lines.join("\n")).unwrap()
    }

    fn faults(events: &str, status: &str, token: Option<&str>) -> Vec<Fault> {
        let shown = Shown {
            status: status.to_owned(),
            token: token.map(str::to_owned),
        };
        let shown = BTreeMap::from([("j".to_owned(), shown)]);
        judge(&history(events), &["j".to_owned()], &shown)
            .into_iter()
            .collect()
    }

    fn j() -> String {
        "j".to_owned()
    }

    #[test]
    fn good_histories_pass() {
        for events in [
            "start j a 1, tick j a 1, end j a 1",
            // Killed, then run again.
            "start j x 1, tick j x 1, start j a 2, tick j a 2, end j a 2",
            // Done, but its completion was lost with the daemon.
            "start j x 1, end j x 1, start j a 2, end j a 2",
            // Side by side with another job.
            "start j a 1, start k b 2, tick j a 1, tick k b 2, end j a 1, end k b 2",
        ] {
            assert_eq!(faults(events, "completed", Some("a")), [], "{events}");
        }
        assert_eq!(faults("start j a 1", "cancelled", None), []);
    }

    #[test]
    fn a_job_that_the_database_forgot_is_lost() {
        let lines = history("start j a 1, end j a 1");
        let faults = judge(&lines, &[j()], &BTreeMap::new());
        assert_eq!(faults, BTreeSet::from([Fault::Lost(j())]));
    }

    #[test]
    fn a_job_without_an_outcome_is_unfinished() {
        let expected = [Fault::Unfinished(j(), "pending".to_owned())];
        assert_eq!(faults("start j a 1, end j a 1", "pending", None), expected);
    }

    #[test]
    fn a_sign_of_life_after_the_next_start_is_an_overlap() {
        let expected = [Fault::Overlap(j(), "a".to_owned())];
        for events in [
            "start j x 1, start j a 2, tick j x 1, end j a 2",
            "start j x 1, start j a 2, end j x 1, end j a 2",
        ] {
            assert_eq!(faults(events, "completed", Some("a")), expected, "{events}");
        }
    }

    #[test]
    fn one_lease_starts_one_handler() {
        let found = faults(
            "start j a 1, start j a 2, tick j a 1, end j a 2",
            "completed",
            Some("a"),
        );
        let expected = [
            Fault::Overlap(j(), "a".to_owned()),
            Fault::StartedTwice(j(), "a".to_owned()),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn nothing_runs_after_its_outcome() {
        let found = faults(
            "start j a 1, end j a 1, start j b 2",
            "completed",
            Some("a"),
        );
        assert_eq!(found, [Fault::RunAfterOutcome(j())]);
    }

    #[test]
    fn only_an_end_completes() {
        for token in [Some("a"), None] {
            let found = faults("start j a 1, tick j a 1", "completed", token);
            assert!(
                found.contains(&Fault::CompletedWithoutEnd(j())),
                "{found:?}"
            );
        }
    }
}
