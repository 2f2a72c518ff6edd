//! Jobs that a handler has accepted and finishes later: their leases have a time of their own, and whoever has the token ends them.

use std::time::Duration;

use serde::Serialize;
use tenure_core::ids::{Call, Epoch, JobId, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::claim::{Claimed, claimed};
use crate::error::StoreError;
use crate::row::get;
use crate::session::Session;
use crate::value::RawJson;
use crate::worker::as_millis;

/// A lease that is to stand on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Hold {
    /// The job.
    pub job: JobId,
    /// Its lease.
    pub token: Token,
    /// From now; `None`: it is only asked about.
    #[serde(
        rename = "for_ms",
        serialize_with = "some_millis",
        skip_serializing_if = "Option::is_none"
    )]
    pub length: Option<Duration>,
}

/// How a lease stands that was asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Which.
    pub token: Token,
    /// `false`: it is gone.
    pub stands: bool,
    /// How much of its own time is left; `None`: it is as long as its worker's.
    pub left: Option<Duration>,
    /// A person asked for its end: `cancel`, `complete` or `dead`.
    pub stop: Option<String>,
}

/// What the database knows of a run, by its job and token.
#[derive(Debug, Clone)]
pub struct Found {
    /// Nothing that was there can be missing: no switch is being worked up.
    pub settled: bool,
    /// The status of the job; `None`: there is no such job.
    pub status: Option<String>,
    /// How the run ended, if it has: `completed`, `failed`, `released` …
    pub ended: Option<String>,
    /// Its lease.
    pub leased: Option<Box<Leased>>,
}

/// A run that has its lease.
#[derive(Debug, Clone)]
pub struct Leased {
    /// As it was claimed.
    pub job: Claimed,
    /// By which call of its worker.
    pub call: Call,
    /// In which epoch.
    pub epoch_no: i64,
    /// A person asked for its end: `cancel`, `complete` or `dead`.
    pub stop: Option<String>,
}

impl Session {
    /// Gives leases a time of their own. With `at_least` none is shortened, and those without a length are only asked about.
    ///
    /// # Errors
    /// See [`StoreError`]; after `Unreachable` and `Timeout` it may have been carried out, and may be said again.
    pub async fn hold(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        holds: &[Hold],
        at_least: bool,
    ) -> Result<Vec<Standing>, StoreError> {
        let items =
            serde_json::to_string(holds).map_err(|error| StoreError::Failed(error.to_string()))?;
        let sql = "SELECT token, answer, left_ms, stop FROM %hold($1, $2, $3, jsonb_build_object('at_least', $4::bool))";
        let rows = self
            .rows(
                "hold",
                sql,
                &[
                    (&worker.0, Type::UUID),
                    (&epoch.0, Type::UUID),
                    (&RawJson(items), Type::JSONB),
                    (&at_least, Type::BOOL),
                ],
            )
            .await?;
        rows.iter().map(standing).collect()
    }

    /// What the database knows of the run of this job with this token.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn find_run(&self, job: Uuid, token: Token) -> Result<Found, StoreError> {
        let sql = "SELECT c.gate = 'open' AND EXISTS (SELECT FROM %here h WHERE h.epoch = c.epoch) AS settled, \
              (SELECT a.status FROM %jobs_all a WHERE a.id = $1) AS status, \
              coalesce((SELECT o.status FROM %outcome o WHERE o.id = $1 AND o.token = $2), \
                (SELECT a.outcome FROM %attempt a WHERE a.job_id = $1 AND a.token = $2 AND a.applied LIMIT 1)) AS ended, \
              l.id IS NOT NULL AS leased, l.call, l.epoch_no, \
              (SELECT s.kind FROM %stop_request s WHERE s.id = l.id) AS stop, \
              l.id, l.run, l.token, l.attempts AS attempt, l.max_attempts, l.lane, j.job_type, j.tenant, j.priority, coalesce(j.pos, 0) AS pos, \
              l.started_at AS ready_at, l.started_at, j.created_at, j.run_at, (extract(epoch FROM j.timeout) * 1000)::bigint AS timeout_ms, \
              j.unique_key, l.flags, CASE WHEN l.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM %edit e WHERE e.id = j.id) END AS data, \
              j.labels, j.options AS job_options, NULL::jsonb AS watermark \
            FROM %cluster c LEFT JOIN %job j ON j.id = $1 LEFT JOIN %lease l ON l.id = j.id AND l.token = $2";
        let rows = self
            .rows(
                "find_run",
                sql,
                &[(&job, Type::UUID), (&token.0, Type::UUID)],
            )
            .await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Failed("find_run answered nothing".to_owned()))?;
        let leased = match get::<bool>(row, "leased")? {
            false => None,
            true => Some(Box::new(Leased {
                job: claimed(row)?,
                call: Call(get(row, "call")?),
                epoch_no: get(row, "epoch_no")?,
                stop: get(row, "stop")?,
            })),
        };
        Ok(Found {
            settled: get(row, "settled")?,
            status: get(row, "status")?,
            ended: get(row, "ended")?,
            leased,
        })
    }
}

fn standing(row: &Row) -> Result<Standing, StoreError> {
    let left: Option<i64> = get(row, "left_ms")?;
    let millis = |ms: i64| Duration::from_millis(u64::try_from(ms).unwrap_or(0));
    Ok(Standing {
        token: Token(get(row, "token")?),
        stands: get::<&str>(row, "answer")? == "done",
        left: left.map(millis),
        stop: get(row, "stop")?,
    })
}

fn some_millis<S: serde::Serializer>(
    length: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match length {
        Some(length) => as_millis(length, serializer),
        None => serializer.serialize_none(),
    }
}
