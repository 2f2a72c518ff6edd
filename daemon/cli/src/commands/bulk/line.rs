//! One line of a file of jobs: read within a bound, and understood or refused with what is wrong.

use std::io::{self, BufRead, Read as _};

use serde::Deserialize;
use serde_json::value::RawValue;
use tenure_store::bulk::BulkJob;
use uuid::Uuid;

/// The longest line: what the data of a job may have, and room for the rest.
pub(super) const LONGEST: usize = 20 << 20;

/// One line, without its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// From 1.
    pub(super) number: u64,
    /// `None`: it is longer than [`LONGEST`].
    pub(super) text: Option<Vec<u8>>,
}

/// The lines of an input that are not empty.
pub(super) struct Lines<R> {
    input: R,
    number: u64,
    /// Bytes that were read.
    pub(super) read: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn of(input: R) -> Self {
        Self {
            input,
            number: 0,
            read: 0,
        }
    }

    /// The next line; `None` at the end.
    pub(super) fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let mut text = Vec::new();
            let bound = LONGEST as u64 + 2;
            let length = (&mut self.input).take(bound).read_until(b'\n', &mut text)?;
            if length == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.read += length as u64;
            let number = self.number;
            if text.last() != Some(&b'\n') && length as u64 == bound {
                self.skip()?;
                return Ok(Some(Line { number, text: None }));
            }
            if number == 1 && text.starts_with(b"\xef\xbb\xbf") {
                text.drain(..3);
            }
            while text.last().is_some_and(u8::is_ascii_whitespace) {
                text.pop();
            }
            if !text.is_empty() {
                let text = (text.len() <= LONGEST).then_some(text);
                return Ok(Some(Line { number, text }));
            }
        }
    }

    /// Reads on to the end of the line and keeps nothing of it.
    fn skip(&mut self) -> io::Result<()> {
        loop {
            let buffer = self.input.fill_buf()?;
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let used = end.map_or(buffer.len(), |end| end + 1);
            if used == 0 {
                return Ok(());
            }
            self.input.consume(used);
            self.read += used as u64;
            if end.is_some() {
                return Ok(());
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Given<'a> {
    job_type: Option<String>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    priority: Option<i32>,
    run_at: Option<String>,
    tenant: Option<String>,
    unique_key: Option<String>,
    max_attempts: Option<i32>,
    timeout: Option<String>,
    id: Option<Uuid>,
    #[serde(borrow)]
    labels: Option<&'a RawValue>,
    #[serde(borrow)]
    options: Option<&'a RawValue>,
}

/// The job that a line describes. `job_type`: for lines that name none. A job without an id gets one here, so that it can be sent again.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read(line: &Line, job_type: Option<&str>) -> Result<BulkJob, String> {
    let Some(text) = &line.text else {
        return Err(format!(
            "it is longer than {} MiB; put the data elsewhere and enqueue a reference to it",
            LONGEST >> 20
        ));
    };
    let given: Given<'_> = serde_json::from_slice(text).map_err(|error| {
        let said = error.to_string();
        // Where in the line it is; which line that is says the caller.
        let (what, at) = said.rsplit_once(" at line 1").unwrap_or((&said, ""));
        let hint = match text.first() {
            Some(b'{') => "",
            _ => "; each line is one job, such as {\"job_type\": \"mail\", \"data\": {\"to\": 7}}",
        };
        format!("{what}{at}{hint}")
    })?;
    let job_type = given.job_type.as_deref().or(job_type).ok_or(
        "it has no job_type; add one, or give the type of all lines: tenure enqueue TYPE --from …",
    )?;
    let raw = |json: Option<&RawValue>| json.map(|json| json.get().to_owned());
    Ok(BulkJob {
        id: given.id.unwrap_or_else(Uuid::now_v7),
        job_type: job_type.to_owned(),
        data: raw(given.data),
        priority: given.priority,
        run_at: given.run_at,
        tenant: given.tenant,
        unique_key: given.unique_key,
        max_attempts: given.max_attempts,
        timeout: given.timeout,
        labels: raw(given.labels),
        options: raw(given.options),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lines(text: &[u8]) -> Vec<(u64, Option<String>)> {
        let mut lines = Lines::of(text);
        let mut all = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            let text = line.text.map(|text| String::from_utf8(text).unwrap());
            all.push((line.number, text));
        }
        assert_eq!(lines.read, text.len() as u64);
        all
    }

    #[test]
    fn lines_are_numbered_as_an_editor_does() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            lines(b"\xef\xbb\xbf{}\r\n\n  \n{1}\n{2}"),
            [(1, some("{}")), (4, some("{1}")), (5, some("{2}"))]
        );
        assert_eq!(lines(b""), []);
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_by() {
        let mut text = vec![b'x'; LONGEST * 2];
        text.extend_from_slice(b"\n{}\n");
        assert_eq!(lines(&text), [(1, None), (2, Some("{}".to_owned()))]);
        text.truncate(LONGEST * 2);
        assert_eq!(lines(&text), [(1, None)]);
        let fits = vec![b'x'; LONGEST];
        assert!(lines(&fits)[0].1.is_some());
    }

    fn given(text: &str) -> Result<BulkJob, String> {
        let line = Line {
            number: 1,
            text: Some(text.as_bytes().to_vec()),
        };
        read(&line, None)
    }

    #[test]
    fn a_line_is_a_job() {
        let job = given(
            r#"{"job_type":"mail","data":{"n":18446744073709551616},"priority":-1,"labels":null}"#,
        )
        .unwrap();
        assert_eq!(job.data.unwrap(), r#"{"n":18446744073709551616}"#);
        assert_eq!((job.priority, job.labels), (Some(-1), None));
        assert_eq!(job.id.get_version_num(), 7);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, says) in [
            ("mail 7", "each line is one job"),
            ("[]", "each line is one job"),
            (r#"{"job_type":"m""#, "EOF"),
            (r#"{"job_type":"m"} {}"#, "trailing"),
            (
                r#"{"type":"m"}"#,
                "unknown field `type`, expected one of `job_type`",
            ),
            (r#"{"data":{}}"#, "has no job_type"),
            (
                r#"{"job_type":"m","priority":"high"}"#,
                "invalid type: string \"high\", expected i32",
            ),
            (r#"{"job_type":"m","id":"7"}"#, "UUID"),
            (r#"{"job_type":"m","job_type":"m"}"#, "duplicate"),
        ] {
            let error = given(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        let long = Line {
            number: 1,
            text: None,
        };
        assert!(read(&long, None).unwrap_err().contains("20 MiB"));
    }
}
