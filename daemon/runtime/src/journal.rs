//! What has ended and is not yet known to be safe, kept over the death of this process in `worker.state_dir`.
//!
//! One file of JSON lines, and a lock: one daemon for each directory. Written as things happen and not synced: it is for the
//! death of the process, not of the machine. The next daemon there says to the database what the last one could not.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use tenure_core::ids::{Token, WorkerId};
use thiserror::Error;

use crate::held::{Statement, Written};

/// Rewritten when it has grown beyond this, and beyond twice what was open at the last time.
const COMPACT: u64 = 8 * 1024 * 1024;

/// Why the directory cannot be used.
#[derive(Debug, Error)]
pub enum JournalError {
    /// Another daemon uses it.
    #[error("state_dir {} is in use by another daemon: give each daemon its own", .0.display())]
    InUse(PathBuf),
    /// It cannot be written or read.
    #[error("state_dir {}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// From here on this worker writes.
    Worker(WorkerId),
    Ended(Box<Written>),
    Confirmed(Token),
}

/// What the last daemon in a directory left.
#[derive(Debug, Default)]
pub(crate) struct Legacy {
    /// The workers it was: they are dead.
    pub workers: Vec<WorkerId>,
    /// Ends that the database has not confirmed.
    pub ends: Vec<Statement>,
}

/// The open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    size: u64,
    compact_at: u64,
    /// A line could not be written, or not whole: what follows would be lost with it.
    torn: bool,
    _lock: Flock<File>,
}

impl Journal {
    /// Opens the journal in `dir`, made if it is not there, and reads what the last daemon left.
    ///
    /// # Errors
    /// `InUse` while another daemon has it.
    pub(crate) fn open(dir: &Path) -> Result<(Self, Legacy), JournalError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| JournalError::Io { path, error }
        };
        if !dir.is_dir() {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(failed(dir))?;
        }
        let lock_path = dir.join("lock");
        let lock = private().open(&lock_path).map_err(failed(&lock_path))?;
        let lock =
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(
                |(_, errno)| match errno {
                    Errno::EWOULDBLOCK => JournalError::InUse(dir.to_owned()),
                    other => failed(&lock_path)(other.into()),
                },
            )?;
        let path = dir.join("journal.ndjson");
        let file = private().append(true).open(&path).map_err(failed(&path))?;
        let legacy = read(&file).map_err(failed(&path))?;
        let size = file.metadata().map_err(failed(&path))?.len();
        Ok((
            Self {
                path,
                file,
                size,
                compact_at: COMPACT,
                torn: false,
                _lock: lock,
            },
            legacy,
        ))
    }

    /// A run has ended.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn ended(&mut self, statement: &Statement) -> io::Result<()> {
        self.append(&Line::Ended(Box::new(statement.written())))
    }

    /// The database has confirmed the end of this run.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn confirmed(&mut self, token: Token) -> io::Result<()> {
        self.append(&Line::Confirmed(token))
    }

    /// Whether all that was noted is really there.
    #[must_use]
    pub(crate) fn is_whole(&self) -> bool {
        !self.torn
    }

    /// Whether it is worth writing it anew, or has to be.
    #[must_use]
    pub(crate) fn wants_compaction(&self) -> bool {
        self.size > self.compact_at || self.torn
    }

    /// Writes it anew with only this content.
    ///
    /// # Errors
    /// Of the file; the old one then stays as it was.
    pub(crate) fn compact<'a>(
        &mut self,
        worker: Option<WorkerId>,
        open: impl Iterator<Item = &'a Statement>,
    ) -> io::Result<()> {
        let mut open = open.peekable();
        if open.peek().is_none() {
            // Nothing can be lost, and so a full file system can heal.
            self.torn = true;
            self.file.set_len(0)?;
            self.size =
                worker.map_or(Ok(0), |worker| write(&mut self.file, &Line::Worker(worker)))?;
            self.compact_at = COMPACT;
            self.torn = false;
            return Ok(());
        }
        let temporary = self.path.with_extension("new");
        let _ = std::fs::remove_file(&temporary);
        let mut file = private().append(true).open(&temporary)?;
        let mut size = 0;
        for line in worker
            .map(Line::Worker)
            .into_iter()
            .chain(open.map(|end| Line::Ended(Box::new(end.written()))))
        {
            size += write(&mut file, &line)?;
        }
        std::fs::rename(&temporary, &self.path)?;
        // The same handle: nothing can fail between here and the next line that is written.
        self.file = file;
        self.size = size;
        self.compact_at = COMPACT.max(2 * size);
        self.torn = false;
        Ok(())
    }

    fn append(&mut self, line: &Line) -> io::Result<()> {
        let written = write(&mut self.file, line);
        self.torn |= written.is_err();
        self.size += written?;
        Ok(())
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options
}

fn write(file: &mut File, line: &Line) -> io::Result<u64> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)?;
    Ok(u64::try_from(text.len()).unwrap_or(u64::MAX))
}

fn read(file: &File) -> io::Result<Legacy> {
    let (mut workers, mut ends, mut order) = (Vec::new(), BTreeMap::new(), Vec::new());
    for line in BufReader::new(file).split(b'\n') {
        // The last line may be cut short by the death of the process; a run that it spoke of was not reported as ended.
        match serde_json::from_slice(&line?) {
            Ok(Line::Worker(worker)) => workers.push(worker),
            Ok(Line::Ended(end)) => {
                order.push(end.end.token);
                ends.insert(end.end.token, Statement::from(*end));
            }
            Ok(Line::Confirmed(token)) => drop(ends.remove(&token)),
            Err(_) => {}
        }
    }
    Ok(Legacy {
        workers,
        ends: order
            .into_iter()
            .filter_map(|token| ends.remove(&token))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt as _;

    use uuid::Uuid;

    use super::*;
    use crate::held::tests::held;

    #[test]
    fn the_next_daemon_finds_what_was_not_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, done) = (held().released(), held().released());
        let worker = WorkerId(Uuid::new_v4());
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        assert!(legacy.workers.is_empty() && legacy.ends.is_empty());
        journal.compact(Some(worker), [].into_iter()).unwrap();
        journal.ended(&done).unwrap();
        journal.ended(&kept).unwrap();
        journal.confirmed(done.end.token).unwrap();
        assert!(matches!(
            Journal::open(dir.path()),
            Err(JournalError::InUse(_))
        ));
        drop(journal);
        // The death of the process cut the last line short.
        let path = dir.path().join("journal.ndjson");
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"ended\":{\"end\"").unwrap();
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        assert_eq!(legacy.workers, [worker]);
        assert_eq!(legacy.ends.len(), 1);
        assert_eq!(legacy.ends[0].hold(), kept.hold());
        assert_eq!(legacy.ends[0].end.kind, kept.end.kind);
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        // What is written after a line that was cut short is not lost with it.
        journal.compact(None, legacy.ends.iter()).unwrap();
        journal.ended(&done).unwrap();
        drop(journal);
        assert_eq!(Journal::open(dir.path()).unwrap().1.ends.len(), 2);
    }
}
