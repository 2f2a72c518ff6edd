//! Durability that is asked for: it holds for the transaction that asks, and is never lowered.

use crate::support::{Conn, Lab, Worker};

#[test]
fn durability() {
    let lab = Lab::start();
    local(&lab);
    what_cannot_be_given(&lab);
    replicated(&lab);
}

/// The level of the transaction after the statement, which is then undone.
fn level_after(c: &mut Conn, before: &str, statement: &str) -> String {
    c.run(&format!("SET synchronous_commit = {before}"));
    c.run("BEGIN");
    c.run(statement);
    let level = c.one("SHOW synchronous_commit");
    c.run("ROLLBACK");
    assert_eq!(
        c.one("SHOW synchronous_commit"),
        before,
        "no longer than the transaction"
    );
    level
}

/// Everything that takes an option of durability.
fn statements(w: &Worker, durability: &str) -> Vec<String> {
    let option = format!(r#"{{"durability":"{durability}"}}"#);
    let (id, epoch) = (&w.id, &w.epoch);
    vec![
        format!("SELECT enqueue('m', options => '{option}')"),
        format!("SELECT enqueue_many('[{{\"job_type\":\"m\"}}]', '{option}')"),
        format!(
            "SELECT enqueue_many('[{{\"job_type\":\"m\"}},{{\"job_type\":\"m\",\"options\":{option}}}]')"
        ),
        format!("INSERT INTO jobs (job_type, options) VALUES ('m', '{option}')"),
        format!(
            "SELECT claim_job_batch('{id}', '{epoch}', 9, '{{}}', '{{}}', options => '{option}')"
        ),
        format!("SELECT finish('{id}', '{epoch}', '[]', '{option}')"),
        format!("SELECT complete('{id}', '{epoch}', '[]', '{option}')"),
    ]
}

fn local(lab: &Lab) {
    let db = lab.db("durable_local");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    for statement in statements(&w, "local") {
        assert_eq!(
            level_after(&mut c, "off", &statement),
            "local",
            "{statement}"
        );
        for level in ["local", "remote_write", "on", "remote_apply"] {
            assert_eq!(level_after(&mut c, level, &statement), level, "{statement}");
        }
    }
    assert_eq!(
        level_after(&mut c, "off", "SELECT enqueue('m')"),
        "off",
        "as configured when nobody asks"
    );
    db.sound();
}

fn what_cannot_be_given(lab: &Lab) {
    let db = lab.db("not_durable");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    for statement in statements(&w, "replicated") {
        let refusal = c.refusal(&statement);
        assert_eq!(refusal.code, "TN006", "{statement}");
        assert!(
            refusal.message.contains("synchronous_standby_names")
                && refusal.hint.contains("durability local"),
            "{refusal:?}"
        );
    }
    for statement in statements(&w, "twice") {
        let refusal = c.refusal(&statement);
        assert_eq!(refusal.code, "TN007", "{statement}");
        assert!(refusal.message.contains("replicated"), "{refusal:?}");
    }
    for bad in ["null", "1", "true", r#"["local"]"#] {
        let statement = format!(r#"SELECT enqueue('m', options => '{{"durability":{bad}}}')"#);
        assert_eq!(c.code(&statement), "TN007", "{bad}");
    }
    assert_eq!(c.one("SELECT count(*) FROM job"), "0");
    db.sound();
}

/// A server with a synchronous standby, as far as its settings say: nothing is committed there.
fn replicated(lab: &Lab) {
    let db = lab.db("replicated");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    c.run("SET synchronous_commit = local");
    c.run("ALTER SYSTEM SET synchronous_standby_names = 'standby'");
    c.run("SELECT pg_reload_conf()");
    c.wait_for("SHOW synchronous_standby_names", "standby");
    for statement in statements(&w, "replicated") {
        for level in ["off", "local", "remote_write"] {
            assert_eq!(level_after(&mut c, level, &statement), "on", "{statement}");
        }
        assert_eq!(
            level_after(&mut c, "remote_apply", &statement),
            "remote_apply"
        );
    }
    // The most careful of several decides.
    let both = r#"SELECT enqueue_many('[{"job_type":"m","options":{"durability":"replicated"}},{"job_type":"m","options":{"durability":"local"}}]')"#;
    assert_eq!(level_after(&mut c, "off", both), "on");
    c.run("SET synchronous_commit = local");
    c.run("ALTER SYSTEM RESET synchronous_standby_names");
    c.run("SELECT pg_reload_conf()");
    db.sound();
}
