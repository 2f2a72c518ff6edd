//! Numbers of the whole queue for `/metrics`: asked of the database at most once in a while, and never waited for long, however
//! often somebody looks.

use std::time::Duration;

use tenure_runtime::events;
use tenure_store::session::Db;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// For so long an answer serves.
const FRESH: Duration = Duration::from_secs(5);
/// Longer than this nobody waits for it: the last numbers stay.
const PATIENCE: Duration = Duration::from_secs(2);

/// When the numbers were asked for last.
#[derive(Debug, Default)]
pub struct Queue(Mutex<Option<Instant>>);

impl Queue {
    /// Brings the numbers up to date, if they are old and the database answers.
    pub(crate) async fn write_metrics(&self, db: &Db) {
        let mut asked = self.0.lock().await;
        if asked.is_some_and(|asked| asked.elapsed() < FRESH) {
            return;
        }
        *asked = Some(Instant::now());
        let numbers = async { db.session().await?.numbers().await };
        if let Ok(Ok(numbers)) = timeout(PATIENCE, numbers).await {
            for of in numbers {
                events::queue(
                    &of.job_type,
                    of.pending_count,
                    of.running_count,
                    of.failed_count,
                    of.oldest_pending_age_sec,
                );
            }
        }
    }
}
