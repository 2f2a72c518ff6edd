//! Putting jobs in: one, many, by INSERT and by COPY, with ids and unique keys, and what is refused.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;

use crate::support::{Lab, Worker};

#[test]
fn enqueue() {
    let lab = Lab::start();
    one_and_its_defaults(&lab);
    what_is_refused(&lab);
    ids(&lab);
    unique_keys(&lab);
    unique_keys_of_two_at_once(&lab);
    many(&lab);
    the_view(&lab);
    copy(&lab);
    own_transactions(&lab);
    new_types_of_several_at_once(&lab);
}

fn one_and_its_defaults(lab: &Lab) {
    let db = lab.db("defaults");
    let mut c = db.connect();
    let job = c.enqueue("mail", "");
    assert_eq!(
        c.one(&format!(
            "SELECT job_type, tenant_id, shard, priority, status, data, attempts, max_attempts, run_at = created_at, unique_key, labels, waiting_for IS NOT NULL \
             FROM jobs WHERE id = '{job}'"
        )),
        "mail|default|default|0|pending|{}|0|~|t|~|{}|t"
    );
    let nulls =
        c.one("SELECT enqueue('mail', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)");
    assert_eq!(
        c.state(&nulls),
        "pending/0",
        "NULL is the default of each parameter"
    );
    let future = c.enqueue("mail", "run_at => now() + interval '1 hour'");
    assert_eq!(
        c.one(&format!(
            "SELECT status, waiting_for, run_at > now() + interval '59 min' FROM jobs WHERE id = '{future}'"
        )),
        "scheduled|time|t"
    );
    let past = c.enqueue("mail", "run_at => '-infinity'");
    assert_eq!(c.state(&past), "pending/0");
    // The order is by priority, and then first in, first out.
    let urgent = c.enqueue("mail", "priority => -5");
    let mut worker = Worker::register(&mut c);
    let order: Vec<String> = worker
        .claim(&mut c, "mail", 10)
        .into_iter()
        .map(|held| held.job)
        .collect();
    assert_eq!(order, [urgent, job, nulls, past]);
    // Ids are UUIDv7 of now, of all versions and variants only this.
    assert_eq!(
        c.one("SELECT count(*) FROM job WHERE id::text !~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab]'"),
        "0"
    );
    assert_eq!(
        c.one("SELECT abs(('x' || lpad(left(replace(uuid_v7()::text, '-', ''), 12), 16, '0'))::bit(64)::bigint - extract(epoch FROM clock_timestamp()) * 1000) < 5000"),
        "t"
    );
    // What is not ASCII names a job type as well as anything, under any locale.
    let job = c.enqueue("结算-月度", "");
    assert_eq!(c.state(&job), "pending/0");
    db.sound();
}

