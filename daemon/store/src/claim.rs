//! Claims: what to ask for, and what comes back.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use tenure_core::ids::{Call, Epoch, JobId, Lane, Run, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::error::StoreError;
use crate::row::get;
use crate::session::Session;
use crate::value::RawJson;

/// What to claim.
#[derive(Debug, Clone, Default)]
pub struct ClaimRequest {
    /// From these lanes.
    pub lanes: Vec<Lane>,
    /// At most so many of each.
    pub limits: Vec<i32>,
    /// At most so many of all.
    pub total: i32,
    /// For jobs of each lane that name none themselves.
    pub max_attempts: Vec<i32>,
    /// Up to where nothing is left.
    pub marks: Vec<Mark>,
    /// Those of the lanes whose handlers have their effects in this database.
    pub rerun: Vec<Lane>,
    /// How safe the claim has to be before its jobs start.
    pub durability: Option<Durability>,
}

/// What a commit waits for. Where it is not said, what the database is configured for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The disk of the primary.
    Local,
    /// The disk of a synchronous standby too.
    Replicated,
}

/// Nothing is left in this lane and priority up to this position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The lane.
    pub lane: Lane,
    /// The priority.
    pub priority: i32,
    /// The position.
    pub pos: i64,
}

/// A claimed job.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The job.
    pub id: JobId,
    /// How many claims and acts of persons it has seen, with this one.
    pub run: Run,
    /// The fencing token of this lease.
    pub token: Token,
    /// The number of this attempt.
    pub attempt: i32,
    /// The last attempt has this number.
    pub max_attempts: i32,
    /// Its lane.
    pub lane: Lane,
    /// Selects the handler.
    pub job_type: String,
    /// Whose job it is.
    pub tenant: String,
    /// Lower numbers run first.
    pub priority: i32,
    /// Its position among the ready jobs.
    pub pos: i64,
    /// When it became ready, by the database's clock.
    pub ready_at: SystemTime,
    /// When it was claimed, by the database's clock.
    pub started_at: SystemTime,
    /// When it was enqueued.
    pub created_at: SystemTime,
    /// Not before.
    pub run_at: SystemTime,
    /// How long the attempt may take; `None`: as the handler says.
    pub timeout: Option<Duration>,
    /// Admits one live job.
    pub unique_key: Option<String>,
    /// What the handler gets.
    pub data: String,
    /// Labels, a JSON object.
    pub labels: String,
    /// Options, a JSON object.
    pub options: String,
    /// It is to run in a process that has no other job: one died that had it and others.
    pub alone: bool,
    /// How far its series has come (`watermark` of its options), JSON.
    pub watermark: Option<String>,
}

/// The bit of `flags` for [`Claimed::alone`].
const ALONE: i16 = 128;

