//! How the daemon is, for readiness and metrics. Written by the tasks, read by the API.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_core::time::Mono;
use tracing::{error, info};

use crate::clock;
use crate::events;
use crate::service;

/// See the module.
#[derive(Debug, Default)]
pub struct Status {
    confirmed: Mutex<Option<Mono>>,
    draining: AtomicBool,
    trouble: Mutex<Option<(Mono, String)>>,
}

impl Status {
    /// A heartbeat or registration that was sent at `sent` has been answered.
    pub fn confirmed(&self, sent: Mono) {
        *lock(&self.confirmed) = Some(sent);
        service::alive();
        if let Some((since, _)) = lock(&self.trouble).take() {
            service::status("working");
            info!(
                seconds = (clock::now() - since).as_secs_f64(),
                "The database answers again."
            );
        }
    }

    /// The database did not answer, or refused. Logged when it begins and when the reason changes, not each time.
    pub fn trouble(&self, what: &str, error: &impl std::fmt::Display) {
        let text = format!("{what}: {error}");
        let mut trouble = lock(&self.trouble);
        if trouble.as_ref().is_none_or(|(_, before)| *before != text) {
            error!(error = %error, "{what}; trying on.");
            service::status(&text);
            let since = trouble
                .as_ref()
                .map_or_else(clock::now, |(since, _)| *since);
            *trouble = Some((since, text));
        }
    }

    /// Since the last confirmed heartbeat was sent; `None`: there was none.
    pub fn heartbeat_age(&self) -> Option<Duration> {
        lock(&self.confirmed).map(|sent| clock::now() - sent)
    }

    /// What keeps the daemon from the database, if anything does.
    pub fn reason(&self) -> Option<String> {
        lock(&self.trouble).as_ref().map(|(_, text)| text.clone())
    }

    /// The stop has begun.
    pub fn drain(&self) {
        service::stopping();
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether the stop has begun.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Writes what is only computed when somebody asks.
    pub fn write_metrics(&self) {
        events::heartbeat_age(self.heartbeat_age());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
