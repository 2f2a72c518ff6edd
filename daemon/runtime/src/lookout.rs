//! The look-out: finds the primary, and tells who has to know.
//!
//! It runs on the heart's thread. All hosts are probed at each beat, and several times a second while there is no primary; what
//! follows from a round is said by the pure [`Primaries`]. It turns the route of the pool, makes the keeper beat or re-attach at
//! once, and confirms the leases while it is proven that no server is a primary.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::ids::{Beat, Epoch, WorkerId};
use tenure_core::lease::event::Event;
use tenure_core::primary::{Finding, Known, Primaries, Seen, Sight};
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tenure_store::probe::{Prober, Shown};
use tenure_store::route::Route;
use tenure_store::session::Target;
use tokio::sync::Notify;

use crate::clock;
use crate::ends::Ends;
use crate::events;
use crate::leases::Leases;
use crate::status::Status;
use crate::tasks::random;

/// Between rounds while there is no primary: in the first minute, and then.
const OFTEN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(500));
const A_MINUTE: Duration = Duration::from_secs(60);
/// So many rounds in a row without a primary are an outage: before the first was found, and then. Until then it may only be slow.
const MISSES: (u32, u32) = (10, 2);

/// Where the connections lead.
#[derive(Debug, Clone)]
pub(crate) struct Routes {
    /// Those of the heart, to the hosts that are probed.
    pub direct: Route,
    /// Those of the pool. The same, unless a pooler with an address of its own stands before the servers.
    pub pool: Route,
    /// The address of that pooler.
    pub pooler: Option<Target>,
}

/// See the module.
pub(crate) struct Lookout {
    /// The hosts.
    pub target: Target,
    /// What is turned.
    pub routes: Routes,
    /// Learns of proofs, of a primary that was found, and of an epoch that is over.
    pub leases: Arc<Leases>,
    /// Learns what the other servers have.
    pub ends: Arc<Ends>,
    /// How it goes.
    pub status: Arc<Status>,
    /// Which servers an earlier process has seen.
    pub seen: Seen,
    /// Somebody has a reason to look now.
    pub look: Notify,
    /// The first rounds are over.
    pub looked: Notify,
    /// What the last round has shown.
    pub state: RefCell<State>,
}

/// What the last rounds have shown.
#[derive(Debug)]
pub(crate) struct State {
    /// The primary, by the last round; `None` before the first ones.
    found: Option<bool>,
    /// Since when rounds have shown none, and how many.
    without: Option<(Mono, u32)>,
    /// The longest time without one since the last re-attach.
    longest: Duration,
    /// How the hosts are, for a person.
    hosts: String,
    told: Told,
}

/// What a person has been told and need not be told again.
#[derive(Debug, Default)]
struct Told {
    without: bool,
    two: bool,
    foreign: Option<usize>,
    stale: Option<usize>,
    stranger: Option<usize>,
    seen: Seen,
}

impl Default for State {
    fn default() -> Self {
        Self {
            found: None,
            without: None,
            longest: Duration::ZERO,
            hosts: "no host has been asked yet".to_owned(),
            told: Told::default(),
        }
    }
}

impl Lookout {
    /// Looks out for ever. `changed` is called when connections from before are of no use.
    pub(crate) async fn run(&self, changed: impl Fn()) {
        let mut prober = Prober::new(&self.target);
        let mut primaries = Primaries::new(prober.hosts(), self.seen);
        loop {
            let sent = clock::now();
            let member = self.leases.member();
            let asked = self.leases.identity();
            let shown = prober.round(asked).await;
            let now = clock::now();
            let sights: Vec<Sight> = shown.iter().map(|shown| shown.sight.clone()).collect();
            let known = Known {
                beat: self.leases.beats().1,
                epoch_no: self.leases.epoch_no(),
            };
            let finding = primaries.on(sent, now, &sights, known);
            // Beats and proofs are those of the worker that was asked about.
            let still = self.leases.identity() == asked;
            if finding.none_anywhere && still {
                self.leases.on(Event::NoPrimary { asked_at: sent });
            }
            self.note_hosts(&prober, &shown);
            match finding.primary {
                Some(host) => {
                    if finding.changed {
                        self.turn(host, &sights[host]);
                        changed();
                    }
                    self.follow(&shown[host], finding.changed, member);
                    if still {
                        self.note_safe(host, &sights);
                    }
                    self.note_found(now, &prober.name(host), finding.changed);
                    self.note_seen(primaries.seen());
                }
                None => {
                    if finding.stale.is_some() {
                        // The name of the primary may lead to it by now.
                        changed();
                    }
                    self.note_missed(now);
                }
            }
            self.warn(&prober, &finding, &primaries);
            self.pause().await;
        }
    }

    /// Whether there is a primary to speak to.
    ///
    /// # Errors
    /// `Unreachable`, with what the hosts are instead.
    pub(crate) async fn found(&self) -> Result<(), StoreError> {
        while self.state.borrow().found.is_none() {
            self.looked.notified().await;
        }
        let state = self.state.borrow();
        if state.found == Some(true) {
            return Ok(());
        }
        Err(StoreError::Unreachable(format!(
            "there is no primary ({})",
            state.hosts
        )))
    }

    /// For how long there was no primary, the longest time since [`Lookout::forget_outage`].
    pub(crate) fn outage(&self) -> Duration {
        self.state.borrow().longest
    }

    /// The outage has been reported.
    pub(crate) fn forget_outage(&self) {
        self.state.borrow_mut().longest = Duration::ZERO;
    }

