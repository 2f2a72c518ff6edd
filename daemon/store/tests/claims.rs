//! Claims: order, limits, marks, pauses, admission, calls whose answer was lost, and the rights of dead workers.

use std::thread;

use crate::support::{Conn, Lab, Worker};

#[test]
fn claims() {
    let lab = Lab::start();
    order_and_limits(&lab);
    marks_skip_what_is_taken(&lab);
    marks_wait_for_open_transactions(&lab);
    marks_wait_for_open_claims(&lab);
    an_old_reader_does_not_hold_marks_back(&lab);
    pauses(&lab);
    admission(&lab);
    ghosts(&lab);
    dead_workers(&lab);
    two_at_once(&lab);
}

/// The data of what is claimed, a number for each job.
fn claim(
    c: &mut Conn,
    w: &mut Worker,
    lanes: &str,
    limits: &str,
    total: i32,
    more: &str,
) -> String {
    w.call += 1;
    c.list(&format!(
        "SELECT data FROM claim_job_batch('{}', '{}', {}, '{{{lanes}}}', '{{{limits}}}', {total}{more})",
        w.id, w.epoch, w.call
    ))
    .join(" ")
}

fn order_and_limits(lab: &Lab) {
    let db = lab.db("orders");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    // Lanes 1, 2, 3; priorities -1 and 0.
    for (number, job_type, priority) in [
        (1, "a", 0),
        (2, "b", 0),
        (3, "a", -1),
        (4, "c", 0),
        (5, "b", -1),
        (6, "a", 0),
        (7, "b", 0),
    ] {
        c.enqueue(
            job_type,
            &format!("data => '{number}', priority => {priority}"),
        );
    }
    c.run("BEGIN");
    assert_eq!(
        claim(&mut c, &mut w.clone(), "1,2,3", "9,9,9", 9, ""),
        "3 5 1 2 4 6 7",
        "all lanes as one queue"
    );
    c.run("ROLLBACK; BEGIN");
    assert_eq!(
        claim(&mut c, &mut w.clone(), "1,2,3", "9,9,9", 3, ""),
        "3 5 1",
        "no more than the total"
    );
    c.run("ROLLBACK; BEGIN");
    assert_eq!(
        claim(&mut c, &mut w.clone(), "1,2,3", "2,1,0", 9, ""),
        "3 5 1",
        "no more than its limit of each lane"
    );
    c.run("ROLLBACK; BEGIN");
    assert_eq!(
        claim(&mut c, &mut w.clone(), "2", "2", 9, ""),
        "5 2",
        "only the lanes asked for"
    );
    c.run("ROLLBACK; BEGIN");
    assert_eq!(
        claim(&mut c, &mut w.clone(), "2,99", "9,9", 2, ""),
        "5 2",
        "a lane that is not there is empty"
    );
    c.run("ROLLBACK");
    assert_eq!(claim(&mut c, &mut w, "", "", 9, ""), "");
    assert_eq!(claim(&mut c, &mut w, "1", "9", 0, ""), "");
    // Given back, a job is behind those of its priority that wait already.
    assert_eq!(claim(&mut c, &mut w, "1", "2", 2, ""), "3 1");
    w.give_all_back(&mut c);
    assert_eq!(claim(&mut c, &mut w, "1", "9", 9, ""), "3 6 1");
    // max_attempts: the job's own, else the lane's, else 5.
    c.enqueue("own", "max_attempts => 7");
    c.enqueue("own", "");
    let lane = c.one("SELECT lane FROM lane WHERE job_type = 'own'");
    w.call += 1;
    assert_eq!(
        c.list(&format!("SELECT max_attempts FROM claim_job_batch('{}', '{}', {}, '{{{lane}}}', '{{2}}', 2, '{{3}}')", w.id, w.epoch, w.call)),
        ["7", "3"]
    );
    assert_eq!(
        c.code(&format!(
            "SELECT claim_job_batch('{}', '{}', 99, '{{1}}', '{{1,2}}')",
            w.id, w.epoch
        )),
        "TN007"
    );
    db.sound();
}

