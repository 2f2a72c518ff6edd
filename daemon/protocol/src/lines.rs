//! What a daemon and a `process` handler write to each other: one JSON object a line, in both directions.
//!
//! Invariant: a line is understood as a whole or refused with what is wrong; a line without an end never takes more memory than
//! its bound.

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::directives::parse_duration;
use crate::envelope::Envelope;
use crate::json::Object;
use crate::output::Output;
use crate::verdict::{Ended, Verdict};

/// The most jobs at once that a process can ask for; a larger number is taken for a mistake.
pub const MOST_JOBS: u32 = 10_000;

/// How much of a bad line is quoted.
const QUOTED: usize = 200;

/// The line that gives a process a job. The envelope's `type` is the line's, so the job type stands under `job_type`.
pub fn job(envelope: &Envelope<'_>) -> String {
    let mut line = envelope.to_line();
    line.push('\n');
    line
}

/// The line that asks a process to stop work on a job. It answers for the job all the same, if it can.
pub fn cancel(job: Uuid) -> String {
    let mut line = Object::with_capacity(80);
    line.text("type", "cancel").text("id", &job.to_string());
    line.finish() + "\n"
}

/// The line after which no job comes any more: the process answers for those that it has, and ends.
pub fn drain() -> &'static str {
    "{\"type\":\"drain\"}\n"
}

/// What a process says in one line.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// It takes jobs, so many at once.
    Ready {
        /// At least 1.
        concurrency: u32,
    },
    /// A job has ended.
    Ended {
        /// The job.
        id: Uuid,
        /// The run that it answers for, where it says so.
        token: Option<Uuid>,
        /// How.
        ended: Box<Ended>,
    },
    /// How far a job has come.
    Progress {
        /// The job.
        id: Uuid,
        /// From 0 to 100.
        percent: Option<f64>,
        /// For people.
        note: Option<String>,
    },
}

/// A line that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}: {line}")]
pub struct BadLine {
    problem: String,
    /// Its beginning, in quotes.
    line: String,
}

impl BadLine {
    fn new(problem: impl Into<String>, line: &[u8]) -> Self {
        let cut = &line[..line.len().min(QUOTED)];
        let dots = if cut.len() < line.len() { "…" } else { "" };
        Self {
            problem: problem.into(),
            line: format!("{:?}{dots}", String::from_utf8_lossy(cut)),
        }
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: String,
    id: Option<String>,
    token: Option<Uuid>,
    concurrency: Option<u32>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    message: Option<String>,
    retry: Option<bool>,
    after: Option<String>,
    percent: Option<f64>,
    note: Option<String>,
}

/// Reads one line of a process, without its end. Unknown keys are left alone: a later version may know them.
///
/// # Errors
/// When it is no such object, or lacks what its type needs.
pub fn read(line: &[u8]) -> Result<Said, BadLine> {
    let bad = |problem: String| BadLine::new(problem, line);
    let text = std::str::from_utf8(line).map_err(|_| bad("a line is not UTF-8".to_owned()))?;
    let said: Line<'_> = serde_json::from_str(text).map_err(|error| {
        bad(format!(
            "a line is no answer ({error}); standard output is for the protocol alone, logs go to standard error"
        ))
    })?;
    let id = || {
        let id = said.id.as_deref().and_then(|id| Uuid::parse_str(id).ok());
        id.ok_or_else(|| bad(format!("a {:?} line needs the id of its job", said.kind)))
    };
    match said.kind.as_str() {
        "ready" => match said.concurrency.unwrap_or(1) {
            concurrency @ 1..=MOST_JOBS => Ok(Said::Ready { concurrency }),
            _ => Err(bad(format!("concurrency must be from 1 to {MOST_JOBS}"))),
        },
        "result" => Ok(Said::Ended {
            id: id()?,
            token: said.token,
            ended: Box::new(Ended::answered(&output(said.result))),
        }),
        "error" => Ok(Said::Ended {
            id: id()?,
            token: said.token,
            ended: Box::new(failed(&said).map_err(bad)?),
        }),
        "progress" => match said.percent {
            Some(percent) if !(0.0..=100.0).contains(&percent) => {
                Err(bad("percent must be from 0 to 100".to_owned()))
            }
            percent => Ok(Said::Progress {
                id: id()?,
                percent,
                note: said.note.clone(),
            }),
        },
        other => Err(bad(format!(
            "the type {other:?} is none of ready, result, error, progress"
        ))),
    }
}

