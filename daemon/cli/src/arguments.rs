//! The command line as clap reads it. What the commands do stands in `commands`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tenure_store::view::STATUSES;
use uuid::Uuid;

use crate::config::{DEFAULT_FILE, parse_span};
use crate::output::Format;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 not found, 4 refused by the present state, \
                          5 database not reachable, 6 database newer than this program.\nPasswords belong into a file (database.password_file) or a variable \
                          (TENURE_DATABASE__PASSWORD): every user of this machine can read a command line.";

/// Runs jobs from a PostgreSQL queue.
#[derive(Debug, Parser)]
#[command(name = "tenure", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(crate) struct Common {
    #[arg(long, global = true, help_heading = "Options of every command", value_name = "FILE", env = "TENURE_CONFIG", help = format!("Configuration [default: {DEFAULT_FILE}]"))]
    pub(crate) config: Option<PathBuf>,
    /// Sets one key, over the file and TENURE_SECTION__KEY variables, such as worker.concurrency=4
    #[arg(
        long,
        global = true,
        help_heading = "Options of every command",
        value_name = "SECTION.KEY=VALUE"
    )]
    pub(crate) set: Vec<String>,
    /// A table or one JSON envelope [default: a table on a terminal, tab-separated fields in a pipe]
    #[arg(
        long,
        global = true,
        help_heading = "Options of every command",
        value_enum
    )]
    pub(crate) output: Option<Format>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Claims and runs jobs until it is told to stop
    Run,
    /// Shows everything on a PostgreSQL of its own, which it starts from the programs on this machine
    Demo(DemoArguments),
    /// Brings the database's schema to this version, or says where it is
    Migrate(MigrateArguments),
    /// Reads the configuration as `run` does, and prints what is in force
    CheckConfig,
    /// Puts a job in
    Enqueue(EnqueueArguments),
    /// Looks at jobs and acts on them
    #[command(subcommand)]
    Job(JobCommand),
    /// Looks at jobs that failed for good, and decides about them
    #[command(subcommand)]
    Dead(DeadCommand),
    /// Looks at the running daemons
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Shows switches of the database, and takes the decisions that they ask for
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Counts jobs by type
    Stats,
    /// Measures how fast this database takes and gives jobs, in a schema of its own
    Bench(BenchArguments),
    /// Kills and freezes servers and daemons under load, its own servers or those of a test cluster, and says what was lost or ran twice
    Selftest(SelftestArguments),
    /// Prints a script that completes tenure's commands in a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Prints the man page, or writes those of all commands into a folder
    Man {
        /// The folder; it must be there
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// The handler of a self-test; a daemon starts it
    #[command(hide = true)]
    Witness {
        /// Where it writes what it lives through.
        journal: PathBuf,
    },
    /// Ends the handlers of a daemon that died; a daemon starts it
    #[command(hide = true)]
    Guard {
        /// Held for as long as handlers may live.
        lock: Option<std::path::PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Jobs to put in and to run
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) jobs: i64,
    /// Bytes of each job's data
    #[arg(long, default_value_t = 130)]
    pub(crate) payload: usize,
    /// Jobs of one enqueue
    #[arg(long, default_value_t = 200)]
    pub(crate) batch: usize,
    /// Connections that enqueue, and of the daemon's pool
    #[arg(long, default_value_t = 2)]
    pub(crate) connections: usize,
    /// Slots of the daemon
    #[arg(long, default_value_t = 400)]
    pub(crate) concurrency: u32,
    /// Single jobs, for the pick-up latency
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(i64).range(10..))]
    pub(crate) singles: i64,
}

