//! PostgreSQL crashes, goes away, freezes, or breaks connections, while handlers run.

use std::thread;
use std::time::Duration;

use chaos_tests::{Lab, UNFINISHED, What};

fn until_all_completed(lab: &Lab) {
    lab.until(UNFINISHED, "0");
}

#[test]
fn handlers_go_on_over_a_crash_of_the_database() {
    let mut lab = Lab::start();
    let daemons = ["a", "b"].map(|name| lab.daemon(name, &["worker.lease_ttl=30s"]));
    lab.until_live(2);
    let mut jobs = lab.enqueue_many("ticks-60", 6);
    jobs.extend(lab.enqueue_many("ticks-10", 12));
    lab.until_witnessed(What::Tick, 40);
    lab.server.kill9().unwrap();
    lab.server.restart().unwrap();
    until_all_completed(&lab);
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    for mut daemon in daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}

#[test]
fn handlers_are_ended_when_an_outage_outlasts_their_trust() {
    let mut lab = Lab::start();
    let _daemons = ["a", "b"].map(|name| lab.daemon(name, &[]));
    lab.until_live(2);
    let jobs = [lab.enqueue("ticks-200"), lab.enqueue("stubborn-200")];
    lab.until_witnessed(What::Tick, 4);
    lab.server.stop_fast().unwrap();
    lab.until_handlers_are_dead();
    lab.server.restart().unwrap();
    for job in &jobs {
        lab.until_status(job, "completed");
    }
    assert_eq!(lab.count(What::End), 2);
    lab.assert_sound(&jobs);
}

/// Nobody could renew in that time, so it counts against nobody.
#[test]
fn a_frozen_database_recovers_nothing_from_anybody() {
    let lab = Lab::start();
    let _daemons = ["a", "b"].map(|name| lab.daemon(name, &[]));
    lab.until_live(2);
    let jobs = lab.enqueue_many("ticks-60", 6);
    lab.until_witnessed(What::Tick, 6);
    lab.server.freeze().unwrap();
    thread::sleep(Duration::from_secs(12));
    lab.server.thaw().unwrap();
    until_all_completed(&lab);
    let recovered = "SELECT (SELECT count(*) FROM tenure.attempts WHERE outcome = 'lost') \
                     + (SELECT count(*) FROM tenure.workers WHERE status = 'lost')";
    assert_eq!(lab.value(recovered), "0");
    lab.assert_sound(&jobs);
}

/// B45: connections end in the middle of batches, batches end in deadlocks, and one end has a result that nobody takes.
#[test]
fn ends_are_said_until_they_are_taken() {
    let lab = Lab::start();
    lab.run(
        "CREATE SEQUENCE public.blows;
         CREATE FUNCTION public.blow() RETURNS trigger LANGUAGE plpgsql AS $$
           DECLARE n bigint := nextval('public.blows');
           BEGIN
             IF n % 7 = 0 THEN RAISE EXCEPTION 'a blow' USING ERRCODE = (ARRAY['40P01', '40001', '57P01', '25006'])[1 + n / 7 % 4]; END IF;
             RETURN NULL;
           END $$;
         CREATE TRIGGER blow AFTER INSERT ON tenure.outcome FOR EACH STATEMENT EXECUTE FUNCTION public.blow()",
    );
    let bad = lab.enqueue("reveal");
    lab.run(&format!(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '22P05'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON tenure.outcome FOR EACH ROW
           WHEN (NEW.id = '{bad}' AND NEW.result IS NOT NULL) EXECUTE FUNCTION public.refuse()"
    ));
    let jobs = lab.enqueue_many("ticks-1", 300);
    let mut daemon = lab.daemon("a", &["worker.lease_ttl=30s"]);
    lab.until_live(1);
    lab.wait_for(|| {
        lab.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'app' AND pid <> pg_backend_pid() AND random() < 0.3");
        thread::sleep(Duration::from_millis(300));
        match lab.value(UNFINISHED).as_str() {
            "0" => Ok(()),
            left => Err(format!("{left} are left")),
        }
    });
    lab.assert_sound(&jobs);
    let error = lab.value(&format!(
        "SELECT last_error FROM tenure.jobs WHERE id = '{bad}'"
    ));
    assert!(
        error.starts_with("its result could not be stored"),
        "{error}"
    );
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
}
