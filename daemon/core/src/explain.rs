//! Why a job stands where it stands, and what would move it: facts in, reasons out.
//!
//! Invariant: each job has a reason, unless it has ended well; a reason says what holds the job back now, not what could.
//! All times are texts, as the database gives them.

use serde::{Deserialize, Serialize};

/// What the database shows of a job and of what it depends on, all of one moment.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// Its job type.
    pub job_type: String,
    /// scheduled, blocked, pending, running, completed, failed, discarded or cancelled.
    pub status: String,
    /// What a scheduled job waits for: time, retry, snooze or window.
    pub waits_for: Option<String>,
    /// When a scheduled job is due.
    pub due: Option<String>,
    /// It is due already.
    pub is_due: bool,
    /// Pending: jobs of its type that come first; counted up to [`MOST_AHEAD`].
    pub ahead: u64,
    /// Since when it could run.
    pub ready_at: Option<String>,
    /// A process died while it had this job and others.
    pub alone: bool,
    /// Its place was taken before the window opened, or its key or id may be held by a worker: not claimed in a window.
    pub waits_for_window: bool,
    /// Jobs that it depends on and that have not completed, with their status; `None`: no such job.
    pub parents: Vec<(String, Option<String>)>,
    /// Running: who has it.
    pub holder: Option<Holder>,
    /// What a person asked of a running job.
    pub stop: Option<Stop>,
    /// The reason of its end, or of its last failure.
    pub error: Option<String>,
    /// The dead letter that waits for review.
    pub dead_letter: Option<String>,
    /// When the job type was paused, and by whom.
    pub paused: Option<(String, String)>,
    /// open, window, hold, or `lost`: the epoch has ended, and no worker has opened another one.
    pub gate: String,
    /// Why the gate is on hold.
    pub hold_reason: Option<String>,
    /// The workers that a window waits for, by name, or by id where they are not known.
    pub waited_for: Vec<String>,
    /// The workers that have a handler for this job type.
    pub workers: Vec<Worker>,
}

/// Jobs ahead are counted up to here.
pub const MOST_AHEAD: u64 = 10_000;

/// Who runs a job.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Holder {
    /// The worker's name.
    pub name: String,
    /// live, draining, stopped, lost, or unknown.
    pub status: String,
    /// Since when it has the job.
    pub since: String,
    /// Its last heartbeat.
    pub last_heartbeat: Option<String>,
    /// How long its leases last after a heartbeat.
    pub lease_ttl: Option<String>,
    /// The lease has a time of its own: the handler accepted the job and finishes it later.
    pub until: Option<String>,
}

/// What a person asked of a running job.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Stop {
    /// cancel, complete or dead.
    pub kind: String,
    /// Who asked.
    pub by: String,
    /// When.
    pub at: String,
    /// Why.
    pub reason: Option<String>,
}

/// A worker that has a handler for the job type.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// live or draining.
    pub status: String,
    /// Patterns of the job types that it has handlers for.
    pub job_types: Vec<String>,
    /// Its slots, of all pools.
    pub concurrency: i64,
    /// Jobs that it had at its last heartbeat.
    pub in_flight: i64,
    /// All others know of it, so it may claim.
    pub admitted: bool,
}

/// One reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// For programs.
    pub code: &'static str,
    /// For people.
    pub text: String,
    /// What would release the job; `None`: nothing has to be done.
    pub release: Option<String>,
}

/// Why the job stands where it stands, the most important reason first.
#[must_use]
pub fn reasons(facts: &Facts) -> Vec<Reason> {
    match facts.status.as_str() {
        "pending" => pending(facts),
        "scheduled" => scheduled(facts),
        "blocked" => vec![blocked(facts)],
        "running" => running(facts),
        "failed" => vec![failed(facts)],
        "cancelled" | "discarded" => vec![ended(facts)],
        _ => Vec::new(),
    }
}

fn reason(code: &'static str, text: impl Into<String>) -> Reason {
    Reason {
        code,
        text: text.into(),
        release: None,
    }
}

impl Reason {
    fn release(self, release: impl Into<String>) -> Self {
        Self {
            release: Some(release.into()),
            ..self
        }
    }
}

