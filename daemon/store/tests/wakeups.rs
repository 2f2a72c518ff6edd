//! Waking sleepers: decided at commit, so that nobody is missed who falls asleep while an enqueue is open.

use std::time::Duration;

use tenure_core::ids::WorkerId;
use tenure_store::session::Session;

use crate::support::{Conn, Lab, Worker, block_on};

#[test]
fn wakeups() {
    let lab = Lab::start();
    for (name, act, payload) in CASES {
        notified(&lab, name, act, payload);
    }
    nobody_without_need(&lab);
    two_phase_commit_without_notify(&lab);
}

type Act = fn(&mut Conn, &Worker);

/// What happens while a worker sleeps on lane 1 (job type m), and what it hears.
const CASES: [(&str, Act, &str); 10] = [
    ("an_enqueue", |c, _| drop(c.enqueue("m", "")), "work"),
    (
        "an_insert",
        |c, _| c.run("INSERT INTO jobs (job_type) VALUES ('m')"),
        "work",
    ),
    (
        "a_due_job",
        |c, w| {
            c.enqueue("m", "run_at => now() + interval '1 h'");
            c.run(&format!(
                "UPDATE later SET due = now(); SELECT promote('{}')",
                w.epoch
            ));
        },
        "work",
    ),
    (
        "a_retry",
        |c, _| {
            let job = c.enqueue("m", "options => '{\"notify\":false}'");
            c.run(&format!("SELECT cancel('{job}'); SELECT retry('{job}')"));
        },
        "work",
    ),
    (
        "a_release",
        |c, _| {
            let mut other = Worker::register(c);
            c.enqueue("m", "options => '{\"notify\":false}'");
            let held = other.claim_one(c, "m");
            c.run("SELECT pg_notify('nobody', 'x')");
            other.end(c, "released", &held, "");
        },
        "work",
    ),
    (
        "a_window_that_closes",
        |c, w| {
            c.lose_here();
            w.clone().reattach(c, &[], &[], "");
        },
        "work",
    ),
    (
        "a_resume",
        |c, _| c.run("SELECT pause('m'); SELECT resume('m')"),
        "work",
    ),
    (
        "more_than_one_can_take",
        |c, _| {
            let mut other = Worker::register(c);
            for _ in 0..3 {
                c.enqueue("m", "options => '{\"notify\":false}'");
            }
            other.claim(c, "m", 1);
        },
        "work",
    ),
    ("a_new_job_type", |c, _| drop(c.enqueue("new", "")), "lanes"),
    (
        "a_request_to_stop",
        |c, w| {
            let mut w = w.clone();
            let job = c.enqueue("m", "options => '{\"notify\":false}'");
            w.claim_one(c, "m");
            c.run(&format!("SELECT cancel('{job}')"));
        },
        "beat",
    ),
];

/// Falls asleep while the act is under way in an open transaction, and hears of it at its commit.
fn notified(lab: &Lab, name: &'static str, act: Act, payload: &str) {
    let db = lab.db(name);
    let (mut c, mut sleeper) = (db.connect(), db.connect());
    let w = Worker::register(&mut sleeper);
    sleeper.run("SELECT lane_of('m')");
    let target = lab.target("migrated", "postgres", "tenure");
    block_on(async {
        let (session, mut notifications) = Session::open(&target).await.unwrap();
        let worker = WorkerId(w.id.parse().unwrap());
        session.listen(worker).await.unwrap();
        let sleep = format!("SELECT set_sleeping('{}', '{}', '{{1}}')", w.id, w.epoch);
        if name == "more_than_one_can_take" {
            // A claim wakes who sleeps already; who falls asleep later looks once more and finds the jobs itself.
            sleeper.run(&sleep);
        }
        c.run("BEGIN");
        act(&mut c, &w);
        sleeper.run(&sleep);
        c.run("COMMIT");
        // A notification of our own comes behind all that were sent before.
        session.ping(worker).await.unwrap();
        let mut heard = Vec::new();
        while heard.last().is_none_or(|payload| payload != "ping") {
            let next = tokio::time::timeout(Duration::from_secs(30), notifications.recv());
            heard.push(next.await.unwrap().unwrap());
        }
        assert!(heard.contains(&payload.to_owned()), "{name}: {heard:?}");
    });
    db.sound();
}

/// NOTIFY takes a lock that all notifying commits share: no sleeper of the lane, no notification.
fn nobody_without_need(lab: &Lab) {
    let db = lab.db("quiet");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    c.run("SELECT lane_of('m'); SELECT lane_of('n')");
    let target = lab.target("migrated", "postgres", "tenure");
    block_on(async {
        let (session, mut notifications) = Session::open(&target).await.unwrap();
        let worker = WorkerId(w.id.parse().unwrap());
        session.listen(worker).await.unwrap();
        let sleep = |lanes: &str| {
            format!(
                "SELECT set_sleeping('{}', '{}', '{{{lanes}}}')",
                w.id, w.epoch
            )
        };
        c.enqueue("m", "");
        c.run(&sleep("2"));
        c.enqueue("m", "");
        c.run(&sleep("1"));
        c.enqueue("m", "options => '{\"notify\":false}'");
        c.run("BEGIN");
        c.enqueue("m", "");
        c.run("ROLLBACK");
        // It has not beaten for a long time: it would not hear it.
        c.run("UPDATE beat SET beat_at = now() - interval '1 min'");
        c.enqueue("m", "");
        c.run("UPDATE beat SET beat_at = now()");
        c.run(&sleep(""));
        c.enqueue("m", "");
        session.ping(worker).await.unwrap();
        let next = tokio::time::timeout(Duration::from_secs(30), notifications.recv());
        assert_eq!(next.await.unwrap().unwrap(), "ping");
    });
}

/// XA transactions may not notify; with notify = false they can enqueue while somebody sleeps.
fn two_phase_commit_without_notify(lab: &Lab) {
    let db = lab.db("prepared");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    c.run(&format!(
        "SELECT lane_of('m'); SELECT set_sleeping('{}', '{}', '{{1}}')",
        w.id, w.epoch
    ));
    for (options, works) in [("", false), ("options => '{\"notify\":false}'", true)] {
        c.run("BEGIN");
        c.enqueue("m", options);
        let prepared = c.try_list("PREPARE TRANSACTION 'x'");
        assert_eq!(prepared.is_ok(), works, "{prepared:?}");
    }
    c.run("COMMIT PREPARED 'x'");
    db.sound();
}
