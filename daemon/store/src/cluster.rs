//! Where the installation stands, what its switches were found to have done, and what a person decides about them.

use serde::{Deserialize, Serialize};
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::error::StoreError;
use crate::look::time;
use crate::row::get;
use crate::session::{Parameters, Session};
use crate::value::RawJson;

/// Where an installation stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Which installation: a random id that it keeps for ever.
    pub installation: Uuid,
    /// The number of the present epoch; it rises with each switch, crash or restore.
    pub epoch_no: i64,
    /// `open`; `window`: workers re-attach; `hold`: a person must decide.
    pub gate: String,
    /// Why it is on hold.
    pub hold_reason: Option<String>,
    /// When the present epoch, or its window, began.
    pub opened_at: String,
    /// The system identifier of the PostgreSQL cluster; `None`: the server does not tell.
    pub system_id: Option<i64>,
    /// Its timeline, which rises by one at each promotion.
    pub timeline: Option<i32>,
    /// Workers that have not re-attached yet.
    pub waits_for: Option<Vec<Uuid>>,
}

/// What one switch, crash or restore was found to have done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// The number of the epoch that it began.
    pub epoch_no: i64,
    /// `promotion`, `crash`, `accepted` (a person put this server in place of another), `other system` or `unknown`.
    pub cause: String,
    /// When the first worker spoke to the new server, by that server's clock.
    pub opened_at: String,
    /// From when on jobs from before were claimed.
    pub closed_at: Option<String>,
    /// The longest that a worker was without a primary, in seconds.
    pub without_primary_sec: Option<f64>,
    /// For how long jobs from before were not claimed, in seconds.
    pub window_sec: Option<f64>,
    /// From `opened_at` to the first claim of any job after `closed_at`, in seconds.
    pub first_claim_sec: Option<f64>,
    /// Ends that the server had lost and workers remembered.
    pub written_again: i64,
    /// Runs that went on and whose claim was lost.
    pub claimed_again: i64,
    /// Jobs whose enqueue was lost and that a worker had claimed.
    pub put_back: i64,
    /// Runs of workers that did not come back.
    pub recovered: i64,
    /// Given back to run again, since what they did in this database was lost.
    pub rerun: i64,
    /// Handlers whose job had gone on elsewhere.
    pub stopped: i64,
    /// Made dead letters, since nobody knows whether they ran.
    pub set_aside: i64,
    /// Runs that completed after they had lost their lease, of jobs that another run has or will end; since this epoch began.
    pub ran_twice: i64,
    /// Workers that did not come back.
    pub absent_workers: Option<Vec<Uuid>>,
    /// The span of which no worker remembers what ended, in seconds.
    pub uncovered_sec: Option<f64>,
    /// Its begin: the last heartbeat that the server has.
    pub uncovered_from: Option<String>,
    /// Its end.
    pub uncovered_until: Option<String>,
    /// The server's timeline after it.
    pub timeline: Option<i32>,
    /// The timeline before.
    pub previous_timeline: Option<i32>,
    /// The system identifier after it.
    pub system_id: Option<i64>,
    /// The system identifier before.
    pub previous_system_id: Option<i64>,
    /// What a person decided.
    pub decision: Option<String>,
    /// Who.
    pub decided_by: Option<String>,
    /// When.
    pub decided_at: Option<String>,
}

/// What became of one job in a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchJob {
    /// The job.
    pub job_id: Uuid,
    /// Which of its runs.
    pub run: i32,
    /// Selects its handler.
    pub job_type: Option<String>,
    /// `written_again`, `claimed_again`, `put_back`, `recovered`, `rerun`, `stopped`, `set_aside` or `ran_twice`.
    pub what: String,
    /// Who said it, or whose run it was.
    pub worker_id: Option<Uuid>,
    /// The job's status now.
    pub status: Option<String>,
}

/// What became of a job that was to be run again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retried {
    /// The job.
    pub job_id: Uuid,
    /// `pending`, or why not.
    pub answer: String,
}

