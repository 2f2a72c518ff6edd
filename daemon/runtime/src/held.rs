//! A claimed job, and what is said of it to the database.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tenure_core::ids::{Call, Token};
use tenure_core::replay::Record;
use tenure_protocol::directives::FollowUp;
use tenure_protocol::verdict::{Ended, Verdict};
use tenure_store::claim::Claimed;
use tenure_store::finish::{EndKind, RunEnd};
use uuid::Uuid;

use crate::lanes::Care;

/// A handler that wants to be asked again at once is asked again after this: each time leaves a row.
const SHORTEST_SNOOZE: Duration = Duration::from_secs(1);

/// A job under a lease of this worker.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    /// As it was claimed.
    pub job: Claimed,
    /// By which call.
    pub call: Call,
    /// In which epoch.
    pub epoch_no: i64,
    /// What its handler asks for.
    pub care: Care,
}

/// What `reattach` needs of a run beside how it ended, so that it can put back what the database has lost.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Background {
    call: i64,
    attempt: i32,
    max_attempts: i32,
    epoch_no: i64,
    started_at: String,
    /// A lease with a time of its own: what is left of it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    until_ms: Option<u64>,
    #[serde(default)]
    care: Care,
    /// `None`: it was reduced, so its job cannot be put back.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    row: Option<Box<RawValue>>,
}

/// The end of a run, complete enough to be said to a database that knows nothing of it.
#[derive(Debug, Clone)]
pub(crate) struct Statement {
    /// How it ended.
    pub(crate) end: RunEnd,
    /// Until the next attempt, should the database refuse its follow-up jobs: by the policy of its handler.
    pub(crate) refused_ms: Option<u64>,
    /// Written out only when it is needed: in the journal, and in a re-attach.
    origin: Origin,
}

#[derive(Debug, Clone)]
enum Origin {
    /// A run of this process.
    Held(Arc<Held>),
    /// From the journal.
    Written(Background),
}

/// A statement as the journal keeps it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    /// How it ended.
    pub(crate) end: RunEnd,
    background: Background,
}

impl Held {
    /// Its lease.
    #[must_use]
    pub(crate) fn token(&self) -> Token {
        self.job.token
    }

    /// The end of this run with nothing but its kind.
    fn end(&self, kind: EndKind) -> RunEnd {
        RunEnd {
            kind,
            job: self.job.id,
            run: self.job.run,
            token: self.job.token,
            delay_ms: None,
            final_: false,
            exit_code: None,
            http_status: None,
            result: None,
            error: None,
            log_tail: None,
            enqueue: None,
            watermark: None,
        }
    }

    /// Given back, and not to be taken again for a while.
    #[must_use]
    pub(crate) fn released_for(self: &Arc<Self>, wait: Duration) -> Statement {
        let mut end = self.end(EndKind::Released);
        end.delay_ms = Some(millis(wait));
        self.said(end)
    }

    /// Given back for a while, since no handler has seen it.
    #[must_use]
    pub(crate) fn not_seen(self: &Arc<Self>, wait: Duration, why: Option<String>) -> Statement {
        let mut statement = self.released_for(wait);
        statement.end.error = why;
        statement
    }

    fn said(self: &Arc<Self>, end: RunEnd) -> Statement {
        Statement {
            end,
            refused_ms: None,
            origin: Origin::Held(Arc::clone(self)),
        }
    }

    fn background(&self) -> Background {
        Background {
            call: self.call.0,
            attempt: self.job.attempt,
            max_attempts: self.job.max_attempts,
            epoch_no: self.epoch_no,
            started_at: humantime::format_rfc3339_micros(self.job.started_at).to_string(),
            until_ms: None,
            care: self.care,
            row: Some(self.row()),
        }
    }

