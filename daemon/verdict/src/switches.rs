//! The verdict over switches of the primary: what was lost by whom, what ran twice, and what may have.
//!
//! A commit that the old primary acknowledged and the new one does not have is lost by the cluster, not by us. But what a
//! living daemon had claimed or finished it still knows, and so nothing of that may be lost or run again. What "living" excuses
//! is said by [`Absence`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::fault::{Fault, OUTCOMES, Shown, completions, overlaps};
use crate::witness::{Line, What};

/// An acknowledged enqueue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enqueue {
    /// The job.
    pub id: String,
    /// Its type.
    pub job_type: String,
    /// When the answer came, as [`uptime`](crate::uptime).
    pub at: Duration,
    /// The server that acknowledged it, by a number that no other has: its port, or its place in a list.
    pub server: u16,
}

/// A server that became the primary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Switch {
    /// When its predecessor was struck.
    pub fault: Duration,
    /// When the new primary took writes.
    pub writable: Duration,
    /// The new primary, by the number that enqueues have.
    pub server: u16,
    /// The jobs that it had then. What was acknowledged before `since` counts as there, and need not be among them.
    pub jobs: BTreeSet<String>,
    /// Those of them that had an outcome.
    pub outcomes: BTreeSet<String>,
    /// Nothing so old can be part of a lost tail.
    pub since: Duration,
}

/// A daemon that did not live for a while, or left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absence {
    /// Its process.
    pub daemon: i32,
    /// A run that ended before this was safe in spite of it: written, and replicated.
    pub safe_before: Duration,
    /// Runs that began later are a living daemon's again.
    pub until: Duration,
}

/// All that is known when everything is over.
#[derive(Debug, Clone, Copy)]
pub struct History<'a> {
    /// What the witnesses wrote.
    pub lines: &'a [Line],
    /// What the producers noted.
    pub enqueues: &'a [Enqueue],
    /// What the present primary shows.
    pub shown: &'a BTreeMap<String, Shown>,
    /// In order.
    pub switches: &'a [Switch],
    /// In any order.
    pub absences: &'a [Absence],
    /// Job types, up to their `-`, whose handlers want to run again when commits are lost.
    pub rerun: &'a [&'a str],
    /// A span was not covered, and a person decided that what is in it runs again. What was put in then and is over, nobody has.
    pub uncovered: bool,
    /// The outage was longer than trust lasts, so handlers of living daemons may have been ended before their end.
    pub interruptions: bool,
}

/// What became of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// How many enqueues were acknowledged.
    pub acknowledged: usize,
    /// Acknowledged, and not there when a later primary began.
    pub cut_off: BTreeSet<String>,
    /// Ended, and without an outcome when a later primary began.
    pub unwritten: BTreeSet<String>,
    /// Of those cut off: gone for good, because no living daemon had claimed them.
    pub lost_by_cluster: BTreeSet<String>,
    /// Gone, and should not be.
    pub lost: BTreeSet<String>,
    /// Run again after a run that a living daemon knew of.
    pub twice: BTreeSet<String>,
    /// Run again, as their handler or a person wished.
    pub rerun: BTreeSet<String>,
    /// All that must not be.
    pub faults: BTreeSet<Fault>,
}

/// One run of a job.
#[derive(Debug)]
struct Run<'a> {
    token: &'a str,
    daemon: i32,
    started: Duration,
    ended: Option<Duration>,
}

/// Judges a history that is over. No fault is reported twice.
#[must_use]
pub fn judge(history: &History<'_>) -> Judgement {
    let mut judgement = Judgement {
        acknowledged: history.enqueues.len(),
        faults: overlaps(history.lines),
        ..Judgement::default()
    };
    judgement
        .faults
        .extend(completions(history.lines, history.shown));
    let runs = runs(history.lines);
    for enqueue in history.enqueues {
        history.judge_enqueue(enqueue, &runs, &mut judgement);
    }
    let types: BTreeMap<&str, &str> = history
        .enqueues
        .iter()
        .map(|enqueue| (enqueue.id.as_str(), enqueue.job_type.as_str()))
        .collect();
    for (job, runs) in &runs {
        let job_type = types.get(job).copied().unwrap_or_default();
        history.judge_runs(job, job_type, runs, &mut judgement);
    }
    judgement
}

