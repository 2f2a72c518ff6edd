//! What has ended and is not yet known to be safe, kept over the death of this process in `worker.state_dir`.
//!
//! One file of JSON lines, and a lock: one daemon for each directory. Written as things happen and not synced: it is for the
//! death of the process, not of the machine. The next daemon there says to the database what the last one could not.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use tenure_core::ids::{Beat, Token, WorkerId};
use tenure_core::primary::Seen;
use tenure_core::replay::Replay;
use thiserror::Error;

use crate::held::{Statement, Written};

/// Rewritten when it has grown beyond this, and beyond twice what was open at the last time.
const COMPACT: u64 = 8 * 1024 * 1024;

/// The rows of workers that ended are kept for a day; half of it leaves room for clocks that are wrong.
pub(crate) const RECENT: Duration = Duration::from_hours(12);

/// From one note that the worker lives to the next.
const LIFE: Duration = Duration::from_hours(1);

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
    /// Nothing more is to be said of it.
    Confirmed(Token),
    /// The database has it; a server that shows this heartbeat of the worker has it too.
    Answered(Token, Beat),
    /// What was answered before this heartbeat is safe, or forgotten.
    Gone(Beat),
    /// As an earlier version wrote which servers were seen: system and timeline.
    Seen(i64, i32),
    /// Which servers were seen.
    Saw(Seen),
    /// The worker was known to the database, in seconds since 1970 by this machine's clock.
    Lives(u64),
}

/// What the last daemon in a directory left.
#[derive(Debug)]
pub(crate) struct Legacy {
    /// The workers it was: they are dead.
    pub workers: Vec<WorkerId>,
    /// Ends that the database has not confirmed.
    pub ends: Vec<Statement>,
    /// Ends that a switch could lose: a server that shows the heartbeat of the last of `workers` has them.
    pub answered: Vec<(Beat, Statement)>,
    /// A server that does not show this heartbeat of the last of `workers` may have lost more than that.
    pub covers_from: Beat,
    /// Which servers they have seen.
    pub seen: Seen,
    /// The last of `workers` lived in the last hours: it is known to every database that is not older than that.
    pub recent: bool,
}

impl Default for Legacy {
    fn default() -> Self {
        Self {
            workers: Vec::new(),
            ends: Vec::new(),
            answered: Vec::new(),
            covers_from: Beat(0),
            seen: Seen::default(),
            recent: false,
        }
    }
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
    seen: Seen,
    /// What the last [`Line::Lives`] says.
    lived_at: u64,
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
        let mut file = private().append(true).open(&path).map_err(failed(&path))?;
        let legacy = read(&file).map_err(failed(&path))?;
        // What is written after a line that was cut short must not be lost with it. A full file system is no reason not to start.
        let torn = !ends_a_line(&file).map_err(failed(&path))? && file.write_all(b"\n").is_err();
        let size = file.metadata().map_err(failed(&path))?.len();
        Ok((
            Self {
                path,
                file,
                size,
                compact_at: COMPACT,
                torn,
                seen: legacy.seen,
                lived_at: 0,
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

    /// The end of this run means nothing any more.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn forgotten(&mut self, token: Token) -> io::Result<()> {
        self.append(&Line::Confirmed(token))
    }

    /// The database has confirmed the end of this run, before this heartbeat.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn answered(&mut self, token: Token, before: Beat) -> io::Result<()> {
        self.append(&Line::Answered(token, before))
    }

    /// What was answered before this heartbeat need not be remembered any more.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn gone(&mut self, beat: Beat) -> io::Result<()> {
        self.append(&Line::Gone(beat))
    }

