//! Who may do what, and that nothing of another schema is ever found.

use crate::support::{Conn, Db, Lab, Worker};

#[test]
fn roles() {
    let lab = Lab::start();
    let mut c = lab.reopen("migrated").connect();
    for role in ["producer", "worker", "monitor", "admin"] {
        c.run(&format!("CREATE ROLE {role} LOGIN IN ROLE tenure_{role}"));
    }
    c.run("CREATE ROLE stranger LOGIN");
    drop(c);
    what_each_may_do(&lab);
    tenants(&lab);
    hostile_search_path(&lab);
}

const INSUFFICIENT: &str = "42501";

fn what_each_may_do(lab: &Lab) {
    let db = lab.db("rights");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    let switch = c.one("SELECT epoch_no FROM switch");
    let (id, epoch) = (&w.id, &w.epoch);
    // Each statement with the roles that may run it: producer, worker, monitor, admin.
    let table = [
        (
            "SELECT count(*) FROM tenure.queue_metrics".to_owned(),
            "pwma",
        ),
        ("SELECT count(*) FROM tenure.workers".to_owned(), "pwma"),
        ("SELECT count(*) FROM tenure.switches".to_owned(), "pwma"),
        ("SELECT count(*) FROM tenure.switch_jobs".to_owned(), "wa"),
        (format!("SELECT tenure.probe('{id}')"), "wa"),
        ("SELECT tenure.server_facts()".to_owned(), ""),
        ("SELECT count(*) FROM tenure.jobs".to_owned(), "pwa"),
        ("SELECT tenure.enqueue('m')".to_owned(), "pwa"),
        (
            "SELECT tenure.enqueue_many('[{\"job_type\":\"m\"}]')".to_owned(),
            "pwa",
        ),
        (
            "INSERT INTO tenure.jobs (job_type) VALUES ('new')".to_owned(),
            "pwa",
        ),
        ("SELECT tenure.uuid_v7()".to_owned(), "pwa"),
        ("SELECT count(*) FROM tenure.attempts".to_owned(), "wa"),
        (
            "SELECT count(*) FROM tenure.dead_letter_jobs".to_owned(),
            "wa",
        ),
        ("SELECT count(*) FROM tenure.job".to_owned(), "wa"),
        (
            format!("SELECT tenure.heartbeat('{id}', '{epoch}', 1)"),
            "wa",
        ),
        (
            format!("SELECT tenure.claim_job_batch('{id}', '{epoch}', 1, '{{1}}', '{{1}}')"),
            "wa",
        ),
        (
            format!("SELECT tenure.finish('{id}', '{epoch}', '[]')"),
            "wa",
        ),
        (format!("SELECT tenure.open_epoch('{id}')"), "wa"),
        (format!("SELECT tenure.sweep('{epoch}')"), "wa"),
        (format!("SELECT tenure.cancel('{job}')"), "a"),
        (format!("SELECT tenure.retry_switch({switch})"), "a"),
        ("SELECT tenure.pause('m')".to_owned(), "a"),
        ("SELECT tenure.resume('m')".to_owned(), "a"),
        (
            "INSERT INTO tenure.tenant_grant VALUES ('stranger', 'x')".to_owned(),
            "a",
        ),
        ("DELETE FROM tenure.tenant_grant".to_owned(), "a"),
        // What only our own functions may do.
        (
            "INSERT INTO tenure.ready VALUES (1, 0, 1, tenure.uuid_v7(), 0, 0, 0, now())"
                .to_owned(),
            "",
        ),
        ("DELETE FROM tenure.lease".to_owned(), ""),
        ("UPDATE tenure.cluster SET gate = 'open'".to_owned(), ""),
        ("DELETE FROM tenure.here".to_owned(), ""),
        ("SELECT tenure.put_jobs(NULL)".to_owned(), ""),
        ("SELECT tenure.lane_of('x')".to_owned(), ""),
        ("SELECT tenure.end_runs(NULL, 1, NULL)".to_owned(), ""),
        (
            format!("SELECT tenure.end_waiting('{job}', 'cancel', 'x', 'y')"),
            "",
        ),
        (format!("SELECT tenure.declare_lost('{{{id}}}', 1)"), ""),
        ("SELECT tenure.grant_roles()".to_owned(), ""),
        ("SELECT tenure.make_durable('local')".to_owned(), ""),
        (
            "SELECT tenure.set_aside(c) FROM tenure.cluster c".to_owned(),
            "",
        ),
        ("SELECT tenure.leave_hold(1, 'x', 'y')".to_owned(), ""),
        (
            "INSERT INTO tenure.effect VALUES (tenure.uuid_v7(), 1, tenure.uuid_v7())".to_owned(),
            "",
        ),
        ("SELECT tenure.refuse('TN001', 'x')".to_owned(), ""),
        ("CREATE TABLE tenure.mine ()".to_owned(), ""),
        ("TRUNCATE tenure.job".to_owned(), ""),
    ];
    // What waits for a person's decision, who alone may take it.
    let decisions = [
        ("SELECT tenure.accept_cluster('moved')".to_owned(), "a"),
        ("SELECT tenure.resume_cluster()".to_owned(), "a"),
    ];
    c.run("UPDATE cluster SET gate = 'hold', unaccepted = true, uncovered = true");
    each_may(&db, &decisions);
    c.run("UPDATE cluster SET gate = 'open', unaccepted = false, uncovered = false");
    each_may(&db, &table);
    db.sound();
}

