//! The speakers: they say to the database how runs ended, in batches, until it has answered each.
//!
//! There are two. A follow-up job can have to wait for a user's open transaction (that took the same unique key, say), and no
//! other end may wait with it: so ends with follow-up jobs have a speaker of their own, which says them one by one.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::ids::{Epoch, Token, WorkerId};
use tenure_store::claim::Durability;
use tenure_store::error::StoreError;
use tenure_store::finish::{Answer, EndKind};
use tenure_store::session::Db;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::ends::Ends;
use crate::events;
use crate::held::Statement;
use crate::leases::Leases;
use crate::status::{Part, Status};

/// The most ends of one statement.
const BATCH: usize = 500;
/// After a batch of so many the next ones are waited for so long.
const MANY: usize = 50;
const GATHER: Duration = Duration::from_millis(1);
/// Between tries while the database does not answer or a job is locked: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// See the module.
pub(crate) struct Speaker {
    /// Whether it says the ends with follow-up jobs, or all others.
    pub(crate) follow_ups: bool,
    /// To the database.
    pub db: Db,
    /// What is to be said.
    pub ends: Arc<Ends>,
    /// Under which registration.
    pub leases: Arc<Leases>,
    /// How it goes.
    pub status: Arc<Status>,
}

impl Speaker {
    /// Runs until `stop` is cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut pause = PAUSE.0;
        let mut many = false;
        loop {
            if many {
                // Under load the ends of jobs come together: one statement for all of them costs a tenth of many.
                tokio::time::sleep(GATHER).await;
            }
            let batch = match self.leases.member() {
                Some(_) => self
                    .ends
                    .take(self.follow_ups, if self.follow_ups { 1 } else { BATCH }),
                None => Vec::new(),
            };
            many = batch.len() >= MANY;
            events::unconfirmed(self.ends.len());
            if batch.is_empty() {
                tokio::select! {
                    () = self.ends.changed(self.follow_ups) => {}
                    () = tokio::time::sleep(PAUSE.1) => {}
                    () = stop.cancelled() => return,
                }
                continue;
            }
            let all_answered = self.say(batch).await;
            if all_answered {
                pause = PAUSE.0;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Says a batch. `false`: something is left for another try after a pause.
    async fn say(&self, batch: Vec<Statement>) -> bool {
        // A commit that waits for a standby must not hold up what need not wait.
        let (careful, plain): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|end| end.care().replicated);
        let mut calm = true;
        for (part, durability) in [(plain, None), (careful, Some(Durability::Replicated))] {
            calm &= part.is_empty() || self.say_part(part, durability).await;
        }
        calm
    }

    async fn say_part(&self, batch: Vec<Statement>, durability: Option<Durability>) -> bool {
        let tokens: Vec<Token> = batch.iter().map(|end| end.end.token).collect();
        let Some((worker, epoch)) = self.leases.member() else {
            self.ends.give_back(tokens);
            return false;
        };
        match self.finish(worker, epoch, &batch, durability).await {
            Ok(busy) => {
                let calm = busy.is_empty();
                self.ends.give_back(busy);
                calm
            }
            Err(error) if error.is_about_input() => {
                // One of them is the cause; the rest must not wait for it.
                let mut reached = true;
                for end in batch {
                    if reached {
                        reached = self.say_alone(worker, epoch, end, durability).await;
                    } else {
                        self.ends.give_back([end.end.token]);
                    }
                }
                reached
            }
            Err(error) => {
                self.trouble(worker, epoch, &error);
                self.ends.give_back(tokens);
                false
            }
        }
    }

    /// `false`: the database did not answer.
    async fn say_alone(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        end: Statement,
        durability: Option<Durability>,
    ) -> bool {
        let token = end.end.token;
        match self
            .finish(worker, epoch, std::slice::from_ref(&end), durability)
            .await
        {
            Ok(busy) => self.ends.give_back(busy),
            Err(error) if error.is_about_input() => {
                error!(job = %end.end.job, %error, "The database refuses a part of what this run ended with; it is written without.");
                self.ends.push(without_what_was_refused(end, &error));
            }
            Err(error) => {
                self.trouble(worker, epoch, &error);
                self.ends.give_back([token]);
                return false;
            }
        }
        true
    }

    /// Says ends in one statement, confirms what was answered, and returns what was busy.
    async fn finish(
        &self,
        worker: WorkerId,
        epoch: Epoch,
        batch: &[Statement],
        durability: Option<Durability>,
    ) -> Result<Vec<Token>, StoreError> {
        let ends: Vec<_> = batch.iter().map(|end| &end.end).collect();
        let items =
            serde_json::to_string(&ends).map_err(|error| StoreError::Failed(error.to_string()))?;
        let answers = if durability.is_some() {
            let session = self.db.careful().await?;
            session.finish(worker, epoch, items, durability).await?
        } else {
            let session = self.db.session().await?;
            session.finish(worker, epoch, items, None).await?
        };
        let (busy, answered): (Vec<_>, Vec<_>) = answers
            .into_iter()
            .partition(|answer| answer.answer == Answer::Busy);
        for answer in answered
            .iter()
            .filter(|answer| answer.answer == Answer::History)
        {
            // A run that was given back and had lost its lease is no news.
            let ended = batch.iter().find(|end| end.end.token == answer.token);
            if ended.is_some_and(|end| end.end.kind != EndKind::Released) {
                events::too_late(answer.token);
            }
        }
        self.status.fine(Part::Ends);
        let tokens = |wanted: bool| -> Vec<Token> {
            let of = answered
                .iter()
                .filter(|answer| (answer.answer == Answer::Done) == wanted);
            of.map(|answer| answer.token).collect()
        };
        if !self
            .leases
            .confirmed((worker, epoch), &tokens(true), &tokens(false))
        {
            return Err(StoreError::OtherEpoch(
                "the epoch ended while it was said".into(),
            ));
        }
        Ok(busy.into_iter().map(|answer| answer.token).collect())
    }

    fn trouble(&self, worker: WorkerId, epoch: Epoch, error: &StoreError) {
        if error.breaks_connection() {
            self.db.forget_connections();
        }
        self.leases.failed(worker, epoch, error);
        if !matches!(
            error,
            StoreError::OtherEpoch(_) | StoreError::DeadWorker(_) | StoreError::Repeat(_)
        ) {
            self.status.trouble(Part::Ends, error);
        }
    }
}

/// The same end without the part that PostgreSQL does not take. Follow-up jobs are part of what the handler wanted done, so
/// without them the attempt has failed.
fn without_what_was_refused(mut end: Statement, error: &StoreError) -> Statement {
    let end_of = &mut end.end;
    if end_of.enqueue.take().is_some() {
        end_of.kind = EndKind::Failed;
        end_of.delay_ms = Some(end.refused_ms.unwrap_or(60_000));
        end_of.error = Some(format!("its follow-up jobs were refused: {error}"));
    } else if end_of.result.is_some() {
        end_of.error = Some(format!("its result could not be stored: {error}"));
    } else {
        end_of.error = Some(format!(
            "what the handler said could not be stored: {error}"
        ));
        end_of.log_tail = None;
    }
    end_of.result = None;
    end
}
