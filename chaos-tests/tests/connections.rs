//! Connections that break, hang, go silent, or are not the daemon's own.

use std::thread;
use std::time::Duration;

use chaos_tests::{Lab, Pooler, Proxy, UNFINISHED, What};

/// Ends the sessions of the heart, which has a role of its own.
const CUT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'heart'";

/// B03: what was sent over the old connections is never answered, and nobody is told.
#[test]
fn half_open_connections_are_given_up() {
    let lab = Lab::start();
    let proxy = Proxy::to(lab.server.port());
    let url = format!("database.url={}", proxy.url("app", "postgres"));
    let mut daemon = lab.daemon("a", &[&url, "worker.lease_ttl=60s"]);
    lab.until_live(1);
    let mut jobs = lab.enqueue_many("ticks-20", 12);
    lab.until_witnessed(What::Tick, 6);
    proxy.swallow();
    jobs.extend(lab.enqueue_many("ticks-1", 12));
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
}

/// B20: everything works but the heartbeats.
#[test]
fn without_heartbeats_a_daemon_ends_its_handlers_and_registers_anew() {
    let lab = Lab::start();
    let proxy = Proxy::to(lab.server.port());
    let direct = format!("database.direct_url={}", proxy.url("app", "postgres"));
    let mut daemon = lab.daemon("a", &[&direct]);
    let mut jobs = lab.enqueue_many("ticks-100", 3);
    jobs.push(lab.enqueue("stubborn-100"));
    lab.until_witnessed(What::Tick, 4);
    let mut other = lab.daemon("b", &[]);
    lab.until_live(2);
    proxy.block(true);
    lab.until_handlers_are_dead();
    lab.until(UNFINISHED, "0");
    proxy.block(false);
    lab.until_live(2);
    assert_eq!(other.stop(), 0, "{}", other.log());
    jobs.push(lab.enqueue("ticks-1"));
    lab.until(UNFINISHED, "0");
    lab.assert_sound(&jobs);
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
}

/// What was asked is done, and the answer never comes: claims, ends, beats and registrations, one in twenty-five.
#[test]
fn answers_are_lost_with_their_connections() {
    let lab = Lab::start();
    let proxy = Proxy::to(lab.server.port());
    let url = format!("database.url={}", proxy.url("app", "postgres"));
    let daemons = ["a", "b"].map(|name| lab.daemon(name, &[&url, "worker.lease_ttl=60s"]));
    lab.until_live(2);
    proxy.withhold(25);
    let mut jobs = Vec::new();
    for _ in 0..10 {
        jobs.extend(lab.enqueue_many("ticks-0", 20));
        jobs.extend(lab.enqueue_many("ticks-5", 4));
        let ended = lab.count(What::End);
        lab.until_witnessed(What::End, ended + 10);
    }
    lab.until(UNFINISHED, "0");
    proxy.withhold(0);
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    for mut daemon in daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}

/// Far away, but there: nothing is taken for a loss.
#[test]
fn a_slow_way_is_no_outage() {
    let lab = Lab::start();
    let proxy = Proxy::to(lab.server.port());
    let url = format!("database.url={}", proxy.url("app", "postgres"));
    let mut daemon = lab.daemon("a", &[&url, "worker.lease_ttl=20s"]);
    lab.until_live(1);
    proxy.delay(Duration::from_millis(150));
    let mut jobs = lab.enqueue_many("ticks-3", 30);
    jobs.push(lab.enqueue("ticks-120"));
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    let said = daemon.log();
    assert!(!said.contains("No primary answers"), "{said}");
}

/// B04, B05: a listener that is cut off again and again comes back each time, without a storm of its own.
#[test]
fn a_listener_comes_back() {
    let lab = Lab::start();
    lab.run("CREATE ROLE heart LOGIN IN ROLE tenure_worker");
    let direct = format!("database.direct_url={}", lab.server.url("app", "heart"));
    // Nothing but a notification brings a job within the patience of this test.
    let daemon = lab.daemon("a", &[&direct, "worker.poll_interval=1h"]);
    let job = lab.enqueue("ticks-0");
    lab.until_status(&job, "completed");
    lab.until("SELECT count(*) FROM tenure.sleeper", "1");
    // That of the heart, and that of its probes.
    assert_eq!(lab.rows(CUT).len(), 2);
    let job = lab.enqueue("ticks-0");
    lab.until_status(&job, "completed");

    let lines = daemon.log().lines().count();
    for _ in 0..100 {
        lab.run(CUT);
        thread::sleep(Duration::from_millis(50));
    }
    let said = daemon.log().lines().count() - lines;
    assert!(said < 40, "{said} lines after 100 cuts:\n{}", daemon.log());
    let job = lab.enqueue("ticks-0");
    lab.until_status(&job, "completed");
}

/// B53: transactions wander between two connections; notifications come over the direct one.
#[test]
fn a_transaction_pooler_is_no_obstacle() {
    let lab = Lab::start();
    let pooler = Pooler::start(lab.server.port());
    let url = format!("database.url={}", pooler.url());
    let direct = format!("database.direct_url={}", lab.server.url("app", "postgres"));
    let pooled = "database.pooler=transaction";
    let mut daemons = [
        lab.daemon("a", &[&url, pooled, &direct]),
        // This one has no direct way: it polls.
        lab.daemon("b", &[&url, pooled]),
    ];
    lab.until_live(2);
    let mut jobs = lab.enqueue_many("ticks-1", 200);
    jobs.push(lab.enqueue("ticks-100"));
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    let said = lab.tenure(&[
        "enqueue", "ticks-1", "--wait", "--set", &url, "--set", pooled,
    ]);
    assert!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    for daemon in &mut daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
    assert_eq!(lab.server_said("prepared statement"), [""; 0]);
    assert_eq!(
        lab.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"),
        "0"
    );
}
