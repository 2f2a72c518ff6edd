//! What a worker says to the database. One method, one statement; the meaning of each stands with the SQL function.

use std::time::Duration;

use serde::Serialize;
use tenure_core::ids::{Beat, Call, Epoch, Lane, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::error::StoreError;
use crate::row::{get, list, next_due};
use crate::session::Session;
use crate::value::RawJson;

/// What a worker says of itself.
#[derive(Debug, Clone, Serialize)]
pub struct Registration {
    /// A label for people.
    pub name: String,
    /// The version of what it runs.
    pub version: String,
    /// For how long its leases last after a heartbeat.
    #[serde(rename = "lease_ttl_ms", serialize_with = "as_millis")]
    pub lease_ttl: Duration,
    /// From one heartbeat to the next.
    #[serde(rename = "heartbeat_ms", serialize_with = "as_millis")]
    pub heartbeat: Duration,
    /// Patterns of the job types that it can run.
    pub job_types: Vec<String>,
    /// How many jobs it runs at once.
    pub concurrency: i32,
}

/// The present epoch of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochNow {
    /// Its id, which every call carries.
    pub epoch: Epoch,
    /// Its number.
    pub number: i64,
    /// The last beat of this worker that the database shows; `None`: it does not know the worker.
    pub beat: Option<Beat>,
}

/// What a heartbeat brings back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeatAnswer {
    /// The live workers.
    pub workers: Vec<WorkerId>,
    /// Leases whose handlers must be stopped, with the reason.
    pub revoked: Vec<(Token, String)>,
    /// Somebody asked this worker to drain.
    pub drain: bool,
    /// The highest lane there is.
    pub lanes: i32,
    /// Jobs given back because their claim's answer was lost.
    pub ghosts: i32,
    /// What may be claimed.
    pub gate: Gate,
}

/// What may be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Everything.
    Open,
    /// Workers re-attach: what came since the switch.
    Window,
    /// Nothing, until a person has decided.
    Hold,
}

/// What one sweep did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Whether this call swept; `false`: another worker did.
    pub swept: bool,
    /// Due jobs made ready.
    pub promoted: i32,
    /// Leases ended because nobody renewed them.
    pub recovered: i32,
    /// Workers declared lost.
    pub lost: i32,
    /// When the next job is due, if within an hour.
    pub next_due: Option<Duration>,
}

