//! What happens, as log lines and metrics: each event is one function, and no other module knows a metric's name.
#![expect(
    clippy::disallowed_macros,
    reason = "the one place where metrics are written"
)]

use std::time::Duration;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use tenure_core::crew::Leave;
use tenure_store::cluster::Switch;
use tracing::{error, info, warn};

use crate::service;

/// Says what each metric means. Called once, after the recorder was installed.
pub fn describe() {
    describe_counter!("tenure_jobs_claimed_total", "Jobs claimed by this worker.");
    describe_counter!(
        "tenure_jobs_finished_total",
        "Attempts that ended, by job type and outcome."
    );
    describe_histogram!("tenure_job_duration_seconds", "How long handlers ran.");
    describe_histogram!(
        "tenure_pickup_latency_seconds",
        "From when a job was ready until it was claimed, by the database's clock."
    );
    describe_counter!(
        "tenure_leases_lost_total",
        "Leases lost: handlers stopped because the lease was no longer trusted, or ends that came too late."
    );
    describe_counter!(
        "tenure_jobs_recovered_total",
        "Leases of lost workers that this worker recovered."
    );
    describe_gauge!(
        "tenure_processes",
        "Processes of process handlers, by handler and state: starting, working or leaving."
    );
    describe_counter!(
        "tenure_processes_ended_total",
        "Processes of process handlers that ended, by handler and how: left, killed, died, broke (the protocol), not_ready."
    );
    describe_counter!(
        "tenure_ghosts_total",
        "Jobs given back because the answer to their claim was lost."
    );
    describe_gauge!(
        "tenure_heartbeat_age_seconds",
        "Since the last confirmed heartbeat was sent."
    );
    describe_gauge!(
        "tenure_slots",
        "Slots of each pool, by state: free or busy."
    );
    describe_gauge!(
        "tenure_jobs",
        "Jobs of the whole queue, by job type and status; up to 100,000 each."
    );
    describe_gauge!(
        "tenure_dead_letters",
        "Dead letters that wait for review, by job type."
    );
    describe_gauge!(
        "tenure_oldest_pending_age_seconds",
        "For how long the oldest ready job of a type has been ready."
    );
    describe_gauge!("tenure_listener_up", "1 while notifications arrive.");
    describe_gauge!(
        "tenure_unconfirmed_ends",
        "Attempts that ended and whose end the database has not confirmed."
    );
    describe_gauge!(
        "tenure_remembered_ends",
        "Ends that the database has confirmed and that a switch of the primary could still lose."
    );
    describe_gauge!(
        "tenure_replay_uncovered_seconds",
        "Of how much time the ends were forgotten although not every other server has shown them."
    );
    describe_gauge!(
        "tenure_handler_circuit_open",
        "1 while a handler cannot be reached or its installation is wrong, and gets no jobs but probes; by the handler's section."
    );
    describe_counter!(
        "tenure_handler_circuit_opened_total",
        "How often that began."
    );
    describe_gauge!(
        "tenure_open_jobs",
        "Jobs that handlers have accepted by way of this daemon and not finished."
    );
    describe_counter!(
        "tenure_jobs_accepted_total",
        "Jobs that handlers have accepted, by job type."
    );
    describe_gauge!("tenure_primary_up", "1 while a primary answers.");
    describe_gauge!(
        "tenure_two_primaries",
        "1 while two servers take writes at once."
    );
    describe_gauge!(
        "tenure_gate_on_hold",
        "1 while nothing is claimed because a person must decide after a switch."
    );
    describe_counter!(
        "tenure_switches_total",
        "Switches, crashes and restores of the database that this worker has seen, by cause."
    );
    describe_histogram!(
        "tenure_switch_duration_seconds",
        "Of each switch: the longest that a worker was without a primary, and the time until workers had re-attached. Each worker records the same."
    );
    describe_counter!(
        "tenure_switch_jobs_total",
        "What switches were found to have done to jobs, by what: written_again, claimed_again, put_back, recovered, rerun, stopped, set_aside. Of the whole installation: each worker counts the same."
    );
}

/// Jobs were claimed.
pub fn claimed(count: usize) {
    counter!("tenure_jobs_claimed_total").increment(count as u64);
}

