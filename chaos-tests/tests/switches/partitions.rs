//! Packets vanish, in one direction or in both. Nobody is told: what was sent is repeated by TCP until something gives up.

use chaos_tests::{Cluster, Network, Plan, What};

/// The old primary lives on, cut off from everybody, and comes back when there is a new one.
fn isolate(scenario: &str, vanish: impl FnOnce(&Network, u16)) {
    let network = Network::enter();
    let mut cluster = Cluster::start(scenario, Plan::usual());
    let old = cluster.lab.server.port();
    cluster.load();
    cluster.strike(|_| vanish(&network, old));
    cluster.until_detected();
    cluster.random.dawdle(1000);
    cluster.promote();
    cluster.until_all_flows();
    network.heal();
    cluster.until_more_witnessed(What::End, 20);
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    cluster.finish();
}

#[test]
fn packets_are_dropped_in_both_directions() {
    isolate("packets_are_dropped_in_both_directions", |network, port| {
        network.drop_requests(port);
        network.drop_answers(port);
    });
}

/// What was on its way is done; nobody learns of it, and no standby has it.
#[test]
fn answers_are_dropped() {
    isolate("answers_are_dropped", Network::drop_answers);
}

/// What it says still arrives, also at its standbys.
#[test]
fn requests_are_dropped() {
    isolate("requests_are_dropped", Network::drop_requests);
}

/// Nobody is promoted, and nothing has to be said again.
#[test]
fn packets_are_dropped_for_a_while() {
    let network = Network::enter();
    let mut cluster = Cluster::start("packets_are_dropped_for_a_while", Plan::usual());
    let port = cluster.lab.server.port();
    cluster.load();
    network.drop_requests(port);
    network.drop_answers(port);
    cluster.note_fault();
    cluster.until_detected();
    cluster.random.dawdle(1000);
    network.heal();
    cluster.finish();
    assert_eq!(
        cluster.lab.value("SELECT count(*) FROM tenure.switches"),
        "0"
    );
    let started = "SELECT count(*) FROM tenure.attempts WHERE outcome = 'lost'";
    assert_eq!(cluster.lab.value(started), "0");
}
