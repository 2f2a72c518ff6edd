//! What people and their programs see of jobs, dead letters, workers and numbers.
//!
//! Read from the views of the schema (see `look`). Data and results pass through as the JSON text that PostgreSQL gives, digits exact;
//! times are texts in UTC (RFC 3339). Lists leave data and results out.

use serde::ser::Error as _;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use tokio_postgres::Row;
use uuid::Uuid;

use crate::value::RawJson;

/// The statuses of jobs.
pub const STATUSES: [&str; 8] = [
    "scheduled",
    "blocked",
    "pending",
    "running",
    "completed",
    "failed",
    "discarded",
    "cancelled",
];

/// One job as lists show it.
#[derive(Debug, Clone, Serialize)]
pub struct JobLine {
    /// The job.
    pub id: Uuid,
    /// Selects the handler.
    pub job_type: String,
    /// Whose job it is.
    pub tenant_id: String,
    /// Lower numbers run first.
    pub priority: i32,
    /// scheduled, blocked, pending, running, completed, failed, discarded or cancelled.
    pub status: String,
    /// Attempts used.
    pub attempts: i32,
    /// Attempts until it is a dead letter; `None`: as the handler's policy says.
    pub max_attempts: Option<i32>,
    /// Not before.
    pub run_at: String,
    /// When it was put in.
    pub created_at: String,
    /// When its latest attempt began.
    pub started_at: Option<String>,
    /// When it ended.
    pub completed_at: Option<String>,
    /// Who runs it, or ran it last.
    pub worker_id: Option<Uuid>,
    /// What its latest failure said.
    pub last_error: Option<String>,
    /// The key that admits one live job.
    pub unique_key: Option<String>,
    /// Why it does not run yet.
    pub waiting_for: Option<String>,
}

/// Everything about one job.
#[derive(Debug, Clone, Serialize)]
pub struct Job {
    /// What lists show.
    #[serde(flatten)]
    pub line: JobLine,
    /// A physical part of the queue.
    pub shard: String,
    /// Labels, a JSON object.
    pub labels: RawJson,
    /// What the handler gets.
    pub data: RawJson,
    /// What the handler answered.
    pub result: Option<RawJson>,
    /// The attempts that ended, the first one first.
    pub history: Vec<Attempt>,
}

/// One attempt that ended.
#[derive(Debug, Clone, Serialize)]
pub struct Attempt {
    /// Its number; `None` for a statement that came too late to count.
    pub attempt: Option<i32>,
    /// Who ran it.
    pub worker_id: Option<Uuid>,
    /// When it began.
    pub started_at: Option<String>,
    /// When it ended.
    pub finished_at: String,
    /// completed, failed, released, snoozed, lost, cancelled …
    pub outcome: String,
    /// `false`: it had lost its lease before and changed nothing.
    pub applied: bool,
    /// The exit code of its process.
    pub exit_code: Option<i32>,
    /// The HTTP status that answered it.
    pub http_status: Option<i32>,
    /// What went wrong.
    pub error: Option<String>,
    /// The end of its log.
    pub log_tail: Option<String>,
}

/// How a job that was waited for stands.
#[derive(Debug, Clone, Serialize)]
pub struct Ending {
    /// The job.
    pub id: Uuid,
    /// Its status.
    pub status: String,
    /// What the handler answered.
    pub result: Option<RawJson>,
    /// What its latest failure said.
    pub last_error: Option<String>,
    /// Why it does not run yet.
    pub waiting_for: Option<String>,
}

/// One death of a job.
#[derive(Debug, Clone, Serialize)]
pub struct DeadLetter {
    /// The dead letter.
    pub id: Uuid,
    /// Its job.
    pub original_job_id: Uuid,
    /// The job's type.
    pub job_type: String,
    /// What the handler got; left out of lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<RawJson>,
    /// Attempts used.
    pub attempts: i32,
    /// What the last failure said.
    pub last_error: Option<String>,
    /// When it died.
    pub failed_at: String,
    /// Who decided.
    pub reviewed_by: Option<String>,
    /// When.
    pub reviewed_at: Option<String>,
    /// What: retry, discard or fixed.
    pub review_action: Option<String>,
    /// Why.
    pub review_note: Option<String>,
}

/// One running daemon.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerLine {
    /// Its identity.
    pub id: Uuid,
    /// Its label.
    pub name: String,
    /// What a release routes on.
    pub version: String,
    /// live, draining, stopped or lost.
    pub status: String,
    /// When it started.
    pub started_at: String,
    /// When the database last heard of it.
    pub last_heartbeat: Option<String>,
    /// Jobs that it runs.
    pub in_flight: i32,
    /// Jobs that it can run at once.
    pub concurrency: i32,
    /// The patterns of job types that it can run.
    pub job_types: Vec<String>,
}

