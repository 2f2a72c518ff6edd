//! What probes ask: does the process live, may it get work.

use std::time::Duration;

use serde::Serialize;
use tenure_runtime::status::Status;

/// The answer of `/readyz`: ready is a daemon whose last heartbeat was confirmed lately, and that is not stopping. A
/// confirmed heartbeat says all at once: the database is there, takes writes, has the schema, and knows this worker.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Readiness {
    pub(crate) ready: bool,
    draining: bool,
    /// Whether a primary answers.
    primary: bool,
    heartbeat_age_seconds: Option<f64>,
    /// Why it is not ready.
    reason: Option<String>,
}

impl Readiness {
    /// How `status` stands, if a heartbeat may be as old as `limit`.
    pub(crate) fn of(status: &Status, limit: Duration) -> Self {
        let age = status.heartbeat_age();
        let late = || {
            status
                .reason()
                .unwrap_or_else(|| "the database has not confirmed a heartbeat lately".to_owned())
        };
        let reason = match age {
            _ if status.is_draining() => Some("the daemon is stopping".to_owned()),
            Some(age) if age <= limit => None,
            _ => Some(late()),
        };
        Self {
            ready: reason.is_none(),
            draining: status.is_draining(),
            primary: status.has_primary(),
            heartbeat_age_seconds: age.map(|age| age.as_secs_f64()),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use tenure_core::time::Mono;
    use tenure_runtime::guard;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn ready_is_confirmed_and_not_stopping() {
        let status = Status::default();
        assert!(!Readiness::of(&status, LIMIT).ready);
        status.confirmed(Mono::from_millis(guard::now_ms()));
        assert!(Readiness::of(&status, LIMIT).ready);
        status.trouble(tenure_runtime::status::Part::Start, &"refused");
        assert!(
            Readiness::of(&status, LIMIT).ready,
            "a short trouble is no reason to take work away"
        );
        let late = Readiness::of(&status, Duration::ZERO);
        assert!(late.ready || late.reason.is_some_and(|reason| reason.contains("refused")));
        status.drain();
        assert!(!Readiness::of(&status, LIMIT).ready);
    }
}
