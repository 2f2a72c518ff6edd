//! Which lanes this worker takes, with which handler and in which pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tenure_core::breaker::Admits;
use tenure_core::ids::Lane;
use tenure_core::retry::Policy;
use tenure_core::time::Mono;
use tenure_core::{claim, pattern};

use crate::circuits::Circuits;
use crate::exec::{Clients, Handler, PrepareError};
use crate::open::OpenJobs;
use crate::settings::{Accepts, AfterLostCommits, Durability, HandlerKind, Handlers, Settings};

/// A handler that has not failed for so long, beside the time of a connection, was reached.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

/// What runs the jobs of one lane.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    /// The job type.
    pub job_type: Arc<str>,
    /// The section that says what runs: its circuit is shared by all its job types.
    pub section: Arc<str>,
    /// What runs.
    pub handler: Arc<Handler>,
    /// When it runs again after a failure.
    pub retry: Policy,
    /// How long an attempt may take, unless the job says it.
    pub timeout: std::time::Duration,
    /// From TERM to KILL.
    pub kill_grace: std::time::Duration,
    /// The index of its pool.
    pub pool: usize,
    /// What its handler asks for beyond the usual.
    pub care: Care,
    /// What becomes of jobs that it accepts; `None`: it cannot.
    pub accepts: Option<Accepts>,
}

/// What a handler asks for beyond the usual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Care {
    /// Its effects are in this database: a switch that loses commits loses them too, and the job must run again.
    #[serde(default)]
    pub rerun: bool,
    /// Its claims and completions count only when a standby has them.
    #[serde(default)]
    pub replicated: bool,
}

/// What the handler of a job type asks for beyond the usual.
pub(crate) fn care_of(handlers: &Handlers, job_type: &str) -> Care {
    let handler = handlers.resolve(job_type);
    handler.map_or(Care::default(), |handler| Care {
        rerun: handler.after_lost_commits == AfterLostCommits::Rerun,
        replicated: handler.durability == Some(Durability::Replicated),
    })
}

/// The lanes that this worker takes.
#[derive(Debug)]
pub(crate) struct Lanes {
    settings: Arc<Settings>,
    circuits: Arc<Circuits>,
    open: Arc<OpenJobs>,
    clients: Clients,
    /// By section: its job types share it.
    handlers: BTreeMap<Arc<str>, Arc<Handler>>,
    routes: BTreeMap<Lane, Route>,
    seen: i32,
}

impl Lanes {
    /// None yet.
    #[must_use]
    pub(crate) fn new(
        settings: Arc<Settings>,
        circuits: Arc<Circuits>,
        open: Arc<OpenJobs>,
    ) -> Self {
        Self {
            settings,
            circuits,
            open,
            clients: Clients::default(),
            handlers: BTreeMap::new(),
            routes: BTreeMap::new(),
            seen: 0,
        }
    }

    /// Takes in the lanes of the database.
    ///
    /// # Errors
    /// A handler that cannot be made ready; the lanes before it were taken in.
    pub(crate) fn update(&mut self, lanes: &[(Lane, String)]) -> Result<(), PrepareError> {
        for (lane, job_type) in lanes {
            self.seen = self.seen.max(lane.0);
            if self.routes.contains_key(lane) {
                continue;
            }
            let Some(handler) = self.settings.handlers.resolve(job_type) else {
                continue;
            };
            let section: Arc<str> = self
                .settings
                .handlers
                .section(job_type)
                .map_or(job_type.as_str(), pattern::Pattern::as_str)
                .into();
            let connects_within = match &handler.kind {
                HandlerKind::Http(http) => http.connect_timeout,
                _ => std::time::Duration::ZERO,
            };
            let (timeout, kill_grace) = match &handler.kind {
                HandlerKind::Exec(exec) => (exec.timeout, exec.kill_grace),
                HandlerKind::Http(http) => (http.timeout, std::time::Duration::ZERO),
                HandlerKind::Process(process) => (process.timeout, process.kill_grace),
                HandlerKind::Noop => (std::time::Duration::MAX, std::time::Duration::ZERO),
            };
            let route = Route {
                job_type: job_type.as_str().into(),
                section: Arc::clone(&section),
                handler: self.prepare(&section, &handler.kind)?,
                retry: handler.retry,
                timeout,
                kill_grace,
                pool: pool_of(&self.settings, job_type),
                care: care_of(&self.settings.handlers, job_type),
                accepts: match &handler.kind {
                    HandlerKind::Http(http) => Some(http.accepts),
                    _ => None,
                },
            };
            self.circuits.add(&section, connects_within + PATIENCE);
            self.routes.insert(*lane, route);
        }
        Ok(())
    }

