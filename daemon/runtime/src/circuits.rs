//! Which handlers get jobs: each has a circuit breaker (`tenure_core::breaker`), and a bound on the jobs that it has accepted and
//! not finished.
//!
//! Shared by the dispatcher, which asks before it claims and before it starts, and the attempts, which say how it went. A handler
//! is the section of the configuration that says what runs, whichever its job types.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_core::breaker::{Admits, Breaker, Change, Seen, Start};
use tenure_core::time::Mono;
use tenure_protocol::verdict::{Ended, Verdict};

use crate::clock;
use crate::events;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Circuits(Mutex<BTreeMap<Arc<str>, Breaker>>);

impl Circuits {
    /// There is this handler, to which a connection is made, or fails, in less than `connects_within`.
    pub(crate) fn add(&self, handler: &Arc<str>, connects_within: Duration) {
        let mut all = self.all();
        if !all.contains_key(handler) {
            all.insert(Arc::clone(handler), Breaker::new(connects_within));
            events::circuit_open(handler, false);
        }
    }

    /// What may be asked for.
    pub(crate) fn admits(&self, handler: &str) -> Admits {
        let all = self.all();
        match all.get(handler) {
            Some(breaker) if breaker.is_open() => breaker.admits(clock::now()),
            _ => Admits::All,
        }
    }

    /// Whether a job may start.
    pub(crate) fn start(&self, handler: &str) -> Start {
        let mut all = self.all();
        all.get_mut(handler)
            .map_or(Start::Go, |breaker| breaker.start(clock::now()))
    }

    /// An attempt has ended. Says whether the circuit is open now, and whether it has just closed.
    pub(crate) fn ended(&self, handler: &Arc<str>, probe: bool, ended: &Ended) -> (bool, bool) {
        let mut all = self.all();
        let Some(breaker) = all.get_mut(handler) else {
            return (false, false);
        };
        let change = breaker.ended(clock::now(), probe, seen(ended));
        tell(handler, change, ended.error.as_deref());
        (breaker.is_open(), change == Some(Change::Closed))
    }

    /// Time has passed. Says whether a circuit has closed, or a probe may be asked for.
    pub(crate) fn tick(&self) -> bool {
        let now = clock::now();
        let mut all = self.all();
        let mut more = false;
        for (handler, breaker) in all.iter_mut() {
            let change = breaker.tick(now);
            tell(handler, change, None);
            more |= change.is_some() || breaker.wake_at().is_some_and(|at| at <= now);
        }
        more
    }

    /// When [`Circuits::tick`] is to be called, if that lies ahead.
    pub(crate) fn wake_at(&self) -> Option<Mono> {
        let now = clock::now();
        let all = self.all();
        let times = all.values().filter_map(Breaker::wake_at);
        times.filter(|at| *at > now).min()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Breaker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the end of an attempt says of its handler.
fn seen(ended: &Ended) -> Seen {
    match ended.verdict {
        Verdict::Stopped => Seen::Nothing,
        Verdict::Retry { long: true, .. } => Seen::Failure,
        _ if !ended.reached => Seen::Failure,
        _ => Seen::Answer,
    }
}

fn tell(handler: &str, change: Option<Change>, error: Option<&str>) {
    match change {
        Some(Change::Opened) => events::circuit_opened(handler, error.unwrap_or_default()),
        Some(Change::Closed) => events::circuit_closed(handler),
        None => {}
    }
}
