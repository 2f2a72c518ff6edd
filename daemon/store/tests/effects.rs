//! Handlers that work in this database: whether a run is to be repeated after a switch is read from the mark that its transaction
//! left beside its effects.

use crate::support::{Conn, Held, Lab, Worker};

#[test]
fn effects() {
    let lab = Lab::start();
    who_leaves_a_mark(&lab);
    completions(&lab);
    running_handlers(&lab);
    a_handler_that_is_to_stop_writes_nothing(&lab);
    a_handler_that_writes_at_that_moment(&lab);
    a_lease_that_somebody_else_writes(&lab);
    what_came_too_late_is_kept_as_it_was_said(&lab);
}

const RERUN: &str = r#","rerun":true"#;

/// Claims one job for a handler with its effects here.
fn claim(c: &mut Conn, w: &mut Worker, job_type: &str) -> Held {
    w.call += 1;
    let lane = c.one(&format!(
        "SELECT lane FROM lane WHERE job_type = '{job_type}'"
    ));
    let row = c.one(&format!(
        "SELECT id, run, token, attempt FROM claim_job_batch('{}', '{}', {}, '{{{lane}}}', '{{1}}', options => '{{\"rerun\":[{lane}]}}')",
        w.id, w.epoch, w.call
    ));
    Held::read(&row, w.call)
}

fn assert_lease(held: &Held) -> String {
    format!("SELECT assert_lease('{}', '{}')", held.job, held.token)
}

fn who_leaves_a_mark(lab: &Lab) {
    let db = lab.db("marks");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for kind in ["keep", "rerun"] {
        c.enqueue(kind, "");
    }
    let (keep, rerun) = (w.claim_one(&mut c, "keep"), claim(&mut c, &mut w, "rerun"));
    for held in [&keep, &rerun] {
        c.run(&assert_lease(held));
        c.run(&format!("BEGIN; {0}; {0}; COMMIT", assert_lease(held)));
        c.run(&format!("BEGIN; {}; ROLLBACK", assert_lease(held)));
    }
    let marks = "SELECT job_id, count(*) FROM effect GROUP BY 1";
    assert_eq!(
        c.list(marks),
        [format!("{}|2", rerun.job)],
        "one for each transaction"
    );
    // They are forgotten when nobody can ask for them any more.
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    c.run(&format!("SELECT sweep('{}')", w.epoch));
    assert_eq!(c.list(marks).len(), 1);
    w.end(&mut c, "completed", &rerun, "");
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    c.run(&format!("SELECT sweep('{}')", w.epoch));
    assert_eq!(c.list(marks), Vec::<String>::new());
    db.sound();
}

/// Completed before the switch, which the database does not show: it counts exactly when the effects are there.
fn completions(lab: &Lab) {
    let db = lab.db("completions");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let kinds = ["there", "lost", "shown", "failed"];
    let held = kinds.map(|kind| {
        c.enqueue(kind, "");
        claim(&mut c, &mut w, kind)
    });
    c.run(&assert_lease(&held[0]));
    w.end(&mut c, "completed", &held[2], "");
    // A worker that is waited for keeps the window open.
    let _silent = Worker::register(&mut c);
    c.lose_here();
    let more = format!(r#"{RERUN},"confirmed":true,"enqueue":[{{"job_type":"follow"}}]"#);
    let says = |kind: &str, held: &Held| held.item(kind, &more);
    let statements = [
        says("completed", &held[0]),
        says("completed", &held[1]),
        says("completed", &held[2]),
        says("failed", &held[3]),
    ];
    assert_eq!(
        w.reattach(&mut c, &statements, &[], ""),
        ["done completed", "done scheduled", "done", "done scheduled"]
    );
    assert_eq!(c.state(&held[1].job), "scheduled/0", "no attempt is used");
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE job_type = 'follow'"),
        "1",
        "that of what counts"
    );
    assert_eq!(
        c.list("SELECT j.job_type, s.what FROM switch_job s JOIN job j ON j.id = s.job_id ORDER BY 1, 2"),
        ["failed|written_again", "lost|rerun", "there|written_again"]
    );
    // Said again, its answer having been lost, nothing changes.
    let before = c.list("SELECT job_type, status, attempts FROM jobs ORDER BY 1");
    w.reattach(&mut c, &statements, &[], "");
    assert_eq!(
        c.list("SELECT job_type, status, attempts FROM jobs ORDER BY 1"),
        before
    );
    db.sound();
}