fn each_may(db: &Db<'_>, table: &[(String, &str)]) {
    for user in ["producer", "worker", "monitor", "admin", "stranger"] {
        let mut conn = db.connect_as(user);
        for (statement, allowed) in table {
            let may = allowed.contains(&user[..1]) && user != "stranger";
            conn.run("BEGIN");
            match conn.try_list(statement) {
                Ok(_) => assert!(may, "{user} may not: {statement}"),
                Err(refusal) => assert!(
                    !may && refusal.code == INSUFFICIENT,
                    "{user}: {statement}: {refusal:?}"
                ),
            }
            conn.run("ROLLBACK");
        }
    }
}

fn tenants(lab: &Lab) {
    let db = lab.db("tenants");
    let (mut c, mut producer) = (db.connect(), db.connect_as("producer"));
    c.enqueue("m", "");
    c.enqueue("m", "tenant => 'acme'");
    let seen = |producer: &mut Conn| {
        producer
            .list("SELECT tenant_id FROM tenure.jobs ORDER BY 1")
            .join(" ")
    };
    assert_eq!(
        seen(&mut producer),
        "default",
        "without a grant: the tenant default"
    );
    producer.run("SELECT tenure.enqueue('m')");
    for statement in [
        "SELECT tenure.enqueue('m', tenant => 'acme')",
        "SELECT tenure.enqueue_many('[{\"job_type\":\"m\"},{\"job_type\":\"m\",\"tenant\":\"acme\"}]')",
        "INSERT INTO tenure.jobs (job_type, tenant_id) VALUES ('m', 'acme')",
    ] {
        let refusal = producer.refusal(statement);
        assert_eq!(refusal.code, "TN006");
        assert!(
            refusal.message.contains("acme") && refusal.hint.contains("tenant_grant"),
            "{refusal:?}"
        );
    }
    // Granted to the role or to one that it is a member of; then default is no longer implied.
    db.connect_as("admin")
        .run("INSERT INTO tenure.tenant_grant VALUES ('tenure_producer', 'acme')");
    assert_eq!(seen(&mut producer), "acme");
    producer.run("SELECT tenure.enqueue('m', tenant => 'acme')");
    assert_eq!(producer.code("SELECT tenure.enqueue('m')"), "TN006");
    c.run("INSERT INTO tenant_grant VALUES ('producer', 'default')");
    assert_eq!(seen(&mut producer), "acme acme default default");
    c.run("DELETE FROM tenant_grant; INSERT INTO tenant_grant VALUES ('producer', '*')");
    producer.run("SELECT tenure.enqueue('m', tenant => 'whoever')");
    assert_eq!(seen(&mut producer), "acme acme default default whoever");
    // The barrier: a function of the reader's own does not see rows of others.
    c.run("DELETE FROM tenant_grant; GRANT CREATE ON SCHEMA public TO producer");
    producer.run(
        "CREATE FUNCTION public.peek(text) RETURNS boolean COST 0.000001 LANGUAGE plpgsql AS \
         'BEGIN IF $1 <> ''default'' THEN RAISE EXCEPTION ''saw %'', $1; END IF; RETURN true; END'",
    );
    assert_eq!(
        producer.one("SELECT count(*) FROM tenure.jobs WHERE public.peek(tenant_id)"),
        "2"
    );
    c.run("DROP FUNCTION public.peek(text)");
    db.sound();
}

