//! `tenure run`: the daemon with its log, metrics and HTTP interface around it.

use std::time::Duration;

use futures_util::StreamExt;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook_tokio::Signals;
use tenure_api::{Access, Listener, Queue, State};
use tenure_runtime::daemon::{Daemon, DaemonError, Outcome};
use tenure_runtime::events;
use tenure_runtime::settings::{Api, Listen, Pooler, Secret, Settings};
use tenure_store::migrate::MigrateError;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Context;
use crate::output::{Exit, Failure};
use crate::{config, logging};

/// Threads for the work; the heart has its own besides.
const THREADS: usize = 2;

/// Upper ends of the buckets of durations, in seconds.
const BUCKETS: [f64; 14] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0,
];

/// How often old samples of durations are put into their buckets.
const UPKEEP: Duration = Duration::from_secs(5);

/// Runs until it is told to stop.
pub(super) fn run(context: &Context) -> Result<(), Failure> {
    let (settings, _) = config::settings(context.common.config.as_deref(), &context.common.set)?;
    logging::start(&settings.log)?;
    close_to_others();
    daemon(settings)
}

/// Keeps this process's memory and variables, with their secrets, from other processes of the same user, handlers among them, and
/// out of core dumps. Root can read them all the same.
fn close_to_others() {
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::warn!(%error, "Handlers of this daemon's own user can read its memory.");
    }
}

/// Runs a daemon with these settings until a signal, or a person through the database, ends it.
pub(super) fn daemon(settings: Settings) -> Result<(), Failure> {
    // Refused when it was installed before, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("the system gives no threads: {error}")))?;
    runtime.block_on(Box::pin(serve(settings)))
}

async fn serve(settings: Settings) -> Result<(), Failure> {
    let signals = signals()?;
    let metrics =
        recorder().map_err(|error| Failure::failed(format!("metrics cannot be kept: {error}")))?;
    events::describe();
    if settings.handlers.job_types().next().is_none() {
        tracing::warn!(
            "No handler is configured: this daemon will run no job. Add a [handlers.NAME] section."
        );
    }
    if settings.database.pooler == Pooler::Transaction && settings.database.direct_url.is_none() {
        tracing::warn!(
            "database.pooler is \"transaction\" and there is no database.direct_url: no notifications arrive, jobs are found by \
             polling every worker.poll_interval."
        );
    }
    let api = settings.api.clone();
    let heartbeat_limit = settings.worker.lease_ttl;
    let listener = open(&api).await?;
    let daemon = Daemon::new(settings)?;
    if let Some(caution) = daemon.caution() {
        tracing::warn!("{caution}");
    }
    let state = State {
        db: daemon.api_db().map_err(DaemonError::from)?,
        access: Access::new(
            api.token.as_ref().map(Secret::expose),
            matches!(api.listen, Some(Listen::Tcp(_))),
        ),
        max_body: api.max_body,
        completions: daemon.completions(),
        status: daemon.status(),
        heartbeat_limit,
        metrics: metrics.clone(),
        queue: Queue::default(),
    };
    let stop = CancellationToken::new();
    let working = async {
        let outcome = daemon.run(signals).await;
        stop.cancel();
        outcome
    };
    let ((), (), outcome) = tokio::join!(
        answer(listener, state, &stop),
        upkeep(&metrics, &stop),
        working
    );
    match outcome? {
        Outcome::Clean => Ok(()),
        Outcome::Unclean => Err(Failure::failed(
            "stopped, but not everything could be given back; see the log",
        )),
    }
}

/// Opens the HTTP interface, so that an address that is taken is known before anything is claimed.
async fn open(api: &Api) -> Result<Option<Listener>, Failure> {
    let Some(address) = &api.listen else {
        return Ok(None);
    };
    let listener = Listener::open(address)
        .await
        .map_err(|error| Failure::failed(error.to_string()))?;
    tracing::info!(address = %listener.address(), "The HTTP interface is open.");
    Ok(Some(listener))
}

/// Answers requests until `stop`. Jobs go on without it.
async fn answer(listener: Option<Listener>, state: State, stop: &CancellationToken) {
    let Some(listener) = listener else { return };
    if let Err(error) = listener
        .serve(tenure_api::router(state), stop.clone())
        .await
    {
        tracing::error!(%error, "The HTTP interface has ended; jobs go on.");
    }
}

/// Signals to stop, one message each.
fn signals() -> Result<mpsc::Receiver<()>, Failure> {
    let failed =
        |error: std::io::Error| Failure::failed(format!("signals cannot be received: {error}"));
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGQUIT, SIGHUP]).map_err(failed)?;
    let (sender, receiver) = mpsc::channel(8);
    let forward = async move {
        while let Some(signal) = signals.next().await {
            if signal == SIGHUP {
                tracing::warn!("SIGHUP: a changed configuration takes a restart.");
            } else if sender.send(()).await.is_err() {
                return;
            }
        }
    };
    #[expect(
        clippy::disallowed_methods,
        reason = "listens for as long as the process lives"
    )]
    drop(tokio::spawn(forward));
    Ok(receiver)
}

fn recorder() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()
}

async fn upkeep(metrics: &PrometheusHandle, stop: &CancellationToken) {
    while stop
        .run_until_cancelled(tokio::time::sleep(UPKEEP))
        .await
        .is_some()
    {
        metrics.run_upkeep();
    }
}

impl From<DaemonError> for Failure {
    fn from(error: DaemonError) -> Self {
        match error {
            DaemonError::Migrations(MigrateError::Store(error)) => Self::new(
                Exit::Unreachable,
                "unreachable",
                format!("the database cannot be used: {error}"),
            )
            .hint("check database.url: host, database, user and password"),
            DaemonError::Migrations(error) => error.into(),
            DaemonError::Limits(_) | DaemonError::Address(_) | DaemonError::Target(_) => {
                Self::new(Exit::Usage, "configuration", error.to_string())
            }
            DaemonError::Journal(_)
            | DaemonError::Guard(_)
            | DaemonError::GuardLock(_)
            | DaemonError::Task(_)
            | DaemonError::Thread(_) => Self::failed(error.to_string()),
        }
    }
}
