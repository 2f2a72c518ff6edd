//! Clusters of real servers: promoted, diverged, taken back, restored.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use tenure_embedded::{Followed, Options, Server, Sql, SqlError};

use crate::wait_for;

fn primary() -> Server {
    let settings = Server::cluster_settings();
    let server = Server::start(Options {
        settings,
        ..Options::for_tests()
    })
    .unwrap();
    run(&server, "CREATE TABLE t (n int)");
    server
}

fn run(server: &Server, sql: &str) {
    server.sql("postgres").unwrap().run(sql).unwrap();
}

fn numbers(server: &Server) -> String {
    let query = "SELECT coalesce(string_agg(n::text, ' ' ORDER BY n), '') FROM t";
    let rows = server.sql("postgres").unwrap().run(query).unwrap();
    rows[0][0].clone().unwrap()
}

fn until_same(standby: &Server, primary: &Server) {
    wait_for(|| numbers(standby) == numbers(primary));
}

#[test]
fn a_standby_streams_and_becomes_the_primary() {
    let mut old = primary();
    let standby = old.standby().unwrap();
    run(&old, "INSERT INTO t VALUES (1)");
    until_same(&standby, &old);
    assert!(standby.is_standby().unwrap() && !old.is_standby().unwrap());
    assert!(standby.position().unwrap() <= old.position().unwrap());
    let refused = standby
        .sql("postgres")
        .unwrap()
        .run("INSERT INTO t VALUES (2)");
    assert_eq!(refused.unwrap_err().code(), Some("25006"));
    old.kill9().unwrap();
    standby.promote().unwrap();
    run(&standby, "INSERT INTO t VALUES (3)");
    assert_eq!(
        (numbers(&standby).as_str(), standby.timeline().unwrap()),
        ("1 3", 2)
    );
}

#[test]
fn an_old_primary_that_went_its_own_way_is_taken_back_on_its_address() {
    let mut old = primary();
    let (new, mut other) = (old.standby().unwrap(), old.standby().unwrap());
    let port = old.port();
    run(&old, "INSERT INTO t VALUES (1)");
    until_same(&new, &old);
    new.cut_replication().unwrap();
    other.cut_replication().unwrap();
    run(&old, "INSERT INTO t VALUES (2)");
    new.promote().unwrap();
    run(&new, "INSERT INTO t VALUES (3)");
    assert_eq!(
        (numbers(&old).as_str(), numbers(&new).as_str()),
        ("1 2", "1 3")
    );
    assert_eq!(other.follow(&new).unwrap(), Followed::Repointed);
    assert_eq!(old.follow(&new).unwrap(), Followed::Rewound);
    assert_eq!(old.port(), port);
    for server in [&old, &other] {
        until_same(server, &new);
        assert_eq!(server.timeline().unwrap(), 2);
    }
    // And the other way round, after a clean stop, with nothing to rewind.
    let mut new = new;
    until_same(&old, &new);
    new.stop_fast().unwrap();
    old.promote().unwrap();
    assert_eq!(new.follow(&old).unwrap(), Followed::Rewound);
    run(&old, "INSERT INTO t VALUES (4)");
    until_same(&new, &old);
    assert_eq!(
        (numbers(&new).as_str(), new.timeline().unwrap()),
        ("1 3 4", 3)
    );
}

#[test]
fn a_server_of_another_origin_gets_new_data() {
    let primary = primary();
    // Temporary servers are all copies of one template, and so have one system identifier; lasting ones have their own.
    let home = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o755))
        .tempdir()
        .unwrap();
    let mut stranger = Server::start(Options {
        data_dir: Some(home.path().join("pg")),
        settings: Server::cluster_settings(),
        ..Options::for_tests()
    })
    .unwrap();
    run(&primary, "INSERT INTO t VALUES (7)");
    assert_eq!(stranger.follow(&primary).unwrap(), Followed::Copied);
    assert_eq!(numbers(&stranger), "7");
}

#[test]
fn a_cut_standby_stays_behind_until_it_is_healed() {
    let primary = primary();
    let standby = primary.standby().unwrap();
    standby.cut_replication().unwrap();
    run(&primary, "INSERT INTO t VALUES (1)");
    assert_eq!(numbers(&standby), "");
    standby.heal_replication(&primary).unwrap();
    until_same(&standby, &primary);
}

#[test]
fn a_synchronous_primary_confirms_nothing_alone() {
    let primary = primary();
    let standby = primary.standby().unwrap();
    primary.set_synchronous("*").unwrap();
    run(&primary, "INSERT INTO t VALUES (1)");
    until_same(&standby, &primary);
    standby.cut_replication().unwrap();
    let limit = Duration::from_millis(500);
    let mut sql = Sql::connect_within(limit, primary.port(), "postgres", "postgres").unwrap();
    let waits = sql.run("INSERT INTO t VALUES (2)");
    assert!(matches!(waits, Err(SqlError::Connection(_))), "{waits:?}");
    assert_eq!(numbers(&primary), "1");
    primary.set_synchronous("").unwrap();
    run(&primary, "INSERT INTO t VALUES (3)");
    assert_eq!(numbers(&primary), "1 2 3");
}

#[test]
fn a_restored_backup_is_an_earlier_time_on_a_new_timeline() {
    let mut server = primary();
    run(&server, "INSERT INTO t VALUES (1)");
    let backup = server.backup().unwrap();
    run(&server, "INSERT INTO t VALUES (2)");
    let port = server.port();
    server.restore(&backup).unwrap();
    run(&server, "INSERT INTO t VALUES (3)");
    assert_eq!((numbers(&server).as_str(), server.port()), ("1 3", port));
    assert_eq!(server.timeline().unwrap(), 2);
    assert!(!server.is_standby().unwrap());
    server.restart().unwrap();
    assert_eq!(numbers(&server), "1 3");
}
