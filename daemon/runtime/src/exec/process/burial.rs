//! How a process ends, and what its jobs and its fleet are told of it.
//!
//! Invariant: whatever becomes of the task that looks after a process, its jobs learn of its end and its place is free.

use tenure_core::crew::{Fate, Gone, fate};
use tenure_protocol::lines::{BadLine, TooLong};
use tenure_protocol::verdict::{explained, last_line};

use super::Fleet;
use super::member::{Death, Member, Open, Over};
use crate::events::{self, ProcessEnd};
use crate::exec::exit::How;

/// Why a process ends.
#[derive(Debug)]
pub(super) enum End {
    /// By itself.
    Died,
    /// It broke the protocol, and how.
    Broke(String),
    /// It was told to go and did.
    Left,
    /// It was killed for a limit that it went beyond, and which.
    Exceeded(String),
    /// It had to be killed for a reason outside it.
    Killed(String),
}

impl From<TooLong> for End {
    fn from(error: TooLong) -> Self {
        Self::Broke(format!("{error} (worker.max_result and 64 KiB)"))
    }
}

impl From<BadLine> for End {
    fn from(error: BadLine) -> Self {
        Self::Broke(error.to_string())
    }
}

/// What is known of a process at its end.
pub(super) struct Burial<'a> {
    pub(super) end: &'a End,
    pub(super) how: &'a How,
    pub(super) was_ready: bool,
    /// How many bytes were written to it.
    pub(super) flushed: u64,
    /// The end of its log.
    pub(super) words: Option<&'a str>,
}

/// Should the task that looks after a process fail, its jobs learn of it, and its place is free.
pub(super) struct Unburied<'a> {
    pub(super) fleet: &'a Fleet,
    pub(super) member: &'a Member,
    /// They know.
    pub(super) over: bool,
}

impl Drop for Unburied<'_> {
    fn drop(&mut self) {
        if !self.over {
            let mut talk = self.member.talk();
            talk.closed = true;
            // Whoever waits for an answer learns that none will come.
            talk.open.clear();
            drop(talk);
            self.fleet
                .gone(self.member.id, Gone::Badly, "its process was given up");
        }
    }
}

/// Says to everybody that the process is gone.
pub(super) fn bury(fleet: &Fleet, member: &Member, pid: i32, burial: &Burial<'_>) {
    let Burial {
        end,
        how,
        was_ready,
        flushed,
        words,
    } = *burial;
    let open = {
        let mut talk = member.talk();
        talk.closed = true;
        std::mem::take(&mut talk.open)
    };
    let said = |what: &str| explained(what, words.and_then(last_line));
    let (kind, what) = match end {
        End::Left => (ProcessEnd::Left, String::new()),
        End::Killed(why) => (ProcessEnd::Killed, format!("its process was killed: {why}")),
        End::Broke(what) if was_ready => (
            ProcessEnd::Broke,
            said(&format!("its process broke the protocol: {what}")),
        ),
        End::Exceeded(what) if was_ready => {
            (ProcessEnd::Died, said(&format!("its process was {what}")))
        }
        End::Exceeded(what) => (
            ProcessEnd::NotReady,
            said(&format!(
                "the process was {what} before it said that it is ready"
            )),
        ),
        End::Died if was_ready => (ProcessEnd::Died, said(&format!("its process died, {how}"))),
        End::Broke(what) => (ProcessEnd::NotReady, said(what)),
        End::Died => (
            ProcessEnd::NotReady,
            said(&format!(
                "the process died before it said that it is ready, {how}"
            )),
        ),
    };
    let blamed = matches!(end, End::Died | End::Broke(_) | End::Exceeded(_));
    events::process_gone(&fleet.0.name, pid, open.len(), kind, &what);
    let (exit_code, signal) = how.numbers();
    // Whose line was not written has not begun.
    let came = |open: &Open| open.line_end <= flushed;
    let had = open.values().filter(|open| came(open)).count();
    let shared = fate(blamed, had);
    let others = match shared {
        Fate::Marked => format!("; it had {had} jobs, and each runs alone now"),
        _ => String::new(),
    };
    for (_, open) in open {
        let fate = match came(&open) {
            true => shared,
            false => Fate::Released,
        };
        let Open { answer, log, .. } = open;
        let death = Death {
            why: format!("{what}{others}"),
            exit_code,
            signal,
        };
        // Whoever gave the job up is told nothing.
        let _ = answer.send(Over::Died {
            fate,
            death,
            log: log.finish().text(),
        });
    }
    let gone = if blamed { Gone::Badly } else { Gone::Well };
    fleet.gone(member.id, gone, &what);
}
