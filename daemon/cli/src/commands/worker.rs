//! `tenure worker`: list, drain.

use serde::Serialize;
use tenure_store::view::WorkerLine;

use super::{Acted, Context};
use crate::arguments::WorkerCommand;
use crate::output::{Failure, Report, View};

/// Carries out one of the commands about workers.
pub(super) async fn worker(context: &Context, command: WorkerCommand) -> Result<(), Failure> {
    let session = context.connect().await?;
    match command {
        WorkerCommand::List { all } => context.output.print(&Workers(session.workers(all).await?)),
        WorkerCommand::Drain { id } => {
            session.drain_worker(id).await?;
            context.output.print(&Acted {
                id,
                status: "draining".to_owned(),
            })
        }
    }
}

#[derive(Serialize)]
struct Workers(Vec<WorkerLine>);

impl Report for Workers {
    fn view(&self) -> View {
        let row = |worker: &WorkerLine| {
            vec![
                worker.id.to_string(),
                worker.name.clone(),
                worker.version.clone(),
                worker.status.clone(),
                format!("{}/{}", worker.in_flight, worker.concurrency),
                worker.last_heartbeat.clone().unwrap_or_default(),
                worker.job_types.join(" "),
            ]
        };
        View::Rows(
            &[
                "ID",
                "NAME",
                "VERSION",
                "STATUS",
                "RUNNING",
                "LAST HEARTBEAT",
                "JOB TYPES",
            ],
            self.0.iter().map(row).collect(),
            "No worker is running. Start one with `tenure run`.",
        )
    }
}
