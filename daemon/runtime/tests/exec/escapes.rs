//! Handlers that try to leave something behind: nothing is left.
//!
//! Each test has a mark of its own in the command lines of what it starts, and counts by it.

use std::path::Path;
use std::time::Duration;

use tenure_protocol::verdict::{Ended, Verdict};
use tenure_runtime::exec::{Stop, Task};
use tokio::sync::watch;

use super::{BOUND, executor, marked, pids, run, run_task, runs, sh, task, until, within};

const NOBODY: [u32; 0] = [];

/// A number of seconds that no other test sleeps for.
fn mark(test: u32) -> String {
    format!("31{test}.{}", std::process::id())
}

/// Two forks, and a session and a group of its own, with the pipes open.
fn daemonise(what: &str) -> String {
    format!("(setsid sh -c '{what}' &)")
}

/// B31: the job ends, and so does what escaped from it.
#[tokio::test]
async fn a_daemon_that_a_handler_starts_ends_with_its_job() {
    let mark = mark(0);
    let ended = run(&sh(&format!(
        "{}; until [ $(pgrep -fcx 'sleep {mark}') = 1 ]; do sleep 0.02; done; echo 1",
        daemonise(&format!("sleep {mark}"))
    )))
    .await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("1")),
        "{:?}",
        ended.error
    );
    assert_eq!(marked(&mark, 0), NOBODY);
}

#[tokio::test]
async fn a_stop_reaches_what_has_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let (file, mark) = (dir.path().join("pids"), mark(1));
    let handler = sh(&format!(
        "{}; sleep {mark}",
        daemonise(&format!(
            "trap \"\" TERM; echo $$ > {}; sleep {mark}; sleep {mark}",
            file.display()
        ))
    ));
    let (stop, signal) = watch::channel(Stop::No);
    let (executor, task) = (executor(), task("{}"));
    let stopping = async {
        pids(&file, 1).await;
        stop.send_replace(Stop::Kill {
            grace: BOUND * 10,
            reason: "cancelled".to_owned(),
        });
    };
    let (ended, ()) =
        within(async { tokio::join!(executor.run(&handler, &task, signal), stopping) }).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(15)));
    assert_eq!(marked(&mark, 0), NOBODY);
}

async fn timed_out(script: &str) -> Ended {
    let task = Task {
        timeout: Duration::from_millis(500),
        ..task("{}")
    };
    run_task(&executor(), &sh(script), &task).await
}

/// A process that is another one at each look, in a session of its own.
#[tokio::test]
async fn a_process_that_forks_without_end_is_caught() {
    let mark = mark(2);
    let runner = format!(
        "import os, time\nos.setsid()\nwhile True:\n  if os.fork(): os._exit(0)\n  # {mark}"
    );
    let ended = timed_out(&format!("python3 -c '{runner}' & sleep {mark}")).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert_eq!(marked(&mark, 0), NOBODY);
}

/// All of whose parts fork, as deep as they can.
#[tokio::test]
async fn a_tree_that_grows_while_it_is_killed_is_caught() {
    let mark = mark(3);
    let bomb = format!(
        "import os, time\nfor depth in range(6):\n  if not os.fork(): os.setsid(); time.sleep(0.005)\n\
         while True:\n  time.sleep(0.05)\n  if not os.fork(): time.sleep(0.2); os._exit(0) # {mark}"
    );
    let ended = timed_out(&format!("python3 -c '{bomb}' & sleep {mark}")).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert_eq!(marked(&mark, 0), NOBODY);
}

/// The dead children of a handler are not ours to keep.
#[tokio::test]
async fn zombies_end_with_their_job() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let maker = format!(
        "import os, time\nout = open(\"{}\", \"w\")\nfor n in range(50):\n  pid = os.fork()\n  if not pid: os._exit(0)\n  print(pid, file=out, flush=True)\n\
         if os.fork(): os._exit(0)\ntime.sleep(300)",
        file.display()
    );
    let ended = run(&sh(&format!("python3 -c '{maker}'; echo 1"))).await;
    assert_eq!(ended.verdict, Verdict::Done, "{:?}", ended.error);
    let zombies = pids(&file, 50).await;
    assert!(
        !zombies
            .iter()
            .any(|pid| Path::new(&format!("/proc/{pid}")).exists())
    );
}

/// Side by side, each job takes its own down and no other's.
#[tokio::test]
async fn what_escapes_from_one_job_is_not_killed_with_another() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let slow = sh(&format!(
        "{}; sleep 300",
        daemonise(&format!("echo $$ > {}; sleep 300", file.display()))
    ));
    let (stop, signal) = watch::channel(Stop::No);
    let (executor, slow_task) = (executor(), task("{}"));
    let others = async {
        let escaped = pids(&file, 1).await[0];
        for _ in 0..10 {
            run_task(&executor, &sh(&daemonise("sleep 300")), &task("{}")).await;
        }
        assert!(runs(escaped), "another job's process was killed");
        stop.send_replace(Stop::Kill {
            grace: Duration::ZERO,
            reason: "cancelled".to_owned(),
        });
        escaped
    };
    let (_, escaped) = within(Box::pin(async {
        tokio::join!(executor.run(&slow, &slow_task, signal), others)
    }))
    .await;
    assert!(!runs(escaped));
}

/// The handler dies with its supervisor, so a job is not run again beside it.
#[tokio::test]
async fn a_handler_that_kills_its_supervisor_dies() {
    let mark = mark(4);
    let ended = run(&sh(&format!("kill -9 $PPID; exec sleep {mark}"))).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::RETRY, Some(9)));
    until(|| marked(&mark, 0).is_empty()).await;
}

#[tokio::test]
async fn a_handler_that_stops_its_supervisor_is_ended_all_the_same() {
    let mark = mark(5);
    let ended = timed_out(&format!(
        "kill -STOP $PPID; trap '' TERM; sleep {mark}; sleep {mark}"
    ))
    .await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert_eq!(marked(&mark, 0), NOBODY);
}

/// Who stops a daemon by the name of its processes does not stop its handlers with it.
#[tokio::test]
async fn a_supervisor_passes_on_nothing_but_the_daemons_word() {
    let ended = run(&sh(
        "for signal in TERM INT HUP QUIT ALRM; do kill -$signal $PPID; done; sleep 0.2; echo 1",
    ))
    .await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("1")),
        "{:?}",
        ended.error
    );
}
