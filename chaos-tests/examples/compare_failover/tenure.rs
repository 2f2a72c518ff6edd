//! tenure, as in the scenarios with switches.

use chaos_tests::{Daemon, Enqueue, Lab, enqueue};

use crate::queue::{CONCURRENCY, Queue};

/// See the module.
#[derive(Debug)]
pub(crate) struct Tenure;

impl Queue for Tenure {
    fn name(&self) -> &'static str {
        "tenure"
    }

    fn install(&self, lab: &Lab) {
        lab.migrate();
    }

    fn start(&self, lab: &Lab, name: &str) -> Daemon {
        let concurrency = format!("worker.concurrency={CONCURRENCY}");
        let set = [
            &lab.state_dir(name),
            &concurrency,
            "worker.lease_ttl=10s",
            "worker.heartbeat=1s",
        ];
        lab.daemon(name, &set)
    }

    fn enqueue(&self) -> Enqueue {
        enqueue
    }

    fn shown(&self) -> &'static str {
        "SELECT id, status, result ->> 'token' FROM tenure.jobs"
    }
}
