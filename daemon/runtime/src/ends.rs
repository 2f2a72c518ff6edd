//! The ends of runs that the database has not confirmed.
//!
//! ```text
//!   ended ──► waiting ──► said ──► confirmed (done or history): gone
//!                ▲          │
//!                └──────────┘ busy, refused, no answer
//! ```
//!
//! Invariant: an end leaves this list only when the database has answered it; what is said is never said twice at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_core::ids::{Token, WorkerId};
use tokio::sync::Notify;
use tracing::{error, info};

use crate::held::Statement;
use crate::journal::Journal;

/// A statement takes no more ends once they have so many bytes: the server's limits are far above.
const MOST_BYTES: usize = 8 << 20;

/// The list. Shared by all tasks.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    state: Mutex<State>,
    /// One for each queue of [`State::waiting`].
    changed: [Notify; 2],
}

#[derive(Debug, Default)]
struct State {
    open: BTreeMap<Token, Statement>,
    /// Without follow-up jobs, and with.
    waiting: [VecDeque<Token>; 2],
    journal: Option<Journal>,
    worker: Option<WorkerId>,
    /// The journal could not be written the last time.
    failing: bool,
}

impl Ends {
    /// With a journal that keeps them over the death of this process, and what it held.
    #[must_use]
    pub(crate) fn new(journal: Option<Journal>, left: Vec<Statement>) -> Self {
        let mut state = State {
            journal,
            ..State::default()
        };
        for end in left {
            state.waiting[queue_of(&end)].push_back(end.end.token);
            state.open.insert(end.end.token, end);
        }
        Self {
            state: Mutex::new(state),
            changed: [Notify::new(), Notify::new()],
        }
    }

    /// A run has ended; or another word for the same end, where the database does not take the first.
    pub(crate) fn push(&self, end: Statement) {
        let queue = queue_of(&end);
        let mut state = self.state();
        state.note(|journal| journal.ended(&end));
        state.waiting[queue].push_back(end.end.token);
        state.open.insert(end.end.token, end);
        drop(state);
        self.changed[queue].notify_one();
    }

    /// Up to `most` ends to be said now, none of them under way: those with follow-up jobs, or the others.
    #[must_use]
    pub(crate) fn take(&self, follow_ups: bool, most: usize) -> Vec<Statement> {
        let mut state = self.state();
        let mut taken = Vec::new();
        let mut size = 0;
        while taken.len() < most
            && size < MOST_BYTES
            && let Some(token) = state.waiting[usize::from(follow_ups)].pop_front()
        {
            if let Some(end) = state.open.get(&token) {
                size += end.size();
                taken.push(end.clone());
            }
        }
        taken
    }

    /// What was taken was not answered, or answered busy.
    pub(crate) fn give_back(&self, tokens: impl IntoIterator<Item = Token>) {
        let mut state = self.state();
        for token in tokens {
            if let Some(queue) = state.open.get(&token).map(queue_of) {
                state.waiting[queue].push_back(token);
            }
        }
        drop(state);
        self.nudge();
    }

    /// The database has answered.
    pub(crate) fn confirm(&self, tokens: &[Token]) {
        let mut state = self.state();
        for token in tokens {
            if state.open.remove(token).is_some() {
                state.note(|journal| journal.confirmed(*token));
            }
        }
        state.compact();
    }

    /// This process is now that worker, and what its predecessors left has been said.
    pub(crate) fn registered(&self, worker: WorkerId) {
        let mut state = self.state();
        state.worker = Some(worker);
        state.rewrite();
    }

    /// All that is not confirmed.
    #[must_use]
    pub(crate) fn all(&self) -> Vec<Statement> {
        self.state().open.values().cloned().collect()
    }

    /// How many are not confirmed.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.state().open.len()
    }

    /// Whether all is confirmed.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the ends live on in a journal when this process dies.
    #[must_use]
    pub(crate) fn are_kept(&self) -> bool {
        self.state().journal.as_ref().is_some_and(Journal::is_whole)
    }

    /// Waits until there may be something to say of one kind.
    pub(crate) async fn changed(&self, follow_ups: bool) {
        self.changed[usize::from(follow_ups)].notified().await;
    }

    /// Lets who waits in [`Ends::changed`] look again.
    pub(crate) fn nudge(&self) {
        self.changed.iter().for_each(Notify::notify_one);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which queue an end waits in.
fn queue_of(end: &Statement) -> usize {
    usize::from(end.end.enqueue.is_some())
}

impl State {
    fn note(&mut self, write: impl FnOnce(&mut Journal) -> std::io::Result<()>) {
        // After a line that could not be written all is written anew, as soon as it can.
        if self
            .journal
            .as_ref()
            .is_some_and(|journal| !journal.is_whole())
        {
            self.rewrite();
        }
        if let Some(journal) = &mut self.journal {
            let written = write(journal);
            self.tell(written);
        }
    }

    fn compact(&mut self) {
        if self.journal.as_ref().is_some_and(Journal::wants_compaction) {
            self.rewrite();
        }
    }

    fn rewrite(&mut self) {
        if let Self {
            open,
            journal: Some(journal),
            worker,
            ..
        } = self
        {
            let written = journal.compact(*worker, open.values());
            self.tell(written);
        }
    }

    /// Says when the journal cannot be written, and when it can again; not each time.
    fn tell(&mut self, written: std::io::Result<()>) {
        let whole = self.journal.as_ref().is_some_and(Journal::is_whole);
        match written {
            Err(error) if !self.failing => {
                error!(%error, "state_dir cannot be written: until it can, what ends does not survive this process.");
                self.failing = true;
            }
            Ok(()) if self.failing && whole => {
                info!("state_dir is written again.");
                self.failing = false;
            }
            _ => {}
        }
    }
}