    /// The job as `reattach` puts it back.
    fn row(&self) -> Box<RawValue> {
        #[derive(Serialize)]
        struct Row<'a> {
            job_type: &'a str,
            tenant: &'a str,
            priority: i32,
            created_at: String,
            run_at: String,
            unique_key: &'a Option<String>,
            timeout: Option<String>,
            data: &'a RawValue,
            labels: &'a RawValue,
            options: &'a RawValue,
        }
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap_or_default();
        let job = &self.job;
        serde_json::value::to_raw_value(&Row {
            job_type: &job.job_type,
            tenant: &job.tenant,
            priority: job.priority,
            created_at: humantime::format_rfc3339_micros(job.created_at).to_string(),
            run_at: humantime::format_rfc3339_micros(job.run_at).to_string(),
            unique_key: &job.unique_key,
            timeout: job
                .timeout
                .map(|timeout| format!("{} milliseconds", timeout.as_millis())),
            data: &raw(&job.data),
            labels: &raw(&job.labels),
            options: &raw(&job.options),
        })
        .unwrap_or_default()
    }

    /// Not run, or not to its end: given back.
    #[must_use]
    pub(crate) fn released(self: &Arc<Self>) -> Statement {
        self.said(self.end(EndKind::Released))
    }

    /// What the end of its handler means. `retry_in` is asked for the wait before the next attempt, given what the handler
    /// demands at least.
    #[must_use]
    pub(crate) fn ended(
        self: &Arc<Self>,
        ended: Ended,
        retry_in: impl Fn(Option<Duration>) -> Duration,
    ) -> Statement {
        let kind = match ended.verdict {
            Verdict::Done => EndKind::Completed,
            Verdict::Retry { .. } | Verdict::Dead => EndKind::Failed,
            Verdict::Snooze(_) => EndKind::Snoozed,
            // Whose end is not for us to say is never said to have ended; as a release it would lose nothing.
            Verdict::Stopped | Verdict::Held => EndKind::Released,
            Verdict::Crashed => EndKind::Crashed,
        };
        let mut end = self.end(kind);
        match ended.verdict {
            Verdict::Retry { not_before, .. } => end.delay_ms = Some(millis(retry_in(not_before))),
            Verdict::Dead => end.final_ = true,
            Verdict::Snooze(wait) => end.delay_ms = Some(millis(wait.max(SHORTEST_SNOOZE))),
            Verdict::Done | Verdict::Stopped | Verdict::Held | Verdict::Crashed => {}
        }
        end.exit_code = ended.exit_code;
        end.http_status = ended.http_status.map(i32::from);
        end.result = ended
            .result
            .and_then(|text| RawValue::from_string(text).ok());
        end.error = ended.error;
        end.log_tail = ended.log_tail;
        if kind == EndKind::Completed {
            end.watermark = ended
                .directives
                .watermark
                .and_then(|text| RawValue::from_string(text).ok());
        }
        if kind == EndKind::Completed && !ended.directives.enqueue.is_empty() {
            end.enqueue = RawValue::from_string(follow_ups(&ended.directives.enqueue)).ok();
            return Statement {
                refused_ms: Some(millis(retry_in(None))),
                ..self.said(end)
            };
        }
        self.said(end)
    }

    /// For `reattach`: this run goes on.
    #[must_use]
    pub(crate) fn hold(&self) -> String {
        hold(
            &self.end(EndKind::Released),
            &self.background(),
            self.care.rerun,
        )
    }
}

impl Statement {
    /// For `reattach`: the lease of this run must stand until its end has been written the ordinary way. No claim call is
    /// ever that high, so no heartbeat takes it for an unanswered one.
    #[must_use]
    pub(crate) fn hold(&self) -> String {
        let background = Background {
            call: i64::MAX,
            ..self.background()
        };
        hold(&self.end, &background, self.reruns())
    }

