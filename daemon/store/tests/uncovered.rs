//! More was lost than anybody remembers: the gate is on hold until a person decides, and what they decide is done.

use crate::reattach::lose_tail;
use crate::support::{Conn, Lab, Worker};

#[test]
fn uncovered() {
    let lab = Lab::start();
    whose_memory_has_a_gap(&lab);
    resume_sets_aside(&lab);
    resume_with_rerun(&lab);
    who_has_spoken_keeps_its_jobs(&lab);
    several_with_gaps(&lab);
    a_copy_and_a_gap(&lab);
    retry_of_a_switch(&lab);
}

fn covers(w: &Worker, from: i64, more: &str) -> String {
    format!(
        r#","covers":[{{"worker":"{}","from":{from},"ms":60000{more}}}]"#,
        w.id
    )
}

fn gate(c: &mut Conn) -> String {
    c.one("SELECT gate FROM cluster")
}

/// A worker whose last beat in the database is 5.
fn worker_at_5(c: &mut Conn) -> Worker {
    let w = Worker::register(c);
    c.run(&format!(
        "UPDATE beat SET beat = 5 WHERE worker = '{}'",
        w.id
    ));
    Worker { beat: 9, ..w }
}

fn whose_memory_has_a_gap(lab: &Lab) {
    let unknown = Worker {
        id: "00000000-0000-4000-8000-000000000009".to_owned(),
        epoch: String::new(),
        call: 0,
        beat: 0,
    };
    let predecessor = r#","predecessor":true"#;
    // It was the worker of which the database shows beat 5, before it was this one.
    let formerly = "formerly";
    // Of itself or of a predecessor: from when on it remembers, and the gate then.
    let cases: [(&str, i64, &str, &str); 9] = [
        ("unknown", 5, formerly, "open"),
        ("unknown", 6, formerly, "hold"),
        ("itself", 0, "", "open"),
        ("itself", 5, "", "open"),
        ("itself", 6, "", "hold"),
        ("unknown", 0, "", "open"),
        ("unknown", 1, "", "hold"),
        ("unknown", 1, predecessor, "open"),
        ("itself", 6, predecessor, "hold"),
    ];
    for (who, from, more, expected) in cases {
        let db = lab.db("gaps");
        let mut c = db.connect();
        let mut w = worker_at_5(&mut c);
        c.lose_here();
        let more = if more == formerly {
            format!(r#","formerly":["{}"]"#, w.id)
        } else {
            more.to_owned()
        };
        let more = more.as_str();
        let options = covers(if who == "itself" { &w } else { &unknown }, from, more);
        w.reattach(&mut c, &[], &[], &options);
        assert_eq!(gate(&mut c), expected, "{who} from {from}{more}");
        let switch = "SELECT uncovered_until IS NOT NULL FROM switch";
        let uncovered = c.one(switch) == "t";
        assert_eq!(uncovered, expected == "hold");
        // Said again, its beat proves that all it knows is here.
        w.reattach(&mut c, &[], &[], &options);
        if uncovered && who == "itself" {
            assert_eq!(
                c.one("SELECT uncovered_sec BETWEEN -61 AND 61, decided_at IS NULL FROM switches"),
                "t|t"
            );
            c.run("SELECT resume_cluster()");
            w.reattach(&mut c, &[], &[], &options);
            assert_eq!(gate(&mut c), "open", "decided once");
        }
        db.sound();
    }
}

fn resume_sets_aside(lab: &Lab) {
    let db = lab.db("set_aside");
    let mut c = db.connect();
    let (mut w, mut silent) = (worker_at_5(&mut c), Worker::register(&mut c));
    let ready = c.enqueue("ready", "unique_key => 'k'");
    let due = c.enqueue("due", "unique_key => 'k', run_at => now() + interval '1 h'");
    let later = c.enqueue("later", "run_at => now() + interval '1 h'");
    c.run(&format!(
        "UPDATE later SET due = now() - interval '1 s' WHERE id = '{due}'"
    ));
    let requeued = c.enqueue("requeued", "");
    let back = w.claim_one(&mut c, "requeued");
    w.end(&mut c, "released", &back, "");
    let running = c.enqueue("running", "unique_key => 'k'");
    let orphan = silent.claim_one(&mut c, "running");
    let own_time = c.enqueue("own_time", "");
    let remote = silent.claim_one(&mut c, "own_time");
    c.run(&format!(
        r#"SELECT hold('{}', '{}', '[{{"job":"{}","token":"{}","for_ms":600000}}]')"#,
        silent.id, silent.epoch, remote.job, remote.token
    ));
    let mine = c.enqueue("mine", "");
    let held = w.claim_one(&mut c, "mine");
    c.lose_here();
    let options = covers(&w, 6, "");
    w.reattach(&mut c, &[held.item("hold", "")], &[], &options);
    let new = c.enqueue("new", "");
    let refusal = c.refusal(&format!("SELECT cancel('{ready}')"));
    assert_eq!(refusal.code, "TN003");
    assert!(refusal.message.contains("restored"), "{refusal:?}");
    assert!(w.claim(&mut c, "%", 9).is_empty());
    assert_eq!(c.code("SELECT accept_cluster('no')"), "TN006");
    assert_eq!(
        c.one("SELECT gate, set_aside FROM resume_cluster('{\"by\":\"ann\"}')"),
        "window|4",
        "the silent one is waited for"
    );
    assert_eq!(c.code("SELECT resume_cluster()"), "TN006");
    for (job, state) in [
        (&ready, "failed/0"),
        (&due, "failed/0"),
        (&requeued, "failed/0"),
        (&running, "failed/1"),
        (&later, "scheduled/0"),
        (&mine, "running/1"),
        (&own_time, "running/1"),
        (&new, "pending/0"),
    ] {
        assert_eq!(c.state(job), state);
    }
    assert_eq!(
        c.list("SELECT DISTINCT last_error LIKE 'it may have run already: % (switch 2)%', reviewed_at IS NULL FROM dead_letter_jobs"),
        ["t|t"]
    );
    assert_eq!(c.one("SELECT set_aside, decided_by FROM switches"), "4|ann");
    for job_type in ["ready", "due", "running"] {
        let again = c.enqueue(job_type, "unique_key => 'k'");
        assert!(
            ![&ready, &due, &running].contains(&&again),
            "its key is free"
        );
    }
    // The silent one comes: what it held has been decided.
    assert_eq!(
        silent.reattach(
            &mut c,
            &[orphan.item("completed", ""), remote.item("hold", "")],
            &[],
            ""
        ),
        ["history", "kept"]
    );
    assert_eq!(gate(&mut c), "open");
    // And a person decides about a letter, once its key is free.
    assert_eq!(c.one(&format!("SELECT retry('{requeued}')")), "pending");
    db.sound();
}

fn resume_with_rerun(lab: &Lab) {
    let db = lab.db("rerun_all");
    let mut c = db.connect();
    let mut w = worker_at_5(&mut c);
    let job = c.enqueue("m", "unique_key => 'k'");
    assert_eq!(c.code("SELECT resume_cluster()"), "TN006");
    c.lose_here();
    assert_eq!(
        c.code("SELECT resume_cluster()"),
        "TN002",
        "nobody has looked yet"
    );
    let options = covers(&w, 6, "");
    w.reattach(&mut c, &[], &[], &options);
    assert_eq!(
        c.one("SELECT gate, set_aside FROM resume_cluster('{\"rerun\":true}')"),
        "open|0"
    );
    assert_eq!(w.claim_one(&mut c, "m").job, job);
    assert!(
        c.one("SELECT decision FROM switches")
            .contains("runs again")
    );
    db.sound();
}

/// Also one whose registration was lost with the rest, and which nobody named.
fn who_has_spoken_keeps_its_jobs(lab: &Lab) {
    let db = lab.db("keeps");
    let mut c = db.connect();
    let (mut w, mut lost) = (worker_at_5(&mut c), Worker::register(&mut c));
    let job = c.enqueue("m", "");
    let held = lost.claim_one(&mut c, "m");
    c.run(&format!(
        "DELETE FROM worker WHERE id = '{0}'; DELETE FROM beat WHERE worker = '{0}'",
        lost.id
    ));
    c.lose_here();
    let options = covers(&w, 6, "");
    w.reattach(&mut c, &[], &[], &options);
    assert_eq!(
        lost.reattach(&mut c, &[held.item("hold", "")], &[], ""),
        ["kept"]
    );
    assert_eq!(
        c.one("SELECT gate, set_aside FROM resume_cluster()"),
        "open|0"
    );
    assert_eq!(c.state(&job), "running/1");
    db.sound();
}

fn several_with_gaps(lab: &Lab) {
    let db = lab.db("several_gaps");
    let mut c = db.connect();
    let (mut first, mut second) = (worker_at_5(&mut c), worker_at_5(&mut c));
    c.enqueue("m", "");
    c.lose_here();
    let options = covers(&first, 6, "");
    first.reattach(&mut c, &[], &[], &options);
    assert_eq!(
        c.one("SELECT gate, set_aside FROM resume_cluster()"),
        "window|1"
    );
    // Another gap is another decision.
    let options = covers(&second, 8, "");
    second.reattach(&mut c, &[], &[], &options);
    assert_eq!(gate(&mut c), "hold");
    assert_eq!(
        c.one("SELECT gate, set_aside FROM resume_cluster()"),
        "open|0"
    );
    assert_eq!(
        c.one("SELECT decision FROM switches"),
        "resumed: 1 jobs were set aside as dead letters; resumed: 0 jobs were set aside as dead letters"
    );
    db.sound();
}

fn a_copy_and_a_gap(lab: &Lab) {
    for accept_first in [true, false] {
        let db = lab.db("both");
        let mut c = db.connect();
        let mut w = worker_at_5(&mut c);
        c.enqueue("m", "");
        c.move_to_other_system();
        let options = covers(&w, 6, "");
        w.reattach(&mut c, &[], &[], &options);
        let (accept, resume) = (
            "SELECT accept_cluster('moved')",
            "SELECT gate FROM resume_cluster()",
        );
        let order = if accept_first {
            [accept, resume]
        } else {
            [resume, accept]
        };
        assert_eq!(c.one(order[0]), "hold", "both have to be decided");
        assert!(w.claim(&mut c, "m", 1).is_empty());
        assert_eq!(c.one(order[1]), "open");
        db.sound();
    }
}

/// Ends that were written again, of handlers whose effects were lost all the same.
fn retry_of_a_switch(lab: &Lab) {
    let name = "retry_switch";
    let kinds = ["again", "gone_on", "keyed", "given_up_key"];
    let mut w = {
        let db = lab.db(name);
        let mut c = db.connect();
        Worker::register(&mut c)
    };
    let lost = lose_tail(lab, name);
    let (says, jobs): (Vec<String>, Vec<String>) = {
        let mut c = lab.reopen("migrated").connect();
        kinds
            .map(|kind| {
                let job = c.enqueue(kind, "unique_key => 'k'");
                let held = w.claim_one(&mut c, kind);
                w.end(&mut c, "completed", &held, "");
                let row = crate::reattach::row(&mut c, &job);
                (
                    held.item("completed", &format!(r#"{row},"confirmed":true"#)),
                    job,
                )
            })
            .into_iter()
            .unzip()
    };
    let mut c = lost.connect();
    c.lose_here();
    c.run(&format!("SELECT open_epoch('{}')", w.id));
    // Its producer asked once more meanwhile, and that job runs: the key is not given back.
    let newer = c.enqueue("given_up_key", "unique_key => 'k'");
    c.run("UPDATE cluster SET gate = 'open'");
    w.epoch = c.one("SELECT epoch FROM cluster");
    let running = w.claim_one(&mut c, "given_up_key");
    assert_eq!(running.job, newer);
    c.run("UPDATE cluster SET gate = 'window'");
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["done completed"; 4]);
    assert_eq!(c.one("SELECT put_back, written_again FROM switches"), "4|4");
    c.run("UPDATE cluster SET gate = 'open'");
    assert_eq!(c.code("SELECT retry_switch(7)"), "TN005");
    c.enqueue("keyed", "unique_key => 'k'");
    let answers = c.list("SELECT j.job_type, r.answer FROM retry_switch(2) r JOIN job j ON j.id = r.job_id WHERE j.job_type IN ('again', 'given_up_key', 'keyed') ORDER BY 1");
    let taken = "refused: another live job has its unique key";
    assert_eq!(
        answers,
        [
            "again|pending".to_owned(),
            format!("given_up_key|{taken}"),
            format!("keyed|{taken}")
        ]
    );
    assert_eq!(c.state(&jobs[0]), "pending/0");
    // They have gone on: nothing happens to them any more.
    w.claim_one(&mut c, "gone_on");
    assert_eq!(
        c.list("SELECT r.answer FROM retry_switch(2) r JOIN job j ON j.id = r.job_id ORDER BY j.job_type"),
        [
            "has gone on since: pending",
            taken,
            "has gone on since: running",
            taken
        ]
    );
    c.lose_here();
    assert_eq!(c.code("SELECT retry_switch(2)"), "TN002");
    lost.sound();
}
