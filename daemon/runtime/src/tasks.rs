//! The only place that spawns tasks: each has a name and is waited for.
//!
//! | task | ends | on a panic |
//! |---|---|---|
//! | heart (own thread) | after the drain, last of all | the process ends: trust runs out, the guard ends the handlers |
//! | dispatcher, speaker, sweeper, watch over open jobs | after the drain | the process ends |
//! | attempt | with its handler | the attempt failed |

use std::future::Future;

use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

/// Spawns a task that the daemon waits for.
#[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
pub(crate) fn spawn<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(task)
}

/// Spawns one of many tasks that are waited for together.
pub(crate) fn spawn_on(tracker: &TaskTracker, task: impl Future<Output = ()> + Send + 'static) {
    drop(tracker.spawn(task));
}

/// A number in [0, 1), for jitter.
#[must_use]
pub(crate) fn random() -> f64 {
    let bits = uuid::Uuid::new_v4().as_u128() & 0xFFFF_FFFF;
    #[expect(clippy::cast_precision_loss, reason = "32 bits fit")]
    let part = bits as f64 / f64::from(u32::MAX);
    part.min(1.0 - f64::EPSILON)
}
