//! The guard ends handlers when their daemon cannot.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tenure_protocol::verdict::Verdict;
use tenure_runtime::exec::{Executor, Stop};
use tenure_runtime::guard::{Guard, now_ms};
use tokio::sync::watch;

use crate::exec::{
    BOUND, executor, guarded, marked, pids, run_task, runs, sh, task, until, within,
};

struct Daemon {
    process: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    /// A daemon whose handler ignores TERM and has a child; both write their ids.
    fn start(trust: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "trap '' TERM; echo $$ > {0}; (while :; do sleep 0.1; done) & echo $! >> {0}; wait; wait",
            dir.path().join("pids").display()
        );
        let process = Command::new(guarded())
            .args(["daemon", &trust.as_millis().to_string(), &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { process, dir }
    }

    fn signal(&self, signal: Signal) {
        kill(
            Pid::from_raw(i32::try_from(self.process.id()).unwrap()),
            signal,
        )
        .unwrap();
    }

    async fn handlers(&self) -> Vec<u32> {
        pids(&self.dir.path().join("pids"), 2).await
    }
}

/// Whatever a test leaves behind is ended by the guard when the daemon is.
impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn guard() -> Guard {
    let guard = Guard::start(&guarded(), &["guard"], Duration::from_millis(200)).await;
    guard.unwrap()
}

fn guarded_executor(guard: &Guard) -> Executor {
    Executor {
        guard: Some(guard.clone()),
        ..executor()
    }
}

#[tokio::test]
async fn handlers_of_a_killed_daemon_are_ended() {
    let mut daemon = Daemon::start(BOUND * 10);
    let handlers = daemon.handlers().await;
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    until(|| !handlers.iter().any(|pid| runs(*pid))).await;
}

/// What left its handler's group and session, and lost its parent, goes with the daemon too.
#[tokio::test]
async fn what_escaped_its_handler_does_not_outlive_a_killed_daemon() {
    let mark = format!("301.{}", std::process::id());
    let script = format!(
        "setsid sh -c '(setsid sleep {mark} &) ; setsid sleep {mark} & exec sleep {mark}' & sleep {mark}"
    );
    let mut daemon = Command::new(guarded())
        .args(["daemon", "600000", &script])
        .spawn()
        .unwrap();
    let sleeping = || {
        let running = marked(&mark, daemon.id()).into_iter();
        running.filter(|pid| is_sleep(*pid)).count()
    };
    until(|| sleeping() == 4).await;
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    until(|| marked(&mark, 0).is_empty()).await;
}

fn is_sleep(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
}

/// Whenever the daemon is killed, also between fork and exec, no handler is left.
#[tokio::test]
async fn no_handler_escapes_a_kill_at_any_moment() {
    let mark = format!("300.{}", std::process::id());
    for round in 0..25 {
        let mut daemon = Command::new(guarded());
        let mut daemon = daemon
            .args(["storm", &format!("setsid sleep {mark} & sleep {mark}")])
            .spawn()
            .unwrap();
        until(|| marked(&mark, daemon.id()).len() > 4).await;
        tokio::time::sleep(Duration::from_millis(round * 3)).await;
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        until(|| marked(&mark, 0).is_empty()).await;
    }
}

#[tokio::test]
async fn handlers_of_a_stopped_daemon_are_ended_when_trust_ends() {
    let mut daemon = Daemon::start(Duration::from_secs(2));
    let handlers = daemon.handlers().await;
    daemon.signal(Signal::SIGSTOP);
    until(|| !handlers.iter().any(|pid| runs(*pid))).await;
    daemon.signal(Signal::SIGCONT);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut daemon.process.stdout.take().unwrap(), &mut said).unwrap();
    assert!(
        said.contains("Stopped") && said.contains("the daemon stood still"),
        "{said}"
    );
}

#[tokio::test]
async fn a_trusted_handler_is_left_alone() {
    let guard = guard().await;
    guard.trust_until(now_ms() + 600_000);
    let ended = run_task(
        &guarded_executor(&guard),
        &sh("sleep 0.3; echo 1"),
        &task("{}"),
    )
    .await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("1"))
    );
}

#[tokio::test]
async fn nothing_is_trusted_before_the_first_word() {
    let guard = guard().await;
    let ended = run_task(&guarded_executor(&guard), &sh("sleep 300"), &task("{}")).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(15)));
}

#[tokio::test]
async fn a_dead_guard_is_replaced_and_its_successor_knows_all() {
    let guard = guard().await;
    guard.trust_until(now_ms() + 600_000);
    let executor = guarded_executor(&guard);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let (_stop, signal) = watch::channel(Stop::No);
    let (handler, task) = (
        sh(&format!("echo $$ > {}; exec sleep 300", file.display())),
        task("{}"),
    );
    let test = async {
        pids(&file, 1).await;
        let first = guard.pid().unwrap();
        kill(
            Pid::from_raw(i32::try_from(first).unwrap()),
            Signal::SIGKILL,
        )
        .unwrap();
        // The first guard may still take it or be gone: then it waits for the next one.
        let second_handler = run_task(&executor, &sh("echo 2"), &crate::exec::task("{}")).await;
        assert_eq!(second_handler.result.as_deref(), Some("2"));
        until(|| guard.pid() != Some(first)).await;
        guard.trust_until(now_ms());
    };
    let both = async { tokio::join!(executor.run(&handler, &task, signal), test) };
    let ended = tokio::select! {
        (ended, ()) = within(both) => ended,
        () = guard.supervise() => panic!("it runs until it is dropped"),
    };
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(15)));
}

#[tokio::test]
async fn a_guard_outlives_the_signals_of_its_daemon_and_goes_with_it() {
    let guard = guard().await;
    let pid = guard.pid().unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }
    guard.trust_until(now_ms() + 600_000);
    let ended = run_task(&guarded_executor(&guard), &sh("echo 1"), &task("{}")).await;
    assert_eq!(ended.verdict, Verdict::Done);
    assert!(runs(pid));
    drop(guard);
    until(|| !runs(pid)).await;
}

#[tokio::test]
async fn what_is_no_guard_is_refused() {
    let error = Guard::start(Path::new("/bin/true"), &[], Duration::ZERO)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("/bin/true"), "{error}");
    let error = Guard::start(Path::new("/no/such"), &[], Duration::ZERO)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("/no/such"), "{error}");
}