/// What keeps any job of this type from being claimed.
fn closed(facts: &Facts) -> Vec<Reason> {
    let mut reasons = Vec::new();
    match facts.gate.as_str() {
        "hold" => {
            let why = facts.hold_reason.as_deref().unwrap_or("no reason is on record");
            reasons.push(
                reason("gate_on_hold", format!("nothing is claimed until a person decides: {why}"))
                    .release("look at `tenure cluster status`, then `tenure cluster accept` or `tenure cluster resume`"),
            );
        }
        "lost" => reasons.push(
            reason("no_epoch", "the database server was switched, restarted after a crash or restored, and no worker has come back yet")
                .release("start a worker, or see in its log why it does not reach this server"),
        ),
        "window" if facts.waits_for_window => {
            let names = match facts.waited_for.as_slice() {
                [] => "the next sweep closes the window".to_owned(),
                names => format!("waiting for {}", names.join(", ")),
            };
            reasons.push(reason(
                "reattaching",
                format!("after a switch of the database no job of before is claimed until all workers have said what they hold; {names}, each for its lease_ttl at most"),
            ));
        }
        _ => {}
    }
    if let Some((at, by)) = &facts.paused {
        let job_type = &facts.job_type;
        reasons.push(
            reason(
                "paused",
                format!("the job type {job_type} was paused by {by} at {at}"),
            )
            .release(format!(
                "SELECT tenure.resume('{}')",
                job_type.replace('\'', "''")
            )),
        );
    }
    let live = facts
        .workers
        .iter()
        .filter(|worker| worker.status == "live");
    if live.count() == 0 {
        let draining: Vec<&str> = facts.workers.iter().map(|it| it.name.as_str()).collect();
        let but = match draining.as_slice() {
            [] => String::new(),
            names => format!("; {} is stopping and claims nothing more", names.join(", ")),
        };
        reasons.push(
            reason("no_worker", format!("no running worker has a handler for {}{but}", facts.job_type)).release(format!(
                "start a worker whose configuration has a section that matches, such as [handlers.\"{}\"]",
                facts.job_type
            )),
        );
    }
    reasons
}

fn pending(facts: &Facts) -> Vec<Reason> {
    let mut reasons = closed(facts);
    if !reasons.is_empty() {
        return reasons;
    }
    let live = || {
        facts
            .workers
            .iter()
            .filter(|worker| worker.status == "live")
    };
    let slots: i64 = live().map(|worker| worker.concurrency).sum();
    let taken: i64 = live().map(|worker| worker.in_flight).sum();
    if live().all(|worker| !worker.admitted) {
        reasons.push(reason(
            "new_worker",
            "its worker has just started, and claims when all others know of it: a moment",
        ));
    } else if taken >= slots {
        reasons.push(
            reason("no_free_slot", format!("all {slots} slots of the {} workers that have a handler for it are taken", live().count()))
                .release("wait, raise worker.concurrency, give the type a pool of its own, or start another worker"),
        );
    }
    if facts.ahead > 0 {
        let count = match facts.ahead {
            MOST_AHEAD.. => format!("{MOST_AHEAD} or more jobs"),
            1 => "1 job".to_owned(),
            some => format!("{some} jobs"),
        };
        reasons.push(reason(
            "behind_others",
            format!("{count} of its type come first, by priority and by when they became ready"),
        ));
    }
    if reasons.is_empty() {
        reasons.push(
            reason("next", "a worker can take it at any moment").release(
                "if it stays so, the handler may have no room (the processes of a process handler are taken) or be away: see the worker's log, and tenure_handler_circuit_open among its metrics",
            ),
        );
    }
    if facts.alone {
        reasons.push(reason("runs_alone", "a process died while it had this job and others, so it waits for a process that has no other"));
    }
    reasons
}

fn scheduled(facts: &Facts) -> Vec<Reason> {
    let due = facts.due.as_deref().unwrap_or("an unknown time");
    let first = match facts.waits_for.as_deref() {
        Some("window") => {
            let mut reasons = closed(facts);
            if reasons.is_empty() {
                reasons.push(reason("reattached", "it waited for the end of a switch, which is over: the next sweep makes it ready"));
            }
            return reasons;
        }
        Some("retry") => {
            let error = facts.error.as_deref().unwrap_or("no error is on record");
            reason(
                "retry",
                format!("its last attempt failed ({error}); the next one is due at {due}"),
            )
        }
        Some("snooze") => reason(
            "snoozed",
            format!("its handler asked to be called again at {due}"),
        ),
        _ => reason("time", format!("its time comes at {due}")),
    };
    let mut reasons = vec![first];
    if facts.is_due {
        reasons.push(reason(
            "due",
            "it is due: the next sweep makes it ready, within a second where a worker runs",
        ));
        reasons.extend(closed(facts));
    }
    reasons
}

fn blocked(facts: &Facts) -> Reason {
    let parent = |(id, status): &(String, Option<String>)| match status {
        Some(status) => format!("{id} ({status})"),
        None => format!("{id} (there is no such job)"),
    };
    let parents: Vec<String> = facts.parents.iter().map(parent).collect();
    match parents.as_slice() {
        [] => reason(
            "dependencies",
            "all jobs that it waited for have completed: the next sweep makes it ready",
        ),
        parents => reason(
            "dependencies",
            format!("it waits for {}", parents.join(", ")),
        ),
    }
}