/// The numbers of one job type.
#[derive(Debug, Clone, Serialize)]
pub struct Numbers {
    /// The type.
    pub job_type: String,
    /// Jobs that could run now.
    pub pending_count: i64,
    /// Jobs that run.
    pub running_count: i64,
    /// Dead letters that wait for review.
    pub failed_count: i64,
    /// How long jobs ran lately, on average, in seconds.
    pub avg_duration_sec: Option<f64>,
    /// For how long the oldest pending job has been ready, in seconds.
    pub oldest_pending_age_sec: Option<f64>,
}

/// Which jobs a list shows: all that match every part that is there, the newest first.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Of this status.
    pub status: Option<String>,
    /// Of this type.
    pub job_type: Option<String>,
    /// Of this tenant.
    pub tenant: Option<String>,
    /// Older than this job, which was the last of the page before.
    pub before: Option<Uuid>,
    /// At most so many.
    pub limit: i64,
}

/// As the very text that PostgreSQL gave: no number passes through a float.
impl Serialize for RawJson {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::from_str::<&RawValue>(&self.0)
            .map_err(S::Error::custom)?
            .serialize(serializer)
    }
}

pub(crate) fn job_line(row: &Row) -> Result<JobLine, tokio_postgres::Error> {
    Ok(JobLine {
        id: row.try_get("id")?,
        job_type: row.try_get("job_type")?,
        tenant_id: row.try_get("tenant_id")?,
        priority: row.try_get("priority")?,
        status: row.try_get("status")?,
        attempts: row.try_get("attempts")?,
        max_attempts: row.try_get("max_attempts")?,
        run_at: row.try_get("run_at")?,
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        completed_at: row.try_get("completed_at")?,
        worker_id: row.try_get("worker_id")?,
        last_error: row.try_get("last_error")?,
        unique_key: row.try_get("unique_key")?,
        waiting_for: row.try_get("waiting_for")?,
    })
}

pub(crate) fn job(row: &Row) -> Result<Job, tokio_postgres::Error> {
    Ok(Job {
        line: job_line(row)?,
        shard: row.try_get("shard")?,
        labels: row.try_get("labels")?,
        data: row.try_get("data")?,
        result: row.try_get("result")?,
        history: Vec::new(),
    })
}

pub(crate) fn attempt(row: &Row) -> Result<Attempt, tokio_postgres::Error> {
    Ok(Attempt {
        attempt: row.try_get("attempt")?,
        worker_id: row.try_get("worker_id")?,
        started_at: row.try_get("started_at")?,
        finished_at: row.try_get("finished_at")?,
        outcome: row.try_get("outcome")?,
        applied: row.try_get("applied")?,
        exit_code: row.try_get("exit_code")?,
        http_status: row.try_get("http_status")?,
        error: row.try_get("error")?,
        log_tail: row.try_get("log_tail")?,
    })
}

pub(crate) fn ending(row: &Row) -> Result<Ending, tokio_postgres::Error> {
    Ok(Ending {
        id: row.try_get("id")?,
        status: row.try_get("status")?,
        result: row.try_get("result")?,
        last_error: row.try_get("last_error")?,
        waiting_for: row.try_get("waiting_for")?,
    })
}

pub(crate) fn dead_letter(row: &Row) -> Result<DeadLetter, tokio_postgres::Error> {
    Ok(DeadLetter {
        id: row.try_get("id")?,
        original_job_id: row.try_get("original_job_id")?,
        job_type: row.try_get("job_type")?,
        data: row.try_get("data")?,
        attempts: row.try_get("attempts")?,
        last_error: row.try_get("last_error")?,
        failed_at: row.try_get("failed_at")?,
        reviewed_by: row.try_get("reviewed_by")?,
        reviewed_at: row.try_get("reviewed_at")?,
        review_action: row.try_get("review_action")?,
        review_note: row.try_get("review_note")?,
    })
}

pub(crate) fn worker(row: &Row) -> Result<WorkerLine, tokio_postgres::Error> {
    Ok(WorkerLine {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        version: row.try_get("version")?,
        status: row.try_get("status")?,
        started_at: row.try_get("started_at")?,
        last_heartbeat: row.try_get("last_heartbeat")?,
        in_flight: row.try_get("in_flight")?,
        concurrency: row.try_get("concurrency")?,
        job_types: row.try_get("job_types")?,
    })
}

pub(crate) fn numbers(row: &Row) -> Result<Numbers, tokio_postgres::Error> {
    Ok(Numbers {
        job_type: row.try_get("job_type")?,
        pending_count: row.try_get("pending_count")?,
        running_count: row.try_get("running_count")?,
        failed_count: row.try_get("failed_count")?,
        avg_duration_sec: row.try_get("avg_duration_sec")?,
        oldest_pending_age_sec: row.try_get("oldest_pending_age_sec")?,
    })
}
