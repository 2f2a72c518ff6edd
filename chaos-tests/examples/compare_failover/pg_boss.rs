//! pg-boss (npm), set up by what its documentation offers for detecting dead workers soon: see `pg-boss.mjs`.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use chaos_tests::{Daemon, Enqueue, Lab};

use crate::queue::{CONCURRENCY, Queue};

/// See the module.
#[derive(Debug)]
pub(crate) struct PgBoss;

impl Queue for PgBoss {
    fn name(&self) -> &'static str {
        "pg-boss"
    }

    fn install(&self, lab: &Lab) {
        let installed = node(lab, "install").output().expect("node runs");
        assert!(
            installed.status.success(),
            "{}",
            String::from_utf8_lossy(&installed.stderr)
        );
    }

    fn start(&self, lab: &Lab, name: &str) -> Daemon {
        let log = lab.path(&format!("{name}.log"));
        let file = File::create(&log).expect("a log can be made");
        let mut command = node(lab, "work");
        command
            .arg(own("handlers/witness.sh"))
            .arg(lab.path("witnesses"))
            .arg(CONCURRENCY.to_string())
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a file can be opened twice"))
            .stderr(file);
        Daemon::spawn(command, log)
    }

    fn enqueue(&self) -> Enqueue {
        enqueue
    }

    fn shown(&self) -> &'static str {
        "SELECT id, state, output ->> 'token' FROM pgboss.job WHERE name = 'work'"
    }
}

/// Its documentation lets others insert into the job table. What `send()` takes over from the queue is taken over here.
fn enqueue(job_type: &str, passes_by: bool) -> String {
    let priority = i32::from(passes_by);
    format!(
        "INSERT INTO pgboss.job (name, data, priority, policy, retry_limit, retry_delay, retry_backoff, expire_seconds, heartbeat_seconds) \
         SELECT name, '{{\"job_type\": \"{job_type}\"}}', {priority}, policy, retry_limit, retry_delay, retry_backoff, expire_seconds, \
         heartbeat_seconds FROM pgboss.queue WHERE name = 'work' RETURNING id"
    )
}

/// `pg-boss.mjs` with what all of its commands take.
fn node(lab: &Lab, what: &str) -> Command {
    let folder = PathBuf::from(
        env::var_os("TENURE_COMPARE_NPM").expect("TENURE_COMPARE_NPM says where npm has installed"),
    );
    // node as a package too: pg-boss may need a newer one than there is.
    let mut command = Command::new(folder.join("node_modules/.bin/node"));
    command
        .arg(own("examples/compare_failover/pg-boss.mjs"))
        .arg(&folder)
        .arg(lab.url())
        .arg(what);
    command
}

fn own(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}
