//! The life of one handler process: envelope in, result and log out, one way to end it.
//!
//! States: running → told (TERM) → killed (KILL) → its supervisor has ended, a zombie, and nothing is left → guard told → reaped.
//! Invariants: the supervisor is signalled only while it is unreaped; nothing waits for a pipe that a process outside holds open
//! longer than [`LINGER`]; the three pipes move side by side, so that none can block the other.

use std::future::pending;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure_protocol::output::{Capped, Output};
use tenure_protocol::verdict::{Ended, Verdict, exit_verdict, explained, last_line};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

use super::exit::{Exit, How};
use super::spawn::{NotSpawned, Program, pid_of, spawn};
use super::started::Started;
use super::tree::Tree;
use super::{Executor, LAPSED, LINGER, Stop, StopSignal, Task, after, next_order, stopped};
use crate::guard::Guard;
use crate::settings::{Exceeded, ExecSettings};
use crate::supervisor::Order;

/// How often it is said that a process cannot be killed.
const STUCK: Duration = Duration::from_secs(30);

/// Why a process was told to end.
enum Told {
    TimedOut,
    Stopped(String),
    Exceeded(Exceeded),
}

/// Runs one attempt as a process.
///
/// A guard that ended the handler while this daemon stood still is a word to stop like any other.
pub(super) async fn run(
    executor: &Executor,
    settings: &ExecSettings,
    task: &Task,
    mut stop: StopSignal,
) -> Ended {
    let lapses = executor.guard.as_ref().map_or(0, Guard::lapses);
    let deadline = task.deadline();
    let program = Program {
        command: &settings.command,
        cwd: settings.cwd.as_deref(),
        env: &settings.env,
        confinement: &settings.confinement,
        own: task.variables(&deadline),
    };
    let given_up = || match &*stop.borrow_and_update() {
        Stop::Kill { reason, .. } => Some(reason.clone()),
        Stop::No => None,
    };
    let Started { mut child, with } = match spawn(executor, &program, given_up).await {
        Ok(started) => started,
        Err(NotSpawned::Stopped(reason)) => return stopped(&reason),
        Err(NotSpawned::Refused(why)) => return Ended::because(Verdict::RETRY_LONG, why),
    };
    let Some(pid) = pid_of(&child) else {
        return Ended::because(
            Verdict::RETRY_LONG,
            "the handler was started without a process id",
        );
    };
    // Dropped before `child`, so also a dropped future has all killed while the supervisor is unreaped.
    let mut tree = Tree::new(pid, executor.guard.as_ref());
    let envelope = task.envelope(&deadline).to_json();
    let mut result = Capped::new(executor.limits.result);
    let mut log = Capped::new(executor.limits.log);
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let meter = Meter::new(settings.confinement.limits.output);
    let told = {
        let mut talk = pin!(async {
            tokio::join!(
                give(stdin, envelope.as_bytes()),
                collect(stdout, &mut result, &meter),
                collect(stderr, &mut log, &meter)
            );
        });
        let mut talking = true;
        let told = tokio::select! {
            told = life(&tree, settings, task, &meter, &mut stop) => told,
            never = async {
                (&mut talk).await;
                talking = false;
                pending().await
            } => never,
        };
        tree.end();
        if talking {
            // What somebody to whom the pipe was handed writes after this is nobody's.
            let _ = timeout(LINGER, &mut talk).await;
        }
        told
    };
    // The supervisor has ended, so this does not wait.
    let how = How::of(&mut child).await;
    let lapsed = tree
        .guard()
        .is_some_and(|guard| guard.has_lapsed_since(lapses));
    let told = told.or_else(|| lapsed.then(|| Told::Stopped(LAPSED.to_owned())));
    let exceeded = with
        .clear_up()
        .await
        .or_else(|| how.exceeded(&settings.confinement.limits));
    let told = match told {
        Some(Told::Stopped(reason)) => Some(Told::Stopped(reason)),
        told => exceeded.map(Told::Exceeded).or(told),
    };
    let (result, log) = (result.finish(), log.finish().text());
    let ended = conclude(&how, told.as_ref(), &result, log.as_deref(), settings, task);
    // A handler that failed and logged nothing may have said why on its standard output.
    let words = || {
        ended
            .error
            .as_ref()
            .and_then(|_| result.tail(executor.limits.log))
    };
    Ended {
        log_tail: log.or_else(words),
        ..ended
    }
}

