//! What is around a daemon: the service manager, other sessions, other schemas and roles, and what its handlers can see of it.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use chaos_tests::{Lab, UNFINISHED, What};

/// B43.
#[test]
fn the_service_manager_is_told() {
    let mut lab = Lab::start();
    let path = lab.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let until = |wanted: &str| {
        let mut heard = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let length = socket
                .recv(&mut buffer)
                .unwrap_or_else(|_| panic!("no {wanted} in {heard:?}"));
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if text.lines().any(|line| line == wanted) {
                return;
            }
            heard.push(text);
        }
    };
    // A start does not hang on an outage of the database.
    lab.server.stop_fast().unwrap();
    let mut command = lab.command();
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "20000000");
    let mut daemon = lab.daemon_by(command, "a", &[]);
    until("READY=1");
    lab.server.restart().unwrap();
    until("WATCHDOG=1");
    until("WATCHDOG=1");
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    until("STOPPING=1");
}

/// B51: no notification depends on the size of anything.
#[test]
fn large_jobs_and_names_pass() {
    let lab = Lab::start();
    let _daemon = lab.daemon("a", &[]);
    lab.until_live(1);
    let long = "界".repeat(196);
    let jobs = [
        lab.value(&format!("SELECT tenure.enqueue('noop{long}', tenant => '{long}', data => to_jsonb(repeat('x', 1000000)))")),
        lab.value("SELECT tenure.enqueue('noop', jsonb_build_object('x', repeat('y', 100000)))"),
    ];
    for job in &jobs {
        lab.until_status(job, "completed");
    }
    assert_eq!(
        lab.value(
            "SELECT count(tenure.cancel(id)) FROM (SELECT tenure.enqueue('unheard-of') AS id FROM generate_series(1, 1000)) made"
        ),
        "1000"
    );
    assert_eq!(
        lab.value("SELECT count(*) FROM tenure.jobs WHERE status = 'cancelled'"),
        "1000"
    );
}

/// B52, B57: a session that listens inside an open transaction fills the queue of notifications, and its snapshot keeps dead
/// rows; the daemon itself never does that.
#[test]
fn a_daemon_holds_no_transaction_open_and_needs_no_notifications() {
    let lab = Lab::start();
    let mut idler = lab.sql();
    idler.run("LISTEN anything").unwrap();
    idler
        .run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tenure.jobs")
        .unwrap();
    let _daemons = ["a", "b"].map(|name| lab.daemon(name, &[]));
    lab.until_live(2);
    let jobs = lab.enqueue_many("ticks-20", 20);
    for _ in 0..200 {
        lab.run("SELECT tenure.enqueue('noop') FROM generate_series(1, 10)");
    }
    lab.until_witnessed(What::Tick, 20);
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'app' AND pid <> pg_backend_pid() \
                AND xact_start < now() - interval '1 s' AND query NOT LIKE '%REPEATABLE READ%'";
    lab.wait_for(|| {
        assert_eq!(lab.value(open), "0", "a transaction lasts");
        match lab.value(UNFINISHED).as_str() {
            "0" => Ok(()),
            left => Err(format!("{left} are left")),
        }
    });
    assert_eq!(
        lab.value("SELECT pg_notification_queue_usage() < 0.001"),
        "t"
    );
    lab.assert_sound(&jobs);
}

/// B56, B58: neither what waits nor what is over slows anything down, or uses up numbers.
#[test]
fn a_backlog_is_no_burden() {
    let lab = Lab::start();
    let load = |what: &str, count: u32| {
        lab.run(&format!(
            "SELECT count(*) FROM tenure.enqueue_many((SELECT jsonb_agg({what}) FROM generate_series(1, {count}) n))"
        ));
    };
    load(
        "jsonb_build_object('job_type', 'noop-later', 'run_at', now() + interval '30 days')",
        100_000,
    );
    load("jsonb_build_object('job_type', 'unheard-of')", 100_000);
    load(
        "jsonb_build_object('job_type', 'unheard-of-' || n % 1000)",
        20_000,
    );
    let mut daemon = lab.daemon("a", &[]);
    lab.until_live(1);
    load(
        "jsonb_build_object('job_type', 'noop', 'priority', 7)",
        5_000,
    );
    lab.until("SELECT count(*) FROM tenure.outcome", "5000");
    lab.run("ALTER SYSTEM SET log_min_duration_statement = '1s'");
    lab.run("SELECT pg_reload_conf()");
    let jobs = lab.enqueue_many("ticks-1", 30);
    lab.until(
        "SELECT count(*) FROM tenure.outcome WHERE result IS NOT NULL",
        "30",
    );
    let slow: Vec<String> = lab
        .server_said("duration:")
        .into_iter()
        .filter(|line| line.contains("] tenure LOG"))
        .collect();
    assert!(slow.is_empty(), "{slow:?}");
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    lab.assert_sound(&jobs);
    // A lane is made once for each job type; everything else counts in 64 bits.
    assert_eq!(
        lab.value("SELECT string_agg(sequencename, ',') FROM pg_sequences WHERE schemaname = 'tenure' AND data_type <> 'bigint'::regtype"),
        "lane_lane_seq"
    );
    assert_eq!(
        lab.value(
            "SELECT last_value - (SELECT count(*) FROM tenure.lane) FROM tenure.lane_lane_seq"
        ),
        "0"
    );
}

