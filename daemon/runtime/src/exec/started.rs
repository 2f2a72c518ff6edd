//! A process that was started, and what goes with it until its end.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;

use tokio::process::Child;

use super::folder::Folder;
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
}

impl With {
    /// The supervisor reports at the other end of `report`, and the handler has `folder`.
    pub(super) fn new(report: OwnedFd, folder: Option<Folder>) -> Self {
        Self {
            report: report.into(),
            folder,
        }
    }

    /// Clears up when the supervisor has ended. Says which limit it killed the handler for.
    pub(super) async fn clear_up(mut self) -> Option<Exceeded> {
        if let Some(folder) = self.folder.take() {
            // There may be much in it. Where it is not waited for any more, it is removed all the same.
            let _ = tokio::task::spawn_blocking(move || drop(folder)).await;
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
