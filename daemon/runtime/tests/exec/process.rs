//! `process` handlers: what they are for, and what they must not be able to do.

use std::fs;
use std::path::Path;

use futures_util::future::join_all;
use serde_json::json;
use tenure_protocol::verdict::Verdict;
use tenure_runtime::exec::{Fleet, StopSignal};
use tenure_runtime::settings::ProcessSettings;

use super::*;

/// What each script below begins with.
const BEGIN: &str = r#"
import json, os, sys, threading, time, signal
def say(**line): print(json.dumps(line), flush=True)
def log(*words): print(*words, file=sys.stderr, flush=True)
def jobs():
    for line in sys.stdin:
        line = json.loads(line)
        if line["type"] == "job": yield line
def done(job, result=None): say(type="result", id=job["id"], result=result)
"#;

pub(crate) fn settings(script: &str) -> ProcessSettings {
    let program = format!("{BEGIN}{script}");
    ProcessSettings {
        command: ["python3", "-c", &program].map(str::to_owned).to_vec(),
        cwd: None,
        env: Vec::new(),
        confinement: Box::default(),
        processes: 1,
        concurrency: 1,
        timeout: BOUND,
        kill_grace: Duration::from_millis(500),
        hello_timeout: BOUND,
        max_jobs: None,
        max_age: None,
        max_memory: None,
    }
}

pub(crate) fn fleet(settings: &ProcessSettings) -> Handler {
    Handler::Process(Fleet::new("score", settings))
}

pub(crate) fn handler(script: &str) -> Handler {
    fleet(&settings(script))
}

pub(crate) fn many(script: &str, concurrency: usize) -> Handler {
    fleet(&ProcessSettings {
        concurrency,
        ..settings(script)
    })
}

pub(crate) fn numbered(data: usize) -> Task {
    task(&data.to_string())
}

pub(crate) async fn do_one(handler: &Handler, data: &str) -> Ended {
    run_task(&executor(), handler, &task(data)).await
}

pub(crate) async fn do_all(handler: &Handler, tasks: &[Task]) -> Vec<Ended> {
    let executor = executor();
    join_all(tasks.iter().map(|task| run_task(&executor, handler, task))).await
}

pub(crate) fn error(ended: &Ended) -> &str {
    ended.error.as_deref().unwrap_or_default()
}

/// Answers with the process's id.
const WHO: &str = "
say(type='ready')
for job in jobs(): done(job, os.getpid())
";

