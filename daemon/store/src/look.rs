//! The statements behind [`crate::view`].
//!
//! They read the views of the schema, which know what each role may see, and cost what they show: lists look among the
//! newest first.

use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::error::StoreError;
use crate::session::{Parameters, Session};
use crate::view::{self, DeadLetter, Ending, Job, JobFilter, JobLine, Numbers, WorkerLine};

/// How far back a list of jobs looks at first.
const FIRST_WINDOW_MS: u64 = 1000;

impl Session {
    /// Lists jobs.
    ///
    /// Looks among the newest first, and further back only while they are too few: so a page costs what it shows, not what
    /// the queue holds.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn jobs(&self, filter: &JobFilter) -> Result<Vec<JobLine>, StoreError> {
        let newest = match filter.before.and_then(|id| id.get_timestamp()) {
            Some(time) => time.to_unix().0 * 1000,
            None => self.now_ms().await?,
        };
        let mut window = FIRST_WINDOW_MS;
        loop {
            let oldest = newest.saturating_sub(window);
            let lines = self.jobs_since(filter, first_id_at(oldest)).await?;
            if oldest == 0 || i64::try_from(lines.len()).is_ok_and(|count| count >= filter.limit) {
                return Ok(lines);
            }
            window = window.saturating_mul(8);
        }
    }

    /// Those of the jobs whose id is at least `oldest`. The ids are found first: a job's obstacle and error are looked up
    /// for those alone that are shown.
    async fn jobs_since(
        &self,
        filter: &JobFilter,
        oldest: Uuid,
    ) -> Result<Vec<JobLine>, StoreError> {
        let sql = format!(
            "SELECT {} FROM %jobs WHERE id = ANY (ARRAY(SELECT id FROM %jobs WHERE ($1::text IS NULL OR status = $1) \
             AND ($2::text IS NULL OR job_type = $2) AND ($3::text IS NULL OR tenant_id = $3) \
             AND ($4::uuid IS NULL OR id < $4) AND id >= $5 ORDER BY id DESC LIMIT $6)) ORDER BY id DESC",
            job_line_columns()
        );
        let parameters: Parameters<'_> = &[
            (&filter.status, Type::TEXT),
            (&filter.job_type, Type::TEXT),
            (&filter.tenant, Type::TEXT),
            (&filter.before, Type::UUID),
            (&oldest, Type::UUID),
            (&filter.limit, Type::INT8),
        ];
        self.read("list jobs", &sql, parameters, view::job_line)
            .await
    }

    /// The database's clock, in milliseconds since 1970.
    async fn now_ms(&self) -> Result<u64, StoreError> {
        let sql = "SELECT (extract(epoch FROM now()) * 1000)::bigint AS now";
        let now = self
            .read("list jobs", sql, &[], |row| row.try_get::<_, i64>("now"))
            .await?;
        Ok(now
            .first()
            .and_then(|ms| u64::try_from(*ms).ok())
            .unwrap_or_default())
    }

    /// Everything about one job.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is none.
    pub async fn job(&self, id: Uuid) -> Result<Job, StoreError> {
        let columns = format!("{}, shard, labels, data, result", job_line_columns());
        let sql = format!("SELECT {columns} FROM %jobs WHERE id = $1");
        let history = format!(
            "SELECT attempt, worker_id, {}, {}, outcome, applied, exit_code, http_status, error, log_tail \
             FROM %attempts WHERE job_id = $1 ORDER BY run, attempts.finished_at",
            time("started_at"),
            time("finished_at"),
        );
        let mut jobs = self
            .read("show job", &sql, &[(&id, Type::UUID)], view::job)
            .await?;
        let mut job = jobs.pop().ok_or_else(|| missing("job", id))?;
        job.history = self
            .read("show job", &history, &[(&id, Type::UUID)], view::attempt)
            .await?;
        Ok(job)
    }

    /// How a job stands, for those who wait for its end.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is none.
    pub async fn ending(&self, id: Uuid) -> Result<Ending, StoreError> {
        let sql = "SELECT id, status, result, last_error, waiting_for FROM %jobs WHERE id = $1";
        let mut endings = self
            .read("wait", sql, &[(&id, Type::UUID)], view::ending)
            .await?;
        endings.pop().ok_or_else(|| missing("job", id))
    }

    /// Lists dead letters, those that wait for review or `all`, the newest first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn dead_letters(
        &self,
        job_type: Option<&str>,
        all: bool,
        limit: i64,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let sql = format!(
            "SELECT {} FROM %dead_letter_jobs WHERE ($1::text IS NULL OR job_type = $1) AND ($2 OR reviewed_at IS NULL) \
             ORDER BY dead_letter_jobs.failed_at DESC, id LIMIT $3",
            dead_letter_columns("NULL::jsonb AS data")
        );
        let parameters: Parameters<'_> = &[
            (&job_type, Type::TEXT),
            (&all, Type::BOOL),
            (&limit, Type::INT8),
        ];
        self.read("list dead letters", &sql, parameters, view::dead_letter)
            .await
    }

    /// One dead letter, by its own id, or the latest of the job with this id.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is none.
    pub async fn dead_letter_of(&self, id: Uuid) -> Result<DeadLetter, StoreError> {
        let sql = format!(
            "SELECT {} FROM %dead_letter_jobs WHERE id = $1 OR original_job_id = $1 \
             ORDER BY dead_letter_jobs.failed_at DESC LIMIT 1",
            dead_letter_columns("data")
        );
        let mut letters = self
            .read(
                "show dead letter",
                &sql,
                &[(&id, Type::UUID)],
                view::dead_letter,
            )
            .await?;
        letters.pop().ok_or_else(|| missing("dead letter", id))
    }

    /// Lists workers, those that run or `all` that are known.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn workers(&self, all: bool) -> Result<Vec<WorkerLine>, StoreError> {
        let sql = format!(
            "SELECT id, name, version, status, {}, {}, in_flight, concurrency, job_types FROM %workers \
             WHERE $1 OR status IN ('live', 'draining') ORDER BY workers.started_at, id",
            time("started_at"),
            time("last_heartbeat"),
        );
        self.read("list workers", &sql, &[(&all, Type::BOOL)], view::worker)
            .await
    }

    /// The numbers of each job type, in the order of their names.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn numbers(&self) -> Result<Vec<Numbers>, StoreError> {
        let sql = "SELECT job_type, pending_count, running_count, failed_count, avg_duration_sec, oldest_pending_age_sec \
                   FROM %queue_metrics ORDER BY job_type";
        self.read("stats", sql, &[], view::numbers).await
    }

    async fn read<T>(
        &self,
        what: &'static str,
        sql: &str,
        parameters: Parameters<'_>,
        one: fn(&Row) -> Result<T, tokio_postgres::Error>,
    ) -> Result<Vec<T>, StoreError> {
        let rows = self.rows(what, sql, parameters).await?;
        rows.iter()
            .map(|row| one(row).map_err(StoreError::from))
            .collect()
    }
}

/// The lowest UUIDv7 of a millisecond.
fn first_id_at(ms: u64) -> Uuid {
    uuid::Builder::from_unix_timestamp_millis(ms, &[0; 10]).into_uuid()
}

pub(crate) fn missing(what: &str, id: Uuid) -> StoreError {
    StoreError::Refused {
        code: "TN005".to_owned(),
        message: format!("no {what} {id}"),
        hint: None,
    }
}

/// A time as a text in UTC, under its own name.
pub(crate) fn time(column: &str) -> String {
    format!("{} AS {column}", time_text(column))
}

/// A time as a text in UTC.
pub(crate) fn time_text(time: &str) -> String {
    format!("to_char({time} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')")
}

fn job_line_columns() -> String {
    let times = ["run_at", "created_at", "started_at", "completed_at"]
        .map(time)
        .join(", ");
    format!(
        "id, job_type, tenant_id, priority, status, attempts, max_attempts, {times}, worker_id, last_error, unique_key, waiting_for"
    )
}

fn dead_letter_columns(data: &str) -> String {
    let times = ["failed_at", "reviewed_at"].map(time).join(", ");
    format!(
        "id, original_job_id, job_type, {data}, attempts, last_error, {times}, reviewed_by, review_action, review_note"
    )
}