fn running(facts: &Facts) -> Vec<Reason> {
    let holder = facts.holder.clone().unwrap_or_default();
    let mut reasons = Vec::new();
    if let Some(stop) = &facts.stop {
        let why = stop
            .reason
            .as_deref()
            .map_or_else(String::new, |why| format!(": {why}"));
        let what = match stop.kind.as_str() {
            "cancel" => "cancelled",
            "complete" => "completed by hand",
            _ => "moved to the dead letters",
        };
        reasons.push(reason(
            "stopping",
            format!(
                "{} asked at {} that it is {what}{why}; its handler is being stopped",
                stop.by, stop.at
            ),
        ));
    }
    let Holder {
        name,
        status,
        since,
        ..
    } = &holder;
    reasons.push(match (&holder.until, status.as_str()) {
        (Some(until), _) => reason("open", format!("its handler accepted it and finishes it later; the lease lasts until {until} unless it is renewed"))
            .release("the handler's POST to /v1/jobs/ID/complete or fail"),
        (None, "live" | "draining") => {
            let stopping = if status == "draining" { ", which is stopping," } else { "" };
            reason("running", format!("worker {name}{stopping} runs it since {since}"))
        }
        (None, _) => {
            let beat = holder.last_heartbeat.as_deref().unwrap_or("an unknown time");
            reason("worker_gone", format!("worker {name}, which ran it since {since}, is {status} (last heartbeat at {beat}): the next sweep gives it to others"))
                .release("a running worker: the sweep is theirs to do")
        }
    });
    reasons
}

fn failed(facts: &Facts) -> Reason {
    let error = facts.error.as_deref().unwrap_or("no error is on record");
    let text = reason("dead_letter", format!("it failed for good: {error}"));
    match &facts.dead_letter {
        Some(id) => text.release(format!(
            "`tenure dead retry {id}`, `tenure dead fix {id}` or `tenure dead discard {id}`"
        )),
        None => text,
    }
}

fn ended(facts: &Facts) -> Reason {
    let said = facts.error.as_deref().unwrap_or("by a person");
    reason("ended", format!("{}: {said}", facts.status))
        .release("`tenure job retry ID` runs it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(status: &str) -> Facts {
        Facts {
            job_type: "mail".to_owned(),
            status: status.to_owned(),
            gate: "open".to_owned(),
            workers: vec![worker("a", 2, 0)],
            ..Facts::default()
        }
    }

    fn worker(name: &str, concurrency: i64, in_flight: i64) -> Worker {
        Worker {
            name: name.to_owned(),
            status: "live".to_owned(),
            job_types: vec!["*".to_owned()],
            concurrency,
            in_flight,
            admitted: true,
        }
    }

    fn codes(facts: &Facts) -> Vec<&'static str> {
        reasons(facts).iter().map(|reason| reason.code).collect()
    }

    #[test]
    fn what_holds_all_jobs_comes_before_what_holds_this_one() {
        let mut it = Facts {
            ahead: 3,
            ..facts("pending")
        };
        assert_eq!(codes(&it), ["behind_others"]);
        it.workers[0].in_flight = 2;
        assert_eq!(codes(&it), ["no_free_slot", "behind_others"]);
        it.workers[0].status = "draining".to_owned();
        assert_eq!(codes(&it), ["no_worker"]);
        it.paused = Some(("today".to_owned(), "ann".to_owned()));
        it.gate = "hold".to_owned();
        assert_eq!(codes(&it), ["gate_on_hold", "paused", "no_worker"]);
    }

    #[test]
    fn in_a_window_only_what_is_at_risk_waits_for_it() {
        let mut it = Facts {
            gate: "window".to_owned(),
            ..facts("pending")
        };
        assert_eq!(codes(&it), ["next"]);
        it.waits_for_window = true;
        assert_eq!(codes(&it), ["reattaching"]);
    }

    #[test]
    fn every_job_that_has_not_ended_well_has_a_reason() {
        for status in [
            "pending",
            "scheduled",
            "blocked",
            "running",
            "failed",
            "cancelled",
            "discarded",
        ] {
            assert!(!codes(&facts(status)).is_empty(), "{status}");
        }
        assert!(codes(&facts("completed")).is_empty());
        let after = Facts {
            waits_for: Some("window".to_owned()),
            ..facts("scheduled")
        };
        assert_eq!(codes(&after), ["reattached"]);
    }

    #[test]
    fn running_jobs_say_whose_they_are_and_who_wants_them_stopped() {
        let mut it = Facts {
            holder: Some(Holder {
                status: "live".to_owned(),
                ..Holder::default()
            }),
            ..facts("running")
        };
        assert_eq!(codes(&it), ["running"]);
        it.stop = Some(Stop::default());
        it.holder = Some(Holder {
            status: "lost".to_owned(),
            ..Holder::default()
        });
        assert_eq!(codes(&it), ["stopping", "worker_gone"]);
        it.holder = Some(Holder {
            until: Some("then".to_owned()),
            ..Holder::default()
        });
        assert_eq!(codes(&it), ["stopping", "open"]);
    }
}