fn marks_skip_what_is_taken(lab: &Lab) {
    let db = lab.db("marks");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for number in 1..=6 {
        c.enqueue(
            "a",
            &format!("data => '{number}', priority => {}", number % 2),
        );
    }
    let marked = ", NULL, '{1,1}', '{0,1}', '{4,1}'";
    // Priority 0: 2 4 6 at positions 2 4 6; priority 1: 1 3 5.
    c.run("BEGIN");
    assert_eq!(claim(&mut c, &mut w.clone(), "1", "9", 9, marked), "6 3 5");
    c.run("ROLLBACK");
    c.enqueue("a", "data => '7', priority => -3");
    c.enqueue("a", "data => '8', priority => 9");
    assert_eq!(
        claim(&mut c, &mut w, "1", "9", 9, marked),
        "7 6 3 5 8",
        "priorities without a mark are found"
    );
    db.sound();
}

/// Settles the mark of lane 1, priority 0. Answers with mark and horizon.
fn settle(c: &mut Conn, w: &Worker, mark: i64, seen: i64, horizon: i64) -> (i64, i64) {
    let row = c.one(&format!("SELECT mark, horizon FROM settle_marks('{}', '{{1}}', '{{0}}', '{{{mark}}}', '{{{seen}}}', {horizon})", w.epoch));
    let (mark, horizon) = row.split_once('|').unwrap();
    (mark.parse().unwrap(), horizon.parse().unwrap())
}

/// M14: a job that was enqueued in a transaction which is still open has a lower position than one that was claimed.
fn marks_wait_for_open_transactions(lab: &Lab) {
    let db = lab.db("late_commits");
    let (mut c, mut user) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.run("SELECT lane_of('m')");
    user.run("BEGIN");
    let late = user.enqueue("m", "");
    c.enqueue("m", "");
    let seen: i64 = c
        .one(&format!(
            "SELECT pos FROM claim_job_batch('{}', '{}', 1, '{{1}}', '{{9}}')",
            w.id, w.epoch
        ))
        .parse()
        .unwrap();
    w.call = 1;
    assert_eq!(settle(&mut c, &w, 0, seen, 0).0, 0, "no horizon yet");
    let (_, horizon) = settle(&mut c, &w, 0, seen, 0);
    c.enqueue("m", "");
    let (mark, _) = settle(&mut c, &w, 0, seen, horizon);
    assert_eq!(
        mark, 0,
        "the open transaction may still commit below {seen}"
    );
    user.run("COMMIT");
    let (mark, _) = settle(&mut c, &w, 0, seen, horizon);
    assert!(
        mark < seen,
        "what has committed below and is not taken holds the mark"
    );
    assert!(w.claim(&mut c, "m", 9).iter().any(|held| held.job == late));
    let (mark, _) = settle(&mut c, &w, mark, seen, horizon);
    assert_eq!(mark, seen, "all below is taken");
    // A transaction that has its number but has not drawn a position yet: whatever it draws is above.
    user.run("BEGIN; SELECT txid_current()");
    let (_, horizon) = settle(&mut c, &w, 0, seen, 0);
    assert_eq!(settle(&mut c, &w, 0, seen, horizon).0, 0);
    user.run("ROLLBACK");
    assert_eq!(settle(&mut c, &w, 0, seen, horizon).0, seen);
    db.sound();
}

/// A job whose claim rolls back is there again, at its old position.
fn marks_wait_for_open_claims(lab: &Lab) {
    let db = lab.db("open_claims");
    let (mut c, mut other) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    let mut second = Worker::register(&mut c);
    let first = c.enqueue("m", "");
    c.enqueue("m", "");
    other.run("BEGIN");
    assert_eq!(second.claim_one(&mut other, "m").job, first);
    let seen: i64 = c
        .one(&format!(
            "SELECT pos FROM claim_job_batch('{}', '{}', 1, '{{1}}', '{{9}}')",
            w.id, w.epoch
        ))
        .parse()
        .unwrap();
    w.call = 1;
    let (_, horizon) = settle(&mut c, &w, 0, seen, 0);
    assert!(settle(&mut c, &w, 0, seen, horizon).0 < seen);
    other.run("ROLLBACK");
    let (mark, _) = settle(&mut c, &w, 0, seen, horizon);
    w.call += 1;
    assert_eq!(
        c.one(&format!("SELECT id FROM claim_job_batch('{}', '{}', {}, '{{1}}', '{{9}}', 9, NULL, '{{1}}', '{{0}}', '{{{mark}}}')", w.id, w.epoch, w.call)),
        first
    );
    db.sound();
}

