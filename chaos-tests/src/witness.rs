//! What the handlers wrote.

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
}

/// Reads the file of the witnesses.
///
/// # Panics
/// When a line is none: then nothing that stands there can be trusted.
#[must_use]
pub fn read(text: &str) -> Vec<Line> {
    text.lines()
        .map(|line| parse(line).unwrap_or_else(|| panic!("no witness wrote this: {line}")))
        .collect()
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
    };
    let _uptime: f64 = words.next()?.parse().ok()?;
    words.next().is_none().then_some(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_written() {
        let lines = read("start j 1 t 42 7.01\nend j 1 t 42 7.35\n");
        assert_eq!(lines[0].what, What::Start);
        assert_eq!((lines[1].job.as_str(), lines[1].attempt), ("j", 1));
        assert_eq!((lines[1].token.as_str(), lines[1].pid), ("t", 42));
    }

    #[test]
    fn torn_lines_are_noticed() {
        for torn in [
            "",
            "start",
            "start j 1 t 42",
            "start j 1 t 42 7.0 x",
            "begin j 1 t 42 7.0",
            "tick j 1 t 42 tick",
        ] {
            assert_eq!(parse(torn), None, "{torn}");
        }
    }
}
