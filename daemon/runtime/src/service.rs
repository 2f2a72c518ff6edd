//! What the service manager is told (systemd's notification protocol; nothing where there is no `NOTIFY_SOCKET`).
//!
//! READY comes as soon as this process does its part, also while the database is away: a start must not hang on an outage, and
//! claims begin by themselves when it ends. The watchdog is fed by answered heartbeats only, so `WatchdogSec` has to be longer
//! than the outages that a daemon shall live through.

use sd_notify::NotifyState;

/// This process is up.
pub(crate) fn ready() {
    tell(&[
        NotifyState::Ready,
        NotifyState::Status("waiting for the database"),
    ]);
}

/// A heartbeat or registration was answered.
pub(crate) fn alive() {
    tell(&[NotifyState::Watchdog]);
}

/// One sentence for `systemctl status`.
pub(crate) fn status(text: &str) {
    tell(&[NotifyState::Status(text)]);
}

/// The stop has begun.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

fn tell(states: &[NotifyState<'_>]) {
    // A service manager that does not listen is no reason to stop.
    let _ = sd_notify::notify(states);
}
