//! The merge rule (M1): which statement wins when two speak of one job, or one of several runs, or of a key that has a new owner.

use crate::reattach::{lose_tail, row};
use crate::support::{Held, Lab, Worker};

#[test]
fn merge() {
    let lab = Lab::start();
    several_runs_of_one_job(&lab);
    the_higher_run_wins(&lab);
    the_present_epoch_wins(&lab);
    keys_of_what_is_put_back(&lab);
    locked_by_a_user(&lab);
}

/// All runs of a job were lost, and its worker tells them all: each is recorded as what it was.
fn several_runs_of_one_job(lab: &Lab) {
    let name = "several";
    let mut w = {
        let db = lab.db(name);
        let mut c = db.connect();
        c.enqueue("m", "");
        Worker::register(&mut c)
    };
    let lost = lose_tail(lab, name);
    let (first, second) = {
        let mut c = lab.reopen("migrated").connect();
        let first = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &first, r#","error":"one""#);
        c.run(&format!("SELECT promote('{}')", w.epoch));
        (first, w.claim_one(&mut c, "m"))
    };
    let mut c = lost.connect();
    c.lose_here();
    // In whatever order they are said.
    let statements = [
        second.item("hold", ""),
        first.item("failed", r#","error":"one""#),
    ];
    assert_eq!(
        w.reattach(&mut c, &statements, &[], ""),
        ["kept", "done scheduled"]
    );
    assert_eq!(
        c.list("SELECT run, outcome, applied, error FROM attempts ORDER BY run"),
        ["1|failed|t|one"]
    );
    assert_eq!(c.one("SELECT count(*) FROM revocation"), "0");
    assert_eq!(w.end(&mut c, "completed", &second, ""), "done completed");
    lost.sound();
}

/// Two believe that they hold it (h): whoever speaks first, the higher run has it, and the other learns of it.
fn the_higher_run_wins(lab: &Lab) {
    for order in ["low_first", "high_first"] {
        let name = order;
        let (mut low, mut high) = {
            let db = lab.db(name);
            let mut c = db.connect();
            c.enqueue("m", "");
            (Worker::register(&mut c), Worker::register(&mut c))
        };
        let lost = lose_tail(lab, name);
        let (first, second) = {
            let mut c = lab.reopen("migrated").connect();
            let first = low.claim_one(&mut c, "m");
            c.run(&format!(
                "SELECT deregister_worker('{}', '{}')",
                low.id, low.epoch
            ));
            (first, high.claim_one(&mut c, "m"))
        };
        let mut c = lost.connect();
        c.lose_here();
        let low_says = [first.item("hold", "")];
        let high_says = [second.item("hold", "")];
        if order == "low_first" {
            assert_eq!(low.reattach(&mut c, &low_says, &[], ""), ["kept"]);
            assert_eq!(high.reattach(&mut c, &high_says, &[], ""), ["kept"]);
            assert!(
                c.one(&format!(
                    "SELECT revoked FROM heartbeat('{}', '{}', 1)",
                    low.id, low.epoch
                ))
                .contains(&first.token)
            );
        } else {
            assert_eq!(high.reattach(&mut c, &high_says, &[], ""), ["kept"]);
            assert_eq!(low.reattach(&mut c, &low_says, &[], ""), ["stop"]);
        }
        assert_eq!(low.end(&mut c, "completed", &first, ""), "history");
        assert_eq!(high.end(&mut c, "completed", &second, ""), "done completed");
        lost.sound();
    }
}

/// What was claimed or ended in the present epoch is never changed by a statement from an earlier one (g).
fn the_present_epoch_wins(lab: &Lab) {
    let name = "present";
    let (mut w, mut late, jobs) = {
        let db = lab.db(name);
        let mut c = db.connect();
        let jobs = [c.enqueue("m", ""), c.enqueue("m", ""), c.enqueue("m", "")];
        (Worker::register(&mut c), Worker::register(&mut c), jobs)
    };
    let lost = lose_tail(lab, name);
    let held: Vec<Held> = {
        let mut c = lab.reopen("migrated").connect();
        // Two claims of each: the runs of the late one are higher than what the new primary will have seen.
        late.claim(&mut c, "m", 3);
        late.give_all_back(&mut c);
        late.claim(&mut c, "m", 3)
    };
    assert_eq!(
        held.iter().map(|held| &held.job).collect::<Vec<_>>(),
        jobs.iter().collect::<Vec<_>>()
    );
    let mut c = lost.connect();
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    c.run("UPDATE cluster SET opened_at = opened_at - interval '31 s'; UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    c.run(&format!("SELECT sweep('{}')", w.epoch));
    // The late one did not come: two of its jobs are claimed, one of these ends.
    let mine = w.claim(&mut c, "m", 2);
    w.end(&mut c, "completed", &mine[0], "");
    let statements = [
        held[0].item("completed", ""),
        held[1].item("completed", ""),
        held[2].item("completed", ""),
    ];
    assert_eq!(
        late.reattach(&mut c, &statements, &[], ""),
        ["history", "history", "done completed"]
    );
    assert_eq!(c.state(&mine[1].job), "running/1");
    assert_eq!(w.end(&mut c, "completed", &mine[1], ""), "done completed");
    assert_eq!(
        c.one(&format!(
            "SELECT count(*) FROM attempts WHERE job_id = '{}' AND NOT applied",
            jobs[0]
        )),
        "1",
        "that it ran twice can be seen"
    );
    lost.sound();
}

/// (c) A job comes back, and its unique key was given to a newer one meanwhile.
fn keys_of_what_is_put_back(lab: &Lab) {
    for newer_runs in [false, true] {
        let name = if newer_runs {
            "newer_runs"
        } else {
            "newer_waits"
        };
        let (mut w, mut other) = {
            let db = lab.db(name);
            let mut c = db.connect();
            (Worker::register(&mut c), Worker::register(&mut c))
        };
        let lost = lose_tail(lab, name);
        let (held, row) = {
            let mut c = lab.reopen("migrated").connect();
            let job = c.enqueue("m", "unique_key => 'k'");
            (w.claim_one(&mut c, "m"), row(&mut c, &job))
        };
        let mut c = lost.connect();
        c.lose_here();
        other.reattach(&mut c, &[], &[], "");
        let newer = c.enqueue("m", "unique_key => 'k'");
        if newer_runs {
            c.run("UPDATE cluster SET gate = 'open'");
            other.claim_one(&mut c, "m");
        }
        assert_eq!(
            w.reattach(&mut c, &[held.item("hold", &row)], &[], ""),
            ["kept"]
        );
        if newer_runs {
            assert_eq!(
                c.state(&newer),
                "running/1",
                "both run: neither can be taken back"
            );
            assert_eq!(c.enqueue("m", "unique_key => 'k'"), newer);
        } else {
            assert_eq!(c.state(&newer), "cancelled/0");
            assert!(
                c.one(&format!("SELECT last_error FROM jobs WHERE id = '{newer}'"))
                    .contains(&held.job)
            );
            assert_eq!(c.enqueue("m", "unique_key => 'k'"), held.job);
        }
        lost.sound();
        assert_eq!(w.end(&mut c, "completed", &held, ""), "done completed");
        lost.sound();
        assert_eq!(c.enqueue("m", "unique_key => 'k'") == newer, newer_runs);
        lost.sound();
    }
}

/// A user's transaction has the lease or the outcome locked: busy, and nothing is forgotten.
fn locked_by_a_user(lab: &Lab) {
    let name = "locked_tail";
    let (mut w, first) = {
        let db = lab.db(name);
        let mut c = db.connect();
        let mut w = Worker::register(&mut c);
        c.enqueue("m", "");
        let held = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &held, r#","final":true"#);
        (w, held)
    };
    let lost = lose_tail(lab, name);
    let second = {
        let mut c = lab.reopen("migrated").connect();
        c.run(&format!("SELECT retry('{}')", first.job));
        w.claim_one(&mut c, "m")
    };
    let (mut c, mut user) = (lost.connect(), lost.connect());
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    user.run("BEGIN");
    user.run(&format!("SELECT retry('{}')", first.job));
    assert_eq!(
        w.reattach(&mut c, &[second.item("completed", "")], &[], ""),
        ["busy"]
    );
    user.run("ROLLBACK");
    assert_eq!(
        w.reattach(&mut c, &[second.item("completed", "")], &[], ""),
        ["done completed"]
    );
    lost.sound();
}
