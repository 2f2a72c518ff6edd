//! The handler of `tenure selftest`: writes what it lives through.

use std::env;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use tenure_verdict::uptime;

/// From one sign of life to the next.
const TICK: Duration = Duration::from_millis(100);

/// Runs as the handler of one job, whose type ends with `-` and the number of ticks that it lives for.
pub(crate) fn main(journal: &Path) -> ExitCode {
    match live(journal) {
        Ok(token) => {
            // Whoever reads it knows which run completed the job.
            let _ = writeln!(io::stdout(), "{{\"token\":\"{token}\"}}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{}: {error}", journal.display());
            ExitCode::FAILURE
        }
    }
}

fn live(journal: &Path) -> io::Result<String> {
    let told = |name: &str| {
        env::var(name)
            .map_err(|_| io::Error::other(format!("{name} is missing: only a daemon starts this")))
    };
    let (job, attempt, token) = (
        told("TENURE_JOB_ID")?,
        told("TENURE_ATTEMPT")?,
        told("TENURE_TOKEN")?,
    );
    let job_type = told("TENURE_JOB_TYPE")?;
    let ticks: u32 = job_type
        .rsplit('-')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or(0);
    // One write to a file that is opened for appending: the order of lines is that of the events, over all handlers.
    let mut file = OpenOptions::new().create(true).append(true).open(journal)?;
    let say = |file: &mut File, what: &str| {
        let line = format!(
            "{what} {job} {attempt} {token} {} {:.2} {}\n",
            std::process::id(),
            uptime().as_secs_f64(),
            parent_id()
        );
        file.write_all(line.as_bytes())
    };
    say(&mut file, "start")?;
    for _ in 0..ticks {
        thread::sleep(TICK);
        say(&mut file, "tick")?;
    }
    say(&mut file, "end")?;
    Ok(token)
}
