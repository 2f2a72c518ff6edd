//! The verdict over switches of the primary: what was lost by whom, what ran twice, and what may have.
//!
//! A commit that the old primary acknowledged and the new one does not have is lost by the cluster, not by us. But what a
//! living daemon had claimed or finished it still knows, and so nothing of that may be lost or run again. What "living" excuses
//! is said by [`Absence`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Fault, Shown, completions, overlaps};
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
    /// The server that acknowledged it.
    pub port: u16,
}

/// A server that became the primary.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Switch {
    /// When its predecessor was struck.
    pub fault: Duration,
    /// When the new primary took writes.
    pub writable: Duration,
    /// The new primary.
    pub port: u16,
    /// The jobs that it had then.
    pub jobs: BTreeSet<String>,
    /// Those of them that had an outcome.
    pub outcomes: BTreeSet<String>,
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
    /// A span was not covered, and a person decided that what is in it runs again.
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
            Some(is) if !super::OUTCOMES.contains(&is.status.as_str()) => {
                judgement
                    .faults
                    .insert(Fault::Unfinished(id.clone(), is.status.clone()));
            }
            Some(_) => {}
            None => {
                let claimed = runs
                    .get(id.as_str())
                    .is_some_and(|runs| runs.iter().any(|run| self.is_known(run)));
                if kept || claimed {
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
        self.switches.iter().all(|switch| {
            // What this new primary itself has acknowledged, or one after it, was not there to be taken over.
            let later = self.switches.iter().any(|other| {
                other.writable >= switch.writable
                    && other.port == enqueue.port
                    && other.writable <= enqueue.at
            });
            later || switch.jobs.contains(&enqueue.id)
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
            self.switches
                .iter()
                .any(|switch| ended < switch.fault && !switch.outcomes.contains(job))
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
mod tests {
    use super::*;
    use crate::witness::read;

    const OLD: u16 = 1;
    const NEW: u16 = 2;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn set(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|&id| id.to_owned()).collect()
    }

    /// A story of one job `j`, enqueued at the old primary at 1 s; the switch is at 10 s, and writable is the new one at 12 s.
    struct Story {
        events: &'static str,
        job_type: &'static str,
        shown: Option<&'static str>,
        taken_over: bool,
        absences: Vec<Absence>,
        rerun: &'static [&'static str],
        uncovered: bool,
        interruptions: bool,
    }

    impl Default for Story {
        fn default() -> Self {
            Self {
                events: "start a 2 7, end a 3 7",
                job_type: "ticks-1",
                shown: Some("a"),
                taken_over: true,
                absences: Vec::new(),
                rerun: &[],
                uncovered: false,
                interruptions: false,
            }
        }
    }

    impl Story {
        /// Events are `what token at daemon`.
        fn judge(&self) -> Judgement {
            let lines: Vec<String> = self
                .events
                .split(", ")
                .filter(|event| !event.is_empty())
                .map(|event| match event.split(' ').collect::<Vec<_>>()[..] {
                    [what, token, at, daemon] => {
                        format!("{what} j 1 {token} 5{token} {at}.0 {daemon}")
                            .replace("5a", "51")
                            .replace("5b", "52")
                    }
                    _ => panic!("{event}"),
                })
                .collect();
            let shown = self.shown.map(|token| {
                let status = "completed".to_owned();
                (
                    "j".to_owned(),
                    Shown {
                        status,
                        token: Some(token.to_owned()),
                    },
                )
            });
            judge(&History {
                lines: &read(&lines.join("\n")),
                enqueues: &[Enqueue {
                    id: "j".to_owned(),
                    job_type: self.job_type.to_owned(),
                    at: secs(1),
                    port: OLD,
                }],
                shown: &shown.into_iter().collect(),
                switches: &[Switch {
                    fault: secs(10),
                    writable: secs(12),
                    port: NEW,
                    jobs: if self.taken_over {
                        set(&["j"])
                    } else {
                        set(&[])
                    },
                    outcomes: set(&[]),
                }],
                absences: &self.absences,
                rerun: self.rerun,
                uncovered: self.uncovered,
                interruptions: self.interruptions,
            })
        }

        #[track_caller]
        fn is_good(&self) -> Judgement {
            let judgement = self.judge();
            assert_eq!(judgement.faults, BTreeSet::new(), "{}", self.events);
            judgement
        }

        #[track_caller]
        fn has(&self, fault: Fault) {
            assert_eq!(
                self.judge().faults,
                BTreeSet::from([fault]),
                "{}",
                self.events
            );
        }
    }

    fn j() -> String {
        "j".to_owned()
    }

    const KILLED: Absence = Absence {
        daemon: 7,
        safe_before: Duration::from_secs(5),
        until: Duration::MAX,
    };

    #[test]
    fn once_is_good_wherever_the_switch_falls() {
        for events in [
            "start a 2 7, end a 3 7",
            "start a 2 7, tick a 11 7, end a 13 7",
            "start a 13 7, end a 14 7",
        ] {
            let judgement = Story {
                events,
                ..Story::default()
            }
            .is_good();
            assert_eq!((judgement.acknowledged, judgement.twice.len()), (1, 0));
        }
    }

    #[test]
    fn a_lost_completion_is_counted() {
        let judgement = Story::default().is_good();
        assert_eq!(judgement.unwritten, set(&["j"]));
        let events = "start a 13 7, end a 14 7";
        let judgement = Story {
            events,
            ..Story::default()
        }
        .is_good();
        assert_eq!(judgement.unwritten, set(&[]));
    }

    #[test]
    fn what_only_the_old_primary_had_is_lost_by_the_cluster() {
        let story = Story {
            events: "",
            shown: None,
            taken_over: false,
            ..Story::default()
        };
        let judgement = story.is_good();
        assert_eq!(judgement.lost_by_cluster, set(&["j"]));
        assert_eq!(judgement.cut_off, set(&["j"]));
    }

    #[test]
    fn what_the_new_primary_had_is_not_lost() {
        Story {
            events: "",
            shown: None,
            ..Story::default()
        }
        .has(Fault::Lost(j()));
    }

    #[test]
    fn what_a_living_daemon_had_claimed_is_not_lost() {
        let story = Story {
            events: "start a 2 7",
            shown: None,
            taken_over: false,
            ..Story::default()
        };
        story.has(Fault::Lost(j()));
        let absences = vec![KILLED];
        let judgement = Story { absences, ..story }.is_good();
        assert_eq!(judgement.lost_by_cluster, set(&["j"]));
    }

    #[test]
    fn what_a_living_daemon_finished_runs_once() {
        let events = "start a 2 7, end a 3 7, start b 13 8, end b 14 8";
        let story = Story {
            events,
            shown: Some("b"),
            ..Story::default()
        };
        story.has(Fault::Twice(j(), "b".to_owned()));
        assert_eq!(story.judge().twice, set(&["j"]));
        // Another daemon's death is no excuse, and neither is the own one when all had been said before.
        let other = Absence {
            daemon: 8,
            ..KILLED
        };
        Story {
            absences: vec![other, KILLED],
            ..story
        }
        .has(Fault::Twice(j(), "b".to_owned()));
    }

    #[test]
    fn a_killed_daemon_takes_with_it_what_was_not_safe() {
        let absences = vec![KILLED];
        for events in [
            "start a 2 7, end a 9 7, start b 13 8, end b 14 8",
            "start a 2 7, tick a 3 7, start b 13 8, end b 14 8",
        ] {
            let absences = absences.clone();
            Story {
                events,
                absences,
                shown: Some("b"),
                ..Story::default()
            }
            .is_good();
        }
    }

    #[test]
    fn a_stopped_daemon_that_goes_on_is_a_living_one() {
        let absences = vec![Absence {
            until: secs(8),
            ..KILLED
        }];
        let events = "start a 9 7, end a 9 7, start b 13 8, end b 14 8";
        let story = Story {
            events,
            absences,
            shown: Some("b"),
            ..Story::default()
        };
        story.has(Fault::Twice(j(), "b".to_owned()));
    }

    #[test]
    fn a_run_of_a_living_daemon_is_not_interrupted() {
        let events = "start a 9 7, tick a 10 7, start b 13 8, end b 14 8";
        let story = Story {
            events,
            shown: Some("b"),
            ..Story::default()
        };
        story.has(Fault::Twice(j(), "b".to_owned()));
        Story {
            interruptions: true,
            ..story
        }
        .is_good();
    }

    #[test]
    fn who_wished_to_run_again_is_counted_apart() {
        let events = "start a 2 7, end a 9 7, start b 13 8, end b 14 8";
        let story = || Story {
            events,
            job_type: "effects-1",
            shown: Some("b"),
            ..Story::default()
        };
        for story in [
            Story {
                rerun: &["effects"],
                ..story()
            },
            Story {
                uncovered: true,
                ..story()
            },
        ] {
            let judgement = story.is_good();
            assert_eq!((judgement.rerun, judgement.twice), (set(&["j"]), set(&[])));
        }
        Story {
            rerun: &["ticks"],
            ..story()
        }
        .has(Fault::Twice(j(), "b".to_owned()));
    }

    #[test]
    fn two_at_once_are_never_good() {
        let events = "start a 2 7, start b 13 8, tick a 13 7, end b 14 8";
        let story = Story {
            events,
            shown: Some("b"),
            absences: vec![KILLED],
            ..Story::default()
        };
        story.has(Fault::Overlap(j(), "b".to_owned()));
    }

    #[test]
    fn each_switch_has_to_take_over_what_was_acknowledged_before_it() {
        let enqueue = |at, port| Enqueue {
            id: j(),
            job_type: "ticks-1".to_owned(),
            at: secs(at),
            port,
        };
        let switch = |at, port, jobs: &[&str]| Switch {
            fault: secs(at),
            writable: secs(at + 1),
            port,
            jobs: set(jobs),
            outcomes: set(&[]),
        };
        let shown = BTreeMap::new();
        let lost = |enqueue: &Enqueue, switches: &[Switch]| {
            let judgement = judge(&History {
                lines: &[],
                enqueues: std::slice::from_ref(enqueue),
                shown: &shown,
                switches,
                absences: &[],
                rerun: &[],
                uncovered: false,
                interruptions: false,
            });
            !judgement.lost.is_empty()
        };
        let both = [switch(10, NEW, &["j"]), switch(20, 3, &[])];
        assert!(!lost(&enqueue(1, OLD), &both), "the second one lost it");
        assert!(lost(&enqueue(1, OLD), &both[..1]));
        assert!(!lost(&enqueue(12, NEW), &both));
        assert!(
            lost(&enqueue(22, 3), &both),
            "the present primary has said yes"
        );
        assert!(
            !lost(&enqueue(22, OLD), &both),
            "an old primary has said yes"
        );
    }
}
