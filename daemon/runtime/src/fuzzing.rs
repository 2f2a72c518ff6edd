//! What the targets in `fuzz/` call of this crate. Not there in an ordinary build.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tenure_core::ids::{Beat, Call, JobId, Lane, Run, Token, WorkerId};
use tenure_core::replay::{Bounds, Replay};
use tenure_core::time::Mono;
use tenure_protocol::verdict::Ended;
use tenure_store::claim::Claimed;
use uuid::Uuid;

use crate::exec::{Limits, after, answered};
use crate::held::{Held, Statement};
use crate::journal::{Journal, JournalError, Legacy};
use crate::lanes::Care;

/// What this answer of an HTTP handler means.
pub async fn http_answer(limits: Limits, response: reqwest::Response) -> Ended {
    let until = after(Duration::from_secs(60));
    answered(limits, "http://handler/", response, until).await
}

/// What a daemon finds in the `state_dir` at `dir`, and what the next one finds there if this one only writes it anew: in words
/// that are the same if the meaning is.
///
/// # Errors
/// Of the files.
pub fn found_twice(dir: &Path) -> Result<[String; 2], JournalError> {
    let (mut journal, found) = Journal::open(dir)?;
    let failed = |error| JournalError::Io {
        path: dir.to_owned(),
        error,
    };
    let mut remembered = Replay::new(Mono::ZERO, Bounds::default(), found.covers_from);
    for (beat, end) in &found.answered {
        let sent = Beat(first(*beat).0 - 1);
        remembered.answered(Mono::ZERO, sent, end.clone());
    }
    if found.recent {
        journal.lives().map_err(failed)?;
    }
    journal
        .compact(
            found.workers.last().copied(),
            found.ends.iter(),
            &remembered,
        )
        .map_err(failed)?;
    drop(journal);
    let (_, again) = Journal::open(dir)?;
    let _ = (found.seen.to_replace(), again.seen.to_replace());
    Ok([in_words(&found), in_words(&again)])
}

/// Notes in the `state_dir` at `dir` how a run has ended, and then that it was answered; says whether it is found as it was noted,
/// both times.
///
/// # Errors
/// Of the files.
pub fn is_found(dir: &Path, data: &str, ended: Ended) -> Result<bool, JournalError> {
    let failed = |error| JournalError::Io {
        path: dir.to_owned(),
        error,
    };
    let statement = held(data).ended(ended, |wait| wait.unwrap_or_default());
    let token = statement.end.token;
    let noted = one_line(&statement);
    let is_noted = |end: &Statement| end.end.token == token && one_line(end) == noted;
    let (mut journal, _) = Journal::open(dir)?;
    journal.ended(&statement).map_err(failed)?;
    drop(journal);
    let (mut journal, found) = Journal::open(dir)?;
    journal.answered(token, Beat(7)).map_err(failed)?;
    drop(journal);
    let (_, answered) = Journal::open(dir)?;
    Ok(found.ends.last().is_some_and(is_noted)
        && answered
            .answered
            .last()
            .is_some_and(|(beat, end)| *beat == Beat(7) && is_noted(end)))
}

/// Heartbeats are counted from 1.
fn first(beat: Beat) -> Beat {
    beat.max(Beat(1))
}

fn in_words(found: &Legacy) -> String {
    let worker: Option<WorkerId> = found.workers.last().copied();
    let mut answered: Vec<(Beat, String)> = found
        .answered
        .iter()
        .map(|(beat, end)| (first(*beat), one_line(end)))
        .collect();
    answered.sort_by_key(|(beat, _)| *beat);
    let ends: Vec<String> = found.ends.iter().map(one_line).collect();
    let covers_from = found.covers_from.max(Beat(0));
    let (seen, recent) = (found.seen, found.recent);
    format!("{worker:?} {ends:#?} {answered:#?} {covers_from} {seen:?} {recent}")
}

/// White space between the tokens of a raw value has no meaning, and to the database the result `null` is none.
fn one_line(end: &Statement) -> String {
    serde_json::to_string(&end.written())
        .unwrap_or_default()
        .replace('\n', " ")
        .replace(",\"result\":null", "")
}

fn held(data: &str) -> Arc<Held> {
    let start = SystemTime::UNIX_EPOCH;
    let job = Claimed {
        id: JobId(Uuid::max()),
        run: Run(3),
        token: Token(Uuid::max()),
        attempt: 2,
        max_attempts: 5,
        lane: Lane(1),
        job_type: "report".to_owned(),
        tenant: "default".to_owned(),
        priority: -1,
        pos: 9,
        ready_at: start,
        started_at: start,
        created_at: start,
        run_at: start,
        timeout: Some(Duration::from_secs(7)),
        unique_key: None,
        data: data.to_owned(),
        labels: "{}".to_owned(),
        options: "{}".to_owned(),
        alone: false,
        watermark: None,
    };
    Arc::new(Held {
        job,
        call: Call(4),
        epoch_no: 2,
        care: Care::default(),
    })
}
