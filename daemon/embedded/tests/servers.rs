//! Real servers, started, hurt and stopped.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use tenure_embedded::{Error, Options, Server, Sql, SqlError};

use crate::wait_for;

fn server() -> Server {
    Server::start(Options::for_tests()).unwrap()
}

fn home(mode: u32) -> TempDir {
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(mode))
        .tempdir()
        .unwrap()
}

fn one(sql: &mut Sql, query: &str) -> String {
    sql.run(query).unwrap()[0][0].clone().unwrap()
}

#[test]
fn accepts_connections_as_an_ordinary_user() {
    let server = server();
    server.create_database("app \"x\"").unwrap();
    server.create_database("app").unwrap();
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    assert_eq!(
        one(&mut sql, "SHOW server_version")
            .split(' ')
            .next()
            .unwrap(),
        server.version()
    );
    assert_eq!(one(&mut sql, "SHOW fsync"), "off");
    assert_eq!(
        server.url("app", "me"),
        format!("postgres://me@127.0.0.1:{}/app", server.port())
    );
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", server.pid().unwrap())).unwrap();
    let uids = status
        .lines()
        .find(|line| line.starts_with("Uid:"))
        .unwrap();
    assert!(
        uids.split_whitespace().skip(1).all(|uid| uid != "0"),
        "{uids}"
    );
}

#[test]
fn rows_nulls_and_refusals_come_back() {
    let server = server();
    let mut sql = server.sql("postgres").unwrap();
    let rows = sql
        .run("SELECT 1, NULL, 'é'; SELECT ''; CREATE TABLE t (id int)")
        .unwrap();
    let text = |value: &str| Some(value.to_owned());
    assert_eq!(rows, [vec![text("1"), None, text("é")], vec![text("")]]);
    let error = sql.run("SELECT 1 / 0").unwrap_err();
    assert_eq!(error.code(), Some("22012"));
    let error = sql.run("COPY t FROM STDIN").unwrap_err();
    assert_eq!(error.code(), Some("57014"));
    assert_eq!(one(&mut sql, "SELECT 2"), "2");
    let error = Sql::connect(server.port(), "nowhere", "postgres").unwrap_err();
    assert_eq!(error.code(), Some("3D000"));
}

#[test]
fn settings_win_over_ours() {
    let settings = vec![
        ("fsync".to_owned(), "on".to_owned()),
        ("work_mem".to_owned(), "8MB".to_owned()),
    ];
    let server = Server::start(Options {
        settings,
        ..Options::for_tests()
    })
    .unwrap();
    let mut sql = server.sql("postgres").unwrap();
    assert_eq!(
        (one(&mut sql, "SHOW fsync"), one(&mut sql, "SHOW work_mem")),
        ("on".to_owned(), "8MB".to_owned())
    );
}

#[test]
fn an_environment_is_that_of_the_next_start() {
    let mut server = server();
    server.set_environment(vec![("LC_MESSAGES".to_owned(), "C".to_owned())]);
    server.restart().unwrap();
    let environment = std::fs::read(format!("/proc/{}/environ", server.pid().unwrap()));
    // Where we may not look into processes of others, it is enough that it started.
    if let Ok(environment) = environment {
        assert!(String::from_utf8_lossy(&environment).contains("LC_MESSAGES=C"));
    }
}

#[test]
fn what_committed_survives_kill_and_restart_on_the_same_port() {
    let mut server = server();
    let port = server.port();
    let mut sql = server.sql("postgres").unwrap();
    sql.run("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")
        .unwrap();
    server.kill9().unwrap();
    assert!(matches!(sql.run("SELECT 1"), Err(SqlError::Connection(_))));
    assert!(matches!(
        server.sql("postgres"),
        Err(SqlError::Connection(_))
    ));
    server.restart().unwrap();
    assert_eq!(
        one(
            &mut server.sql("postgres").unwrap(),
            "SELECT count(*) FROM t"
        ),
        "1"
    );
    server.restart().unwrap();
    assert_eq!(
        one(
            &mut Sql::connect(port, "postgres", "postgres").unwrap(),
            "SELECT id FROM t"
        ),
        "1"
    );
}