/// How long a job had been ready when it was claimed.
pub fn picked_up(latency: Duration) {
    histogram!("tenure_pickup_latency_seconds").record(latency.as_secs_f64());
}

/// An attempt ended.
pub fn finished(job_type: &str, outcome: &'static str, took: Duration) {
    counter!("tenure_jobs_finished_total", "job_type" => job_type.to_owned(), "outcome" => outcome)
        .increment(1);
    histogram!("tenure_job_duration_seconds").record(took.as_secs_f64());
}

/// Handlers are stopped because their leases may be gone.
pub fn leases_lost(count: usize, reason: &str) {
    counter!("tenure_leases_lost_total").increment(count as u64);
    error!(
        count,
        reason, "Leases were lost; their handlers are stopped."
    );
}

/// This worker takes over from another: from one that this process itself `was`, or that the last one in `state_dir` was.
pub fn succeeded(was: bool, ends: usize, again: usize) {
    if was {
        warn!(
            ends,
            again,
            "The worker that this process was is taken for lost, or its leases are not trusted any more: others may have its jobs, and \
             the process is another worker from now on."
        );
    } else {
        info!(
            ends,
            again, "Takes over from the worker that the last process in state_dir was."
        );
    }
}

/// An end came after its run had lost the lease.
pub fn too_late(token: impl std::fmt::Display) {
    counter!("tenure_leases_lost_total").increment(1);
    warn!(%token, "A run ended after it had lost its lease; its end was kept as history only.");
}

/// A sweep recovered leases.
pub fn recovered(leases: i32, workers: i32) {
    counter!("tenure_jobs_recovered_total").increment(u64::try_from(leases).unwrap_or(0));
    warn!(
        leases,
        workers, "Leases that nobody renewed were recovered."
    );
}

/// A heartbeat gave back jobs whose claim's answer was lost.
pub fn ghosts(count: i32) {
    counter!("tenure_ghosts_total").increment(u64::try_from(count).unwrap_or(0));
    warn!(
        count,
        "Jobs whose claim was never answered were given back."
    );
}

/// Slots of a pool.
pub fn slots(pool: &str, free: usize, busy: usize) {
    gauge!("tenure_slots", "pool" => pool.to_owned(), "state" => "free").set(free as f64);
    gauge!("tenure_slots", "pool" => pool.to_owned(), "state" => "busy").set(busy as f64);
}

/// Numbers of one job type in the whole queue. Job types are as many as there are; the database bounds them by its lanes.
pub fn queue(job_type: &str, pending: i64, running: i64, failed: i64, oldest_pending: Option<f64>) {
    for (status, jobs) in [
        ("pending", pending),
        ("running", running),
        ("failed", failed),
    ] {
        gauge!("tenure_jobs", "job_type" => job_type.to_owned(), "status" => status)
            .set(jobs as f64);
    }
    gauge!("tenure_dead_letters", "job_type" => job_type.to_owned()).set(failed as f64);
    gauge!("tenure_oldest_pending_age_seconds", "job_type" => job_type.to_owned())
        .set(oldest_pending.unwrap_or(0.0));
}

/// How old the last confirmed heartbeat is.
pub fn heartbeat_age(age: Option<Duration>) {
    gauge!("tenure_heartbeat_age_seconds").set(age.map_or(f64::INFINITY, |age| age.as_secs_f64()));
}

/// Whether notifications arrive.
pub fn listener(up: bool) {
    gauge!("tenure_listener_up").set(if up { 1.0 } else { 0.0 });
}

/// Ends that wait for the database.
pub fn unconfirmed(count: usize) {
    gauge!("tenure_unconfirmed_ends").set(count as f64);
}

/// The worker is known to the database.
pub fn registered(worker: impl std::fmt::Display, epoch_no: i64) {
    service::status("working");
    info!(%worker, epoch_no, "Registered.");
}

/// The worker has said all in a new epoch.
pub fn reattached(
    worker: impl std::fmt::Display,
    epoch_no: i64,
    held: usize,
    ended: usize,
    again: usize,
    stopped: usize,
) {
    warn!(%worker, epoch_no, held, ended, again, stopped, "The database was switched or restarted; re-attached.");
}