fn running_handlers(lab: &Lab) {
    let db = lab.db("running");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let held = ["written", "lost"].map(|kind| {
        c.enqueue(kind, "");
        claim(&mut c, &mut w, kind)
    });
    c.run(&assert_lease(&held[0]));
    c.lose_here();
    let says = held.each_ref().map(|held| held.item("hold", RERUN));
    for _ in 0..2 {
        assert_eq!(w.reattach(&mut c, &says, &[], ""), ["kept", "rerun"]);
    }
    // Until it has stopped the handler nobody else gets the job.
    assert_eq!(c.state(&held[1].job), "running/1");
    assert_eq!(w.end(&mut c, "released", &held[1], ""), "done pending");
    assert_eq!(c.state(&held[1].job), "pending/0");
    // A claim of this epoch has lost nothing.
    let again = claim(&mut c, &mut w, "lost");
    let says = again
        .item("hold", RERUN)
        .replace(r#""epoch_no":1"#, r#""epoch_no":2"#);
    assert_eq!(
        w.reattach(&mut c, &[held[0].item("hold", RERUN), says], &[], ""),
        ["kept", "kept"]
    );
    db.sound();
}

/// The worker has been told, and the handler still runs: its transaction must not commit, since the job will run again.
fn a_handler_that_is_to_stop_writes_nothing(lab: &Lab) {
    let db = lab.db("given_up");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = claim(&mut c, &mut w, "m");
    c.lose_here();
    assert_eq!(
        w.reattach(&mut c, &[held.item("hold", RERUN)], &[], ""),
        ["rerun"]
    );
    assert_eq!(c.code(&assert_lease(&held)), "TN006");
    // It had ended just before it was told, and says so: its effects are lost all the same.
    let late = r#","result":1,"enqueue":[{"job_type":"follow"}]"#;
    assert_eq!(w.end(&mut c, "completed", &held, late), "done pending");
    assert_eq!(c.one("SELECT count(*) FROM job"), "1");
    let again = claim(&mut c, &mut w, "m");
    c.lose_here();
    let says = [again.item("hold", RERUN)];
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["rerun"]);
    // It failed because it was refused: that is no attempt.
    let refused = r#","error":"TN006","final":true"#;
    assert_eq!(w.end(&mut c, "failed", &again, refused), "done pending");
    assert_eq!(c.state(&again.job), "pending/0");
    let again = claim(&mut c, &mut w, "m");
    c.run(&assert_lease(&again));
    assert_eq!(w.end(&mut c, "completed", &again, ""), "done completed");
    db.sound();
}

/// The re-attach comes while the handler's transaction is open on the new primary: nothing of it was lost, so the handler goes on,
/// and nobody waits for it.
fn a_handler_that_writes_at_that_moment(lab: &Lab) {
    for (end, then, effects) in [("COMMIT", "kept", "1"), ("ROLLBACK", "rerun", "0")] {
        let db = lab.db("writes_now");
        let (mut c, mut handler) = (db.connect(), db.connect());
        let mut w = Worker::register(&mut c);
        c.enqueue("m", "");
        let held = claim(&mut c, &mut w, "m");
        c.lose_here();
        handler.run("BEGIN");
        handler.run(&assert_lease(&held));
        let says = [held.item("hold", RERUN)];
        assert_eq!(w.reattach(&mut c, &says, &[], ""), ["kept"]);
        handler.run(end);
        assert_eq!(w.reattach(&mut c, &says, &[], ""), [then]);
        assert_eq!(c.one("SELECT count(*) FROM effect"), effects);
        db.sound();
    }
}

/// The sweep writes to the lease at that moment: that is not the handler's transaction, and proves nothing.
fn a_lease_that_somebody_else_writes(lab: &Lab) {
    let db = lab.db("swept_now");
    let (mut c, mut sweep) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = claim(&mut c, &mut w, "m");
    let says = [held.item("hold", RERUN)];
    c.lose_here();
    sweep.run("BEGIN");
    sweep.run("UPDATE lease SET until = clock_timestamp() + interval '1 minute'");
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["busy"]);
    assert_eq!(c.one("SELECT gate FROM cluster"), "window");
    sweep.run("ROLLBACK");
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["rerun"]);
    db.sound();
}

/// Its job has gone on in this epoch: the late completion is history, as a completion.
fn what_came_too_late_is_kept_as_it_was_said(lab: &Lab) {
    let db = lab.db("late_effects");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = claim(&mut c, &mut w, "m");
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    w.claim_one(&mut c, "m");
    let says = [held.item("completed", &format!(r#"{RERUN},"result":7"#))];
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["history"]);
    assert_eq!(
        c.one("SELECT outcome, result, applied FROM attempt WHERE NOT applied"),
        "completed|7|f"
    );
    // Said again, it counts once.
    w.reattach(&mut c, &says, &[], "");
    assert_eq!(
        c.list("SELECT job_id, run, what FROM switch_jobs"),
        [format!("{}|{}|ran_twice", held.job, held.run)]
    );
    assert_eq!(c.one("SELECT ran_twice FROM switches"), "1");
    db.sound();
}
