//! `tenure enqueue --from`: a file of jobs, one a line, goes in batch by batch.
//!
//! Invariants: a batch is one transaction; each line has its id before it is sent, so what may have been lost is sent again and is in
//! once; memory holds one batch. When a batch is refused its halves are tried, until the bad line stands alone: what is good of
//! its batch goes in.

mod line;

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tenure_store::bulk::BulkJob;
use tenure_store::claim::Durability;
use tenure_store::error::StoreError;
use tenure_store::session::Session;
use tokio::time::Instant;

use super::Context;
use crate::arguments::BulkArguments;
use crate::output::{Exit, Failure, Report, View};
use line::{Line, Lines};

/// A batch has at most so many lines, and is sent when they have so many bytes together.
const LINES: usize = 5_000;
const BYTES: usize = 8 << 20;

/// How long one batch may take.
const BOUND: Duration = Duration::from_mins(2);

/// For how long a database that is away is waited for, and how often it is tried.
const PATIENCE: Duration = Duration::from_mins(5);
const AGAIN: Duration = Duration::from_secs(1);

/// So many bad lines are named; the rest is counted.
const NAMED: u64 = 20;

/// Puts the jobs of a file, or of standard input, in.
pub(super) async fn enqueue(
    context: &Context,
    job_type: Option<&str>,
    durability: Option<Durability>,
    arguments: &BulkArguments,
) -> Result<(), Failure> {
    let from = arguments.from.as_deref().unwrap_or(Path::new("-"));
    let (input, size): (Box<dyn BufRead>, _) = if from == Path::new("-") {
        (Box::new(BufReader::new(io::stdin())), None)
    } else {
        let unreadable =
            |error| Failure::usage(format!("{} cannot be read: {error}", from.display()));
        let file = File::open(from).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        (
            Box::new(BufReader::with_capacity(1 << 20, file)),
            Some(size),
        )
    };
    let session = context.connect_directly().await?.within(BOUND);
    // Only a new file: what stands in another one may be the only record of the lines before.
    let rejects = arguments.rejects.as_deref().map(|path| {
        let unwritable =
            |error| Failure::usage(format!("{} cannot be written: {error}", path.display()));
        File::create_new(path)
            .map(BufWriter::new)
            .map_err(unwritable)
    });
    let mut bulk = Bulk {
        context,
        session: Some(session),
        durability,
        skips: arguments.skip_bad || arguments.rejects.is_some(),
        rejects: rejects.transpose()?,
        bar: bar(context, size),
        summary: Summary::default(),
        begun: Instant::now(),
    };
    let read = bulk
        .all(Lines::of(input), job_type, arguments.start_line)
        .await;
    bulk.bar.finish_and_clear();
    bulk.finish(read)
}

fn bar(context: &Context, size: Option<u64>) -> ProgressBar {
    if !context.output.is_for_people() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match size {
        Some(size) => (
            ProgressBar::new(size),
            "{bar:30} {bytes} of {total_bytes}, {msg}, {eta} left",
        ),
        None => (
            ProgressBar::no_length(),
            "{spinner} {bytes}, {msg}, {elapsed}",
        ),
    };
    // A template of ours that is none would be seen by the first run.
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// What was done.
#[derive(Debug, Default, Serialize)]
struct Summary {
    /// Lines that are no empty ones.
    read: u64,
    /// Jobs that are new.
    enqueued: i64,
    /// Lines whose id was known, or whose unique key a live job owns.
    existing: i64,
    /// Bad lines that were left out.
    rejected: u64,
    /// The last line that was dealt with.
    last_line: u64,
    seconds: f64,
}

impl Report for Summary {
    fn view(&self) -> View {
        let mut text = format!("{} jobs are in", self.enqueued);
        if self.existing > 0 {
            text += &format!(", {} were there before", self.existing);
        }
        if self.rejected > 0 {
            text += &format!(", {} lines were bad and left out", self.rejected);
        }
        View::Line(format!("{text}; {:.1} s", self.seconds))
    }
}

/// A line with the job that it describes.
struct Item {
    number: u64,
    text: Vec<u8>,
    job: BulkJob,
}

struct Bulk<'a> {
    context: &'a Context,
    /// `None` after it broke.
    session: Option<Session>,
    durability: Option<Durability>,
    /// Bad lines are left out.
    skips: bool,
    rejects: Option<BufWriter<File>>,
    bar: ProgressBar,
    summary: Summary,
    begun: Instant,
}

