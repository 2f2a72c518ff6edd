//! How a daemon leaves.

use chaos_tests::{Lab, What};
use nix::sys::signal::Signal;

#[test]
fn a_drain_lets_the_running_finish_and_claims_nothing_more() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &["worker.concurrency=1"]);
    let first = lab.enqueue("ticks-20");
    lab.until_witnessed(What::Tick, 1);
    let second = lab.enqueue("ticks-0");
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    assert_eq!(lab.status(&first), "completed");
    assert_eq!(lab.status(&second), "pending");
    assert_eq!(
        lab.value("SELECT string_agg(status, ',') FROM tenure.workers"),
        "stopped"
    );
    lab.assert_sound(&[first]);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

#[test]
fn what_does_not_finish_in_time_is_given_back_and_uses_no_attempt() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &["worker.drain_timeout=2s"]);
    let jobs = [lab.enqueue("stubborn-60"), lab.enqueue("ticks-60")];
    lab.until_witnessed(What::Tick, 2);
    let other = lab.daemon("b", &[]);
    lab.until_live(2);
    // What did not finish has been given back: the drain was clean.
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    for job in &jobs {
        assert_eq!(
            lab.value(&format!(
                "SELECT outcome FROM tenure.attempts WHERE job_id = '{job}'"
            )),
            "released"
        );
        lab.until_status(job, "completed");
        assert_eq!(
            lab.value(&format!(
                "SELECT attempts FROM tenure.jobs WHERE id = '{job}'"
            )),
            "1"
        );
    }
    drop(other);
    lab.assert_sound(&jobs);
}

#[test]
fn a_second_signal_ends_the_wait() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &["worker.drain_timeout=10m"]);
    let job = lab.enqueue("ticks-6000");
    lab.until_witnessed(What::Tick, 1);
    daemon.signal(Signal::SIGTERM);
    lab.until("SELECT status FROM tenure.workers", "draining");
    assert!(daemon.is_running());
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait().code(), Some(0), "{}", daemon.log());
    assert_eq!(lab.status(&job), "pending");
    assert_eq!(
        lab.value(&format!(
            "SELECT attempts FROM tenure.jobs WHERE id = '{job}'"
        )),
        "0"
    );
}

/// B40: whoever started it lost patience.
#[test]
fn a_kill_in_the_middle_of_a_drain_loses_nothing() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &["worker.drain_timeout=10m"]);
    let jobs = [lab.enqueue("ticks-50"), lab.enqueue("stubborn-50")];
    lab.until_witnessed(What::Tick, 4);
    daemon.signal(Signal::SIGTERM);
    lab.until("SELECT status FROM tenure.workers", "draining");
    daemon.kill9();
    let _other = lab.daemon("b", &[]);
    for job in &jobs {
        lab.until_status(job, "completed");
    }
    lab.assert_sound(&jobs);
}