fn output(result: Option<&RawValue>) -> Output {
    let text = result.map_or("", RawValue::get);
    Output {
        bytes: text.as_bytes().to_vec(),
        complete: true,
        names_tenure: text.contains("\"tenure\""),
    }
}

fn failed(said: &Line<'_>) -> Result<Ended, String> {
    let after = said.after.as_deref();
    let after = after
        .map(|text| parse_duration(text).ok_or("after is no duration such as \"30s\" or \"5m\""))
        .transpose()?;
    let verdict = match said.retry {
        Some(false) => Verdict::Dead,
        _ => Verdict::Retry {
            not_before: after,
            long: false,
        },
    };
    let message = said.message.as_deref().unwrap_or_default().trim();
    let message = if message.is_empty() {
        "the handler said that it failed, and not why"
    } else {
        message
    };
    Ok(Ended::because(
        verdict,
        crate::verdict::shortened(&message.replace('\0', "\u{2400}")),
    ))
}

/// Cuts a stream of bytes into lines of at most so many bytes.
#[derive(Debug)]
pub struct Lines {
    limit: usize,
    /// The beginning of a line whose end has not come.
    open: Vec<u8>,
}

/// A line is longer than its bound. What follows in the stream means nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a line is longer than {limit} bytes")]
pub struct TooLong {
    /// The bound, without the line's end.
    pub limit: usize,
}

