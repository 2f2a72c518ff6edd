//! What people and handlers decide about jobs, and what nobody can run.

use chaos_tests::{Lab, What};

#[test]
fn a_cancelled_job_is_stopped() {
    let lab = Lab::start();
    let _daemon = lab.daemon("a", &[]);
    let jobs = [lab.enqueue("ticks-6000"), lab.enqueue("stubborn-6000")];
    lab.until_witnessed(What::Tick, 4);
    for job in &jobs {
        let said = lab.tenure(&["job", "cancel", job, "--reason", "no longer wanted"]);
        assert!(
            said.status.success(),
            "{}",
            String::from_utf8_lossy(&said.stderr)
        );
    }
    lab.until_handlers_are_dead();
    for job in &jobs {
        lab.until_status(job, "cancelled");
    }
    assert_eq!(lab.count(What::Start), 2);
    lab.assert_sound(&jobs);
}

#[test]
fn a_timeout_ends_the_handler_and_uses_an_attempt() {
    let lab = Lab::start();
    let _daemon = lab.daemon("a", &[]);
    let job =
        lab.value("SELECT tenure.enqueue('stubborn-6000', max_attempts => 2, timeout => '1 s')");
    lab.until_status(&job, "failed");
    lab.until_handlers_are_dead();
    assert_eq!(lab.count(What::Start), 2);
    assert!(
        lab.value("SELECT last_error FROM tenure.dead_letter_jobs")
            .starts_with("timed out after 1s")
    );
    lab.assert_sound(&[job]);
}

#[test]
fn exit_codes_decide_about_another_attempt() {
    let lab = Lab::start();
    let _daemon = lab.daemon("a", &[]);
    let starts = |code: &str| {
        let job = lab.value(&format!(
            "SELECT tenure.enqueue('exit-{code}', max_attempts => 2)"
        ));
        lab.until(
            "SELECT count(*) FROM tenure.jobs WHERE status IN ('completed', 'failed')",
            &lab.value("SELECT count(*) FROM tenure.jobs"),
        );
        let ran = lab
            .witnesses()
            .iter()
            .filter(|line| line.job == job && line.what == What::Start)
            .count();
        (lab.status(&job), ran)
    };
    assert_eq!(starts("0"), ("completed".to_owned(), 1));
    assert_eq!(starts("65"), ("failed".to_owned(), 1));
    assert_eq!(starts("75"), ("failed".to_owned(), 2));
    assert_eq!(starts("1"), ("failed".to_owned(), 2));
}

#[test]
fn a_job_that_nobody_can_run_waits_and_says_so() {
    let lab = Lab::start();
    let _daemon = lab.daemon("a", &[]);
    lab.until_live(1);
    let job = lab.enqueue("unheard-of");
    let other = lab.enqueue("ticks-1");
    lab.until_status(&other, "completed");
    assert_eq!(lab.status(&job), "pending");
    let said = lab.tenure(&["job", "show", &job]);
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(
        text.contains("no living worker can run this job type"),
        "{text}"
    );
}
