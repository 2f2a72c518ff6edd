//! The speakers: they say to the database how runs ended, in batches, until it has answered each.
//!
//! There is one for each [`Queue`], so that no end waits for something that only another one needs.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::ids::{Epoch, Token, WorkerId};
use tenure_store::claim::Durability;
use tenure_store::error::StoreError;
use tenure_store::finish::{Answer, EndKind};
use tenure_store::session::Db;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::ends::{Ends, Queue};
use crate::events;
use crate::held::Statement;
use crate::leases::Leases;
use crate::status::{Part, Status};

/// After a batch of so many the next ones are waited for so long.
const MANY: usize = 50;
const GATHER: Duration = Duration::from_millis(1);
/// Between tries while the database does not answer or a job is locked: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// See the module.
pub(crate) struct Speaker {
    /// Which ends it says.
    pub(crate) queue: Queue,
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
            // What is said under this registration is what stood in the list under it.
            let member = self.leases.member();
            let batch = match member {
                Some(_) => self.ends.take(self.queue),
                None => Vec::new(),
            };
            many = batch.len() >= MANY;
            events::unconfirmed(self.ends.len());
            let Some(member) = member.filter(|_| !batch.is_empty()) else {
                tokio::select! {
                    () = self.ends.changed(self.queue) => {}
                    () = tokio::time::sleep(PAUSE.1) => {}
                    () = stop.cancelled() => return,
                }
                continue;
            };
            let all_answered = self.say(member, batch).await;
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
    async fn say(&self, (worker, epoch): (WorkerId, Epoch), batch: Vec<Statement>) -> bool {
        let tokens: Vec<Token> = batch.iter().map(|end| end.end.token).collect();
        match self.finish(worker, epoch, &batch).await {
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
                        reached = self.say_alone(worker, epoch, end).await;
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
    async fn say_alone(&self, worker: WorkerId, epoch: Epoch, end: Statement) -> bool {
        let token = end.end.token;
        match self.finish(worker, epoch, std::slice::from_ref(&end)).await {
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
    ) -> Result<Vec<Token>, StoreError> {
        let ends: Vec<_> = batch.iter().map(|end| &end.end).collect();
        let items =
            serde_json::to_string(&ends).map_err(|error| StoreError::Failed(error.to_string()))?;
        let answers = if self.queue == Queue::Replicated {
            let session = self.db.careful().await?;
            let replicated = Some(Durability::Replicated);
            session.finish(worker, epoch, items, replicated).await?
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