/// Ends that a switch could still lose.
pub fn remembered(count: usize, uncovered: Duration) {
    gauge!("tenure_remembered_ends").set(count as f64);
    gauge!("tenure_replay_uncovered_seconds").set(uncovered.as_secs_f64());
}

/// Whether a primary answers.
pub fn primary_up(up: bool) {
    gauge!("tenure_primary_up").set(if up { 1.0 } else { 0.0 });
}

/// There is no primary.
pub fn primary_lost(hosts: &str) {
    service::status("no primary answers; running handlers go on while that is safe");
    error!(
        hosts,
        "No primary answers. Running handlers go on while that is safe; looking for one."
    );
}

/// There is a primary, the first or another one, or after `outage` without any.
pub fn primary_found(name: &str, outage: Option<Duration>) {
    match outage {
        Some(outage) => warn!(
            host = name,
            seconds = outage.as_secs_f64(),
            "A primary answers again."
        ),
        None => info!(host = name, "The primary is found."),
    }
}

/// Two servers take writes, or no longer.
pub fn two_primaries(which: Option<(String, String)>) {
    gauge!("tenure_two_primaries").set(if which.is_some() { 1.0 } else { 0.0 });
    match which {
        Some((one, other)) => error!(
            one,
            other,
            "Two servers take writes at once. This daemon speaks to the one with the higher timeline; what is written to the other is lost. Stop the other one."
        ),
        None => info!("Only one server takes writes again."),
    }
}

/// A host's database is another installation of tenure.
pub fn another_installation(name: &str) {
    error!(
        host = name,
        "The database of this host is another installation of tenure than the one that this daemon works for; nothing is done there. If it \
         is the right one, start the daemon anew with an empty state_dir; else take the host out of database.url."
    );
}

/// The only server that takes writes is on a timeline from before the last switch, or another one was put in its place.
pub fn only_an_older_primary(name: &str, to_replace: Option<i32>) {
    let timeline = to_replace.unwrap_or_default();
    error!(
        host = name,
        "The only server that takes writes lacks what happened on another one, after a switch or since a person accepted that one; nothing \
         is written to it. If the other one is lost for good: `tenure cluster accept --timeline {timeline} --reason WHY` there."
    );
}

/// A host of the address belongs to another PostgreSQL cluster.
pub fn foreign_server(name: &str) {
    error!(
        host = name,
        "This host takes writes and belongs to another PostgreSQL cluster than the rest of database.url; it is used only if no other is left, and then held until `tenure cluster accept`."
    );
}

/// Nothing is claimed, because a person must decide.
pub fn on_hold(reason: Option<&str>) {
    gauge!("tenure_gate_on_hold").set(if reason.is_some() { 1.0 } else { 0.0 });
    match reason {
        Some(reason) => error!(
            reason,
            "The gate is on hold after a switch: nothing is claimed until a person decides. See `tenure cluster status`."
        ),
        None => info!("The gate is no longer on hold."),
    }
}

/// A switch is over: jobs from before it are claimed again. This is the event that alerts are about.
pub fn switched(switch: &Switch) {
    counter!("tenure_switches_total", "cause" => switch.cause.clone()).increment(1);
    let seconds = switch.without_primary_sec.unwrap_or(0.0) + switch.window_sec.unwrap_or(0.0);
    histogram!("tenure_switch_duration_seconds").record(seconds);
    let jobs = [
        ("written_again", switch.written_again),
        ("claimed_again", switch.claimed_again),
        ("put_back", switch.put_back),
        ("recovered", switch.recovered),
        ("rerun", switch.rerun),
        ("stopped", switch.stopped),
        ("set_aside", switch.set_aside),
    ];
    for (what, count) in jobs {
        counter!("tenure_switch_jobs_total", "what" => what)
            .increment(u64::try_from(count).unwrap_or(0));
    }
    warn!(
        switch = switch.epoch_no,
        cause = switch.cause,
        without_primary_seconds = switch.without_primary_sec,
        window_seconds = switch.window_sec,
        written_again = switch.written_again,
        claimed_again = switch.claimed_again,
        put_back = switch.put_back,
        recovered = switch.recovered,
        rerun = switch.rerun,
        stopped = switch.stopped,
        set_aside = switch.set_aside,
        uncovered_seconds = switch.uncovered_sec,
        absent_workers = switch.absent_workers.as_ref().map_or(0, Vec::len),
        "A switch of the database is over. `tenure cluster switches show {} --jobs` lists the jobs.",
        switch.epoch_no
    );
}

