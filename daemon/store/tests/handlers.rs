//! What handlers may say beyond done and failed: the mark of a job that runs alone, and the watermark of a series.

use crate::support::{Conn, Held, Lab, Worker};

#[test]
fn handlers() {
    let lab = Lab::start();
    a_crash_with_others_marks_the_job(&lab);
    a_mark_outlives_a_switch(&lab);
    a_series_moves_with_its_completions(&lab);
    a_watermark_waits_for_nobody_else(&lab);
    a_watermark_does_not_go_back_in_a_switch(&lab);
    a_bad_series_is_named(&lab);
}

/// Whether the claimed job is to run alone.
fn is_marked(c: &mut Conn, job: &str) -> bool {
    c.one(&format!(
        "SELECT flags & 128 <> 0 FROM (SELECT id, flags FROM lease UNION ALL SELECT id, flags FROM ready UNION ALL SELECT id, flags FROM later) x WHERE id = '{job}'"
    )) == "t"
}

fn a_crash_with_others_marks_the_job(lab: &Lab) {
    let db = lab.db("marked");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "max_attempts => 2");
    let held = w.claim_one(&mut c, "m");
    assert_eq!(
        w.end(&mut c, "crashed", &held, r#","error":"it died""#),
        "done pending"
    );
    // Said again, as after a lost answer.
    assert_eq!(w.end(&mut c, "crashed", &held, ""), "done");
    assert_eq!(c.state(&held.job), "pending/0");
    assert!(is_marked(&mut c, &held.job));
    // The mark stays over everything but the end of the job, and over the way through `later`.
    for (kind, more, attempts) in [
        ("released", "", "0"),
        ("snoozed", r#","delay_ms":60000"#, "0"),
        ("failed", r#","error":"no","delay_ms":60000"#, "1"),
    ] {
        let held = w.claim_one(&mut c, "m");
        assert!(is_marked(&mut c, &held.job), "{kind}");
        w.end(&mut c, kind, &held, more);
        assert!(is_marked(&mut c, &held.job), "{kind}");
        c.run("UPDATE later SET due = now()");
        c.run(&format!("SELECT promote('{}')", w.epoch));
        assert_eq!(
            c.state(&held.job),
            format!("pending/{attempts}"),
            "{kind}{more}"
        );
    }
    let last = w.claim_one(&mut c, "m");
    assert_eq!(
        w.end(&mut c, "failed", &last, r#","error":"it died again""#),
        "done failed"
    );
    assert_eq!(
        c.list(&format!(
            "SELECT outcome, attempt, error FROM attempts WHERE job_id = '{}' ORDER BY run",
            last.job
        )),
        [
            "crashed|1|it died",
            "released|1|~",
            "snoozed|1|~",
            "failed|1|no",
            "failed|2|it died again"
        ]
    );
    // A person who has looked at it lets it run as any other.
    c.run(&format!("SELECT retry('{}')", last.job));
    w.claim_one(&mut c, "m");
    assert!(!is_marked(&mut c, &last.job));
    db.sound();
}

fn a_mark_outlives_a_switch(lab: &Lab) {
    let db = lab.db("marked_switch");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    w.end(&mut c, "crashed", &held, "");
    // The claim that follows is lost.
    let lost = Held {
        run: 2,
        token: c.one("SELECT random_uuid()"),
        ..held
    };
    c.lose_here();
    assert_eq!(
        w.reattach(&mut c, &[lost.item("hold", "")], &[], ""),
        ["kept"]
    );
    assert!(is_marked(&mut c, &lost.job));
    // Ends of before that were answered are said again too.
    assert_eq!(w.end(&mut c, "released", &lost, ""), "done pending");
    let again = w.claim_one(&mut c, "m");
    c.lose_here();
    let says = [again.item("crashed", r#","confirmed":true"#)];
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["done scheduled"]);
    db.sound();
}

const SERIES: &str = r#"options => '{"watermark":"s"}'"#;

fn watermark(c: &mut Conn) -> Vec<String> {
    c.list("SELECT tenant_id, name, value, job_id FROM watermarks")
}

/// Claims one job of the series, and says what its handler gets.
fn claim(c: &mut Conn, w: &mut Worker) -> (Held, String) {
    w.call += 1;
    let rows = c.list(
        &w.claim_sql("m", 1)
            .replace("token, attempt", "token, attempt, watermark"),
    );
    let (row, got) = rows[0].rsplit_once('|').unwrap();
    (Held::read(row, w.call), got.to_owned())
}

fn a_series_moves_with_its_completions(lab: &Lab) {
    let db = lab.db("series");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for more in [SERIES, SERIES, SERIES, ""] {
        c.enqueue("m", more);
    }
    let (first, got) = claim(&mut c, &mut w);
    assert_eq!(got, "~");
    let until = r#","watermark":{"until":18446744073709551616}"#;
    // Only a completion counts, and only once.
    let kept = r#","watermark":1,"delay_ms":0"#;
    w.end(&mut c, "failed", &first, kept);
    assert_eq!(watermark(&mut c), Vec::<String>::new());
    let (second, got) = claim(&mut c, &mut w);
    assert_eq!(got, "~");
    assert_eq!(w.end(&mut c, "completed", &second, until), "done completed");
    assert_eq!(w.end(&mut c, "completed", &second, until), "done");
    let stands = [format!(
        r#"default|s|{{"until": 18446744073709551616}}|{}"#,
        second.job
    )];
    assert_eq!(watermark(&mut c), stands);
    let (third, got) = claim(&mut c, &mut w);
    assert_eq!(got, r#"{"until": 18446744073709551616}"#);
    // A completion that says nothing of it leaves it.
    w.end(&mut c, "completed", &third, "");
    assert_eq!(watermark(&mut c), stands);
    // And so does a job of no series, whose daemon should have refused it.
    let (other, got) = claim(&mut c, &mut w);
    assert_eq!(got, "~");
    w.end(&mut c, "completed", &other, r#","watermark":9"#);
    assert_eq!(watermark(&mut c), stands);
    // Of one tenant only.
    c.enqueue("m", &format!("tenant => 'other', {SERIES}"));
    c.run("DELETE FROM later");
    let (theirs, got) = claim(&mut c, &mut w);
    assert_eq!(got, "~");
    w.end(&mut c, "completed", &theirs, r#","watermark":"x""#);
    assert_eq!(watermark(&mut c).len(), 2);
    // What was too late changes nothing.
    c.enqueue("m", SERIES);
    let (late, _) = claim(&mut c, &mut w);
    w.end(&mut c, "released", &late, "");
    assert_eq!(
        w.end(&mut c, "completed", &late, r#","watermark":"late""#),
        "history"
    );
    assert!(!watermark(&mut c).iter().any(|it| it.contains("late")));
}

/// Two batches that move the same watermarks wait for each other, and neither for ever: both take them in one order.
fn a_watermark_waits_for_nobody_else(lab: &Lab) {
    let db = lab.db("series_locks");
    let (mut c, mut other) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    for name in ["a", "b", "b", "a"] {
        c.enqueue("m", &format!(r#"options => '{{"watermark":"{name}"}}'"#));
    }
    let held = w.claim(&mut c, "m", 4);
    let ends = |at: [usize; 2]| {
        let items = at.map(|at| held[at].item("completed", &format!(r#","watermark":{at}"#)));
        w.finish_sql(&items)
    };
    c.run("BEGIN");
    c.list(&ends([0, 1]));
    let (pid, statement) = (other.pid(), ends([2, 3]));
    let waiting = std::thread::spawn(move || other.list(&statement));
    c.wait_until_blocked(&pid);
    c.run("COMMIT");
    assert_eq!(
        waiting.join().unwrap(),
        ["done completed", "done completed"]
    );
    assert_eq!(
        c.list("SELECT name, value FROM watermarks ORDER BY 1"),
        ["a|3", "b|2"]
    );
}

fn a_watermark_does_not_go_back_in_a_switch(lab: &Lab) {
    let db = lab.db("series_switch");
    let mut c = db.connect();
    let (mut w, mut other) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", SERIES);
    let (before, _) = claim(&mut c, &mut w);
    c.lose_here();
    other.reattach(&mut c, &[], &[], "");
    // A job that came with the new epoch has moved it on before the completion that was lost is written again.
    c.enqueue("m", SERIES);
    let (new, _) = claim(&mut c, &mut other);
    other.end(&mut c, "completed", &new, r#","watermark":2"#);
    let says = [before.item("completed", r#","confirmed":true,"watermark":1"#)];
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["done completed"]);
    assert_eq!(watermark(&mut c), [format!("default|s|2|{}", new.job)]);
}

fn a_bad_series_is_named(lab: &Lab) {
    let mut c = lab.db("bad_series").connect();
    for options in [
        r#"{"watermark":""}"#,
        r#"{"watermark":1}"#,
        r#"{"watermark":null}"#,
    ] {
        let refusal = c.refusal(&format!("SELECT enqueue('m', options => '{options}')"));
        assert_eq!(refusal.code, "TN007", "{refusal:?}");
        assert!(refusal.message.contains("options.watermark"), "{refusal:?}");
    }
}
