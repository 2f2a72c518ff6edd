//! Open jobs: a handler has accepted them (202) and says later how they ended, to any daemon.
//!
//! ```text
//!   202 ──► its lease gets a time of its own ──► open: no slot, no heartbeat ──► ended by whoever has the token: gone
//!              │ the lease is gone already                │ its time is over, or a person took it: gone
//!              └─► let go                                 └ a person asked for its end: given back
//! ```
//!
//! Invariants: a job leaves the runs of this worker only when its lease has a time of its own, or is gone; so no heartbeat takes it
//! for the answer of a claim that nobody read. What an open job needs after a switch is kept as long as it is open: a lease that the
//! switch has lost is made anew from it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::ids::{Epoch, Token, WorkerId};
use tenure_core::replay::Record as _;
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tenure_store::open::{Hold, Standing};
use tenure_store::session::{Db, Session};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::attempt::Bench;
use crate::clock;
use crate::dispatch::not_a_member;
use crate::events;
use crate::exec::{Stop, StopSignal};
use crate::held::{Held, Statement};
use crate::lanes::Route;
use crate::leases::Leases;
use crate::settings::Accepts;

/// Between two questions about all that is open.
const EVERY: Duration = Duration::from_secs(5);
/// The most leases of one question.
const BATCH: usize = 1000;
/// Between tries while the database does not answer: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// What all open jobs may have together that are kept with their data, in bytes. Those beyond it cannot be put back should a switch lose
/// even their enqueue.
const MOST_BYTES: usize = 64 << 20;

/// The list.
#[derive(Debug, Default)]
pub(crate) struct OpenJobs {
    state: Mutex<State>,
    /// There is room again where there was none.
    room: Notify,
}

#[derive(Debug, Default)]
struct State {
    jobs: BTreeMap<Token, OpenJob>,
    /// How many each handler has: those that are open, and those that it is being asked about.
    counts: BTreeMap<Arc<str>, usize>,
    bytes: usize,
    /// Somebody was told that a handler has no room.
    full: bool,
}

impl State {
    fn leaves(&mut self, section: &str) {
        if let Some(count) = self.counts.get_mut(section) {
            *count = count.saturating_sub(1);
        }
    }
}

#[derive(Debug)]
struct OpenJob {
    /// It is given back, for when a person asks for its end; and what a re-attach needs.
    given_back: Statement,
    section: Arc<str>,
    until: Mono,
    bytes: usize,
}

impl OpenJobs {
    /// This handler is asked about a job, which it may accept.
    pub(crate) fn asks(&self, section: &Arc<str>) {
        *self.state().counts.entry(Arc::clone(section)).or_default() += 1;
    }

    /// It has not accepted it.
    pub(crate) fn not_accepted(&self, section: &str) {
        let mut state = self.state();
        state.leaves(section);
        self.tell_of_room(&mut state);
    }

    /// How many more jobs this handler may have open.
    pub(crate) fn room(&self, section: &str, most: usize) -> usize {
        let mut state = self.state();
        let open = state.counts.get(section).copied().unwrap_or_default();
        state.full |= open >= most;
        most.saturating_sub(open)
    }

    /// Waits until there may be room where there was none. For one waiter.
    pub(crate) async fn has_room(&self) {
        self.room.notified().await;
    }

    /// A job that was asked about, and whose lease stands on its own now for so long.
    pub(crate) fn add(&self, held: &Arc<Held>, section: &Arc<str>, left: Duration) {
        let mut given_back = held.released();
        let mut state = self.state();
        let mut bytes = given_back.kept_size();
        if state.bytes + bytes > MOST_BYTES {
            given_back.reduce();
            bytes = 0;
        }
        let job = OpenJob {
            given_back,
            section: Arc::clone(section),
            until: clock::now() + left,
            bytes,
        };
        if state.jobs.insert(held.token(), job).is_none() {
            state.bytes += bytes;
        }
        events::open_jobs(state.jobs.len());
    }

    /// These are open no longer.
    pub(crate) fn remove(&self, tokens: &[Token]) {
        let mut state = self.state();
        let mut removed = false;
        for token in tokens {
            if let Some(job) = state.jobs.remove(token) {
                removed = true;
                state.bytes -= job.bytes;
                state.leaves(&job.section);
            }
        }
        if removed {
            events::open_jobs(state.jobs.len());
            self.tell_of_room(&mut state);
        }
    }

