//! A server, a migrated database, daemons, and what can be asked about them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, process, thread};

use tempfile::TempDir;
use tenure_embedded::{Options, Row, Server, Sql, SqlError};
use tenure_verdict::{Fault, Line, Shown, What, judge, read};

use crate::daemon::Daemon;
use crate::servers::Servers;

/// How long a state may take to come about on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How many jobs are not completed.
pub const UNFINISHED: &str = "SELECT count(*) FROM tenure.jobs WHERE status <> 'completed'";

/// See the module. Everything in it ends when it is dropped.
#[derive(Debug)]
pub struct Lab<S: Servers = Server> {
    /// What has the database `app`. Of a cluster, the present primary.
    pub server: S,
    url: String,
    handlers: String,
    dir: TempDir,
    binary: File,
}

impl Lab {
    /// Starts a server and migrates its database by `tenure migrate up`.
    #[must_use]
    pub fn start() -> Self {
        let server = Server::start(Self::options()).expect("PostgreSQL starts");
        let url = server.url("app", "postgres");
        Self::on(server, url)
    }

    /// How its server is started.
    #[must_use]
    pub fn options() -> Options {
        let settings = [("deadlock_timeout", "200ms"), ("max_connections", "60")];
        Options {
            settings: settings
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .to_vec(),
            ..Options::for_tests()
        }
    }
}

impl<S: Servers> Lab<S> {
    /// Makes the database on `server` and migrates it by `tenure migrate up`. Daemons and commands find it at `url`.
    #[must_use]
    pub fn on(server: S, url: String) -> Self {
        let lab = Self::bare(server, url);
        lab.migrate();
        lab
    }

    /// Makes the database on `server` and leaves it empty.
    #[must_use]
    pub fn bare(server: S, url: String) -> Self {
        let lab = Self {
            server,
            url,
            handlers: String::new(),
            dir: tempfile::tempdir().expect("there is room for files"),
            binary: File::open(binary()).expect("the binary can be read"),
        };
        let mut sql = lab.server.log_in("postgres").expect("a server answers");
        sql.run("CREATE DATABASE app")
            .expect("a database can be made");
        lab
    }

    /// Runs `tenure migrate up`.
    pub fn migrate(&self) {
        let said = self.tenure(&["migrate", "up"]);
        assert!(
            said.status.success(),
            "{}",
            String::from_utf8_lossy(&said.stderr)
        );
    }

    /// A path in the lab's own folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a command of the binary to its end.
    #[must_use]
    pub fn tenure(&self, arguments: &[&str]) -> Output {
        self.command()
            .args(arguments)
            .env("TENURE_DATABASE__URL", &self.url)
            .output()
            .expect("the binary runs")
    }

    /// Where daemons and commands find the database.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Lets daemons and commands find the database elsewhere from now on.
    pub fn set_url(&mut self, url: String) {
        self.url = url;
    }

    /// More handlers, as TOML, for all daemons started from now on. `{witness}` in it is the command of the witness.
    pub fn add_handlers(&mut self, toml: &str) {
        self.handlers += &toml.replace("{witness}", &self.witness());
    }

