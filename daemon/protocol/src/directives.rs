//! What a result may ask tenure for, under its `"tenure"` key.
//!
//! Invariant: every key is either understood or refused with its path; nothing that a handler asks for is dropped in
//! silence.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::json::{Members, Object};

/// The longest `snooze` or `timeout` that is taken for meant.
const LONGEST: Duration = Duration::from_hours(24 * 3660);

/// What a handler asks for beside its result, carried out in the transaction that completes the job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directives {
    /// Jobs that follow this one, in the order given.
    pub enqueue: Vec<FollowUp>,
    /// Run this job again after that time; the attempt does not count.
    pub snooze: Option<Duration>,
    /// How far the job's series has come, JSON text: what the handler of its next job gets.
    pub watermark: Option<String>,
}

/// A job that a handler asks for; `None` means the default of `tenure.enqueue`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FollowUp {
    /// Its job type, not empty.
    pub job_type: String,
    /// Its data as JSON text.
    pub data: Option<String>,
    /// Lower runs first.
    pub priority: Option<i32>,
    /// Not before this time, RFC 3339.
    pub run_at: Option<String>,
    /// Whose job it is.
    pub tenant: Option<String>,
    /// Admits one live job of this key.
    pub unique_key: Option<String>,
    /// At least 1.
    pub max_attempts: Option<i32>,
    /// How long one attempt may take.
    pub timeout: Option<Duration>,
    /// A JSON object as text.
    pub labels: Option<String>,
    /// A JSON object as text.
    pub options: Option<String>,
}

impl FollowUp {
    /// The JSON object that `tenure.enqueue_many` takes.
    pub fn to_json(&self) -> String {
        let mut job = Object::with_capacity(256);
        job.text("job_type", &self.job_type);
        let raw = [
            ("data", self.data.clone()),
            ("priority", self.priority.map(|n| n.to_string())),
            ("max_attempts", self.max_attempts.map(|n| n.to_string())),
            ("labels", self.labels.clone()),
            ("options", self.options.clone()),
        ];
        for (key, json) in raw {
            if let Some(json) = json {
                job.raw(key, &json);
            }
        }
        let timeout = self
            .timeout
            .map(|t| format!("{} milliseconds", t.as_millis()));
        let texts = [
            ("run_at", &self.run_at),
            ("tenant", &self.tenant),
            ("unique_key", &self.unique_key),
            ("timeout", &timeout),
        ];
        for (key, text) in texts {
            if let Some(text) = text {
                job.text(key, text);
            }
        }
        job.finish()
    }
}

/// A directive that cannot be carried out. The attempt fails with it, so that the handler's author learns of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the result's {path}: {problem}")]
pub struct BadDirective {
    /// The key, as in `tenure.enqueue[2].priority`.
    pub path: String,
    /// What is wrong with it and what was expected.
    pub problem: String,
}

impl BadDirective {
    pub(crate) fn new(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            problem: problem.into(),
        }
    }
}

impl Directives {
    /// Reads the value of the `"tenure"` key.
    ///
    /// # Errors
    /// Names the first key that is unknown, of the wrong type or out of range.
    pub fn parse(json: &str) -> Result<Self, BadDirective> {
        let mut directives = Self::default();
        for (key, value) in members("tenure", json)? {
            let path = format!("tenure.{key}");
            match key.as_str() {
                "enqueue" => directives.enqueue = follow_ups(&path, value)?,
                "snooze" => {
                    directives.snooze = Some(duration(&path, &read::<String>(&path, value)?)?);
                }
                "watermark" if value.get() == "null" => {
                    return Err(BadDirective::new(path, "must not be null; leave it out"));
                }
                "watermark" => directives.watermark = Some(value.get().to_owned()),
                _ => {
                    return Err(BadDirective::new(
                        path,
                        "unknown key; known are enqueue, snooze and watermark",
                    ));
                }
            }
        }
        let beside = match directives {
            Self { snooze: None, .. } => None,
            _ if !directives.enqueue.is_empty() => Some("tenure.enqueue"),
            _ => directives.watermark.as_ref().map(|_| "tenure.watermark"),
        };
        if let Some(beside) = beside {
            let problem = format!(
                "cannot stand beside {beside}: a snoozed job has not ended, so nothing follows it yet"
            );
            return Err(BadDirective::new("tenure.snooze", problem));
        }
        Ok(directives)
    }
}

fn follow_ups(path: &str, value: &RawValue) -> Result<Vec<FollowUp>, BadDirective> {
    let items: Vec<&RawValue> = serde_json::from_str(value.get())
        .map_err(|_| BadDirective::new(path, "expected an array of objects"))?;
    let numbered = items.into_iter().enumerate();
    numbered
        .map(|(i, item)| follow_up(&format!("{path}[{i}]"), item))
        .collect()
}

