//! The record of switches, what a server shows of itself, and a copy on another system that a person has to accept.

use crate::support::{Conn, Lab, Worker};

#[test]
fn switches() {
    let lab = Lab::start();
    what_a_server_shows(&lab);
    the_record(&lab);
    another_system(&lab);
    a_copy_that_has_here(&lab);
    a_copy_without_sequences(&lab);
    a_server_that_does_not_tell(&lab);
    what_became_of_jobs(&lab);
    an_old_primary_in_place_of_a_newer_one(&lab);
    no_newer_syntax();
}

fn gate(c: &mut Conn) -> String {
    c.one("SELECT gate FROM cluster")
}

/// Nothing happened to this server, so it would take its workers' old epoch for good; but they come from the other one.
fn an_old_primary_in_place_of_a_newer_one(lab: &Lab) {
    let db = lab.db("in_place");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    let accept = "SELECT accept_cluster('it burnt', '{\"by\":\"ann\",\"timeline\":9}')";
    assert_eq!(c.one(accept), "window");
    assert_eq!(c.code(&w.claim_sql("m", 1)), "TN001");
    w.reattach(&mut c, &[held.item("hold", "")], &[], "");
    assert_eq!(gate(&mut c), "open");
    assert_eq!(
        c.one("SELECT cause, decided_by, decision FROM switches"),
        "accepted|ann|accepted in place of timeline 9: it burnt"
    );
    assert_eq!(
        c.one("SELECT instead_of, accepted IS NULL FROM cluster"),
        "9|t"
    );
    // Said again, it begins nothing anew.
    assert_eq!(c.code(accept), "TN006");
    db.sound();
}

fn what_a_server_shows(lab: &Lab) {
    let db = lab.db("probe");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let look = |c: &mut Conn, w: &Worker| {
        c.one(&format!(
            "SELECT in_recovery, read_only, epoch = '{0}', epoch_no, gate, in_epoch, beat, system_id = (SELECT system_identifier FROM pg_control_system()), \
             timeline, started_at = pg_postmaster_start_time(), swept_at IS NOT NULL FROM probe('{1}')",
            w.epoch, w.id
        ))
    };
    assert_eq!(look(&mut c, &w), "f|f|t|1|open|t|0|t|1|t|t");
    w.beat(&mut c, &[]).unwrap();
    assert_eq!(look(&mut c, &w), "f|f|t|1|open|t|1|t|1|t|t");
    assert_eq!(c.one("SELECT beat FROM probe(random_uuid())"), "~");
    c.run("SET default_transaction_read_only = on");
    assert_eq!(
        c.one(&format!("SELECT read_only FROM probe('{}')", w.id)),
        "t"
    );
    c.run("SET default_transaction_read_only = off");
    // Also before anybody has opened the epoch.
    c.lose_here();
    assert_eq!(look(&mut c, &w), "f|f|t|1|open|f|1|t|1|t|t");
    w.reattach(&mut c, &[], &[], "");
    c.move_to_other_system();
    assert_eq!(look(&mut c, &w), "f|f|t|2|open|f|1|t|1|t|t");
    db.sound();
}

