//! Migrations: twice, at once, by whom, into which schema; and databases that do not fit the program.

use std::thread;

use tenure_store::migrate::{MIGRATIONS, MigrateError, Migrator};
use tenure_store::session::Session;

use crate::support::{Lab, Worker, block_on};

#[test]
fn migrate() {
    let lab = Lab::start_empty();
    first_and_again(&lab);
    three_at_once(&lab);
    what_does_not_fit(&lab);
    another_schema(&lab);
    without_rights_to_make_roles(&lab);
    a_schema_that_somebody_made(&lab);
    waits_for_locks_only_briefly(&lab);
    work_goes_on_after_each(&lab);
}

fn with<T>(
    lab: &Lab,
    database: &str,
    schema: &str,
    work: impl AsyncFnOnce(Migrator<'_>) -> T,
) -> T {
    let target = lab.target(database, "postgres", schema);
    block_on(async {
        let (session, _notifications) = Session::open(&target).await.unwrap();
        work(Migrator::new(&session, schema)).await
    })
}

fn first_and_again(lab: &Lab) {
    lab.server.create_database("first").unwrap();
    let states = |database| {
        with(lab, database, "tenure", async |m| {
            m.status()
                .await
                .unwrap()
                .iter()
                .map(|line| line.state)
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(
        states("first"),
        vec!["pending"; MIGRATIONS.len()],
        "a look changes nothing"
    );
    let missing = with(lab, "first", "tenure", async |m| {
        m.check().await.unwrap_err()
    });
    assert!(matches!(missing, MigrateError::Missing(n) if n == MIGRATIONS.len()));
    assert!(missing.to_string().contains("tenure migrate up"));
    assert_eq!(
        lab.reopen("first")
            .connect_as("postgres")
            .one("SELECT count(*) FROM pg_namespace WHERE nspname = 'tenure'"),
        "0"
    );
    let names: Vec<&str> = MIGRATIONS.iter().map(|migration| migration.name).collect();
    assert_eq!(lab.migrate("first", "postgres", "tenure").unwrap(), names);
    assert_eq!(
        lab.migrate("first", "postgres", "tenure").unwrap(),
        Vec::<String>::new()
    );
    assert_eq!(states("first"), vec!["applied"; MIGRATIONS.len()]);
    with(lab, "first", "tenure", async |m| {
        m.check().await.unwrap();
        assert_eq!(m.missing_roles().await.unwrap(), Vec::<String>::new());
        m.drop_everything().await.unwrap();
        assert!(matches!(m.check().await, Err(MigrateError::Missing(_))));
    });
}

fn three_at_once(lab: &Lab) {
    lab.server.create_database("three").unwrap();
    let applied: Vec<usize> = thread::scope(|scope| {
        let running: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| lab.migrate("three", "postgres", "tenure").unwrap().len()))
            .collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(
        applied.iter().sum::<usize>(),
        MIGRATIONS.len(),
        "each by one of them: {applied:?}"
    );
    let mut c = lab.reopen("three").connect();
    c.enqueue("m", "");
}

fn what_does_not_fit(lab: &Lab) {
    let mut c = lab.reopen("three").connect();
    let check = || with(lab, "three", "tenure", async |m| m.check().await);
    c.run("INSERT INTO migration (name, checksum, breaking) VALUES ('9998_newer', 'x', false)");
    check().unwrap();
    assert_eq!(
        lab.migrate("three", "postgres", "tenure").unwrap(),
        Vec::<String>::new(),
        "a newer one that breaks nothing is accepted"
    );
    c.run("INSERT INTO migration (name, checksum, breaking) VALUES ('9999_break', 'x', true)");
    for error in [
        check().unwrap_err(),
        lab.migrate("three", "postgres", "tenure").unwrap_err(),
    ] {
        assert!(
            matches!(&error, MigrateError::Newer(name) if name == "9999_break"),
            "{error}"
        );
    }
    c.run("DELETE FROM migration WHERE name LIKE '999%'; UPDATE migration SET checksum = 'x' WHERE name = '0001_tables'");
    for error in [
        check().unwrap_err(),
        lab.migrate("three", "postgres", "tenure").unwrap_err(),
    ] {
        assert!(
            matches!(&error, MigrateError::Changed(name) if name == "0001_tables"),
            "{error}"
        );
    }
}

/// Any name, and two installations in one database that know nothing of each other.
fn another_schema(lab: &Lab) {
    lab.server.create_database("two").unwrap();
    let schemas = ["tenure", r#"My "Jobs" \ 'x'"#];
    for schema in schemas {
        lab.migrate("two", "postgres", schema).unwrap();
        assert_eq!(
            lab.migrate("two", "postgres", schema).unwrap(),
            Vec::<String>::new()
        );
    }
    let mut c = lab.reopen("two").connect_as("postgres");
    for (round, schema) in schemas.iter().enumerate() {
        let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
        for number in 0..=round {
            c.run(&format!(
                "SELECT {quoted}.enqueue('m', unique_key => 'k{number}')"
            ));
        }
        assert_eq!(
            c.one(&format!("SELECT count(*) FROM {quoted}.jobs")),
            (round + 1).to_string()
        );
    }
    assert_ne!(
        c.one("SELECT installation FROM tenure.cluster"),
        c.one("SELECT installation FROM \"My \"\"Jobs\"\" \\ 'x'\".cluster")
    );
    // Both have granted the roles, which belong to the server.
    c.run("CREATE ROLE two_producer LOGIN IN ROLE tenure_producer");
    let mut producer = lab.reopen("two").connect_as("two_producer");
    for schema in schemas {
        producer.run(&format!(
            "SELECT \"{}\".enqueue('m')",
            schema.replace('"', "\"\"")
        ));
    }
}

/// A role that may make a schema and no roles: the installation works, and says what is missing.
fn without_rights_to_make_roles(lab: &Lab) {
    lab.server.create_database("plain").unwrap();
    let mut c = lab.reopen("plain").connect_as("postgres");
    for role in ["producer", "worker", "monitor", "admin"] {
        c.run(&format!("ALTER ROLE tenure_{role} RENAME TO hidden_{role}"));
    }
    c.run("CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE plain TO app");
    lab.migrate("plain", "app", "tenure").unwrap();
    let missing = with(lab, "plain", "tenure", async |m| {
        m.missing_roles().await.unwrap()
    });
    assert_eq!(missing.len(), 4);
    let mut app = lab.reopen("plain").connect_as("app");
    app.run("SELECT tenure.enqueue('m'); SELECT * FROM tenure.jobs");
    let id = app.one("SELECT tenure.random_uuid()");
    app.run(&format!(
        "SELECT tenure.register_worker('{id}', 'w', 'v', '30 s', '3 s', '{{*}}')"
    ));
    for role in ["producer", "worker", "monitor", "admin"] {
        c.run(&format!("ALTER ROLE hidden_{role} RENAME TO tenure_{role}"));
    }
    assert_eq!(
        app.one("SELECT tenure.grant_roles()"),
        "~",
        "an administrator made them: nothing is missing"
    );
    c.run("CREATE ROLE plain_producer LOGIN IN ROLE tenure_producer");
    lab.reopen("plain")
        .connect_as("plain_producer")
        .run("SELECT tenure.enqueue('m')");
}

/// An administrator made the schema for a role that may make none.
fn a_schema_that_somebody_made(lab: &Lab) {
    lab.server.create_database("given").unwrap();
    let mut c = lab.reopen("given").connect_as("postgres");
    c.run("CREATE ROLE tenant_app LOGIN; CREATE SCHEMA tenure AUTHORIZATION tenant_app");
    lab.migrate("given", "tenant_app", "tenure").unwrap();
    lab.reopen("given")
        .connect_as("tenant_app")
        .run("SELECT tenure.enqueue('m')");
}

/// A migration that cannot have its lock gives way, so that claims do not queue behind it, and tries again.
fn waits_for_locks_only_briefly(lab: &Lab) {
    lab.server.create_database("busy").unwrap();
    lab.migrate("busy", "postgres", "tenure").unwrap();
    let (mut user, mut watch) = (lab.reopen("busy").connect(), lab.reopen("busy").connect());
    watch.run("DELETE FROM migration WHERE name = '0009_roles'; DROP FUNCTION grant_roles()");
    user.run("BEGIN; LOCK TABLE migration IN SHARE MODE");
    thread::scope(|scope| {
        let migrating = scope.spawn(|| lab.migrate("busy", "postgres", "tenure"));
        let waiting = "FROM pg_stat_activity WHERE datname = 'busy' AND wait_event_type = 'Lock'";
        watch.wait_for(&format!("SELECT count(*) {waiting}"), "1");
        let since = watch.one(&format!("SELECT query_start {waiting}"));
        watch.wait_for(
            &format!("SELECT count(*) {waiting} AND query_start > '{since}'"),
            "1",
        );
        user.run("COMMIT");
        assert_eq!(migrating.join().unwrap().unwrap(), ["0009_roles"]);
    });
}

/// Daemons of before work on meanwhile, and for long should the next one fail.
fn work_goes_on_after_each(lab: &Lab) {
    const FIRST_WHOLE: usize = 9;
    lab.server.create_database("steps").unwrap();
    let mut person = lab.reopen("steps").connect();
    person.run("CREATE SCHEMA tenure; SET search_path = tenure, pg_temp");
    // With its plans of before.
    let mut c = lab.reopen("steps").connect();
    let mut workers: Vec<Worker> = Vec::new();
    for (at, migration) in MIGRATIONS.iter().enumerate() {
        person.run(migration.sql);
        if at + 1 < FIRST_WHOLE {
            continue;
        }
        workers.push(Worker::register(&mut c));
        for w in &mut workers {
            c.enqueue("m", "max_attempts => 100");
            let held = w.claim_one(&mut c, "m");
            assert_eq!(w.end(&mut c, "completed", &held, ""), "done completed");
            c.enqueue("m", "max_attempts => 100");
            w.claim_one(&mut c, "m");
            let ghosts = w.beat(&mut c, &[]).unwrap();
            assert_eq!(ghosts, 1, "after {}", migration.name);
            let again = w.claim_one(&mut c, "m");
            assert_eq!(w.end(&mut c, "failed", &again, ""), "done scheduled");
            // The sweep of that one needs a table that the next one makes: `migrate up` makes one step of both.
            if migration.name != "0010_switches" {
                c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
                let swept = format!("SELECT swept FROM sweep('{}')", w.epoch);
                assert_eq!(c.one(&swept), "t", "after {}", migration.name);
            }
        }
        c.lose_here();
        for w in &mut workers {
            w.reattach(&mut c, &[], &[], "");
        }
        assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    }
}
