//! `tenure job`: list, show, explain, wait, cancel, retry.

use serde::Serialize;
use tenure_store::cluster::Retried;
use tenure_store::view::{Attempt, Job, JobFilter, JobLine};

use super::{Acted, Context, explain, waiting};
use crate::arguments::{JobCommand, ListArguments};
use crate::output::{Failure, Report, View};

/// Carries out one of the commands about jobs.
pub(super) async fn job(context: &Context, command: JobCommand) -> Result<(), Failure> {
    let session = context.connect().await?;
    match command {
        JobCommand::List(arguments) => context
            .output
            .print(&Jobs(session.jobs(&filter(arguments)).await?)),
        JobCommand::Show { id } => context.output.print(&Shown(session.job(id).await?)),
        JobCommand::Explain { id } => explain::explain(context, &session, id).await,
        JobCommand::Wait { id, timeout } => waiting::for_end(context, session, id, timeout).await,
        JobCommand::Cancel { id, reason } => {
            let status = session
                .cancel_job(id, reason.as_deref(), &context.who())
                .await?;
            context.output.print(&Acted { id, status })
        }
        JobCommand::Retry {
            switch: Some(epoch_no),
            ..
        } => {
            let retried = session.retry_switch(epoch_no, &context.who()).await?;
            context.output.print(&AllRetried(retried))
        }
        JobCommand::Retry { id, switch: None } => {
            let id = id.ok_or_else(|| Failure::failed("the job's id is missing".to_owned()))?;
            let status = session.retry_job(id, &context.who()).await?;
            context.output.print(&Acted { id, status })
        }
    }
}

fn filter(arguments: ListArguments) -> JobFilter {
    JobFilter {
        status: arguments.status,
        job_type: arguments.job_type,
        tenant: arguments.tenant,
        before: None,
        limit: arguments.limit,
    }
}

#[derive(Serialize)]
struct AllRetried(Vec<Retried>);

impl Report for AllRetried {
    fn view(&self) -> View {
        let row = |job: &Retried| vec![job.job_id.to_string(), job.answer.clone()];
        View::Rows(
            &["ID", "ANSWER"],
            self.0.iter().map(row).collect(),
            "In this switch no end was written again.",
        )
    }
}

#[derive(Serialize)]
struct Jobs(Vec<JobLine>);

impl Report for Jobs {
    fn view(&self) -> View {
        let row = |job: &JobLine| {
            vec![
                job.id.to_string(),
                job.job_type.clone(),
                job.status.clone(),
                attempts(job),
                job.created_at.clone(),
                reason(job),
            ]
        };
        View::Rows(
            &[
                "ID",
                "TYPE",
                "STATUS",
                "ATTEMPTS",
                "CREATED",
                "WAITS FOR / ERROR",
            ],
            self.0.iter().map(row).collect(),
            "No jobs.",
        )
    }
}

#[derive(Serialize)]
struct Shown(Job);

impl Report for Shown {
    fn view(&self) -> View {
        let Job { line, .. } = &self.0;
        let mut fields = vec![
            ("id", line.id.to_string()),
            ("type", line.job_type.clone()),
            ("status", line.status.clone()),
        ];
        let mut optional =
            |name, text: Option<String>| fields.extend(text.map(|text| (name, text)));
        optional("waiting for", line.waiting_for.clone());
        optional("tenant", Some(line.tenant_id.clone()));
        optional("priority", Some(line.priority.to_string()));
        optional("attempts", Some(attempts(line)));
        optional("unique key", line.unique_key.clone());
        optional(
            "labels",
            Some(self.0.labels.0.clone()).filter(|labels| labels != "{}"),
        );
        optional("created", Some(line.created_at.clone()));
        optional("run at", Some(line.run_at.clone()));
        optional("started", line.started_at.clone());
        optional("ended", line.completed_at.clone());
        optional("worker", line.worker_id.map(|worker| worker.to_string()));
        optional("data", Some(self.0.data.0.clone()));
        optional(
            "result",
            self.0.result.as_ref().map(|result| result.0.clone()),
        );
        optional("error", line.last_error.clone());
        for attempt in &self.0.history {
            fields.push(("attempt", told(attempt)));
            fields.extend(
                attempt
                    .log_tail
                    .clone()
                    .filter(|log| !log.is_empty())
                    .map(|log| ("log", log)),
            );
        }
        View::Fields(fields)
    }
}

/// Why it does not run: what it died of, or what it waits for.
fn reason(job: &JobLine) -> String {
    let waits = job.waiting_for.clone().filter(|_| job.status != "failed");
    waits.or_else(|| job.last_error.clone()).unwrap_or_default()
}

fn attempts(job: &JobLine) -> String {
    match job.max_attempts {
        Some(most) => format!("{}/{most}", job.attempts),
        None => job.attempts.to_string(),
    }
}

/// One attempt in a sentence.
fn told(attempt: &Attempt) -> String {
    let mut text = attempt
        .attempt
        .map_or_else(String::new, |number| format!("{number}, "));
    text.push_str(&attempt.outcome);
    if !attempt.applied {
        text.push_str(" (too late: it had lost its lease, and nothing was changed)");
    }
    text.push_str(&format!(" at {}", attempt.finished_at));
    if let Some(code) = attempt.exit_code {
        text.push_str(&format!(", exit code {code}"));
    }
    if let Some(status) = attempt.http_status {
        text.push_str(&format!(", HTTP status {status}"));
    }
    if let Some(worker) = attempt.worker_id {
        text.push_str(&format!(", by worker {worker}"));
    }
    if let Some(error) = &attempt.error {
        text.push_str(&format!(": {error}"));
    }
    text
}
