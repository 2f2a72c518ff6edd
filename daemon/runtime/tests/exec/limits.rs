//! Handlers that want more than they may have, and whom they run as.

use std::path::Path;
use std::time::Duration;

use tenure_protocol::verdict::{Ended, Verdict};
use tenure_runtime::exec::{Handler, Task};
use tenure_runtime::settings::{Account, Confinement, ProcessLimits};

use super::{command, executor, marked, run, run_task, task};

fn confined(command_line: &[&str], confinement: Confinement) -> Handler {
    let mut settings = command(command_line);
    settings.confinement = Box::new(confinement);
    Handler::Exec(settings)
}

fn limited(script: &str, limits: ProcessLimits) -> Handler {
    let confinement = Confinement {
        limits,
        ..Confinement::default()
    };
    confined(&["sh", "-c", script], confinement)
}

/// It has failed, was killed for this, and nothing is left.
async fn is_killed_for(script: &str, mark: &str, limits: ProcessLimits, why: &str) {
    let ended = run(&limited(script, limits)).await;
    let error = ended.error.unwrap();
    assert_eq!(ended.verdict, Verdict::RETRY, "{error}");
    assert!(error.starts_with(why), "{error}");
    assert_eq!(marked(mark, 0), [0u32; 0]);
}

fn mark(test: u32) -> String {
    format!("mark{test}.{}", std::process::id())
}

#[tokio::test]
async fn a_handler_that_eats_memory_is_killed_for_it() {
    let mark = mark(0);
    let eat =
        format!("all = []\nwhile True:\n  all.append(bytearray(b\"x\" * (4 << 20))) # {mark}");
    let limits = ProcessLimits {
        memory: Some(128 << 20),
        ..ProcessLimits::default()
    };
    let why = "killed for using more memory than limits.memory (128MiB)";
    // What a daemon that it started eats is its own.
    for script in [
        format!("exec python3 -c '{eat}'"),
        format!("(setsid python3 -c 'import time\ntime.sleep(0.1)\n{eat}' &); sleep 300"),
    ] {
        is_killed_for(&script, &mark, limits, why).await;
    }
}

/// What forked processes share is counted once.
#[tokio::test]
async fn shared_memory_is_not_counted_for_each() {
    let share = "import os, time\nall = bytearray(b\"x\" * (50 << 20))\nfor n in range(8):\n  if not os.fork():\n    time.sleep(0.5); os._exit(0)\nfor n in range(8): os.wait()";
    let limits = ProcessLimits {
        memory: Some(128 << 20),
        ..ProcessLimits::default()
    };
    let ended = run(&limited(&format!("exec python3 -c '{share}'"), limits)).await;
    assert_eq!(ended.verdict, Verdict::Done, "{:?}", ended.error);
}

#[tokio::test]
async fn a_handler_that_burns_the_processor_is_killed_for_it_in_one_process_or_in_many() {
    let mark = mark(1);
    let limits = ProcessLimits {
        cpu: Some(Duration::from_secs(1)),
        ..ProcessLimits::default()
    };
    let why = "killed for using more processor time than limits.cpu (1s)";
    for script in [
        format!(": {mark}; while :; do :; done"),
        // Each of them is short.
        format!(
            ": {mark}; while :; do sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'; done"
        ),
        format!(": {mark}; trap '' XCPU; while :; do :; done & while :; do :; done & sleep 300"),
    ] {
        is_killed_for(&script, &mark, limits, why).await;
    }
}

#[tokio::test]
async fn a_handler_that_runs_too_many_processes_is_killed_for_it() {
    let mark = mark(2);
    let many = format!(
        "import os, time\nos.setsid()\nfor n in range(1000):\n  time.sleep(0.002)\n  if not os.fork(): os.setsid(); time.sleep(300) # {mark}"
    );
    let limits = ProcessLimits {
        processes: Some(64),
        ..ProcessLimits::default()
    };
    let why = "killed for running more processes than limits.processes (64)";
    is_killed_for(
        &format!("python3 -c '{many}' & sleep 300"),
        &mark,
        limits,
        why,
    )
    .await;
}

/// All of whose parts fork as fast as they can.
#[tokio::test]
async fn a_fork_bomb_has_an_end() {
    let mark = mark(6);
    let bomb = format!("import os\nwhile True:\n  try: os.fork() # {mark}\n  except OSError: pass");
    let confinement = Confinement {
        account: Some(account(0)),
        limits: ProcessLimits {
            processes: Some(16),
            ..ProcessLimits::default()
        },
        ..Confinement::default()
    };
    let ended = run_as(
        confinement,
        &format!("cd /; python3 -c '{bomb}' & sleep 300"),
    )
    .await;
    let error = ended.error.unwrap();
    let why = "killed for running more processes than limits.processes (16)";
    assert!(error.starts_with(why), "{error}");
    assert_eq!(marked(&mark, 0), [0u32; 0]);
}

#[tokio::test]
async fn what_is_within_its_limits_is_left_alone() {
    let limits = ProcessLimits {
        cpu: Some(Duration::from_secs(60)),
        memory: Some(1 << 30),
        processes: Some(64),
        open_files: Some(256),
        file_size: Some(1 << 20),
        output: Some(1 << 20),
    };
    let ended = run(&limited("sleep 0.3; sh -c 'ulimit -n; ulimit -c'", limits)).await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("\"256\\n0\""))
    );
}