impl History<'_> {
    fn judge_enqueue(
        &self,
        enqueue: &Enqueue,
        runs: &BTreeMap<&str, Vec<Run<'_>>>,
        judgement: &mut Judgement,
    ) {
        let id = &enqueue.id;
        let kept = self.kept(enqueue);
        if !kept {
            judgement.cut_off.insert(id.clone());
        }
        match self.shown.get(id) {
            Some(is) if !OUTCOMES.contains(&is.status.as_str()) => {
                judgement
                    .faults
                    .insert(Fault::Unfinished(id.clone(), is.status.clone()));
            }
            Some(_) => {}
            None => {
                let claimed = runs
                    .get(id.as_str())
                    .is_some_and(|runs| runs.iter().any(|run| self.is_known(run)));
                if kept || claimed && !self.uncovered {
                    judgement.lost.insert(id.clone());
                    judgement.faults.insert(Fault::Lost(id.clone()));
                } else {
                    judgement.lost_by_cluster.insert(id.clone());
                }
            }
        }
    }

    /// Whether the present primary, and any that came between, had the commit.
    fn kept(&self, enqueue: &Enqueue) -> bool {
        // What a new primary itself has acknowledged was not there to be taken over by it, or by one before it.
        let reigns = self
            .switches
            .iter()
            .filter(|switch| switch.server == enqueue.server && switch.writable <= enqueue.at);
        let since = reigns.map(|switch| switch.writable).max();
        self.switches.iter().all(|switch| {
            since.is_some_and(|since| switch.writable <= since)
                || enqueue.at < switch.since
                || switch.jobs.contains(&enqueue.id)
        })
    }

    /// Whether the daemon of this run lives, or had it written for good.
    fn is_known(&self, run: &Run<'_>) -> bool {
        !self.absences.iter().any(|absence| {
            absence.daemon == run.daemon
                && run.started <= absence.until
                && run.ended.is_none_or(|ended| ended >= absence.safe_before)
        })
    }

    fn judge_runs(&self, job: &str, job_type: &str, runs: &[Run<'_>], judgement: &mut Judgement) {
        let unwritten = runs.iter().filter_map(|run| run.ended).any(|ended| {
            self.switches.iter().any(|switch| {
                let lately = (switch.since..switch.fault).contains(&ended);
                lately && !switch.outcomes.contains(job)
            })
        });
        if unwritten {
            judgement.unwritten.insert(job.to_owned());
        }
        for pair in runs.windows(2) {
            let [before, after] = pair else { continue };
            if !self.is_known(before) {
                continue;
            }
            let kind = job_type.split('-').next().unwrap_or_default();
            if self.uncovered || self.rerun.contains(&kind) {
                judgement.rerun.insert(job.to_owned());
            } else if before.ended.is_some() || !self.interruptions {
                judgement.twice.insert(job.to_owned());
                judgement
                    .faults
                    .insert(Fault::Twice(job.to_owned(), after.token.to_owned()));
            }
        }
    }
}

/// The runs of each job in the order of their starts.
fn runs(lines: &[Line]) -> BTreeMap<&str, Vec<Run<'_>>> {
    let mut runs: BTreeMap<&str, Vec<Run<'_>>> = BTreeMap::new();
    for line in lines {
        let of_job = runs.entry(&line.job).or_default();
        match line.what {
            What::Start => of_job.push(Run {
                token: &line.token,
                daemon: line.parent,
                started: line.at,
                ended: None,
            }),
            What::Tick => {}
            What::End => {
                if let Some(run) = of_job.iter_mut().find(|run| run.token == line.token) {
                    run.ended = Some(line.at);
                }
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests;
