//! Two primaries, and a daemon that reaches only the older one: what nobody can promise. Then it has to be known what ran twice.

use std::collections::{BTreeMap, BTreeSet};

use chaos_tests::{Cluster, Plan, Proxy, What};
use tenure_verdict::Fault;

/// The one that goes astray.
const ASTRAY: usize = 2;

#[test]
fn what_ran_twice_is_on_record() {
    let mut cluster = Cluster::start("what_ran_twice_is_on_record", Plan::usual());
    let old = cluster.lab.server.port();
    let proxy = Proxy::to(old);
    cluster.leave(ASTRAY);
    let url = format!("database.url={}", proxy.url("app", "postgres"));
    cluster.set(ASTRAY, &url);
    cluster.start_daemon(ASTRAY);
    cluster.lab.until_live(3);
    cluster.load();
    cluster.promote_this(0);
    // The others follow the new one, and see both.
    cluster
        .lab
        .wait_for(|| match cluster.metric(0, "tenure_two_primaries ") {
            Some(1.0) => Ok(()),
            other => Err(format!("tenure_two_primaries is {other:?}")),
        });
    // Here its lease ends, there it works on.
    cluster.lab.until(
        "SELECT count(*) FROM tenure.workers WHERE status = 'lost'",
        "1",
    );
    cluster.until_more_witnessed(What::End, 60);
    let port = cluster.lab.server.port();
    proxy.point_to(port);
    proxy.cut();
    cluster.lab.until_live(3);
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    let judgement = cluster.conclude().judgement;

    let mut ended: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let lines = cluster.lab.witnesses();
    for line in lines.into_iter().filter(|line| line.what == What::End) {
        ended.entry(line.job).or_default().insert(line.token);
    }
    let twice: BTreeSet<String> = ended
        .into_iter()
        .filter(|(_, runs)| runs.len() > 1)
        .map(|(job, _)| job)
        .collect();
    assert!(
        !twice.is_empty(),
        "nothing ran twice: the scenario shows nothing"
    );
    let of = |what: &str| -> BTreeSet<String> {
        let rows = cluster.lab.rows(&format!(
            "SELECT job_id FROM tenure.switch_jobs WHERE what = '{what}'"
        ));
        rows.into_iter().flatten().flatten().collect()
    };
    assert_eq!(of("ran_twice"), twice);
    assert_eq!(
        cluster
            .lab
            .value("SELECT sum(ran_twice) FROM tenure.switches"),
        twice.len().to_string()
    );
    let stopped = of("stopped");
    let others: Vec<&Fault> = judgement
        .faults
        .iter()
        .filter(|fault| !twice.contains(fault.job()) && !stopped.contains(fault.job()))
        .collect();
    assert!(others.is_empty(), "{others:?}");
    assert!(judgement.lost.is_empty(), "{:?}", judgement.lost);
}
