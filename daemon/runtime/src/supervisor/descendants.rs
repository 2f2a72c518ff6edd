//! Finds and kills what is below a process, which has to be the calling one.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Sends KILL to everything below `root`, which has to be the calling process, as it is at this moment: what is forked meanwhile
/// is there at the next look.
///
/// A number is only used while its process has the parent under which it was found. Between that look and the signal it could go to
/// another process only if the parent reaped it and the kernel gave out all its numbers once round; children of `root` nobody else reaps.
pub(super) fn kill_all_below(root: i32) {
    let mut found = vec![root];
    while let Some(parent) = found.pop() {
        for child in children_of(parent) {
            if parent_of(child) == Some(parent) {
                let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
                found.push(child);
            }
        }
    }
}

/// Everything below `root`, as it is at this moment.
pub(super) fn all_below(root: i32) -> Vec<i32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(parent) = found.get(next) {
        let children = children_of(*parent);
        found.extend(children);
        next += 1;
    }
    found.remove(0);
    found
}

/// The children of all threads of `pid`.
fn children_of(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let mut children = Vec::new();
    for thread in threads.flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(list) => children.extend(
                list.split_whitespace()
                    .filter_map(|pid| pid.parse::<i32>().ok()),
            ),
            // The thread has ended, or the kernel was built without these lists.
            Err(_) if thread.path().exists() => return all_with_parent(pid),
            Err(_) => {}
        }
    }
    children
}

fn all_with_parent(parent: i32) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|pid| parent_of(*pid) == Some(parent)).collect()
}

/// The second field after the name, which may hold anything.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;

    #[test]
    fn children_are_found_in_both_ways() {
        let own = i32::try_from(std::process::id()).unwrap();
        let mut child = Command::new("sleep").arg("300").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(parent_of(pid), Some(own));
        assert!(children_of(own).contains(&pid));
        assert!(all_with_parent(own).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children_of(own).contains(&pid));
    }
}
