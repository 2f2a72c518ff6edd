//! Ends of runs, and what a worker says of its runs after a switch.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tenure_core::ids::{Beat, Epoch, JobId, Run, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use crate::error::StoreError;
use crate::row::get;
use crate::session::Session;
use crate::value::RawJson;
use crate::worker::Registration;

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

/// How one run ended, as `finish` and `reattach` take it. Written as JSON by hand of serde; `result` goes through as it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

impl Session {
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
        let parameters: [(&(dyn ToSql + Sync), Type); 3] = [
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
