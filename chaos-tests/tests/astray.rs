//! What nobody can promise: a daemon that reaches only the older of two primaries, and a machine that stands still. Then it has to be
//! known what ran twice.

use std::collections::{BTreeMap, BTreeSet};

use chaos_tests::{Cluster, Lab, Plan, Proxy, What};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tenure_embedded::children;
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
        "SELECT status FROM tenure.workers WHERE name = 'c' ORDER BY started_at DESC LIMIT 1",
        "lost",
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

/// A process and all that come from it.
fn tree(pid: i32) -> Vec<i32> {
    let below = children(pid).into_iter().flat_map(tree);
    std::iter::once(pid).chain(below).collect()
}

fn signal(pids: &[i32], signal: Signal) {
    for pid in pids {
        // One that has ended is no matter.
        let _ = kill(Pid::from_raw(*pid), signal);
    }
}

/// Nobody can stop the handlers of a machine that stands still. When it goes on, they may be quicker than the guard, and nobody knows
/// what they did: each run that was lost with the machine is on record, and the daemon says that others may have its jobs.
#[test]
fn a_machine_that_stood_still() {
    let lab = Lab::start();
    let mut daemon = lab.daemon("a", &[]);
    lab.until_live(1);
    let job = lab.enqueue("ticks-30");
    lab.until_witnessed(What::Tick, 3);
    let handler = lab.witnesses()[0].pid;
    let mut other = lab.daemon("b", &[]);
    lab.until_live(2);
    let machine = tree(daemon.pid());
    assert!(
        machine.contains(&handler) && machine.len() > 3,
        "{machine:?}"
    );
    signal(&machine, Signal::SIGSTOP);
    lab.until_status(&job, "completed");
    signal(&tree(handler), Signal::SIGCONT);
    lab.until_witnessed(What::End, 2);
    signal(&machine, Signal::SIGCONT);
    lab.until_live(2);
    let lost = "SELECT job_id FROM tenure.attempts WHERE outcome = 'lost'";
    assert_eq!(lab.rows(lost), [[Some(job)]]);
    let told = "the process is another worker from now on";
    lab.wait_for(|| match daemon.log().contains(told) {
        true => Ok(()),
        false => Err(format!("not said: {told}")),
    });
    for daemon in [&mut daemon, &mut other] {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}