fn follow_up(at: &str, item: &RawValue) -> Result<FollowUp, BadDirective> {
    let mut job = FollowUp::default();
    for (key, value) in members(at, item.get())? {
        let path = format!("{at}.{key}");
        let null = value.get() == "null";
        match key.as_str() {
            "job_type" => job.job_type = read(&path, value)?,
            "data" => job.data = (!null).then(|| value.get().to_owned()),
            "priority" => job.priority = read(&path, value)?,
            "run_at" => {
                job.run_at = read::<Option<String>>(&path, value)?
                    .map(|t| time(&path, t))
                    .transpose()?;
            }
            "tenant" => job.tenant = read(&path, value)?,
            "unique_key" => job.unique_key = read(&path, value)?,
            "max_attempts" => job.max_attempts = read(&path, value)?,
            "timeout" => {
                let text = read::<Option<String>>(&path, value)?;
                job.timeout = text.map(|t| duration(&path, &t)).transpose()?;
            }
            "labels" => job.labels = object(&path, value)?,
            "options" => job.options = object(&path, value)?,
            _ => {
                let known = "job_type, data, priority, run_at, tenant, unique_key, max_attempts, timeout, labels, options";
                return Err(BadDirective::new(
                    path,
                    format!("unknown key; known are {known}"),
                ));
            }
        }
    }
    if job.job_type.is_empty() {
        return Err(BadDirective::new(
            format!("{at}.job_type"),
            "is needed, and must not be empty",
        ));
    }
    if job.max_attempts.is_some_and(|n| n < 1) {
        return Err(BadDirective::new(
            format!("{at}.max_attempts"),
            "must be at least 1",
        ));
    }
    Ok(job)
}

/// The members of an object, none of them twice.
fn members<'a>(path: &str, json: &'a str) -> Result<Vec<(String, &'a RawValue)>, BadDirective> {
    let Members(members) =
        Members::of(json).ok_or_else(|| BadDirective::new(path, "expected an object"))?;
    let mut seen = BTreeSet::new();
    for (key, _) in &members {
        if !seen.insert(key) {
            return Err(BadDirective::new(format!("{path}.{key}"), "is given twice"));
        }
    }
    Ok(members)
}

fn read<T: DeserializeOwned>(path: &str, value: &RawValue) -> Result<T, BadDirective> {
    serde_json::from_str(value.get()).map_err(|error| {
        let text = error.to_string();
        let problem = text.split(" at line ").next().unwrap_or_default();
        BadDirective::new(path, problem)
    })
}

fn object(path: &str, value: &RawValue) -> Result<Option<String>, BadDirective> {
    match value.get() {
        "null" => Ok(None),
        json if json.starts_with('{') => Ok(Some(json.to_owned())),
        _ => Err(BadDirective::new(path, "expected an object")),
    }
}

/// `90s`, `1h 30m`: whole numbers, each with a unit.
fn duration(path: &str, text: &str) -> Result<Duration, BadDirective> {
    parse_duration(text).ok_or_else(|| {
        let problem = format!("{text:?} is no duration: expected numbers with a unit (ms, s, m, h, d), such as \"10m\" or \"1h 30m\"");
        BadDirective::new(path, problem)
    })
}

/// `90s`, `1h 30m`: whole numbers, each with its unit.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, after) = rest.split_at(digits);
        let end = after
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let unit = match unit {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_mins(1),
            "h" => Duration::from_hours(1),
            "d" => Duration::from_hours(24),
            _ => return None,
        };
        sum = sum.checked_add(unit.checked_mul(number.parse().ok()?)?)?;
        rest = after.trim_start();
    }
    (sum <= LONGEST).then_some(sum)
}

/// An RFC 3339 time with its zone, so that the database reads what the handler meant.
fn time(path: &str, text: String) -> Result<String, BadDirective> {
    if is_rfc3339(&text) {
        return Ok(text);
    }
    let problem = format!(
        "{text:?} is no time: expected RFC 3339 with a zone, such as \"2027-01-31T09:00:00Z\""
    );
    Err(BadDirective::new(path, problem))
}

fn is_rfc3339(text: &str) -> bool {
    let Some((clock, zone)) = text.as_bytes().split_at_checked(19) else {
        return false;
    };
    let fits = |bytes: &[u8], shape: &[u8]| {
        bytes.len() == shape.len()
            && bytes.iter().zip(shape).all(|(b, s)| match s {
                b'0' => b.is_ascii_digit(),
                b'T' => matches!(b, b'T' | b't' | b' '),
                b'+' => matches!(b, b'+' | b'-'),
                other => b == other,
            })
    };
    let zone = match zone {
        [b'.', fraction @ ..] => {
            let digits = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
            if digits == 0 {
                return false;
            }
            &fraction[digits..]
        }
        whole => whole,
    };
    let number = |at: usize| {
        clock[at..at + 2]
            .iter()
            .fold(0, |n, b| n * 10 + u32::from(b - b'0'))
    };
    fits(clock, b"0000-00-00T00:00:00")
        && (fits(zone, b"Z") || fits(zone, b"z") || fits(zone, b"+00:00"))
        && day_exists(&clock[..4], number(5), number(8))
        && (number(11) < 24 && number(14) < 60 && number(17) < 61)
        && (zone.len() == 1 || &zone[1..3] < b"16".as_slice() && &zone[4..6] < b"60".as_slice())
}

