//! How a job that was accepted (202) comes to its end: its handler says it to any daemon, with the token of the run.
//!
//! Such an end is an end of this daemon like its own: it goes to the same list, is kept in `state_dir`, is said until the database has
//! answered, and is remembered for a switch. Invariant: nobody is told that it holds before the database has confirmed it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde::Deserialize;
use tenure_core::ids::Token;
use tenure_core::retry::Policy;
use tenure_protocol::directives::parse_duration;
use tenure_protocol::output::Output;
use tenure_protocol::verdict::{Ended, Verdict};
use tenure_store::error::StoreError;
use tenure_store::finish::EndKind;
use tenure_store::open::{Found, Hold, Leased};
use tenure_store::session::Db;
use tokio::time::timeout;
use uuid::Uuid;

use crate::ends::Ends;
use crate::events;
use crate::held::Held;
use crate::lanes::care_of;
use crate::leases::Leases;
use crate::settings::{DEFAULT_HOLD, HandlerKind, Handlers};
use crate::tasks::random;

/// How long the database's word is waited for. The end is said on afterwards, and whoever says it again learns of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most characters of what a handler says went wrong.
const MOST_WORDS: usize = 4000;

/// See the module. Ready when the daemon has started to work.
#[derive(Debug)]
pub struct Completions {
    handlers: Handlers,
    max_result: usize,
    work: OnceLock<(Arc<Ends>, Arc<Leases>)>,
}

/// What a handler says of a run.
#[derive(Debug, Clone)]
pub enum Said {
    /// It did its work.
    Completed {
        /// JSON; with the key `tenure` it asks for more.
        result: Option<String>,
    },
    /// It failed.
    Failed {
        /// What went wrong.
        message: Option<String>,
        /// It may be tried again.
        retry: bool,
        /// Not before this time from now.
        after: Option<String>,
    },
}

/// How a run goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its lease stands for so long from now.
    pub left: Duration,
    /// A person asked for its end: `cancel`, `complete` or `dead`.
    pub stop: Option<String>,
}

/// Why the word of a handler was not taken.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// There is no such job.
    #[error("no job {0}")]
    Unknown(Uuid),
    /// The run has ended, or has lost the job: what it did does not count any more.
    #[error("this run of the job is over: {0}; stop its work, and take nothing of it for done")]
    Stale(String),
    /// It may count; nobody can say it now.
    #[error("{0}")]
    Later(String),
    /// What was said cannot be understood.
    #[error("{0}")]
    Input(String),
    /// The result is too long.
    #[error("the result has {0} bytes; at most {1} are kept (worker.max_result)")]
    TooLong(usize, usize),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Completions {
    /// Those of a daemon with these handlers and this bound on results, which has not started.
    #[must_use]
    pub fn new(handlers: Handlers, max_result: usize) -> Self {
        Self {
            handlers,
            max_result,
            work: OnceLock::new(),
        }
    }

    /// The daemon works.
    pub(crate) fn begin(&self, ends: &Arc<Ends>, leases: &Arc<Leases>) {
        let _ = self.work.set((Arc::clone(ends), Arc::clone(leases)));
    }

    /// A handler says how a run ended. `Ok`: the database has it.
    ///
    /// # Errors
    /// See [`Refused`]. After `Later` the end may still be written.
    pub async fn end(&self, db: &Db, job: Uuid, token: Uuid, said: Said) -> Result<(), Refused> {
        let token = Token(token);
        let ended = self.read(said)?;
        let (ends, _) = self.work()?;
        let found = db.session().await?.find_run(job, token).await?;
        let kind = kind_of(&ended.verdict);
        let leased = match standing(job, kind, found)? {
            Some(leased) => leased,
            None => return Ok(()),
        };
        let job_type = leased.job.job_type.clone();
        let policy = self
            .handlers
            .resolve(&job_type)
            .map_or_else(Policy::default, |handler| handler.retry);
        let attempt = leased.job.attempt;
        let in_series = in_series(&leased.job.options);
        let held = Arc::new(Held {
            care: care_of(&self.handlers, &job_type),
            job: leased.job,
            call: leased.call,
            epoch_no: leased.epoch_no,
        });
        let ended = match in_series || ended.directives.watermark.is_none() {
            true => ended,
            false => good(ended.outside_series())?,
        };
        let retry_in =
            |not_before: Option<Duration>| policy.delay_after(attempt, random(), not_before);
        let waiting = ends
            .push_watched(held.ended(ended, retry_in))
            .map_err(|other| {
                Refused::Stale(format!("it is being written that it has {}", name(other)))
            })?;
        match timeout(PATIENCE, waiting).await {
            Ok(Ok(true)) => {
                events::ended_elsewhere(&job_type, name(kind));
                Ok(())
            }
            Ok(Ok(false)) => Err(Refused::Stale("it had lost the job".to_owned())),
            Ok(Err(_)) | Err(_) => Err(Refused::Later(
                "the database has not confirmed it yet; it is kept and will be written: say it again to learn of it".to_owned(),
            )),
        }
    }

    /// A handler says that it is still at work.
    ///
    /// # Errors
    /// See [`Refused`].
    pub async fn keep(
        &self,
        db: &Db,
        job: Uuid,
        token: Uuid,
        length: Option<String>,
    ) -> Result<Kept, Refused> {
        let token = Token(token);
        let length = length.map(|text| span("for", &text)).transpose()?;
        let (_, leases) = self.work()?;
        let session = db.session().await?;
        let found = session.find_run(job, token).await?;
        let Some(leased) = standing(job, EndKind::Released, found)? else {
            return Err(Refused::Stale("it was given back".to_owned()));
        };
        let (worker, epoch) = leases.member().ok_or_else(|| {
            Refused::Later("this daemon is not registered with the database now".to_owned())
        })?;
        let hold = Hold {
            job: leased.job.id,
            token,
            length: Some(length.unwrap_or_else(|| self.hold_of(&leased.job.job_type))),
        };
        let answers = session.hold(worker, epoch, &[hold], false).await?;
        match answers.into_iter().find(|answer| answer.stands) {
            Some(answer) => Ok(Kept {
                left: answer.left.unwrap_or_default(),
                stop: answer.stop,
            }),
            None => Err(Refused::Stale("it has just lost the job".to_owned())),
        }
    }

    /// For how long a job of this type is held when nobody says it.
    fn hold_of(&self, job_type: &str) -> Duration {
        match self.handlers.resolve(job_type).map(|handler| handler.kind) {
            Some(HandlerKind::Http(http)) => http.accepts.hold,
            _ => DEFAULT_HOLD,
        }
    }

    fn work(&self) -> Result<&(Arc<Ends>, Arc<Leases>), Refused> {
        let later = || Refused::Later("this daemon does not work yet".to_owned());
        self.work.get().ok_or_else(later)
    }

    /// What was said, as the end of an attempt.
    fn read(&self, said: Said) -> Result<Ended, Refused> {
        match said {
            Said::Completed { result } => {
                let bytes = result.unwrap_or_default().into_bytes();
                if bytes.len() > self.max_result {
                    return Err(Refused::TooLong(bytes.len(), self.max_result));
                }
                good(Ended::answered(&Output {
                    bytes,
                    complete: true,
                    ..Output::default()
                }))
            }
            Said::Failed {
                message,
                retry,
                after,
            } => {
                let not_before = after.map(|text| span("after", &text)).transpose()?;
                let verdict = match retry {
                    true => Verdict::Retry {
                        not_before,
                        long: false,
                    },
                    false => Verdict::Dead,
                };
                let words = message.filter(|words| !words.trim().is_empty());
                let words = words.unwrap_or_else(|| "the handler said that it failed".to_owned());
                let cut = words.char_indices().nth(MOST_WORDS).map(|(at, _)| at);
                let words = &words[..cut.unwrap_or(words.len())];
                Ok(Ended::because(verdict, words.replace('\0', "\u{2400}")))
            }
        }
    }
}

