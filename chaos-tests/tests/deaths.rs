//! How a daemon dies, and what becomes of its jobs.

use chaos_tests::{Lab, UNFINISHED, What};
use nix::sys::signal::Signal;

fn attempts(lab: &Lab, job: &str) -> String {
    lab.value(&format!(
        "SELECT attempts FROM tenure.jobs WHERE id = '{job}'"
    ))
}

#[test]
fn another_daemon_takes_over_what_a_killed_one_held() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &[]);
    let jobs = [lab.enqueue("ticks-50"), lab.enqueue("stubborn-50")];
    lab.until_witnessed(What::Tick, 4);
    let _other = lab.daemon("b", &[]);
    lab.until_live(2);
    daemon.kill9();
    lab.until_handlers_are_dead();
    for job in &jobs {
        lab.until_status(job, "completed");
        assert_eq!(attempts(&lab, job), "2");
    }
    lab.assert_sound(&jobs);
}

/// B17, B20: the stopped daemon finds its jobs gone, becomes another worker, and goes on.
#[test]
fn a_stopped_daemon_loses_its_jobs_and_comes_back_as_another_worker() {
    let lab = Lab::start();
    let daemon = lab.daemon("a", &[]);
    let jobs = [lab.enqueue("ticks-50"), lab.enqueue("stubborn-50")];
    lab.until_witnessed(What::Tick, 4);
    let mut other = lab.daemon("b", &[]);
    lab.until_live(2);
    daemon.signal(Signal::SIGSTOP);
    // Its guard ends them before anybody else may have them.
    lab.until_handlers_are_dead();
    lab.until(
        "SELECT count(*) FROM tenure.workers WHERE status = 'lost'",
        "1",
    );
    for job in &jobs {
        lab.until_status(job, "completed");
    }
    daemon.signal(Signal::SIGCONT);
    lab.until_live(2);
    assert_eq!(other.stop(), 0, "{}", other.log());
    let last = lab.enqueue("ticks-1");
    lab.until_status(&last, "completed");
    lab.assert_sound(&[jobs.to_vec(), vec![last]].concat());
    assert_eq!(
        lab.value("SELECT count(*) FROM tenure.workers WHERE name = 'a'"),
        "2"
    );
}

#[test]
fn a_restart_on_its_state_dir_frees_the_jobs_at_once() {
    let lab = Lab::start();
    let state_dir = lab.state_dir("a");
    // Nothing else than the restart can free them within any test's patience.
    let set = [state_dir.as_str(), "worker.lease_ttl=30m"];
    let mut daemon = lab.daemon("a", &set);
    let jobs = [lab.enqueue("ticks-30"), lab.enqueue("stubborn-30")];
    lab.until_witnessed(What::Tick, 4);
    daemon.kill9();
    let _next = lab.daemon("a", &set);
    for job in &jobs {
        lab.until_status(job, "completed");
        assert_eq!(attempts(&lab, job), "2");
    }
    lab.assert_sound(&jobs);
}

#[test]
fn what_ended_while_the_database_was_away_is_written_by_the_next_start() {
    for by in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut lab = Lab::start();
        let state_dir = lab.state_dir("a");
        let set = [
            state_dir.as_str(),
            "worker.lease_ttl=10m",
            "worker.drain_timeout=2s",
        ];
        let mut daemon = lab.daemon("a", &set);
        let jobs = lab.enqueue_many("ticks-10", 5);
        lab.until_witnessed(What::Tick, 5);
        lab.server.stop_fast().unwrap();
        lab.until_witnessed(What::End, 5);
        lab.until_handlers_are_dead();
        daemon.signal(by);
        // What is kept is as good as written.
        let code = (by == Signal::SIGTERM).then_some(0);
        assert_eq!(daemon.wait().code(), code, "{}", daemon.log());
        lab.server.restart().unwrap();
        let _next = lab.daemon("a", &set);
        for job in &jobs {
            lab.until_status(job, "completed");
        }
        assert_eq!(lab.count(What::Start), 5, "by {by}");
        lab.assert_sound(&jobs);
    }
}