impl Bulk<'_> {
    async fn all(
        &mut self,
        mut lines: Lines<Box<dyn BufRead>>,
        job_type: Option<&str>,
        start_line: u64,
    ) -> Result<(), Failure> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        let broken = |error| Failure::failed(format!("the input cannot be read on: {error}"));
        while let Some(line) = lines.next().map_err(broken)? {
            if line.number < start_line {
                continue;
            }
            self.summary.read += 1;
            match line::read(&line, job_type) {
                Ok(job) => {
                    let Line { number, text } = line;
                    let text = text.unwrap_or_default();
                    bytes += text.len();
                    batch.push(Item { number, text, job });
                }
                Err(why) => {
                    // What stands before it goes in first.
                    self.put(std::mem::take(&mut batch)).await?;
                    bytes = 0;
                    self.bad(line.number, &line.text.unwrap_or_default(), &why)?;
                }
            }
            if batch.len() >= LINES || bytes >= BYTES {
                self.put(std::mem::take(&mut batch)).await?;
                bytes = 0;
                self.bar.set_position(lines.read);
            }
        }
        self.put(batch).await
    }

    /// Puts a batch in; where it is refused, what is good of it.
    async fn put(&mut self, batch: Vec<Item>) -> Result<(), Failure> {
        let jobs: Vec<BulkJob> = batch.iter().map(|item| item.job.clone()).collect();
        // Parts that are still to be sent, the first one last.
        let whole = 0..batch.len();
        let mut parts = vec![whole];
        while let Some(part) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            match self.send(&jobs[part.clone()]).await {
                Ok(new) => {
                    let count = i64::try_from(part.len()).unwrap_or(i64::MAX);
                    self.summary.enqueued += new;
                    self.summary.existing += count - new;
                    self.summary.last_line = batch[part.end - 1].number;
                    self.show();
                }
                Err(StoreError::Refused { message, .. } | StoreError::BadValue(message)) => {
                    if let [item] = &batch[part.clone()] {
                        self.bad(item.number, &item.text, &message)?;
                    } else {
                        let middle = part.start + part.len() / 2;
                        parts.push(middle..part.end);
                        parts.push(part.start..middle);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends jobs until the database has answered: what may be in already is in once, since each has its id.
    async fn send(&mut self, jobs: &[BulkJob]) -> Result<i64, StoreError> {
        let until = Instant::now() + PATIENCE;
        loop {
            let error = match self.session.take() {
                Some(session) => match session.enqueue_bulk(jobs, self.durability).await {
                    Err(
                        error @ (StoreError::Unreachable(_)
                        | StoreError::Timeout(_)
                        | StoreError::ReadOnly(_)
                        | StoreError::Unreplicated(_)
                        | StoreError::Repeat(_)),
                    ) => error,
                    answer => {
                        self.session = Some(session);
                        return answer;
                    }
                },
                None => StoreError::Unreachable("no connection".to_owned()),
            };
            if Instant::now() > until {
                return Err(error);
            }
            self.bar.set_message(format!("waiting: {error}"));
            tokio::time::sleep(AGAIN).await;
            if let Ok(session) = self.context.connect_directly().await {
                self.session = Some(session.within(BOUND));
            }
        }
    }

    /// A bad line: left out, or the end.
    fn bad(&mut self, number: u64, text: &[u8], why: &str) -> Result<(), Failure> {
        if !self.skips {
            let hint = format!(
                "all lines before it are in; mend it and go on with --start-line {number}, or leave bad lines out with --skip-bad"
            );
            return Err(
                Failure::new(Exit::Usage, "input", format!("line {number}: {why}")).hint(hint),
            );
        }
        self.summary.rejected += 1;
        self.summary.last_line = number;
        // A line that was too long to keep is named in any case: nothing else tells of it.
        if self.summary.rejected <= NAMED || text.is_empty() {
            self.bar
                .suspend(|| self.context.warn(&format!("line {number}: {why}")));
        }
        if let Some(rejects) = self.rejects.as_mut().filter(|_| !text.is_empty()) {
            let written = rejects
                .write_all(text)
                .and_then(|()| rejects.write_all(b"\n"))
                .and_then(|()| rejects.flush());
            written.map_err(|error| Failure::failed(format!("line {number} is bad ({why}), and the file of rejects cannot be written: {error}")))?;
        }
        Ok(())
    }

    fn show(&self) {
        let seconds = self.begun.elapsed().as_secs_f64().max(0.001);
        #[expect(clippy::cast_precision_loss, reason = "a rate for a person to read")]
        let rate = self.summary.enqueued as f64 / seconds;
        self.bar.set_message(format!(
            "{} jobs, {rate:.0} a second",
            self.summary.enqueued
        ));
    }

    fn finish(mut self, read: Result<(), Failure>) -> Result<(), Failure> {
        if let Some(rejects) = &mut self.rejects {
            rejects.flush().map_err(|error| {
                Failure::failed(format!("the file of rejects cannot be written: {error}"))
            })?;
        }
        if let Err(failure) = read {
            return Err(match self.summary.last_line {
                0 => failure,
                last => failure.or_hint(|| {
                    format!(
                        "all lines up to {last} are dealt with; those of the batch after it may be in too, and lines with an id are never in twice: go on with --start-line {}",
                        last + 1
                    )
                }),
            });
        }
        self.summary.seconds = self.begun.elapsed().as_secs_f64();
        self.context.output.print(&self.summary)?;
        match self.summary.rejected {
            0 => Ok(()),
            count => Err(Failure::failed(format!("{count} bad lines were left out")).printed()),
        }
    }
}
