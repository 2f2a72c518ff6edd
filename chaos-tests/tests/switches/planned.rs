//! The primary changes because somebody wanted it, or does not change at all.

use chaos_tests::{Cluster, Plan, uptime};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A clean stop hands all commits over, so nothing at all may be lost.
#[test]
fn planned_switchover() {
    let mut cluster = Cluster::start("planned_switchover", Plan::default());
    let old = cluster.lab.server.port();
    cluster.load();
    cluster.strike(|primary| primary.stop_fast().unwrap());
    cluster.promote();
    cluster.random.dawdle(1000);
    let old = cluster.index_of(old);
    cluster.rejoin(old);
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}

/// Sessions with the standby live on and take writes: nobody has to connect anew to find the new primary.
#[test]
fn promotion_within_a_living_session() {
    let mut cluster = Cluster::start("promotion_within_a_living_session", Plan::default());
    let old = cluster.lab.server.port();
    cluster.load();
    let index = usize::try_from(cluster.random.below(2)).unwrap();
    cluster.promote_this(index);
    let old = cluster.index_of(old);
    cluster.others[old].stop_fast().unwrap();
    cluster.random.dawdle(1000);
    cluster.rejoin(old);
    cluster.finish();
}

/// And becomes the primary again: the address of the highest timeline is that of the lowest one before.
#[test]
fn the_old_primary_comes_back_on_its_address() {
    let mut cluster = Cluster::start("the_old_primary_comes_back_on_its_address", Plan::default());
    let old = cluster.lab.server.port();
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.promote();
    let place = cluster.index_of(old);
    cluster.rejoin(place);
    cluster.until_all_flows();
    cluster.backlog();
    cluster.strike(|primary| primary.stop_fast().unwrap());
    cluster.promote_this(place);
    assert_eq!(cluster.lab.server.port(), old);
    cluster.finish();
}

#[test]
fn restarted() {
    let mut cluster = Cluster::start("restarted", Plan::default());
    cluster.load();
    if cluster.random.below(2) == 0 {
        cluster.strike(|primary| primary.kill9().unwrap());
    }
    cluster.strike(|primary| primary.restart().unwrap());
    cluster.note_switch(uptime());
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
}

/// Acknowledged commits are gone, and neither the timeline nor the start of the server shows it.
#[test]
fn a_backend_is_killed_with_asynchronous_commit() {
    let mut cluster = Cluster::start(
        "a_backend_is_killed_with_asynchronous_commit",
        Plan::default(),
    );
    // The writer of WAL may then be ten seconds late.
    for setting in ["synchronous_commit = off", "wal_writer_delay = '10s'"] {
        cluster.lab.run(&format!("ALTER SYSTEM SET {setting}"));
    }
    cluster.lab.run("SELECT pg_reload_conf()");
    cluster.load();
    let backend = cluster.lab.value(
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1",
    );
    let backend = Pid::from_raw(backend.parse().unwrap());
    cluster.strike(|_| kill(backend, Signal::SIGKILL).unwrap());
    // What answers first may still be the server from before, which has not noticed.
    cluster.lab.wait_for(|| {
        let mut sql = cluster
            .lab
            .server
            .sql("app")
            .map_err(|error| error.to_string())?;
        match sql.run("SELECT count(*) FROM tenure.here") {
            Ok(rows) if rows[0][0].as_deref() == Some("0") => Ok(()),
            Ok(_) => match sql.run("SELECT epoch_no > 1 FROM tenure.cluster") {
                Ok(rows) if rows[0][0].as_deref() == Some("t") => Ok(()),
                other => Err(format!("{other:?}")),
            },
            Err(error) => Err(error.to_string()),
        }
    });
    cluster.note_switch(uptime());
    cluster.finish();
}
