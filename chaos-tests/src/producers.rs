//! Producers: one thread for each server enqueues there in short transactions whenever that server takes writes, and notes
//! what was acknowledged.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tenure_embedded::{Sql, SqlError};

use crate::random::Random;
use tenure_verdict::{switches, uptime};

/// How long a server may be silent before a producer asks anew.
const SILENCE: Duration = Duration::from_secs(1);

/// The statement that puts in a job of this type and returns its id. Some jobs are to pass by all that waits.
pub type Enqueue = fn(job_type: &str, passes_by: bool) -> String;

/// How tenure does it.
#[must_use]
pub fn enqueue(job_type: &str, passes_by: bool) -> String {
    let priority = if passes_by { -1 } else { 0 };
    format!("SELECT tenure.enqueue('{job_type}', priority => {priority}, max_attempts => 1000)")
}

/// The notes of acknowledged enqueues, one line each, in a file.
#[derive(Debug, Clone)]
pub struct Notes {
    path: PathBuf,
    file: Arc<Mutex<File>>,
}

impl Notes {
    /// Notes in this file, which are none yet.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let file = File::create(&path).expect("a file can be made");
        Self {
            path,
            file: Arc::new(Mutex::new(file)),
        }
    }

    /// The server on `port` has acknowledged this just now.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, id: &str, job_type: &str, port: u16) {
        let mut file = self.file.lock().expect("no writer panics");
        writeln!(file, "{id} {job_type} {} {port}", uptime().as_millis())
            .expect("a line can be written");
    }

    /// What stands there.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn read(&self) -> Vec<switches::Enqueue> {
        let text = fs::read_to_string(&self.path).expect("the notes can be read");
        let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
        complete
            .lines()
            .map(|line| parse(line).unwrap_or_else(|| panic!("no producer wrote this: {line}")))
            .collect()
    }
}

fn parse(line: &str) -> Option<switches::Enqueue> {
    match line.split(' ').collect::<Vec<_>>()[..] {
        [id, job_type, at, port] => Some(switches::Enqueue {
            id: id.to_owned(),
            job_type: job_type.to_owned(),
            at: Duration::from_millis(at.parse().ok()?),
            server: port.parse().ok()?,
        }),
        _ => None,
    }
}

/// Running producers. Dropping them ends them.
#[derive(Debug)]
pub struct Producers {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Producers {
    /// Starts one for each of these ports; `mix` is what they enqueue, each entry as likely as the next.
    #[must_use]
    pub fn start(
        ports: &[u16],
        mix: &[&str],
        enqueue: Enqueue,
        random: &mut Random,
        notes: &Notes,
    ) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let threads = ports
            .iter()
            .map(|&port| {
                let producer = Producer {
                    port,
                    mix: mix.iter().map(|&job_type| job_type.to_owned()).collect(),
                    enqueue,
                    random: Random::new(random.below(u64::MAX)),
                    notes: notes.clone(),
                    over: Arc::clone(&over),
                };
                thread::spawn(move || producer.run())
            })
            .collect();
        Self { over, threads }
    }

    /// Ends them; nothing is enqueued when this returns.
    ///
    /// # Panics
    /// When one has.
    pub fn stop(&mut self) {
        self.over.store(true, SeqCst);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok(), "a producer panicked");
        }
    }
}

impl Drop for Producers {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
    }
}

struct Producer {
    port: u16,
    mix: Vec<String>,
    enqueue: Enqueue,
    random: Random,
    notes: Notes,
    over: Arc<AtomicBool>,
}

impl Producer {
    fn run(mut self) {
        let mut open: Option<Sql> = None;
        while !self.over.load(SeqCst) {
            let done = match &mut open {
                None => Sql::connect_within(SILENCE, self.port, "app", "postgres")
                    .map(|sql| open = Some(sql)),
                Some(sql) => self.enqueue_one(sql),
            };
            match done {
                Ok(()) => {}
                // A standby, or one that starts or stops: this connection may become good.
                Err(SqlError::Refused { code, .. }) if code == "25006" => {}
                Err(_) => open = None,
            }
            thread::sleep(Duration::from_millis(20 + self.random.below(60)));
        }
    }

    fn enqueue_one(&mut self, sql: &mut Sql) -> Result<(), SqlError> {
        let job_type = self.random.choose(&self.mix).clone();
        // So that of what was enqueued last some was claimed.
        let passes_by = self.random.below(3) == 0;
        let rows = sql.run(&(self.enqueue)(&job_type, passes_by))?;
        if let Some(id) = rows.into_iter().flatten().flatten().next() {
            self.notes.write(&id, &job_type, self.port);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_written() {
        let dir = tempfile::tempdir().unwrap();
        let notes = Notes::new(dir.path().join("notes"));
        notes.write("j", "ticks-1", 5432);
        let read = notes.read();
        assert_eq!((read.len(), read[0].id.as_str()), (1, "j"));
        assert_eq!(
            (read[0].job_type.as_str(), read[0].server),
            ("ticks-1", 5432)
        );
        assert!(uptime() - read[0].at < Duration::from_secs(60));
        assert_eq!(parse("j ticks-1 1"), None);
    }
}
