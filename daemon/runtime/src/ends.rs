//! The ends of runs: those that the database has not confirmed, and those that a switch could still lose.
//!
//! ```text
//!   ended ──► waiting ──► said ──► done: remembered ──► every other server has it, or a quarter of an hour: gone
//!                ▲          │  └─► history: gone
//!                └──────────┘ busy, refused, no answer
//! ```
//!
//! Invariant: an end leaves the list of open ones only when the database has answered it; what is said is never said twice at
//! once. What is remembered is said again in each new epoch, as far as the database does not show it (`tenure_core::replay`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::ids::{Beat, Token, WorkerId};
use tenure_core::primary::Seen;
use tenure_core::replay::{Bounds, Replay};
use tenure_store::finish::EndKind;
use tokio::sync::{Notify, oneshot};
use tracing::{error, info};

use crate::clock;
use crate::events;
use crate::held::Statement;
use crate::journal::Journal;

/// The most ends of one statement.
const BATCH: usize = 500;
/// A statement takes no more ends once they have so many bytes: the server's limits are far above.
const MOST_BYTES: usize = 8 << 20;

/// What an end may have to wait for, and so which speaker says it: none waits behind what it need not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Nothing.
    Plain,
    /// A transaction of another that took the unique key of a follow-up job, or moves the same watermark.
    FollowUps,
    /// A synchronous standby.
    Replicated,
}

/// All of them.
pub(crate) const QUEUES: [Queue; 3] = [Queue::Plain, Queue::FollowUps, Queue::Replicated];

/// The list. Shared by all tasks.
#[derive(Debug)]
pub(crate) struct Ends {
    state: Mutex<State>,
    /// One for each queue.
    changed: [Notify; QUEUES.len()],
}