fn what_is_refused(lab: &Lab) {
    let db = lab.db("refused");
    let mut c = db.connect();
    let long = "x".repeat(201);
    for (call, says) in [
        ("NULL", "job_type is missing"),
        ("''", "job_type"),
        ("' mail'", "space"),
        ("'ma' || chr(10) || 'il'", "printable"),
        ("'mail*'", "*"),
        (&format!("'{long}'"), "200"),
        ("'m', unique_key => ''", "unique_key"),
        ("'m', max_attempts => 0", "max_attempts"),
        ("'m', timeout => '0 s'", "timeout"),
        ("'m', run_at => 'infinity'", "infinity"),
        ("'m', labels => '[]'", "labels"),
        ("'m', options => '{\"prio\":1}'", "prio"),
        ("'m', options => '{\"notify\":1}'", "notify"),
        ("'m', id => random_uuid()", "UUIDv7"),
        (
            "'m', id => uuid_v7(random_uuid(), now() + interval '2 days')",
            "future",
        ),
    ] {
        let refusal = c.refusal(&format!("SELECT enqueue({call})"));
        assert_eq!(refusal.code, "TN007", "{call}: {refusal:?}");
        assert!(refusal.message.contains(says), "{call}: {refusal:?}");
    }
    for (jobs, says) in [
        ("'{}'", "array"),
        ("NULL", "array"),
        ("'[1]'", "object"),
        ("'[null]'", "object"),
        (r#"'[{"job_type":"m","prio":1}]'"#, "prio"),
        (r#"'[{"job_type":"m"},{"job_type":""}]'"#, "job_type"),
    ] {
        let refusal = c.refusal(&format!("SELECT enqueue_many({jobs})"));
        assert_eq!(refusal.code, "TN007", "{jobs}: {refusal:?}");
        assert!(refusal.message.contains(says), "{jobs}: {refusal:?}");
    }
    assert_eq!(c.one("SELECT count(*) FROM job"), "0");
    assert!(
        c.list("SELECT enqueue_many('[]')").is_empty(),
        "no jobs, no ids, no error"
    );
}

fn ids(lab: &Lab) {
    let db = lab.db("ids");
    let mut c = db.connect();
    let mut worker = Worker::register(&mut c);
    let id = c.one("SELECT uuid_v7()");
    let with_id = format!("id => '{id}'");
    assert_eq!(c.enqueue("m", &with_id), id);
    assert_eq!(c.enqueue("m", &with_id), id, "again while it waits");
    let held = worker.claim_one(&mut c, "m");
    assert_eq!(
        c.enqueue("m", &format!("data => '[1]', {with_id}")),
        id,
        "again while it runs"
    );
    assert_eq!(worker.end(&mut c, "completed", &held, ""), "done completed");
    assert_eq!(c.enqueue("m", &with_id), id, "again after its end");
    assert_eq!(
        c.one("SELECT count(*), min(data::text), min(status) FROM jobs"),
        "1|{}|completed"
    );
    assert_eq!(
        c.list(&format!(
            r#"SELECT enqueue_many('[{{"job_type":"m","id":"{id}"}},{{"job_type":"m","id":"{id}"}}]')"#
        )),
        [id.clone(), id],
        "twice in one call"
    );
    assert_eq!(c.one("SELECT count(*) FROM job"), "1");
    db.sound();
}

fn unique_keys(lab: &Lab) {
    let db = lab.db("keys");
    let mut c = db.connect();
    let mut worker = Worker::register(&mut c);
    let first = c.enqueue("m", "unique_key => 'k'");
    assert_eq!(c.enqueue("m", "unique_key => 'k', data => '[2]'"), first);
    let others = [
        c.enqueue("m", "unique_key => 'k', tenant => 't'"),
        c.enqueue("n", "unique_key => 'k'"),
        c.enqueue("m", "unique_key => 'K'"),
    ];
    assert!(
        !others.contains(&first),
        "a key is one of a job type and a tenant"
    );
    let held = worker.claim_one(&mut c, "m");
    assert_eq!(held.job, first);
    assert_eq!(c.enqueue("m", "unique_key => 'k'"), first, "while it runs");
    worker.end(&mut c, "failed", &held, r#","delay_ms":3600000"#);
    assert_eq!(
        c.enqueue("m", "unique_key => 'k'"),
        first,
        "while it waits for its next attempt"
    );
    c.run(&format!("SELECT cancel('{first}')"));
    let second = c.enqueue("m", "unique_key => 'k'");
    assert_ne!(second, first, "the end frees the key");
    // An id that is known is answered by itself, whoever owns the key now, and takes no key.
    assert_eq!(
        c.enqueue("m", &format!("unique_key => 'k', id => '{first}'")),
        first
    );
    assert_eq!(
        c.enqueue("m", &format!("unique_key => 'other', id => '{first}'")),
        first
    );
    // Within one call.
    let ids = c.list(
        r#"SELECT enqueue_many('[{"job_type":"m","unique_key":"z"},{"job_type":"m","unique_key":"a"},{"job_type":"m","unique_key":"z"},
           {"job_type":"m","unique_key":"k"},{"job_type":"m"}]')"#,
    );
    assert_eq!(ids[0], ids[2]);
    assert_eq!(ids[3], second);
    let id = c.one("SELECT uuid_v7()");
    c.run(&format!(
        r#"SELECT enqueue_many('[{{"job_type":"m","unique_key":"p","id":"{id}"}},{{"job_type":"m","unique_key":"q","id":"{id}"}}]')"#
    ));
    assert_eq!(
        c.list("SELECT key FROM key_owner WHERE key IN ('p', 'q')"),
        ["p"],
        "one job takes one key"
    );
    db.sound();
}

fn unique_keys_of_two_at_once(lab: &Lab) {
    let db = lab.db("two_keys");
    let (mut a, mut b, mut watch) = (db.connect(), db.connect(), db.connect());
    let pid = b.pid();
    // The second waits for the first, then has its id; when the first rolls back it has its own.
    for (end, same) in [("COMMIT", true), ("ROLLBACK", false)] {
        a.run("BEGIN");
        let first = a.enqueue("m", &format!("unique_key => '{end}'"));
        let second = thread::scope(|scope| {
            let waiting = scope.spawn(|| b.enqueue("m", &format!("unique_key => '{end}'")));
            watch.wait_until_blocked(&pid);
            a.run(end);
            waiting.join().unwrap()
        });
        assert_eq!(first == second, same, "{end}");
    }
    // The same id twice at once, the second time with a key: there is one job and it has the first one's key.
    let id = a.one("SELECT uuid_v7()");
    a.run("BEGIN");
    a.enqueue("m", &format!("id => '{id}', unique_key => 'mine'"));
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| b.enqueue("m", &format!("id => '{id}', unique_key => 'another'")));
        watch.wait_until_blocked(&pid);
        a.run("COMMIT");
        assert_eq!(waiting.join().unwrap(), id);
    });
    db.sound();
    // In a snapshot that does not see the owner there is no right answer: the transaction must be repeated.
    a.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    a.run("SELECT count(*) FROM lane");
    b.enqueue("m", "unique_key => 'rr'");
    assert_eq!(a.code("SELECT enqueue('m', unique_key => 'rr')"), "40001");
    a.run("ROLLBACK");
    // Two calls with the same keys, or ids, in opposite order do not wait for each other in a circle.
    for round in 0..20 {
        let job = |index: usize| {
            if round % 2 == 0 {
                format!(r#"{{"job_type":"m","unique_key":"k{round}-{index}"}}"#)
            } else {
                let id = format!("01976e5c-0000-7000-8000-{round:06}{index:06}");
                format!(r#"{{"job_type":"m","id":"{id}"}}"#)
            }
        };
        let call = |jobs: Vec<String>| format!("SELECT enqueue_many('[{}]')", jobs.join(","));
        let up = call((0..400).map(job).collect());
        let down = call((0..400).rev().map(job).collect());
        thread::scope(|scope| {
            scope.spawn(|| a.run(&up));
            b.run(&down);
        });
    }
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
    db.sound();
}

fn many(lab: &Lab) {
    let db = lab.db("many");
    let mut c = db.connect();
    let ids = c.list(
        r#"SELECT enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 't' || i % 3, 'data', i, 'priority', 0)) FROM generate_series(1, 1000) i))"#,
    );
    assert_eq!(ids.len(), 1000);
    assert_eq!(
        c.one(&format!("SELECT data FROM jobs WHERE id = '{}'", ids[499])),
        "500",
        "ids are in the order of the jobs"
    );
    assert_eq!(
        c.one("SELECT bool_and(data::int = n) FROM (SELECT data, row_number() OVER (ORDER BY r.pos) n FROM ready r JOIN job USING (id)) x"),
        "t",
        "and so are the positions"
    );
    let all = c.list(
        r#"SELECT enqueue_many('[{"job_type":"m","data":{"a":1},"priority":3,"run_at":"2020-01-01T00:00:00Z","tenant":"t","unique_key":"k",
           "max_attempts":2,"timeout":"90 s","labels":{"l":"x"},"options":{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}]')"#,
    );
    assert_eq!(
        c.one(&format!(
            "SELECT data, priority, tenant_id, unique_key, max_attempts, timeout, labels, options FROM jobs WHERE id = '{}'",
            all[0]
        )),
        r#"{"a": 1}|3|t|k|2|00:01:30|{"l": "x"}|{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}"#
    );
    db.sound();
}

