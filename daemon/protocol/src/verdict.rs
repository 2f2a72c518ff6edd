//! What the end of an attempt means for its job.
//!
//! Invariant: only an explicit word of the handler (exit 0, a 2xx answer) is a success, and only an explicit word is final
//! at once; everything else is tried again.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use crate::directives::Directives;
use crate::output::Output;
use crate::result;

/// The least delay where the installation is at fault, not the job: a wrong ingress or a missing program must not empty a
/// queue into the dead letters.
pub const LONG_DELAY: Duration = Duration::from_mins(10);

/// The longest `Retry-After` that is honoured.
const LONGEST_RETRY_AFTER: Duration = Duration::from_hours(24);

/// How many characters of a handler's words go into an error.
const QUOTED: usize = 500;

/// What becomes of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The handler did its work.
    Done,
    /// The attempt failed; the policy decides when the job runs again and whether it may.
    Retry {
        /// Not before this time from now, whatever the policy says.
        not_before: Option<Duration>,
        /// The installation looks wrong, not the job (a missing program, a 404): worth an alert and a breaker.
        /// `not_before` is at least [`LONG_DELAY`] then.
        long: bool,
    },
    /// Straight to the dead letters.
    Dead,
    /// The handler has accepted it, and says later how it ended.
    Held,
    /// Run again after this time; the attempt does not count.
    Snooze(Duration),
    /// The handler was stopped on our order, or not started for it: the job goes back, no attempt used.
    Stopped,
    /// The process that ran it and other jobs died, and which of them killed it is not known: the job goes back, no attempt
    /// used, and runs alone from now on.
    Crashed,
}

impl Verdict {
    /// Tried again by the policy alone.
    pub const RETRY: Self = Self::Retry {
        not_before: None,
        long: false,
    };
    /// Tried again after [`LONG_DELAY`] at the earliest.
    pub const RETRY_LONG: Self = Self::Retry {
        not_before: Some(LONG_DELAY),
        long: true,
    };
}

/// What an executor says about one attempt when nothing of it runs any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// What becomes of the job.
    pub verdict: Verdict,
    /// `false`: no connection to the handler could be made, so it never saw the job.
    pub reached: bool,
    /// JSON text for the job's `result`.
    pub result: Option<String>,
    /// What the handler asks for beside; empty unless the verdict is [`Verdict::Done`] or [`Verdict::Snooze`].
    pub directives: Directives,
    /// The exit code of an `exec` handler.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The status of an `http` handler's answer.
    pub http_status: Option<u16>,
    /// Why the attempt did not end well, for a person; can be stored as `text`.
    pub error: Option<String>,
    /// What the handler logged, head and tail; can be stored as `text`.
    pub log_tail: Option<String>,
}

impl Ended {
    /// An end that needs no error: done, or stopped on our order.
    pub fn new(verdict: Verdict) -> Self {
        Self {
            verdict,
            reached: true,
            result: None,
            directives: Directives::default(),
            exit_code: None,
            signal: None,
            http_status: None,
            error: None,
            log_tail: None,
        }
    }

    /// An end that a person wants to know the reason of.
    pub fn because(verdict: Verdict, error: impl Into<String>) -> Self {
        Self {
            error: Some(error.into()),
            ..Self::new(verdict)
        }
    }

    /// The handler did its work and answered `output`. A directive that cannot be carried out makes it a failed attempt,
    /// because the work as a whole is not done.
    pub fn answered(output: &Output) -> Self {
        match result::parse(output) {
            Err(bad) => Self::because(Verdict::RETRY, shortened(&bad.to_string())),
            Ok(parsed) => Self {
                result: parsed.result,
                verdict: parsed
                    .directives
                    .snooze
                    .map_or(Verdict::Done, Verdict::Snooze),
                directives: parsed.directives,
                ..Self::new(Verdict::Done)
            },
        }
    }

    /// The same end of a job that belongs to no series: a watermark has no place there, and what the handler asked for as a whole
    /// is not done.
    #[must_use]
    pub fn outside_series(self) -> Self {
        if self.directives.watermark.is_none() {
            return self;
        }
        let error = "the result's tenure.watermark: this job belongs to no series; enqueue it with options.watermark, the name of one";
        Self {
            verdict: Verdict::RETRY,
            result: None,
            directives: Directives::default(),
            error: Some(error.to_owned()),
            ..self
        }
    }
}

/// What an exit code means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitMeaning {
    /// The work is done.
    Done,
    /// Failed, tried again by the policy.
    Retry,
    /// Never again.
    Dead,
}

/// A handler's own meaning of some exit codes; the others keep the usual one (0 done, 65 never again, the rest retried).
pub type ExitCodes = BTreeMap<i32, ExitMeaning>;

/// What exit `code` means. 126 and 127 are a shell's words for a program that it cannot run.
pub fn exit_verdict(code: i32, own: &ExitCodes) -> Verdict {
    match (own.get(&code), code) {
        (Some(ExitMeaning::Done), _) | (None, 0) => Verdict::Done,
        (Some(ExitMeaning::Dead), _) | (None, 65) => Verdict::Dead,
        (None, 126 | 127) => Verdict::RETRY_LONG,
        (Some(ExitMeaning::Retry), _) | (None, _) => Verdict::RETRY,
    }
}

