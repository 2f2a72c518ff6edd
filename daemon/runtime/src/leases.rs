//! The leases of this worker: the pure keeper (`tenure_core::lease`), and what its commands do.
//!
//! All tasks share it, under a lock that is never held across an await. Whatever the keeper commands is carried out here at
//! once, except what needs the database's answer: that goes to the heart as an order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::ids::{Beat, Call, Epoch, Token, WorkerId};
use tenure_core::lease::command::{Command, Start, Why};
use tenure_core::lease::event::{Event, Refusal};
use tenure_core::lease::keeper::Keeper;
use tenure_core::lease::limits::{Limits, TICK};
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tokio::sync::{Notify, mpsc, watch};

use crate::clock;
use crate::ends::Ends;
use crate::events;
use crate::exec::{Stop, StopSignal};
use crate::guard::Guard;
use crate::held::{Held, Statement};
use crate::open::OpenJobs;

pub(crate) use crate::orders::Order;

/// How long a job that was claimed and could not start is left to others.
const NOT_AT_ONCE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Leases {
    state: Mutex<State>,
    limits: Limits,
    ends: Arc<Ends>,
    open: Arc<OpenJobs>,
    guard: Option<Guard>,
    orders: mpsc::Sender<Order>,
    sooner: Notify,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    keeper: Keeper,
    waiting: BTreeMap<Token, Arc<Held>>,
    running: BTreeMap<Token, Running>,
    epoch_no: i64,
    roster: Vec<WorkerId>,
    last_beat: Beat,
    trusted_until: Option<Mono>,
}

#[derive(Debug)]
struct Running {
    held: Arc<Held>,
    stop: watch::Sender<Stop>,
    kill_grace: Duration,
}

impl Leases {
    /// None yet. Orders go to the heart through `orders`.
    #[must_use]
    pub(crate) fn new(
        limits: Limits,
        ends: Arc<Ends>,
        guard: Option<Guard>,
        orders: mpsc::Sender<Order>,
    ) -> Self {
        let state = State {
            keeper: Keeper::new(limits),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            epoch_no: 0,
            roster: Vec::new(),
            last_beat: Beat(0),
            trusted_until: None,
        };
        Self {
            state: Mutex::new(state),
            limits,
            ends,
            open: Arc::default(),
            guard,
            orders,
            sooner: Notify::new(),
            changed: Notify::new(),
        }
    }

    /// The lengths it works with.
    #[must_use]
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes in an event and does what follows.
    pub(crate) fn on(&self, event: Event) {
        self.with(|state| self.take_in(state, event));
    }

    /// A statement of `worker` in `epoch` failed: when the error says that the worker or the epoch is gone, the keeper learns it.
    pub(crate) fn failed(&self, worker: WorkerId, epoch: Epoch, error: &StoreError) {
        let refusal = match error {
            StoreError::OtherEpoch(_) => Refusal::OtherEpoch,
            StoreError::DeadWorker(_) => Refusal::Dead,
            _ => return,
        };
        self.on(Event::Refused {
            worker,
            epoch,
            refusal,
        });
    }

    /// The registration under which statements go out; `None`: wait.
    #[must_use]
    pub(crate) fn member(&self) -> Option<(WorkerId, Epoch)> {
        self.state().keeper.member()
    }