    async fn pause(&self) {
        let calm = self.leases.limits().beat_every();
        let wait = match self.state.borrow().without {
            None => calm,
            Some((since, _)) if clock::now() - since < A_MINUTE => OFTEN.0.min(calm),
            Some(_) => OFTEN.1.min(calm),
        };
        tokio::select! {
            () = tokio::time::sleep(wait.mul_f64(0.9 + random() * 0.2)) => {}
            () = self.look.notified() => {}
        }
    }

    fn turn(&self, host: usize, sight: &Sight) {
        let server = match sight {
            Sight::Primary(facts) => Some(*facts),
            Sight::Away | Sight::Standby(_) | Sight::ReadOnly => None,
        };
        let Routes {
            direct,
            pool,
            pooler,
        } = &self.routes;
        direct.turn(&self.target, Some(host), server);
        if let Some(pooler) = pooler {
            pool.turn(pooler, None, server);
        }
    }

    /// The keeper learns at once what the primary shows, and need not wait for its next beat. `asked` is what this worker was when the
    /// round was sent: what was asked before it re-attached says nothing of its new epoch.
    fn follow(&self, shown: &Shown, changed: bool, asked: Option<(WorkerId, Epoch)>) {
        let Some(shows) = shown.epoch else {
            return;
        };
        self.routes.direct.set_synchronous(shows.synchronous);
        self.routes.pool.set_synchronous(shows.synchronous);
        match self.leases.member().filter(|now| asked == Some(*now)) {
            Some((worker, epoch)) if shows.epoch != epoch || shows.current == Some(false) => {
                let over = StoreError::OtherEpoch("the primary is in another epoch".to_owned());
                self.leases.failed(worker, epoch, &over);
            }
            _ if changed || self.state.borrow().found == Some(false) => {
                self.leases.on(Event::BeatNow);
            }
            _ => {}
        }
    }

    /// What every host shows, no switch between these can lose. A primary that was just promoted may show less than the others.
    fn note_safe(&self, primary: usize, sights: &[Sight]) {
        let shown = sights.iter().enumerate().map(|(host, sight)| match sight {
            Sight::Standby(facts) => facts.beat,
            Sight::Primary(facts) if host == primary => facts.beat,
            Sight::Away | Sight::Primary(_) | Sight::ReadOnly => None,
        });
        let least = shown.map(|beat| beat.unwrap_or(Beat(0))).min();
        self.ends
            .proven(least.filter(|_| sights.len() > 1), self.leases.beats().1);
    }

    fn note_hosts(&self, prober: &Prober, shown: &[Shown]) {
        let hosts = shown.iter().enumerate().map(|(host, shown)| {
            let name = prober.name(host);
            match (&shown.sight, &shown.error) {
                (Sight::Away, Some(error)) => format!("{name} is away ({error})"),
                (Sight::Away, None) => format!("{name} is away"),
                (Sight::Primary(_), _) => format!("{name} takes writes"),
                (Sight::Standby(_), _) => format!("{name} is a standby"),
                (Sight::ReadOnly, _) => format!("{name} is set to read only"),
            }
        });
        self.state.borrow_mut().hosts = hosts.collect::<Vec<_>>().join(", ");
    }

    fn note_found(&self, now: Mono, name: &str, changed: bool) {
        let mut state = self.state.borrow_mut();
        let first = state.found.replace(true).is_none();
        let outage = state.without.take().map(|(since, _)| now - since);
        state.longest = state.longest.max(outage.unwrap_or_default());
        let told = std::mem::take(&mut state.told.without);
        drop(state);
        self.looked.notify_waiters();
        self.status.primary(true);
        if first || changed || told {
            events::primary_found(name, outage.filter(|_| told));
        }
    }

    fn note_missed(&self, now: Mono) {
        let mut state = self.state.borrow_mut();
        let most = state.found.map_or(MISSES.0, |_| MISSES.1);
        let (_, misses) = state.without.get_or_insert((now, 0));
        *misses += 1;
        if *misses < most {
            return;
        }
        state.found = Some(false);
        let told = std::mem::replace(&mut state.told.without, true);
        let hosts = state.hosts.clone();
        drop(state);
        self.looked.notify_waiters();
        self.status.primary(false);
        if !told {
            events::primary_lost(&hosts);
        }
    }

    fn note_seen(&self, seen: Seen) {
        let told = &mut self.state.borrow_mut().told.seen;
        if *told != seen {
            self.ends.seen(seen);
        }
        *told = seen;
    }

    fn warn(&self, prober: &Prober, finding: &Finding, primaries: &Primaries) {
        if told_once(
            &mut self.state.borrow_mut().told.stale,
            finding.stale.filter(|_| finding.primary.is_none()),
        ) && let Some(host) = finding.stale
        {
            events::only_an_older_primary(&prober.name(host), primaries.seen().to_replace());
        }
        let stale = finding.stale.zip(finding.primary);
        let two = finding.two.or(stale);
        let told = &mut self.state.borrow_mut().told;
        if two.is_some() != told.two {
            told.two = two.is_some();
            events::two_primaries(two.map(|(one, other)| (prober.name(one), prober.name(other))));
        }
        if told_once(&mut told.stranger, finding.stranger)
            && let Some(host) = finding.stranger
        {
            events::another_installation(&prober.name(host));
        }
        if told_once(&mut told.foreign, finding.foreign)
            && let Some(host) = finding.foreign
        {
            events::foreign_server(&prober.name(host));
        }
    }
}

/// Whether this is news.
fn told_once(told: &mut Option<usize>, now: Option<usize>) -> bool {
    std::mem::replace(told, now) != now
}
