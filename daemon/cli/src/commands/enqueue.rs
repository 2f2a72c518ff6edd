//! `tenure enqueue` of one job.

use serde::Serialize;
use tenure_store::claim::Durability;
use tenure_store::person::NewJob;
use uuid::Uuid;

use super::{Context, bulk, payload, waiting};
use crate::arguments::{DurabilityArgument, EnqueueArguments};
use crate::output::{Failure, Report, View};

/// Puts a job in, and waits for its end if asked.
pub(super) async fn enqueue(context: &Context, arguments: EnqueueArguments) -> Result<(), Failure> {
    let durability = arguments.durability.map(|durability| match durability {
        DurabilityArgument::Local => Durability::Local,
        DurabilityArgument::Replicated => Durability::Replicated,
    });
    if arguments.bulk.from.is_some() {
        let job_type = arguments.job_type.as_deref();
        return bulk::enqueue(context, job_type, durability, &arguments.bulk).await;
    }
    let job = NewJob {
        data: payload::read(&arguments.data)?,
        job_type: arguments.job_type.unwrap_or_default(),
        priority: arguments.priority,
        run_at: arguments.run_at,
        after: arguments.after,
        tenant: arguments.tenant,
        unique_key: arguments.unique_key,
        max_attempts: arguments.max_attempts,
        timeout: arguments.timeout,
        id: arguments.id,
        labels: serde_json::Value::from_iter(arguments.labels).to_string(),
        durability,
    };
    let session = context.connect().await?;
    let id = session.enqueue(&job).await?;
    if !arguments.wait {
        return context.output.print(&Enqueued { id });
    }
    context.note(&format!("job {id} is in; Ctrl-C leaves it alone"));
    waiting::for_end(context, session, id, None).await
}

#[derive(Serialize)]
struct Enqueued {
    id: Uuid,
}

impl Report for Enqueued {
    fn view(&self) -> View {
        View::Line(self.id.to_string())
    }
}
