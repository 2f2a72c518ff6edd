//! Time-outs, words to stop, and what is left of a handler afterwards: nothing.

use std::path::Path;
use std::time::Duration;

use tenure_protocol::verdict::{Ended, Verdict};
use tenure_runtime::exec::{Executor, Handler, Stop, Task};
use tokio::sync::watch;

use super::{BOUND, executor, pids, run_task, runs, sh, task, until, within};

fn kill(grace: Duration) -> Stop {
    Stop::Kill {
        grace,
        reason: "cancelled".to_owned(),
    }
}

/// Runs `script`, in which `PIDS` is a file, and stops it when it has written `count` process ids there.
async fn stopped_when_up(script: &str, count: usize, grace: Duration) -> (Ended, Vec<u32>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let handler = sh(&script.replace("PIDS", &file.display().to_string()));
    let (stop, signal) = watch::channel(Stop::No);
    let (executor, task) = (executor(), task("{}"));
    let stopping = async {
        let pids = pids(&file, count).await;
        stop.send_replace(kill(grace));
        pids
    };
    within(async { tokio::join!(executor.run(&handler, &task, signal), stopping) }).await
}

/// B30: the whole group goes.
#[tokio::test]
async fn a_stop_reaches_grandchildren() {
    let (ended, pids) = stopped_when_up(
        "echo $$ > PIDS; sleep 300 & echo $! >> PIDS; sleep 300",
        2,
        BOUND,
    )
    .await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(15)));
    assert_eq!(ended.error.as_deref(), Some("stopped: cancelled"));
    assert!(
        !Path::new(&format!("/proc/{}", pids[0])).exists(),
        "the leader is reaped"
    );
    until(|| !runs(pids[1])).await;
}

/// An exit code after our own TERM is no answer.
#[tokio::test]
async fn exit_zero_after_a_stop_is_not_done() {
    let script = "trap 'echo half; exit 0' TERM; echo $$ > PIDS; while :; do sleep 0.05; done";
    let (ended, _) = stopped_when_up(script, 1, BOUND).await;
    assert_eq!(
        (ended.verdict, ended.exit_code, ended.result),
        (Verdict::Stopped, Some(0), None)
    );
}

/// B38: who ignores TERM is killed after the grace.
#[tokio::test]
async fn grace_has_an_end() {
    let script = "trap '' TERM INT; echo $$ > PIDS; while :; do sleep 0.05; done";
    let (ended, pids) = stopped_when_up(script, 1, Duration::from_millis(100)).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(9)));
    assert!(!runs(pids[0]));
}

/// B38: a second word shortens the grace.
#[tokio::test]
async fn a_second_word_ends_the_wait() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let script = format!(
        "trap 'echo $$ >> {0}' TERM; echo $$ > {0}; while :; do sleep 0.05; done",
        file.display()
    );
    let (handler, executor, task) = (sh(&script), executor(), task("{}"));
    let (stop, signal) = watch::channel(Stop::No);
    let stopping = async {
        pids(&file, 1).await;
        stop.send_replace(kill(BOUND * 10));
        pids(&file, 2).await;
        stop.send_replace(kill(Duration::ZERO));
    };
    let (ended, ()) =
        within(async { tokio::join!(executor.run(&handler, &task, signal), stopping) }).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::Stopped, Some(9)));
}

#[tokio::test]
async fn an_attempt_that_is_stopped_before_it_starts_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    let (_stop, signal) = watch::channel(kill(BOUND));
    let handler = sh(&format!("touch {}", mark.display()));
    let ended = within(executor().run(&handler, &task("{}"), signal)).await;
    assert_eq!(ended.verdict, Verdict::Stopped);
    assert!(!mark.exists());
}

/// B37: who was not told to stop runs to its end, also when whoever could tell is gone.
#[tokio::test]
async fn without_a_word_the_handler_finishes() {
    let (stop, signal) = watch::channel(Stop::No);
    drop(stop);
    let ended = within(executor().run(&sh("sleep 0.2; echo 1"), &task("{}"), signal)).await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("1"))
    );
}

/// B29 and B35: final within time-out and grace; no process and no zombie is left.
#[tokio::test]
async fn timed_out_handlers_are_gone() {
    async fn one(executor: &Executor, handler: &Handler) -> Ended {
        let task = Task {
            timeout: Duration::from_millis(300),
            ..task("{}")
        };
        run_task(executor, handler, &task).await
    }
    let (executor, handler) = (
        executor(),
        sh("sleep 300 & echo $!; echo $$; trap '' TERM; sleep 300; sleep 300"),
    );
    let all = futures_util::future::join_all((0..20).map(|_| one(&executor, &handler))).await;
    for ended in all {
        assert_eq!((ended.verdict, ended.signal), (Verdict::RETRY, Some(9)));
        assert!(ended.error.unwrap().starts_with("timed out after 300ms"));
        let pids: Vec<u32> = ended
            .log_tail
            .unwrap()
            .lines()
            .map(|pid| pid.parse().unwrap())
            .collect();
        assert!(
            !Path::new(&format!("/proc/{}", pids[1])).exists(),
            "the leader is reaped"
        );
        until(|| !runs(pids[0])).await;
    }
}

#[tokio::test]
async fn a_dropped_attempt_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let handler = sh(&format!(
        "echo $$ > {0}; sleep 300 & echo $! >> {0}; wait",
        file.display()
    ));
    let (_stop, signal) = watch::channel(Stop::No);
    let (executor, task) = (executor(), task("{}"));
    let pids = tokio::select! {
        _ = executor.run(&handler, &task, signal) => panic!("it ends by itself"),
        pids = pids(&file, 2) => pids,
    };
    until(|| !pids.iter().any(|pid| runs(*pid))).await;
}
