//! The local clock: the one that the guard process reads too, and that goes on while the machine sleeps.

use std::time::Duration;

use tenure_core::time::Mono;

use crate::guard;

/// Now.
#[must_use]
pub(crate) fn now() -> Mono {
    Mono::from_millis(guard::now_ms())
}

/// Sleeps until `at`; `None`: for ever.
pub(crate) async fn sleep_until(at: Option<Mono>) {
    match at {
        // Not one long sleep: tokio's clock stands still while the machine does, this one goes on.
        Some(at) => loop {
            let left = at - now();
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(Duration::from_secs(10))).await;
        },
        None => std::future::pending().await,
    }
}
