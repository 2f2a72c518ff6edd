//! `process` handlers under real daemons: what becomes of their jobs when they die, are replaced, or their daemon goes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use chaos_tests::Lab;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Notes `begin` and `end` of each job with the process's id, and does what the job's data says.
const WORKER: &str = r#"
import json, os, sys, threading, time
lock = threading.Lock()
def say(**line):
    with lock: print(json.dumps(line), flush=True)
def note(what, job):
    with lock, open(NOTE, "a") as f: print(what, job["id"], job["attempt"], os.getpid(), file=f)
def work(job):
    note("begin", job)
    data = job["data"]
    if "die" in data: time.sleep(data["die"]); os._exit(7)
    if "hold" in data:
        while not os.path.exists(data["hold"]): time.sleep(0.01)
    note("end", job)
    say(type="result", id=job["id"], result=os.getpid())
say(type="ready", concurrency=CONCURRENCY)
for line in sys.stdin:
    job = json.loads(line)
    if job["type"] == "job": threading.Thread(target=work, args=[job]).start()
"#;

/// A lab whose `work-*` jobs run in processes with these settings.
fn lab(settings: &str) -> Lab {
    let mut lab = Lab::start();
    let script = lab.path("worker.py");
    let note = format!("{:?}", lab.path("notes"));
    let text = WORKER.replace("NOTE", &note).replace("CONCURRENCY", "4");
    fs::write(&script, text).unwrap();
    lab.add_handlers(&format!(
        "[handlers.\"work-*\"]\nprocess = {{ command = [\"python3\", {script:?}], kill_grace = \"500ms\", {settings} }}\nretry = {{ delay = \"1s\" }}\n"
    ));
    lab
}

fn enqueue(lab: &Lab, data: &str, max_attempts: u32) -> String {
    lab.value(&format!(
        "SELECT tenure.enqueue('work-1', '{data}', max_attempts => {max_attempts})"
    ))
}

/// The lines of the notes: what, job, attempt, process.
fn notes(lab: &Lab) -> Vec<[String; 4]> {
    let text = fs::read_to_string(lab.path("notes")).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    whole
        .lines()
        .map(|line| words(line).try_into().unwrap())
        .collect()
}

fn until_noted(lab: &Lab, what: &str, count: usize) {
    lab.wait_for(|| {
        let seen = notes(lab).iter().filter(|line| line[0] == what).count();
        match seen >= count {
            true => Ok(()),
            false => Err(format!("{seen} of {count} {what} notes")),
        }
    });
}

/// The processes that the notes tell of and that live.
fn living(lab: &Lab) -> BTreeSet<String> {
    let pids = notes(lab).into_iter().map(|[.., pid]| pid);
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    })
    .collect()
}

fn until_none_lives(lab: &Lab) {
    lab.wait_for(|| match living(lab) {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:?} live")),
    });
}

fn ended(lab: &Lab, job: &str) -> Vec<String> {
    let rows = lab.rows(&format!(
        "SELECT outcome || ' ' || attempt FROM tenure.attempts WHERE job_id = '{job}' ORDER BY run"
    ));
    rows.into_iter()
        .map(|row| row[0].clone().unwrap())
        .collect()
}