    /// For `reattach`: this run goes on elsewhere, for so long by itself.
    #[must_use]
    pub(crate) fn hold_for(&self, left: Duration) -> String {
        let background = Background {
            call: i64::MAX,
            until_ms: Some(millis(left).max(1)),
            ..self.background()
        };
        hold(&self.end, &background, self.care().rerun)
    }

    /// For `reattach`: this end was answered, and is said again in case it was lost.
    #[must_use]
    pub(crate) fn again(&self) -> String {
        spliced(&[
            &json(&self.end),
            &json(&self.background()),
            &format!(r#"{{"confirmed":true,"rerun":{}}}"#, self.reruns()),
        ])
    }

    /// Whether its effects were in this database.
    #[must_use]
    pub(crate) fn reruns(&self) -> bool {
        self.care().rerun && self.end.kind == EndKind::Completed
    }

    /// What its handler asks for.
    #[must_use]
    pub(crate) fn care(&self) -> Care {
        match &self.origin {
            Origin::Held(held) => held.care,
            Origin::Written(background) => background.care,
        }
    }

    /// The same run, given back.
    #[must_use]
    pub(crate) fn given_back(&self) -> Self {
        Self {
            end: RunEnd {
                kind: EndKind::Released,
                delay_ms: None,
                final_: false,
                exit_code: None,
                http_status: None,
                result: None,
                error: None,
                log_tail: None,
                enqueue: None,
                watermark: None,
                ..self.end.clone()
            },
            refused_ms: None,
            origin: self.origin.clone(),
        }
    }

    /// About how many bytes it takes to put its job back.
    #[must_use]
    pub(crate) fn kept_size(&self) -> usize {
        Record::size(self)
    }

    /// About how many bytes its end has.
    #[must_use]
    pub(crate) fn size(&self) -> usize {
        let raw =
            |value: &Option<Box<RawValue>>| value.as_ref().map_or(0, |value| value.get().len());
        let text = |value: &Option<String>| value.as_ref().map_or(0, String::len);
        raw(&self.end.result)
            + raw(&self.end.enqueue)
            + text(&self.end.error)
            + text(&self.end.log_tail)
    }

    /// For the journal.
    #[must_use]
    pub(crate) fn written(&self) -> Written {
        Written {
            end: self.end.clone(),
            background: self.background(),
        }
    }

    fn background(&self) -> Background {
        match &self.origin {
            Origin::Held(held) => held.background(),
            Origin::Written(background) => background.clone(),
        }
    }
}

/// What is kept of an end that the database has confirmed.
impl Record for Statement {
    fn size(&self) -> usize {
        let row = match &self.origin {
            Origin::Held(held) => {
                held.job.data.len() + held.job.labels.len() + held.job.options.len()
            }
            Origin::Written(background) => background.row.as_ref().map_or(0, |row| row.get().len()),
        };
        let follow_ups = self.end.enqueue.as_ref().map_or(0, |jobs| jobs.get().len());
        row + Statement::size(self) - follow_ups
    }

