//! What asks for a synchronous standby waits for it, and nothing else does.

use std::process::Stdio;

use chaos_tests::{Cluster, Lab, What};
use tenure_embedded::Server;

/// Commits that wait for their standby.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

/// A server whose commits wait for its own disk only, unless they ask for more, and its standby.
fn lab_with_a_standby() -> (Lab, Server) {
    let mut options = Cluster::options();
    let local = ("synchronous_commit".to_owned(), "local".to_owned());
    options.settings.push(local);
    let server = Server::start(options).unwrap();
    let standby = server.standby().unwrap();
    let url = server.url("app", "postgres");
    (Lab::on(server, url), standby)
}

#[test]
fn a_job_starts_only_when_a_standby_has_its_claim() {
    let (lab, standby) = lab_with_a_standby();
    lab.server.set_synchronous("*").unwrap();
    let mut daemon = lab.daemon("a", &["handlers.exit-*.durability=replicated"]);
    lab.until_live(1);
    standby.freeze().unwrap();
    let job = lab.enqueue("exit-0");
    lab.until(WAITING, "1");
    // An administrator ends the wait: the claim is committed, and only here. It does not count, and is made again.
    let cancelled = "SELECT count(*) FROM (SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep') cancelled";
    let first = lab.value("SELECT token FROM tenure.lease");
    assert_eq!(first, "", "a claim is seen before its standby has it");
    assert_eq!(lab.value(cancelled), "1");
    lab.until(WAITING, "1");
    assert_eq!(lab.count(What::Start), 0);
    standby.thaw().unwrap();
    lab.until_status(&job, "completed");
    assert_eq!(lab.count(What::Start), 1);
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
}

#[test]
fn an_enqueue_is_acknowledged_only_when_a_standby_has_it() {
    let (lab, standby) = lab_with_a_standby();
    let enqueue = ["enqueue", "noop", "--durability", "replicated"];
    let refused = lab.tenure(&enqueue);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("no synchronous standby"), "{said}");
    lab.server.set_synchronous("*").unwrap();
    assert!(lab.tenure(&enqueue).status.success());
    standby.freeze().unwrap();
    let waits = lab
        .command()
        .args(enqueue)
        .env("TENURE_DATABASE__URL", lab.url())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    lab.until(WAITING, "1");
    lab.run("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
    let output = waits.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("without its synchronous standby"), "{said}");
    standby.thaw().unwrap();
}