fn day_exists(year: &[u8], month: u32, day: u32) -> bool {
    let year = year.iter().fold(0, |n, b| n * 10 + u32::from(b - b'0'));
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    };
    year > 0 && (1..=days).contains(&day)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn follow_ups_have_the_keys_of_enqueue() {
        let json = r#"{"enqueue":[{"job_type":"mail","data":{"n":18446744073709551616},"priority":-5,
            "run_at":"2027-01-31T09:00:00.5+08:00","tenant":"a","unique_key":"k","max_attempts":2,"timeout":"1h 30m",
            "labels":{"x":1},"options":{}},{"job_type":"b","data":null,"timeout":null,"labels":null}]}"#;
        let directives = Directives::parse(json).unwrap();
        assert_eq!(
            directives.enqueue[0].to_json(),
            concat!(
                r#"{"job_type":"mail","data":{"n":18446744073709551616},"priority":-5,"max_attempts":2,"labels":{"x":1},"#,
                r#""options":{},"run_at":"2027-01-31T09:00:00.5+08:00","tenant":"a","unique_key":"k","timeout":"5400000 milliseconds"}"#
            )
        );
        assert_eq!(directives.enqueue[1].to_json(), r#"{"job_type":"b"}"#);
    }

    #[test]
    fn snooze_is_a_duration() {
        for (text, seconds) in [
            ("10m", 600),
            ("1h30m", 5400),
            ("90s", 90),
            ("1d", 86_400),
            ("0s", 0),
        ] {
            let directives = Directives::parse(&format!(r#"{{"snooze":"{text}"}}"#)).unwrap();
            assert_eq!(directives.snooze, Some(Duration::from_secs(seconds)));
        }
        for text in [
            "",
            "10",
            "m",
            "10 m",
            "1M",
            "1y",
            "-1s",
            "1.5s",
            "99999999999999999999s",
            "4000d",
        ] {
            assert!(parse_duration(text).is_none(), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_path() {
        let cases = [
            ("[]", "tenure", "expected an object"),
            (r#"{"enqeue":[]}"#, "tenure.enqeue", "unknown key"),
            (r#"{"watermark":null}"#, "tenure.watermark", "null"),
            (
                r#"{"watermark":1,"snooze":"1m"}"#,
                "tenure.snooze",
                "tenure.watermark",
            ),
            (r#"{"enqueue":{}}"#, "tenure.enqueue", "expected an array"),
            (
                r#"{"enqueue":[1]}"#,
                "tenure.enqueue[0]",
                "expected an object",
            ),
            (
                r#"{"enqueue":[{"data":1}]}"#,
                "tenure.enqueue[0].job_type",
                "is needed",
            ),
            (
                r#"{"enqueue":[{"job_type":"a"},{"job_type":"a","priority":"x"}]}"#,
                "tenure.enqueue[1].priority",
                "expected i32",
            ),
            (
                r#"{"enqueue":[{"job_type":"a","labels":[]}]}"#,
                "tenure.enqueue[0].labels",
                "expected an object",
            ),
            (
                r#"{"enqueue":[{"job_type":"a","run_at":"tomorrow"}]}"#,
                "tenure.enqueue[0].run_at",
                "RFC 3339",
            ),
            (
                r#"{"enqueue":[{"job_type":"a","max_attempts":0}]}"#,
                "tenure.enqueue[0].max_attempts",
                "at least 1",
            ),
            (
                r#"{"enqueue":[{"job_type":"a","job_type":"b"}]}"#,
                "tenure.enqueue[0].job_type",
                "twice",
            ),
            (
                r#"{"enqueue":[{"job_type":"a","when":1}]}"#,
                "tenure.enqueue[0].when",
                "known are job_type",
            ),
            (r#"{"snooze":10}"#, "tenure.snooze", "expected a string"),
            (r#"{"snooze":"10"}"#, "tenure.snooze", "unit"),
            (
                r#"{"snooze":"1s","enqueue":[{"job_type":"a"}]}"#,
                "tenure.snooze",
                "has not ended",
            ),
        ];
        for (json, path, problem) in cases {
            let bad = Directives::parse(json).unwrap_err();
            assert_eq!(bad.path, path, "{json}");
            assert!(bad.problem.contains(problem), "{json}: {}", bad.problem);
        }
    }

    #[test]
    fn times_exist() {
        for good in [
            "2028-02-29T00:00:00Z",
            "2027-12-31t23:59:60z",
            "2027-01-01 00:00:00-03:30",
        ] {
            assert!(is_rfc3339(good), "{good}");
        }
        for bad in [
            "2027-02-29T00:00:00Z",
            "2027-13-01T00:00:00Z",
            "2027-01-01T24:00:00Z",
            "2027-01-01T00:00:00",
            "2027-01-01T00:00:00.Z",
            "2027-01-01T00:00:00+99:00",
            "0000-01-01T00:00:00Z",
            "é",
            "2027-01-01Té0:00:0Z",
        ] {
            assert!(!is_rfc3339(bad), "{bad}");
        }
    }
}
