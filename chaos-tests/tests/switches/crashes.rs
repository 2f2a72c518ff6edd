//! The primary dies or falls silent, and a standby is promoted.

use chaos_tests::{Cluster, Plan, What};

#[test]
fn killed_then_promoted() {
    let mut cluster = Cluster::start("killed_then_promoted", Plan::default());
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(1500);
    cluster.promote();
    cluster.finish();
}

#[test]
fn killed_while_replication_is_cut() {
    let mut cluster = Cluster::start("killed_while_replication_is_cut", Plan::default());
    cluster.load();
    cluster.cut_replication();
    cluster.until_more_acknowledged(10);
    cluster.until_more_witnessed(What::End, 10);
    cluster.random.dawdle(1000);
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(1000);
    cluster.promote();
    let judgement = cluster.finish().judgement;
    assert!(!judgement.cut_off.is_empty(), "no enqueue was lost");
    assert!(!judgement.unwritten.is_empty(), "no completion was lost");
}

/// The old primary goes on where it was, finds itself alone, and is taken back.
#[test]
fn frozen_then_promoted_and_thawed() {
    let mut cluster = Cluster::start("frozen_then_promoted_and_thawed", Plan::default());
    let old = cluster.lab.server.port();
    cluster.load();
    cluster.strike(|primary| primary.freeze().unwrap());
    cluster.until_detected();
    cluster.random.dawdle(500);
    cluster.promote();
    cluster.random.dawdle(2000);
    let old = cluster.index_of(old);
    cluster.others[old].thaw().unwrap();
    cluster.random.dawdle(1000);
    cluster.rejoin(old);
    cluster.finish();
}

/// A stopped daemon keeps the first window open for the second switch.
#[test]
fn two_switches_in_a_row() {
    let mut cluster = Cluster::start("two_switches_in_a_row", Plan::default());
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    let stopped = cluster.any_daemon();
    cluster.freeze_daemon(stopped);
    cluster.promote();
    cluster
        .lab
        .until("SELECT gate FROM tenure.cluster", "window");
    cluster.random.dawdle(600);
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.promote();
    cluster.thaw_daemon(stopped);
    cluster.finish();
}

#[test]
fn daemons_are_killed_and_stopped_in_the_middle() {
    let mut cluster = Cluster::start(
        "daemons_are_killed_and_stopped_in_the_middle",
        Plan::default(),
    );
    cluster.load();
    let killed = cluster.any_daemon();
    let stopped = (killed + 1) % 3;
    let early = cluster.random.below(2) == 0;
    if early {
        cluster.kill_daemon(killed);
    }
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.freeze_daemon(stopped);
    cluster.random.dawdle(1000);
    cluster.promote();
    if !early {
        cluster.random.dawdle(300);
        cluster.kill_daemon(killed);
    }
    cluster.random.dawdle(2000);
    cluster.thaw_daemon(stopped);
    cluster.start_daemon(killed);
    cluster.finish();
}

/// What it had finished is written by its successor, and what it had not is free.
#[test]
fn a_daemon_leaves_during_the_outage() {
    let set = ["worker.drain_timeout=1s"];
    let plan = Plan {
        set: &set,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("a_daemon_leaves_during_the_outage", plan);
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(500);
    let left = cluster.any_daemon();
    assert_eq!(cluster.leave(left), 0, "{}", cluster.daemon(left).log());
    cluster.promote();
    cluster.random.dawdle(1000);
    cluster.start_daemon(left);
    cluster.finish();
}