#[test]
fn one_of_several_jobs_kills_its_process_and_the_others_do_not_pay() {
    let lab = lab("concurrency = 4");
    let gate = lab.path("gate").display().to_string();
    let holds = format!(r#"{{"hold": "{gate}"}}"#);
    let good: Vec<String> = (0..3).map(|_| enqueue(&lab, &holds, 1)).collect();
    let bad = enqueue(&lab, r#"{"die": 0.5}"#, 2);
    let mut daemon = lab.daemon("a", &[]);
    // All four are in one process when it dies, and then each is alone with its own.
    until_noted(&lab, "begin", 5);
    fs::write(&gate, "").unwrap();
    for job in &good {
        lab.until_status(job, "completed");
        // Not even the one attempt that they have was used by it.
        assert_eq!(ended(&lab, job), ["crashed 1", "completed 1"]);
    }
    lab.until_status(&bad, "failed");
    assert_eq!(ended(&lab, &bad), ["crashed 1", "failed 1", "failed 2"]);
    let error = lab.value(&format!(
        "SELECT last_error FROM tenure.jobs WHERE id = '{bad}'"
    ));
    assert_eq!(error, "its process died, exit code 7");
    // While it was alone nobody else was in its process.
    let mut inside: BTreeSet<(String, String)> = BTreeSet::new();
    for [what, job, attempt, pid] in notes(&lab).split_off(4) {
        if what == "begin" {
            assert!(inside.iter().all(|(_, of)| *of != pid), "{pid} is shared");
            inside.insert((job.clone(), pid));
        } else {
            inside.retain(|(open, _)| *open != job);
        }
        if job == bad {
            inside.retain(|(open, _)| *open != bad);
        }
        let _ = attempt;
    }
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    until_none_lives(&lab);
}

#[test]
fn processes_that_are_replaced_all_the_time_lose_no_job() {
    let lab = lab("concurrency = 4, processes = 2, max_jobs = 7");
    lab.run("SELECT tenure.enqueue('work-' || i % 3, '{}') FROM generate_series(1, 200) i");
    let mut daemon = lab.daemon("a", &[]);
    lab.until(
        "SELECT count(*) FROM tenure.jobs WHERE status = 'completed' AND attempts = 1",
        "200",
    );
    let all = notes(&lab);
    let pids: BTreeSet<&String> = all.iter().map(|line| &line[3]).collect();
    assert!(pids.len() >= 200 / 7, "{pids:?}");
    for pid in pids {
        let begun = all
            .iter()
            .filter(|line| line[0] == "begin" && line[3] == *pid);
        assert!(begun.count() <= 7);
    }
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    until_none_lives(&lab);
}

#[test]
fn a_drain_waits_for_what_runs_and_gives_back_what_does_not_end() {
    let lab = lab("concurrency = 4");
    let gate = lab.path("gate").display().to_string();
    let never = lab.path("never").display().to_string();
    let ends = enqueue(&lab, &format!(r#"{{"hold": "{gate}"}}"#), 1);
    let stays = enqueue(&lab, &format!(r#"{{"hold": "{never}"}}"#), 1);
    let mut daemon = lab.daemon("a", &["worker.drain_timeout=2s"]);
    until_noted(&lab, "begin", 2);
    daemon.signal(Signal::SIGTERM);
    lab.until(
        "SELECT status FROM tenure.workers ORDER BY started_at DESC LIMIT 1",
        "draining",
    );
    fs::write(&gate, "").unwrap();
    lab.until_status(&ends, "completed");
    assert_eq!(daemon.wait().code(), Some(0), "{}", daemon.log());
    until_none_lives(&lab);
    assert_eq!(lab.status(&stays), "pending");
    // No attempt was used by it: its only one is left.
    let _next = lab.daemon("b", &[]);
    until_noted(&lab, "begin", 3);
    fs::write(&never, "").unwrap();
    lab.until_status(&stays, "completed");
    assert_eq!(ended(&lab, &stays), ["released 1", "completed 1"]);
}

#[test]
fn a_killed_daemon_takes_its_processes_along() {
    let lab = lab("concurrency = 4");
    let gate = lab.path("gate").display().to_string();
    let job = enqueue(&lab, &format!(r#"{{"hold": "{gate}"}}"#), 3);
    let mut daemon = lab.daemon("a", &[&lab.state_dir("a")]);
    until_noted(&lab, "begin", 1);
    daemon.kill9();
    until_none_lives(&lab);
    let _next = lab.daemon("a", &[&lab.state_dir("a")]);
    until_noted(&lab, "begin", 2);
    fs::write(&gate, "").unwrap();
    lab.until_status(&job, "completed");
}

#[test]
fn a_process_that_is_killed_from_outside_is_replaced_at_once() {
    let lab = lab("processes = 1");
    let gate = lab.path("gate").display().to_string();
    let job = enqueue(&lab, &format!(r#"{{"hold": "{gate}"}}"#), 3);
    let _daemon = lab.daemon("a", &[]);
    until_noted(&lab, "begin", 1);
    let pid: i32 = notes(&lab)[0][3].parse().unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    fs::write(&gate, "").unwrap();
    lab.until_status(&job, "completed");
    assert_eq!(ended(&lab, &job), ["failed 1", "completed 2"]);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

/// A job that waits for room must not hold up jobs of other types, and is claimed by whoever has room.
#[test]
fn a_full_handler_holds_up_nobody_else() {
    let lab = lab("processes = 1");
    let gate = lab.path("gate").display().to_string();
    let holds = format!(r#"{{"hold": "{gate}"}}"#);
    let jobs: Vec<String> = (0..20).map(|_| enqueue(&lab, &holds, 1)).collect();
    let _daemon = lab.daemon("a", &[]);
    until_noted(&lab, "begin", 1);
    let others = lab.enqueue_many("ticks-0", 10);
    for job in &others {
        lab.until_status(job, "completed");
    }
    assert_eq!(
        lab.value(
            "SELECT count(*) FROM tenure.jobs WHERE job_type = 'work-1' AND status = 'running'"
        ),
        "1"
    );
    fs::write(&gate, "").unwrap();
    for job in &jobs {
        lab.until_status(job, "completed");
    }
}
