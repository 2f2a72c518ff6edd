//! Runs one attempt of one job in its handler and says how it ended.
//!
//! States of an attempt: not started → running → (told to stop →) over. Invariant: [`Executor::run`] answers only when
//! nothing of the attempt runs any more on this machine, whatever sessions and groups its processes made, or the process that has
//! answered for it goes on with other jobs; so whatever the answer is used for, no second handler of the job can meet the first.

mod client;
mod confine;
mod exit;
mod folder;
mod http;
mod process;
mod spawn;
mod started;
mod subprocess;
mod tree;

use std::time::{Duration, SystemTime};

use tenure_core::time::Mono;
use tenure_protocol::envelope::Envelope;
use tenure_protocol::verdict::{Ended, Verdict};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::cgroup::Cgroups;
use crate::guard::Guard;
use crate::settings::{ExecSettings, HandlerKind};
use crate::supervisor::Supervisor;

pub use client::Clients;
pub use folder::Folders;
#[cfg(fuzzing)]
pub(crate) use http::answered;
pub use http::{HttpHandler, PrepareError};
pub use process::{Admitted, Fleet};

/// Longer durations are taken for this one, so that adding them to a clock cannot overflow.
const LONGEST: Duration = Duration::from_hours(24 * 3653);

/// How long is read on after the last process of a handler has ended.
const LINGER: Duration = Duration::from_millis(500);

/// Why the guard ended a handler.
const LAPSED: &str =
    "the daemon stood still for longer than its leases, so its guard ended the handler";

/// One attempt of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The job.
    pub job: Uuid,
    /// Its job type.
    pub job_type: String,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// The attempt after which a failure is final.
    pub max_attempts: u32,
    /// The fencing token of the attempt's lease.
    pub token: Uuid,
    /// Whose job it is.
    pub tenant: String,
    /// The job's data, the JSON text that PostgreSQL gives.
    pub data: String,
    /// When the job was enqueued, RFC 3339.
    pub enqueued_at: String,
    /// How far the job's series has come, JSON text.
    pub watermark: Option<String>,
    /// The W3C trace context of the producer.
    pub traceparent: Option<String>,
    /// In a process it has to be the only job: one died that had it and others.
    pub alone: bool,
    /// From the start of the handler until it is stopped: the job's own if it has one, else the handler's.
    pub timeout: Duration,
}

/// Whether an attempt may go on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Stop {
    /// It may.
    #[default]
    No,
    /// It has to end: TERM, then after `grace` KILL. A later word may shorten the grace, never lengthen it.
    Kill {
        /// From TERM to KILL.
        grace: Duration,
        /// Why, for a person: `cancelled`, `lease lost`, `the daemon stops`.
        reason: String,
    },
}

/// Says to an attempt whether it may go on; many attempts may share one.
pub type StopSignal = watch::Receiver<Stop>;

/// A handler that is ready to run.
#[derive(Debug, Clone)]
pub enum Handler {
    /// One process a job.
    Exec(ExecSettings),
    /// One `POST` a job.
    Http(Box<HttpHandler>),
    /// Processes that do many jobs.
    Process(Fleet),
    /// Nothing: the job is done at once.
    Noop,
}

impl Handler {
    /// Makes ready what this section of the settings describes.
    ///
    /// # Errors
    /// When an address, a header or a secret in them cannot be used.
    pub fn prepare(
        section: &str,
        kind: &HandlerKind,
        clients: &mut Clients,
    ) -> Result<Self, PrepareError> {
        Ok(match kind {
            HandlerKind::Exec(settings) => Self::Exec(settings.clone()),
            HandlerKind::Http(settings) => {
                Self::Http(Box::new(HttpHandler::new(settings, clients)?))
            }
            HandlerKind::Process(settings) => Self::Process(Fleet::new(section, settings)),
            HandlerKind::Noop => Self::Noop,
        })
    }
}

impl Handler {
    /// How many jobs could begin in it now.
    #[must_use]
    pub fn room(&self) -> usize {
        match self {
            Self::Process(fleet) => fleet.capacity(),
            _ => usize::MAX,
        }
    }

