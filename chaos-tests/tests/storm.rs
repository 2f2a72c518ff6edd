//! Thousands of jobs over three daemons that are killed, stopped, asked to leave, and started again.

use std::thread;
use std::time::Duration;

use chaos_tests::{Daemon, Lab, UNFINISHED, What, enqueue_many};
use nix::sys::signal::Signal;

const SHORT: usize = 3_000;
const LONG: [(&str, usize); 4] = [
    ("ticks-3", 100),
    ("ticks-10", 60),
    ("ticks-20", 40),
    ("stubborn-20", 20),
];

/// What happens to a daemon; afterwards it runs again.
#[derive(Clone, Copy)]
enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP for longer than its lease, then SIGCONT.
    Freeze,
    /// SIGTERM.
    Leave,
}

#[test]
fn nothing_is_lost_and_nothing_runs_twice() {
    use Blow::{Freeze, Kill, Leave};
    let lab = Lab::start();
    let acknowledged: Vec<String> = thread::scope(|scope| {
        let battered = [
            ("a", true, [Kill, Freeze, Leave]),
            ("b", false, [Freeze, Leave, Kill]),
            ("c", true, [Leave, Kill, Freeze]),
        ]
        .map(|(name, kept, blows)| {
            let lab = &lab;
            scope.spawn(move || batter(lab, name, kept, &blows))
        });
        let acknowledged = produce(&lab);
        let daemons = battered.map(|thread| thread.join().unwrap());
        lab.until(UNFINISHED, "0");
        for mut daemon in daemons {
            assert_eq!(daemon.stop(), 0, "{}", daemon.log());
        }
        acknowledged
    });
    assert_eq!(
        acknowledged.len(),
        SHORT + LONG.iter().map(|(_, count)| count).sum::<usize>()
    );
    lab.assert_sound(&acknowledged);
    // It was a storm: runs were ended and repeated, and daemons were lost.
    let starts = lab.count(What::Start);
    assert!(starts > acknowledged.len() + 10, "only {starts} starts");
    let lost = lab.value("SELECT count(*) FROM tenure.workers WHERE status = 'lost'");
    assert!(
        lost.parse::<i32>().unwrap() >= 3,
        "only {lost} workers were lost"
    );
}

/// Runs a daemon through its blows, and returns the one that is left.
fn batter(lab: &Lab, name: &str, kept: bool, blows: &[Blow]) -> Daemon {
    let state_dir = lab.state_dir(name);
    let set: &[&str] = if kept { &[&state_dir] } else { &[] };
    let mut daemon = lab.daemon(name, set);
    for blow in blows {
        thread::sleep(Duration::from_secs(3));
        match blow {
            Blow::Kill => daemon.kill9(),
            Blow::Leave => assert_eq!(daemon.stop(), 0, "{}", daemon.log()),
            Blow::Freeze => {
                daemon.signal(Signal::SIGSTOP);
                // Its handlers must be dead when the others take its jobs; nobody but the guard can do that.
                thread::sleep(Duration::from_secs(10));
                daemon.signal(Signal::SIGCONT);
                continue;
            }
        }
        daemon = lab.daemon(name, set);
    }
    daemon
}

/// Puts all jobs in while the storm goes on, long and short mixed.
fn produce(lab: &Lab) -> Vec<String> {
    let mut sql = lab.sql();
    let mut ids = Vec::new();
    for _ in 0..20 {
        for (job_type, count) in LONG {
            ids.extend(enqueue_many(&mut sql, job_type, count / 20).unwrap());
        }
        ids.extend(enqueue_many(&mut sql, "ticks-0", SHORT / 20).unwrap());
        thread::sleep(Duration::from_secs(1));
    }
    ids
}
