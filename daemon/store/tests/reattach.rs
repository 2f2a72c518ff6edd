//! After a switch: what a worker says that the database has lost, in part or whole, stands again.
//!
//! A lost tail is played by a copy of the database that was made earlier: `CREATE DATABASE … TEMPLATE`, then an empty `here`.

use crate::support::{Conn, Db, Held, Lab, Worker};

#[test]
fn reattach() {
    let lab = Lab::start();
    nothing_was_lost(&lab);
    a_lost_claim(&lab);
    a_lost_end(&lab);
    a_lost_enqueue(&lab);
    a_lost_retry(&lab);
    ghosts(&lab);
    predecessors(&lab);
    what_is_refused(&lab);
    held_over_the_switch(&lab);
}

/// A copy that loses everything after this moment. No connection to the original may be open.
pub(crate) fn lose_tail<'l>(lab: &'l Lab, name: &str) -> Db<'l> {
    let mut c = lab.reopen("postgres").connect_as("postgres");
    c.wait_for(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = 'migrated'",
        "0",
    );
    c.run(&format!("CREATE DATABASE {name} TEMPLATE migrated"));
    lab.reopen(name)
}

/// The whole job as the daemon keeps it.
pub(crate) fn row(c: &mut Conn, job: &str) -> String {
    format!(
        r#","row":{}"#,
        c.one(&format!(
            "SELECT to_jsonb(j) - 'pos' FROM job j WHERE id = '{job}'"
        ))
    )
}

