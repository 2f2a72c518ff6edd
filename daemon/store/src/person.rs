//! What people and their programs ask of the database: put jobs in, act on them, decide about dead letters.
//!
//! All of it passes through the functions of the schema, which alone know what is allowed in which state. Every call is
//! one statement of its own: it is carried out whole, or not at all. Statements are unnamed, so a pooler may stand between.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};
use uuid::Uuid;

use crate::claim::{Durability, durability_name};
use crate::error::StoreError;
use crate::session::{Parameters, Session};

/// A job to put in. `None`: as the function `enqueue` has it.
#[derive(Debug, Clone, Default)]
pub struct NewJob {
    /// Selects the handler.
    pub job_type: String,
    /// JSON.
    pub data: String,
    /// Lower numbers run first.
    pub priority: i32,
    /// Not before this time, in any form that PostgreSQL reads.
    pub run_at: Option<String>,
    /// Not before this much later than now, by the database's clock.
    pub after: Option<Duration>,
    /// Whose job it is.
    pub tenant: String,
    /// Admits one live job of this type, tenant and key.
    pub unique_key: Option<String>,
    /// Attempts until it is a dead letter.
    pub max_attempts: Option<i32>,
    /// How long one attempt may take.
    pub timeout: Option<Duration>,
    /// A UUIDv7 that makes the call repeatable.
    pub id: Option<Uuid>,
    /// JSON object of texts.
    pub labels: String,
    /// How safe it has to be before it counts as put in.
    pub durability: Option<Durability>,
}

/// What a person decides about a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// The job runs again.
    Retry,
    /// The job is given up.
    Discard,
    /// A person did what the job was for.
    Fixed,
}

impl Session {
    /// Puts one job in and returns its id, or that of the live job which owns its unique key.
    ///
    /// # Errors
    /// `Refused` (TN007) and `BadValue` say what is wrong with the job.
    pub async fn enqueue(&self, job: &NewJob) -> Result<Uuid, StoreError> {
        let after = job.after.map(milliseconds);
        let timeout = job.timeout.map(milliseconds);
        let durability = job.durability.map(durability_name);
        let rows = self
            .rows(
                "enqueue",
                "SELECT %enqueue(job_type => $1, data => $2::text::jsonb, priority => $3, \
                 run_at => coalesce($4::text::timestamptz, now() + $5 * interval '1 ms', now()), tenant => $6, \
                 unique_key => $7, max_attempts => $8, timeout => $9 * interval '1 ms', id => $10, labels => $11::text::jsonb, \
                 options => jsonb_strip_nulls(jsonb_build_object('durability', $12::text)))",
                &[
                    (&job.job_type, Type::TEXT),
                    (&job.data, Type::TEXT),
                    (&job.priority, Type::INT4),
                    (&job.run_at, Type::TEXT),
                    (&after, Type::INT8),
                    (&job.tenant, Type::TEXT),
                    (&job.unique_key, Type::TEXT),
                    (&job.max_attempts, Type::INT4),
                    (&timeout, Type::INT8),
                    (&job.id, Type::UUID),
                    (&job.labels, Type::TEXT),
                    (&durability, Type::TEXT),
                ],
            )
            .await?;
        only(&rows)
    }

    /// Puts many jobs in, all or none: a JSON array of objects with the parameters of `enqueue` as keys. Returns an id for
    /// each, in order.
    ///
    /// # Errors
    /// `Refused` (TN007) and `BadValue` say what is wrong with which job.
    pub async fn enqueue_many(&self, jobs: &str) -> Result<Vec<Uuid>, StoreError> {
        let rows = self
            .rows(
                "enqueue",
                "SELECT %enqueue_many($1::text::jsonb)",
                &[(&jobs, Type::TEXT)],
            )
            .await?;
        rows.iter()
            .map(|row| row.try_get(0).map_err(StoreError::from))
            .collect()
    }

    /// Takes a job back. Returns its status then, or `stopping` while its handler is being stopped.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is no such job.
    pub async fn cancel_job(
        &self,
        job: Uuid,
        reason: Option<&str>,
        by: &str,
    ) -> Result<String, StoreError> {
        let sql = "SELECT %cancel($1, $2, jsonb_build_object('by', $3::text))";
        self.said(
            "cancel",
            sql,
            &[(&job, Type::UUID), (&reason, Type::TEXT), (&by, Type::TEXT)],
        )
        .await
    }

    /// Runs a failed, discarded or cancelled job again. Returns its status then.
    ///
    /// # Errors
    /// `Refused`: TN005 no such job, TN006 it has not ended so.
    pub async fn retry_job(&self, job: Uuid, by: &str) -> Result<String, StoreError> {
        let sql = "SELECT %retry($1, jsonb_build_object('by', $2::text))";
        self.said("retry", sql, &[(&job, Type::UUID), (&by, Type::TEXT)])
            .await
    }

    /// Decides about a dead letter; `data` (JSON) goes with [`Decision::Retry`] only. Returns the job's status then.
    ///
    /// # Errors
    /// `Refused`: TN005 no such letter, TN006 it was decided before.
    pub async fn review_dead_letter(
        &self,
        dead_letter: Uuid,
        decision: Decision,
        reviewer: &str,
        note: Option<&str>,
        data: Option<&str>,
    ) -> Result<String, StoreError> {
        let action = match decision {
            Decision::Retry => "retry",
            Decision::Discard => "discard",
            Decision::Fixed => "fixed",
        };
        self.said(
            "review",
            "SELECT %review_dead_letter($1, $2, $3, $4, $5::text::jsonb)",
            &[
                (&dead_letter, Type::UUID),
                (&action, Type::TEXT),
                (&reviewer, Type::TEXT),
                (&note, Type::TEXT),
                (&data, Type::TEXT),
            ],
        )
        .await
    }

    /// Asks a worker to finish what it runs and to end.
    ///
    /// # Errors
    /// `Refused` (TN005) when no such worker lives.
    pub async fn drain_worker(&self, worker: Uuid) -> Result<(), StoreError> {
        self.rows(
            "drain",
            "SELECT %drain_worker($1)",
            &[(&worker, Type::UUID)],
        )
        .await
        .map(|_| ())
    }

    async fn said(
        &self,
        what: &'static str,
        sql: &str,
        parameters: Parameters<'_>,
    ) -> Result<String, StoreError> {
        only(&self.rows(what, sql, parameters).await?)
    }
}

/// The one value of a statement that answers with one.
fn only<'r, T: FromSql<'r>>(rows: &'r [Row]) -> Result<T, StoreError> {
    match rows {
        [row] => row.try_get(0).map_err(StoreError::from),
        _ => Err(StoreError::Failed(format!(
            "{} rows came where one was expected",
            rows.len()
        ))),
    }
}

/// Whole milliseconds, as the database takes them.
fn milliseconds(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}
