//! One attempt, run by a real handler.

mod cgroups;
mod connections;
mod escapes;
mod http;
mod limits;
mod process;
mod process_faults;
mod processes;
mod stopping;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tenure_protocol::verdict::Ended;
use tenure_runtime::exec::{Executor, Folders, Handler, Limits, Stop, Task};
use tenure_runtime::settings::ExecSettings;
use tenure_runtime::supervisor::Supervisor;
use tokio::sync::watch;
use uuid::Uuid;

/// Longer than anything here takes; only a fault gets that far.
pub(crate) const BOUND: Duration = Duration::from_secs(40);

/// The program that is the guard and the supervisors of these tests, and stands in for the daemon; see `examples/guarded.rs`.
pub(crate) fn guarded() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let built = own
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("examples/guarded");
    assert!(
        built.exists(),
        "cargo builds the examples with the tests; {} is missing",
        built.display()
    );
    built
}

pub(crate) fn executor() -> Executor {
    Executor {
        guard: None,
        supervisor: Supervisor::new(&guarded(), "supervise").unwrap(),
        folders: Folders::default(),
        cgroups: None,
        limits: Limits {
            result: 64 * 1024,
            log: 16 * 1024,
        },
    }
}

pub(crate) fn command(command: &[&str]) -> ExecSettings {
    ExecSettings {
        command: command.iter().map(|part| (*part).to_owned()).collect(),
        cwd: None,
        env: Vec::new(),
        confinement: Box::default(),
        timeout: BOUND,
        kill_grace: Duration::from_millis(300),
        exit_codes: BTreeMap::new(),
    }
}

pub(crate) fn sh(script: &str) -> Handler {
    Handler::Exec(command(&["sh", "-c", script]))
}

pub(crate) fn task(data: &str) -> Task {
    Task {
        job: Uuid::now_v7(),
        job_type: "report-generation".to_owned(),
        attempt: 2,
        max_attempts: 5,
        token: Uuid::new_v4(),
        tenant: "default".to_owned(),
        data: data.to_owned(),
        enqueued_at: "2026-11-30T20:00:00Z".to_owned(),
        alone: false,
        watermark: None,
        traceparent: None,
        timeout: BOUND * 10,
    }
}

/// Runs an attempt that nobody stops.
pub(crate) async fn run_task(executor: &Executor, handler: &Handler, task: &Task) -> Ended {
    let (_stop, signal) = watch::channel(Stop::No);
    within(executor.run(handler, task, signal)).await
}

pub(crate) async fn run(handler: &Handler) -> Ended {
    run_task(&executor(), handler, &task("{}")).await
}

/// Fails instead of hanging.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    let answer = tokio::time::timeout(BOUND, future).await;
    answer.expect("it took much too long")
}

/// Waits until `state` holds.
pub(crate) async fn until(mut state: impl FnMut() -> bool) {
    within(async {
        while !state() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// Whether process `pid` runs; a zombie does not.
pub(crate) fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map_or('X', |(_, rest)| rest.chars().next().unwrap_or('X'));
    !matches!(state, 'X' | 'Z')
}

/// The running processes with `mark` in their command line or their environment, but for `except`.
pub(crate) fn marked(mark: &str, except: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has_mark = |pid: &u32| {
        let holds = |file| {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).contains(mark)
        };
        holds("cmdline") || holds("environ")
    };
    ids.filter(|pid| *pid != except)
        .filter(has_mark)
        .filter(|pid| runs(*pid))
        .collect()
}

/// The process ids that a handler wrote to `file`, one a line, when there are `count`.
pub(crate) async fn pids(file: &std::path::Path, count: usize) -> Vec<u32> {
    let read = || -> Vec<u32> {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .collect()
    };
    until(|| read().len() >= count).await;
    read()
}
