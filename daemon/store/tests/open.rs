//! Leases with a time of their own: jobs that a handler has accepted and finishes later, by way of any worker.

use tenure_core::ids::{Epoch, Token, WorkerId};
use tenure_store::open::{Found, Hold};
use tenure_store::session::Session;
use uuid::Uuid;

use crate::ends::running;
use crate::stops::sweep;
use crate::support::{Conn, Held, Lab, Worker, block_on};

#[test]
fn open_jobs() {
    let lab = Lab::start();
    a_time_is_not_shortened_by_who_wants_it_at_least(&lab);
    no_end_of_a_worker_touches_them_and_any_other_ends_them(&lab);
    a_stop_is_told_to_a_living_worker_and_carried_out_for_a_dead_one(&lab);
    an_end_beside_a_longer_time_leaves_one_of_them_history(&lab);
    a_run_is_found_by_its_token_with_no_more_rights_than_a_worker_has(&lab);
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

fn a_run_is_found_by_its_token_with_no_more_rights_than_a_worker_has(lab: &Lab) {
    let db = lab.db("found");
    let mut c = db.connect();
    c.run("CREATE ROLE finder LOGIN IN ROLE tenure_worker");
    let mut w = Worker::register(&mut c);
    let data = r#"{"n": 18446744073709551616}"#;
    let held = running(&mut c, &mut w, &format!("data => '{data}'"));
    let target = lab.target(&db.name, "finder", "tenure");
    let uuid = |text: &str| text.parse::<Uuid>().unwrap();
    let (job, token) = (uuid(&held.job), Token(uuid(&held.token)));
    let find = |job: Uuid, token: Token| -> Found {
        block_on(async {
            let (session, _) = Session::open(&target).await.unwrap();
            session.find_run(job, token).await.unwrap()
        })
    };
    let found = find(job, token);
    assert_eq!((found.settled, found.ended), (true, None));
    let leased = found.leased.unwrap();
    assert_eq!(leased.job.data, data);
    assert_eq!((leased.job.attempt, leased.job.token), (1, token));
    let answers = block_on(async {
        let (session, _) = Session::open(&target).await.unwrap();
        let hold = Hold {
            job: leased.job.id,
            token,
            length: None,
        };
        let (worker, epoch) = (WorkerId(uuid(&w.id)), Epoch(uuid(&w.epoch)));
        session.hold(worker, epoch, &[hold], true).await.unwrap()
    });
    assert!(answers[0].stands && answers[0].left.is_none());

    let other = find(job, Token(Uuid::new_v4()));
    assert_eq!(other.status.as_deref(), Some("running"));
    assert!(other.leased.is_none() && other.ended.is_none());
    assert_eq!(find(Uuid::now_v7(), token).status, None);
    c.run(&format!("SELECT cancel('{}')", held.job));
    let stop = find(job, token).leased.unwrap().stop;
    assert_eq!(stop.as_deref(), Some("cancel"));
    c.run("DELETE FROM stop_request");
    w.end(&mut c, "completed", &held, "");
    let ended = find(job, token);
    assert_eq!(ended.ended.as_deref(), Some("completed"));
    assert_eq!(ended.status.as_deref(), Some("completed"));
    c.run("UPDATE cluster SET gate = 'window'");
    assert!(!find(job, token).settled);
    c.run("UPDATE cluster SET gate = 'open'; DELETE FROM here");
    assert!(!find(job, token).settled, "nobody has opened the epoch");
}
