//! The daemon: puts its tasks together, and takes them apart again in order.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::drain::{Command, Drain, Event};
use tenure_core::lease::limits::{Limits, LimitsError};
use tenure_store::address::AddressError;
use tenure_store::error::StoreError;
use tenure_store::migrate::{MigrateError, Migrator};
use tenure_store::session::{Db, Session, Target, TargetError};
use tenure_store::worker::Registration;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::attempt::Bench;
use crate::cgroup::Cgroups;
use crate::circuits::Circuits;
use crate::clock;
use crate::completions::Completions;
use crate::dispatch::Dispatcher;
use crate::ends::{Ends, QUEUES};
use crate::exec::{Executor, Folders, Limits as OutputLimits};
use crate::guard::{self, Guard, GuardError};
use crate::heart::{self, Heart};
use crate::journal::{Journal, JournalError};
use crate::lanes::{Lanes, pools};
use crate::leases::Leases;
use crate::lookout::{Lookout, Routes};
use crate::open;
use crate::service;
use crate::settings::Settings;
use crate::speaker::Speaker;
use crate::stats::Stats;
use crate::status::{Part, Status};
use crate::supervisor::Supervisor;
use crate::sweeper;
use crate::targets::routes;
use crate::tasks::spawn;

pub use crate::targets::targets;

/// Connections of the HTTP interface, opened when somebody asks for something.
const API_CONNECTIONS: usize = 2;
/// How much longer than their grace the processes of handlers may take to leave.
const FAREWELL: Duration = Duration::from_secs(2);
/// Between tries to reach the database at the start.
const AGAIN: Duration = Duration::from_secs(1);

