//! The lease keeper: when to beat, what the beat says, which job may start, and when handlers must die.
//!
//! ```text
//!               Registered                       Refused(OtherEpoch)
//!   Joining ───────────────────────► Member ◄───────────────────────► Rejoining
//!  no worker                     beats, claims   Registered        handlers go on,
//!      ▲                               │                           nothing is claimed
//!      │ last handler is dead          │ Refused(Dead)                   │
//!      └────────────────────────── Clearing ◄────────────────────────────┘
//!                              handlers are killed           or trust ended
//! ```
//!
//! A job is *waiting* from the answer of its claim, *running* from [`Keeper::try_start`], perhaps *stopping* after a kill,
//! *ended* when its handler is dead and reaped, and gone when the database has confirmed its end.
//!
//! Invariants, at every moment and whatever the order of events:
//! - Trust never reaches beyond the sending of an answered beat or registration, or of a proof that there is no primary,
//!   + `lease_ttl` − margin.
//! - No handler starts without trust, nor while another handler of the same job lives.
//! - From the end of trust every handler has been told to die.
//! - A new identity is asked for only when no handler of the old one lives.
//! - At most one beat is under way; one that is not answered in time is given up, and its answer means nothing then.
//!
//! A claim answered after it was given up, or in an earlier epoch, starts nothing: the next beat says that its call has no
//! jobs, and the database takes them back. There is no clock here: the time of sending is the time at which the command
//! was given, which is never later.
//!
//! ```
//! # use tenure_core::{lease::{command::{Command, Start}, event::Event, keeper::Keeper, limits::Limits}, ids::*, time::Mono};
//! # use std::time::Duration;
//! # let s = Duration::from_secs;
//! # let limits = Limits::new(s(30), s(3), s(10)).unwrap();
//! // The shell: one task owns the keeper; whoever learns of something sends it an event.
//! //
//! //   loop { event = next_event_or(keeper.wake_at()) -> Tick
//! //          for command in keeper.on(clock(), event) { carry_out(command) -> later events }
//! //          guard.trust_until(keeper.trusted_until()) }
//! let mut keeper = Keeper::new(limits);
//! let mut now = Mono::ZERO;
//! let Command::Register { asked_at } = keeper.on(now, Event::Tick)[0] else { panic!() };
//! // register_worker, under limits.answer_within(), with a fresh random id:
//! # let (worker, epoch) = (WorkerId(uuid::Uuid::from_u128(1)), Epoch(uuid::Uuid::from_u128(2)));
//! keeper.on(now, Event::Registered { worker, epoch, asked_at });
//! // The dispatcher has free slots:
//! let call = keeper.claim(now).expect("registered and trusted");
//! # let (job, token) = (JobId(uuid::Uuid::from_u128(3)), Token(uuid::Uuid::from_u128(4)));
//! keeper.on(now, Event::ClaimAnswered { call, jobs: vec![(job, token)] });
//! // Right before each spawn:
//! match keeper.try_start(now, token) {
//!     Start::Go => { /* spawn; when it is dead and reaped: Event::Ended */ }
//!     Start::Release => { /* give it back; when that is confirmed: Event::Confirmed */ }
//!     Start::Gone => { /* nothing to do */ }
//! }
//! keeper.on(now, Event::Ended { token });
//! // complete / fail / release / snooze until it is answered with done or history:
//! keeper.on(now, Event::Confirmed { tokens: vec![token] });
//! // Nothing was heard since: a beat is due.
//! now = keeper.wake_at().expect("a member beats");
//! assert!(matches!(keeper.on(now, Event::Tick)[..], [Command::Beat { settled: Call(1), .. }]));
//! ```

use super::ask::Ask;
use super::calls::Calls;
use super::command::{Command, Start, Why};
use super::event::{Event, Refusal};
use super::limits::Limits;
use crate::ids::{Beat, Call, Epoch, JobId, Token, WorkerId};
use crate::time::Mono;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Stopping(Why),
    Ended,
}

#[derive(Debug)]
struct Held {
    job: JobId,
    call: Call,
    state: State,
}

#[derive(Debug)]
enum Standing {
    /// Since when, and the question: an answer to one from before is of another life.
    Joining(Mono, Ask),
    Member {
        worker: WorkerId,
        epoch: Epoch,
        due: Mono,
        under_way: Option<(Beat, Mono)>,
    },
    /// The same: any answer since then will do.
    Rejoining {
        worker: WorkerId,
        since: Mono,
        ask: Ask,
    },
    Clearing,
}

