//! Handlers in control groups of their own, in a group that the test makes.

use std::path::{Path, PathBuf};
use std::process::Command;

use tenure_protocol::verdict::Verdict;
use tenure_runtime::cgroup::Cgroups;
use tenure_runtime::exec::{Executor, Handler};
use tenure_runtime::settings::ProcessLimits;

use super::{command, executor, marked, run_task, runs, task, until};

/// A control group for one test.
struct Place(PathBuf);

impl Place {
    fn new(test: u32) -> Self {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts
            .lines()
            .find(|line| line.contains(" - cgroup2 "))
            .and_then(|line| line.split(' ').nth(4))
            .expect("this test takes control groups of version 2, mounted");
        let place = Path::new(mount).join(format!("tenure-test-{}-{test}", std::process::id()));
        std::fs::create_dir(&place)
            .expect("this test takes root, and control groups that can be written: scripts/test");
        Self(place)
    }

    fn groups(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap().flatten();
        let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
        folders.map(|entry| entry.path()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn limited(script: &str) -> Handler {
    let mut settings = command(&["sh", "-c", script]);
    settings.confinement.limits = ProcessLimits {
        memory: Some(1 << 30),
        processes: Some(64),
        ..ProcessLimits::default()
    };
    Handler::Exec(settings)
}

fn executor_in(place: &Place) -> Executor {
    Executor {
        cgroups: Some(Cgroups::below(&place.0).unwrap()),
        ..executor()
    }
}

#[tokio::test]
async fn a_handler_with_limits_has_a_group_of_its_own_that_goes_with_it() {
    let place = Place::new(0);
    let executor = executor_in(&place);
    let ended = run_task(
        &executor,
        &limited("grep ^0:: /proc/self/cgroup"),
        &task("{}"),
    )
    .await;
    let group = ended.result.unwrap();
    let own = place.groups();
    assert_eq!(own.len(), 1);
    let name = own[0].file_name().unwrap().to_str().unwrap();
    assert!(group.contains(&format!("/{name}/")), "{group}");
    assert!(
        !own[0]
            .read_dir()
            .unwrap()
            .any(|entry| entry.unwrap().path().is_dir())
    );
    drop(executor);
    assert_eq!(place.groups(), [] as [PathBuf; 0]);
}

/// What had left its handler before that killed the supervisor is still in the group.
#[tokio::test]
async fn in_a_group_nothing_is_left_of_a_handler_that_kills_its_supervisor() {
    let place = Place::new(1);
    let mark = format!("320.{}", std::process::id());
    let script = format!(
        "(setsid sleep {mark} &); until pgrep -fx 'sleep {mark}'; do :; done; kill -9 $PPID; sleep {mark}"
    );
    let ended = run_task(&executor_in(&place), &limited(&script), &task("{}")).await;
    assert_eq!((ended.verdict, ended.signal), (Verdict::RETRY, Some(9)));
    assert_eq!(marked(&mark, 0), [0u32; 0]);
}

#[tokio::test]
async fn what_a_dead_daemon_left_is_killed_and_what_a_living_one_has_is_not() {
    let place = Place::new(2);
    let living = Cgroups::below(&place.0).unwrap();
    let others = place.groups();
    let left = place.0.join(format!("tenure-{:032x}", 7)).join("group");
    std::fs::create_dir_all(&left).unwrap();
    let mut sleeping = Command::new("sleep").arg("300").spawn().unwrap();
    std::fs::write(left.join("cgroup.procs"), sleeping.id().to_string()).unwrap();
    let next = tokio::task::spawn_blocking({
        let place = place.0.clone();
        move || Cgroups::below(&place)
    });
    until(|| !runs(sleeping.id())).await;
    sleeping.wait().unwrap();
    let _next = next.await.unwrap().unwrap();
    assert!(!left.parent().unwrap().exists());
    assert!(others.iter().all(|group| group.exists()));
    drop(living);
}
