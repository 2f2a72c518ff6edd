//! Leases with a time of their own: jobs that a handler has accepted and finishes later, by way of any worker.

use crate::ends::running;
use crate::stops::sweep;
use crate::support::{Conn, Held, Lab, Worker};

#[test]
fn open_jobs() {
    let lab = Lab::start();
    a_time_is_not_shortened_by_who_wants_it_at_least(&lab);
    no_end_of_a_worker_touches_them_and_any_other_ends_them(&lab);
    a_stop_is_told_to_a_living_worker_and_carried_out_for_a_dead_one(&lab);
    an_end_beside_a_longer_time_leaves_one_of_them_history(&lab);
}

/// `answer|minutes left|stop` of this lease.
fn hold(c: &mut Conn, w: &Worker, held: &Held, length: &str, options: &str) -> String {
    c.one(&format!(
        r#"SELECT answer || '|' || coalesce(round(left_ms / 60000.0)::text, '-') || '|' || coalesce(stop, '-')
           FROM hold('{}', '{}', '[{{"job":"{}","token":"{}"{length}}}]', '{options}')"#,
        w.id, w.epoch, held.job, held.token
    ))
}

const HOUR: &str = r#","for_ms":3600000"#;
const MINUTE: &str = r#","for_ms":60000"#;
const AT_LEAST: &str = r#"{"at_least": true}"#;

fn a_time_is_not_shortened_by_who_wants_it_at_least(lab: &Lab) {
    let db = lab.db("at_least");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let held = running(&mut c, &mut w, "");
    assert_eq!(
        hold(&mut c, &w, &held, "", AT_LEAST),
        "done|-|-",
        "only asked"
    );
    assert_eq!(hold(&mut c, &w, &held, HOUR, AT_LEAST), "done|60|-");
    assert_eq!(hold(&mut c, &w, &held, MINUTE, AT_LEAST), "done|60|-");
    assert_eq!(hold(&mut c, &w, &held, "", AT_LEAST), "done|60|-");
    assert_eq!(hold(&mut c, &w, &held, MINUTE, "{}"), "done|1|-");
    assert_eq!(
        c.code(&format!(
            r#"SELECT hold('{}', '{}', '[{{"job":"{}","token":"{}"}}]')"#,
            w.id, w.epoch, held.job, held.token
        )),
        "TN007",
        "a length is needed where nothing is only asked"
    );
    assert_eq!(w.end(&mut c, "completed", &held, ""), "done completed");
    assert_eq!(hold(&mut c, &w, &held, HOUR, AT_LEAST), "history|-|-");
    db.sound();
}

fn no_end_of_a_worker_touches_them_and_any_other_ends_them(lab: &Lab) {
    let db = lab.db("outlive");
    let mut c = db.connect();
    let (mut first, second) = (Worker::register(&mut c), Worker::register(&mut c));
    let held = running(&mut c, &mut first, "");
    hold(&mut c, &first, &held, HOUR, AT_LEAST);
    assert_eq!(first.beat(&mut c, &[]).unwrap(), 0, "no ghost");
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        first.id, first.epoch
    ));
    sweep(&mut c, &second);
    assert_eq!(c.state(&held.job), "running/1");
    assert_eq!(second.end(&mut c, "completed", &held, ""), "done completed");
    assert_eq!(second.end(&mut c, "completed", &held, ""), "done", "again");
    assert_eq!(second.end(&mut c, "failed", &held, ""), "history");
    db.sound();
}

fn a_stop_is_told_to_a_living_worker_and_carried_out_for_a_dead_one(lab: &Lab) {
    let db = lab.db("open_stops");
    let mut c = db.connect();
    let (mut first, second) = (Worker::register(&mut c), Worker::register(&mut c));
    let held = running(&mut c, &mut first, "");
    hold(&mut c, &first, &held, HOUR, AT_LEAST);
    assert_eq!(c.one(&format!("SELECT cancel('{}')", held.job)), "stopping");
    assert_eq!(hold(&mut c, &second, &held, "", AT_LEAST), "done|60|cancel");
    sweep(&mut c, &second);
    assert_eq!(c.state(&held.job), "running/1", "its worker lives");
    let beat = format!(
        "SELECT revoked FROM heartbeat('{}', '{}', 1, 0)",
        first.id, first.epoch
    );
    assert!(c.one(&beat).contains(&held.token));
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        first.id, first.epoch
    ));
    sweep(&mut c, &second);
    assert_eq!(c.state(&held.job), "cancelled/0");
    assert_eq!(c.one("SELECT count(*) FROM stop_request"), "0");
    assert_eq!(second.end(&mut c, "completed", &held, ""), "history");
    db.sound();
}

/// Both wait for each other's lock and not for more; whichever comes first, the job ends once.
fn an_end_beside_a_longer_time_leaves_one_of_them_history(lab: &Lab) {
    let db = lab.db("beside");
    let (mut c, mut other) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    let held = running(&mut c, &mut w, "");
    other.run("BEGIN");
    assert_eq!(hold(&mut other, &w, &held, HOUR, "{}"), "done|60|-");
    assert_eq!(w.end(&mut c, "completed", &held, ""), "busy");
    other.run("COMMIT");
    other.run("BEGIN");
    assert_eq!(w.end(&mut other, "completed", &held, ""), "done completed");
    let pid = c.pid();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| hold(&mut c, &w, &held, HOUR, "{}"));
        other.wait_until_blocked(&pid);
        other.run("COMMIT");
        assert_eq!(late.join().unwrap(), "history|-|-");
    });
    assert_eq!(other.state(&held.job), "completed/1");
    db.sound();
}