/// It is its process that is limited, from its first job to its last, and the next one has another process.
#[tokio::test]
async fn a_process_that_eats_memory_is_killed_for_it() {
    let mut greedy = settings(
        "
say(type='ready')
for job in jobs():
    all = []
    while job['data'] == 'eat': all.append(bytearray(4 << 20))
    done(job, os.environ['TMPDIR'])
",
    );
    greedy.confinement.limits.memory = Some(128 << 20);
    greedy.confinement.private_tmp = true;
    let handler = fleet(&greedy);
    let first = do_one(&handler, r#""ok""#).await;
    assert_eq!(first.verdict, Verdict::Done);
    let eaten = do_one(&handler, r#""eat""#).await;
    assert_eq!(eaten.verdict, Verdict::RETRY);
    let why = "its process was killed for using more memory than limits.memory (128MiB)";
    assert!(error(&eaten).starts_with(why), "{eaten:?}");
    let second = do_one(&handler, r#""ok""#).await;
    assert_eq!(second.verdict, Verdict::Done);
    let folder = |ended: &Ended| -> String {
        serde_json::from_str(ended.result.as_deref().unwrap()).unwrap()
    };
    assert_ne!(folder(&first), folder(&second));
    assert!(!std::path::Path::new(&folder(&first)).exists());
}

#[tokio::test]
async fn one_process_does_one_job_after_the_other() {
    let handler = handler(
        "
say(type='ready')
for job in jobs():
    log('at', job['job_type'], job['data']['n'])
    done(job, dict(pid=os.getpid(), seen=sorted(job)))
",
    );
    let first = do_one(&handler, r#"{"n":1}"#).await;
    assert_eq!(first.verdict, Verdict::Done, "{first:?}");
    let result: serde_json::Value = serde_json::from_str(&first.result.unwrap()).unwrap();
    assert_eq!(
        result["seen"],
        json!([
            "attempt",
            "data",
            "deadline",
            "enqueued_at",
            "id",
            "job_type",
            "max_attempts",
            "tenant",
            "token",
            "type"
        ])
    );
    let second = do_one(&handler, r#"{"n":2}"#).await;
    let again: serde_json::Value = serde_json::from_str(&second.result.unwrap()).unwrap();
    assert_eq!(again["pid"], result["pid"]);
    // Each has what was logged while it was there.
    let logs = [first.log_tail, second.log_tail].map(Option::unwrap);
    assert_eq!(logs, ["at report-generation 1", "at report-generation 2"]);
    handler.close().await;
}

#[tokio::test]
async fn an_error_says_whether_and_when_again() {
    let handler = handler(
        "
say(type='ready')
for job in jobs(): say(type='error', id=job['id'], message='no such thing', **job['data'])
",
    );
    let again = do_one(&handler, r#"{"after":"30s"}"#).await;
    let after = Verdict::Retry {
        not_before: Some(Duration::from_secs(30)),
        long: false,
    };
    assert_eq!((again.verdict, error(&again)), (after, "no such thing"));
    let never = do_one(&handler, r#"{"retry":false}"#).await;
    assert_eq!(never.verdict, Verdict::Dead);
}

#[tokio::test]
async fn jobs_share_a_process_as_far_as_both_sides_allow() {
    // Answers when it has as many as it says that it takes, the last one first.
    let script = "
say(type='ready', concurrency=3)
held = []
for job in jobs():
    held.append(job)
    if len(held) == 3 or job['data'] == 6:
        for job in reversed(held): done(job, dict(had=len(held), pid=os.getpid()))
        held.clear()
";
    let handler = many(script, 100);
    let tasks: Vec<Task> = (1..=6).map(numbered).collect();
    for ended in do_all(&handler, &tasks).await {
        assert_eq!(ended.verdict, Verdict::Done, "{ended:?}");
        assert!(ended.result.unwrap().contains("\"had\": 3"));
    }
    // A process that says nothing of it gets one at a time, whatever the settings say.
    let modest = many(
        "
say(type='ready')
had = 0
def work(job):
    global had
    had += 1
    seen = had
    time.sleep(0.01)
    had -= 1
    done(job, seen)
for job in jobs(): threading.Thread(target=work, args=[job]).start()
",
        8,
    );
    for ended in do_all(&modest, &tasks).await {
        assert_eq!(ended.result.as_deref(), Some("1"), "{ended:?}");
    }
}

#[tokio::test]
async fn further_processes_are_started_when_the_first_are_full() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().display();
    // None of the two can answer before both have one.
    let script = format!(
        "
say(type='ready')
for job in jobs():
    open('{note}/%d' % os.getpid(), 'w').close()
    while len(os.listdir('{note}')) < 2: time.sleep(0.005)
    done(job, os.getpid())
"
    );
    let handler = fleet(&ProcessSettings {
        processes: 2,
        ..settings(&script)
    });
    let ended = do_all(&handler, &[numbered(1), numbered(2)]).await;
    assert_ne!(ended[0].result, ended[1].result);
    assert!(ended.iter().all(|it| it.verdict == Verdict::Done));
}

#[tokio::test]
async fn the_one_job_of_a_process_that_dies_has_failed() {
    let handler = handler(
        "
say(type='ready')
for job in jobs():
    if job['data'] == 'ok': done(job, os.getpid())
    log('model is gone')
    if job['data'] == 'exit': os._exit(3)
    if job['data'] == 'kill': os.kill(os.getpid(), signal.SIGKILL)
",
    );
    let exit = do_one(&handler, r#""exit""#).await;
    assert_eq!((exit.verdict, exit.exit_code), (Verdict::RETRY, Some(3)));
    assert_eq!(error(&exit), "its process died, exit code 3: model is gone");
    assert_eq!(exit.log_tail.as_deref(), Some("model is gone"));
    let kill = do_one(&handler, r#""kill""#).await;
    assert_eq!((kill.verdict, kill.signal), (Verdict::RETRY, Some(9)));
    assert!(error(&kill).contains("SIGKILL"), "{kill:?}");
    let ok = do_one(&handler, r#""ok""#).await;
    assert_eq!(ok.verdict, Verdict::Done);
}

#[tokio::test]
async fn what_it_had_answered_before_it_died_counts() {
    let handler = many(
        "
say(type='ready', concurrency=2)
got = [job for _, job in zip(range(2), jobs())]
done(got[0], 'in time')
os._exit(1)
",
        2,
    );
    let ended = do_all(&handler, &[numbered(1), numbered(2)]).await;
    let mut verdicts: Vec<Verdict> = ended.iter().map(|it| it.verdict).collect();
    verdicts.sort_by_key(|verdict| *verdict != Verdict::Done);
    assert_eq!(verdicts, [Verdict::Done, Verdict::RETRY], "{ended:?}");
}

#[tokio::test]
async fn several_jobs_of_a_process_that_dies_are_marked_and_only_the_one_that_kills_again_has_failed()
 {
    let script = "
say(type='ready', concurrency=3)
had = 0
for job in jobs():
    had += 1
    if had == 3: os._exit(9)
    if job['data'] == 2 and ALONE: os._exit(9)
    if ALONE: done(job)
";
    let together = many(&script.replace("ALONE", "False"), 3);
    let mut tasks: Vec<Task> = (1..=3).map(numbered).collect();
    for ended in do_all(&together, &tasks).await {
        assert_eq!(ended.verdict, Verdict::Crashed, "{ended:?}");
        assert!(error(&ended).contains("3 jobs"), "{ended:?}");
    }
    let alone = many(&script.replace("ALONE", "True"), 3);
    tasks.iter_mut().for_each(|task| task.alone = true);
    let ended = do_all(&alone, &tasks).await;
    let verdicts: Vec<Verdict> = ended.iter().map(|it| it.verdict).collect();
    assert_eq!(
        verdicts,
        [Verdict::Done, Verdict::RETRY, Verdict::Done],
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_job_that_runs_alone_shares_its_process_with_nobody() {
    let script = "
say(type='ready', concurrency=8)
open_jobs = set()
def work(job):
    seen = set(open_jobs)
    time.sleep(0.005)
    seen |= open_jobs
    open_jobs.discard(job['id'])
    done(job, len(seen))
for job in jobs():
    open_jobs.add(job['id'])
    threading.Thread(target=work, args=[job]).start()
";
    let handler = many(script, 8);
    let mut tasks: Vec<Task> = (0..60).map(numbered).collect();
    for task in tasks.iter_mut().step_by(7) {
        task.alone = true;
    }
    let ended = do_all(&handler, &tasks).await;
    for (task, ended) in tasks.iter().zip(&ended) {
        assert_eq!(ended.verdict, Verdict::Done, "{ended:?}");
        assert!(
            !task.alone || ended.result.as_deref() == Some("1"),
            "{ended:?}"
        );
    }
    let shared = ended.iter().any(|it| it.result.as_deref() != Some("1"));
    assert!(shared, "the others share it");
}

/// A signal to stop that can be given later.
fn stop() -> (watch::Sender<Stop>, StopSignal) {
    watch::channel(Stop::No)
}

fn now(reason: &str) -> Stop {
    Stop::Kill {
        grace: Duration::from_millis(300),
        reason: reason.to_owned(),
    }
}

#[tokio::test]
async fn a_job_is_cancelled_and_its_process_lives_on() {
    let handler = handler(
        "
say(type='ready')
for line in sys.stdin:
    line = json.loads(line)
    if line['type'] == 'cancel': say(type='error', id=line['id'], message='as you like')
    elif line['type'] == 'job' and line['data'] == 2: done(line, os.getpid())
    elif line['type'] == 'job': log('begun', os.getpid())
",
    );
    let (order, signal) = stop();
    let (executor, first) = (executor(), numbered(1));
    let ended = within(async {
        let run = executor.run(&handler, &first, signal);
        tokio::pin!(run);
        let never = tokio::time::timeout(Duration::from_millis(200), &mut run).await;
        assert!(never.is_err(), "{never:?}");
        order.send(now("cancelled by ann")).unwrap();
        run.await
    })
    .await;
    assert_eq!(ended.verdict, Verdict::Stopped);
    assert_eq!(error(&ended), "stopped: cancelled by ann");
    let log = ended.log_tail.unwrap();
    let pid = log.strip_prefix("begun ").unwrap();
    let next = do_one(&handler, "2").await;
    assert_eq!(next.result.as_deref(), Some(pid));
}

/// Never answers for the first, and says who it is for others.
const DEAF: &str = "
say(type='ready', concurrency=2)
for job in jobs():
    log('has', job['data'], os.getpid())
    if job['data'] == 9: done(job)
";

#[tokio::test]
async fn a_job_that_does_not_end_takes_its_process_along_and_nobody_else_pays() {
    let handler = many(DEAF, 2);
    let (order, signal) = stop();
    let (executor, first, second) = (executor(), numbered(1), numbered(2));
    let (_keep, never) = stop();
    let stopped = executor.run(&handler, &first, signal);
    let neighbour = executor.run(&handler, &second, never);
    let order = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        order.send(now("the lease was lost")).unwrap();
    };
    let (stopped, neighbour, ()) =
        Box::pin(within(async { tokio::join!(stopped, neighbour, order) })).await;
    assert_eq!(error(&stopped), "stopped: the lease was lost");
    assert_eq!(stopped.verdict, Verdict::Stopped);
    assert_eq!(neighbour.verdict, Verdict::Stopped, "{neighbour:?}");
    assert!(
        error(&neighbour).contains("did not end when it was told to"),
        "{neighbour:?}"
    );
    let pid = pid_in(stopped.log_tail.as_deref());
    assert!(!runs(pid));
    assert_eq!(do_one(&handler, "9").await.verdict, Verdict::Done);
}

/// The process id at the end of a log.
fn pid_in(log: Option<&str>) -> u32 {
    let word = log.and_then(|log| log.split_whitespace().last());
    word.and_then(|word| word.parse().ok()).unwrap()
}

#[tokio::test]
async fn a_job_has_only_its_time() {
    let handler = many(DEAF, 2);
    let late = Task {
        timeout: Duration::from_millis(300),
        ..numbered(1)
    };
    let ended = run_task(&executor(), &handler, &late).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert_eq!(error(&ended), "timed out after 300ms");
    assert!(!runs(pid_in(ended.log_tail.as_deref())));
}

#[tokio::test]
async fn a_job_that_is_given_up_leaves_nothing_running() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("pids");
    let script = format!(
        "
say(type='ready')
for job in jobs():
    if os.fork() == 0: time.sleep(1000)
    with open('{}', 'a') as f: print(os.getpid(), file=f)
",
        note.display()
    );
    let handler = handler(&script);
    let (_keep, signal) = stop();
    let (executor, task) = (executor(), numbered(1));
    let begun = async {
        let run = executor.run(&handler, &task, signal);
        tokio::select! {
            ended = run => panic!("{ended:?}"),
            pids = pids(&note, 1) => pids,
        }
    };
    let found = within(begun).await;
    until(|| !runs(found[0])).await;
}

#[tokio::test]
async fn a_child_that_holds_the_pipes_keeps_nobody_waiting() {
    let handler = handler(
        "
say(type='ready')
for job in jobs():
    if os.fork() == 0: time.sleep(1000)
    os._exit(5)
",
    );
    let ended = do_one(&handler, "1").await;
    assert_eq!((ended.verdict, ended.exit_code), (Verdict::RETRY, Some(5)));
}

#[tokio::test]
async fn a_process_that_has_done_enough_is_replaced_and_no_job_is_lost() {
    let script = "
say(type='ready', concurrency=3)
jobs_done = 0
for line in sys.stdin:
    line = json.loads(line)
    if line['type'] == 'drain': assert jobs_done == 4; continue
    jobs_done += 1
    done(line, dict(pid=os.getpid(), nth=jobs_done))
";
    let handler = fleet(&ProcessSettings {
        processes: 2,
        concurrency: 3,
        max_jobs: Some(4),
        ..settings(script)
    });
    let tasks: Vec<Task> = (0..40).map(numbered).collect();
    let mut pids = std::collections::BTreeSet::new();
    for ended in do_all(&handler, &tasks).await {
        assert_eq!(ended.verdict, Verdict::Done, "{ended:?}");
        let result: serde_json::Value = serde_json::from_str(&ended.result.unwrap()).unwrap();
        assert!(result["nth"].as_u64() <= Some(4), "{result}");
        pids.insert(result["pid"].as_u64());
    }
    assert!(pids.len() >= 10, "{pids:?}");
}

#[tokio::test]
async fn an_old_or_fat_process_is_replaced() {
    let old = fleet(&ProcessSettings {
        max_age: Some(Duration::from_millis(300)),
        ..settings(WHO)
    });
    let first = do_one(&old, "1").await.result.unwrap();
    // It goes by itself, without a job.
    until(|| !runs(first.parse().unwrap())).await;
    let second = do_one(&old, "2").await.result.unwrap();
    assert_ne!(first, second);

    let fat = fleet(&ProcessSettings {
        max_memory: Some(200 << 20),
        ..settings(
            "
say(type='ready')
for job in jobs():
    kept = b'x' * (job['data'] << 20)
    done(job, os.getpid())
",
        )
    });
    let first = do_one(&fat, "1").await.result.unwrap();
    assert_eq!(do_one(&fat, "1").await.result.unwrap(), first);
    // Looked at at most ten times a second.
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert_eq!(do_one(&fat, "300").await.result.unwrap(), first);
    until(|| !runs(first.parse().unwrap())).await;
    assert_ne!(do_one(&fat, "1").await.result.unwrap(), first);
}

#[tokio::test]
async fn processes_are_sent_away_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let note = |name: &str| folder.path().join(name);
    let polite = handler(&format!(
        "
say(type='ready')
for line in sys.stdin:
    line = json.loads(line)
    if line['type'] == 'job': done(line, os.getpid())
    if line['type'] == 'drain': open('{}', 'w').close()
open('{}', 'w').close()
",
        note("drained").display(),
        note("end of input").display()
    ));
    let stubborn = handler(
        "
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(type='ready')
for job in jobs(): done(job, os.getpid())
time.sleep(1000)
",
    );
    for handler in [&polite, &stubborn] {
        let pid = do_one(handler, "1").await.result.unwrap();
        within(handler.close()).await;
        assert!(!runs(pid.parse().unwrap()));
    }
    assert!(Path::exists(&note("drained")) && Path::exists(&note("end of input")));
}

#[tokio::test]
async fn a_process_that_reads_slowly_is_waited_for_and_one_that_writes_much_is_read() {
    let handler = many(
        "
say(type='ready', concurrency=100)
time.sleep(0.3)
for job in jobs():
    log('x' * 20_000)
    done(job, job['data'][:20_000])
",
        100,
    );
    let data = serde_json::to_string(&"y".repeat(100_000)).unwrap();
    let tasks: Vec<Task> = (0..100).map(|_| task(&data)).collect();
    for ended in do_all(&handler, &tasks).await {
        assert_eq!(ended.verdict, Verdict::Done, "{ended:?}");
        assert_eq!(ended.result.map(|it| it.len()), Some(20_002));
        assert!(ended.log_tail.is_none_or(|log| log.len() < 17_000));
    }
}

#[tokio::test]
async fn nothing_of_the_daemon_reaches_a_process() {
    let handler = handler(
        "
say(type='ready')
for job in jobs(): done(job, dict(env=sorted(os.environ), fds=sorted(os.listdir('/proc/self/fd'))))
",
    );
    let held = fs::File::open("/dev/null").unwrap();
    let seen = do_one(&handler, "1").await.result.unwrap();
    let seen: serde_json::Value = serde_json::from_str(&seen).unwrap();
    drop(held);
    let known = ["LC_CTYPE", "PATH"];
    let env = seen["env"].as_array().unwrap();
    assert!(
        env.iter()
            .all(|name| known.contains(&name.as_str().unwrap())),
        "{env:?}"
    );
    // The fourth is the listing's own.
    assert_eq!(seen["fds"].as_array().unwrap().len(), 4, "{seen}");
}

/// It says that a cancelled job is over while its work goes on, and answers once more when that is done.
#[tokio::test]
async fn a_late_answer_of_a_cancelled_run_is_not_taken_for_the_next_run() {
    let handler = many(
        "
say(type='ready', concurrency=2)
def work(job):
    while not os.path.exists(job['data']): time.sleep(0.005)
    say(type='result', id=job['id'], result=job['attempt'])
for line in sys.stdin:
    line = json.loads(line)
    if line['type'] == 'cancel': say(type='error', id=line['id'], message='over')
    elif line['type'] == 'job' and line['attempt'] == 1: threading.Thread(target=work, args=[line]).start()
    elif line['type'] == 'job': open(line['data'], 'w').close(); time.sleep(0.2); say(type='result', id=line['id'], result=line['attempt'])
",
        2,
    );
    let folder = tempfile::tempdir().unwrap();
    let first = Task {
        attempt: 1,
        timeout: Duration::from_millis(300),
        ..task(&format!("{:?}", folder.path().join("go")))
    };
    let late = run_task(&executor(), &handler, &first).await;
    assert_eq!(error(&late), "timed out after 300ms");
    let again = Task {
        attempt: 2,
        token: Uuid::new_v4(),
        timeout: BOUND,
        ..first
    };
    let ended = run_task(&executor(), &handler, &again).await;
    assert_eq!(ended.result.as_deref(), Some("2"), "{ended:?}");
}

#[tokio::test]
async fn a_job_that_never_came_to_its_process_is_not_blamed_for_its_end() {
    // It reads one job, and no further one.
    let handler = handler(
        "
say(type='ready')
job = next(jobs())
os.close(0)
done(job)
time.sleep(0.3)
",
    );
    for n in 0..4 {
        let ended = run_task(&executor(), &handler, &numbered(n)).await;
        assert!(
            matches!(ended.verdict, Verdict::Done | Verdict::Stopped),
            "{ended:?}"
        );
    }
}

#[tokio::test]
async fn what_waits_for_a_place_when_the_daemon_stops_is_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("begun");
    let handler = handler(&format!(
        "
say(type='ready')
for job in jobs(): open('{}', 'w').close()
",
        note.display()
    ));
    let (order, signal) = stop();
    let (executor, first, second) = (executor(), numbered(1), numbered(2));
    let (_keep, never) = stop();
    let running = executor.run(&handler, &first, signal);
    let then = async {
        until(|| note.exists()).await;
        let waiting = executor.run(&handler, &second, never);
        tokio::pin!(waiting);
        let begun = tokio::time::timeout(Duration::from_millis(100), &mut waiting).await;
        assert!(begun.is_err(), "{begun:?}");
        handler.rest();
        let waiting = waiting.await;
        order.send(now("the daemon stops")).unwrap();
        waiting
    };
    let (running, waiting) = Box::pin(within(async { tokio::join!(running, then) })).await;
    assert_eq!(error(&waiting), "stopped: the daemon stops");
    assert_eq!(running.verdict, Verdict::Stopped);
}