    /// The witness as a command in TOML.
    fn witness(&self) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("handlers/witness.sh");
        let (journal, url) = (self.path("witnesses"), &self.url);
        format!("[\"sh\", {script:?}, {journal:?}, {url:?}]")
    }

    /// Starts a daemon. `set` overrides its configuration, as `--set` does: short leases, the witness for all of its job
    /// types, a retry after a second. A daemon of a name that was used before appends to the same log.
    #[must_use]
    pub fn daemon(&self, name: &str, set: &[&str]) -> Daemon {
        self.daemon_by(self.command(), name, set)
    }

    /// The same, started by `command`, which ends where the binary's arguments begin.
    #[must_use]
    pub fn daemon_by(&self, mut command: Command, name: &str, set: &[&str]) -> Daemon {
        let config = self.path(&format!("{name}.toml"));
        fs::write(&config, self.configuration(name)).expect("a file can be written");
        let log = self.path(&format!("{name}.log"));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .expect("a file can be made");
        command.arg("run").arg("--config").arg(config);
        for setting in set {
            command.arg("--set").arg(setting);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file);
        Daemon::spawn(command, log)
    }

    /// `state_dir` for a daemon of this name, as an argument of [`Lab::daemon`].
    #[must_use]
    pub fn state_dir(&self, name: &str) -> String {
        format!(
            "worker.state_dir={}",
            self.path(&format!("{name}.state")).display()
        )
    }

    /// The binary in an environment without settings of its own. It is the one that was there when the lab was made, also when
    /// a build has put another in its place.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(format!(
            "/proc/{}/fd/{}",
            process::id(),
            self.binary.as_raw_fd()
        ));
        for (name, _) in env::vars_os() {
            if name.to_string_lossy().starts_with("TENURE_") {
                command.env_remove(name);
            }
        }
        command
    }

    fn configuration(&self, name: &str) -> String {
        let reveal = Path::new(env!("CARGO_MANIFEST_DIR")).join("handlers/reveal.sh");
        let (url, witness, more) = (&self.url, self.witness(), &self.handlers);
        let handlers: String = ["ticks", "stubborn", "exit", "assassin", "parent"]
            .map(|kind| {
                format!(
                    "[handlers.\"{kind}-*\"]\nexec = {{ command = {witness}, kill_grace = \"500ms\" }}\nretry = {{ delay = \"1s\" }}\n"
                )
            })
            .concat();
        format!(
            "{handlers}{more}[handlers.reveal]\nexec = {{ command = [\"sh\", {reveal:?}], kill_grace = \"500ms\" }}\n[handlers.\"noop*\"]\nnoop = {{}}\n\
             [database]\nurl = {url:?}\n[worker]\nname = {name:?}\nconcurrency = 6\nlease_ttl = \"8s\"\nheartbeat = \"1s\"\n\
             [api]\nlisten = \"off\"\n[log]\nformat = \"text\"\n"
        )
    }

    /// A new connection, as superuser.
    #[must_use]
    pub fn sql(&self) -> Sql {
        self.server
            .log_in("app")
            .expect("the database can be reached")
    }

    /// Runs SQL for its effects.
    pub fn run(&self, sql: &str) {
        drop(self.rows(sql));
    }

    /// The rows of a query.
    #[must_use]
    pub fn rows(&self, query: &str) -> Vec<Row> {
        self.sql()
            .run(query)
            .unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    /// The one value of a query; NULL and no row are the empty text.
    #[must_use]
    pub fn value(&self, query: &str) -> String {
        let first = self.rows(query).into_iter().next();
        first
            .and_then(|row| row.into_iter().next())
            .flatten()
            .unwrap_or_default()
    }

    /// Puts one job in.
    #[must_use]
    pub fn enqueue(&self, job_type: &str) -> String {
        self.value(&format!("SELECT tenure.enqueue('{job_type}')"))
    }

    /// Puts many jobs of one type in, all with attempts enough for any chaos.
    #[must_use]
    pub fn enqueue_many(&self, job_type: &str, count: usize) -> Vec<String> {
        enqueue_many(&mut self.sql(), job_type, count).expect("the database takes jobs")
    }

    /// The status of a job.
    #[must_use]
    pub fn status(&self, job: &str) -> String {
        self.value(&format!(
            "SELECT status FROM tenure.jobs WHERE id = '{job}'"
        ))
    }

    /// Waits until the one value of a query is this.
    pub fn until(&self, query: &str, wanted: &str) {
        let mut last = String::new();
        self.wait_for(|| {
            last = self.value(query);
            if last == wanted {
                Ok(())
            } else {
                Err(format!("{query}\nis {last}, not {wanted}"))
            }
        });
    }

    /// Waits until a job has this status.
    pub fn until_status(&self, job: &str, status: &str) {
        self.until(
            &format!("SELECT status FROM tenure.jobs WHERE id = '{job}'"),
            status,
        );
    }

    /// Waits until so many workers are live.
    pub fn until_live(&self, count: usize) {
        self.until(
            "SELECT count(*) FROM tenure.workers WHERE status = 'live'",
            &count.to_string(),
        );
    }

    /// Waits until the witnesses' file shows so many lines of this kind.
    pub fn until_witnessed(&self, what: What, count: usize) {
        self.wait_for(|| {
            let seen = self.count(what);
            if seen >= count {
                Ok(())
            } else {
                Err(format!("{seen} of {count} {what:?} lines"))
            }
        });
    }

    /// How many lines of this kind the witnesses have written.
    #[must_use]
    pub fn count(&self, what: What) -> usize {
        self.witnesses()
            .iter()
            .filter(|line| line.what == what)
            .count()
    }

    /// Waits until no handler lives that the witnesses tell of.
    pub fn until_handlers_are_dead(&self) {
        self.wait_for(|| {
            let lines = self.witnesses();
            let alive = lines.iter().find(|line| lives(line.pid));
            alive.map_or(Ok(()), |line| Err(format!("handler {} lives", line.pid)))
        });
    }

    /// Waits until `check` is satisfied; it says what is not as it should be.
    ///
    /// # Panics
    /// After [`PATIENCE`], with the end of each daemon's log.
    pub fn wait_for(&self, check: impl FnMut() -> Result<(), String>) {
        wait_for(check, || self.logs());
    }

    /// What the handlers have written so far.
    #[must_use]
    pub fn witnesses(&self) -> Vec<Line> {
        match fs::read_to_string(self.path("witnesses")) {
            // A line that is being written is none yet.
            Ok(text) => {
                let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
                read(complete).expect("only witnesses write there")
            }
            Err(_) => Vec::new(),
        }
    }

    /// Waits until each of these jobs has an outcome, and judges all that happened. To be called when nothing runs any more that
    /// could still do harm, or after the daemons have ended.
    ///
    /// # Panics
    /// When there is a fault.
    pub fn assert_sound(&self, acknowledged: &[String]) {
        let faults = judge(&self.witnesses(), acknowledged, &self.shown());
        self.assert_none(&faults);
        self.assert_consistent();
    }

    /// What the database shows of the witnesses' jobs.
    pub(crate) fn shown(&self) -> BTreeMap<String, Shown> {
        self.rows("SELECT id, status, result ->> 'token' FROM tenure.jobs WHERE job_type ~ '^(ticks|stubborn|assassin|parent|effects)-'")
            .into_iter()
            .map(|row| match <[Option<String>; 3]>::try_from(row) {
                Ok([Some(id), Some(status), token]) => (id, Shown { status, token }),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// Panics with what is wrong, if there is anything, and the end of each daemon's log.
    pub(crate) fn assert_none(&self, faults: &BTreeSet<Fault>) {
        let list: Vec<String> = faults.iter().take(20).map(ToString::to_string).collect();
        assert!(
            faults.is_empty(),
            "{} faults:\n{}\n{}",
            faults.len(),
            list.join("\n"),
            self.logs()
        );
    }

    /// Checks that each job stands in one state, and that nothing has locked itself out.
    pub(crate) fn assert_consistent(&self) {
        let both = self.value(
            "SELECT count(*) FROM tenure.job FULL JOIN (SELECT id, count(*) AS states FROM (SELECT id FROM tenure.ready UNION ALL \
             SELECT id FROM tenure.later UNION ALL SELECT id FROM tenure.blocked UNION ALL SELECT id FROM tenure.lease UNION ALL \
             SELECT id FROM tenure.outcome) s GROUP BY id) s USING (id) WHERE states IS DISTINCT FROM 1",
        );
        assert_eq!(both, "0", "jobs do not stand in exactly one state");
        let server = self.server.logged();
        if let Some(place) = server.find("deadlock detected") {
            let told: Vec<&str> = server[place..].lines().take(12).collect();
            panic!("{}", told.join("\n"));
        }
    }

    /// The lines of the server's log with this text.
    #[must_use]
    pub fn server_said(&self, text: &str) -> Vec<String> {
        self.server
            .logged()
            .lines()
            .filter(|line| line.contains(text))
            .map(str::to_owned)
            .collect()
    }

    /// The end of each daemon's log.
    fn logs(&self) -> String {
        let files = fs::read_dir(self.dir.path()).expect("the folder can be read");
        files
            .map(|file| file.expect("the folder can be read").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
            .map(|path| {
                let text = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let tail = lines[lines.len().saturating_sub(25)..].join("\n");
                format!(
                    "--- {}\n{tail}\n",
                    path.file_name().unwrap_or_default().display()
                )
            })
            .collect()
    }
}

impl<S: Servers> Drop for Lab<S> {
    /// After a failure, leaves all that tells of it in the folder that `TENURE_CHAOS_KEEP` names.
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        if let Some(folder) = env::var_os("TENURE_CHAOS_KEEP") {
            let folder = PathBuf::from(folder);
            // What cannot be kept is no second failure.
            let _ = Command::new("cp")
                .arg("-r")
                .arg(self.dir.path())
                .arg(folder.join("lab"))
                .status();
            let _ = fs::write(folder.join("servers.log"), self.server.logged());
        }
    }
}

/// Puts many jobs of one type in over this connection, which may break.
///
/// # Errors
/// Of the database; then nobody knows whether they are in.
pub fn enqueue_many(sql: &mut Sql, job_type: &str, count: usize) -> Result<Vec<String>, SqlError> {
    let rows = sql.run(&format!(
        "SELECT tenure.enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', '{job_type}', 'max_attempts', 1000)) \
         FROM generate_series(1, {count})))"
    ))?;
    Ok(rows.into_iter().flatten().flatten().collect())
}

/// Whether a process runs. One that a stopped daemon has not reaped does not.
fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// Waits until `check` is satisfied; it says what is not as it should be.
///
/// # Panics
/// After [`PATIENCE`], with these logs.
pub(crate) fn wait_for(
    mut check: impl FnMut() -> Result<(), String>,
    logs: impl FnOnce() -> String,
) {
    let begun = Instant::now();
    while let Err(what) = check() {
        if begun.elapsed() > PATIENCE {
            panic!("still, after {PATIENCE:?}: {what}\n{}", logs());
        }
        nap();
    }
}

/// A short pause between two looks.
pub(crate) fn nap() {
    thread::sleep(Duration::from_millis(50));
}

/// The daemon's program: TENURE_BIN, else the one that was built into the folder of this test.
fn binary() -> PathBuf {
    if let Some(path) = env::var_os("TENURE_BIN") {
        return path.into();
    }
    let own = env::current_exe().expect("this test has a path");
    let path = own
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in target/PROFILE/deps")
        .join("tenure");
    assert!(
        path.is_file(),
        "{} is missing: cargo build -p tenure",
        path.display()
    );
    path
}