fn nothing_was_lost(lab: &Lab) {
    let db = lab.db("all_there");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let mut statements = Vec::new();
    for (kind, more) in [
        ("hold", ""),
        ("completed", r#","enqueue":[{"job_type":"follow"}]"#),
        ("failed", r#","delay_ms":60000"#),
        ("released", ""),
        ("snoozed", r#","delay_ms":60000"#),
    ] {
        c.enqueue(kind, "");
        let held = w.claim_one(&mut c, kind);
        if kind != "hold" {
            w.end(&mut c, kind, &held, more);
        }
        statements.push(held.item(kind, more));
    }
    let before = c.list("SELECT job_type, status, attempts FROM jobs ORDER BY 1");
    c.lose_here();
    for _ in 0..2 {
        assert_eq!(
            w.reattach(&mut c, &statements, &[], "").join(" "),
            "kept done done done done"
        );
        c.run("UPDATE cluster SET gate = 'open'");
        assert_eq!(
            c.list("SELECT job_type, status, attempts FROM jobs ORDER BY 1"),
            before
        );
    }
    assert_eq!(c.one("SELECT count(*) FROM attempt WHERE NOT applied"), "0");
    db.sound();
}

/// The database shows the job as it was before the claim, in each place where it can have waited.
fn a_lost_claim(lab: &Lab) {
    let places = ["ready", "requeued", "later"];
    let (mut w, other) = {
        let db = lab.db("claimed");
        let mut c = db.connect();
        let (mut w, other) = (Worker::register(&mut c), Worker::register(&mut c));
        for place in places {
            c.enqueue(place, "unique_key => 'k'");
            if place != "ready" {
                let held = w.claim_one(&mut c, place);
                w.end(
                    &mut c,
                    if place == "later" {
                        "failed"
                    } else {
                        "released"
                    },
                    &held,
                    "",
                );
            }
        }
        (w, other)
    };
    let lost = lose_tail(lab, "claimed");
    let held = {
        let mut c = lab.reopen("migrated").connect();
        c.run(&format!("SELECT promote('{}')", w.epoch));
        places.map(|place| w.claim_one(&mut c, place))
    };
    let mut c = lost.connect();
    c.lose_here();
    let statements = held.each_ref().map(|held| held.item("hold", ""));
    assert_eq!(w.reattach(&mut c, &statements, &[&other], ""), ["kept"; 3]);
    let open = held.each_ref().map(|held| held.call);
    assert_eq!(w.beat(&mut c, &open).unwrap(), 0, "its calls are known");
    for (place, held) in places.iter().zip(&held) {
        assert_eq!(
            c.one(&format!(
                "SELECT token = '{}' AND run = {} AND worker = '{}' AND epoch_no = 1 FROM lease WHERE id = '{}'",
                held.token, held.run, w.id, held.job
            )),
            "t",
            "{place}"
        );
        assert_eq!(c.enqueue(place, "unique_key => 'k'"), held.job);
    }
    lost.sound();
    for held in &held {
        assert_eq!(w.end(&mut c, "completed", held, ""), "done completed");
    }
    lost.sound();
}

/// The database shows it as running, or as it was before the claim; the worker has ended it.
fn a_lost_end(lab: &Lab) {
    let follow = r#","result":{"n":1},"enqueue":[{"job_type":"follow","id":"01976e5c-0000-7000-8000-00000000000"#;
    let cases: Vec<(&str, String, &str, bool)> = [false, true]
        .into_iter()
        .flat_map(|claim_too| {
            [
                (
                    "completed",
                    format!(r#"{follow}{}"}}]"#, u8::from(claim_too)),
                    "completed/1",
                ),
                (
                    "failed",
                    r#","error":"no","final":true"#.to_owned(),
                    "failed/1",
                ),
                (
                    "failed",
                    r#","error":"no","delay_ms":1000"#.to_owned(),
                    "scheduled/1",
                ),
                ("released", String::new(), "scheduled/0"),
                ("snoozed", r#","delay_ms":1000"#.to_owned(), "scheduled/0"),
            ]
            .map(|(kind, more, state)| (kind, more, state, claim_too))
        })
        .collect();
    let db = lab.db("ended");
    let mut c = db.connect();
    let (mut w, other) = (Worker::register(&mut c), Worker::register(&mut c));
    let mut held: Vec<Option<Held>> = Vec::new();
    for (number, (_, _, _, claim_too)) in cases.iter().enumerate() {
        c.enqueue(&format!("m{number}"), "unique_key => 'k'");
        held.push((!claim_too).then(|| w.claim_one(&mut c, &format!("m{number}"))));
    }
    drop(c);
    let lost = lose_tail(lab, "ended");
    let mut c = db.connect();
    let mut statements = Vec::new();
    for (number, ((kind, more, _, _), held)) in cases.iter().zip(&mut held).enumerate() {
        let held = held.get_or_insert_with(|| w.claim_one(&mut c, &format!("m{number}")));
        assert!(w.end(&mut c, kind, held, more).starts_with("done"));
        statements.push(held.item(kind, more));
    }
    let mut c = lost.connect();
    c.lose_here();
    let answers = w.reattach(&mut c, &statements, &[&other], "");
    assert_eq!(
        w.reattach(&mut c, &statements, &[], ""),
        vec!["done"; cases.len()],
        "said again"
    );
    for (((case, held), answer), (_, _, state, _)) in cases
        .iter()
        .zip(held.iter().flatten())
        .zip(answers)
        .zip(&cases)
    {
        assert_eq!(
            answer,
            format!("done {}", state.split('/').next().unwrap()),
            "{case:?}"
        );
        assert_eq!(c.state(&held.job), *state, "{case:?}");
    }
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE job_type = 'follow'"),
        "2"
    );
    assert_eq!(
        c.one("SELECT max(epoch_no) FROM outcome"),
        "1",
        "a re-attach is of the epoch that it speaks of"
    );
    lost.sound();
}

/// The job itself is not there: it is put back with all that it had.
fn a_lost_enqueue(lab: &Lab) {
    let name = "enqueued";
    let mut w = {
        let db = lab.db(name);
        let mut c = db.connect();
        Worker::register(&mut c)
    };
    let lost = lose_tail(lab, name);
    let (statements, jobs, shown) = {
        let mut c = lab.reopen("migrated").connect();
        let mut statements = Vec::new();
        let mut jobs = Vec::new();
        for kind in ["hold", "completed", "failed"] {
            let more = "data => '{\"n\":12345678901234567890}', priority => 4, tenant => 't', unique_key => 'k', max_attempts => 9, timeout => '90 s', labels => '{\"l\":\"x\"}'";
            let job = c.enqueue(kind, more);
            let held = w.claim_one(&mut c, kind);
            let row = row(&mut c, &job);
            statements.push(held.item(kind, &row));
            jobs.push(held);
        }
        (
            statements,
            jobs,
            c.list("SELECT job_type, to_jsonb(j) - 'pos' - 'lane' FROM job j ORDER BY 1"),
        )
    };
    let mut c = lost.connect();
    c.lose_here();
    assert_eq!(
        w.reattach(&mut c, &statements, &[], "").join(" "),
        "kept done completed done scheduled"
    );
    assert_eq!(
        c.list("SELECT job_type, to_jsonb(j) - 'pos' - 'lane' FROM job j ORDER BY 1"),
        shown
    );
    assert_eq!(
        c.enqueue("hold", "unique_key => 'k', tenant => 't'"),
        jobs[0].job,
        "it has its key"
    );
    assert_ne!(
        c.enqueue("completed", "unique_key => 'k', tenant => 't'"),
        jobs[1].job
    );
    // Without its row nothing can be done.
    let nowhere = Held {
        job: c.one("SELECT uuid_v7()"),
        ..jobs[0].clone()
    };
    assert_eq!(
        w.reattach(
            &mut c,
            &[statements[0].clone(), nowhere.item("hold", "")],
            &[],
            ""
        ),
        ["kept", "stop"]
    );
    lost.sound();
}

/// A dead letter that a person retried; the retry and its run were lost (d).
fn a_lost_retry(lab: &Lab) {
    let name = "retried";
    let (mut w, first) = {
        let db = lab.db(name);
        let mut c = db.connect();
        let mut w = Worker::register(&mut c);
        c.enqueue("m", "unique_key => 'k'");
        let held = w.claim_one(&mut c, "m");
        w.end(&mut c, "failed", &held, r#","final":true"#);
        (w, held)
    };
    let lost = lose_tail(lab, name);
    let again = {
        let mut c = lab.reopen("migrated").connect();
        c.run(&format!("SELECT retry('{}')", first.job));
        w.claim_one(&mut c, "m")
    };
    let mut c = lost.connect();
    c.lose_here();
    assert_eq!(
        w.reattach(
            &mut c,
            &[
                first.item("failed", r#","final":true"#),
                again.item("completed", "")
            ],
            &[],
            ""
        ),
        ["done", "done completed"]
    );
    assert_eq!(c.one("SELECT review_action FROM dead_letter_jobs"), "retry");
    assert_eq!(
        c.list("SELECT run, outcome, applied FROM attempts ORDER BY run"),
        ["1|failed|t", "3|completed|t"]
    );
    lost.sound();
}

/// What the database shows under a worker that does not name it was claimed by a call whose answer it never read.
fn ghosts(lab: &Lab) {
    let db = lab.db("unnamed");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    c.enqueue("m", "");
    let held = w.claim(&mut c, "m", 2);
    c.lose_here();
    assert_eq!(
        w.reattach(&mut c, &[held[0].item("hold", "")], &[], ""),
        ["kept"]
    );
    assert_eq!(c.state(&held[0].job), "running/1");
    assert_eq!(c.state(&held[1].job), "pending/0");
    // A claim of the new epoch is not touched by a second word.
    let new = w.claim_one(&mut c, "m");
    w.reattach(&mut c, &[held[0].item("hold", "")], &[], "");
    assert_eq!(c.state(&new.job), "running/1");
    db.sound();
}

/// M13: a daemon that was restarted on its state_dir writes what its predecessor finished, and frees its jobs at once.
fn predecessors(lab: &Lab) {
    let db = lab.db("predecessors");
    let mut c = db.connect();
    let mut dead = Worker::register(&mut c);
    c.enqueue("m", "");
    c.enqueue("m", "");
    let held = dead.claim(&mut c, "m", 2);
    let mut w = Worker::register(&mut c);
    let options = format!(r#","predecessors":["{}"]"#, dead.id);
    assert_eq!(
        w.reattach(&mut c, &[held[0].item("completed", "")], &[], &options),
        ["done completed"]
    );
    assert_eq!(c.state(&held[1].job), "pending/1");
    assert_eq!(dead.beat(&mut c, &[]).unwrap_err().code, "TN004");
    assert_eq!(
        c.one(&format!(
            "SELECT status FROM workers WHERE id = '{}'",
            dead.id
        )),
        "lost"
    );
    db.sound();
}

fn what_is_refused(lab: &Lab) {
    let db = lab.db("bad_statements");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    let held = Held {
        job: w.id.clone(),
        run: 1,
        token: w.id.clone(),
        attempt: 1,
        call: 1,
    };
    for statements in [
        "{}".to_owned(),
        "[1]".to_owned(),
        r#"[{"kind":"hold"}]"#.to_owned(),
        format!("[{}]", held.item("ghost", "")),
        format!("[{}]", held.item("hold", "").replace(r#""call":1,"#, "")),
        format!("[{}]", held.item("hold", r#","row":{"data":1}"#)),
    ] {
        assert_eq!(
            c.code(&format!(
                "SELECT reattach('{}', '{}', 1, '{statements}')",
                w.id, w.epoch
            )),
            "TN007",
            "{statements}"
        );
    }
}

/// M12: a lease with a time of its own stays the job's through a window, also without its daemon.
fn held_over_the_switch(lab: &Lab) {
    let db = lab.db("remote");
    let mut c = db.connect();
    let (mut w, mut other) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    c.run(&format!(
        r#"SELECT hold('{}', '{}', '[{{"job":"{}","token":"{}","for_ms":600000}}]')"#,
        w.id, w.epoch, held.job, held.token
    ));
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    other.reattach(&mut c, &[], &[], "");
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(
        c.state(&held.job),
        "running/1",
        "no ghost: it does not depend on who names it"
    );
    assert_eq!(other.end(&mut c, "completed", &held, ""), "done completed");
    db.sound();
}