    fn reduce(&mut self) {
        self.origin = Origin::Written(Background {
            row: None,
            ..self.background()
        });
        // Its follow-up jobs stay: without them work would be lost.
        self.end.result = None;
        self.end.error = None;
        self.end.log_tail = None;
    }
}

impl From<Written> for Statement {
    fn from(written: Written) -> Self {
        Self {
            end: written.end,
            refused_ms: None,
            origin: Origin::Written(written.background),
        }
    }
}

fn hold(run: &RunEnd, background: &Background, rerun: bool) -> String {
    let named = format!(
        r#"{{"kind":"hold","job":"{}","run":{},"token":"{}","rerun":{rerun}}}"#,
        run.job, run.run, run.token
    );
    spliced(&[&named, &json(background)])
}

/// The follow-up jobs, each with an id made now: a repeated statement enqueues nothing twice.
fn follow_ups(jobs: &[FollowUp]) -> String {
    let with_id = jobs
        .iter()
        .map(|job| spliced(&[&format!(r#"{{"id":"{}"}}"#, Uuid::now_v7()), &job.to_json()]));
    format!("[{}]", with_id.collect::<Vec<_>>().join(","))
}

fn millis(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)
}

fn json(value: &impl Serialize) -> String {
    // Only a map with keys that are no strings, or a failing Serialize of our own, could fail here.
    serde_json::to_string(value).unwrap_or_default()
}

/// One JSON object with the members of several, none of them empty. As text: flattening by serde would parse raw values.
fn spliced(objects: &[&str]) -> String {
    let inner = objects.iter().map(|object| {
        let object = object.trim();
        object
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'))
            .unwrap_or_default()
    });
    format!("{{{}}}", inner.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::SystemTime;

    use serde_json::Value;
    use tenure_core::ids::{JobId, Lane, Run};

    use super::*;

    /// A claimed job whose data would not survive a parse.
    pub(crate) fn held() -> Arc<Held> {
        let job = Claimed {
            id: JobId(Uuid::now_v7()),
            run: Run(3),
            token: Token(Uuid::new_v4()),
            attempt: 2,
            max_attempts: 5,
            lane: Lane(1),
            job_type: "re\"port".into(),
            tenant: "default".into(),
            priority: -1,
            pos: 9,
            ready_at: SystemTime::UNIX_EPOCH,
            started_at: SystemTime::UNIX_EPOCH,
            created_at: SystemTime::UNIX_EPOCH,
            run_at: SystemTime::UNIX_EPOCH,
            timeout: Some(Duration::from_secs(7)),
            unique_key: None,
            data: r#"{"n": 18446744073709551616, "d": 0.10000000000000000000001}"#.into(),
            labels: "{}".into(),
            options: "{}".into(),
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

    #[test]
    fn a_statement_is_one_object_with_the_whole_job_and_every_digit() {
        let held = held();
        for (text, call) in [(held.hold(), 4), (held.released().hold(), i64::MAX)] {
            let value: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(value["run"], 3);
            assert_eq!(value["attempt"], 2);
            assert_eq!(value["call"], call);
            assert_eq!(value["kind"], "hold");
            assert_eq!(value["epoch_no"], 2);
            assert_eq!(value["row"]["job_type"], "re\"port");
            assert_eq!(value["row"]["timeout"], "7000 milliseconds");
            assert!(text.contains(&held.job.data), "{text}");
        }
    }

    #[test]
    fn follow_ups_get_ids_before_they_are_said() {
        let ended = Ended {
            directives: tenure_protocol::directives::Directives {
                enqueue: vec![FollowUp {
                    job_type: "next".into(),
                    ..FollowUp::default()
                }],
                snooze: None,
                watermark: None,
            },
            ..Ended::new(Verdict::Done)
        };
        let end = held().ended(ended, |_| Duration::ZERO).end;
        let jobs: Value = serde_json::from_str(end.enqueue.unwrap().get()).unwrap();
        assert_eq!(jobs[0]["job_type"], "next");
        assert_eq!(
            Uuid::parse_str(jobs[0]["id"].as_str().unwrap())
                .unwrap()
                .get_version_num(),
            7
        );
    }

    #[test]
    fn verdicts_become_ends() {
        let end = |verdict| {
            held()
                .ended(Ended::new(verdict), |not_before| {
                    not_before.unwrap_or(Duration::from_secs(60))
                })
                .end
        };
        assert_eq!(
            (end(Verdict::Done).kind, end(Verdict::Stopped).kind),
            (EndKind::Completed, EndKind::Released)
        );
        assert_eq!(end(Verdict::RETRY).delay_ms, Some(60_000));
        assert_eq!(
            (end(Verdict::Dead).kind, end(Verdict::Dead).final_),
            (EndKind::Failed, true)
        );
        assert_eq!(
            end(Verdict::Snooze(Duration::from_secs(5))).delay_ms,
            Some(5000)
        );
    }
}