fn the_record(lab: &Lab) {
    let db = lab.db("record");
    let mut c = db.connect();
    let (mut w, mut other) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", "");
    c.run("UPDATE sweep SET swept_at = swept_at - interval '7 s'");
    let swept = c.one("SELECT swept_at FROM sweep");
    c.lose_here();
    w.reattach(&mut c, &[], &[], r#","without_primary_ms":1500"#);
    let line = "SELECT epoch_no, cause, opened_by, timeline, previous_timeline, system_id = previous_system_id, server_started_at = pg_postmaster_start_time(), \
                last_sweep_at, without_primary_sec, closed_at IS NULL, first_claim_at IS NULL, absent_workers FROM switches";
    assert_eq!(
        c.one(line),
        format!("2|crash|{}|1|1|t|t|{swept}|1.5|t|t|{{{}}}", w.id, other.id)
    );
    // The longest time of all counts; nothing from before is claimed in the window.
    c.enqueue("new", "");
    assert_eq!(w.claim(&mut c, "%", 9).len(), 1);
    other.reattach(&mut c, &[], &[], r#","without_primary_ms":900"#);
    assert_eq!(
        c.one("SELECT without_primary_sec, window_sec >= 0, first_claim_at IS NULL, absent_workers FROM switches"),
        "1.5|t|t|~"
    );
    let closed = c.one("SELECT closed_at FROM switch");
    assert_eq!(other.claim(&mut c, "m", 1).len(), 1);
    let first = c.one("SELECT first_claim_at FROM switch WHERE first_claim_at >= closed_at");
    c.enqueue("m", "");
    other.claim_one(&mut c, "m");
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(
        c.one("SELECT closed_at, first_claim_at FROM switch"),
        format!("{closed}|{first}"),
        "each is noted once"
    );
    // The timeline tells a promotion from a crash.
    c.run("UPDATE cluster SET timeline = 0");
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(
        c.list("SELECT epoch_no, cause, timeline FROM switches ORDER BY 1"),
        ["2|crash|1", "3|promotion|1"]
    );
    assert_eq!(c.one("SELECT timeline FROM cluster"), "1");
    db.sound();
}

fn another_system(lab: &Lab) {
    let db = lab.db("other_system");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    c.move_to_other_system();
    c.lose_here();
    assert_eq!(
        w.reattach(&mut c, &[held.item("hold", "")], &[], ""),
        ["kept"]
    );
    let new = c.enqueue("m", "");
    assert_eq!(
        c.one("SELECT gate, unaccepted, uncovered FROM cluster"),
        "hold|t|f"
    );
    assert!(w.claim(&mut c, "%", 9).is_empty(), "nothing is claimed");
    for act in [
        format!("cancel('{new}')"),
        format!("retry('{job}')"),
        format!("complete_manually('{new}', 'ann')"),
        format!("move_to_dead_letter('{new}')"),
    ] {
        let refusal = c.refusal(&format!("SELECT {act}"));
        assert_eq!(refusal.code, "TN003", "{act}");
        assert!(
            refusal.message.contains("another system") && refusal.hint.contains("cluster status"),
            "{refusal:?}"
        );
    }
    assert_eq!(c.code("SELECT resume_cluster()"), "TN006");
    for reason in ["''", "'  '", "NULL"] {
        let statement = format!("SELECT accept_cluster({reason})");
        assert_eq!(c.code(&statement), "TN007", "{reason}");
    }
    assert_eq!(
        c.one("SELECT accept_cluster('pg_upgrade to 18', '{\"by\":\"ann\"}')"),
        "open",
        "all have spoken"
    );
    assert_eq!(c.code("SELECT accept_cluster('again')"), "TN006");
    assert_eq!(
        c.one("SELECT cause, decision, decided_by, decided_at IS NOT NULL, closed_at IS NOT NULL, system_id <> previous_system_id FROM switches"),
        "other system|accepted: pg_upgrade to 18|ann|t|t|t"
    );
    assert_eq!(w.end(&mut c, "completed", &held, ""), "done completed");
    assert_eq!(w.claim(&mut c, "m", 9).len(), 2);
    // It is known now: a crash here is only a crash.
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(gate(&mut c), "open");
    db.sound();
}

/// pg_upgrade and pg_dump copy `here` too, so nothing is missing: the identity of the system alone tells.
fn a_copy_that_has_here(lab: &Lab) {
    let db = lab.db("with_here");
    let mut c = db.connect();
    let (mut w, mut other) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", "");
    c.move_to_other_system();
    assert_eq!(
        c.code("SELECT accept_cluster('too soon')"),
        "TN006",
        "nobody has seen it yet"
    );
    let new = Worker::register(&mut c);
    assert_eq!(gate(&mut c), "hold", "whoever comes first sees it");
    assert_ne!(new.epoch, w.epoch);
    assert_eq!(w.try_claim(&mut c, "m", 1).unwrap_err().code, "TN001");
    w.reattach(&mut c, &[], &[], "");
    // The hold outlasts a crash; those who have not spoken are waited for after the decision.
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(gate(&mut c), "hold");
    assert_eq!(c.one("SELECT accept_cluster('moved')"), "window");
    other.reattach(&mut c, &[], &[], "");
    assert_eq!(
        gate(&mut c),
        "window",
        "the new one, too, is of the last epoch"
    );
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        new.id, w.epoch
    ));
    c.run("SELECT close_window(false)");
    assert_eq!(w.claim(&mut c, "m", 1).len(), 1);
    db.sound();
}