#[test]
fn a_frozen_server_answers_when_it_goes_on() {
    let server = server();
    let mut sql = server.sql("postgres").unwrap();
    server.freeze().unwrap();
    let (send, receive) = mpsc::channel();
    let waiting = thread::spawn(move || send.send(one(&mut sql, "SELECT 3")).unwrap());
    let silence = receive.recv_timeout(Duration::from_millis(300));
    assert_eq!(silence, Err(mpsc::RecvTimeoutError::Timeout));
    server.thaw().unwrap();
    assert_eq!(receive.recv_timeout(Duration::from_secs(60)).unwrap(), "3");
    waiting.join().unwrap();
}

#[test]
fn a_frozen_server_can_be_dropped() {
    let server = server();
    let (pid, folder) = (server.pid().unwrap(), server.socket_dir().to_owned());
    server.freeze().unwrap();
    drop(server);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert!(!folder.exists());
}

#[test]
fn lasting_data_is_found_again_and_has_one_server_only() {
    let home = home(0o755);
    let data_dir = home.path().join("pg");
    let options = Options {
        data_dir: Some(data_dir.clone()),
        ..Options::for_tests()
    };
    let server = Server::start(options.clone()).unwrap();
    server.create_database("kept").unwrap();
    let Err(Error::AlreadyRunning { pid, .. }) = Server::start(options.clone()) else {
        panic!("it was not refused")
    };
    assert_eq!(Some(pid), server.pid());
    drop(server);
    // The lock of a server that is gone, with the id of a process that is not one.
    std::fs::write(
        data_dir.join("postmaster.pid"),
        format!("{}\n", std::process::id()),
    )
    .unwrap();
    let server = Server::start(options).unwrap();
    server.sql("kept").unwrap();
}

#[test]
fn a_relative_folder_is_taken_from_here() {
    let home = home(0o755);
    std::env::set_current_dir(home.path()).unwrap();
    let options = Options {
        data_dir: Some("pg".into()),
        ..Options::for_tests()
    };
    let server = Server::start(options).unwrap();
    assert_eq!(server.data_dir(), home.path().join("pg"));
}

#[test]
fn other_folders_and_versions_are_refused() {
    let home = home(0o755);
    let options = Options {
        data_dir: Some(home.path().into()),
        ..Options::for_tests()
    };
    std::fs::write(home.path().join("letter"), "").unwrap();
    assert!(matches!(
        Server::start(options.clone()),
        Err(Error::NotOurs { .. })
    ));
    std::fs::write(home.path().join("PG_VERSION"), "9.6\n").unwrap();
    assert!(
        matches!(Server::start(options), Err(Error::OtherVersion { found, .. }) if found == "9.6")
    );
    let options = Options {
        bin_dir: Some(home.path().into()),
        ..Options::for_tests()
    };
    let error = Server::start(options).unwrap_err();
    assert!(
        error.to_string().contains("apt-get install postgresql"),
        "{error}"
    );
}

#[test]
fn a_taken_port_is_named_in_the_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Server::start(Options {
        port,
        ..Options::for_tests()
    })
    .unwrap_err();
    assert!(error.to_string().contains("could not bind"), "{error}");
}

#[test]
fn root_is_told_which_folder_is_closed_to_the_server() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let home = home(0o700);
    let options = Options {
        data_dir: Some(home.path().join("pg")),
        ..Options::for_tests()
    };
    let result = Server::start(options);
    assert!(
        matches!(&result, Err(Error::Unreachable { folder, .. }) if folder == home.path()),
        "{result:?}"
    );
}

#[test]
fn a_server_ends_with_the_process_that_started_it() {
    const ANSWER: &str = "TENURE_TEST_ANSWER";
    if let Ok(answer) = std::env::var(ANSWER) {
        // The owner, which this test starts as a second process of itself: starts a server, says where, waits to be killed.
        let server = server();
        let pid = server.pid().unwrap();
        std::fs::write(answer, format!("{pid} {}\n", server.socket_dir().display())).unwrap();
        loop {
            thread::park();
        }
    }
    let answer = tempfile::NamedTempFile::new().unwrap();
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "servers::a_server_ends_with_the_process_that_started_it",
        ])
        .env(ANSWER, answer.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut text = String::new();
    wait_for(|| {
        text = std::fs::read_to_string(answer.path()).unwrap();
        text.ends_with('\n')
    });
    owner.kill().unwrap();
    owner.wait().unwrap();
    let (pid, folder) = text.trim().split_once(' ').unwrap();
    let ended = |pid: &str| !Path::new(&format!("/proc/{pid}")).exists();
    wait_for(|| ended(pid) && !Path::new(folder).exists());
}
