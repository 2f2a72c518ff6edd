//! Long outages, and servers whose clocks are wrong.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use chaos_tests::{Cluster, Plan, What, uptime};
use tempfile::TempDir;

use crate::clocks::libfaketime;

/// The clock of a server that has the environment of this; it must be where the server's user can read it.
struct Clock {
    folder: TempDir,
}

impl Clock {
    fn new() -> Self {
        let folder = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .unwrap();
        let clock = Self { folder };
        clock.set("+0");
        clock
    }

    /// Steps it to this many seconds from the right time.
    fn set(&self, offset: &str) {
        let file = self.folder.path().join("offset");
        fs::write(&file, offset).unwrap();
        fs::set_permissions(file, Permissions::from_mode(0o644)).unwrap();
    }

    fn environment(&self) -> Vec<(String, String)> {
        let file = self.folder.path().join("offset");
        [
            ("LD_PRELOAD", libfaketime().display().to_string()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ("FAKETIME_NO_CACHE", "1".to_owned()),
            ("FAKETIME_TIMESTAMP_FILE", file.display().to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .to_vec()
    }
}

/// Handlers go on as long as it is proven that there is no primary.
#[test]
fn an_outage_longer_than_the_lease() {
    let mut cluster = Cluster::start("an_outage_longer_than_the_lease", Plan::default());
    cluster.load();
    cluster.enqueue("ticks-150", 3);
    cluster.until_more_witnessed(What::Start, 3);
    cluster.strike(|primary| primary.kill9().unwrap());
    let begun = uptime();
    cluster.lab.wait_for(|| match (uptime() - begun).as_secs() {
        0..11 => Err("the outage has not lasted longer than the lease".to_owned()),
        _ => Ok(()),
    });
    cluster.random.dawdle(2000);
    cluster.promote();
    cluster.finish();
}

#[test]
fn the_new_primary_has_another_clock() {
    let mut cluster = Cluster::start("the_new_primary_has_another_clock", Plan::default());
    let clock = Clock::new();
    let offset = *cluster.random.choose(&["+600", "-600"]);
    clock.set(offset);
    let index = usize::try_from(cluster.random.below(2)).unwrap();
    cluster.others[index].set_environment(clock.environment());
    cluster.others[index].restart().unwrap();
    cluster.load();
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(1000);
    cluster.promote_this(index);
    let apart = cluster.lab.value(&format!(
        "SELECT abs(extract(epoch FROM now()) - {}) > 500",
        now()
    ));
    assert_eq!(apart, "t", "its clock is right");
    cluster.finish();
}

/// No server is changed here; the one that there is goes to another time and back.
#[test]
fn the_clock_is_stepped() {
    let mut cluster = Cluster::start("the_clock_is_stepped", Plan::default());
    let clock = Clock::new();
    cluster.lab.server.set_environment(clock.environment());
    cluster.lab.server.restart().unwrap();
    cluster.load();
    let there = *cluster.random.choose(&["+600", "-600"]);
    for offset in [there, "+0"] {
        clock.set(offset);
        cluster.until_more_acknowledged(30);
        cluster.until_more_witnessed(What::End, 30);
        cluster.random.dawdle(1000);
    }
    cluster.finish();
}

/// Seconds since 1970 by the right clock.
fn now() -> u64 {
    let output = std::process::Command::new("date")
        .arg("+%s")
        .output()
        .unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}