    /// These servers were seen.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn seen(&mut self, seen: Seen) -> io::Result<()> {
        self.seen = seen;
        self.append(&Line::Saw(seen))
    }

    /// Whether it is time to note again that the worker lives.
    #[must_use]
    pub(crate) fn wants_life(&self) -> bool {
        self.lived_at == 0 || seconds() >= self.lived_at + LIFE.as_secs()
    }

    /// The worker is known to the database.
    ///
    /// # Errors
    /// Of the file.
    pub(crate) fn lives(&mut self) -> io::Result<()> {
        self.lived_at = seconds();
        self.append(&Line::Lives(self.lived_at))
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
        remembered: &Replay<Statement>,
    ) -> io::Result<()> {
        let mut open = open.peekable();
        let head = [
            worker.map(Line::Worker),
            Some(Line::Saw(self.seen)).filter(|_| self.seen != Seen::default()),
            Some(Line::Gone(remembered.covers_from()))
                .filter(|_| remembered.covers_from() > Beat(0)),
            Some(Line::Lives(self.lived_at)).filter(|_| self.lived_at > 0),
        ];
        let head = head.into_iter().flatten();
        if open.peek().is_none() && remembered.is_empty() {
            // Nothing can be lost, and so a full file system can heal.
            self.torn = true;
            self.file.set_len(0)?;
            self.size = 0;
            for line in head {
                self.size += write(&mut self.file, &line)?;
            }
            self.compact_at = COMPACT;
            self.torn = false;
            return Ok(());
        }
        let temporary = self.path.with_extension("new");
        let _ = std::fs::remove_file(&temporary);
        let mut file = io::BufWriter::new(private().append(true).open(&temporary)?);
        let mut size = 0;
        for line in head {
            size += write(&mut file, &line)?;
        }
        for (beat, end) in remembered.all() {
            size += write(&mut file, &Line::Ended(Box::new(end.written())))?;
            size += write(&mut file, &Line::Answered(end.end.token, beat))?;
        }
        // After what was answered: a run can be there and here, and a later line about it takes the place of an open one.
        for end in open {
            size += write(&mut file, &Line::Ended(Box::new(end.written())))?;
        }
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
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

/// Seconds since 1970, to compare with those that another process of this machine noted hours ago.
#[expect(
    clippy::disallowed_methods,
    reason = "no other clock outlives the machine's restart; half a day of error is allowed for"
)]
fn seconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// Whether the last line is whole; an empty file has none that is not.
fn ends_a_line(file: &File) -> io::Result<bool> {
    let length = file.metadata()?.len();
    let mut last = [b'\n'];
    if let Some(at) = length.checked_sub(1) {
        file.read_exact_at(&mut last, at)?;
    }
    Ok(last == [b'\n'])
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options
}

fn write(file: &mut impl io::Write, line: &Line) -> io::Result<u64> {
    let mut text = serde_json::to_vec(line)?;
    // A result is there as its handler wrote it, perhaps on several lines. In JSON a line break stands only between tokens, where a
    // space means the same.
    for byte in text.iter_mut().filter(|byte| **byte == b'\n') {
        *byte = b' ';
    }
    text.push(b'\n');
    file.write_all(&text)?;
    Ok(u64::try_from(text.len()).unwrap_or(u64::MAX))
}

