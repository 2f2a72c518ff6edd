//! Ends of runs, and what a worker says of its runs after a switch.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tenure_core::ids::{Beat, Epoch, JobId, Run, Token, WorkerId};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use crate::claim::{Durability, durability_name};
use crate::error::StoreError;
use crate::row::get;
use crate::session::Session;
use crate::value::RawJson;
use crate::worker::{Registration, as_millis};

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
    /// Re-attach: what the handler did in this database was lost, so it must stop and its job be given back.
    Rerun,
}

/// What a worker says after a switch, crash or restart of the database.
#[derive(Debug, Clone, Copy)]
pub struct Reattach<'a> {
    /// Who speaks.
    pub worker: WorkerId,
    /// In which epoch.
    pub epoch: Epoch,
    /// The last heartbeat that was answered.
    pub beat: Beat,
    /// The live workers that it knew.
    pub roster: &'a [WorkerId],
    /// Should the database have lost it.
    pub registration: &'a Registration,
    /// Workers known to be dead: their jobs are free at once.
    pub predecessors: &'a [WorkerId],
    /// The tokens of all that is held; whatever else the database shows for this worker goes back.
    pub held: &'a [Token],
    /// How far back the ends of runs are remembered.
    pub covers: &'a [Covers],
    /// For how long no primary was found.
    pub without_primary: Duration,
}

/// All ends that were answered after a heartbeat of this worker was sent are remembered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Covers {
    /// The worker.
    pub worker: WorkerId,
    /// Workers that the same process was before: it counts its heartbeats on.
    pub formerly: Vec<WorkerId>,
    /// The number of the heartbeat.
    pub from: Beat,
    /// How long ago that was.
    #[serde(rename = "ms", serialize_with = "as_millis")]
    pub ago: Duration,
    /// The worker is a dead one that this one succeeds.
    pub predecessor: bool,
}

/// The most bytes of statements in one call, and the most statements: each call has to be answered before a lease is no longer trusted.
const MOST_BYTES: usize = 8 << 20;
const MOST: usize = 500;

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
    /// Completed: how far the job's series has come (`options.watermark` of the job), JSON.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub watermark: Option<Box<RawValue>>,
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
    /// The process that had it and others died. Given back; no attempt is used, and from now on it runs alone.
    Crashed,
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
        durability: Option<Durability>,
    ) -> Result<Vec<EndAnswer>, StoreError> {
        let durability = durability.map(durability_name);
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&worker.0, Type::UUID),
            (&epoch.0, Type::UUID),
            (&RawJson(items), Type::JSONB),
            (&durability, Type::TEXT),
        ];
        let rows = self
            .rows(
                "finish",
                "SELECT token, answer, status FROM %finish($1, $2, $3, jsonb_build_object('durability', $4::text))",
                &parameters,
            )
            .await?;
        rows.iter().map(end_answer).collect()
    }

    /// Says all that this worker holds and has finished, each a statement of `reattach` as JSON, in as many calls as it takes. The
    /// worker has spoken with the last one, if none was answered `Busy`.
    ///
    /// # Errors
    /// See [`StoreError`]; then all of it has to be said again.
    pub async fn reattach(
        &self,
        said: Reattach<'_>,
        statements: &[String],
    ) -> Result<Vec<EndAnswer>, StoreError> {
        let mut answers = Vec::new();
        let mut calls = calls(statements).into_iter().peekable();
        let mut met_a_lock = false;
        while let Some(call) = calls.next() {
            // After a lock all is said again, so this is not the last word.
            let more = calls.peek().is_some() || met_a_lock;
            let said = self.reattach_some(said, call, more).await?;
            met_a_lock |= said.iter().any(|said| said.answer == Answer::Busy);
            answers.extend(said);
        }
        Ok(answers)
    }

    async fn reattach_some(
        &self,
        said: Reattach<'_>,
        statements: &[String],
        more: bool,
    ) -> Result<Vec<EndAnswer>, StoreError> {
        #[derive(Serialize)]
        struct Options<'a> {
            #[serde(flatten)]
            registration: &'a Registration,
            predecessors: &'a [WorkerId],
            held: &'a [Token],
            covers: &'a [Covers],
            #[serde(rename = "without_primary_ms", serialize_with = "as_millis")]
            without_primary: Duration,
            more: bool,
        }
        let options = serde_json::to_string(&Options {
            registration: said.registration,
            predecessors: said.predecessors,
            held: said.held,
            covers: said.covers,
            without_primary: said.without_primary,
            more,
        })
        .map_err(|error| StoreError::Failed(error.to_string()))?;
        let roster: Vec<uuid::Uuid> = said.roster.iter().map(|worker| worker.0).collect();
        let statements = format!("[{}]", statements.join(","));
        let rows = self
            .rows(
                "reattach",
                "SELECT token, answer, status FROM %reattach($1, $2, $3, $4, $5, $6)",
                &[
                    (&said.worker.0, Type::UUID),
                    (&said.epoch.0, Type::UUID),
                    (&said.beat.0, Type::INT8),
                    (&RawJson(statements), Type::JSONB),
                    (&roster, Type::UUID_ARRAY),
                    (&RawJson(options), Type::JSONB),
                ],
            )
            .await?;
        rows.iter().map(end_answer).collect()
    }
}

/// In order, none of them too large; at least one, perhaps empty.
fn calls(statements: &[String]) -> Vec<&[String]> {
    let mut calls = Vec::new();
    let (mut rest, mut size) = (statements, 0);
    let mut count = 0;
    for statement in statements {
        if count == MOST || count > 0 && size + statement.len() > MOST_BYTES {
            let (call, later) = rest.split_at(count);
            calls.push(call);
            (rest, size, count) = (later, 0, 0);
        }
        size += statement.len();
        count += 1;
    }
    calls.push(rest);
    calls
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
            "rerun" => Answer::Rerun,
            other => return Err(StoreError::Failed(format!("an unknown answer: {other}"))),
        },
        status: get(row, "status")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_said_in_order_in_calls_that_are_not_too_large() {
        let large = "x".repeat(MOST_BYTES - 10);
        let statements: Vec<String> = ["a", &large, "b", "c"].map(str::to_owned).to_vec();
        let sizes = |statements: &[String]| -> Vec<usize> {
            calls(statements).iter().map(|call| call.len()).collect()
        };
        assert_eq!(sizes(&statements), [4]);
        let statements: Vec<String> = [&large, "12345678901", &large, &large]
            .map(|text| text.to_owned())
            .to_vec();
        assert_eq!(sizes(&statements), [1, 1, 1, 1]);
        assert_eq!(sizes(&vec!["a".to_owned(); 2 * MOST + 1]), [MOST, MOST, 1]);
        assert_eq!(sizes(&[]), [0]);
    }
}
