//! What the commands do. Each group has a module; all of them speak to the database through `tenure_store` and print
//! through [`Output`].

mod bench;
mod bulk;
mod check_config;
mod cluster;
mod connection;
mod dead;
mod demo;
mod enqueue;
mod explain;
mod job;
mod manual;
mod migrate;
mod payload;
mod run;
pub(crate) mod selftest;
mod stats;
mod waiting;
mod worker;

use std::io::Write;

use serde::Serialize;
use uuid::Uuid;

use crate::arguments::{Command, Common};
use crate::output::{Failure, Output, Report, View};

/// What every command has.
pub(crate) struct Context {
    pub(crate) common: Common,
    pub(crate) output: Output,
}

impl Context {
    /// Who acts, for the record: the user of this machine.
    fn who(&self) -> String {
        std::env::var("USER")
            .ok()
            .filter(|user| !user.trim().is_empty())
            .unwrap_or_else(|| "cli".to_owned())
    }

    /// Tells a person who watches how things go; programs are not bothered.
    fn note(&self, text: &str) {
        if self.output.is_for_people() {
            // Nobody is left to tell when standard error cannot be written.
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }

    /// Tells everybody what does not stop the command but should be known.
    fn warn(&self, text: &str) {
        let _ = writeln!(std::io::stderr(), "warning: {text}");
    }
}

/// Carries out a command.
pub(crate) fn run(context: &Context, command: Command) -> Result<(), Failure> {
    match command {
        Command::Run => run::run(context),
        Command::Demo(arguments) => demo::demo(context, arguments),
        Command::Migrate(arguments) => block_on(migrate::migrate(context, arguments)),
        Command::CheckConfig => check_config::check_config(context),
        Command::Enqueue(arguments) => block_on(enqueue::enqueue(context, arguments)),
        Command::Job(command) => block_on(job::job(context, command)),
        Command::Dead(command) => block_on(dead::dead(context, command)),
        Command::Worker(command) => block_on(worker::worker(context, command)),
        Command::Cluster(command) => block_on(cluster::cluster(context, command)),
        Command::Stats => block_on(stats::stats(context)),
        Command::Bench(arguments) => bench::bench(context, &arguments),
        Command::Selftest(arguments) => selftest::selftest(context, &arguments),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::pages(dir.as_deref()),
        // They are no commands of a person.
        Command::Guard { .. } | Command::Witness { .. } => Ok(()),
    }
}

/// Runs what one person asks for on this thread.
fn block_on(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("the system gives no resources: {error}")))?
        .block_on(work)
}

/// Something was done, and this is how the thing stands then.
#[derive(Serialize)]
struct Acted {
    id: Uuid,
    status: String,
}

impl Report for Acted {
    fn view(&self) -> View {
        View::Line(format!("{} {}", self.id, self.status))
    }
}