fn an_old_reader_does_not_hold_marks_back(lab: &Lab) {
    let db = lab.db("old_readers");
    let (mut c, mut reader) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM job");
    c.run("SELECT enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'm')) FROM generate_series(1, 100) i))");
    assert_eq!(w.claim(&mut c, "m", 100).len(), 100);
    let (_, horizon) = settle(&mut c, &w, 0, 100, 0);
    assert_eq!(settle(&mut c, &w, 0, 100, horizon).0, 100);
    db.sound();
}

fn pauses(lab: &Lab) {
    let db = lab.db("pauses");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    let job = c.enqueue("m", "");
    c.run("SELECT pause('m', '{\"by\":\"ann\"}'); SELECT pause('m')");
    assert!(w.claim(&mut c, "m", 9).is_empty());
    assert!(
        c.one(&format!("SELECT waiting_for FROM jobs WHERE id = '{job}'"))
            .contains("ann")
    );
    assert_eq!(
        w.end(&mut c, "completed", &held, ""),
        "done completed",
        "what runs runs on"
    );
    let other = c.enqueue("m", "");
    assert_eq!(c.state(&other), "pending/0", "enqueues are accepted");
    c.run("SELECT resume('m')");
    assert_eq!(w.claim(&mut c, "m", 9).len(), 2);
    c.run("SELECT pause('new')");
    c.enqueue("new", "");
    assert!(
        w.claim(&mut c, "new", 9).is_empty(),
        "also before its first job"
    );
    assert_eq!(c.code("SELECT resume('unknown')"), "TN005");
    db.sound();
}

/// M2: a new worker claims first when all others know of it.
fn admission(lab: &Lab) {
    let db = lab.db("admissions");
    let (mut c, mut other) = (db.connect(), db.connect());
    let register = |c: &mut Conn| {
        let w = Worker::register_with(c, "300 s", "60 s");
        c.run(&format!(
            "UPDATE worker SET admitted = false WHERE id = '{}'",
            w.id
        ));
        w
    };
    c.enqueue("m", "");
    let mut first = register(&mut c);
    assert_eq!(first.claim(&mut c, "m", 1).len(), 1, "alone: at once");
    c.enqueue("m", "");
    let mut second = register(&mut c);
    assert!(
        second.claim(&mut c, "m", 1).is_empty(),
        "the other does not know of it"
    );
    first.beat(&mut c, &[1]).unwrap();
    assert_eq!(second.claim(&mut c, "m", 1).len(), 1);
    // A beat of the same moment that cannot have seen the registration does not count.
    c.enqueue("m", "");
    other.run("BEGIN");
    let id = other.one("SELECT random_uuid()");
    other.run(&format!(
        "SELECT register_worker('{id}', 'w', 'v1', '300 s', '60 s', '{{*}}')"
    ));
    let pid = c.pid();
    let mut watch = db.connect();
    let seen = thread::scope(|scope| {
        let beating = scope.spawn(|| {
            second.beat(&mut c, &[second.call]).unwrap();
            c.one(&format!(
                "SELECT workers FROM heartbeat('{}', '{}', 9)",
                first.id, first.epoch
            ))
        });
        watch.wait_until_blocked(&pid);
        other.run("COMMIT");
        beating.join().unwrap()
    });
    assert!(seen.contains(&id));
    // Nobody waits for ever for one that is silent.
    let mut last = register(&mut c);
    assert!(last.claim(&mut c, "m", 1).is_empty());
    c.run(&format!(
        "UPDATE worker SET started_at = started_at - interval '91 s' WHERE id = '{}'",
        last.id
    ));
    assert_eq!(last.claim(&mut c, "m", 1).len(), 1);
    assert_eq!(
        c.code(&format!(
            "SELECT register_worker('{}', 'w', 'v1', '30 s', '3 s', '{{}}')",
            last.id
        )),
        "TN007",
        "an id is used once"
    );
    assert_eq!(
        c.code("SELECT register_worker(random_uuid(), 'w', 'v1', '30 s', '11 s', '{}')"),
        "TN007"
    );
    assert_eq!(
        c.code("SELECT register_worker(random_uuid(), 'w', 'v1', NULL, '1 s', '{}')"),
        "TN007"
    );
    db.sound();
}