#[derive(Debug, Args)]
pub(crate) struct SelftestArguments {
    /// For how long faults are injected
    #[arg(long = "for", default_value = "2m", value_name = "DURATION", value_parser = parse_span)]
    pub(crate) duration: Duration,
    /// Strikes the cluster of database.url, not servers that it starts itself. Nothing that matters may run there
    #[arg(long)]
    pub(crate) this_cluster: bool,
    /// A command that kills the primary, so that another server takes its place; it gets $TENURE_PRIMARY (HOST:PORT) and $TENURE_HOSTS
    #[arg(long, value_name = "CMD", requires = "this_cluster")]
    pub(crate) kill_primary: Option<String>,
    /// The same, but the primary is frozen or cut off
    #[arg(long, value_name = "CMD", requires = "this_cluster")]
    pub(crate) freeze_primary: Option<String>,
    /// A planned switchover
    #[arg(long, value_name = "CMD", requires = "this_cluster")]
    pub(crate) switch_over: Option<String>,
    /// Any other fault; can be repeated
    #[arg(long = "fault", value_name = "NAME=CMD", requires = "this_cluster", value_parser = label)]
    pub(crate) faults: Vec<(String, String)>,
    /// A command that makes the cluster whole again after each of these faults
    #[arg(long, value_name = "CMD", requires = "this_cluster")]
    pub(crate) restore: Option<String>,
    /// Strikes servers only, so that the daemons live all the time and what they use can be compared
    #[arg(long)]
    pub(crate) spare_daemons: bool,
    /// How many daemons it starts
    #[arg(long, default_value_t = 3, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=20))]
    pub(crate) daemons: usize,
    /// Decides the order of the faults and where they strike
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Keeps notes and logs in this folder [default: only when something is wrong]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArguments {
    /// Where everything is kept from one demo to the next [default: /var/tmp/tenure-demo-UID]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) data_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArguments {
    #[command(subcommand)]
    pub(crate) action: Option<MigrateAction>,
    /// Prints what would be done and does nothing
    #[arg(long, global = true)]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum MigrateAction {
    /// Applies what is missing (what `migrate` alone does)
    Up,
    /// Says what is applied, what is missing, and whether this version can work with the database
    Status,
    /// Removes the schema with every job in it
    Down {
        /// The schema's name once more, as a confirmation
        #[arg(long, value_name = "SCHEMA")]
        drop_schema: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EnqueueArguments {
    /// The job type, which selects the handler; with --from, that of lines which name none
    #[arg(value_name = "TYPE", required_unless_present = "from")]
    pub(crate) job_type: Option<String>,
    #[command(flatten)]
    pub(crate) bulk: BulkArguments,
    /// What the handler gets: JSON, @FILE, or - for standard input
    #[arg(long, default_value = "{}", value_name = "JSON|@FILE|-")]
    pub(crate) data: String,
    /// Lower numbers run first
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
    /// Runs it after this time, such as 5m
    #[arg(long = "in", value_name = "DURATION", value_parser = parse_span, conflicts_with = "run_at")]
    pub(crate) after: Option<Duration>,
    /// Runs it at this time, such as 2031-05-01T08:00:00Z
    #[arg(long, value_name = "TIME")]
    pub(crate) run_at: Option<String>,
    /// Whose job it is
    #[arg(long, default_value = "default")]
    pub(crate) tenant: String,
    /// While a job of this type, tenant and key lives, its id is returned and nothing new is put in
    #[arg(long, value_name = "KEY")]
    pub(crate) unique_key: Option<String>,
    /// Attempts until it is a dead letter [default: what the handler's policy says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    pub(crate) max_attempts: Option<i32>,
    /// How long one attempt may take [default: what the handler says]
    #[arg(long, value_name = "DURATION", value_parser = parse_span)]
    pub(crate) timeout: Option<Duration>,
    /// A UUIDv7 that makes this command repeatable: a known id is returned and changes nothing
    #[arg(long, value_name = "UUID")]
    pub(crate) id: Option<Uuid>,
    /// What the commit waits for: this server's disk, or that of a synchronous standby too [default: as the database is configured]
    #[arg(long, value_enum)]
    pub(crate) durability: Option<DurabilityArgument>,
    /// A label of the job; can be repeated
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) labels: Vec<(String, String)>,
    /// Waits until the job ended, and prints its result. Ctrl-C leaves the job alone
    #[arg(long)]
    pub(crate) wait: bool,
}

/// Many jobs at once.
#[derive(Debug, Args)]
pub(crate) struct BulkArguments {
    /// Puts in the jobs of a file, or of standard input (-): one JSON object a line, with the parameters of tenure.enqueue as keys
    #[arg(long, value_name = "FILE.ndjson|-", conflicts_with_all = ["data", "priority", "after", "run_at", "tenant", "unique_key",
        "max_attempts", "timeout", "id", "labels", "wait"])]
    pub(crate) from: Option<PathBuf>,
    /// Leaves bad lines out instead of stopping at the first
    #[arg(long, requires = "from")]
    pub(crate) skip_bad: bool,
    /// Leaves bad lines out and writes them here
    #[arg(long, value_name = "FILE", requires = "from")]
    pub(crate) rejects: Option<PathBuf>,
    /// Passes by the lines before this one
    #[arg(long, value_name = "N", requires = "from", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) start_line: u64,
}

