//! The way to the primary changes, or vanishes.

use chaos_tests::{Cluster, Plan, Route};

/// A DNS name, a virtual address or a load balancer leads to the new primary.
#[test]
fn a_proxy_is_pointed_to_the_new_primary() {
    let plan = Plan {
        route: Route::OneProxy,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("a_proxy_is_pointed_to_the_new_primary", plan);
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(500);
    cluster.promote();
    let port = cluster.lab.server.port();
    cluster.proxies[0].point_to(port);
    cluster.finish();
}

/// The old one lives and takes writes. For a while old connections lead there and new ones do not, as with a DNS name.
#[test]
fn a_proxy_is_pointed_away_from_a_living_primary() {
    let plan = Plan {
        route: Route::OneProxy,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("a_proxy_is_pointed_away_from_a_living_primary", plan);
    let old = cluster.lab.server.port();
    cluster.load();
    let furthest =
        usize::from(cluster.others[1].position().unwrap() > cluster.others[0].position().unwrap());
    cluster.promote_this(furthest);
    let port = cluster.lab.server.port();
    cluster.proxies[0].point_to(port);
    cluster.random.dawdle(1500);
    cluster.proxies[0].cut();
    cluster.until_all_flows();
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    cluster.finish();
}

/// Nothing is refused and nothing is closed: the old primary's host is just silent, and stays so.
#[test]
fn packets_are_dropped() {
    let plan = Plan {
        route: Route::EachByProxy,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("packets_are_dropped", plan);
    cluster.load();
    let proxy = &cluster.proxies[0];
    proxy.block(true);
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.until_detected();
    cluster.random.dawdle(500);
    cluster.promote();
    cluster.finish();
}