    /// Who this worker is, also while it re-attaches.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<WorkerId> {
        self.state().keeper.identity()
    }

    /// Whether the answer to this re-attach is still waited for.
    #[must_use]
    pub(crate) fn rejoins(&self, worker: WorkerId, asked_at: Mono) -> bool {
        self.state().keeper.rejoins(worker, asked_at)
    }

    /// A number for a claim that is sent now; `None`: none may be sent.
    #[must_use]
    pub(crate) fn claim(&self) -> Option<(Call, WorkerId, Epoch)> {
        let mut state = self.state();
        let (worker, epoch) = state.keeper.member()?;
        Some((state.keeper.claim(clock::now())?, worker, epoch))
    }

    /// The number of the present epoch.
    #[must_use]
    pub(crate) fn epoch_no(&self) -> i64 {
        self.state().epoch_no
    }

    /// A claim was answered. Returns those jobs that may be started now, each with the word that will stop it; the others
    /// are given back. `kill_grace` says for each what it gets between TERM and KILL when a person stops it.
    #[must_use]
    pub(crate) fn claimed(
        &self,
        call: Call,
        jobs: Vec<Arc<Held>>,
        kill_grace: impl Fn(&Held) -> Duration,
    ) -> Vec<(Arc<Held>, StopSignal)> {
        let mut started = Vec::with_capacity(jobs.len());
        self.with(|state| {
            let pairs = jobs
                .iter()
                .map(|held| (held.job.id, held.token()))
                .collect();
            state
                .waiting
                .extend(jobs.iter().map(|held| (held.token(), Arc::clone(held))));
            self.take_in(state, Event::ClaimAnswered { call, jobs: pairs });
            for held in jobs {
                // What is no longer waiting was given back by the keeper's order just now.
                let Some(held) = state.waiting.remove(&held.token()) else {
                    continue;
                };
                match state.keeper.try_start(clock::now(), held.token()) {
                    Start::Go => {
                        let (stop, signal) = watch::channel(Stop::No);
                        let running = Running {
                            held: Arc::clone(&held),
                            stop,
                            kill_grace: kill_grace(&held),
                        };
                        state.running.insert(held.token(), running);
                        started.push((held, signal));
                    }
                    // Perhaps an old handler of the same job is still dying here: not at once again.
                    Start::Release => self.ends.push(held.released_for(NOT_AT_ONCE)),
                    // The answer came after its call was given up: the database takes these jobs back by itself.
                    Start::Gone => {}
                }
            }
        });
        started
    }

    /// The handler of a job is dead and reaped.
    pub(crate) fn ended(&self, statement: Statement) {
        let token = statement.end.token;
        self.ends.push_first(statement);
        self.with(|state| {
            state.running.remove(&token);
            self.take_in(state, Event::Ended { token });
        });
    }

    /// The jobs that handlers have accepted and finish later.
    #[must_use]
    pub(crate) fn open(&self) -> &Arc<OpenJobs> {
        &self.open
    }

    /// The lease of this run has a time of its own, as was answered to this worker in this epoch: it is open, and no run of this worker
    /// any more. `false`: it is another epoch by now, which may have lost that time; it has to be given again.
    #[must_use]
    pub(crate) fn opened(
        &self,
        by: (WorkerId, Epoch),
        held: &Arc<Held>,
        section: &Arc<str>,
        left: Duration,
    ) -> bool {
        let mut counts = false;
        self.with(|state| {
            counts = state.keeper.member() == Some(by);
            if counts {
                self.open.add(held, section, left);
                self.forget(state, held.token());
            }
        });
        counts
    }

    /// This run is not for this worker to end.
    pub(crate) fn let_go(&self, token: Token) {
        self.with(|state| self.forget(state, token));
    }

    fn forget(&self, state: &mut State, token: Token) {
        state.running.remove(&token);
        self.take_in(state, Event::Ended { token });
        let tokens = vec![token];
        self.take_in(state, Event::Confirmed { tokens });
    }

    /// The database has answered about these ends, which `worker` said in `epoch`: they hold, or they are history. `false`: it is
    /// in another epoch by now, and the server that answered may be one that has lost them; they have to be said again.
    #[must_use]
    pub(crate) fn confirmed(
        &self,
        by: (WorkerId, Epoch),
        done: &[Token],
        history: &[Token],
    ) -> bool {
        let mut counts = false;
        self.with(|state| {
            counts = state.keeper.member() == Some(by);
            if counts {
                self.ends.confirm(done, history, state.keeper.last_beat());
                let tokens = [done, history].concat();
                self.open.remove(&tokens);
                self.take_in(state, Event::Confirmed { tokens });
            }
        });
        counts
    }

    /// The last beat that was sent, and the last that was answered.
    #[must_use]
    pub(crate) fn beats(&self) -> (Beat, Beat) {
        let state = self.state();
        (state.keeper.last_beat(), state.last_beat)
    }

    /// A heartbeat was answered.
    pub(crate) fn beat_answered(
        &self,
        beat: Beat,
        roster: Vec<WorkerId>,
        revoked: &[(Token, String)],
    ) {
        self.with(|state| {
            // An answer that comes late tells what was known then.
            if beat > state.last_beat {
                state.roster = roster;
                state.last_beat = beat;
            }
            for (token, reason) in revoked {
                state.stop(*token, None, reason);
                self.give_back_open(*token);
            }
            let revoked = revoked.iter().map(|(token, _)| *token).collect();
            self.take_in(state, Event::BeatAnswered { beat, revoked });
        });
    }

    /// The worker is registered, or re-attached, in epoch number `epoch_no`. The handlers of `lost` must stop, and those of `rerun`
    /// too: what they did in the database was lost.
    pub(crate) fn registered(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        epoch_no: i64,
        asked_at: Mono,
        lost: &[Token],
        rerun: &[Token],
    ) {
        self.with(|state| {
            state.epoch_no = epoch_no;
            for token in lost {
                let reason = "the lease was lost in a switch";
                state.stop(*token, Some(self.limits.lost_grace()), reason);
            }
            self.open.remove(lost);
            for token in rerun {
                self.give_back_open(*token);
                if !self.ends.give_back_run(*token) {
                    let reason = "a switch of the database lost its effects; it runs again";
                    state.stop(*token, Some(self.limits.lost_grace()), reason);
                }
            }
            self.take_in(
                state,
                Event::Registered {
                    worker,
                    epoch,
                    asked_at,
                },
            );
        });
    }

    /// What a re-attach says: the running jobs, the last beat that was answered, the workers that were known.
    #[must_use]
    pub(crate) fn holds(&self) -> (Vec<Arc<Held>>, Beat, Vec<WorkerId>) {
        let state = self.state();
        let running = state.running.values();
        (
            running.map(|running| Arc::clone(&running.held)).collect(),
            state.last_beat,
            state.roster.clone(),
        )
    }

    /// Ends all handlers, with at most this grace.
    pub(crate) fn stop_all(&self, grace: Duration, reason: &str) {
        let state = self.state();
        for token in state.running.keys().copied().collect::<Vec<_>>() {
            state.stop(token, Some(grace), reason);
        }
    }

    /// How many handlers live.
    #[must_use]
    pub(crate) fn running(&self) -> usize {
        self.state().running.len()
    }

    /// How many claims are not answered.
    #[must_use]
    pub(crate) fn unanswered_claims(&self) -> usize {
        self.state().keeper.unanswered_claims()
    }

    /// When the keeper wants to be called even if nothing happens.
    #[must_use]
    pub(crate) fn wake_at(&self) -> Option<Mono> {
        self.state().keeper.wake_at()
    }

    /// Waits until [`Leases::wake_at`] may have moved.
    pub(crate) async fn sooner(&self) {
        self.sooner.notified().await;
    }

    /// Waits until the number of running handlers or of open ends may have changed. For one waiter.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// A job that is open: nobody here runs it, so it is given back at once. What a person asked for is carried out by that.
    fn give_back_open(&self, token: Token) {
        if let Some(end) = self.open.given_back(token) {
            self.ends.push_first(end);
        }
    }

    fn with(&self, act: impl FnOnce(&mut State)) {
        let mut state = self.state();
        let before = state.keeper.wake_at();
        act(&mut state);
        let after = state.keeper.wake_at();
        drop(state);
        if after.is_some() && (before.is_none() || after < before) {
            self.sooner.notify_one();
        }
        self.changed.notify_one();
    }

    fn take_in(&self, state: &mut State, event: Event) {
        let commands = state.keeper.on(clock::now(), event);
        for command in commands {
            self.carry_out(state, command);
        }
        let until = state.keeper.trusted_until();
        if until != state.trusted_until {
            state.trusted_until = until;
            if let Some(guard) = &self.guard {
                // The keeper itself ends the handlers at that moment; the guard does when the keeper could not.
                guard.trust_until(until.map_or(0, |until| (until + TICK / 2).millis()));
            }
        }
    }

    fn carry_out(&self, state: &mut State, command: Command) {
        let order = match command {
            Command::Register { asked_at } => Order::Register { asked_at },
            Command::Reattach { worker, asked_at } => Order::Reattach { worker, asked_at },
            Command::Beat {
                worker,
                epoch,
                beat,
                settled,
                open,
            } => Order::Beat {
                worker,
                epoch,
                beat,
                settled,
                open,
            },
            Command::Release { tokens } => {
                for token in tokens {
                    if let Some(held) = state.waiting.remove(&token) {
                        self.ends.push(held.released());
                    }
                }
                return;
            }
            Command::Kill { tokens, why } => {
                let (grace, reason) = match why {
                    Why::Revoked => (None, "revoked"),
                    Why::TrustEnded => (
                        Some(self.limits.lost_grace()),
                        "no heartbeat was confirmed, so the lease is no longer trusted",
                    ),
                    Why::DeclaredDead => (Some(Duration::ZERO), "this worker was declared lost"),
                };
                if why != Why::Revoked {
                    events::leases_lost(tokens.len(), reason);
                }
                for token in tokens {
                    state.stop(token, grace, reason);
                }
                return;
            }
        };
        // Full only when the heart hangs; the keeper repeats what is not answered.
        let _ = self.orders.try_send(order);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Stops one handler: with its own grace, or with this one. A later word only shortens the grace.
    fn stop(&self, token: Token, grace: Option<Duration>, reason: &str) {
        let Some(running) = self.running.get(&token) else {
            return;
        };
        let grace = grace.unwrap_or(running.kill_grace).min(running.kill_grace);
        running.stop.send_if_modified(|stop| match stop {
            Stop::Kill { grace: before, .. } if *before <= grace => false,
            _ => {
                *stop = Stop::Kill {
                    grace,
                    reason: reason.to_owned(),
                };
                true
            }
        });
    }
}
