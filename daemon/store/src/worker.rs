//! What a worker says to the database. One method, one statement; the meaning of each stands with the SQL function.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::value::RawValue;
use tenure_core::ids::{Beat, Call, Epoch, JobId, Lane, Run, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use crate::error::StoreError;
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
}

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
}

/// The answer about one run that was said to have ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndAnswer {
    /// Which lease.
    pub token: Token,
    /// What became of the statement.
    pub answer: Answer,
    /// The job's status then, if the statement changed it.
    pub status: Option<String>,
}

/// What became of a statement about a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It holds, now or since before.
    Done,
    /// The job is locked by another transaction: say it again.
    Busy,
    /// The run had lost its lease: nothing was changed.
    History,
    /// Re-attach: the lease stands.
    Kept,
    /// Re-attach: the lease is gone, the handler must stop.
    Stop,
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
        let sql = "SELECT workers, revoked, drain, lanes, ghosts FROM %heartbeat($1, $2, $3, $4, $5, $6, \
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
        })
    }

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
                   (extract(epoch FROM timeout) * 1000)::bigint AS timeout_ms, unique_key, data, labels, job_options \
                   FROM %claim_job_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
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

    /// Says how runs ended: a JSON array of the items of `finish`.
    ///
    /// # Errors
    /// See [`StoreError`]; after `Unreachable` and `Timeout` it may have been carried out, and may be said again.
    pub async fn finish(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        items: String,
    ) -> Result<Vec<EndAnswer>, StoreError> {
        let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] = [
            (&worker.0, Type::UUID),
            (&epoch.0, Type::UUID),
            (&RawJson(items), Type::JSONB),
        ];
        let rows = self
            .rows(
                "finish",
                "SELECT token, answer, status FROM %finish($1, $2, $3)",
                &parameters,
            )
            .await?;
        rows.iter().map(end_answer).collect()
    }

    /// Says all that this worker holds and has finished: a JSON array of statements.
    ///
    /// # Errors
    /// See [`StoreError`].
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the parts of one statement"
    )]
    pub async fn reattach(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        beat: Beat,
        statements: String,
        roster: &[WorkerId],
        registration: &Registration,
        predecessors: &[WorkerId],
    ) -> Result<Vec<EndAnswer>, StoreError> {
        #[derive(Serialize)]
        struct Options<'a> {
            #[serde(flatten)]
            registration: &'a Registration,
            predecessors: &'a [WorkerId],
        }
        let options = serde_json::to_string(&Options {
            registration,
            predecessors,
        })
        .map_err(|error| StoreError::Failed(error.to_string()))?;
        let roster: Vec<uuid::Uuid> = roster.iter().map(|worker| worker.0).collect();
        let rows = self
            .rows(
                "reattach",
                "SELECT token, answer, status FROM %reattach($1, $2, $3, $4, $5, $6)",
                &[
                    (&worker.0, Type::UUID),
                    (&epoch.0, Type::UUID),
                    (&beat.0, Type::INT8),
                    (&RawJson(statements), Type::JSONB),
                    (&roster, Type::UUID_ARRAY),
                    (&RawJson(options), Type::JSONB),
                ],
            )
            .await?;
        rows.iter().map(end_answer).collect()
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

fn as_millis<S: serde::Serializer>(length: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_i64(millis(*length))
}

fn millis(length: Duration) -> i64 {
    i64::try_from(length.as_millis()).unwrap_or(i64::MAX)
}

fn get<'r, T: FromSql<'r>>(row: &'r Row, column: &str) -> Result<T, StoreError> {
    row.try_get(column).map_err(StoreError::from)
}

fn list<T: serde::de::DeserializeOwned>(row: &Row, column: &str) -> Result<Vec<T>, StoreError> {
    let text: Option<RawJson> = get(row, column)?;
    text.map_or(Ok(Vec::new()), |text| serde_json::from_str(&text.0))
        .map_err(|error| StoreError::Failed(format!("{column}: {error}")))
}

fn next_due(row: &Row) -> Result<Option<Duration>, StoreError> {
    let ms: Option<i64> = get(row, "next_due_ms")?;
    Ok(ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
}

fn claimed(row: &Row) -> Result<Claimed, StoreError> {
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
    })
}

fn end_answer(row: &Row) -> Result<EndAnswer, StoreError> {
    let answer: &str = get(row, "answer")?;
    Ok(EndAnswer {
        token: Token(get(row, "token")?),
        answer: match answer {
            "done" => Answer::Done,
            "busy" => Answer::Busy,
            "history" => Answer::History,
            "kept" => Answer::Kept,
            "stop" => Answer::Stop,
            other => return Err(StoreError::Failed(format!("an unknown answer: {other}"))),
        },
        status: get(row, "status")?,
    })
}

/// How one run ended, as `finish` and `reattach` take it. Written as JSON by hand of serde; `result` goes through as it is.
#[derive(Debug, Clone, Serialize, serde::Deserialize)]
pub struct RunEnd {
    /// What kind of end.
    pub kind: EndKind,
    /// The job.
    pub job: JobId,
    /// The run.
    pub run: Run,
    /// The lease.
    pub token: Token,
    /// Failed: until the next attempt. Snoozed, released: until it is ready.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub delay_ms: Option<u64>,
    /// Failed: never again.
    #[serde(rename = "final", skip_serializing_if = "std::ops::Not::not", default)]
    pub final_: bool,
    /// The exit code of its process.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exit_code: Option<i32>,
    /// The status of its HTTP answer.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub http_status: Option<i32>,
    /// The result, JSON that `jsonb` takes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<Box<RawValue>>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// The tail of its log.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub log_tail: Option<String>,
    /// Follow-up jobs: an array of the objects of `enqueue_many`, each with an id.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub enqueue: Option<Box<RawValue>>,
}

/// What kind of end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndKind {
    /// It did what it should.
    Completed,
    /// It failed: again, or never again.
    Failed,
    /// Given back; no attempt is used.
    Released,
    /// It wants to be tried again later; no attempt is used.
    Snoozed,
}