    /// A job is on its way to it: it counts against its room until what is returned is dropped.
    #[must_use]
    pub fn admit(&self) -> Option<Admitted> {
        match self {
            Self::Process(fleet) => Some(fleet.admit()),
            _ => None,
        }
    }

    /// When there is more room although nothing ends.
    #[must_use]
    pub fn room_at(&self) -> Option<Mono> {
        match self {
            Self::Process(fleet) => fleet.wake_at(),
            _ => None,
        }
    }

    /// The daemon stops: what waits to begin in it is given back.
    pub fn rest(&self) {
        if let Self::Process(fleet) = self {
            fleet.rest();
        }
    }

    /// Ends what it keeps running between jobs. No job may be in it any more.
    pub async fn close(&self) {
        if let Self::Process(fleet) = self {
            fleet.close().await;
        }
    }
}

/// How much of what handlers say is kept, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of a result; what is longer is kept as text without its middle.
    pub result: usize,
    /// Of the log of an attempt.
    pub log: usize,
}

/// Runs attempts.
#[derive(Debug, Clone)]
pub struct Executor {
    /// Ends the processes if this daemon cannot; without one they outlive it.
    pub guard: Option<Guard>,
    /// How the process between this daemon and each handler is started.
    pub supervisor: Supervisor,
    /// Where handlers have their temporary files, if they have a place of their own.
    pub folders: Folders,
    /// Where handlers that have limits have their control groups; `None`: nowhere.
    pub cgroups: Option<Cgroups>,
    /// What is kept of their words.
    pub limits: Limits,
}

impl Executor {
    /// Runs one attempt to its end.
    ///
    /// After a word to stop the verdict is [`Verdict::Stopped`] whatever the handler answers: `trap 'cleanup; exit' TERM`
    /// exits with 0 too, and a job that runs again is better than one that is lost. Dropping the future kills the handler's
    /// processes without grace.
    pub async fn run(&self, handler: &Handler, task: &Task, mut stop: StopSignal) -> Ended {
        if let Stop::Kill { reason, .. } = &*stop.borrow_and_update() {
            return stopped(reason);
        }
        match handler {
            Handler::Exec(settings) => subprocess::run(self, settings, task, stop).await,
            Handler::Http(handler) => http::run(self, handler, task, stop).await,
            Handler::Process(fleet) => process::run(fleet, self, task, stop).await,
            Handler::Noop => Ended::new(Verdict::Done),
        }
    }
}

impl Task {
    /// When the attempt that starts now is stopped, RFC 3339.
    fn deadline(&self) -> String {
        #[expect(
            clippy::disallowed_methods,
            reason = "a time for the handler to read; nothing here is decided by it"
        )]
        let now = SystemTime::now();
        let at = now.checked_add(self.timeout.min(LONGEST)).unwrap_or(now);
        humantime::format_rfc3339_millis(at).to_string()
    }

    fn envelope<'a>(&'a self, deadline: &'a str) -> Envelope<'a> {
        Envelope {
            id: self.job,
            job_type: &self.job_type,
            data: &self.data,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            token: self.token,
            tenant: &self.tenant,
            enqueued_at: &self.enqueued_at,
            callback: None,
            deadline: Some(deadline),
            watermark: self.watermark.as_deref(),
            traceparent: self.traceparent.as_deref(),
        }
    }
}

/// The moment when `duration` will have passed.
pub(crate) fn after(duration: Duration) -> Instant {
    Instant::now() + duration.min(LONGEST)
}

fn stopped(reason: &str) -> Ended {
    Ended::because(Verdict::Stopped, format!("stopped: {reason}"))
}

/// The next word to stop. Never answers if there will be none.
async fn next_order(stop: &mut StopSignal) -> (Duration, String) {
    while stop.changed().await.is_ok() {
        if let Stop::Kill { grace, reason } = &*stop.borrow_and_update() {
            return (*grace, reason.clone());
        }
    }
    std::future::pending().await
}
