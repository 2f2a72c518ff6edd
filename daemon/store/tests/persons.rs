//! What people do with jobs, in each state of the job.

use crate::support::{Conn, Lab, Worker};

#[test]
fn persons() {
    let lab = Lab::start();
    table(&lab);
    retry_and_its_key(&lab);
    dead_letters(&lab);
    changed_data(&lab);
    while_the_gate_is_closed(&lab);
    what_is_refused(&lab);
}

const STATES: [&str; 9] = [
    "pending",
    "requeued",
    "scheduled",
    "retrying",
    "running",
    "completed",
    "failed",
    "cancelled",
    "discarded",
];

/// A new job with a unique key, brought to this state.
fn job_that_is(c: &mut Conn, w: &mut Worker, state: &str) -> String {
    let more = if state == "scheduled" {
        ", run_at => now() + interval '1 h'"
    } else {
        ""
    };
    let job = c.enqueue("m", &format!("unique_key => uuid_v7()::text{more}"));
    let end = match state {
        "pending" | "scheduled" => return job,
        "cancelled" => {
            c.run(&format!("SELECT cancel('{job}')"));
            return job;
        }
        "requeued" => ("released", ""),
        "retrying" => ("failed", r#","delay_ms":3600000"#),
        "completed" => ("completed", ""),
        _ => ("failed", r#","final":true"#),
    };
    let held = w.claim_one(c, "m");
    if state != "running" {
        w.end(c, end.0, &held, end.1);
    }
    if state == "discarded" {
        c.run(&format!(
            "SELECT review_dead_letter('{}', 'discard', 'ann')",
            held.token
        ));
    }
    job
}

/// Each act in each state: the answer or the error, and the status that the job has then.
fn table(lab: &Lab) {
    let db = lab.db("acts");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let table = [
        (
            "cancel('{}')",
            [
                "cancelled",
                "cancelled",
                "cancelled",
                "cancelled",
                "stopping",
                "completed",
                "failed",
                "cancelled",
                "discarded",
            ],
        ),
        (
            "move_to_dead_letter('{}')",
            [
                "failed",
                "failed",
                "failed",
                "failed",
                "stopping",
                "completed",
                "failed",
                "cancelled",
                "discarded",
            ],
        ),
        (
            "complete_manually('{}', 'ann')",
            [
                "completed",
                "completed",
                "completed",
                "completed",
                "stopping",
                "TN006",
                "completed",
                "completed",
                "completed",
            ],
        ),
        (
            "retry('{}')",
            [
                "TN006", "TN006", "TN006", "TN006", "TN006", "TN006", "pending", "pending",
                "pending",
            ],
        ),
    ];
    for (act, answers) in table {
        for (state, answer) in STATES.into_iter().zip(answers) {
            let what = format!("{act} of a job that is {state}");
            let job = job_that_is(&mut c, &mut w, state);
            let before = c.state(&job);
            let act = format!("SELECT {}", act.replace("{}", &job));
            match c.try_list(&act) {
                Ok(rows) => assert_eq!(rows, [answer], "{what}"),
                Err(refusal) => {
                    assert_eq!(refusal.code, answer, "{what}: {refusal:?}");
                    let status = before.split('/').next().unwrap();
                    assert!(refusal.message.contains(status), "{what}: {refusal:?}");
                }
            }
            let expected = if answer == "stopping" || answer == "TN006" {
                before
            } else {
                c.state(&job).replace(char::is_numeric, "") + before.split('/').nth(1).unwrap()
            };
            if answer == "pending" {
                assert_eq!(c.state(&job), "pending/0", "{what}");
            } else {
                assert_eq!(c.state(&job), expected, "{what}");
                if !["stopping", "TN006"].contains(&answer) {
                    assert!(c.state(&job).starts_with(answer), "{what}");
                }
            }
            if state == "running" {
                w.give_all_back(&mut c);
            }
            db.sound();
            // Nothing is left that a later case would claim.
            c.run("SELECT cancel(id) FROM jobs WHERE status IN ('pending', 'scheduled')");
        }
    }
    assert_eq!(c.one("SELECT count(*) FROM key_owner"), "0");
}

fn retry_and_its_key(lab: &Lab) {
    let db = lab.db("retries");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let first = c.enqueue("m", "unique_key => 'k'");
    let held = w.claim_one(&mut c, "m");
    w.end(&mut c, "failed", &held, r#","final":true"#);
    let second = c.enqueue("m", "unique_key => 'k'");
    for act in [
        format!("retry('{first}')"),
        format!("review_dead_letter('{}', 'retry', 'ann')", held.token),
    ] {
        let refusal = c.refusal(&format!("SELECT {act}"));
        assert_eq!(refusal.code, "TN006");
        assert!(
            refusal.message.contains(&second),
            "it names the owner: {refusal:?}"
        );
    }
    assert_eq!(c.state(&first), "failed/1");
    c.run(&format!("SELECT cancel('{second}')"));
    c.run(&format!("SELECT retry('{first}', '{{\"by\":\"ann\"}}')"));
    assert_eq!(
        c.enqueue("m", "unique_key => 'k'"),
        first,
        "it has its key again"
    );
    assert_eq!(
        c.one("SELECT reviewed_by, review_action FROM dead_letter_jobs"),
        "ann|retry"
    );
    let again = w.claim_one(&mut c, "m");
    assert_eq!(
        (again.run, again.attempt),
        (3, 1),
        "a person's act counts as a run, and no attempt is used"
    );
    db.sound();
}

fn dead_letters(lab: &Lab) {
    let db = lab.db("letters");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for (action, status) in [
        ("retry", "pending"),
        ("discard", "discarded"),
        ("fixed", "completed"),
    ] {
        let job = c.enqueue("m", "");
        let held = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &held, r#","final":true,"error":"no""#);
        let review = format!(
            "SELECT review_dead_letter('{}', '{action}', 'ann', 'seen')",
            held.token
        );
        assert_eq!(c.one(&review), status);
        assert!(c.state(&job).starts_with(status));
        let refusal = c.refusal(&review);
        assert_eq!(refusal.code, "TN006", "each letter is decided once");
        assert!(refusal.message.contains("ann"), "{refusal:?}");
        assert_eq!(
            c.one(&format!("SELECT reviewed_by, review_action, review_note, reviewed_at IS NOT NULL FROM dead_letter_jobs WHERE original_job_id = '{job}'")),
            format!("ann|{action}|seen|t")
        );
        // The attempt that died is there whatever was decided.
        assert_eq!(
            c.list(&format!(
                "SELECT outcome, error FROM attempts WHERE job_id = '{job}'"
            )),
            ["failed|no"]
        );
        c.run(&format!("SELECT cancel('{job}')"));
    }
    // Two deaths are two letters.
    let job = c.enqueue("m", "");
    for _ in 0..2 {
        let held = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &held, r#","final":true"#);
        c.run(&format!("SELECT retry('{job}')"));
    }
    assert_eq!(c.one(&format!("SELECT count(*), count(DISTINCT id) FROM dead_letter_jobs WHERE original_job_id = '{job}'")), "2|2");
    // A death without a run: by a person, before its first.
    let job = c.enqueue("n", "");
    c.run(&format!("SELECT move_to_dead_letter('{job}')"));
    let letter = c.one(&format!(
        "SELECT id FROM dead_letter_jobs WHERE original_job_id = '{job}'"
    ));
    assert_eq!(
        c.one(&format!(
            "SELECT review_dead_letter('{letter}', 'retry', 'ann')"
        )),
        "pending"
    );
    db.sound();
}

/// Data that a person puts in place of the job's own stays over further attempts; what was asked at first is kept.
fn changed_data(lab: &Lab) {
    let db = lab.db("edits");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "data => '{\"n\":1}'");
    for data in [r#"{"n":2}"#, r#"{"n":3}"#] {
        let held = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &held, r#","final":true"#);
        c.run(&format!(
            "SELECT review_dead_letter('{}', 'retry', 'ann', NULL, '{data}')",
            held.token
        ));
    }
    let shown = |c: &mut Conn| c.one(&format!("SELECT data ->> 'n' FROM jobs WHERE id = '{job}'"));
    assert_eq!(shown(&mut c), "3");
    w.call += 1;
    let row = c.one(&format!(
        "SELECT id, run, token, attempt, data ->> 'n' FROM claim_job_batch('{}', '{}', {}, '{{1}}', '{{1}}')",
        w.id, w.epoch, w.call
    ));
    assert!(row.ends_with("|3"), "{row}");
    assert_eq!(shown(&mut c), "3");
    let held = crate::support::Held::read(&row, w.call);
    w.end(&mut c, "released", &held, "");
    let held = w.claim_one(&mut c, "m");
    w.end(&mut c, "completed", &held, "");
    assert_eq!(shown(&mut c), "3");
    assert_eq!(c.one("SELECT data ->> 'n' FROM job"), "1");
    db.sound();
}

fn while_the_gate_is_closed(lab: &Lab) {
    let db = lab.db("closed_gate");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let (job, failed) = (
        job_that_is(&mut c, &mut w, "pending"),
        job_that_is(&mut c, &mut w, "cancelled"),
    );
    c.enqueue("dead", "");
    let held = w.claim_one(&mut c, "dead");
    w.end(&mut c, "failed", &held, r#","final":true"#);
    let acts = [
        format!("SELECT cancel('{job}')"),
        format!("SELECT retry('{failed}')"),
        format!("SELECT complete_manually('{job}', 'ann')"),
        format!("SELECT move_to_dead_letter('{job}')"),
        format!(
            "SELECT review_dead_letter('{}', 'discard', 'ann')",
            held.token
        ),
    ];
    let refused_with = |c: &mut Conn, code: &str| {
        for act in &acts {
            let refusal = c.refusal(act);
            assert_eq!(refusal.code, code, "{act}");
            assert!(!refusal.hint.is_empty(), "{refusal:?}");
        }
    };
    c.lose_here();
    refused_with(&mut c, "TN002");
    c.run(&format!("SELECT open_epoch('{}')", w.id));
    assert_eq!(c.one("SELECT gate FROM cluster"), "window");
    refused_with(&mut c, "TN002");
    let new = c.enqueue("m", "");
    assert_eq!(
        c.one(&format!("SELECT cancel('{new}')")),
        "cancelled",
        "a new one is nobody's secret"
    );
    c.run("UPDATE cluster SET gate = 'hold'");
    refused_with(&mut c, "TN003");
    c.run("UPDATE cluster SET gate = 'open'");
    for act in acts {
        c.run(&act.replace(&format!("move_to_dead_letter('{job}')"), "1"));
    }
    db.sound();
}

fn what_is_refused(lab: &Lab) {
    let db = lab.db("refused_acts");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = job_that_is(&mut c, &mut w, "failed");
    let letter = c.one("SELECT id FROM dead_letter_jobs");
    for (act, code) in [
        ("cancel(uuid_v7())".to_owned(), "TN005"),
        ("retry(uuid_v7())".to_owned(), "TN005"),
        ("complete_manually(uuid_v7(), 'ann')".to_owned(), "TN005"),
        ("move_to_dead_letter(uuid_v7())".to_owned(), "TN005"),
        (
            "review_dead_letter(uuid_v7(), 'retry', 'ann')".to_owned(),
            "TN005",
        ),
        (format!("complete_manually('{job}', ' ')"), "TN007"),
        (
            format!("review_dead_letter('{letter}', 'retry', NULL)"),
            "TN007",
        ),
        (
            format!("review_dead_letter('{letter}', 'redo', 'ann')"),
            "TN007",
        ),
        (
            format!("review_dead_letter('{letter}', NULL, 'ann')"),
            "TN007",
        ),
        (
            format!("review_dead_letter('{letter}', 'fixed', 'ann', NULL, '[1]')"),
            "TN007",
        ),
    ] {
        assert_eq!(c.code(&format!("SELECT {act}")), code, "{act}");
    }
    c.run("BEGIN ISOLATION LEVEL SERIALIZABLE");
    assert_eq!(c.code(&format!("SELECT cancel('{job}')")), "TN007");
    c.run("ROLLBACK");
    db.sound();
}