/// Why the daemon does not run.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// Lengths that do not fit together.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The database address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The database cannot be set up from what was configured.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The database is there and not as it must be.
    #[error(transparent)]
    Migrations(#[from] MigrateError),
    /// The state directory.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The guard process.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// The lock that keeps two guards of one `state_dir` apart.
    #[error("guard.lock in state_dir: {0}")]
    GuardLock(std::io::Error),
    /// A task ended that never should.
    #[error("the {0} of this daemon failed; please report this")]
    Task(&'static str),
    /// The heart's thread.
    #[error("the heart's thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every job that was held has ended or was given back, and the database has confirmed it.
    Clean,
    /// Something was left: its lease will run out, or the next daemon in `state_dir` says it.
    Unclean,
}

/// What a daemon is run with.
pub struct Daemon {
    settings: Arc<Settings>,
    target: Target,
    direct: Target,
    routes: Routes,
    db: Db,
    limits: Limits,
    status: Arc<Status>,
    completions: Arc<Completions>,
}

impl Daemon {
    /// Checks the settings; connects to nothing.
    ///
    /// # Errors
    /// See [`DaemonError`].
    pub fn new(settings: Settings) -> Result<Self, DaemonError> {
        let worker = &settings.worker;
        let limits = Limits::new(
            worker.lease_ttl,
            worker.heartbeat,
            settings.handlers.longest_grace(),
        )?;
        let (target, direct) = targets(&settings.database)?;
        let routes = routes(&settings.database, &target, &direct);
        let db = Db::along(&target, settings.database.pool_size, routes.pool.clone())?;
        let completions = Completions::new(settings.handlers.clone(), worker.max_result);
        Ok(Self {
            completions: Arc::new(completions),
            settings: Arc::new(settings),
            target,
            direct,
            routes,
            db,
            limits,
            status: Arc::new(Status::default()),
        })
    }

    /// What of the settings will surprise somebody in an outage.
    #[must_use]
    pub fn caution(&self) -> Option<String> {
        let trust = self.limits.trust();
        (self.direct.address.hosts() > 1 && !self.limits.outlast_outages()).then(|| {
            format!(
                "handlers are ended {trust:?} after the last heartbeat, before it can be known that there is no primary anywhere: they do \
                 not live through an outage. Set worker.lease_ttl to 30s or more, or shorten kill_grace."
            )
        })
    }

    /// How it is, for whoever wants to know while it runs.
    #[must_use]
    pub fn status(&self) -> Arc<Status> {
        Arc::clone(&self.status)
    }

    /// Where handlers say how jobs ended that they had accepted.
    #[must_use]
    pub fn completions(&self) -> Arc<Completions> {
        Arc::clone(&self.completions)
    }

    /// Connections of their own for the API: whoever looks at jobs does not hold up claims and completions.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn api_db(&self) -> Result<Db, TargetError> {
        Db::along(&self.target, API_CONNECTIONS, self.routes.pool.clone())
    }

    /// Runs until it was told to stop, by `signals` or by a person through the database. Each signal after the first
    /// shortens what goes on.
    ///
    /// # Errors
    /// See [`DaemonError`]; nothing was claimed then.
    pub async fn run(self, mut signals: mpsc::Receiver<()>) -> Result<Outcome, DaemonError> {
        let (journal, mut legacy) = match &self.settings.worker.state_dir {
            Some(dir) => {
                let (journal, legacy) = Journal::open(dir)?;
                (Some(journal), legacy)
            }
            None => Default::default(),
        };
        service::ready();
        if !self.wait_for_database(&mut signals).await? {
            return Ok(Outcome::Clean);
        }
        let settings = Arc::clone(&self.settings);
        // Before the guard, which is to be where this process is.
        let cgroups =
            tokio::task::spawn_blocking(move || Cgroups::for_handlers(&settings.handlers))
                .await
                .unwrap_or_default();
        let guard = self.start_guard().await?;
        let ends = Arc::new(Ends::new(journal, std::mem::take(&mut legacy.ends)));
        let (orders_in, orders) = mpsc::channel(64);
        let (notes_in, notes) = mpsc::channel(4096);
        let leases = Arc::new(Leases::new(
            self.limits,
            Arc::clone(&ends),
            guard.clone(),
            orders_in,
        ));
        let stats = Arc::new(Stats::default());
        let (drain, claims, rest) = (
            CancellationToken::new(),
            CancellationToken::new(),
            CancellationToken::new(),
        );

        let guarding = guard
            .clone()
            .map(|guard| spawn(async move { guard.supervise().await }));
        let (heart, heart_ended) = heart::start(
            Heart {
                lookout: Lookout {
                    target: self.direct.clone(),
                    routes: self.routes.clone(),
                    leases: Arc::clone(&leases),
                    ends: Arc::clone(&ends),
                    status: Arc::clone(&self.status),
                    seen: legacy.seen,
                    look: Notify::new(),
                    looked: Notify::new(),
                    state: RefCell::default(),
                },
                registration: self.registration(),
                legacy,
                leases: Arc::clone(&leases),
                ends: Arc::clone(&ends),
                notes: notes_in.clone(),
                drain: drain.clone(),
                status: Arc::clone(&self.status),
                stats: Arc::clone(&stats),
            },
            orders,
            rest.clone(),
        )
        .map_err(DaemonError::Thread)?;
        let circuits = Arc::new(Circuits::default());
        let bench = Bench {
            executor: Executor {
                guard,
                supervisor: Supervisor::new(Path::new("/proc/self/exe"), "supervise")
                    .map_err(|_| DaemonError::Task("supervisor"))?,
                folders: tokio::task::spawn_blocking(Folders::in_tmpdir)
                    .await
                    .unwrap_or_default(),
                cgroups,
                limits: OutputLimits {
                    result: self.settings.worker.max_result,
                    log: self.settings.worker.log_tail,
                },
            },
            db: self.db.clone(),
            leases: Arc::clone(&leases),
            circuits: Arc::clone(&circuits),
            stats,
            notes: notes_in,
        };
        let open = Arc::clone(leases.open());
        let lanes = Lanes::new(Arc::clone(&self.settings), circuits, open);
        let dispatcher = Dispatcher::new(
            self.db.clone(),
            lanes,
            pools(&self.settings),
            Arc::clone(&self.status),
            bench,
            TaskTracker::new(),
            self.settings.worker.poll_interval,
        );
        let mut dispatcher = spawn(dispatcher.run(notes, claims.clone()));
        let told = claims.clone();
        let dispatcher_failed = async {
            let _ = (&mut dispatcher).await;
            // It ends by itself once it was told to and all attempts have ended.
            if told.is_cancelled() {
                std::future::pending::<()>().await;
            }
        };
        let [mut plain, mut follow_ups, mut replicated] = QUEUES.map(|queue| {
            let speaker = Speaker {
                queue,
                db: self.db.clone(),
                ends: Arc::clone(&ends),
                leases: Arc::clone(&leases),
                status: Arc::clone(&self.status),
            };
            spawn(speaker.run(rest.clone()))
        });
        let mut sweeper = spawn(sweeper::run(
            self.db.clone(),
            Arc::clone(&leases),
            Arc::clone(&self.status),
            rest.clone(),
        ));

        let mut open = spawn(open::watch(
            self.db.clone(),
            Arc::clone(&leases),
            rest.clone(),
        ));
        self.completions.begin(&ends, &leases);

        let outcome = tokio::select! {
            outcome = self.until_drained(&mut signals, &drain, &claims, &leases, &ends) => Ok(outcome),
            _ = heart_ended => Err(DaemonError::Task("heart")),
            () = dispatcher_failed => Err(DaemonError::Task("dispatcher")),
            _ = &mut plain => Err(DaemonError::Task("speaker")),
            _ = &mut follow_ups => Err(DaemonError::Task("speaker of follow-up jobs")),
            _ = &mut replicated => Err(DaemonError::Task("speaker of replicated ends")),
            _ = &mut sweeper => Err(DaemonError::Task("sweeper")),
            _ = &mut open => Err(DaemonError::Task("watch over open jobs")),
        };
        if matches!(outcome, Ok(Outcome::Clean)) && !dispatcher.is_finished() {
            // Handlers' processes that have no job any more are sent away.
            let within = self.settings.handlers.longest_grace() + FAREWELL;
            let _ = tokio::time::timeout(within, dispatcher).await;
        }
        // No heartbeat may follow the word that this worker leaves.
        rest.cancel();
        let _ = tokio::task::spawn_blocking(move || heart.join()).await;
        if outcome.is_ok() {
            self.leave(&leases, &ends).await;
        }
        if let Some(guarding) = guarding {
            guarding.abort();
        }
        outcome
    }

    /// Steps through the drain as the pure machine says.
    async fn until_drained(
        &self,
        signals: &mut mpsc::Receiver<()>,
        drain_asked: &CancellationToken,
        claims: &CancellationToken,
        leases: &Leases,
        ends: &Ends,
    ) -> Outcome {
        let mut drain = Drain::new(
            self.settings.worker.drain_timeout,
            self.settings.handlers.longest_grace(),
        );
        loop {
            let event = tokio::select! {
                Some(()) = signals.recv() => Event::Signal,
                () = drain_asked.cancelled(), if !drain.has_begun() => Event::Signal,
                () = leases.changed(), if drain.has_begun() => Event::Tick,
                () = clock::sleep_until(drain.wake_at()) => Event::Tick,
            };
            // How things stand comes first: a drain that knows of no handler is over at once.
            let mut commands = drain.on(clock::now(), left(leases, ends));
            commands.extend(drain.on(clock::now(), event));
            for command in commands {
                match command {
                    Command::StopClaiming => {
                        info!(
                            running = leases.running(),
                            "Stopping: nothing more is claimed; what runs may finish."
                        );
                        self.status.drain();
                        claims.cancel();
                        leases.on(tenure_core::lease::event::Event::BeatNow);
                    }
                    Command::Kill { grace } => {
                        warn!(
                            running = leases.running(),
                            ?grace,
                            "What still runs is stopped and given back."
                        );
                        leases.stop_all(grace, "the daemon stops");
                    }
                    Command::Release => ends.nudge(),
                    Command::Exit { clean: true } => return Outcome::Clean,
                    // What is kept in state_dir is not lost: the next start says it.
                    Command::Exit { clean: false } if leases.running() == 0 && ends.are_kept() => {
                        return Outcome::Clean;
                    }
                    Command::Exit { clean: false } => return Outcome::Unclean,
                }
            }
        }
    }

    async fn leave(&self, leases: &Leases, ends: &Ends) {
        if let Some((worker, epoch)) = leases.member()
            && leases.running() == 0
            && ends.is_empty()
        {
            let left = async { self.db.session().await?.deregister(worker, epoch).await };
            if let Err(error) = tokio::time::timeout(Duration::from_secs(2), left)
                .await
                .unwrap_or(Err(StoreError::Timeout("leaving")))
            {
                warn!(%error, "The database was not told that this worker leaves; it finds out by itself.");
            }
            return;
        }
        for end in ends.all() {
            if ends.are_kept() {
                warn!(job = %end.end.job, "Its end is kept in state_dir for the next start.");
            } else {
                warn!(job = %end.end.job, "Its end could not be written, and no state_dir keeps it: it may run again.");
            }
        }
    }

    /// Waits for a database that this program can work with. `false`: a signal came first.
    async fn wait_for_database(
        &self,
        signals: &mut mpsc::Receiver<()>,
    ) -> Result<bool, DaemonError> {
        loop {
            match self.look().await {
                Ok(()) => {
                    self.status.fine(Part::Start);
                    return Ok(true);
                }
                Err(MigrateError::Store(error)) if error.breaks_connection() => {
                    self.status.trouble(Part::Start, &error);
                }
                Err(error) => return Err(error.into()),
            }
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                Some(()) = signals.recv() => return Ok(false),
            }
        }
    }

    async fn look(&self) -> Result<(), MigrateError> {
        let (session, _) = Session::open(&self.direct).await?;
        Migrator::new(&session, &self.target.schema).check().await
    }

    async fn start_guard(&self) -> Result<Option<Guard>, DaemonError> {
        let lock = self
            .settings
            .worker
            .state_dir
            .as_ref()
            .map(|dir| std::path::absolute(dir.join("guard.lock")));
        let lock = lock.transpose().map_err(DaemonError::GuardLock)?;
        if let Some(lock) = lock.clone() {
            // The jobs of a dead predecessor are free as soon as this daemon registers, so its handlers must be dead before.
            let waited = tokio::task::spawn_blocking(move || guard::hold(&lock).map(drop)).await;
            waited
                .unwrap_or_else(|error| Err(std::io::Error::other(error)))
                .map_err(DaemonError::GuardLock)?;
        }
        if !self.settings.handlers.start_processes() {
            return Ok(None);
        }
        let lock = lock
            .as_deref()
            .map(Path::to_string_lossy)
            .unwrap_or_default();
        let arguments = if lock.is_empty() {
            vec!["guard"]
        } else {
            vec!["guard", &lock]
        };
        Ok(Some(
            Guard::start(
                Path::new("/proc/self/exe"),
                &arguments,
                self.limits.lost_grace(),
            )
            .await?,
        ))
    }

    fn registration(&self) -> Registration {
        let worker = &self.settings.worker;
        let slots: usize = pools(&self.settings).iter().map(|(_, slots)| slots).sum();
        Registration {
            name: worker.name.clone(),
            version: worker.version.clone(),
            lease_ttl: worker.lease_ttl,
            heartbeat: worker.heartbeat,
            job_types: self
                .settings
                .handlers
                .job_types()
                .map(|pattern| pattern.as_str().to_owned())
                .collect(),
            concurrency: i32::try_from(slots).unwrap_or(i32::MAX),
        }
    }
}

fn left(leases: &Leases, ends: &Ends) -> Event {
    Event::Left {
        handlers: leases.running(),
        unconfirmed: ends.len() + leases.unanswered_claims(),
    }
}
