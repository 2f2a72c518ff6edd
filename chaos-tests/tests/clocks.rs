//! Clocks that are wrong, jump, or show another zone.

use std::fs;
use std::path::PathBuf;

use chaos_tests::{Lab, UNFINISHED, What};

/// Debian's package `faketime`.
pub(crate) fn libfaketime() -> PathBuf {
    fs::read_dir("/usr/lib")
        .unwrap()
        .map(|entry| entry.unwrap().path().join("faketime/libfaketimeMT.so.1"))
        .find(|path| path.is_file())
        .expect("libfaketime is installed (scripts/setup test)")
}

/// B21: only the database's clock counts, and the monotonic one.
#[test]
fn workers_need_no_right_clock() {
    let lab = Lab::start();
    let step = lab.path("step");
    fs::write(&step, "+0").unwrap();
    let faked = |name: &str, variable: &str, value: &str| {
        let mut command = lab.command();
        command
            .env("LD_PRELOAD", libfaketime())
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("FAKETIME_NO_CACHE", "1")
            .env(variable, value);
        lab.daemon_by(command, name, &[])
    };
    let daemons = [
        faked("ahead", "FAKETIME", "+10m"),
        faked("behind", "FAKETIME", "-10m"),
        faked(
            "stepping",
            "FAKETIME_TIMESTAMP_FILE",
            step.to_str().unwrap(),
        ),
    ];
    lab.until_live(3);
    let mut jobs = lab.enqueue_many("ticks-100", 6);
    jobs.extend(lab.enqueue_many("ticks-2", 30));
    for _ in 0..20 {
        jobs.push(lab.value("SELECT tenure.enqueue('ticks-1', run_at => now() + interval '4 s')"));
    }
    for hour in ["+1h", "-1h", "+0"] {
        let seen = lab.count(What::Tick);
        fs::write(&step, hour).unwrap();
        lab.until_witnessed(What::Tick, seen + 40);
    }
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), jobs.len());
    assert_eq!(
        lab.value("SELECT count(*) FROM tenure.jobs WHERE started_at < run_at"),
        "0"
    );
    lab.assert_sound(&jobs);
    // They did have those clocks.
    let year_and_hour = |log: &str| {
        log.lines()
            .next()
            .unwrap_or_default()
            .trim()
            .get(..16)
            .map(str::to_owned)
    };
    let [ahead, behind, _] = daemons.map(|daemon| year_and_hour(&daemon.log()));
    assert!(ahead > behind, "{ahead:?} {behind:?}");
}

/// B64.
#[test]
fn time_zones_move_nothing() {
    let lab = Lab::start();
    lab.run("ALTER DATABASE app SET timezone = 'Asia/Shanghai'");
    let mut command = lab.command();
    command.env("TZ", "America/New_York");
    let _daemon = lab.daemon_by(command, "a", &[]);
    let by_sql = lab.value("SELECT tenure.enqueue('ticks-1', run_at => now() + interval '3 s')");
    let said = lab.tenure(&["enqueue", "ticks-1", "--in", "3s", "--wait"]);
    assert!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    lab.until_status(&by_sql, "completed");
    let late = "SELECT count(*) FROM tenure.jobs WHERE run_at BETWEEN created_at + interval '2 s' AND created_at + interval '4 s' \
                AND started_at BETWEEN run_at AND run_at + interval '1 minute' AND completed_at BETWEEN started_at AND now() \
                AND created_at BETWEEN now() - interval '5 minutes' AND now()";
    assert_eq!(lab.value(late), "2");
    let naive = "SELECT count(*) FROM information_schema.columns WHERE table_schema = 'tenure' AND data_type = 'timestamp without time zone'";
    assert_eq!(lab.value(naive), "0");
    lab.assert_sound(&[by_sql]);
}