/// Logical replication brings rows and no values of sequences.
fn a_copy_without_sequences(lab: &Lab) {
    let db = lab.db("no_sequences");
    let mut c = db.connect();
    let (mut w, other) = (Worker::register(&mut c), Worker::register(&mut c));
    for _ in 0..5 {
        c.enqueue("m", "");
    }
    c.run("ALTER SEQUENCE ready_pos RESTART");
    c.move_to_other_system();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(c.one("SELECT accept_cluster('blue to green')"), "window");
    let new = c.enqueue("m", "");
    let claimed = w.claim(&mut c, "m", 9);
    assert_eq!(claimed.len(), 1, "nothing from before");
    assert_eq!(claimed[0].job, new);
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}'); SELECT close_window(false)",
        other.id, w.epoch
    ));
    assert_eq!(w.claim(&mut c, "m", 9).len(), 5);
    db.sound();
}

/// A managed service refuses to say what it is: what was known stays known.
fn a_server_that_does_not_tell(lab: &Lab) {
    let db = lab.db("silent_server");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let known = c.one("SELECT system_id, timeline FROM cluster");
    c.run("BEGIN");
    c.run("CREATE OR REPLACE FUNCTION server_facts(OUT system_id bigint, OUT timeline int, OUT started_at timestamptz) LANGUAGE sql AS 'SELECT NULL::bigint, NULL::int, NULL::timestamptz'");
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(c.one("SELECT system_id, timeline FROM cluster"), known);
    assert_eq!(c.one("SELECT cause, system_id FROM switch"), "unknown|~");
    assert_eq!(
        c.one(&format!(
            "SELECT system_id, timeline, in_epoch FROM probe('{}')",
            w.id
        )),
        "~|~|t"
    );
    c.run("ROLLBACK");
    db.sound();
}

fn what_became_of_jobs(lab: &Lab) {
    let db = lab.db("became");
    let mut c = db.connect();
    let (mut w, mut absent) = (Worker::register(&mut c), Worker::register(&mut c));
    let held = ["ended", "stopped"].map(|kind| {
        c.enqueue(kind, "");
        w.claim_one(&mut c, kind)
    });
    c.enqueue("recovered", "");
    absent.claim_one(&mut c, "recovered");
    c.run("DELETE FROM lease l USING job j WHERE j.id = l.id AND j.job_type = 'stopped'");
    c.run("INSERT INTO outcome (id, status, run, attempts, epoch_no, lane, flags, finished_at) SELECT id, 'cancelled', 2, 1, 1, lane, 0, now() FROM job WHERE job_type = 'stopped'");
    c.lose_here();
    let says = [
        held[0].item("completed", r#","confirmed":true"#),
        held[1].item("hold", ""),
    ];
    assert_eq!(
        w.reattach(&mut c, &says, &[], ""),
        ["done completed", "stop"]
    );
    c.run("UPDATE cluster SET opened_at = opened_at - interval '31 s'; UPDATE beat SET beat_at = beat_at - interval '31 s'");
    w.beat(&mut c, &[]).unwrap();
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    assert_eq!(
        c.one(&format!(
            "SELECT gate, recovered, lost FROM sweep('{}')",
            w.epoch
        )),
        "open|1|1"
    );
    assert_eq!(
        c.one("SELECT written_again, claimed_again, put_back, recovered, rerun, stopped, set_aside, absent_workers FROM switches"),
        format!("1|0|0|1|0|0|0|{{{}}}", absent.id),
        "a handler whose end is known was stopped by that, not by the switch"
    );
    assert_eq!(
        c.list("SELECT job_type, what, run, worker_id, status FROM switch_jobs ORDER BY 1"),
        [
            format!("ended|written_again|1|{}|completed", w.id),
            format!("recovered|recovered|1|{}|pending", absent.id)
        ]
    );
    db.sound();
}

/// Version 12 must take the migrations: none of what came later is in them.
fn no_newer_syntax() {
    for migration in tenure_store::migrate::MIGRATIONS {
        let text = migration.sql.to_lowercase();
        for newer in [
            "begin atomic",
            "multirange",
            " materialized view if",
            "nulls not distinct",
            "security_invoker",
            "merge into",
            "any_value",
            "json_table",
            "regexp_like",
            "regexp_count",
            "date_bin",
            "bit_count",
            "unistr(",
            "pg_snapshot_xmin",
            "pg_current_xact_id",
            "trim_array",
            "string_to_table",
            "create or replace trigger",
            "drop expression",
            "['",
        ] {
            assert!(!text.contains(newer), "{}: {newer}", migration.name);
        }
    }
}