/// What a commit waits for.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum DurabilityArgument {
    Local,
    Replicated,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Lists jobs, the newest first
    List(ListArguments),
    /// Everything about one job: state, what it waits for, attempts, errors, log
    Show { id: Uuid },
    /// Why a job stands where it stands, what would release it, and what has happened to it
    Explain { id: Uuid },
    /// Waits until a job ended, and prints its result
    Wait {
        id: Uuid,
        /// Gives up after this time; the job goes on
        #[arg(long, value_name = "DURATION", value_parser = parse_span)]
        timeout: Option<Duration>,
    },
    /// Takes a job back: a waiting one at once, a running one by stopping its handler
    Cancel {
        id: Uuid,
        #[arg(long)]
        reason: Option<String>,
    },
    /// Runs a failed, cancelled or discarded job again, with all its attempts; or all whose end a switch had lost
    Retry {
        #[arg(required_unless_present = "switch")]
        id: Option<Uuid>,
        /// Runs all jobs again whose end was written again in this switch (`tenure cluster switches list`): what they did in the
        /// same database was lost with it
        #[arg(long, value_name = "N", conflicts_with = "id")]
        switch: Option<i64>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// scheduled, blocked, pending, running, completed, failed, discarded or cancelled
    #[arg(long, value_parser = STATUSES)]
    pub(crate) status: Option<String>,
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) job_type: Option<String>,
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
    pub(crate) limit: i64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// Lists dead letters that wait for a person, the newest first
    List {
        #[arg(long = "type", value_name = "TYPE")]
        job_type: Option<String>,
        /// Those too that somebody has decided about
        #[arg(long)]
        all: bool,
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
        limit: i64,
    },
    /// Everything about one dead letter, by its own id or its job's
    Show { id: Uuid },
    /// Runs the job again, with all its attempts
    Retry {
        #[command(flatten)]
        review: ReviewArguments,
        /// What the handler gets instead: JSON, @FILE, or - for standard input
        #[arg(long, value_name = "JSON|@FILE|-")]
        data: Option<String>,
    },
    /// Gives the job up
    Discard {
        #[command(flatten)]
        review: ReviewArguments,
    },
    /// Says that a person did by hand what the job was for
    Fix {
        #[command(flatten)]
        review: ReviewArguments,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ReviewArguments {
    /// The dead letter's id, or its job's
    pub(crate) id: Uuid,
    /// Why, for those who look later
    #[arg(long)]
    pub(crate) note: Option<String>,
    /// Who decides [default: the user of this machine]
    #[arg(long)]
    pub(crate) reviewer: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Lists workers
    List {
        /// Those too that ended
        #[arg(long)]
        all: bool,
    },
    /// Asks a worker to stop as SIGTERM would: it claims nothing more and ends when its jobs have ended
    Drain { id: Uuid },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Says where the installation stands: the gate, why it is on hold, who is waited for
    Status,
    /// Says that this copy of the database, on another PostgreSQL cluster than before, is the one to use; or that this server, with
    /// a lower timeline than one before, is
    Accept {
        /// The highest timeline that daemons have seen, of the server that is lost for good
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
        timeline: Option<i32>,
        /// Why, for those who look later
        #[arg(long)]
        reason: String,
    },
    /// Ends the hold after a restore to an earlier time: what may have run already becomes a dead letter each
    Resume {
        /// Runs it again instead
        #[arg(long)]
        rerun: bool,
    },
    /// Shows what switches, crashes and restores of the database were found to have done
    #[command(subcommand)]
    Switches(SwitchesCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum SwitchesCommand {
    /// Lists them, the newest first
    List {
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=1000))]
        limit: i64,
    },
    /// Everything about one of them
    Show {
        #[arg(value_name = "N")]
        epoch_no: i64,
        /// The jobs that it touched, instead
        #[arg(long)]
        jobs: bool,
    },
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("KEY=VALUE is expected".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
