//! Many jobs at once: by binary COPY into a temporary table, and from there by one statement.

use std::pin::pin;

use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::claim::{Durability, durability_name};
use crate::error::StoreError;
use crate::session::Session;
use crate::value::RawJson;

/// A job to put in with many others. `None`: as the function `enqueue` has it.
#[derive(Debug, Clone)]
pub struct BulkJob {
    /// Makes the call repeatable; a UUIDv7.
    pub id: Uuid,
    /// Selects the handler.
    pub job_type: String,
    /// JSON.
    pub data: Option<String>,
    /// Lower numbers run first.
    pub priority: Option<i32>,
    /// Not before this time, in any form that PostgreSQL reads.
    pub run_at: Option<String>,
    /// Whose job it is.
    pub tenant: Option<String>,
    /// Admits one live job of this type, tenant and key.
    pub unique_key: Option<String>,
    /// Attempts until it is a dead letter.
    pub max_attempts: Option<i32>,
    /// How long one attempt may take, in any form that PostgreSQL reads.
    pub timeout: Option<String>,
    /// JSON object.
    pub labels: Option<String>,
    /// JSON object.
    pub options: Option<String>,
}

const BEGIN: &str = "BEGIN; SET LOCAL client_min_messages = warning; \
    CREATE TEMPORARY TABLE IF NOT EXISTS tenure_bulk (line int, id uuid, job_type text, data jsonb, priority int, run_at text, tenant text, \
    unique_key text, max_attempts int, timeout text, labels jsonb, options jsonb) ON COMMIT DELETE ROWS";
const COPY: &str = "COPY pg_temp.tenure_bulk FROM STDIN BINARY";
const TYPES: [Type; 12] = [
    Type::INT4,
    Type::UUID,
    Type::TEXT,
    Type::JSONB,
    Type::INT4,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::INT4,
    Type::TEXT,
    Type::JSONB,
    Type::JSONB,
];

impl Session {
    /// Puts jobs in, all or none. Returns how many of them are new: not those whose id is known, or whose key a live job owns. To be
    /// called on a connection of its own, past any pooler.
    ///
    /// # Errors
    /// `Refused` (TN007) and `BadValue` when one of them is wrong; which one is not said. After `Unreachable` and `Timeout` they may
    /// be in.
    pub async fn enqueue_bulk(
        &self,
        jobs: &[BulkJob],
        durability: Option<Durability>,
    ) -> Result<i64, StoreError> {
        let put = self
            .bounded("enqueue", self.put_bulk(jobs, durability))
            .await;
        if put.as_ref().is_err_and(|error| !error.breaks_connection()) {
            self.batch("enqueue", "ROLLBACK").await?;
        }
        put
    }

    async fn put_bulk(
        &self,
        jobs: &[BulkJob],
        durability: Option<Durability>,
    ) -> Result<i64, tokio_postgres::Error> {
        let client = self.client();
        client.batch_execute(BEGIN).await?;
        let sink = client.copy_in(COPY).await?;
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &TYPES));
        for (line, job) in (0i32..).zip(jobs) {
            let json = |text: &Option<String>| text.clone().map(RawJson);
            let (data, labels, options) = (json(&job.data), json(&job.labels), json(&job.options));
            let row: [&(dyn ToSql + Sync); 12] = [
                &line,
                &job.id,
                &job.job_type,
                &data,
                &job.priority,
                &job.run_at,
                &job.tenant,
                &job.unique_key,
                &job.max_attempts,
                &job.timeout,
                &labels,
                &options,
            ];
            writer.as_mut().write(&row).await?;
        }
        writer.finish().await?;
        let sql = self.with_schema(
            "SELECT %enqueue_jobs(array_agg(ROW(b.job_type, b.data, b.priority, b.run_at::timestamptz, b.tenant, b.unique_key, b.max_attempts, \
             b.timeout::interval, b.id, b.labels, b.options)::%new_job ORDER BY b.line), jsonb_strip_nulls(jsonb_build_object('durability', $1::text))) \
             FROM pg_temp.tenure_bulk b",
        );
        let durability = durability.map(durability_name);
        let rows = client
            .query_typed(&sql, &[(&durability, Type::TEXT)])
            .await?;
        let new = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        client.batch_execute("COMMIT").await?;
        Ok(new)
    }
}