    fn tell_of_room(&self, state: &mut State) {
        if std::mem::take(&mut state.full) {
            self.room.notify_one();
        }
    }

    /// The end of this one as a person wants it, if it is open.
    pub(crate) fn given_back(&self, token: Token) -> Option<Statement> {
        let state = self.state();
        state.jobs.get(&token).map(|job| job.given_back.clone())
    }

    /// What a re-attach says of all of them, and their leases.
    pub(crate) fn holds(&self) -> (Vec<String>, Vec<Token>) {
        let now = clock::now();
        let state = self.state();
        let said = state.jobs.values();
        (
            said.map(|job| job.given_back.hold_for(job.until - now))
                .collect(),
            state.jobs.keys().copied().collect(),
        )
    }

    /// Those behind `last`, at most so many, as they are said to `hold`. A length says again what a switch may have lost.
    fn some(&self, last: Option<Token>, with_length: bool) -> Vec<Hold> {
        use std::ops::Bound::{Excluded, Unbounded};
        let now = clock::now();
        let state = self.state();
        let from = last.map_or(Unbounded, Excluded);
        let some = state.jobs.range((from, Unbounded)).take(BATCH);
        let hold = |(token, job): (&Token, &OpenJob)| Hold {
            job: job.given_back.end.job,
            token: *token,
            // Time that is over is not given again, but it counts from now on if the switch lost its beginning.
            length: with_length.then(|| (job.until - now).max(Duration::from_millis(1))),
        };
        some.map(hold).collect()
    }

    /// Takes in how they stand.
    fn stand(&self, answers: &[Standing]) {
        let now = clock::now();
        let gone: Vec<Token> = {
            let mut state = self.state();
            for answer in answers {
                if let (Some(job), Some(left)) = (state.jobs.get_mut(&answer.token), answer.left) {
                    job.until = now + left;
                }
            }
            let gone = answers.iter().filter(|answer| !answer.stands);
            gone.map(|answer| answer.token).collect()
        };
        self.remove(&gone);
    }

    /// Asks about all of them; `with_length`: and says how long they are to stand, in case a switch has lost that.
    pub(crate) async fn say(
        &self,
        session: &Session,
        worker: WorkerId,
        epoch: Epoch,
        with_length: bool,
    ) -> Result<(), StoreError> {
        let mut last = None;
        loop {
            let some = self.some(last, with_length);
            let Some(hold) = some.last() else {
                return Ok(());
            };
            last = Some(hold.token);
            self.stand(&session.hold(worker, epoch, &some, true).await?);
        }
    }