/// Whether a handler gets no jobs but probes.
pub fn circuit_open(handler: &str, open: bool) {
    gauge!("tenure_handler_circuit_open", "handler" => handler.to_owned()).set(if open {
        1.0
    } else {
        0.0
    });
}

/// A handler cannot be reached, or its installation is wrong. This is an event that alerts are about.
pub fn circuit_opened(handler: &str, error: &str) {
    circuit_open(handler, true);
    counter!("tenure_handler_circuit_opened_total", "handler" => handler.to_owned()).increment(1);
    error!(
        handler,
        error,
        "The handler fails for every job: nothing more is claimed for it but single jobs to try it with, so that no attempts are used up."
    );
}

/// A handler answers again.
pub fn circuit_closed(handler: &str) {
    circuit_open(handler, false);
    warn!(handler, "The handler answers again; its jobs are claimed.");
}

/// How many processes a handler has: starting, working, leaving.
pub fn processes(handler: &str, counts: [usize; 3]) {
    for (state, count) in ["starting", "working", "leaving"].into_iter().zip(counts) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        gauge!("tenure_processes", "handler" => handler.to_owned(), "state" => state)
            .set(f64::from(count));
    }
}

/// A process of a handler was started.
pub fn process_started(handler: &str, pid: i32) {
    info!(handler, pid, "A process was started.");
}

/// A process gets no further job, and ends when it has answered for those that it has.
pub fn process_leaves(handler: &str, pid: i32, why: Leave) {
    let why = match why {
        Leave::Jobs => "it has done max_jobs jobs",
        Leave::Age => "it is older than max_age",
        Leave::Memory => "it holds more than max_memory",
    };
    info!(handler, pid, why, "A process is replaced.");
}

/// How a process of a handler ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    /// It was told to go and did.
    Left,
    /// It was killed for a reason outside it.
    Killed,
    /// By itself.
    Died,
    /// It broke the protocol.
    Broke,
    /// It never said that it is ready.
    NotReady,
}

/// A process of a handler has ended; it had so many jobs.
pub fn process_gone(handler: &str, pid: i32, jobs: usize, how: ProcessEnd, why: &str) {
    let label = match how {
        ProcessEnd::Left => "left",
        ProcessEnd::Killed => "killed",
        ProcessEnd::Died => "died",
        ProcessEnd::Broke => "broke",
        ProcessEnd::NotReady => "not_ready",
    };
    counter!("tenure_processes_ended_total", "handler" => handler.to_owned(), "how" => label)
        .increment(1);
    match how {
        ProcessEnd::Left => info!(handler, pid, "A process has left."),
        ProcessEnd::Killed => warn!(handler, pid, jobs, why, "A process was killed."),
        ProcessEnd::Died | ProcessEnd::Broke => {
            error!(
                handler,
                pid, jobs, why, "A process ended badly; it is replaced."
            );
        }
        ProcessEnd::NotReady => {
            error!(
                handler,
                pid, why, "A process did not get ready; it is tried again after a wait."
            );
        }
    }
}

/// Jobs that handlers have accepted and not finished.
pub fn open_jobs(count: usize) {
    gauge!("tenure_open_jobs").set(count as f64);
}

/// A handler has accepted a job and finishes it later.
pub fn accepted(job_type: &str) {
    counter!("tenure_jobs_accepted_total", "job_type" => job_type.to_owned()).increment(1);
}

/// A handler has said to this daemon how a job ended. How long it took nobody here has seen.
pub fn ended_elsewhere(job_type: &str, outcome: &'static str) {
    counter!("tenure_jobs_finished_total", "job_type" => job_type.to_owned(), "outcome" => outcome)
        .increment(1);
}
