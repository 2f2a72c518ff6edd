//! One attempt: the handler runs, and what its end means is handed on.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use serde::Deserialize;
use tenure_protocol::verdict::{Ended, Verdict};
use tenure_store::session::Db;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::circuits::Circuits;
use crate::dispatch::Note;
use crate::events;
use crate::exec::{Executor, StopSignal, Task};
use crate::held::Held;
use crate::lanes::Route;
use crate::leases::Leases;
use crate::open;
use crate::stats::Stats;
use crate::tasks::random;

/// What attempts work with.
#[derive(Clone)]
pub(crate) struct Bench {
    /// Runs handlers.
    pub executor: Executor,
    /// To the database, where a job is accepted.
    pub db: Db,
    /// Learns of the end.
    pub leases: Arc<Leases>,
    /// Learns how the handler did.
    pub circuits: Arc<Circuits>,
    /// Learns how long it took.
    pub stats: Arc<Stats>,
    /// Learns of the free slot.
    pub notes: mpsc::Sender<Note>,
}

/// A job that its handler never saw is left to others for so long.
const LEFT_TO_OTHERS: Duration = Duration::from_secs(5);

/// Runs one attempt to its end, perhaps as a `probe` of its handler.
pub(crate) async fn run(
    bench: Bench,
    held: Arc<Held>,
    route: Route,
    stop: StopSignal,
    probe: bool,
) {
    #[derive(Deserialize)]
    struct Options {
        traceparent: Option<String>,
        watermark: Option<String>,
    }
    let job = &held.job;
    let options = serde_json::from_str::<Options>(&job.options).ok();
    let in_series = options.as_ref().is_some_and(|it| it.watermark.is_some());
    let task = Task {
        job: job.id.0,
        job_type: job.job_type.clone(),
        attempt: number(job.attempt),
        max_attempts: number(job.max_attempts),
        token: job.token.0,
        tenant: job.tenant.clone(),
        data: job.data.clone(),
        enqueued_at: humantime::format_rfc3339_micros(job.created_at).to_string(),
        alone: job.alone,
        watermark: job.watermark.clone(),
        traceparent: options.and_then(|options| options.traceparent),
        timeout: job.timeout.unwrap_or(route.timeout),
    };
    let started = Instant::now();
    let told = stop.clone();
    let ended = AssertUnwindSafe(bench.executor.run(&route.handler, &task, stop))
        .catch_unwind()
        .await
        .unwrap_or_else(|_| {
            Ended::because(
                Verdict::RETRY,
                "tenure itself failed while it ran this attempt; please report this",
            )
        });
    let ended = if in_series {
        ended
    } else {
        ended.outside_series()
    };
    let took = started.elapsed();
    let (open, closed) = bench.circuits.ended(&route.section, probe, &ended);
    if closed {
        let _ = bench.notes.send(Note::Woken).await;
    }
    if let (Verdict::Held, Some(accepts)) = (ended.verdict, route.accepts) {
        open::accept(&bench, &held, &route, accepts, told).await;
        let _ = bench.notes.send(Note::Freed(route.pool)).await;
        return;
    }
    if route.accepts.is_some() {
        bench.leases.open().not_accepted(&route.section);
    }
    events::finished(&route.job_type, outcome(&ended.verdict), took);
    bench.stats.ended(job.lane, took);
    let retry_in =
        |not_before: Option<Duration>| route.retry.delay_after(job.attempt, random(), not_before);
    let statement = match open && !ended.reached {
        // It is the handler that is away: that costs the job nothing.
        true => held.not_seen(LEFT_TO_OTHERS, ended.error),
        false => held.ended(ended, retry_in),
    };
    bench.leases.ended(statement);
    // The dispatcher ends only after all attempts.
    let _ = bench.notes.send(Note::Freed(route.pool)).await;
}

fn outcome(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Done => "completed",
        Verdict::Retry { .. } => "failed",
        Verdict::Dead => "dead",
        Verdict::Snooze(_) => "snoozed",
        Verdict::Stopped => "released",
        Verdict::Held => "accepted",
        Verdict::Crashed => "crashed",
    }
}

fn number(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}