#[derive(Debug)]
struct State {
    open: BTreeMap<Token, Statement>,
    /// Who waits for the answer about an end.
    watched: BTreeMap<Token, Vec<oneshot::Sender<bool>>>,
    /// One for each queue.
    waiting: [VecDeque<Token>; QUEUES.len()],
    /// Confirmed, and not yet safe from a switch.
    remembered: Replay<Statement>,
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
            open: BTreeMap::new(),
            watched: BTreeMap::new(),
            waiting: Default::default(),
            remembered: Replay::new(clock::now(), Bounds::default(), Beat(0)),
            journal,
            worker: None,
            failing: false,
        };
        for end in left {
            state.waiting[queue_of(&end) as usize].push_back(end.end.token);
            state.open.insert(end.end.token, end);
        }
        Self {
            state: Mutex::new(state),
            changed: Default::default(),
        }
    }

    /// A run has ended; or another word for the same end, where the database does not take the first.
    pub(crate) fn push(&self, end: Statement) {
        let queue = queue_of(&end);
        let mut state = self.state();
        state.note(|journal| journal.ended(&end));
        state.waiting[queue as usize].push_back(end.end.token);
        state.open.insert(end.end.token, end);
        drop(state);
        self.changed[queue as usize].notify_one();
    }

    /// The same for a run of which nothing was said yet. `false`: its end is being said already, by a handler that was quicker than its
    /// own answer.
    pub(crate) fn push_first(&self, end: Statement) -> bool {
        let known = self.state().open.contains_key(&end.end.token);
        if !known {
            self.push(end);
        }
        !known
    }

    /// The same for an end that somebody waits for: answers `true` when it holds, `false` when the run had lost its lease.
    ///
    /// # Errors
    /// Another end of the same run is being said: of this kind.
    pub(crate) fn push_watched(&self, end: Statement) -> Result<oneshot::Receiver<bool>, EndKind> {
        let (token, kind) = (end.end.token, end.end.kind);
        let (answer, waiting) = oneshot::channel();
        let mut state = self.state();
        let known = state.open.get(&token).map(|known| known.end.kind);
        if let Some(other) = known.filter(|known| *known != kind) {
            return Err(other);
        }
        state.watched.entry(token).or_default().push(answer);
        drop(state);
        if known.is_none() {
            self.push(end);
        }
        Ok(waiting)
    }

    /// Ends of one queue to be said now by one statement, none of them under way.
    #[must_use]
    pub(crate) fn take(&self, queue: Queue) -> Vec<Statement> {
        let mut state = self.state();
        let mut taken = Vec::new();
        let mut size = 0;
        while taken.len() < BATCH
            && size < MOST_BYTES
            && let Some(token) = state.waiting[queue as usize].pop_front()
        {
            if let Some(end) = state.open.get(&token) {
                // One follow-up job may have to wait for a user, and no other end with it.
                let alone = end.end.enqueue.is_some();
                if alone && !taken.is_empty() {
                    state.waiting[queue as usize].push_front(token);
                    break;
                }
                size += end.size();
                taken.push(end.clone());
                if alone {
                    break;
                }
            }
        }
        taken
    }

    /// What was taken was not answered, or answered busy.
    pub(crate) fn give_back(&self, tokens: impl IntoIterator<Item = Token>) {
        let mut state = self.state();
        for token in tokens {
            if let Some(queue) = state.open.get(&token).map(queue_of) {
                state.waiting[queue as usize].push_back(token);
            }
        }
        drop(state);
        self.nudge();
    }

    /// The database has answered: `done` holds, `history` means nothing. The last heartbeat that was sent is `sent`.
    pub(crate) fn confirm(&self, done: &[Token], history: &[Token], sent: Beat) {
        let now = clock::now();
        let mut state = self.state();
        for token in history {
            if state.open.remove(token).is_some() {
                state.note(|journal| journal.forgotten(*token));
            }
        }
        for token in done {
            if let Some(end) = state.open.remove(token) {
                state.note(|journal| journal.answered(*token, sent.next()));
                state.remembered.answered(now, sent, end);
            }
        }
        for (tokens, holds) in [(done, true), (history, false)] {
            for token in tokens {
                for waiting in state.watched.remove(token).unwrap_or_default() {
                    // Whoever waited too long has gone.
                    let _ = waiting.send(holds);
                }
            }
        }
        state.compact();
    }

    /// What its handler did in this database was lost: the end of this run is that it is given back. `false`: it has not ended.
    pub(crate) fn give_back_run(&self, token: Token) -> bool {
        let end = self.state().open.get(&token).map(Statement::given_back);
        end.is_some_and(|end| {
            let mut state = self.state();
            state.note(|journal| journal.ended(&end));
            state.open.insert(token, end);
            true
        })
    }

    /// Every other server has shown this heartbeat: what was answered before it was sent is safe. `None`: there is no other server
    /// that could be asked. The last one that the primary has answered is `shown`.
    pub(crate) fn proven(&self, beat: Option<Beat>, shown: Beat) {
        let mut state = self.state();
        state.note_life();
        let before = state.remembered.covers_from();
        state.remembered.shown(shown);
        state.remembered.proven(beat.unwrap_or(Beat(0)));
        state.remembered.expire(clock::now());
        let gone = state.remembered.covers_from();
        if gone > before {
            state.note(|journal| journal.gone(gone));
            state.compact();
        }
        let uncovered = beat.map_or(Duration::ZERO, |_| state.remembered.uncovered());
        events::remembered(state.remembered.len(), uncovered);
    }

    /// What a server may lack that shows this heartbeat, as statements of `reattach`.
    #[must_use]
    pub(crate) fn after(&self, found: Option<Beat>) -> Vec<String> {
        let state = self.state();
        state
            .remembered
            .after(found)
            .map(Statement::again)
            .collect()
    }

    /// From which heartbeat on all is remembered, and for how long that has been.
    #[must_use]
    pub(crate) fn covers(&self) -> (Beat, Duration) {
        let state = self.state();
        let remembered = &state.remembered;
        (
            remembered.covers_from(),
            remembered.covers_for(clock::now()),
        )
    }

    /// What a database that showed the heartbeat `found` may have lacked was said to it in a new epoch; the last one that was sent is `sent`.
    pub(crate) fn moved(&self, found: Option<Beat>, sent: Beat) {
        let mut state = self.state();
        state.remembered.moved(found, sent);
        state.rewrite();
    }

    /// This process is now that worker, and what its predecessors left has been said to a database that showed the heartbeat `found`: `left`
    /// are ends that they remembered.
    pub(crate) fn registered(
        &self,
        worker: WorkerId,
        left: Vec<Statement>,
        found: Option<Beat>,
        sent: Beat,
    ) {
        let now = clock::now();
        let mut state = self.state();
        state.worker = Some(worker);
        state.remembered.moved(found, sent);
        for end in left {
            state.remembered.answered(now, sent, end);
        }
        state.rewrite();
    }

    /// Which servers were seen, for the next daemon in `state_dir`.
    pub(crate) fn seen(&self, seen: Seen) {
        self.state().note(|journal| journal.seen(seen));
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

    /// Waits until there may be something to say of one queue.
    pub(crate) async fn changed(&self, queue: Queue) {
        self.changed[queue as usize].notified().await;
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
fn queue_of(end: &Statement) -> Queue {
    if end.care().replicated {
        Queue::Replicated
    } else if end.end.enqueue.is_some() || end.end.watermark.is_some() {
        Queue::FollowUps
    } else {
        Queue::Plain
    }
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

    /// For the next daemon in `state_dir`.
    fn note_life(&mut self) {
        if self.worker.is_some() && self.journal.as_ref().is_some_and(Journal::wants_life) {
            self.note(Journal::lives);
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
            remembered,
            journal: Some(journal),
            worker,
            ..
        } = self
        {
            let written = journal.compact(*worker, open.values(), remembered);
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
