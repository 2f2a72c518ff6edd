//! A stand-in for the daemon in the tests of the guard: a process that can be killed and stopped.
//!
//! `guarded guard` is the guard, and `guarded supervise …` a supervisor. `guarded daemon TRUST_MS SCRIPT` runs one handler, trusted for so long, and prints how it
//! ended. `guarded storm SCRIPT` runs handlers without end, many at once and each for a moment only.
#![allow(clippy::print_stdout, clippy::expect_used)]

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tenure_protocol::verdict::Ended;
use tenure_runtime::exec::{Executor, Folders, Handler, Limits, Stop, Task};
use tenure_runtime::guard::{self, Guard};
use tenure_runtime::settings::ExecSettings;
use tenure_runtime::supervisor::{self, Supervisor};
use uuid::Uuid;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|verb| verb == "supervise") {
        return supervisor::main(std::env::args_os().skip(2));
    }
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["guard"] => guard::main(None),
        ["daemon", trust, script] => {
            run(daemon(trust.parse().expect("TRUST_MS is a number"), script))
        }
        ["storm", script] => run(storm(script)),
        _ => ExitCode::from(2),
    }
}

fn run(work: impl Future<Output = ()>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime can be made").block_on(work);
    ExitCode::SUCCESS
}

async fn daemon(trust_ms: u64, script: &str) {
    let guard = guard(trust_ms).await;
    tokio::select! {
        ended = attempt(&guard, script, Duration::from_secs(600)) => println!("{ended:?}"),
        () = guard.supervise() => {}
    }
}

async fn storm(script: &str) {
    let guard = guard(600_000).await;
    let one = || async {
        loop {
            attempt(&guard, script, Duration::from_millis(20)).await;
        }
    };
    futures_util::future::join_all((0..8).map(|_| one())).await;
}

async fn guard(trust_ms: u64) -> Guard {
    let guard = Guard::start(
        Path::new("/proc/self/exe"),
        &["guard"],
        Duration::from_millis(200),
    )
    .await;
    let guard = guard.expect("the guard starts");
    guard.trust_until(guard::now_ms() + trust_ms);
    guard
}

async fn attempt(guard: &Guard, script: &str, timeout: Duration) -> Ended {
    let handler = Handler::Exec(ExecSettings {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        cwd: None,
        env: Vec::new(),
        confinement: Box::default(),
        timeout,
        kill_grace: Duration::from_secs(1),
        exit_codes: BTreeMap::new(),
    });
    let task = Task {
        job: Uuid::now_v7(),
        job_type: "guarded".to_owned(),
        attempt: 1,
        max_attempts: 1,
        token: Uuid::new_v4(),
        tenant: "default".to_owned(),
        data: "{}".to_owned(),
        enqueued_at: "2026-11-30T20:00:00Z".to_owned(),
        alone: false,
        watermark: None,
        traceparent: None,
        timeout,
    };
    let executor = Executor {
        guard: Some(guard.clone()),
        supervisor: Supervisor::new(Path::new("/proc/self/exe"), "supervise")
            .expect("there is no NUL in it"),
        folders: Folders::default(),
        cgroups: None,
        limits: Limits {
            result: 4096,
            log: 4096,
        },
    };
    let (_stop, signal) = tokio::sync::watch::channel(Stop::No);
    executor.run(&handler, &task, signal).await
}
