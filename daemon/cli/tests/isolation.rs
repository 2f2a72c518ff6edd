//! What handlers see of their daemon, and what a daemon does that is the first process of its container.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::house::House;

/// A daemon that is killed when its test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder that every user can reach, with a configuration in it.
fn folder(handlers: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let file = folder.path().join("tenure.toml");
    std::fs::write(
        &file,
        format!("[api]\nlisten = \"off\"\n[log]\nformat = \"text\"\n{handlers}"),
    )
    .unwrap();
    (folder, file)
}

/// A daemon as this user, with a secret in its environment.
fn start_as(user: u32, house: &House, folder: &Path, file: &Path) -> Running {
    // The build's own folder need not be reachable for others.
    let program = folder.join("tenure");
    std::fs::copy(env!("CARGO_BIN_EXE_tenure"), &program).unwrap();
    let command = house.command(&["run", "--config", file.to_str().unwrap()]);
    let mut other = Command::new(&program);
    other.args(command.get_args()).env_clear().current_dir("/");
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            other.env(name, value);
        }
    }
    let daemon = other
        .env("TENURE_DATABASE__PASSWORD", "s3cr3t-password")
        .env("SHOWN", "for-handlers")
        .env("PATH", std::env::var_os("PATH").unwrap())
        .stdout(Stdio::null())
        .uid(user)
        .gid(user)
        .spawn()
        .unwrap();
    Running(daemon)
}

/// A user that nothing else here runs as.
const USER: u32 = 61_234;

/// B97: a handler of the daemon's own user looks into every process of that user that it can look into.
#[test]
fn no_secret_of_the_daemon_can_be_read_by_a_handler_of_its_user() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test takes root: scripts/test"
    );
    let house = House::new();
    let (folder, file) = folder(
        r#"[handlers.spy]
exec = { env = ["SHOWN"], command = ["sh", "-c", '''
for p in $(pgrep -u USER); do p=/proc/$p; cat $p/environ; tr '\0' ' ' < $p/cmdline; ls -l $p/fd; head -c 1 $p/mem; done 2>/dev/null | tr '\0' '\n' > $SEEN
echo "{\"daemons\": $(pgrep -u USER -cx tenure), \"secrets\": $(grep -c 's3cr[3]t' $SEEN), \"shown\": $(grep -c 'SHOWN=fo[r]' $SEEN), \"sockets\": $(grep -o 'socke[t]:.*' $SEEN | sort -u | wc -l)}"
'''] }
"#,
    );
    let seen = folder.path().join("seen");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&seen, "").unwrap();
    std::fs::set_permissions(&seen, PermissionsExt::from_mode(0o666)).unwrap();
    std::fs::write(
        &file,
        text.replace("$SEEN", seen.to_str().unwrap())
            .replace("USER", &USER.to_string()),
    )
    .unwrap();
    let _daemon = start_as(USER, &house, folder.path(), &file);
    let said = house.run(&["enqueue", "spy", "--wait"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let found: serde_json::Value =
        serde_json::from_str(said.out.split_once("result\t").unwrap().1.trim()).unwrap();
    assert_eq!(found["secrets"], 0);
    // It did look, and can see what it may.
    assert!(found["shown"].as_u64().unwrap() > 0, "{found}");
    assert!(found["daemons"].as_u64().unwrap() > 0, "{found}");
    // The guard's, whose other end is the daemon's: nothing but the ids of supervisors goes through it.
    assert_eq!(found["sockets"], 1);
}

/// The children of a process, with the letter of their state.
fn children(pid: u32) -> Vec<(u32, char)> {
    let list =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let state = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some((pid, stat.rsplit_once(") ")?.1.chars().next()?))
    };
    list.split_whitespace()
        .filter_map(|pid| state(pid.parse().ok()?))
        .collect()
}

fn until(what: &str, mut state: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if state() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}: it took much too long");
}

#[test]
fn a_daemon_that_is_the_first_process_reaps_what_loses_its_parent_and_hears_signals() {
    let house = House::new();
    // What is left when a supervisor is killed comes to process 1, and ends there.
    let (_folder, file) = folder(
        "[handlers.orphan]\nexec = { command = [\"sh\", \"-c\", \"(setsid sh -c 'sleep 0.2' &); kill -9 $PPID\"] }\n\
         [handlers.hello]\nexec = { command = [\"true\"] }\n\
         [handlers.\"*\".retry]\nmax_attempts = 1\n",
    );
    let run = house.command(&["run", "--config", file.to_str().unwrap()]);
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
        .arg(run.get_program())
        .args(run.get_args());
    for (name, value) in run.get_envs() {
        match value {
            Some(value) => unshare.env(name, value),
            None => unshare.env_remove(name),
        };
    }
    let mut daemon = Running(unshare.stdout(Stdio::null()).spawn().unwrap());
    assert_eq!(house.run(&["enqueue", "hello", "--wait"]).code, 0);
    let first = children(daemon.0.id())[0].0;
    let of_first = || children(first);
    assert_eq!(of_first().len(), 1, "the daemon is its only child");
    for _ in 0..5 {
        assert_eq!(house.run(&["enqueue", "orphan", "--wait"]).code, 1);
    }
    until("orphans are reaped", || of_first().len() == 1);
    kill(
        Pid::from_raw(i32::try_from(first).unwrap()),
        Signal::SIGTERM,
    )
    .unwrap();
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_person_sees_which_limit_a_job_was_killed_for() {
    let house = House::new();
    let (_folder, file) = folder(
        "[handlers.greedy]\nexec = { command = [\"python3\", \"-c\", \"all = []\\nwhile True: all.append(bytearray(b'x' * (4 << 20)))\"], \
         private_tmp = true, limits = { memory = \"64MiB\", cpu = \"1h\" } }\n[handlers.greedy.retry]\nmax_attempts = 1\n",
    );
    let mut run = house.command(&["run", "--config", file.to_str().unwrap()]);
    let _daemon = Running(run.stdout(Stdio::null()).spawn().unwrap());
    let said = house.run(&["enqueue", "greedy", "--wait"]);
    assert_eq!(said.code, 1, "{}", said.out);
    let why = "killed for using more memory than limits.memory (64MiB)";
    assert!(said.err.contains(why), "{}", said.err);
    let id = said.out.split_whitespace().nth(1).unwrap();
    let shown = house.ok(&["job", "show", id]);
    assert!(shown.contains(why), "{shown}");
    let settings = house.json(&["check-config", "--config", file.to_str().unwrap()]);
    let exec = &settings["settings"]["handlers"]["greedy"]["exec"];
    assert_eq!(exec["limits"]["memory"], "64MiB", "{exec}");
}