/// Waits until the handler has ended, and ends it when its time is over or somebody says so. Says why it was told to end.
async fn life(
    tree: &Tree<'_>,
    settings: &ExecSettings,
    task: &Task,
    meter: &Meter,
    stop: &mut StopSignal,
) -> Option<Told> {
    let mut exit = Exit::of(tree.supervisor());
    let mut told = None;
    let mut killed = false;
    let mut next = after(task.timeout);
    loop {
        tokio::select! {
            biased;
            () = exit.wait() => return told,
            (grace, reason) = next_order(stop) => {
                let kill_at = after(grace);
                if told.is_none() {
                    tree.tell(Order::Term);
                    told = Some(Told::Stopped(reason));
                    next = kill_at;
                } else if !killed {
                    next = next.min(kill_at);
                }
            }
            () = meter.over(), if told.is_none() => {
                tree.tell(Order::Kill);
                told = Some(Told::Exceeded(Exceeded::Output));
                killed = true;
                next = after(STUCK);
            }
            () = sleep_until(next) => {
                if told.is_none() {
                    tree.tell(Order::Term);
                    told = Some(Told::TimedOut);
                    next = after(settings.kill_grace);
                    continue;
                }
                if killed {
                    let (job, supervisor) = (task.job, tree.supervisor());
                    tracing::warn!(%job, %supervisor, "the handler was killed and does not end; does its disk or network hang?");
                }
                tree.tell(Order::Kill);
                killed = true;
                next = after(STUCK);
            }
        }
    }
}

fn conclude(
    how: &How,
    told: Option<&Told>,
    result: &Output,
    log: Option<&str>,
    settings: &ExecSettings,
    task: &Task,
) -> Ended {
    let failed =
        |verdict, what: &str| Ended::because(verdict, explained(what, log.and_then(last_line)));
    let ended = match (told, how) {
        (Some(Told::Stopped(reason)), _) => stopped(reason),
        (Some(Told::TimedOut), _) => {
            let limit = humantime::format_duration(task.timeout);
            failed(Verdict::RETRY, &format!("timed out after {limit}"))
        }
        (Some(Told::Exceeded(exceeded)), _) => failed(
            Verdict::RETRY,
            &settings.confinement.limits.explain(*exceeded),
        ),
        (None, How::Exit(code)) => match exit_verdict(*code, &settings.exit_codes) {
            Verdict::Done => Ended::answered(result),
            verdict => failed(verdict, &how.to_string()),
        },
        (None, _) => failed(Verdict::RETRY, &how.to_string()),
    };
    let (exit_code, signal) = how.numbers();
    Ended {
        exit_code,
        signal,
        ..ended
    }
}

/// Writes the envelope and closes the pipe. A handler need not read it.
async fn give(stdin: Option<impl AsyncWrite + Unpin>, envelope: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(envelope).await;
    }
}

/// Reads until all writers have closed the pipe.
async fn collect(pipe: Option<impl AsyncRead + Unpin>, into: &mut Capped, meter: &Meter) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = pipe.read(&mut buffer).await {
        into.push(&buffer[..length]);
        meter.count(length);
    }
}

/// Counts what a handler writes.
struct Meter {
    limit: Option<u64>,
    written: AtomicU64,
    over: Notify,
}

impl Meter {
    fn new(limit: Option<u64>) -> Self {
        Self {
            limit,
            written: AtomicU64::new(0),
            over: Notify::new(),
        }
    }

    fn count(&self, length: usize) {
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        let written = self
            .written
            .fetch_add(length, Ordering::Relaxed)
            .saturating_add(length);
        if self.limit.is_some_and(|limit| written > limit) {
            self.over.notify_one();
        }
    }

    /// Answers when more was written than the limit.
    async fn over(&self) {
        self.over.notified().await;
    }
}