impl Session {
    /// The present epoch; opens it if the last one ended in a crash, switch or restore. `seen` is the highest epoch number known.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn open_epoch(&self, worker: WorkerId, seen: i64) -> Result<EpochNow, StoreError> {
        let sql =
            "SELECT epoch, epoch_no, beat FROM %open_epoch($1, jsonb_build_object('epoch_no', $2))";
        let row = self
            .one(
                "open_epoch",
                sql,
                &[(&worker.0, Type::UUID), (&seen, Type::INT8)],
            )
            .await?;
        Ok(EpochNow {
            epoch: Epoch(get(&row, "epoch")?),
            number: get(&row, "epoch_no")?,
            beat: get::<Option<i64>>(&row, "beat")?.map(Beat),
        })
    }

    /// Makes the worker known.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn register(
        &self,
        worker: WorkerId,
        registration: &Registration,
    ) -> Result<(Epoch, i64), StoreError> {
        let sql = "SELECT epoch, epoch_no FROM %register_worker($1, $2, $3, $4 * interval '1 ms', $5 * interval '1 ms', $6, $7)";
        let row = self
            .one(
                "register_worker",
                sql,
                &[
                    (&worker.0, Type::UUID),
                    (&registration.name, Type::TEXT),
                    (&registration.version, Type::TEXT),
                    (&millis(registration.lease_ttl), Type::INT8),
                    (&millis(registration.heartbeat), Type::INT8),
                    (&registration.job_types, Type::TEXT_ARRAY),
                    (&registration.concurrency, Type::INT4),
                ],
            )
            .await?;
        Ok((Epoch(get(&row, "epoch")?), get(&row, "epoch_no")?))
    }

    /// Renews the worker and all its leases. `stats` is a JSON object: lane → [runs that ended lately, seconds they took].
    ///
    /// # Errors
    /// See [`StoreError`].
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the parts of one statement"
    )]
    pub async fn heartbeat(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        beat: Beat,
        settled: Call,
        open: &[Call],
        in_flight: i32,
        draining: bool,
        stats: &str,
    ) -> Result<BeatAnswer, StoreError> {
        let sql = "SELECT workers, revoked, drain, lanes, ghosts, gate FROM %heartbeat($1, $2, $3, $4, $5, $6, \
                   jsonb_build_object('draining', $7, 'stats', $8))";
        let open: Vec<i64> = open.iter().map(|call| call.0).collect();
        let stats = RawJson(stats.to_owned());
        let row = self
            .one(
                "heartbeat",
                sql,
                &[
                    (&worker.0, Type::UUID),
                    (&epoch.0, Type::UUID),
                    (&beat.0, Type::INT8),
                    (&settled.0, Type::INT8),
                    (&open, Type::INT8_ARRAY),
                    (&in_flight, Type::INT4),
                    (&draining, Type::BOOL),
                    (&stats, Type::JSONB),
                ],
            )
            .await?;
        #[derive(serde::Deserialize)]
        struct Live {
            id: uuid::Uuid,
        }
        #[derive(serde::Deserialize)]
        struct Revoked {
            token: uuid::Uuid,
            reason: String,
        }
        let workers: Vec<Live> = list(&row, "workers")?;
        let revoked: Vec<Revoked> = list(&row, "revoked")?;
        Ok(BeatAnswer {
            workers: workers.into_iter().map(|live| WorkerId(live.id)).collect(),
            revoked: revoked
                .into_iter()
                .map(|revoked| (Token(revoked.token), revoked.reason))
                .collect(),
            drain: get(&row, "drain")?,
            lanes: get(&row, "lanes")?,
            ghosts: get(&row, "ghosts")?,
            gate: match get(&row, "gate")? {
                "open" => Gate::Open,
                "window" => Gate::Window,
                _ => Gate::Hold,
            },
        })
    }

    /// All lanes with their job types.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn lanes(&self) -> Result<Vec<(Lane, String)>, StoreError> {
        let rows = self
            .rows("lanes", "SELECT lane, job_type FROM %lanes()", &[])
            .await?;
        rows.iter()
            .map(|row| Ok((Lane(get(row, "lane")?), get(row, "job_type")?)))
            .collect()
    }

    /// Asks to be notified of jobs in these lanes; none: no longer.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn set_sleeping(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        lanes: &[Lane],
    ) -> Result<(), StoreError> {
        let lanes: Vec<i32> = lanes.iter().map(|lane| lane.0).collect();
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] = [
            (&worker.0, Type::UUID),
            (&epoch.0, Type::UUID),
            (&lanes, Type::INT4_ARRAY),
        ];
        self.rows(
            "set_sleeping",
            "SELECT %set_sleeping($1, $2, $3)",
            &parameters,
        )
        .await
        .map(drop)
    }

    /// Recovers what timed out and makes due jobs ready, if no other worker just did.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn sweep(&self, epoch: Epoch) -> Result<Swept, StoreError> {
        let sql = "SELECT swept, promoted, recovered, lost, next_due_ms FROM %sweep($1)";
        let row = self.one("sweep", sql, &[(&epoch.0, Type::UUID)]).await?;
        Ok(Swept {
            swept: get(&row, "swept")?,
            promoted: get(&row, "promoted")?,
            recovered: get(&row, "recovered")?,
            lost: get(&row, "lost")?,
            next_due: next_due(&row)?,
        })
    }

    /// Makes due jobs ready. Answers with their number, and when the next is due.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn promote(&self, epoch: Epoch) -> Result<(i32, Option<Duration>), StoreError> {
        let row = self
            .one(
                "promote",
                "SELECT promoted, next_due_ms FROM %promote($1)",
                &[(&epoch.0, Type::UUID)],
            )
            .await?;
        Ok((get(&row, "promoted")?, next_due(&row)?))
    }

    /// The worker leaves.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn deregister(&self, worker: WorkerId, epoch: Epoch) -> Result<(), StoreError> {
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
            [(&worker.0, Type::UUID), (&epoch.0, Type::UUID)];
        self.rows(
            "deregister_worker",
            "SELECT %deregister_worker($1, $2)",
            &parameters,
        )
        .await
        .map(drop)
    }

    /// Listens on the channel of this worker. Only on a session of its own.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn listen(&self, worker: WorkerId) -> Result<(), StoreError> {
        self.batch("LISTEN", &format!("LISTEN \"tenure_{worker}\""))
            .await
    }

    /// Sends this worker a notification of its own, to see that notifications arrive.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn ping(&self, worker: WorkerId) -> Result<(), StoreError> {
        self.batch("NOTIFY", &format!("NOTIFY \"tenure_{worker}\", 'ping'"))
            .await
    }

    async fn one(
        &self,
        what: &'static str,
        sql: &str,
        parameters: crate::session::Parameters<'_>,
    ) -> Result<Row, StoreError> {
        let rows = self.rows(what, sql, parameters).await?;
        rows.into_iter()
            .next()
            .ok_or_else(|| StoreError::Failed(format!("{what} answered nothing")))
    }
}

pub(crate) fn as_millis<S: serde::Serializer>(
    length: &Duration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_i64(millis(*length))
}

pub(crate) fn millis(length: Duration) -> i64 {
    i64::try_from(length.as_millis()).unwrap_or(i64::MAX)
}
