//! How runs end: each kind in each state, repeated, late, locked, in batches.

use crate::stops::sweep;
use crate::support::{Conn, Held, Lab, Worker, lose};

#[test]
fn ends() {
    let lab = Lab::start();
    each_kind(&lab);
    repeated(&lab);
    late(&lab);
    locked_by_assert_lease(&lab);
    follow_ups(&lab);
    held_leases(&lab);
    malformed(&lab);
    batches(&lab);
}

pub(crate) fn running(c: &mut Conn, worker: &mut Worker, more: &str) -> Held {
    c.enqueue("m", more);
    worker.claim_one(c, "m")
}

fn each_kind(lab: &Lab) {
    let db = lab.db("kinds");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for (kind, more, answer, state, waits) in [
        (
            "completed",
            r#","result":{"n":1}"#,
            "done completed",
            "completed/1",
            "~",
        ),
        (
            "failed",
            r#","error":"no","delay_ms":60000"#,
            "done scheduled",
            "scheduled/1",
            "retry",
        ),
        (
            "failed",
            r#","error":"no","final":true"#,
            "done failed",
            "failed/1",
            "review",
        ),
        ("released", "", "done pending", "pending/0", "~"),
        (
            "released",
            r#","delay_ms":60000"#,
            "done scheduled",
            "scheduled/0",
            "time",
        ),
        (
            "snoozed",
            r#","delay_ms":60000"#,
            "done scheduled",
            "scheduled/0",
            "snooze",
        ),
    ] {
        if answer.is_empty() {
            continue;
        }
        let held = running(&mut c, &mut w, "max_attempts => 3");
        assert_eq!(w.end(&mut c, kind, &held, more), answer, "{kind}{more}");
        assert_eq!(c.state(&held.job), state, "{kind}{more}");
        assert_eq!(
            c.one(&format!(
                "SELECT waiting_for FROM jobs WHERE id = '{}'",
                held.job
            )),
            waits,
            "{kind}{more}"
        );
        c.run(&format!("SELECT cancel('{}')", held.job));
    }
    // The attempts are used up one by one; what was given back uses none.
    c.enqueue("m", "max_attempts => 2");
    let given_back = w.claim_one(&mut c, "m");
    w.end(&mut c, "released", &given_back, "");
    let first = w.claim_one(&mut c, "m");
    assert_eq!((first.attempt, first.run), (1, 2));
    w.end(&mut c, "failed", &first, r#","error":"one","exit_code":1"#);
    c.run(&format!(
        "UPDATE later SET due = now() WHERE id = '{}'",
        first.job
    ));
    c.run(&format!("SELECT promote('{}')", w.epoch));
    let second = w.claim_one(&mut c, "m");
    assert_eq!((second.attempt, second.run), (2, 3));
    assert_eq!(
        w.end(
            &mut c,
            "failed",
            &second,
            r#","error":"two","log_tail":"log""#
        ),
        "done failed"
    );
    assert_eq!(
        c.list(&format!(
            "SELECT attempt, outcome, applied, exit_code, error, log_tail FROM attempts WHERE job_id = '{}' ORDER BY run",
            first.job
        )),
        ["1|released|t|~|~|~", "1|failed|t|1|one|~", "2|failed|t|~|two|log"]
    );
    assert_eq!(
        c.one(&format!(
            "SELECT id = '{}', attempts, last_error, reviewed_at FROM dead_letter_jobs WHERE original_job_id = '{}'",
            second.token, first.job
        )),
        "t|2|two|~"
    );
    db.sound();
}

/// The answer to a statement was lost and it is said again: the same answer, and nothing a second time.
fn repeated(lab: &Lab) {
    let db = lab.db("repeated");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for (kind, more) in [
        ("completed", r#","enqueue":[{"job_type":"follow"}]"#),
        ("failed", ""),
        ("failed", r#","final":true"#),
        ("released", ""),
        ("snoozed", r#","delay_ms":1000"#),
    ] {
        let held = running(&mut c, &mut w, "");
        let item = held.item(kind, more);
        assert!(w.end(&mut c, kind, &held, more).starts_with("done "));
        let before = c.list("SELECT count(*) FROM job UNION ALL SELECT count(*) FROM attempt UNION ALL SELECT count(*) FROM dead_letter");
        assert_eq!(c.one(&w.finish_sql(&[item])), "done", "{kind}{more}");
        assert_eq!(
            c.list("SELECT count(*) FROM job UNION ALL SELECT count(*) FROM attempt UNION ALL SELECT count(*) FROM dead_letter"),
            before
        );
        c.run("SELECT cancel(id) FROM jobs WHERE job_type = 'm' AND status IN ('pending', 'scheduled')");
        // Another kind about the same run is not what happened.
        let other = if kind == "completed" {
            "failed"
        } else {
            "completed"
        };
        assert_eq!(
            w.end(&mut c, other, &held, ""),
            "history",
            "{other} after {kind}{more}"
        );
    }
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE job_type = 'follow'"),
        "1"
    );
    // Once a person has opened the job again, the old run is still known as done.
    let held = running(&mut c, &mut w, "");
    w.end(&mut c, "failed", &held, r#","final":true"#);
    c.run(&format!("SELECT retry('{}')", held.job));
    assert_eq!(w.end(&mut c, "failed", &held, r#","final":true"#), "done");
    assert_eq!(c.state(&held.job), "pending/0");
    db.sound();
}

/// A run that has lost its lease changes nothing, and what it said is kept.
fn late(lab: &Lab) {
    let db = lab.db("late");
    let mut c = db.connect();
    let (mut w, mut other) = (Worker::register(&mut c), Worker::register(&mut c));
    let held = running(&mut c, &mut w, "max_attempts => 2");
    lose(&mut c, &other, &w);
    assert_eq!(
        c.state(&held.job),
        "pending/1",
        "a lost worker uses an attempt"
    );
    let late = |c: &mut Conn| w.end(c, "completed", &held, r#","result":"mine""#);
    assert_eq!(late(&mut c), "history", "while it waits");
    let again = other.claim_one(&mut c, "m");
    assert_eq!(late(&mut c), "history", "while it runs again");
    assert_eq!(other.end(&mut c, "completed", &again, ""), "done completed");
    assert_eq!(late(&mut c), "history", "after it ended");
    assert_eq!(
        c.list(&format!(
            "SELECT run, outcome, applied FROM attempts WHERE job_id = '{}' ORDER BY run, applied DESC",
            held.job
        )),
        ["1|lost|t", "1|completed|f", "2|completed|t"],
        "the late success is there to be seen"
    );
    // The loss was its last attempt: the dead letter stands, and 'completed' is not 'done'.
    c.enqueue("m", "max_attempts => 1");
    let mut third = Worker::register(&mut c);
    let held = third.claim_one(&mut c, "m");
    lose(&mut c, &other, &third);
    assert_eq!(c.state(&held.job), "failed/1");
    assert_eq!(other.end(&mut c, "completed", &held, ""), "history");
    assert_eq!(c.state(&held.job), "failed/1");
    // A worker that leaves has ended all that it knew of: what it still holds was never started.
    c.enqueue("m", "max_attempts => 1");
    let mut fourth = Worker::register(&mut c);
    let unread = fourth.claim_one(&mut c, "m");
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        fourth.id, fourth.epoch
    ));
    assert_eq!(c.state(&unread.job), "pending/0");
    // A job that is not there.
    let nobody = Held {
        job: c.one("SELECT uuid_v7()"),
        ..held
    };
    assert_eq!(other.end(&mut c, "completed", &nobody, ""), "history");
    db.sound();
}

fn locked_by_assert_lease(lab: &Lab) {
    let db = lab.db("locked");
    let (mut c, mut user) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    let held = running(&mut c, &mut w, "");
    let free = running(&mut c, &mut w, "");
    let assert = format!("SELECT assert_lease('{}', '{}')", held.job, held.token);
    user.run("BEGIN");
    user.run(&assert);
    assert_eq!(
        c.list(&w.finish_sql(&[held.item("completed", ""), free.item("completed", "")])),
        ["busy", "done completed"],
        "the other does not wait for it"
    );
    assert_eq!(c.state(&held.job), "running/1");
    // It does not stand against a heartbeat, a look, or a longer lease.
    assert_eq!(w.beat(&mut c, &[1, 2]).unwrap(), 0);
    c.run(&format!(
        r#"SELECT hold('{}', '{}', '[{{"job":"{}","token":"{}","for_ms":60000}}]')"#,
        w.id, w.epoch, held.job, held.token
    ));
    user.run("COMMIT");
    assert_eq!(w.end(&mut c, "completed", &held, ""), "done completed");
    let refusal = user.refusal(&assert);
    assert_eq!(refusal.code, "TN006", "{refusal:?}");
    db.sound();
}

fn follow_ups(lab: &Lab) {
    let db = lab.db("follow_ups");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let held = running(&mut c, &mut w, "");
    let id = c.one("SELECT uuid_v7()");
    let more = format!(
        r#","enqueue":[{{"job_type":"f","id":"{id}","data":[1]}},{{"job_type":"f","run_at":"2999-01-01T00:00:00Z"}}]"#
    );
    w.end(&mut c, "completed", &held, &more);
    assert_eq!(
        c.list("SELECT status FROM jobs WHERE job_type = 'f' ORDER BY 1"),
        ["pending", "scheduled"]
    );
    assert_eq!(
        c.one(&format!("SELECT data FROM jobs WHERE id = '{id}'")),
        "[1]"
    );
    // Nothing follows from a failure, from a run that was taken away, or from one that a person cancelled.
    for (kind, stop) in [("failed", false), ("completed", true)] {
        let held = running(&mut c, &mut w, "");
        if stop {
            c.run(&format!("SELECT cancel('{}')", held.job));
        }
        w.end(&mut c, kind, &held, r#","enqueue":[{"job_type":"never"}]"#);
    }
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE job_type = 'never'"),
        "0"
    );
    // A follow-up that cannot be: nothing of the call happens.
    let held = running(&mut c, &mut w, "");
    assert_eq!(
        c.code(&w.finish_sql(&[held.item("completed", r#","enqueue":[{"job_type":""}]"#)])),
        "TN007"
    );
    assert_eq!(c.state(&held.job), "running/1");
    db.sound();
}

/// Leases with a time of their own: they outlive their worker, and anyone with the token may end or hold them.
fn held_leases(lab: &Lab) {
    let db = lab.db("holds");
    let mut c = db.connect();
    let (mut w, other) = (Worker::register(&mut c), Worker::register(&mut c));
    let hold = |c: &mut Conn, held: &Held, for_ms: i64| {
        c.one(&format!(
            r#"SELECT answer FROM hold('{}', '{}', '[{{"job":"{}","token":"{}","for_ms":{for_ms}}}]')"#,
            other.id, other.epoch, held.job, held.token
        ))
    };
    let held = running(&mut c, &mut w, "");
    let expiring = running(&mut c, &mut w, "");
    assert_eq!(hold(&mut c, &held, 60_000), "done");
    assert_eq!(hold(&mut c, &expiring, 60_000), "done");
    assert_eq!(w.beat(&mut c, &[]).unwrap(), 0, "no ghosts");
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        w.id, w.epoch
    ));
    assert_eq!(c.state(&held.job), "running/1");
    c.run(&format!(
        "UPDATE lease SET until = clock_timestamp() - interval '1 ms' WHERE id = '{}'",
        expiring.job
    ));
    sweep(&mut c, &other);
    assert_eq!(c.state(&held.job), "running/1");
    assert_eq!(c.state(&expiring.job), "pending/1", "nobody renewed it");
    assert_eq!(hold(&mut c, &expiring, 60_000), "history");
    assert_eq!(other.end(&mut c, "completed", &held, ""), "done completed");
    assert_eq!(hold(&mut c, &held, 60_000), "history");
    let items = format!(r#"[{{"job":"{}","token":"{}"}}]"#, held.job, held.token);
    assert_eq!(
        c.code(&format!(
            "SELECT hold('{}', '{}', '{items}')",
            other.id, other.epoch
        )),
        "TN007",
        "without a time"
    );
    assert_eq!(
        c.code(&format!(
            "SELECT hold('{}', '{}', '{{}}')",
            other.id, other.epoch
        )),
        "TN007"
    );
    db.sound();
}

fn malformed(lab: &Lab) {
    let db = lab.db("malformed");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    for items in [
        "{}",
        "1",
        r#"[{"kind":"done"}]"#,
        r#"[{"kind":"completed"}]"#,
        r#"[{"kind":"lost"}]"#,
        "[1]",
    ] {
        for function in ["finish", "complete", "fail", "release", "snooze"] {
            if function != "finish" && items.contains("kind") {
                continue;
            }
            let code = c.code(&format!(
                "SELECT {function}('{}', '{}', '{items}')",
                w.id, w.epoch
            ));
            assert_eq!(code, "TN007", "{function} {items}");
        }
    }
    assert!(
        c.list(&w.finish_sql(&[])).is_empty(),
        "no items, no answers"
    );
    c.run("BEGIN ISOLATION LEVEL REPEATABLE READ");
    assert_eq!(c.code(&w.finish_sql(&[])), "TN007", "only READ COMMITTED");
    c.run("ROLLBACK");
}

/// Many at once: each gets its own answer, duplicates one.
fn batches(lab: &Lab) {
    let db = lab.db("batches");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.run("SELECT enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'm', 'unique_key', 'k' || i)) FROM generate_series(1, 500) i))");
    let held = w.claim(&mut c, "m", 500);
    let kinds = ["completed", "failed", "released", "snoozed"];
    let items: Vec<String> = held
        .iter()
        .enumerate()
        .map(|(index, held)| held.item(kinds[index % 4], ""))
        .collect();
    let doubled: Vec<String> = items.iter().chain(&items).cloned().collect();
    let mut answers = c.list(&w.finish_sql(&doubled));
    answers.sort();
    answers.dedup_by(|a, b| a == b);
    assert_eq!(
        answers,
        ["done completed", "done pending", "done scheduled"]
    );
    assert_eq!(
        c.list("SELECT status, count(*) FROM jobs GROUP BY 1 ORDER BY 1"),
        ["completed|125", "pending|125", "scheduled|250"]
    );
    // complete, fail, release and snooze are the same by kind.
    let held = w.claim(&mut c, "m", 4);
    for (function, held) in ["complete", "fail", "release", "snooze"].iter().zip(&held) {
        let sql = format!(
            r#"SELECT answer FROM {function}('{}', '{}', '[{{"job":"{}","run":{},"token":"{}"}}]')"#,
            w.id, w.epoch, held.job, held.run, held.token
        );
        assert_eq!(c.one(&sql), "done", "{function}");
    }
    db.sound();
}