/// B65: a schema of any name, roles without any further right, and another schema that shadows everything.
#[test]
fn a_plain_role_and_an_odd_schema_are_enough() {
    let lab = Lab::start();
    lab.run(
        "CREATE ROLE owner LOGIN; CREATE ROLE runner LOGIN IN ROLE tenure_worker; CREATE ROLE maker LOGIN IN ROLE tenure_producer",
    );
    lab.run("CREATE DATABASE other OWNER owner");
    let schema = "database.schema=My Jobs";
    let url = |user: &str| format!("database.url={}", lab.server.url("other", user));
    let said = lab.tenure(&["migrate", "up", "--set", &url("owner"), "--set", schema]);
    assert!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    let mut other = lab.server.sql("other").unwrap();
    other
        .run(
            "CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC;
             CREATE TABLE evil.jobs (id uuid); CREATE TABLE evil.job (id uuid); CREATE TABLE evil.lease (id uuid);
             CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '-infinity'::timestamptz $$;
             CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '-infinity'::timestamptz $$;
             CREATE FUNCTION evil.random_uuid() RETURNS uuid LANGUAGE sql AS $$ SELECT '00000000-0000-0000-0000-000000000000'::uuid $$;
             ALTER ROLE runner SET search_path = evil, pg_catalog, public; ALTER ROLE maker SET search_path = evil, pg_catalog",
        )
        .unwrap();
    let runner = url("runner");
    let mut daemon = lab.daemon("a", &[&runner, schema]);
    let said = lab.tenure(&[
        "enqueue",
        "ticks-1",
        "--wait",
        "--set",
        &url("maker"),
        "--set",
        schema,
    ]);
    assert!(
        said.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&said.stderr),
        daemon.log()
    );
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    assert_eq!(lab.count(What::End), 1);
    let strangers = other
        .run("SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relowner = 'owner'::regrole AND n.nspname NOT IN ('My Jobs', 'pg_toast')")
        .unwrap();
    assert!(strangers.is_empty(), "{strangers:?}");
}

/// B67: an idle fleet leaves the database alone.
#[test]
fn idle_daemons_ask_little() {
    let lab = Lab::start();
    let _daemons = ["a", "b", "c"]
        .map(|name| lab.daemon(name, &["worker.heartbeat=3s", "worker.lease_ttl=30s"]));
    lab.until_live(3);
    lab.run("SELECT tenure.enqueue('noop')");
    lab.until(UNFINISHED, "0");
    lab.until("SELECT count(*) FROM tenure.sleeper", "3");
    lab.run("ALTER SYSTEM SET log_min_duration_statement = 0");
    lab.run("SELECT pg_reload_conf()");
    // Counted by their heartbeats, not by a clock: on a slow machine both become fewer.
    let mut asked = Vec::new();
    let mut beats = 0;
    lab.wait_for(|| {
        asked = lab.server_said(" execute ");
        beats = asked
            .iter()
            .filter(|line| line.contains(".heartbeat("))
            .count();
        match beats {
            0..12 => Err(format!("{beats} heartbeats are logged")),
            _ => Ok(()),
        }
    });
    assert!(
        asked.len() < 8 * beats,
        "{} statements of 3 idle daemons while they beat {beats} times",
        asked.len()
    );
}

/// B97.
#[test]
fn handlers_see_no_secret_of_their_daemon() {
    let lab = Lab::start();
    std::fs::write(lab.path("password"), "marker-of-the-password\n").unwrap();
    let file = format!("database.password_file={}", lab.path("password").display());
    let mut command = lab.command();
    command.env("SOME_TOKEN", "marker-of-the-environment");
    let daemon = lab.daemon_by(command, "a", &[&file]);
    let job = lab.enqueue("reveal");
    lab.until_status(&job, "completed");
    let seen = lab.value(&format!(
        "SELECT result #>> '{{}}' FROM tenure.jobs WHERE id = '{job}'"
    ));
    assert!(!seen.contains("marker"), "{seen}");
    assert!(seen.contains("TENURE_JOB_ID="), "{seen}");
    let descriptors: Vec<&str> = seen.lines().filter(|line| line.contains(" -> ")).collect();
    assert!(descriptors.len() >= 3, "{seen}");
    for descriptor in descriptors {
        assert!(
            !descriptor.contains("socket:")
                && !descriptor.contains(".log")
                && !descriptor.contains(".toml"),
            "{seen}"
        );
    }
    assert!(!daemon.log().contains("marker"), "{}", daemon.log());
}
