//! The sweeper: once a second it recovers what timed out and makes due jobs ready, unless another worker just did.

use std::sync::Arc;
use std::time::Duration;

use tenure_store::error::StoreError;
use tenure_store::session::Db;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::events;
use crate::leases::Leases;
use crate::status::{Part, Status};
use crate::tasks::random;

/// Between sweeps.
const EVERY: Duration = Duration::from_secs(1);

/// Between two looks for due jobs.
const SOONEST: Duration = Duration::from_millis(5);

/// Sweeps until `stop` is cancelled.
pub(crate) async fn run(db: Db, leases: Arc<Leases>, status: Arc<Status>, stop: CancellationToken) {
    let mut wait = Duration::ZERO;
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = stop.cancelled() => return,
        }
        wait = sweep(&db, &leases, &status).await;
    }
}

/// Sweeps once, and says when to do it again.
async fn sweep(db: &Db, leases: &Leases, status: &Status) -> Duration {
    // Jitter, so that many workers do not ask in step.
    let next = EVERY.mul_f64(0.9 + random() * 0.2);
    let Some((worker, epoch)) = leases.member() else {
        return next;
    };
    let swept = async { db.session().await?.sweep(epoch).await };
    match swept.await {
        Ok(swept) => {
            status.fine(Part::Sweeps);
            if swept.recovered > 0 || swept.lost > 0 {
                events::recovered(swept.recovered, swept.lost);
            }
            if let Some(due) = swept.next_due.filter(|due| *due < next) {
                return promote_when_due(db, leases, status, due, next).await;
            }
        }
        Err(error) => {
            leases.failed(worker, epoch, &error);
            // Another epoch or a lost registration is the heart's business.
            if !matches!(error, StoreError::OtherEpoch(_) | StoreError::DeadWorker(_)) {
                status.trouble(Part::Sweeps, &error);
            }
        }
    }
    next
}

/// Between two sweeps: makes jobs ready at the moment when they are due. Returns what is left until the next sweep.
async fn promote_when_due(
    db: &Db,
    leases: &Leases,
    status: &Status,
    due: Duration,
    next: Duration,
) -> Duration {
    let end = Instant::now() + next;
    let mut at = Instant::now() + due;
    while at < end {
        tokio::time::sleep_until(at).await;
        let Some((_, epoch)) = leases.member() else {
            break;
        };
        match async { db.session().await?.promote(epoch).await }.await {
            Ok((promoted, Some(due))) if promoted > 0 => at = Instant::now() + due.max(SOONEST),
            // Nothing was due after all, or it is locked: the next sweep looks again.
            Ok(_) => break,
            Err(error) => {
                status.trouble(Part::Sweeps, &error);
                break;
            }
        }
    }
    end.saturating_duration_since(Instant::now())
}