/// A schema in front of everything has its own now(), tables and functions of the names that ours use.
fn hostile_search_path(lab: &Lab) {
    let db = lab.db("hostile");
    let mut c = db.connect();
    c.run("DROP SCHEMA IF EXISTS evil CASCADE; CREATE SCHEMA evil");
    c.run("GRANT USAGE ON SCHEMA evil TO PUBLIC");
    let wrong = "LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''the function of another schema was called''; END'";
    for function in [
        "now() RETURNS timestamptz",
        "clock_timestamp() RETURNS timestamptz",
        "coalesce_all() RETURNS int",
        "lane_of(text, text DEFAULT '') RETURNS int",
        "put_jobs(anyarray) RETURNS uuid[]",
        "end_runs(uuid, bigint, anyarray, boolean DEFAULT false) RETURNS anyarray",
        "random_uuid() RETURNS uuid",
        "uuid_v7() RETURNS uuid",
        "refuse(text, text, text DEFAULT '') RETURNS void",
        "assert_epoch(uuid) RETURNS bigint",
        "wake_one(int[], uuid) RETURNS void",
        "pg_notify(text, text) RETURNS void",
        "nextval(regclass) RETURNS bigint",
        "jsonb_typeof(jsonb) RETURNS text",
        "array_position(int[], int) RETURNS int",
        "assert_tenants(text[]) RETURNS void",
        "tenants_of(name) RETURNS text[]",
        "like_of(text) RETURNS text",
        "pg_has_role(name, oid, text) RETURNS boolean",
        "fault_of(anyelement) RETURNS text",
        "txid_current() RETURNS bigint",
        "length(text) RETURNS int",
        "said_by(text, text, text) RETURNS text",
    ] {
        c.run(&format!("CREATE FUNCTION evil.{function} {wrong}"));
    }
    c.run("CREATE FUNCTION evil.concat(text, text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''the operator of another schema was called''; END'");
    c.run("CREATE OPERATOR evil.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.concat)");
    for left in ["numeric", "double precision"] {
        c.run(&format!(
            "CREATE FUNCTION evil.times({left}, int) RETURNS {left} {wrong}; \
             CREATE OPERATOR evil.* (LEFTARG = {left}, RIGHTARG = int, FUNCTION = evil.times)"
        ));
    }
    for table in c.list("SELECT relname FROM pg_class WHERE relnamespace = 'tenure'::regnamespace AND relkind IN ('r', 'v')") {
        c.run(&format!("CREATE TABLE evil.{table} (wrong int)"));
    }
    for user in ["postgres", "admin"] {
        let db = lab.db("hostile");
        with_hostile_path(&db, user);
        db.sound();
    }
    c.run("DROP SCHEMA evil CASCADE");
}

fn with_hostile_path(db: &Db<'_>, user: &str) {
    let mut c = db.connect_as(user);
    c.run("SET search_path = evil, pg_catalog, public");
    let id = c.one("SELECT tenure.uuid_v7()");
    let epoch = c.one(&format!(
        "SELECT epoch FROM tenure.register_worker('{id}', 'w', 'v', '30 s', '3 s', '{{*}}')"
    ));
    let job = c.one("SELECT tenure.enqueue('m', unique_key => 'k')");
    c.run(&format!(
        r#"SELECT tenure.enqueue_many('[{{"job_type":"m"}},{{"job_type":"n","run_at":"2020-01-01"}}]');
           SELECT tenure.set_sleeping('{id}', '{epoch}', '{{1}}');
           INSERT INTO tenure.jobs (job_type, run_at) VALUES ('m', '2999-01-01'), ('other', NULL);
           SELECT tenure.heartbeat('{id}', '{epoch}', 1);
           SELECT * FROM tenure.lanes();
           SELECT tenure.settle_marks('{epoch}', '{{1}}', '{{0}}', '{{0}}', '{{9}}', 1);
           SELECT tenure.pause('m'); SELECT tenure.resume('m');
           SELECT * FROM tenure.jobs; SELECT * FROM tenure.queue_metrics; SELECT * FROM tenure.workers;
           SELECT * FROM tenure.attempts; SELECT * FROM tenure.dead_letter_jobs; SELECT tenure.uuid_v7()"#
    ));
    let held = c.one(&format!("SELECT id, run, token FROM tenure.claim_job_batch('{id}', '{epoch}', 1, '{{1,2}}', '{{1,0}}')"));
    let cells: Vec<&str> = held.split('|').collect();
    assert_eq!(cells[0], job);
    let item = format!(
        r#"[{{"job":"{}","run":{},"token":"{}","for_ms":1000,"final":true}}]"#,
        cells[0], cells[1], cells[2]
    );
    c.run(&format!(
        "SELECT tenure.assert_lease('{job}', '{}'); SELECT tenure.hold('{id}', '{epoch}', '{item}'); SELECT tenure.fail('{id}', '{epoch}', '{item}')",
        cells[2]
    ));
    c.run(&format!(
        r#"SELECT tenure.review_dead_letter('{0}', 'retry', 'ann', NULL, '[1]'); SELECT tenure.complete_manually('{job}', 'ann');
           SELECT tenure.move_to_dead_letter(tenure.enqueue('m')); SELECT tenure.all_deps_completed('{job}'); SELECT tenure.cancel('{job}');
           SELECT tenure.sweep('{epoch}'); SELECT tenure.promote('{epoch}'); SELECT tenure.open_epoch('{id}');
           SELECT * FROM tenure.probe('{id}'); SELECT * FROM tenure.switches; SELECT * FROM tenure.switch_jobs;
           SELECT tenure.enqueue('m', options => '{{"durability":"local"}}');
           SELECT tenure.reattach('{id}', '{epoch}', 1, '[]', options => '{{"covers":[{{"worker":"{id}","from":0,"ms":1}}],"without_primary_ms":5}}'); SELECT tenure.drain_worker('{id}'); SELECT tenure.deregister_worker('{id}', '{epoch}')"#,
        cells[2]
    ));
    assert_eq!(c.code("UPDATE tenure.jobs SET priority = 1"), "TN007");
    assert_eq!(c.code(&format!("SELECT tenure.retry('{job}')")), "TN006");
}