    fn prepare(
        &mut self,
        section: &Arc<str>,
        kind: &HandlerKind,
    ) -> Result<Arc<Handler>, PrepareError> {
        if let Some(handler) = self.handlers.get(section) {
            return Ok(Arc::clone(handler));
        }
        let handler = Arc::new(Handler::prepare(section, kind, &mut self.clients)?);
        self.handlers
            .insert(Arc::clone(section), Arc::clone(&handler));
        Ok(handler)
    }

    /// The highest lane that was looked at.
    #[must_use]
    pub(crate) fn seen(&self) -> i32 {
        self.seen
    }

    /// What runs the jobs of this lane.
    #[must_use]
    pub(crate) fn route(&self, lane: Lane) -> Option<&Route> {
        self.routes.get(&lane)
    }

    /// All lanes.
    pub(crate) fn all(&self) -> impl Iterator<Item = Lane> {
        self.routes.keys().copied()
    }

    /// What to ask for, given the free slots of each pool.
    #[must_use]
    pub(crate) fn asks(&self, free: &[usize], max_batch: i32) -> Vec<claim::Ask> {
        let mut lanes = vec![Vec::new(); free.len()];
        for (lane, route) in &self.routes {
            if self.circuits.admits(&route.section) != Admits::None && self.room(route) > 0 {
                lanes[route.pool].push(*lane);
            }
        }
        let pools: Vec<claim::Pool<'_>> = free
            .iter()
            .zip(&lanes)
            .map(|(&free, lanes)| claim::Pool { free, lanes })
            .collect();
        claim::asks(&pools, max_batch)
    }

    /// The most to ask of this lane, of `total`.
    #[must_use]
    pub(crate) fn limit(&self, lane: Lane, total: i32) -> i32 {
        let Some(route) = self.route(lane) else {
            return total;
        };
        match self.circuits.admits(&route.section) {
            Admits::One => total.min(1),
            _ => total,
        }
    }

    /// The section of a lane, and how many more jobs its handler can have now.
    #[must_use]
    pub(crate) fn section_room(&self, lane: Lane) -> Option<(Arc<str>, i32)> {
        let route = self.route(lane)?;
        let room = i32::try_from(self.room(route)).unwrap_or(i32::MAX);
        Some((Arc::clone(&route.section), room))
    }

    /// Whether some handler has no room for as many jobs as its pool has free slots.
    #[must_use]
    pub(crate) fn are_short(&self, free: &[usize]) -> bool {
        self.routes
            .values()
            .any(|route| self.room(route) < free[route.pool])
    }

    /// The daemon stops: what waits to begin is given back.
    pub(crate) fn rest(&self) {
        self.handlers.values().for_each(|handler| handler.rest());
    }

    /// When a lane that is left out for want of room has some again although nothing ends.
    #[must_use]
    pub(crate) fn room_at(&self) -> Option<Mono> {
        let handlers = self.handlers.values();
        handlers.filter_map(|handler| handler.room_at()).min()
    }

    /// Ends what handlers keep running between jobs. No job runs any more.
    pub(crate) async fn close(&self) {
        let handlers = self.handlers.values();
        join_all(handlers.map(|handler| handler.close())).await;
    }

    /// How many more jobs its handler can have now.
    fn room(&self, route: &Route) -> usize {
        match route.accepts {
            Some(accepts) => self.open.room(&route.section, accepts.max_open),
            None => route.handler.room(),
        }
    }
}

/// The pools by name with their slots: the ordinary one first.
#[must_use]
pub(crate) fn pools(settings: &Settings) -> Vec<(String, usize)> {
    let slots = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    std::iter::once(("default".to_owned(), slots(settings.worker.concurrency)))
        .chain(
            settings
                .pools
                .iter()
                .map(|pool| (pool.name.clone(), slots(pool.concurrency))),
        )
        .collect()
}

/// The pool that names the job type best, else the ordinary one.
fn pool_of(settings: &Settings, job_type: &str) -> usize {
    let named: Vec<(usize, &pattern::Pattern)> = settings
        .pools
        .iter()
        .enumerate()
        .flat_map(|(index, pool)| {
            pool.job_types
                .iter()
                .map(move |pattern| (index + 1, pattern))
        })
        .collect();
    let best = pattern::select(named.iter().map(|(_, pattern)| *pattern), job_type);
    best.map_or(0, |best| named[best].0)
}