/// What an HTTP `status` means, with the delay that the answer asks for.
pub fn http_verdict(status: u16, retry_after: Option<Duration>) -> Verdict {
    match status {
        202 => Verdict::Held,
        200..=299 => Verdict::Done,
        300..=399 => Verdict::RETRY,
        400 | 410 | 413 | 415 | 422 => Verdict::Dead,
        408 | 425 | 429 | 500..=599 => Verdict::Retry {
            not_before: retry_after,
            long: false,
        },
        _ => Verdict::RETRY_LONG,
    }
}

/// What a `Retry-After` header asks for: seconds or an HTTP date, at most a day; `None` when it is neither.
pub fn retry_after(header: &str, now: SystemTime) -> Option<Duration> {
    let header = header.trim();
    let asked = if !header.is_empty() && header.bytes().all(|b| b.is_ascii_digit()) {
        header
            .parse()
            .map_or(LONGEST_RETRY_AFTER, Duration::from_secs)
    } else {
        let at = httpdate::parse_http_date(header).ok()?;
        at.duration_since(now).unwrap_or_default()
    };
    Some(asked.min(LONGEST_RETRY_AFTER))
}

/// `what` happened, and what the handler said about it, cut to a length that is pleasant in a table.
pub fn explained(what: &str, words: Option<&str>) -> String {
    let Some(words) = words else {
        return what.to_owned();
    };
    format!("{what}: {}", shortened(words))
}

pub(crate) fn shortened(words: &str) -> String {
    let cut = words
        .char_indices()
        .nth(QUOTED)
        .map_or(words.len(), |(at, _)| at);
    let dots = if cut < words.len() { "…" } else { "" };
    format!("{}{dots}", &words[..cut])
}

/// The last line of `text` that says something: where programs put what went wrong.
pub fn last_line(text: &str) -> Option<&str> {
    text.lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn exit_codes() {
        let usual = ExitCodes::new();
        let verdicts = [
            (0, Verdict::Done),
            (1, Verdict::RETRY),
            (75, Verdict::RETRY),
            (65, Verdict::Dead),
            (127, Verdict::RETRY_LONG),
        ];
        for (code, verdict) in verdicts {
            assert_eq!(exit_verdict(code, &usual), verdict, "{code}");
        }
        let own = ExitCodes::from([
            (0, ExitMeaning::Retry),
            (3, ExitMeaning::Done),
            (4, ExitMeaning::Dead),
            (65, ExitMeaning::Retry),
        ]);
        let verdicts = [
            (0, Verdict::RETRY),
            (3, Verdict::Done),
            (4, Verdict::Dead),
            (65, Verdict::RETRY),
            (1, Verdict::RETRY),
        ];
        for (code, verdict) in verdicts {
            assert_eq!(exit_verdict(code, &own), verdict, "{code}");
        }
    }

    #[test]
    fn status_classes() {
        let after = Some(Duration::from_secs(20));
        for status in [200, 201, 204, 299] {
            assert_eq!(http_verdict(status, after), Verdict::Done, "{status}");
        }
        for status in [400, 410, 413, 415, 422] {
            assert_eq!(http_verdict(status, after), Verdict::Dead, "{status}");
        }
        for status in [408, 425, 429, 500, 503] {
            assert_eq!(
                http_verdict(status, after),
                Verdict::Retry {
                    not_before: after,
                    long: false
                },
                "{status}"
            );
        }
        assert_eq!(http_verdict(202, after), Verdict::Held);
        for status in [301, 302, 303, 307, 308] {
            assert_eq!(http_verdict(status, after), Verdict::RETRY, "{status}");
        }
        for status in [401, 403, 404, 405, 409, 418, 600, 999] {
            assert_eq!(http_verdict(status, after), Verdict::RETRY_LONG, "{status}");
        }
    }

    #[test]
    fn retry_after_in_both_forms() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let cases = [
            ("20", Some(20)),
            (" 0 ", Some(0)),
            ("999999999999999999999999", Some(86_400)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60)),
            ("Sun Nov  6 08:50:37 1994", Some(60)),
            ("1.5", None),
            ("-1", None),
            ("soon", None),
            ("", None),
        ];
        for (header, seconds) in cases {
            assert_eq!(
                retry_after(header, now),
                seconds.map(Duration::from_secs),
                "{header}"
            );
        }
    }

    #[test]
    fn a_bad_directive_fails_the_attempt() {
        let output = |text: &str| Output {
            bytes: text.into(),
            complete: true,
            names_tenure: false,
        };
        let ended = Ended::answered(&output(r#"{"tenure":{"snooze":1}}"#));
        assert_eq!(ended.verdict, Verdict::RETRY);
        assert!(ended.error.unwrap().contains("tenure.snooze"));
        let long = format!(r#"{{"tenure":{{"{}":1}}}}"#, "x".repeat(100_000));
        let error = Ended::answered(&output(&long)).error.unwrap();
        assert_eq!(error.chars().count(), QUOTED + 1);
        let ended = Ended::answered(&output(r#"{"tenure":{"snooze":"1m"}}"#));
        assert_eq!(ended.verdict, Verdict::Snooze(Duration::from_mins(1)));
    }

    #[test]
    fn errors_quote_one_short_line() {
        assert_eq!(last_line("a\n boom \n\n"), Some("boom"));
        assert_eq!(last_line(" \n"), None);
        assert_eq!(explained("exit code 1", Some("boom")), "exit code 1: boom");
        assert_eq!(explained("exit code 1", None), "exit code 1");
        assert_eq!(
            explained("x", Some(&"é".repeat(600))).chars().count(),
            3 + 500 + 1
        );
    }
}
