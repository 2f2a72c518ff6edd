//! Stories that are good, and stories that are not.

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
                [what, token, at, daemon] => format!("{what} j 1 {token} 5{token} {at}.0 {daemon}")
                    .replace("5a", "51")
                    .replace("5b", "52"),
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
            lines: &read(&lines.join("\n")).unwrap(),
            enqueues: &[Enqueue {
                id: "j".to_owned(),
                job_type: self.job_type.to_owned(),
                at: secs(1),
                server: OLD,
            }],
            shown: &shown.into_iter().collect(),
            switches: &[Switch {
                fault: secs(10),
                writable: secs(12),
                server: NEW,
                jobs: if self.taken_over {
                    set(&["j"])
                } else {
                    set(&[])
                },
                outcomes: set(&[]),
                since: Duration::ZERO,
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
    let enqueue = |at, server| Enqueue {
        id: j(),
        job_type: "ticks-1".to_owned(),
        at: secs(at),
        server,
    };
    let switch = |at, server, jobs: &[&str]| Switch {
        fault: secs(at),
        writable: secs(at + 1),
        server,
        jobs: set(jobs),
        outcomes: set(&[]),
        since: Duration::ZERO,
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
    let looked_at = |since| Switch {
        since: secs(since),
        ..switch(20, 3, &[])
    };
    assert!(!lost(&enqueue(5, OLD), &[looked_at(5)]));
    assert!(
        lost(&enqueue(5, OLD), &[looked_at(6)]),
        "it is too old for a lost tail"
    );
}