#[test]
fn a_stop_that_loses_ends_says_so() {
    let mut lab = Lab::start();
    let mut daemon = lab.daemon("a", &["worker.drain_timeout=2s"]);
    let job = lab.enqueue("ticks-10");
    lab.until_witnessed(What::Tick, 1);
    lab.server.stop_fast().unwrap();
    assert_eq!(daemon.stop(), 1);
    assert!(daemon.log().contains(&job), "{}", daemon.log());
    lab.server.restart().unwrap();
    let _next = lab.daemon("b", &[]);
    lab.until_status(&job, "completed");
    lab.assert_sound(&[job]);
}

#[test]
fn a_job_that_kills_its_workers_ends_in_the_dead_letters() {
    let lab = Lab::start();
    let state_dir = lab.state_dir("a");
    let job = lab.value("SELECT tenure.enqueue('assassin-2', max_attempts => 3)");
    for _ in 0..3 {
        let mut daemon = lab.daemon("a", &[&state_dir]);
        assert_eq!(daemon.wait().code(), None, "it was killed");
    }
    let _last = lab.daemon("a", &[&state_dir]);
    lab.until_status(&job, "failed");
    let letter = lab.value("SELECT attempts || ' ' || last_error FROM tenure.dead_letter_jobs");
    assert!(letter.starts_with("3 the worker was lost"), "{letter}");
    assert_eq!(lab.count(What::Start), 3);
    lab.assert_sound(&[job]);
}

/// B26: claimed, and dead before anything was started.
#[test]
fn a_death_between_claim_and_start_is_recovered() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &[]);
    lab.until_live(1);
    let mut lock = lab.sql();
    // Reads pass, and so do heartbeats; the claim waits where it has taken the job and writes the lease.
    lock.run("BEGIN; LOCK TABLE tenure.lease IN SHARE ROW EXCLUSIVE MODE")
        .unwrap();
    let job = lab.enqueue("ticks-1");
    lab.until(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%claim_job_batch%'",
        "t",
    );
    daemon.kill9();
    lock.run("COMMIT").unwrap();
    lab.until_status(&job, "running");
    assert_eq!(lab.count(What::Start), 0);
    let _next = lab.daemon("b", &[]);
    lab.until_status(&job, "completed");
    assert_eq!(attempts(&lab, &job), "2");
    lab.assert_sound(&[job]);
}

/// B27: the new process of a rolling restart has the name of the old one, which still drains.
#[test]
fn a_namesake_takes_nothing_from_the_one_that_drains() {
    let lab = Lab::start();
    let jobs = lab.enqueue_many("ticks-10", 50);
    let mut old = lab.daemon("a", &[]);
    lab.until_witnessed(What::Tick, 6);
    old.signal(Signal::SIGTERM);
    let _new = lab.daemon("a", &[]);
    assert_eq!(old.wait().code(), Some(0), "{}", old.log());
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), 50);
    lab.assert_sound(&jobs);
}

/// B14, B28: a job longer than its lease, and jobs that wait for a slot longer than a lease, run once.
#[test]
fn a_lease_lasts_as_long_as_its_job() {
    let lab = Lab::start();
    let _daemons = ["a", "b"].map(|name| lab.daemon(name, &["worker.concurrency=1"]));
    lab.until_live(2);
    let mut jobs = lab.enqueue_many("ticks-100", 2);
    jobs.extend(lab.enqueue_many("ticks-20", 8));
    let future = lab.value("SELECT tenure.enqueue('ticks-1', run_at => now() + interval '1 hour')");
    lab.wait_for(|| {
        let running = lab.rows("SELECT id FROM tenure.jobs WHERE status = 'running'");
        // One whose handler has ended has no slot any more, and its end is on the way.
        let ended: Vec<String> = lab
            .witnesses()
            .into_iter()
            .filter(|line| line.what == What::End)
            .map(|line| line.job)
            .collect();
        let claimed = running
            .iter()
            .filter(|row| row[0].as_ref().is_some_and(|job| !ended.contains(job)));
        assert!(claimed.count() <= 2, "more is claimed than can run");
        match lab
            .value("SELECT count(*) FROM tenure.jobs WHERE status = 'completed'")
            .as_str()
        {
            "10" => Ok(()),
            completed => Err(format!("{completed} of 10 are completed")),
        }
    });
    assert_eq!(lab.count(What::Start), 10);
    assert_eq!(lab.status(&future), "scheduled");
    lab.assert_sound(&jobs);
}
