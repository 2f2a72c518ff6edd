//! Requests to stop a running job, before and after each kind of end.

use crate::ends::running;
use crate::support::{Conn, Lab, Worker};

#[test]
fn stops() {
    let lab = Lab::start();
    stop_requests(&lab);
    a_stop_request_that_commits_late(&lab);
}

/// A request to stop, before and after each kind of end; the person's act counts as a run.
fn stop_requests(lab: &Lab) {
    let db = lab.db("stops");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let asks = [
        (
            "cancel('{}', 'why', '{\"by\":\"ann\"}')",
            "cancelled",
            "cancelled by ann: why",
        ),
        (
            "complete_manually('{}', 'ann', 'why')",
            "completed",
            "completed by hand by ann: why",
        ),
        (
            "move_to_dead_letter('{}', '{\"by\":\"ann\",\"reason\":\"why\"}')",
            "failed",
            "moved to the dead letters by ann: why",
        ),
    ];
    for (ask, status, error) in asks {
        for (kind, more) in [
            ("completed", r#","result":7"#),
            ("failed", ""),
            ("released", ""),
            ("snoozed", ""),
            ("ghost", ""),
            ("lost", ""),
        ] {
            let what = format!("{ask} then {kind}");
            let held = running(&mut c, &mut w, "unique_key => 'k'");
            let ask = format!("SELECT {}", ask.replacen("{}", &held.job, 1));
            assert_eq!(c.one(&ask), "stopping", "{what}");
            assert_eq!(c.one(&ask), "stopping", "asked twice: {what}");
            assert_eq!(c.state(&held.job), "running/1");
            assert!(
                c.one(&format!(
                    "SELECT revoked FROM heartbeat('{}', '{}', 1, 0)",
                    w.id, w.epoch
                ))
                .contains(&held.token),
                "the heartbeat tells it"
            );
            match kind {
                "ghost" => assert_eq!(w.beat(&mut c, &[]).unwrap(), 1),
                "lost" => {
                    c.run(&format!(
                        "SELECT deregister_worker('{}', '{}')",
                        w.id, w.epoch
                    ));
                    w = Worker::register(&mut c);
                }
                _ => assert_eq!(
                    w.end(&mut c, kind, &held, more),
                    format!("done {status}"),
                    "{what}"
                ),
            }
            assert_eq!(
                c.one(&format!(
                    "SELECT o.status, o.run, o.error FROM outcome o WHERE id = '{}'",
                    held.job
                )),
                format!("{status}|2|{error}"),
                "{what}"
            );
            assert_eq!(c.one("SELECT count(*) FROM stop_request"), "0");
            db.sound();
        }
    }
}

/// The request is in a transaction that is still open when the run ends: the end does not wait, and the sweep carries it out.
fn a_stop_request_that_commits_late(lab: &Lab) {
    let db = lab.db("late_stops");
    let (mut c, mut user) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    for (kind, more, then) in [
        ("completed", "", "completed/1"),
        ("failed", r#","delay_ms":60000"#, "cancelled/1"),
        ("released", "", "cancelled/0"),
    ] {
        let held = running(&mut c, &mut w, "");
        user.run("BEGIN");
        assert_eq!(
            user.one(&format!("SELECT cancel('{}')", held.job)),
            "stopping"
        );
        assert!(
            w.end(&mut c, kind, &held, more).starts_with("done "),
            "{kind}"
        );
        user.run("COMMIT");
        sweep(&mut c, &w);
        assert_eq!(c.state(&held.job), then, "{kind}");
        assert_eq!(c.one("SELECT count(*) FROM stop_request"), "0", "{kind}");
    }
    // Claimed again before the sweep: the next run is stopped.
    let held = running(&mut c, &mut w, "");
    user.run("BEGIN");
    user.run(&format!("SELECT cancel('{}')", held.job));
    w.end(&mut c, "released", &held, "");
    user.run("COMMIT");
    let again = w.claim_one(&mut c, "m");
    sweep(&mut c, &w);
    assert_eq!(w.end(&mut c, "released", &again, ""), "done cancelled");
    // A request that nobody carried out belongs to the life before a retry.
    let held = running(&mut c, &mut w, "");
    user.run("BEGIN");
    user.run(&format!("SELECT cancel('{}')", held.job));
    w.end(&mut c, "failed", &held, r#","final":true"#);
    user.run("COMMIT");
    c.run(&format!("SELECT retry('{}')", held.job));
    sweep(&mut c, &w);
    assert_eq!(c.state(&held.job), "pending/0");
    db.sound();
}

pub(crate) fn sweep(c: &mut Conn, w: &Worker) {
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    assert_eq!(
        c.one(&format!("SELECT swept FROM sweep('{}')", w.epoch)),
        "t"
    );
}
