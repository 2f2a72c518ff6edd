//! Patroni decides who is the primary. Nobody loses a job here, and none runs twice, also while two servers take writes.

use std::collections::BTreeSet;
use std::time::Duration;

use chaos_tests::{Managed, Plan, Way, What, uptime};

/// All that reaches the primary by one name has to end its handlers when an outage is long: nothing proves that there is none.
const INTERRUPTED: Plan<'static> = Plan {
    interruptions: true,
    ..USUAL
};

const USUAL: Plan<'static> = Plan::usual();

#[test]
fn patroni_switches_over() {
    let mut cluster = Managed::start("patroni_switches_over", USUAL, Way::Direct, false);
    cluster.strike(|patroni| patroni.switch_over());
    cluster.until_switched();
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}

/// The same node goes on.
#[test]
fn patroni_restarts_a_killed_server() {
    let mut cluster = Managed::start(
        "patroni_restarts_a_killed_server",
        USUAL,
        Way::Direct,
        false,
    );
    cluster.strike(|patroni| patroni.kill_server());
    cluster.until_switched();
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}

fn lose_the_leaders_host(cluster: &mut Managed<'_>) {
    let lost = cluster.strike(|patroni| patroni.lose_host());
    cluster.until_switched();
    cluster.lab.server.return_host(lost);
    cluster.until_whole();
}

#[test]
fn patroni_loses_the_leaders_host() {
    let mut cluster = Managed::start("patroni_loses_the_leaders_host", USUAL, Way::Direct, false);
    lose_the_leaders_host(&mut cluster);
    cluster.finish();
}

#[test]
fn patroni_loses_the_leaders_host_synchronously() {
    let scenario = "patroni_loses_the_leaders_host_synchronously";
    let mut cluster = Managed::start(scenario, USUAL, Way::Direct, true);
    lose_the_leaders_host(&mut cluster);
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}

/// Two primaries: the old one takes writes until its Patroni is back. Returns when that was.
fn kill_patroni(cluster: &mut Managed<'_>) -> Duration {
    cluster.strike(|patroni| patroni.kill_patroni());
    cluster.until_switched();
    cluster.until_all_flows();
    cluster.random.dawdle(2000);
    let back = uptime();
    cluster.lab.server.release();
    cluster.until_whole();
    back
}

#[test]
fn patroni_alone_is_killed() {
    let mut cluster = Managed::start("patroni_alone_is_killed", USUAL, Way::Direct, false);
    kill_patroni(&mut cluster);
    cluster.finish();
}

/// The old primary acknowledges nothing that the new one lacks, while its Patroni is dead. When Patroni 3.0.2 is started beside it, it first
/// reloads a configuration without `synchronous_standby_names`, and only then stops the server: what waited is acknowledged, and lost.
#[test]
fn patroni_alone_is_killed_synchronously() {
    let scenario = "patroni_alone_is_killed_synchronously";
    let mut cluster = Managed::start(scenario, USUAL, Way::Direct, true);
    let back = kill_patroni(&mut cluster);
    let early: BTreeSet<String> = cluster
        .acknowledged()
        .into_iter()
        .filter(|enqueue| enqueue.at < back)
        .map(|enqueue| enqueue.id)
        .collect();
    let judgement = cluster.finish().judgement;
    let cut_off: Vec<&String> = judgement.cut_off.intersection(&early).collect();
    assert!(cut_off.is_empty(), "{cut_off:?}");
}

/// The same while it lives and does nothing, until somebody starts it anew.
#[test]
fn patroni_alone_is_frozen() {
    let mut cluster = Managed::start("patroni_alone_is_frozen", USUAL, Way::Direct, false);
    let frozen = cluster.strike(|patroni| patroni.freeze_patroni());
    cluster.until_switched();
    cluster.until_all_flows();
    cluster.lab.server.replace_patroni(frozen);
    cluster.until_whole();
    cluster.finish();
}

/// HAProxy ends all sessions with a server that is no leader any more, and leads nowhere for as long as there is none.
#[test]
fn patroni_behind_a_balancer() {
    let mut cluster = Managed::start(
        "patroni_behind_a_balancer",
        INTERRUPTED,
        Way::Balancer,
        false,
    );
    cluster.strike(|patroni| patroni.switch_over());
    cluster.until_switched();
    cluster.until_all_flows();
    cluster.until_whole();
    cluster.until_more_witnessed(What::End, 20);
    kill_patroni(&mut cluster);
    cluster.finish();
}

/// PgBouncer keeps the sessions of its clients and gives them another server.
#[test]
fn patroni_behind_a_pooler_and_a_balancer() {
    let scenario = "patroni_behind_a_pooler_and_a_balancer";
    let mut cluster = Managed::start(scenario, USUAL, Way::Pooler, false);
    cluster.strike(|patroni| patroni.switch_over());
    cluster.until_switched();
    cluster.until_all_flows();
    cluster.until_whole();
    cluster.until_more_witnessed(What::End, 20);
    lose_the_leaders_host(&mut cluster);
    cluster.finish();
}
