//! `tenure bench`: how fast the configured database takes and gives jobs, measured with the built-in `noop` handler.
//!
//! It works in a schema of its own, which it removes at the end. The numbers mean something only beside others taken in the
//! same minute on the same machine: `scripts/bench` runs the same statements as raw SQL through pgbench beside it.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::Serialize;
use tenure_core::pattern::Pattern;
use tenure_runtime::daemon::{Daemon, DaemonError, Outcome, targets};
use tenure_runtime::settings::{HandlerKind, Handlers, RetryRule, Rule, Settings};
use tenure_store::error::StoreError;
use tenure_store::migrate::Migrator;
use tenure_store::session::{Session, Target};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::Context;
use crate::arguments::BenchArguments;
use crate::config;
use crate::output::{Failure, Report, View};

const SCHEMA: &str = "tenure_bench";
/// Between two looks whether the queue is drained.
const LOOK: Duration = Duration::from_millis(250);
/// From the end of the load until single jobs are put in.
const SLEEPY: Duration = Duration::from_secs(2);
/// Between two single jobs: the worker is asleep again.
const PAUSE: Duration = Duration::from_millis(30);

#[derive(Serialize)]
struct Numbers {
    jobs: i64,
    payload_bytes: usize,
    batch: usize,
    connections: usize,
    concurrency: u32,
    enqueue_per_second: f64,
    enqueue_wal_bytes_per_job: f64,
    drain_per_second: f64,
    drain_wal_bytes_per_job: f64,
    drain_daemon_cpu_us_per_job: f64,
    /// `None`: the server is not on this machine.
    drain_server_cpu_us_per_job: Option<f64>,
    /// One enqueue alone, as its client sees it, the commit included.
    enqueue_single_p50_ms: f64,
    /// From the begin of an enqueue, so its commit included, to the claim.
    pickup_p50_ms: f64,
    pickup_p99_ms: f64,
}

impl Report for Numbers {
    fn view(&self) -> View {
        let server = self
            .drain_server_cpu_us_per_job
            .map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.1} us"));
        View::Fields(vec![
            (
                "jobs",
                format!("{} of {} bytes", self.jobs, self.payload_bytes),
            ),
            (
                "enqueue",
                format!(
                    "{:.0}/s in batches of {} on {} connections",
                    self.enqueue_per_second, self.batch, self.connections
                ),
            ),
            (
                "enqueue WAL",
                format!("{:.0} bytes a job", self.enqueue_wal_bytes_per_job),
            ),
            (
                "drain",
                format!(
                    "{:.0}/s with {} slots on {} connections",
                    self.drain_per_second, self.concurrency, self.connections
                ),
            ),
            (
                "drain WAL",
                format!("{:.0} bytes a job", self.drain_wal_bytes_per_job),
            ),
            (
                "drain CPU",
                format!(
                    "daemon {:.1} us, server {server} a job",
                    self.drain_daemon_cpu_us_per_job
                ),
            ),
            (
                "pick-up",
                format!(
                    "p50 {:.2} ms, p99 {:.2} ms, from the enqueue's begin to the claim (an enqueue takes {:.2} ms)",
                    self.pickup_p50_ms, self.pickup_p99_ms, self.enqueue_single_p50_ms
                ),
            ),
        ])
    }
}

/// Runs the benchmark.
pub(super) fn bench(context: &Context, arguments: &BenchArguments) -> Result<(), Failure> {
    let database = config::database(context.common.config.as_deref(), &context.common.set)?;
    let settings = Settings::for_bench(
        database,
        SCHEMA,
        arguments.connections,
        arguments.concurrency,
        handlers(),
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("the system gives no threads: {error}")))?;
    let numbers = runtime.block_on(Box::pin(measure(context, arguments, settings)))?;
    context.output.print(&numbers)
}

async fn measure(
    context: &Context,
    arguments: &BenchArguments,
    settings: Settings,
) -> Result<Numbers, Failure> {
    let (_, mut target) =
        targets(&settings.database).map_err(|error| Failure::usage(error.to_string()))?;
    target.statement_timeout = Duration::from_secs(300);
    let (session, _) = Session::open(&target).await?;
    session
        .batch("bench", &format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE"))
        .await?;
    Migrator::new(&session, SCHEMA).up().await?;
    let measured = Bench {
        context,
        arguments,
        session: &session,
        target: &target,
    }
    .run(settings)
    .await;
    session
        .batch("bench", &format!("DROP SCHEMA {SCHEMA} CASCADE"))
        .await?;
    measured
}

struct Bench<'a> {
    context: &'a Context,
    arguments: &'a BenchArguments,
    session: &'a Session,
    target: &'a Target,
}