    fn is_empty(&self) -> bool {
        self.state().jobs.is_empty()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handler has accepted the job: its lease gets a time of its own, and then it is nobody's here. Until then it is a run as any other,
/// but that its end is not for this daemon to say: nothing is given back, whoever tells it to stop.
pub(crate) async fn accept(
    bench: &Bench,
    held: &Arc<Held>,
    route: &Route,
    accepts: Accepts,
    mut stop: StopSignal,
) {
    let mut pause = PAUSE.0;
    loop {
        let stopped = *stop.borrow_and_update() != Stop::No;
        match hold_once(bench, held, accepts.hold).await {
            Ok(Some((by, left))) => {
                if bench.leases.opened(by, held, &route.section, left) {
                    events::accepted(&route.job_type);
                    return;
                }
            }
            // It has ended by a word that came before its 202 did, or its lease was taken.
            Ok(None) => break,
            // What the database was told of it, or the end of this worker, decides.
            Err(_) if stopped => break,
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = stop.changed() => {}
        }
        pause = (pause * 2).min(PAUSE.1);
    }
    bench.leases.let_go(held.token());
    bench.leases.open().not_accepted(&route.section);
}

/// How long its lease stands now, and to whom that was answered; `None`: it is gone.
async fn hold_once(
    bench: &Bench,
    held: &Arc<Held>,
    length: Duration,
) -> Result<Option<((WorkerId, Epoch), Duration)>, StoreError> {
    let (worker, epoch) = bench.leases.member().ok_or_else(not_a_member)?;
    let hold = Hold {
        job: held.job.id,
        token: held.token(),
        length: Some(length),
    };
    let said = async {
        let session = bench.db.session().await?;
        session.hold(worker, epoch, &[hold], true).await
    };
    match said.await {
        Ok(answers) => Ok(answers
            .first()
            .filter(|answer| answer.stands)
            .map(|answer| ((worker, epoch), answer.left.unwrap_or(length)))),
        Err(error) => {
            bench.leases.failed(worker, epoch, &error);
            Err(error)
        }
    }
}

/// Asks now and then which of them still stand, until `stop` is cancelled: others end them too.
pub(crate) async fn watch(db: Db, leases: Arc<Leases>, stop: CancellationToken) {
    let open = Arc::clone(leases.open());
    while stop
        .run_until_cancelled(tokio::time::sleep(EVERY))
        .await
        .is_some()
    {
        let Some((worker, epoch)) = leases.member().filter(|_| !open.is_empty()) else {
            continue;
        };
        let asked = async {
            let session = db.session().await?;
            open.say(&session, worker, epoch, false).await
        };
        if let Err(error) = asked.await {
            // Asked again; whether the database is away is for others to say.
            leases.failed(worker, epoch, &error);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::held::tests::held;

    const HOUR: Duration = Duration::from_secs(3600);

    fn section() -> Arc<str> {
        "later-*".into()
    }

    #[test]
    fn a_handler_has_room_for_what_it_has_not_accepted_and_is_not_asked_about() {
        let open = OpenJobs::default();
        let (one, other) = (held(), held());
        assert_eq!(open.room("later-*", 2), 2);
        open.asks(&section());
        open.asks(&section());
        assert_eq!(open.room("later-*", 2), 0);
        open.add(&one, &section(), HOUR);
        open.not_accepted("later-*");
        assert_eq!(open.room("later-*", 2), 1);
        assert_eq!(open.room("another", 2), 2);
        open.remove(&[one.token(), one.token(), other.token()]);
        assert_eq!(open.room("later-*", 2), 2);
    }

    #[tokio::test]
    async fn who_found_no_room_is_told_of_it() {
        let open = OpenJobs::default();
        let held = held();
        open.asks(&section());
        open.add(&held, &section(), HOUR);
        assert_eq!(open.room("later-*", 1), 0);
        open.remove(&[held.token()]);
        open.has_room().await;
    }

    #[test]
    fn what_is_kept_is_bounded_and_its_lease_is_made_anew_all_the_same() {
        let open = OpenJobs::default();
        let large = |bytes: usize| {
            let mut held = Arc::try_unwrap(held()).unwrap();
            held.job.data = format!("\"{}\"", "x".repeat(bytes));
            Arc::new(held)
        };
        let jobs = [large(MOST_BYTES / 2), large(MOST_BYTES / 2), large(10)];
        for job in &jobs {
            open.add(job, &section(), HOUR);
        }
        let (said, tokens) = open.holds();
        assert_eq!(tokens.len(), 3);
        let mut whole = 0;
        for (said, token) in said.iter().zip(&tokens) {
            assert!(said.contains(&token.0.to_string()) && said.contains(r#""until_ms":3"#));
            whole += usize::from(said.contains(r#""row":"#));
        }
        assert_eq!(whole, 2, "the second large one is kept without its data");
        open.remove(&tokens);
        open.add(&jobs[1], &section(), HOUR);
        assert!(
            open.holds().0[0].contains(r#""row":"#),
            "there is room again"
        );
    }

    #[test]
    fn what_is_gone_in_the_database_is_gone_here() {
        let open = OpenJobs::default();
        let (one, other) = (held(), held());
        for held in [&one, &other] {
            open.add(held, &section(), HOUR);
        }
        let answer = |held: &Held, stands| Standing {
            token: held.token(),
            stands,
            left: stands.then_some(HOUR * 2),
            stop: None,
        };
        open.stand(&[answer(&one, true), answer(&other, false)]);
        let left = open.some(None, true);
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].token, one.token());
        assert!(left[0].length.unwrap() > HOUR);
        assert_eq!(open.some(Some(one.token()), true), []);
    }
}
