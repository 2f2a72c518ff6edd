//! Nobody can know what has happened, so nothing is claimed until a person has decided.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use chaos_tests::{Cluster, Plan, What, uptime};
use tenure_embedded::{Options, Server};

const GATE: &str = "SELECT gate FROM tenure.cluster";

fn decide(cluster: &Cluster<'_>, arguments: &[&str]) {
    let said = cluster.lab.tenure(arguments);
    assert!(
        said.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&said.stderr)
    );
}

/// Waits until the gate is on hold, and sees that nothing starts while others go on enqueueing.
fn assert_held(cluster: &Cluster<'_>) {
    cluster.lab.until(GATE, "hold");
    // What was claimed before may be starting right now.
    cluster.until_more_acknowledged(5);
    let started = cluster.lab.count(What::Start);
    cluster.until_more_acknowledged(20);
    assert_eq!(
        cluster.lab.count(What::Start),
        started,
        "a job started on hold"
    );
    assert_eq!(cluster.lab.value(GATE), "hold");
}

/// More is gone than the daemons remember.
#[test]
fn restored_to_an_earlier_time() {
    let plan = Plan {
        uncovered: true,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("restored_to_an_earlier_time", plan);
    cluster.load();
    let backup = cluster.lab.server.backup().unwrap();
    // Long enough for all that ended just after the backup to be proven safe, on all hosts, and to be forgotten.
    cluster.until_more_witnessed(What::End, 20);
    let beat = cluster.lab.value("SELECT now() + interval '4 s'");
    cluster.lab.until(
        &format!("SELECT count(*) FROM tenure.workers WHERE last_heartbeat > '{beat}'"),
        "3",
    );
    for standby in &mut cluster.others {
        standby.stop_fast().unwrap();
    }
    cluster.strike(|primary| primary.restore(&backup).unwrap());
    cluster.note_switch(uptime());
    for index in 0..2 {
        cluster.rejoin(index);
    }
    assert_held(&cluster);
    let mut resume = vec!["cluster", "resume"];
    if cluster.random.below(2) == 0 {
        resume.push("--rerun");
    }
    decide(&cluster, &resume);
    cluster.finish();
}

/// As after `pg_upgrade`, or a dump that was read into a new server: all is there, even the proof that nothing happened.
#[test]
fn another_system_identifier() {
    // The outage is long, and in its middle the old server is there for a moment: no lease outlasts that for sure.
    let plan = Plan {
        interruptions: true,
        ..Plan::default()
    };
    let mut cluster = Cluster::start("another_system_identifier", plan);
    cluster.load();
    let home = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir_in("/tmp")
        .unwrap();
    let options = |port| Options {
        data_dir: Some(home.path().join("pg")),
        port,
        ..Cluster::options()
    };
    let new = Server::start(options(0)).unwrap();
    // Nobody writes any more.
    cluster.strike(|_| ());
    cluster.lab.wait_for(|| {
        let mut sql = cluster
            .lab
            .server
            .sql("postgres")
            .map_err(|error| error.to_string())?;
        sql.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'app'")
            .and_then(|_| sql.run("ALTER DATABASE app RENAME TO over"))
            .map(drop)
            .map_err(|error| error.to_string())
    });
    copy(&cluster.lab.server, &new, home.path());
    let port = cluster.lab.server.port();
    drop(new);
    for standby in &mut cluster.others {
        standby.stop_fast().unwrap();
    }
    cluster.lab.server.stop_fast().unwrap();
    cluster.lab.server = Server::start(options(port)).unwrap();
    cluster.note_switch(uptime());
    for index in 0..2 {
        cluster.rejoin(index);
    }
    assert_held(&cluster);
    decide(&cluster, &["cluster", "accept", "--reason", "upgraded"]);
    let judgement = cluster.finish().judgement;
    assert!(judgement.cut_off.is_empty(), "{:?}", judgement.cut_off);
    cluster.lab.server.stop_fast().unwrap();
}

/// All roles and the database, by a dump.
fn copy(from: &Server, to: &Server, folder: &std::path::Path) {
    let port = |server: &Server| server.port().to_string();
    let run = |command: &mut Command| {
        let status = command.stderr(Stdio::null()).status().unwrap();
        assert!(status.success(), "{command:?}");
    };
    let dumps = [
        ("pg_dumpall", vec!["--roles-only"], "postgres"),
        ("pg_dump", vec!["--dbname=over"], "app"),
    ];
    to.create_database("app").unwrap();
    for (program, arguments, database) in dumps {
        let path = folder.join(program);
        let file = File::create(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        run(from
            .program(program)
            .args([
                "--host=127.0.0.1",
                "--username=postgres",
                "--port",
                &port(from),
            ])
            .args(arguments)
            .stdout(file));
        run(to
            .program("psql")
            .args([
                "--no-psqlrc",
                "--quiet",
                "--host=127.0.0.1",
                "--username=postgres",
            ])
            .args(["--port", &port(to), "--dbname", database, "--file"])
            .arg(&path)
            .stdout(Stdio::null()));
    }
}