impl Session {
    /// Where the installation stands.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn cluster_status(&self) -> Result<ClusterStatus, StoreError> {
        let sql = format!(
            "SELECT installation, epoch_no, gate, hold_reason, {}, system_id, timeline, waits_for FROM %cluster_status",
            time("opened_at")
        );
        let found = self.as_json("cluster status", &sql, &[]).await?;
        found
            .into_iter()
            .next()
            .ok_or_else(|| StoreError::Failed("the cluster row is missing".to_owned()))
    }

    /// The latest switches, the newest first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn switches(&self, limit: i64) -> Result<Vec<Switch>, StoreError> {
        let sql = switches("ORDER BY epoch_no DESC LIMIT $1");
        self.as_json("list switches", &sql, &[(&limit, Type::INT8)])
            .await
    }

    /// One switch.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is none of this number.
    pub async fn switch(&self, epoch_no: i64) -> Result<Switch, StoreError> {
        let sql = switches("WHERE epoch_no = $1");
        let found = self
            .as_json("show switch", &sql, &[(&epoch_no, Type::INT8)])
            .await?;
        found.into_iter().next().ok_or_else(|| StoreError::Refused {
            code: "TN005".to_owned(),
            message: format!("no switch {epoch_no}"),
            hint: Some("`tenure cluster switches list` shows all.".to_owned()),
        })
    }

    /// What became of single jobs in a switch.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn switch_jobs(&self, epoch_no: i64) -> Result<Vec<SwitchJob>, StoreError> {
        let sql = "SELECT job_id, run, job_type, what, worker_id, status FROM %switch_jobs WHERE epoch_no = $1 ORDER BY what, job_id, run";
        self.as_json("list jobs of a switch", sql, &[(&epoch_no, Type::INT8)])
            .await
    }

    /// A person says that this copy on another system is the one to use, or that this server is in place of one with a timeline up to
    /// `timeline`. Returns the gate then.
    ///
    /// # Errors
    /// `Refused`: TN006 there is nothing to accept, TN007 no reason.
    pub async fn accept_cluster(
        &self,
        reason: &str,
        timeline: Option<i32>,
        by: &str,
    ) -> Result<String, StoreError> {
        let sql = "SELECT %accept_cluster($1, jsonb_build_object('by', $2::text, 'timeline', $3::int)) AS gate";
        let parameters: Parameters<'_> = &[
            (&reason, Type::TEXT),
            (&by, Type::TEXT),
            (&timeline, Type::INT4),
        ];
        let rows = self.rows("accept", sql, parameters).await?;
        rows.first()
            .map_or(Ok(String::new()), |row| get(row, "gate"))
    }

    /// A person ends the hold after a restore. Returns the gate then, and how many jobs became dead letters.
    ///
    /// # Errors
    /// `Refused`: TN002 no epoch was opened yet, TN006 there is nothing to resume.
    pub async fn resume_cluster(&self, rerun: bool, by: &str) -> Result<(String, i64), StoreError> {
        let sql = "SELECT gate, set_aside FROM %resume_cluster(jsonb_build_object('by', $1::text, 'rerun', $2::boolean))";
        let parameters: Parameters<'_> = &[(&by, Type::TEXT), (&rerun, Type::BOOL)];
        let rows = self.rows("resume", sql, parameters).await?;
        match rows.first() {
            Some(row) => Ok((get(row, "gate")?, get(row, "set_aside")?)),
            None => Err(StoreError::Failed("resume answered nothing".to_owned())),
        }
    }

    /// Runs again all jobs whose end was written again in a switch, a thousand in each transaction: said again after an error, it
    /// goes on with the rest.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is none of this number.
    pub async fn retry_switch(&self, epoch_no: i64, by: &str) -> Result<Vec<Retried>, StoreError> {
        let sql = "SELECT job_id, answer FROM %retry_switch($1, jsonb_build_object('by', $2::text, 'after', $3::uuid)) ORDER BY job_id";
        let mut all: Vec<Retried> = Vec::new();
        loop {
            let after = all.last().map(|job| job.job_id);
            let parameters: Parameters<'_> = &[
                (&epoch_no, Type::INT8),
                (&by, Type::TEXT),
                (&after, Type::UUID),
            ];
            let answered: Vec<Retried> = self.as_json("retry", sql, parameters).await?;
            if answered.is_empty() {
                return Ok(all);
            }
            all.extend(answered);
        }
    }

    /// The rows of a query, by the names of its columns.
    async fn as_json<T: serde::de::DeserializeOwned>(
        &self,
        what: &'static str,
        query: &str,
        parameters: Parameters<'_>,
    ) -> Result<Vec<T>, StoreError> {
        let sql = format!("SELECT row_to_json(x)::jsonb AS line FROM ({query}) x");
        let rows = self.rows(what, &sql, parameters).await?;
        rows.iter()
            .map(|row| {
                let line: RawJson = get(row, "line")?;
                serde_json::from_str(&line.0)
                    .map_err(|error| StoreError::Failed(format!("{what}: {error}")))
            })
            .collect()
    }
}

fn switches(which: &str) -> String {
    let times = [
        "opened_at",
        "closed_at",
        "uncovered_from",
        "uncovered_until",
        "decided_at",
    ]
    .map(time)
    .join(", ");
    format!(
        "SELECT epoch_no, cause, {times}, without_primary_sec, window_sec, first_claim_sec, written_again, claimed_again, put_back, \
         recovered, rerun, stopped, set_aside, ran_twice, absent_workers, uncovered_sec, timeline, previous_timeline, system_id, \
         previous_system_id, decision, decided_by FROM %switches {which}"
    )
}