/// A result that asks for something which cannot be done is no end: its handler is there, and can say it right.
fn good(ended: Ended) -> Result<Ended, Refused> {
    match ended.verdict {
        Verdict::Retry { .. } => Err(Refused::Input(ended.error.unwrap_or_default())),
        _ => Ok(ended),
    }
}

/// The lease under which a run may end so; `None`: it has ended so before.
fn standing(job: Uuid, kind: EndKind, found: Found) -> Result<Option<Leased>, Refused> {
    if let Some(leased) = found.leased {
        return Ok(Some(*leased));
    }
    if found.ended.as_deref() == Some(name(kind)) && kind != EndKind::Released {
        return Ok(None);
    }
    if !found.settled {
        // What is not here may have been lost by a switch, and its worker has not spoken.
        return Err(Refused::Later(
            "the database was switched or restarted, and its workers have not all said what they hold".to_owned(),
        ));
    }
    let Some(status) = found.status else {
        return Err(Refused::Unknown(job));
    };
    Err(Refused::Stale(match found.ended {
        Some(ended) => format!("it ended as {ended}, and the job is {status}"),
        None => format!("the job is {status}"),
    }))
}

fn in_series(options: &str) -> bool {
    #[derive(Deserialize)]
    struct Options {
        watermark: Option<String>,
    }
    serde_json::from_str::<Options>(options).is_ok_and(|options| options.watermark.is_some())
}

fn span(key: &str, text: &str) -> Result<Duration, Refused> {
    let length = parse_duration(text).filter(|length| !length.is_zero());
    length.ok_or_else(|| {
        Refused::Input(format!(
            "{key}: found {text:?}; a duration such as \"30s\" or \"1h 30m\" is expected"
        ))
    })
}

fn kind_of(verdict: &Verdict) -> EndKind {
    match verdict {
        Verdict::Done => EndKind::Completed,
        Verdict::Snooze(_) => EndKind::Snoozed,
        _ => EndKind::Failed,
    }
}

fn name(kind: EndKind) -> &'static str {
    match kind {
        EndKind::Completed => "completed",
        EndKind::Failed => "failed",
        EndKind::Snoozed => "snoozed",
        EndKind::Released => "released",
        EndKind::Crashed => "crashed",
    }
}
