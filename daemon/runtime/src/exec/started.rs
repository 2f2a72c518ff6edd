//! A process that was started, and what goes with it until its end.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;

use tokio::process::Child;

use super::folder::Folder;
use crate::cgroup::Cgroup;
use crate::settings::Exceeded;
use crate::supervisor::reported;

/// A process that was started below its supervisor.
pub(super) struct Started {
    /// The supervisor.
    pub(super) child: Child,
    pub(super) with: With,
}

/// What goes with a process.
pub(super) struct With {
    report: File,
    folder: Option<Folder>,
    group: Option<Cgroup>,
}

impl With {
    /// The supervisor reports at the other end of `report`; the handler has `folder` and is in `group`.
    pub(super) fn new(report: OwnedFd, folder: Option<Folder>, group: Option<Cgroup>) -> Self {
        Self {
            report: report.into(),
            folder,
            group,
        }
    }

    /// Clears up when the supervisor has ended. Says which limit it killed the handler for.
    pub(super) async fn clear_up(mut self) -> Option<Exceeded> {
        let group = self.group.take();
        let out_of_memory = group.as_ref().is_some_and(Cgroup::ran_out_of_memory);
        let folder = self.folder.take();
        if folder.is_some() || group.is_some() {
            // The group first: then nobody is left who could use the folder, in which there may be much. Where this is not waited for
            // any more, they are removed all the same.
            let removed = move || {
                drop(group);
                drop(folder);
            };
            let _ = tokio::task::spawn_blocking(removed).await;
        }
        if out_of_memory {
            return Some(Exceeded::Memory);
        }
        let mut byte = [0];
        // Its only writer has ended, so this does not wait.
        match self.report.read(&mut byte) {
            Ok(1) => reported(byte[0]),
            _ => None,
        }
    }
}

/// A pipe whose ends close on exec: read from the first, write to the second.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?)
}
