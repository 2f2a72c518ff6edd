//! How the daemon is, for readiness and metrics. Written by the tasks, read by the API.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::time::Mono;
use tracing::{error, info};

use crate::clock;
use crate::events;
use crate::service;

/// See the module.
#[derive(Debug, Default)]
pub struct Status {
    confirmed: Mutex<Option<Mono>>,
    draining: AtomicBool,
    primary: AtomicBool,
    troubles: Mutex<BTreeMap<Part, Trouble>>,
}

/// What does not work.
#[derive(Debug)]
struct Trouble {
    since: Mono,
    error: String,
    /// It stands in the log.
    told: bool,
}

/// What is over sooner than this is no news: a statement that failed is repeated, and the look-out tells of the primary.
const NEWS: Duration = Duration::from_secs(1);

/// What of the daemon's work with the database may be in trouble, the most telling first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The first connection.
    Start,
    /// Registration, heartbeats, re-attaching: the database is away, or does not know this worker.
    Heart,
    /// Claims.
    Claims,
    /// Writing how runs ended.
    Ends,
    /// Recovery of what timed out.
    Sweeps,
    /// Asking to be notified.
    Notifications,
    /// Reading the job types.
    JobTypes,
}

impl Part {
    fn trouble(self) -> &'static str {
        match self {
            Self::Start => "The database cannot be used yet",
            Self::Heart => "The database does not confirm this worker",
            Self::Claims => "Jobs cannot be claimed",
            Self::Ends => "Ends of runs cannot be written",
            Self::Sweeps => "Nothing can be recovered",
            Self::Notifications => "This worker cannot ask to be notified",
            Self::JobTypes => "The job types cannot be read",
        }
    }
}

impl Status {
    /// A heartbeat or registration that was sent at `sent` has been answered.
    pub fn confirmed(&self, sent: Mono) {
        *lock(&self.confirmed) = Some(sent);
        service::alive();
        self.fine(Part::Heart);
    }

    /// It works, again perhaps.
    pub(crate) fn fine(&self, part: Part) {
        let mut troubles = lock(&self.troubles);
        if let Some(trouble) = troubles.remove(&part) {
            if trouble.told {
                let seconds = (clock::now() - trouble.since).as_secs();
                info!(seconds, "Over: {}.", part.trouble());
            }
            if part == Part::Heart {
                // What was kept quiet while the heart was in trouble is news if it goes on.
                troubles.clear();
            }
            if troubles.is_empty() {
                service::status("working");
            }
        }
    }

    /// The database did not answer, or refused. Logged when it has gone on for a while and when the reason changes, not each time.
    /// While the heart is in trouble nothing else is news, and while there is no primary nothing at all: that has been said.
    pub fn trouble(&self, part: Part, error: &impl std::fmt::Display) {
        let error = error.to_string();
        let now = clock::now();
        let mut troubles = lock(&self.troubles);
        let before = troubles.get(&part);
        let same = before.is_some_and(|before| before.error == error);
        if same && before.is_some_and(|before| before.told) {
            return;
        }
        let since = before.map_or(now, |before| before.since);
        let hidden = part != Part::Heart && troubles.contains_key(&Part::Heart);
        let known = part != Part::Start && !self.has_primary();
        let told = part == Part::Start || !hidden && !known && now - since >= NEWS;
        if told {
            error!(error, "{}; trying on.", part.trouble());
            service::status(&format!("{}: {error}", part.trouble()));
        }
        let told = told || before.is_some_and(|before| before.told);
        troubles.insert(part, Trouble { since, error, told });
    }

    /// Since the last confirmed heartbeat was sent; `None`: there was none.
    pub fn heartbeat_age(&self) -> Option<Duration> {
        lock(&self.confirmed).map(|sent| clock::now() - sent)
    }

    /// What keeps the daemon from the database, if anything does.
    pub fn reason(&self) -> Option<String> {
        let troubles = lock(&self.troubles);
        troubles
            .first_key_value()
            .map(|(part, trouble)| format!("{}: {}", part.trouble(), trouble.error))
    }

    /// Whether a primary was found by the last probes.
    pub(crate) fn primary(&self, found: bool) {
        self.primary.store(found, Ordering::Relaxed);
        events::primary_up(found);
    }

    /// Whether there is a primary that answers.
    pub fn has_primary(&self) -> bool {
        self.primary.load(Ordering::Relaxed)
    }

    /// The stop has begun.
    pub fn drain(&self) {
        service::stopping();
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether the stop has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Writes what is only computed when somebody asks.
    pub fn write_metrics(&self) {
        events::heartbeat_age(self.heartbeat_age());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