fn the_view(lab: &Lab) {
    let db = lab.db("inserts");
    let mut c = db.connect();
    let row = c.one(
        "INSERT INTO jobs (job_type, data, tenant_id, unique_key) VALUES ('m', '[1]', 't', 'k') RETURNING id, job_type",
    );
    let id = row.split('|').next().unwrap().to_owned();
    assert_eq!(
        c.one(
            "INSERT INTO jobs (job_type, tenant_id, unique_key) VALUES ('m', 't', 'k') RETURNING id"
        ),
        id,
        "a live key answers with its owner here too"
    );
    c.run(
        "INSERT INTO jobs (job_type, data) SELECT 'm', to_jsonb(i) FROM generate_series(1, 10) i",
    );
    assert_eq!(c.one("SELECT count(*) FROM jobs"), "11");
    for column in [
        "status",
        "shard",
        "result",
        "attempts",
        "created_at",
        "started_at",
        "completed_at",
        "worker_id",
        "last_error",
        "waiting_for",
    ] {
        let refusal = c.refusal(&format!(
            "INSERT INTO jobs (job_type, {column}) SELECT 'm', {column} FROM (SELECT 'x'::text status, 'x'::text shard, '1'::jsonb result, 1 attempts, \
             now() created_at, now() started_at, now() completed_at, uuid_v7() worker_id, 'x'::text last_error, 'x'::text waiting_for) x"
        ));
        assert_eq!(refusal.code, "TN007");
        assert!(
            refusal.message.contains(column) && refusal.hint.contains("Leave"),
            "{refusal:?}"
        );
    }
    for statement in ["UPDATE jobs SET priority = 1", "DELETE FROM jobs"] {
        let refusal = c.refusal(statement);
        assert_eq!(refusal.code, "TN007");
        assert!(refusal.hint.contains("cancel"), "{refusal:?}");
    }
    db.sound();
}