#[tokio::test]
async fn a_handler_gets_no_more_files_than_it_may_open() {
    let limits = ProcessLimits {
        open_files: Some(32),
        ..ProcessLimits::default()
    };
    let eat = "all = []\ntry:\n  while True: all.append(open(\"/dev/null\"))\nexcept OSError as error: print(error.errno, len(all))";
    let ended = run(&limited(&format!("exec python3 -c '{eat}'"), limits)).await;
    // EMFILE; the three pipes are files too.
    assert_eq!(ended.result.as_deref(), Some("\"24 29\""));
}

#[tokio::test]
async fn a_gibibyte_of_output_is_stopped_at_its_limit() {
    let mark = mark(3);
    let limits = ProcessLimits {
        output: Some(10 << 20),
        ..ProcessLimits::default()
    };
    let why = "killed for writing more output than limits.output (10MiB)";
    for stream in ["", " >&2"] {
        let script = format!(": {mark}; head -c 1073741824 /dev/zero{stream}; sleep 300");
        is_killed_for(&script, &mark, limits, why).await;
    }
}

#[tokio::test]
async fn a_file_that_is_too_long_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let limits = ProcessLimits {
        file_size: Some(1 << 20),
        ..ProcessLimits::default()
    };
    let script = format!("exec head -c 2000000 /dev/zero > {}", file.display());
    let why = "killed for writing a longer file than limits.file_size (1MiB)";
    is_killed_for(&script, &mark(4), limits, why).await;
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
}

/// A user that nothing else here runs as.
fn account(test: u32) -> Account {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test takes root: scripts/test"
    );
    let user = 1_000_000 + std::process::id() * 10 + test;
    Account {
        name: "somebody".to_owned(),
        user,
        group: user,
        groups: vec![user, user + 1],
    }
}

async fn run_as(confinement: Confinement, script: &str) -> Ended {
    run_task(
        &executor(),
        &confined(&["sh", "-c", script], confinement),
        &task("{}"),
    )
    .await
}

#[tokio::test]
async fn a_handler_is_its_user_and_nobody_else() {
    let confinement = Confinement {
        account: Some(account(1)),
        nice: Some(7),
        ..Confinement::default()
    };
    let script = "cd /; id -ru; id -u; id -rg; id -G; nice; grep NoNewPrivs /proc/self/status | tr -d '\\t'; grep CapEff /proc/self/status | tr -d '\\t'; \
                  kill -9 $PPID 2>/dev/null || echo 'cannot kill its supervisor'; cat /proc/$PPID/environ | wc -c";
    let user = account(1).user.to_string();
    let groups = format!("{user} {}", account(1).user + 1);
    let ended = run_as(confinement, script).await;
    let said: String = serde_json::from_str(&ended.result.unwrap()).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines,
        [
            user.as_str(),
            &user,
            &user,
            &groups,
            "7",
            "NoNewPrivs:1",
            "CapEff:0000000000000000",
            "cannot kill its supervisor",
            "0"
        ]
    );
}

#[tokio::test]
async fn what_escapes_from_another_user_ends_with_its_job() {
    let confinement = Confinement {
        account: Some(account(2)),
        ..Confinement::default()
    };
    let mark = mark(5);
    let ended = run_as(
        confinement,
        &format!("(setsid sh -c ': {mark}; trap \"\" TERM; sleep 300; sleep 300' &); until pgrep -f {mark}; do :; done; kill -9 $PPID; exit 3"),
    )
    .await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert_eq!(marked(&mark, 0), [0u32; 0]);
}

#[tokio::test]
async fn a_handlers_temporary_files_are_its_own_and_go_with_it() {
    for account in [None, Some(account(3))] {
        let confinement = Confinement {
            account,
            private_tmp: true,
            ..Confinement::default()
        };
        let script = "cd $TMPDIR; mkdir closed; touch closed/file; chmod 0 closed; ln -s / link; stat -c '%a %u' .; pwd";
        let ended = run_as(confinement.clone(), script).await;
        let said: String = serde_json::from_str(&ended.result.unwrap()).unwrap();
        let (mode, folder) = said.split_once('\n').unwrap();
        let user = confinement.account.map_or(0, |account| account.user);
        assert_eq!(mode, format!("700 {user}"));
        assert!(folder.contains("/tenure-") && !Path::new(folder).exists());
    }
}

#[tokio::test]
async fn a_timed_out_handler_leaves_no_temporary_files() {
    let confinement = Confinement {
        private_tmp: true,
        ..Confinement::default()
    };
    let handler = confined(
        &[
            "sh",
            "-c",
            "echo $TMPDIR; touch $TMPDIR/file; exec sleep 300",
        ],
        confinement,
    );
    let task = Task {
        timeout: Duration::from_millis(300),
        ..task("{}")
    };
    let ended = run_task(&executor(), &handler, &task).await;
    let folder = ended.log_tail.unwrap();
    assert!(
        folder.contains("/tenure-") && !Path::new(&folder).exists(),
        "{folder}"
    );
}
