//! More than one server takes writes.

use chaos_tests::{Cluster, Plan};

/// Replication is asynchronous, and nobody tells the old primary. The daemons see both and follow the new one.
#[test]
fn two_primaries_at_once() {
    let mut cluster = Cluster::start("two_primaries_at_once", Plan::default());
    let old = cluster.lab.server.port();
    cluster.load();
    let index = usize::try_from(cluster.random.below(2)).unwrap();
    cluster.promote_this(index);
    cluster.until_all_flows();
    cluster.random.dawdle(2000);
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    cluster.finish();
}

/// The second has the same number, and the daemons stay where they are.
#[test]
fn equal_timelines() {
    let mut cluster = Cluster::start("equal_timelines", Plan::default());
    let ports = cluster.ports();
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    let first = usize::try_from(cluster.random.below(2)).unwrap();
    let rival = 1 - first;
    cluster.promote_this(first);
    cluster.until_all_flows();
    let rival = cluster.index_of(ports[1 + rival]);
    cluster.others[rival].promote().unwrap();
    assert_eq!(
        cluster.others[rival].timeline().unwrap(),
        cluster.lab.server.timeline().unwrap()
    );
    cluster.until_more_acknowledged(40);
    let jobs = cluster.others[rival].sql("app").unwrap();
    let workers = { jobs }
        .run("SELECT count(*) FROM tenure.cluster WHERE epoch_no > 1")
        .unwrap();
    assert_eq!(workers[0][0].as_deref(), Some("0"), "a daemon went over");
    cluster.rejoin(rival);
    cluster.finish();
}

/// It confirms nothing while it is alone, so nothing that was acknowledged can be lost.
#[test]
fn an_isolated_synchronous_primary() {
    let mut cluster = Cluster::start("an_isolated_synchronous_primary", Plan::default());
    cluster.lab.server.set_synchronous("*").unwrap();
    let old = cluster.lab.server.port();
    cluster.load();
    cluster.strike(|_| ());
    cluster.cut_replication();
    cluster.random.dawdle(1500);
    cluster.promote();
    cluster.random.dawdle(2000);
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}