/// COPY into the view, by psql, since our own client has no data to copy.
fn copy(lab: &Lab) {
    let db = lab.db("copied");
    let mut psql = Command::new("psql")
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-c"])
        .arg("COPY tenure.jobs (job_type, data) FROM STDIN")
        .arg(lab.server.url("migrated", "postgres"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    psql.stdin
        .take()
        .unwrap()
        .write_all(b"m\t[1]\nm\t[2]\nn\t{\"a\": \"\xc3\xa9\"}\n")
        .unwrap();
    assert!(psql.wait().unwrap().success());
    let mut c = db.connect();
    assert_eq!(
        c.list("SELECT job_type, data, status FROM jobs ORDER BY data::text"),
        ["m|[1]|pending", "m|[2]|pending", "n|{\"a\": \"é\"}|pending"]
    );
    db.sound();
}

/// What a program enqueues in its own transaction appears with its commit, or never.
fn own_transactions(lab: &Lab) {
    let db = lab.db("own_transactions");
    let (mut c, mut other) = (db.connect(), db.connect());
    let mut worker = Worker::register(&mut other);
    c.run("BEGIN");
    let job = c.enqueue("m", "");
    assert_eq!(c.state(&job), "pending/0", "its own transaction sees it");
    assert_eq!(other.one("SELECT count(*) FROM jobs"), "0");
    assert!(worker.claim(&mut other, "m", 10).is_empty());
    c.run("ROLLBACK");
    assert_eq!(other.one("SELECT count(*) FROM jobs"), "0");
    c.run("BEGIN");
    let job = c.enqueue("m", "");
    assert_eq!(
        c.one(&format!("SELECT cancel('{job}')")),
        "cancelled",
        "and can take it back"
    );
    let kept = c.enqueue("m", "");
    c.run("COMMIT");
    assert_eq!(worker.claim_one(&mut other, "m").job, kept);
    db.sound();
}

fn new_types_of_several_at_once(lab: &Lab) {
    let db = lab.db("new_types");
    thread::scope(|scope| {
        for client in 0..4 {
            let db = &db;
            scope.spawn(move || {
                let mut c = db.connect();
                for number in 0..50 {
                    // Half of them go through the types from the other end.
                    let number = if client % 2 == 0 { number } else { 49 - number };
                    c.enqueue(&format!("type-{number}"), "");
                }
            });
        }
    });
    let mut c = db.connect();
    assert_eq!(
        c.one("SELECT count(*), max(lane) < 200 FROM lane"),
        "50|t",
        "one lane for each type"
    );
    assert_eq!(c.one("SELECT count(*) FROM jobs"), "200");
    db.sound();
}