/// M11: a claim whose answer nobody read.
fn ghosts(lab: &Lab) {
    let db = lab.db("ghosts");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    w.claim(&mut c, "m", 1);
    assert_eq!(w.beat(&mut c, &[1]).unwrap(), 0, "its call is open");
    assert_eq!(c.state(&job), "running/1");
    assert_eq!(w.beat(&mut c, &[]).unwrap(), 1);
    assert_eq!(c.state(&job), "pending/0", "no attempt was used");
    assert_eq!(c.one("SELECT count(*) FROM attempts"), "0");
    // The claim reaches the server after its worker has given it up.
    c.run(&format!(
        "SELECT heartbeat('{}', '{}', 9, 5)",
        w.id, w.epoch
    ));
    assert_eq!(w.try_claim(&mut c, "m", 1).unwrap_err().code, "TN006");
    w.call = 5;
    let held = w.claim_one(&mut c, "m");
    assert_eq!((held.run, held.attempt), (2, 1));
    // Or it was under way: its leases go back at the next heartbeat.
    let mut other = db.connect();
    c.enqueue("m", "");
    other.run("BEGIN");
    w.claim_one(&mut other, "m");
    assert_eq!(w.beat(&mut c, &[6]).unwrap(), 0);
    other.run("COMMIT");
    assert_eq!(w.beat(&mut c, &[6]).unwrap(), 1);
    db.sound();
}

fn dead_workers(lab: &Lab) {
    let db = lab.db("dead_workers");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    // Draining: it claims nothing, and what it has it ends.
    let held = w.claim_one(&mut c, "m");
    c.enqueue("m", "");
    c.run(&format!("SELECT drain_worker('{}')", w.id));
    assert_eq!(
        c.one(&format!(
            "SELECT drain FROM heartbeat('{}', '{}', 1)",
            w.id, w.epoch
        )),
        "t"
    );
    c.run(&format!(
        "SELECT heartbeat('{}', '{}', 2, 0, '{{}}', 0, '{{\"draining\":true}}')",
        w.id, w.epoch
    ));
    assert!(w.claim(&mut c, "m", 1).is_empty());
    assert_eq!(w.end(&mut c, "released", &held, ""), "done pending");
    assert_eq!(c.one("SELECT status FROM workers"), "draining");
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        w.id, w.epoch
    ));
    assert_eq!(
        c.one("SELECT status, ended_at IS NOT NULL FROM workers"),
        "stopped|t"
    );
    for _ in 0..2 {
        assert_eq!(w.try_claim(&mut c, "m", 1).unwrap_err().code, "TN004");
        assert_eq!(w.beat(&mut c, &[]).unwrap_err().code, "TN004");
        w.id = c.one("SELECT random_uuid()");
    }
    assert_eq!(c.code("SELECT drain_worker(random_uuid())"), "TN005");
    assert_eq!(c.state(&job), "pending/0");
    db.sound();
}

/// Two claimers on one lane share it: nothing twice, nothing left.
fn two_at_once(lab: &Lab) {
    let db = lab.db("two_claimers");
    let mut c = db.connect();
    c.run("SELECT enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'm')) FROM generate_series(1, 2000) i))");
    let taken: Vec<Vec<String>> = thread::scope(|scope| {
        let claimers: Vec<_> = (0..2)
            .map(|_| {
                let mut w = Worker::register(&mut c);
                let db = &db;
                scope.spawn(move || {
                    let mut c = db.connect();
                    let mut taken = Vec::new();
                    loop {
                        let held = w.claim(&mut c, "m", 7);
                        if held.is_empty() {
                            return taken;
                        }
                        taken.extend(held.into_iter().map(|held| held.job));
                    }
                })
            })
            .collect();
        claimers
            .into_iter()
            .map(|claimer| claimer.join().unwrap())
            .collect()
    });
    let mut all = taken.concat();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 2000);
    assert_eq!(taken.concat().len(), 2000);
    db.sound();
}
