//! What the handlers wrote, and the clock by which they wrote it.

use std::fs;
use std::time::Duration;

/// The moment of a handler's life that a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// It began.
    Start,
    /// It lives.
    Tick,
    /// It has done its work and is about to exit.
    End,
}

/// One line of the witnesses' file. Lines stand in the order in which they happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What happened.
    pub what: What,
    /// The job's id.
    pub job: String,
    /// The number of the attempt, as the handler was told.
    pub attempt: i32,
    /// The token of the run, which tells runs of one job apart.
    pub token: String,
    /// The handler's process.
    pub pid: i32,
    /// When, as [`uptime`].
    pub at: Duration,
    /// Its daemon: the process above the handler, or above the supervisor between the two.
    pub parent: i32,
}

/// The time since this machine started, to a hundredth of a second. No step of a clock moves it, and it is the same for all
/// processes.
///
/// # Panics
/// Where there is no /proc: nothing could be told apart in time.
#[must_use]
#[expect(clippy::expect_used, reason = "without a clock there is no verdict")]
pub fn uptime() -> Duration {
    let text = fs::read_to_string("/proc/uptime").expect("/proc is there");
    let seconds = text.split(' ').next().and_then(moment);
    seconds.expect("the first word is a time")
}

fn moment(seconds: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds.parse().ok()?).ok()
}

/// Reads the file of the witnesses.
///
/// # Errors
/// The first line that is none: then nothing that stands there can be trusted.
pub fn read(text: &str) -> Result<Vec<Line>, String> {
    let line = |line: &str| parse(line).ok_or_else(|| format!("no witness wrote this: {line}"));
    text.lines().map(line).collect()
}

fn parse(line: &str) -> Option<Line> {
    let mut words = line.split(' ');
    let parsed = Line {
        what: match words.next()? {
            "start" => What::Start,
            "tick" => What::Tick,
            "end" => What::End,
            _ => return None,
        },
        job: words.next()?.to_owned(),
        attempt: words.next()?.parse().ok()?,
        token: words.next()?.to_owned(),
        pid: words.next()?.parse().ok()?,
        at: moment(words.next()?)?,
        parent: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_forward() {
        let first = uptime();
        assert!(first > Duration::ZERO && uptime() >= first);
    }

    #[test]
    fn a_line_is_read_as_written() {
        let lines = read("start j 1 t 42 7.01 9\nend j 1 t 42 7.35 9\n").unwrap();
        assert_eq!(lines[0].what, What::Start);
        assert_eq!((lines[1].job.as_str(), lines[1].attempt), ("j", 1));
        assert_eq!((lines[1].token.as_str(), lines[1].pid), ("t", 42));
        assert_eq!(
            (lines[1].at, lines[1].parent),
            (Duration::from_millis(7350), 9)
        );
    }

    #[test]
    fn torn_lines_are_noticed() {
        for torn in [
            "",
            "start",
            "start j 1 t 42",
            "start j 1 t 42 7.0",
            "start j 1 t 42 7.0 x",
            "start j 1 t 42 7.0 9 x",
            "begin j 1 t 42 7.0 9",
            "tick j 1 t 42 tick",
        ] {
            assert_eq!(parse(torn), None, "{torn}");
            assert!(torn.is_empty() || read(torn).is_err(), "{torn}");
        }
    }
}