impl Session {
    /// Claims jobs.
    ///
    /// # Errors
    /// See [`StoreError`]; after `Unreachable` and `Timeout` the claim may have been carried out.
    pub async fn claim(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        call: Call,
        request: &ClaimRequest,
    ) -> Result<Vec<Claimed>, StoreError> {
        let sql = "SELECT id, run, token, attempt, max_attempts, lane, job_type, tenant, priority, pos, ready_at, started_at, created_at, run_at, \
                   (extract(epoch FROM timeout) * 1000)::bigint AS timeout_ms, unique_key, flags, data, labels, job_options, watermark \
                   FROM %claim_job_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
        #[derive(Serialize)]
        struct Options<'a> {
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            rerun: &'a [Lane],
            #[serde(skip_serializing_if = "Option::is_none")]
            durability: Option<Durability>,
        }
        let options = serde_json::to_string(&Options {
            rerun: &request.rerun,
            durability: request.durability,
        })
        .map_err(|error| StoreError::Failed(error.to_string()))?;
        let lanes: Vec<i32> = request.lanes.iter().map(|lane| lane.0).collect();
        let mark_lanes: Vec<i32> = request.marks.iter().map(|mark| mark.lane.0).collect();
        let mark_priorities: Vec<i32> = request.marks.iter().map(|mark| mark.priority).collect();
        let marks: Vec<i64> = request.marks.iter().map(|mark| mark.pos).collect();
        let rows = self
            .rows(
                "claim_job_batch",
                sql,
                &[
                    (&worker.0, Type::UUID),
                    (&epoch.0, Type::UUID),
                    (&call.0, Type::INT8),
                    (&lanes, Type::INT4_ARRAY),
                    (&request.limits, Type::INT4_ARRAY),
                    (&request.total, Type::INT4),
                    (&request.max_attempts, Type::INT4_ARRAY),
                    (&mark_lanes, Type::INT4_ARRAY),
                    (&mark_priorities, Type::INT4_ARRAY),
                    (&marks, Type::INT8_ARRAY),
                    (&RawJson(options), Type::JSONB),
                ],
            )
            .await?;
        rows.iter().map(claimed).collect()
    }

    /// Moves marks forward: `seen` are the positions seen when an earlier call answered with `horizon`. Answers with the new
    /// marks and the horizon for what is seen from now on.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn settle_marks(
        &self,
        epoch: Epoch,
        marks: &[Mark],
        seen: &[i64],
        horizon: i64,
    ) -> Result<(Vec<Mark>, i64), StoreError> {
        let sql = "SELECT lane, priority, mark, horizon FROM %settle_marks($1, $2, $3, $4, $5, $6)";
        let lanes: Vec<i32> = marks.iter().map(|mark| mark.lane.0).collect();
        let priorities: Vec<i32> = marks.iter().map(|mark| mark.priority).collect();
        let positions: Vec<i64> = marks.iter().map(|mark| mark.pos).collect();
        let rows = self
            .rows(
                "settle_marks",
                sql,
                &[
                    (&epoch.0, Type::UUID),
                    (&lanes, Type::INT4_ARRAY),
                    (&priorities, Type::INT4_ARRAY),
                    (&positions, Type::INT8_ARRAY),
                    (&seen, Type::INT8_ARRAY),
                    (&horizon, Type::INT8),
                ],
            )
            .await?;
        let mut next = horizon;
        let mut moved = Vec::with_capacity(rows.len());
        for row in &rows {
            next = get(row, "horizon")?;
            moved.push(Mark {
                lane: Lane(get(row, "lane")?),
                priority: get(row, "priority")?,
                pos: get(row, "mark")?,
            });
        }
        Ok((moved, next))
    }
}

pub(crate) fn durability_name(durability: Durability) -> &'static str {
    match durability {
        Durability::Local => "local",
        Durability::Replicated => "replicated",
    }
}

pub(crate) fn claimed(row: &Row) -> Result<Claimed, StoreError> {
    let timeout: Option<i64> = get(row, "timeout_ms")?;
    Ok(Claimed {
        id: JobId(get(row, "id")?),
        run: Run(get(row, "run")?),
        token: Token(get(row, "token")?),
        attempt: get(row, "attempt")?,
        max_attempts: get(row, "max_attempts")?,
        lane: Lane(get(row, "lane")?),
        job_type: get(row, "job_type")?,
        tenant: get(row, "tenant")?,
        priority: get(row, "priority")?,
        pos: get(row, "pos")?,
        ready_at: get(row, "ready_at")?,
        started_at: get(row, "started_at")?,
        created_at: get(row, "created_at")?,
        run_at: get(row, "run_at")?,
        timeout: timeout
            .and_then(|ms| u64::try_from(ms).ok())
            .map(Duration::from_millis),
        unique_key: get(row, "unique_key")?,
        data: get::<RawJson>(row, "data")?.0,
        labels: get::<RawJson>(row, "labels")?.0,
        options: get::<RawJson>(row, "job_options")?.0,
        alone: get::<i16>(row, "flags")? & ALONE != 0,
        watermark: get::<Option<RawJson>>(row, "watermark")?.map(|json| json.0),
    })
}
