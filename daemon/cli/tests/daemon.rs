//! `tenure run` and `tenure demo`, from the first line of their log to the exit code.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::house::{House, Said, binary};

/// A process that is killed when its test fails.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    /// Waits for its end, with what it has not said yet.
    fn end(mut self) -> Said {
        let (mut out, mut err) = (String::new(), String::new());
        let read = |source: Option<&mut dyn Read>, text: &mut String| {
            source.map(|s| s.read_to_string(text).unwrap())
        };
        read(self.0.stdout.as_mut().map(|s| s as &mut dyn Read), &mut out);
        read(self.0.stderr.as_mut().map(|s| s as &mut dyn Read), &mut err);
        Said {
            code: self.0.wait().unwrap().code().unwrap_or(-1),
            out,
            err,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const HANDLERS: &str = r#"
[api]
listen = "127.0.0.1:0"
[log]
format = "text"
[handlers.hello]
exec = { command = ["sh", "-c", "cat >/dev/null; echo working >&2; echo '{\"n\": 18446744073709551616}'"] }
[handlers.doomed]
exec = { command = ["sh", "-c", "echo no such customer >&2; exit 65"] }
[handlers.slow]
exec = { command = ["sh", "-c", "exec sleep 600"], kill_grace = "1s" }
"#;

fn config(folder: &tempfile::TempDir, text: &str) -> PathBuf {
    let file = folder.path().join("tenure.toml");
    std::fs::write(&file, text).unwrap();
    file
}

#[test]
fn jobs_run_and_a_stop_gives_back_what_did_not_finish() {
    let house = House::new();
    let folder = tempfile::tempdir().unwrap();
    let file = config(&folder, HANDLERS);
    let run = [
        "run",
        "--config",
        file.to_str().unwrap(),
        "--set",
        "worker.drain_timeout=200ms",
    ];
    let daemon = Running::start(&mut house.command(&run));
    let said = house.run(&["enqueue", "hello", "--wait"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(
        said.out.contains("result\t{\"n\": 18446744073709551616}"),
        "{}",
        said.out
    );
    let said = house.run(&["enqueue", "doomed", "--wait"]);
    assert_eq!(said.code, 1);
    assert!(
        said.err.contains("failed: exit code 65: no such customer"),
        "{}",
        said.err
    );
    let id = said.out.split_whitespace().nth(1).unwrap().to_owned();
    let shown = house.ok(&["job", "show", &id]);
    assert!(shown.contains("\nlog\tno such customer"), "{shown}");
    assert_eq!(
        house.json(&["dead", "list"])[0]["original_job_id"],
        id.as_str()
    );
    let workers = house.json(&["worker", "list"]);
    assert_eq!(
        (&workers[0]["status"], workers.as_array().unwrap().len()),
        (&"live".into(), 1)
    );

    let slow = house.ok(&["enqueue", "slow"]);
    while house.json(&["job", "show", &slow])["status"] != "running" {}
    daemon.signal(Signal::SIGTERM);
    let said = daemon.end();
    assert_eq!(said.code, 0, "{}", said.err);
    let job = house.json(&["job", "show", &slow]);
    assert_eq!(
        (&job["status"], &job["attempts"]),
        (&"pending".into(), &0.into()),
        "{job}"
    );
    assert_eq!(house.ok(&["worker", "list"]), "");
}

#[test]
fn a_person_drains_a_worker() {
    let house = House::new();
    let folder = tempfile::tempdir().unwrap();
    let file = config(&folder, HANDLERS);
    let daemon = Running::start(&mut house.command(&["run", "--config", file.to_str().unwrap()]));
    house.ok(&["enqueue", "hello", "--wait"]);
    let id = house.json(&["worker", "list"])[0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        house.ok(&["worker", "drain", &id]),
        format!("{id} draining")
    );
    assert_eq!(daemon.end().code, 0);
}

#[test]
fn what_keeps_a_daemon_from_running_is_said() {
    let house = House::bare();
    let folder = tempfile::tempdir().unwrap();
    let file = config(&folder, HANDLERS);
    let run =
        |more: &[&str]| house.run(&[&["run", "--config", file.to_str().unwrap()], more].concat());
    let said = run(&[]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(said.err.contains("run `tenure migrate up`"), "{}", said.err);
    house.ok(&["migrate"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("api.listen={}", taken.local_addr().unwrap());
    let said = run(&["--set", &address]);
    assert_eq!(said.code, 1);
    assert!(
        said.err.contains("another process listens there"),
        "{}",
        said.err
    );
    let said = run(&[
        "--set",
        &format!("database.url={}", house.server.url("nowhere", "postgres")),
    ]);
    assert_eq!(said.code, 5, "{}", said.err);
    assert!(
        said.err.contains("\"nowhere\" does not exist"),
        "{}",
        said.err
    );
    house.sql(
        "INSERT INTO tenure.migration (name, checksum, breaking) VALUES ('9999_later', 'x', true)",
    );
    for said in [run(&[]), house.run(&["migrate"])] {
        assert_eq!(said.code, 6, "{}", said.err);
        assert!(
            said.err.contains("breaking migration 9999_later"),
            "{}",
            said.err
        );
    }
    let missing = config(
        &folder,
        "[handlers.a]\nexec = { command = [\"no-such-program\"] }\n",
    );
    let said = house.run(&["run", "--config", missing.to_str().unwrap()]);
    assert_eq!(said.code, 2);
    assert!(
        said.err
            .contains("tenure.toml:2: handlers.a.exec.command: missing handler binary"),
        "{}",
        said.err
    );
}

#[test]
fn the_demo_shows_everything_and_finds_its_data_again() {
    let folder = tempfile::Builder::new()
        .prefix("tenure-demo-")
        .tempdir_in("/var/tmp")
        .unwrap();
    open_to_all(&folder);
    for again in [false, true] {
        let mut demo = Running::start(binary().args([
            "demo",
            "--data-dir",
            folder.path().to_str().unwrap(),
            "--set",
            "log.format=text",
        ]));
        let mut lines = BufReader::new(demo.0.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        let told: Vec<String> = lines
            .by_ref()
            .take_while(|line| line != "Ctrl-C stops it.")
            .collect();
        let told = told.join("\n");
        for expected in [
            "Hello, SQL!",
            "Hello, HTTP!",
            "{\"steps\": 4}",
            "{\"attempt\": 2}",
            "there is no such customer",
        ] {
            assert!(told.contains(expected), "{expected} is missing in\n{told}");
        }
        assert_eq!(
            told.contains("The schema is there already."),
            again,
            "{told}"
        );
        demo.signal(Signal::SIGINT);
        let rest: Vec<String> = lines.collect();
        let said = demo.end();
        assert_eq!(said.code, 0, "{}", said.err);
        assert!(rest.concat().contains("Stopped."), "{rest:?}");
    }
}

/// Lets the server's user pass, where this runs as root and the server as another.
fn open_to_all(folder: &tempfile::TempDir) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
}