impl Lines {
    /// Lines of at most `limit` bytes, their ends not counted.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            open: Vec::new(),
        }
    }

    /// Takes what came and hands each line that is whole to `each`. Empty lines are left out, and a carriage return before the
    /// end belongs to it.
    ///
    /// # Errors
    /// [`TooLong`]; and the first error of `each`.
    pub fn push<E: From<TooLong>>(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            bytes = rest;
            if self.open.is_empty() {
                self.whole(line, &mut each)?;
            } else {
                self.keep(line)?;
                let line = std::mem::take(&mut self.open);
                self.whole(&line, &mut each)?;
            }
        }
        Ok(self.keep(bytes)?)
    }

    fn whole<E: From<TooLong>>(
        &self,
        line: &[u8],
        each: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() > self.limit {
            return Err(TooLong { limit: self.limit }.into());
        }
        if line.is_empty() {
            return Ok(());
        }
        each(line)
    }

    fn keep(&mut self, part: &[u8]) -> Result<(), TooLong> {
        // One more for a carriage return.
        if self.open.len() + part.len() > self.limit.saturating_add(1) {
            return Err(TooLong { limit: self.limit });
        }
        self.open.extend_from_slice(part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;
    use proptest::prelude::*;

    const ID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

    fn id() -> Uuid {
        Uuid::parse_str(ID).unwrap()
    }

    fn ended(text: &str) -> Ended {
        match read(text.as_bytes()).unwrap() {
            Said::Ended { id: of, ended, .. } if of == id() => *ended,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_job_is_one_line_and_its_type_stands_apart() {
        let envelope = Envelope {
            id: id(),
            job_type: "score",
            data: r#"{"n": 18446744073709551616}"#,
            attempt: 1,
            max_attempts: 3,
            token: Uuid::max(),
            tenant: "default",
            enqueued_at: "2026-11-30T20:00:00Z",
            callback: None,
            deadline: None,
            watermark: None,
            traceparent: None,
        };
        let line = job(&envelope);
        assert!(line.starts_with(&format!(
            r#"{{"type":"job","id":"{ID}","job_type":"score","data":{{"n": 18446744073709551616}},"#
        )));
        assert_eq!(line.matches('\n').count(), 1);
        assert!(line.ends_with("}\n"));
        assert_eq!(
            cancel(id()),
            format!("{{\"type\":\"cancel\",\"id\":\"{ID}\"}}\n")
        );
    }

    #[test]
    fn hellos() {
        assert_eq!(
            read(br#"{"type":"ready","concurrency":8,"later":1}"#),
            Ok(Said::Ready { concurrency: 8 })
        );
        assert_eq!(
            read(br#"{"type":"ready"}"#),
            Ok(Said::Ready { concurrency: 1 })
        );
        for bad in ["0", "10001", "-1", "1.5", "\"8\""] {
            let line = format!(r#"{{"type":"ready","concurrency":{bad}}}"#);
            assert!(read(line.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn results_keep_their_digits_and_ask_for_more() {
        let done = ended(&format!(
            r#"{{"type":"result","id":"{ID}","result":{{"n":18446744073709551616,"tenure":{{"watermark":7}}}}}}"#
        ));
        assert_eq!(done.verdict, Verdict::Done);
        assert_eq!(done.result.unwrap(), r#"{"n":18446744073709551616}"#);
        assert_eq!(done.directives.watermark.unwrap(), "7");
        let plain = ended(&format!(r#"{{"type":"result","id":"{ID}"}}"#));
        assert_eq!((plain.verdict, plain.result), (Verdict::Done, None));
    }

    #[test]
    fn an_answer_may_name_its_run() {
        let line = format!(r#"{{"type":"result","id":"{ID}","token":"{ID}"}}"#);
        let Ok(Said::Ended { token, .. }) = read(line.as_bytes()) else {
            panic!("{line}");
        };
        assert_eq!(token, Some(id()));
    }

    #[test]
    fn errors_say_whether_and_when_again() {
        let error = |more: &str| ended(&format!(r#"{{"type":"error","id":"{ID}"{more}}}"#));
        assert_eq!(error(r#","message":"no""#).verdict, Verdict::RETRY);
        assert_eq!(error(r#","message":"no""#).error.unwrap(), "no");
        assert_eq!(error(r#","retry":false"#).verdict, Verdict::Dead);
        assert_eq!(
            error(r#","retry":true,"after":"30s""#).verdict,
            Verdict::Retry {
                not_before: Some(Duration::from_secs(30)),
                long: false
            }
        );
        assert!(error("").error.unwrap().contains("not why"));
        assert_eq!(error(r#","message":"a\u0000b""#).error.unwrap(), "a␀b");
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, problem) in [
            ("loading model…", "standard output is for the protocol"),
            ("[]", "no answer"),
            ("{}", "no answer"),
            (r#"{"type":"done"}"#, "\"done\" is none of"),
            (r#"{"type":"result"}"#, "needs the id"),
            (r#"{"type":"result","id":"7"}"#, "needs the id"),
            (r#"{"type":"error"}"#, "needs the id"),
            (
                r#"{"type":"progress","id":"01890a5d-ac96-774b-bcce-b302099a8057","percent":101}"#,
                "percent",
            ),
            (
                r#"{"type":"error","id":"01890a5d-ac96-774b-bcce-b302099a8057","after":"soon"}"#,
                "after",
            ),
        ] {
            let error = read(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(problem), "{line}: {error}");
        }
        let error = read(&[b'x'; 100_000]).unwrap_err().to_string();
        assert!(error.len() < 600, "{error}");
        assert!(read(b"\xff").unwrap_err().to_string().contains("UTF-8"));
    }

    fn cut(limit: usize, chunks: &[&[u8]]) -> (Vec<Vec<u8>>, Result<(), TooLong>) {
        let (mut lines, mut out) = (Lines::new(limit), Vec::new());
        for chunk in chunks {
            let pushed = lines.push(chunk, |line| {
                out.push(line.to_vec());
                Ok(())
            });
            if pushed.is_err() {
                return (out, pushed);
            }
        }
        (out, Ok(()))
    }

    #[test]
    fn a_line_without_an_end_stays_small() {
        let mut lines = Lines::new(1000);
        for _ in 0..10 {
            lines.push(&[b'x'; 100], |_| Ok::<(), TooLong>(())).unwrap();
        }
        assert_eq!(
            lines.push(&[b'x'; 100], |_| Ok(())),
            Err(TooLong { limit: 1000 })
        );
        assert!(lines.open.capacity() <= 2048);
    }

    #[test]
    fn lines_may_be_as_long_as_the_bound() {
        assert_eq!(
            cut(3, &[b"abc\r\n\r\n\na", b"bc\n"]),
            (vec![b"abc".to_vec(), b"abc".to_vec()], Ok(()))
        );
        assert!(cut(3, &[b"abcd\n"]).1.is_err());
        assert!(cut(3, &[b"ab", b"cd\n"]).1.is_err());
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_they_come(text in "[a-c\n]{0,80}", at in 0usize..80) {
            let bytes = text.as_bytes();
            let (one, other) = bytes.split_at(at.min(bytes.len()));
            prop_assert_eq!(cut(100, &[bytes]), cut(100, &[one, other]));
        }

        #[test]
        fn any_bytes_are_read_or_refused(line: Vec<u8>) {
            let _ = read(&line);
        }
    }
}