fn read(file: &File) -> io::Result<Legacy> {
    let mut legacy = Legacy::default();
    let (mut open, mut answered) = (Vec::new(), Vec::new());
    for line in BufReader::new(file).split(b'\n') {
        // The last line may be cut short by the death of the process; a run that it spoke of was not reported as ended.
        match serde_json::from_slice(&line?) {
            Ok(Line::Worker(worker)) => {
                // Beats are those of the worker that wrote them.
                if legacy.workers.last() != Some(&worker) {
                    legacy.covers_from = Beat(0);
                    legacy.recent = false;
                }
                legacy.workers.push(worker);
            }
            Ok(Line::Ended(end)) => {
                let end = Statement::from(*end);
                open.retain(|before: &Statement| before.end.token != end.end.token);
                open.push(end);
            }
            Ok(Line::Confirmed(token)) => open.retain(|end| end.end.token != token),
            Ok(Line::Answered(token, before)) => {
                if let Some(at) = open.iter().position(|end| end.end.token == token) {
                    answered.push((before, open.remove(at)));
                }
            }
            Ok(Line::Gone(beat)) => {
                answered.retain(|(before, _)| *before > beat);
                legacy.covers_from = beat;
            }
            Ok(Line::Seen(system, timeline)) => {
                legacy.seen = Seen {
                    system: Some(system),
                    timeline: Some(timeline),
                    ..Seen::default()
                };
            }
            Ok(Line::Saw(seen)) => legacy.seen = seen,
            Ok(Line::Lives(at)) => legacy.recent = seconds() < at.saturating_add(RECENT.as_secs()),
            Err(_) => {}
        }
    }
    legacy.ends = open;
    legacy.answered = answered;
    Ok(legacy)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt as _;

    use tenure_core::replay::Bounds;
    use tenure_core::time::Mono;
    use tenure_protocol::verdict::{Ended, Verdict};
    use uuid::Uuid;

    use super::*;
    use crate::held::tests::held;

    fn seen() -> Seen {
        Seen {
            system: Some(77),
            timeline: Some(2),
            ..Seen::default()
        }
    }

    fn nothing() -> Replay<Statement> {
        Replay::new(Mono::ZERO, Bounds::default(), Beat(0))
    }

    #[test]
    fn what_a_switch_could_lose_is_kept_with_its_heartbeat() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        let worker = WorkerId(Uuid::new_v4());
        let ends = [held().released(), held().released(), held().released()];
        journal
            .compact(Some(worker), [].into_iter(), &nothing())
            .unwrap();
        for (end, before) in ends.iter().zip([3, 4, 4]) {
            journal.ended(end).unwrap();
            journal.answered(end.end.token, Beat(before)).unwrap();
        }
        journal.gone(Beat(3)).unwrap();
        journal.seen(seen()).unwrap();
        drop(journal);
        let told = |legacy: &Legacy| -> Vec<(Beat, Token)> {
            let answered = legacy.answered.iter();
            answered.map(|(beat, end)| (*beat, end.end.token)).collect()
        };
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        let kept = [(Beat(4), ends[1].end.token), (Beat(4), ends[2].end.token)];
        assert_eq!(told(&legacy), kept);
        assert_eq!((legacy.covers_from, legacy.seen), (Beat(3), seen()));
        // The same after it was written anew.
        let mut remembered = Replay::new(Mono::ZERO, Bounds::default(), Beat(3));
        for (_, end) in legacy.answered {
            remembered.answered(Mono::ZERO, Beat(8), end);
        }
        journal
            .compact(Some(worker), [].into_iter(), &remembered)
            .unwrap();
        drop(journal);
        let (_, legacy) = Journal::open(dir.path()).unwrap();
        assert_eq!(told(&legacy), kept.map(|(_, token)| (Beat(9), token)));
        assert_eq!((legacy.covers_from, legacy.seen), (Beat(3), seen()));
    }

    #[test]
    fn whether_its_worker_lived_lately_is_noted_and_not_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        assert!(journal.wants_life() && !legacy.recent);
        let worker = WorkerId(Uuid::new_v4());
        journal
            .compact(Some(worker), [].into_iter(), &nothing())
            .unwrap();
        drop(journal);
        // It was written just now, and its worker may have ended long ago.
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        assert!(!legacy.recent);
        journal.lives().unwrap();
        assert!(!journal.wants_life());
        journal
            .compact(Some(worker), [].into_iter(), &nothing())
            .unwrap();
        drop(journal);
        assert!(Journal::open(dir.path()).unwrap().1.recent);
        let long_ago = seconds() - RECENT.as_secs() - 1;
        let text = format!(
            "{}\n{}\n",
            serde_json::to_string(&Line::Worker(worker)).unwrap(),
            serde_json::to_string(&Line::Lives(long_ago)).unwrap()
        );
        std::fs::write(dir.path().join("journal.ndjson"), text).unwrap();
        assert!(!Journal::open(dir.path()).unwrap().1.recent);
    }

    #[test]
    fn what_is_open_again_stays_open_when_it_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        let end = held().released();
        let mut remembered = nothing();
        remembered.answered(Mono::ZERO, Beat(4), end.clone());
        journal
            .compact(None, [&end].into_iter(), &remembered)
            .unwrap();
        drop(journal);
        let (_, legacy) = Journal::open(dir.path()).unwrap();
        assert_eq!((legacy.ends.len(), legacy.answered.len()), (1, 1));
    }

    #[test]
    fn a_result_of_several_lines_is_one_line_of_the_journal() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        let printed = Ended {
            result: Some("{\n  \"a\": \"b\\n\"\n}".to_owned()),
            ..Ended::new(Verdict::Done)
        };
        let end = held().ended(printed, |_| Duration::ZERO);
        journal.ended(&end).unwrap();
        drop(journal);
        let (_, legacy) = Journal::open(dir.path()).unwrap();
        assert_eq!(legacy.ends.len(), 1);
        let result = legacy.ends[0].end.result.as_ref().unwrap();
        assert_eq!(result.get(), "{   \"a\": \"b\\n\" }");
    }

    #[test]
    fn the_next_daemon_finds_what_was_not_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, done) = (held().released(), held().released());
        let worker = WorkerId(Uuid::new_v4());
        let (mut journal, legacy) = Journal::open(dir.path()).unwrap();
        assert!(legacy.workers.is_empty() && legacy.ends.is_empty());
        journal
            .compact(Some(worker), [].into_iter(), &nothing())
            .unwrap();
        journal.ended(&done).unwrap();
        journal.ended(&kept).unwrap();
        journal.forgotten(done.end.token).unwrap();
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
        journal
            .compact(None, legacy.ends.iter(), &nothing())
            .unwrap();
        journal.ended(&done).unwrap();
        drop(journal);
        assert_eq!(Journal::open(dir.path()).unwrap().1.ends.len(), 2);
    }
}