/// Keeps the leases of one daemon. See the module for its states and the loop around it.
#[derive(Debug)]
pub struct Keeper {
    limits: Limits,
    standing: Standing,
    trusted_until: Option<Mono>,
    last_beat: Beat,
    calls: Calls,
    jobs: BTreeMap<Token, Held>,
    /// The jobs with a handler that is not known to be dead.
    live: BTreeSet<JobId>,
}

impl Keeper {
    /// A keeper that registers at its first event.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            standing: Standing::Joining(Mono::ZERO, Ask::Due(Mono::ZERO)),
            trusted_until: None,
            last_beat: Beat(0),
            calls: Calls::default(),
            jobs: BTreeMap::new(),
            live: BTreeSet::new(),
        }
    }

    /// Until when the leases are trusted: what the guard is told, and what readiness shows. `None` without a registration.
    #[must_use]
    pub fn trusted_until(&self) -> Option<Mono> {
        self.trusted_until
    }

    /// The present registration; `None` while there is none to send statements under.
    #[must_use]
    pub fn member(&self) -> Option<(WorkerId, Epoch)> {
        match self.standing {
            Standing::Member { worker, epoch, .. } => Some((worker, epoch)),
            _ => None,
        }
    }

    /// Who this worker is, also while it re-attaches.
    #[must_use]
    pub fn identity(&self) -> Option<WorkerId> {
        match self.standing {
            Standing::Member { worker, .. } | Standing::Rejoining { worker, .. } => Some(worker),
            Standing::Joining(..) | Standing::Clearing => None,
        }
    }

    /// Whether it still waits for the answer to this re-attach.
    #[must_use]
    pub fn rejoins(&self, as_whom: WorkerId, asked_at: Mono) -> bool {
        matches!(self.standing, Standing::Rejoining { worker, since, .. } if worker == as_whom && since <= asked_at)
    }

    /// The last beat that was sent.
    #[must_use]
    pub fn last_beat(&self) -> Beat {
        self.last_beat
    }

    /// How many claim calls are neither answered nor given up: they may still bring jobs.
    #[must_use]
    pub fn unanswered_claims(&self) -> usize {
        self.calls.unanswered()
    }

    /// Numbers a claim call that is sent now, or says that none may be sent. Every call must end in `ClaimAnswered` or
    /// `ClaimGivenUp`.
    pub fn claim(&mut self, now: Mono) -> Option<Call> {
        (self.member().is_some() && self.trusts(now)).then(|| self.calls.send())
    }

    /// Asked right before each spawn. [`Start::Go`] counts as started: from then on the job is killed when it must be, until
    /// `Ended`.
    pub fn try_start(&mut self, now: Mono, token: Token) -> Start {
        let trusted = self.trusts(now);
        match self.jobs.get_mut(&token) {
            Some(held) if held.state == State::Waiting => {
                if trusted && self.live.insert(held.job) {
                    held.state = State::Running;
                    Start::Go
                } else {
                    held.state = State::Ended;
                    Start::Release
                }
            }
            _ => Start::Gone,
        }
    }

    /// When the keeper wants to be called even if nothing happens.
    #[must_use]
    pub fn wake_at(&self) -> Option<Mono> {
        let own = match &self.standing {
            Standing::Joining(_, ask) | Standing::Rejoining { ask, .. } => {
                Some(ask.next(self.limits.answer_within()))
            }
            Standing::Member {
                under_way: Some((_, sent)),
                ..
            } => Some(*sent + self.limits.answer_within()),
            Standing::Member { due, .. } => Some(*due),
            Standing::Clearing => None,
        };
        let at_risk = self.jobs.values().any(|held| match held.state {
            State::Waiting | State::Running => true,
            State::Stopping(why) => why < Why::TrustEnded,
            State::Ended => false,
        });
        own.into_iter()
            .chain(self.trusted_until.filter(|_| at_risk))
            .min()
    }

    /// Takes in an event and says what to do. Total and deterministic; events that mean nothing any more are ignored.
    pub fn on(&mut self, now: Mono, event: Event) -> Vec<Command> {
        let mut out = Vec::new();
        match event {
            Event::Registered {
                worker,
                epoch,
                asked_at,
            } => self.registered(worker, epoch, asked_at),
            Event::RegisterFailed { asked_at } => {
                if let Standing::Joining(_, ask) | Standing::Rejoining { ask, .. } =
                    &mut self.standing
                    && matches!(ask, Ask::Asked(last) if asked_at <= *last)
                {
                    *ask = Ask::Due(asked_at + self.limits.beat_every());
                }
            }
            Event::BeatAnswered { beat, revoked } => {
                if let Some(sent) = self.beat_is_over(beat) {
                    self.trust_from(sent);
                    out.extend(self.kill(Why::Revoked, |token| revoked.contains(token)));
                    out.extend(self.release_waiting(|token| revoked.contains(token)));
                }
            }
            Event::BeatFailed { beat } => {
                self.beat_is_over(beat);
            }
            Event::BeatNow => self.beat_now(now),
            Event::NoPrimary { asked_at } => {
                // Trust that has ended is not given back: its handlers have been told to die.
                if matches!(
                    self.standing,
                    Standing::Member { .. } | Standing::Rejoining { .. }
                ) && self.trusts(now)
                {
                    self.trust_from(asked_at);
                }
            }
            Event::Refused {
                worker,
                epoch,
                refusal,
            } => out.extend(self.refused(now, worker, epoch, refusal)),
            Event::ClaimAnswered { call, jobs } => {
                if self.calls.answer(call, jobs.len()) {
                    for (job, token) in jobs {
                        // A token comes once; were it to come again, its handler would be forgotten.
                        let state = State::Waiting;
                        self.jobs.entry(token).or_insert(Held { job, call, state });
                    }
                } else if !jobs.is_empty() {
                    self.beat_now(now);
                }
            }
            Event::ClaimGivenUp { call } => self.calls.give_up(call),
            Event::Ended { token } => self.ended(token),
            Event::Confirmed { tokens } => {
                for token in tokens {
                    self.confirmed(token);
                }
            }
            Event::Tick => {}
        }
        self.advance(now, &mut out);
        out
    }

    /// What is due by time alone, or has become due by the event.
    fn advance(&mut self, now: Mono, out: &mut Vec<Command>) {
        if !self.trusts(now) {
            out.extend(self.kill(Why::TrustEnded, |_| true));
            out.extend(self.release_waiting(|_| true));
            // What this worker knew of the others is too old to be said in a new epoch: it becomes another worker.
            if matches!(self.standing, Standing::Rejoining { .. }) {
                self.give_up_identity();
            }
        }
        if matches!(self.standing, Standing::Clearing) && self.live.is_empty() {
            self.standing = Standing::Joining(now, Ask::Due(now));
        }
        let answer_within = self.limits.answer_within();
        match &mut self.standing {
            Standing::Joining(_, ask) => {
                if ask.again(now, answer_within) {
                    out.push(Command::Register { asked_at: now });
                }
            }
            Standing::Rejoining { worker, ask, .. } => {
                if ask.again(now, answer_within) {
                    out.push(Command::Reattach {
                        worker: *worker,
                        asked_at: now,
                    });
                }
            }
            Standing::Member {
                worker,
                epoch,
                due,
                under_way,
            } => {
                let waits = under_way.is_some_and(|(_, sent)| now < sent + answer_within);
                if now >= *due && !waits {
                    self.last_beat = self.last_beat.next();
                    *under_way = Some((self.last_beat, now));
                    *due = now + self.limits.beat_every();
                    out.push(Command::Beat {
                        worker: *worker,
                        epoch: *epoch,
                        beat: self.last_beat,
                        settled: self.calls.settled(),
                        open: self.calls.open(),
                    });
                }
            }
            Standing::Clearing => {}
        }
    }

    fn trusts(&self, now: Mono) -> bool {
        self.trusted_until.is_some_and(|until| now < until)
    }

    fn trust_from(&mut self, sent: Mono) {
        self.trusted_until = self.trusted_until.max(Some(sent + self.limits.trust()));
    }

    fn registered(&mut self, worker: WorkerId, epoch: Epoch, asked_at: Mono) {
        let answers = match &self.standing {
            // An answer that was given up is as good: trust counts from when it was asked for.
            Standing::Joining(since, ask) => {
                matches!(ask, Ask::Asked(last) if (*since..=*last).contains(&asked_at))
            }
            Standing::Rejoining {
                worker: mine,
                since,
                ask,
            } => {
                matches!(ask, Ask::Asked(last) if (*since..=*last).contains(&asked_at))
                    && *mine == worker
            }
            Standing::Member { .. } | Standing::Clearing => false,
        };
        if answers {
            self.trust_from(asked_at);
            let due = asked_at + self.limits.beat_every();
            self.standing = Standing::Member {
                worker,
                epoch,
                due,
                under_way: None,
            };
        }
    }

    fn refused(
        &mut self,
        now: Mono,
        by: WorkerId,
        within: Epoch,
        refusal: Refusal,
    ) -> Option<Command> {
        match (refusal, &self.standing) {
            (
                Refusal::Dead,
                Standing::Member { worker, .. } | Standing::Rejoining { worker, .. },
            ) if *worker == by => {
                self.give_up_identity();
                self.kill(Why::DeclaredDead, |_| true)
            }
            (Refusal::OtherEpoch, Standing::Member { worker, epoch, .. })
                if *worker == by && *epoch == within =>
            {
                // An answer from the old epoch must not start what the re-attach does not name.
                self.calls.give_up_all();
                self.standing = Standing::Rejoining {
                    worker: by,
                    since: now,
                    ask: Ask::Due(now),
                };
                None
            }
            _ => None,
        }
    }

    fn give_up_identity(&mut self) {
        self.standing = Standing::Clearing;
        self.trusted_until = None;
        self.calls.forget();
        self.jobs
            .retain(|_, held| matches!(held.state, State::Running | State::Stopping(_)));
    }

    /// Ends the wait for this beat, and says when it was sent if it was still waited for.
    fn beat_is_over(&mut self, answered: Beat) -> Option<Mono> {
        match &mut self.standing {
            Standing::Member { under_way, .. } => under_way
                .take_if(|(beat, _)| *beat == answered)
                .map(|(_, sent)| sent),
            _ => None,
        }
    }

    /// Makes a beat due, or the next try to register: at once, or as soon as the one under way is over.
    fn beat_now(&mut self, now: Mono) {
        match &mut self.standing {
            Standing::Member { due, .. }
            | Standing::Joining(_, Ask::Due(due))
            | Standing::Rejoining {
                ask: Ask::Due(due), ..
            } => *due = (*due).min(now),
            Standing::Joining(..) | Standing::Rejoining { .. } | Standing::Clearing => {}
        }
    }

    fn ended(&mut self, token: Token) {
        if let Some(held) = self.jobs.get_mut(&token) {
            if matches!(held.state, State::Running | State::Stopping(_)) {
                self.live.remove(&held.job);
            }
            held.state = State::Ended;
        }
        if matches!(self.standing, Standing::Clearing) {
            self.jobs.remove(&token);
        }
    }

    fn confirmed(&mut self, token: Token) {
        if self
            .jobs
            .get(&token)
            .is_some_and(|held| held.state == State::Ended)
            && let Some(held) = self.jobs.remove(&token)
        {
            self.calls.confirm(held.call);
        }
    }

    /// Kills those of the chosen handlers that were not killed as sharply before.
    fn kill(&mut self, why: Why, chosen: impl Fn(&Token) -> bool) -> Option<Command> {
        let killed = |held: &Held| match held.state {
            State::Running => true,
            State::Stopping(before) => before < why,
            State::Waiting | State::Ended => false,
        };
        let tokens = self.change(
            |token, held| chosen(token) && killed(held),
            State::Stopping(why),
        );
        (!tokens.is_empty()).then_some(Command::Kill { tokens, why })
    }

    /// Gives back those of the chosen jobs that have no handler yet.
    fn release_waiting(&mut self, chosen: impl Fn(&Token) -> bool) -> Option<Command> {
        let tokens = self.change(
            |token, held| chosen(token) && held.state == State::Waiting,
            State::Ended,
        );
        (!tokens.is_empty()).then_some(Command::Release { tokens })
    }

    fn change(&mut self, chosen: impl Fn(&Token, &Held) -> bool, state: State) -> Vec<Token> {
        let chosen = self
            .jobs
            .iter_mut()
            .filter(|(token, held)| chosen(token, held));
        chosen
            .map(|(token, held)| {
                held.state = state;
                *token
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
