//! Jobs that a receiver has accepted (202): whatever befalls the daemon that brought them, or the primary.

use std::fs;

use chaos_tests::{Daemon, Lab, Receiver, UNFINISHED, servers};
use tenure_embedded::{Server, free_port};

const OPEN: &str = "SELECT count(*) FROM tenure.lease WHERE until IS NOT NULL";
const TWICE: &str = "SELECT count(*) FROM tenure.attempts WHERE outcome <> 'completed'";

/// A daemon with an interface, and its port.
fn daemon(lab: &Lab, name: &str, set: &[&str]) -> (Daemon, u16) {
    let port = free_port().unwrap();
    let listen = format!("api.listen=127.0.0.1:{port}");
    let set = [set, &[listen.as_str(), "worker.lease_ttl=10s"]].concat();
    (lab.daemon(name, &set), port)
}

#[test]
fn a_daemon_that_is_killed_leaves_its_open_jobs_to_their_receiver() {
    let mut lab = Lab::start();
    let receiver = Receiver::start();
    // Only the first one has the handler: nobody else could run such a job again.
    let (_other, api) = daemon(&lab, "b", &[]);
    lab.add_handlers(&receiver.handler());
    let (mut first, own) = daemon(&lab, "a", &[]);
    let jobs = lab.enqueue_many("later", 20);
    lab.until(OPEN, "20");
    assert_eq!(receiver.complete(&jobs[0], own), 200);
    first.kill9();
    assert_eq!(receiver.complete(&jobs[1], api), 200);
    lab.until(
        "SELECT count(*) FROM tenure.workers WHERE status = 'lost'",
        "1",
    );
    let (third, _) = daemon(&lab, "c", &[]);
    lab.until_live(2);
    assert_eq!(lab.value(OPEN), "18");
    receiver.complete_all(&jobs, api);
    assert_eq!(lab.value(UNFINISHED), "0");
    assert_eq!(lab.value(TWICE), "0");
    assert!(receiver.brought().values().all(|times| *times == 1));
    drop(third);
}

/// Of some jobs the claim is lost, of some the enqueue too, of some the completion. None is brought to the receiver again.
#[test]
fn a_switch_that_loses_commits_keeps_open_jobs() {
    let primary = Server::start(chaos_tests::Cluster::options()).unwrap();
    let mut others = servers::two_standbys(&primary);
    let hosts: Vec<String> = std::iter::once(&primary)
        .chain(&others)
        .map(|server| format!("127.0.0.1:{}", server.port()))
        .collect();
    let url = format!("postgres://postgres@{}/app", hosts.join(","));
    let mut lab = Lab::on(primary, url);
    let receiver = Receiver::start();
    lab.add_handlers(&receiver.handler());
    let (_first, first) = daemon(&lab, "a", &[]);
    let (_second, second) = daemon(&lab, "b", &[]);
    let before = lab.enqueue_many("later", 20);
    lab.until(OPEN, "20");
    lab.run("SELECT tenure.pause('later')");
    let waiting = lab.enqueue_many("later", 10);
    let target = lab.server.position().unwrap();
    lab.wait_for(|| servers::have_all(&others, target));

    servers::cut_replication(&others);
    lab.run("SELECT tenure.resume('later')");
    lab.until(OPEN, "30");
    let lost = lab.enqueue_many("later", 10);
    lab.until(OPEN, "40");
    receiver.complete_all(&before[..5], first);
    receiver.complete_all(&before[5..10], second);
    lab.server.kill9().unwrap();
    let furthest = servers::furthest(&others);
    others[furthest].promote().unwrap();
    std::mem::swap(&mut lab.server, &mut others[furthest]);

    // Said while the workers re-attach: nobody is told that his run is over before they have.
    receiver.complete_all(&[&waiting[..5], &lost[..5]].concat(), second);
    lab.until("SELECT gate || epoch_no FROM tenure.cluster", "open2");
    assert_eq!(lab.value(OPEN), "20");
    receiver.complete_all(&[before, waiting, lost].concat(), first);
    assert_eq!(lab.value(UNFINISHED), "0");
    assert_eq!(lab.value("SELECT count(*) FROM tenure.jobs"), "40");
    assert_eq!(lab.value(TWICE), "0");
    let brought = receiver.brought();
    assert!(
        brought.len() == 40 && brought.values().all(|times| *times == 1),
        "{brought:?}"
    );
}

#[test]
fn ten_thousand_open_jobs_take_little_memory_and_outlive_their_daemon() {
    let mut lab = Lab::start();
    let receiver = Receiver::start();
    lab.add_handlers(&receiver.handler());
    let (mut first, own) = daemon(&lab, "a", &["worker.concurrency=32"]);
    lab.until_live(1);
    let (_other, api) = daemon(&lab, "b", &["worker.concurrency=1"]);
    let idle = resident_mib(&first);
    lab.run(
        "SELECT tenure.enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'later', 'data', jsonb_build_object('text', repeat('x', 1000)))) FROM generate_series(1, 10000)))",
    );
    lab.until(OPEN, "10000");
    let full = resident_mib(&first);
    println!("10,000 open jobs with 1 kB each: {full} MiB resident; {idle} MiB before");
    assert!(full < 200, "{full} MiB");
    let rows = lab.rows("SELECT id FROM tenure.jobs");
    let jobs: Vec<String> = rows.into_iter().flatten().flatten().collect();
    receiver.complete_all(&jobs[..100], own);
    receiver.complete_all(&jobs[100..300], api);
    lab.until(OPEN, "9700");
    assert_eq!(lab.value(TWICE), "0");
    assert_eq!(first.stop(), 0, "{}", first.log());
    assert_eq!(lab.value(OPEN), "9700");
}

/// How much of the memory this daemon has.
fn resident_mib(daemon: &Daemon) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    kib.unwrap().parse::<u64>().unwrap() / 1024
}