impl Bench<'_> {
    async fn run(&self, settings: Settings) -> Result<Numbers, Failure> {
        let jobs = self.arguments.jobs;
        self.context.note(&format!("Enqueues {jobs} jobs …"));
        let before = self.wal().await?;
        let took = self.enqueue().await?;
        let enqueue_wal = self.wal().await? - before;

        self.context.note("Runs them …");
        let (wal, server, own) = (self.wal().await?, self.server_cpu().await?, own_cpu());
        let (stop, signals) = mpsc::channel(1);
        let daemon = Daemon::new(settings)?;
        let mut running = spawned(daemon.run(signals));
        self.while_it_runs(&mut running, jobs).await?;
        let (drain_wal, drain_own) = (self.wal().await? - wal, own_cpu().saturating_sub(own));
        let drain_server = self
            .server_cpu()
            .await?
            .zip(server)
            .map(|(after, before)| after.saturating_sub(before));
        let drain_seconds = self.number("SELECT extract(epoch FROM max(finished_at) - min(started_at))::float8 AS n FROM %outcome").await?;

        self.context
            .note("Puts single jobs in, one after the other …");
        // The worker takes a moment to see that the load is over, and to fall asleep.
        tokio::time::sleep(SLEEPY).await;
        let mut enqueues = Vec::new();
        for _ in 0..self.arguments.singles {
            tokio::time::sleep(PAUSE).await;
            let began = Instant::now();
            self.session
                .rows("bench", "SELECT %enqueue('noop-single')", &[])
                .await?;
            enqueues.push(began.elapsed());
        }
        enqueues.sort();
        let enqueue_p50 = enqueues
            .get(enqueues.len() / 2)
            .copied()
            .unwrap_or_default();
        self.while_it_runs(&mut running, jobs + self.arguments.singles)
            .await?;
        // The first ones come to a worker that does not know the job type yet.
        let percentile = |part: &str| {
            format!(
                "SELECT percentile_cont({part}) WITHIN GROUP (ORDER BY extract(epoch FROM o.started_at - j.created_at) * 1000)::float8 AS n \
                     FROM (SELECT * FROM %job WHERE job_type = 'noop-single' ORDER BY id OFFSET 5) j JOIN %outcome o ON o.id = j.id"
            )
        };
        let (p50, p99) = (
            self.number(&percentile("0.5")).await?,
            self.number(&percentile("0.99")).await?,
        );
        // Only a failure of the daemon itself would have closed the channel.
        let _ = stop.send(()).await;
        running
            .await
            .map_err(|error| Failure::failed(error.to_string()))??;

        let per_job = |total: f64| total / as_float(jobs);
        Ok(Numbers {
            jobs,
            payload_bytes: self.arguments.payload,
            batch: self.arguments.batch,
            connections: self.arguments.connections,
            concurrency: self.arguments.concurrency,
            enqueue_per_second: as_float(jobs) / took.as_secs_f64(),
            enqueue_wal_bytes_per_job: per_job(enqueue_wal),
            drain_per_second: as_float(jobs) / drain_seconds,
            drain_wal_bytes_per_job: per_job(drain_wal),
            drain_daemon_cpu_us_per_job: per_job(drain_own.as_secs_f64() * 1e6),
            drain_server_cpu_us_per_job: drain_server.map(|cpu| per_job(cpu.as_secs_f64() * 1e6)),
            enqueue_single_p50_ms: enqueue_p50.as_secs_f64() * 1e3,
            pickup_p50_ms: p50,
            pickup_p99_ms: p99,
        })
    }

    /// Puts all jobs in over several connections, and says how long that took.
    async fn enqueue(&self) -> Result<Duration, Failure> {
        let batch = i64::try_from(self.arguments.batch).unwrap_or(i64::MAX);
        let connections = i64::try_from(self.arguments.connections).unwrap_or(i64::MAX);
        let data = format!(
            r#"{{"pad":"{}"}}"#,
            "x".repeat(self.arguments.payload.saturating_sub(10))
        );
        let one = format!(r#"{{"job_type":"noop","data":{data}}}"#);
        let mut sessions = Vec::new();
        for _ in 0..connections {
            sessions.push(Session::open(self.target).await?.0);
        }
        let (mut left, mut rest) = (self.arguments.jobs, connections);
        let began = Instant::now();
        let mut tasks = JoinSet::new();
        for session in sessions {
            let mine = left / rest;
            (left, rest) = (left - mine, rest - 1);
            let one = one.clone();
            tasks.spawn(async move {
                let mut mine = mine;
                while mine > 0 {
                    let count = mine.min(batch);
                    let jobs = format!(
                        "[{}]",
                        vec![one.as_str(); usize::try_from(count).unwrap_or(0)].join(",")
                    );
                    session.enqueue_many(&jobs).await?;
                    mine -= count;
                }
                Ok::<_, StoreError>(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.map_err(|error| Failure::failed(error.to_string()))??;
        }
        Ok(began.elapsed())
    }

    /// Waits until so many jobs are completed, or the daemon has ended before its time.
    async fn while_it_runs(
        &self,
        daemon: &mut JoinHandle<Result<Outcome, DaemonError>>,
        jobs: i64,
    ) -> Result<(), Failure> {
        tokio::select! {
            completed = self.until_completed(jobs) => completed,
            ended = daemon => Err(match ended {
                Ok(Err(error)) => error.into(),
                Ok(Ok(_)) | Err(_) => Failure::failed("the daemon ended in the middle of it"),
            }),
        }
    }

    async fn until_completed(&self, jobs: i64) -> Result<(), Failure> {
        loop {
            let left = self.number("SELECT ((SELECT count(*) FROM (SELECT FROM %ready LIMIT 1) r) + (SELECT count(*) FROM %lease))::float8 AS n").await?;
            if left == 0.0
                && self
                    .number("SELECT count(*)::float8 AS n FROM %outcome")
                    .await?
                    >= as_float(jobs)
            {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn wal(&self) -> Result<f64, StoreError> {
        self.number("SELECT (pg_current_wal_lsn() - '0/0')::float8 AS n")
            .await
    }

    async fn number(&self, sql: &str) -> Result<f64, StoreError> {
        let rows = self.session.rows("bench", sql, &[]).await?;
        let number = rows.first().map(|row| row.try_get("n")).transpose()?;
        number.ok_or_else(|| StoreError::Failed("no number was answered".into()))
    }

    /// CPU time of the server's processes, if they are processes of this machine.
    async fn server_cpu(&self) -> Result<Option<Duration>, StoreError> {
        let rows = self
            .session
            .rows(
                "bench",
                "SELECT pid FROM pg_stat_activity WHERE pid IS NOT NULL",
                &[],
            )
            .await?;
        let mut ticks = 0;
        for row in &rows {
            let pid: i32 = row.try_get("pid")?;
            match std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .ok()
                .as_deref()
                .and_then(cpu_ticks)
            {
                Some(own) => ticks += own,
                None => return Ok(None),
            }
        }
        // USER_HZ is 100 on every Linux that is in use.
        Ok(Some(Duration::from_millis(ticks * 10)))
    }
}

/// User and system time in `/proc/PID/stat`, the 14th and 15th field, counted after the name; only of PostgreSQL's processes.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (name, fields) = stat.rsplit_once(')')?;
    if !name.ends_with("(postgres") {
        return None;
    }
    let mut fields = fields.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn own_cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    let micros = usage.map_or(0, |usage| {
        usage.user_time().num_microseconds() + usage.system_time().num_microseconds()
    });
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a number of jobs, far below 2^52"
)]
fn as_float(jobs: i64) -> f64 {
    jobs as f64
}

#[expect(
    clippy::disallowed_methods,
    reason = "waited for at the end of the run"
)]
fn spawned<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(work)
}

fn handlers() -> Handlers {
    let rule = Pattern::new("noop*").ok().map(|pattern| Rule {
        pattern,
        kind: Some(HandlerKind::Noop),
        retry: RetryRule::default(),
        after_lost_commits: None,
        durability: None,
    });
    Handlers {
        rules: rule.into_iter().collect(),
    }
}
