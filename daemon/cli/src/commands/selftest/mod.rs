//! `tenure selftest`: kills, freezes and stops servers and daemons under load, and says what was lost and what ran twice.
//!
//! The servers are its own or the user's. Daemons are processes of this binary, their handlers witnesses that write what they live through;
//! producers note what was acknowledged. The verdict is that of the chaos tests (`tenure_verdict`): it reads these notes and the final
//! state of the database, never what a daemon says of itself.

mod crew;
mod folder;
mod load;
mod notes;
mod own;
mod place;
mod report;
mod theirs;
mod watch;
pub(crate) mod witness;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use tenure_runtime::daemon::targets;
use tenure_store::error::StoreError;
use tenure_store::session::{Session, Target};
use tenure_verdict::switches::{History, judge};
use tenure_verdict::{Shown, uptime};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Context;
use crate::arguments::SelftestArguments;
use crate::output::{Exit, Failure};
use crew::{Crew, Use};
use folder::Folder;
use load::Load;
use notes::Notes;
use place::{SCHEMA, Servers, drop_schema, environment, make_schema, refuse_what_matters, servers};
use report::{Injected, Result as Results};
use theirs::Injection;

/// For so long all goes well between two faults: at least, and at most that much more.
const CALM: (u64, u64) = (2_000, 1_500);

/// How long work may take to go on after a fault, and to come to its end.
const PATIENCE: Duration = Duration::from_secs(120);

/// The longest that a job has to wait for a worker that is dead: its lease, and then a sweep.
const LATE: Duration = Duration::from_secs(12);

/// The daemons' leases are trusted for 5.5 s: what runs when an outage is longer may be ended before its end, and run again.
const TRUSTED: Duration = Duration::from_secs(4);

/// From one look to the next.
const LOOK: Duration = Duration::from_millis(50);

/// Sees which host is the primary.
type Seen = tokio::sync::watch::Receiver<Option<usize>>;

/// What befalls.
#[derive(Debug, Clone)]
enum Blow {
    Own(own::Blow),
    Theirs(Injection),
    Daemon(crew::Blow),
}

impl Blow {
    fn name(&self) -> &str {
        match self {
            Self::Own(blow) => blow.name(),
            Self::Theirs(injection) => &injection.name,
            Self::Daemon(blow) => blow.name(),
        }
    }
}

/// Runs the self-test.
pub(super) fn selftest(context: &Context, arguments: &SelftestArguments) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("the system gives no threads: {error}")))?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The first one ends the faults, and the result is that of what was; the second one ends all at once.
        let registered =
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&interrupted))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupted)));
        registered.map_err(|error| Failure::failed(format!("signals cannot be heard: {error}")))?;
    }
    let folder = Folder::new(arguments.keep.as_deref())?;
    let (servers, database) = servers(context, arguments)?;
    if matches!(&servers, Servers::Theirs(none) if none.is_empty()) && arguments.spare_daemons {
        return Err(Failure::usage("there is nothing to strike with")
            .hint("name commands, such as --kill-primary, or leave out --spare-daemons"));
    }
    let (_, mut target) = targets(&database).map_err(|error| Failure::usage(error.to_string()))?;
    runtime.block_on(refuse_what_matters(&target))?;
    target.schema = SCHEMA.to_owned();
    runtime.block_on(make_schema(&target))?;
    let mut test = Test {
        context,
        arguments,
        crew: Crew::start(folder.path(), environment(&database), arguments.daemons)?,
        notes: Arc::default(),
        random: fastrand::Rng::with_seed(arguments.seed),
        servers,
        target,
        folder,
        runtime,
        interrupted,
        injected: Vec::new(),
        used: None,
    };
    let played = test.play();
    // Also of a test that went wrong there is a verdict.
    let result = test.judge().map(|mut results| {
        if let Err(failure) = &played {
            results.violations.push(failure.to_string());
        } else if test.injected.is_empty() {
            results
                .violations
                .push("no fault was injected: the time was too short".to_owned());
        }
        results
    });
    match result {
        Ok(results) if results.violations.is_empty() => {
            context.output.print(&results)?;
            context.note(&results.sentence());
            if let Err(failure) = test.runtime.block_on(drop_schema(&test.target)) {
                context.warn(&format!("the schema {SCHEMA} is left: {failure}"));
            }
            if let Some((early, last)) = results.used {
                context.note(&format!(
                    "The largest daemon: {} KiB of memory early and {} at the end, {} open files and {}.",
                    early.memory_kib, last.memory_kib, early.open_files, last.open_files
                ));
            }
            Ok(())
        }
        Ok(results) => {
            let told: Vec<&str> = results
                .violations
                .iter()
                .take(20)
                .map(String::as_str)
                .collect();
            let failure = Failure::new(Exit::Failed, "violations", told.join("; "));
            let failure = failure.hint(test.folder.keep());
            context.output.print_with(&results, Err(failure))
        }
        Err(failure) => {
            let kept = test.folder.keep();
            context.note(&kept);
            Err(failure)
        }
    }
}

/// A self-test that goes on.
struct Test<'a> {
    context: &'a Context,
    arguments: &'a SelftestArguments,
    // Dropped in this order: daemons before their servers.
    crew: Crew,
    notes: Arc<Notes>,
    random: fastrand::Rng,
    servers: Servers,
    target: Target,
    folder: Folder,
    runtime: Runtime,
    /// Somebody wants it to end.
    interrupted: Arc<AtomicBool>,
    injected: Vec<Injected>,
    /// What the daemons used after a tenth of the time, and last.
    used: Option<(Use, Use)>,
}

impl Test<'_> {
    /// Injects faults until the time is over, and lets all work come to its end.
    fn play(&mut self) -> Result<(), Failure> {
        let count = self.arguments.daemons;
        self.until(
            "all daemons live",
            &format!("SELECT count(*) >= {count} AS good FROM %workers WHERE status = 'live'"),
        )?;
        let (primary, mut seen) = tokio::sync::watch::channel(None);
        let mut watching = JoinSet::new();
        watching.spawn_on(
            watch::watch(self.target.clone(), Arc::clone(&self.notes), primary),
            self.runtime.handle(),
        );
        let handle = self.runtime.handle().clone();
        let load = Load::start(&handle, &self.target, &self.notes, count, &mut self.random);
        let played = self.inject(&load, &mut seen);
        self.runtime.block_on(load.stop());
        played?;
        self.until(
            "all jobs have come to an end",
            "SELECT NOT EXISTS (SELECT FROM %job j WHERE NOT EXISTS (SELECT FROM %outcome o WHERE o.id = j.id)) AS good",
        )?;
        self.crew.stop()
    }

    fn inject(&mut self, load: &Load, seen: &mut Seen) -> Result<(), Failure> {
        let begun = uptime();
        let progress = self.progress();
        let mut blows: Vec<Blow> = Vec::new();
        loop {
            let calm = CALM.0 + self.random.u64(..CALM.1);
            self.rest(Duration::from_millis(calm), begun, &progress);
            let passed = uptime().saturating_sub(begun);
            if self.arguments.spare_daemons
                && passed >= self.arguments.duration / 10
                && let Some(now) = self.crew.largest()
            {
                self.used = Some((self.used.map_or(now, |(early, _)| early), now));
            }
            if passed >= self.arguments.duration || self.interrupted.load(Ordering::Relaxed) {
                progress.finish_and_clear();
                return Ok(());
            }
            // Each once before any comes again.
            if blows.is_empty() {
                blows = self.blows();
                self.random.shuffle(&mut blows);
            }
            let Some(blow) = blows.pop() else { continue };
            progress.set_message(blow.name().to_owned());
            if !self.context.output.is_for_people() || progress.is_hidden() {
                self.context
                    .note(&format!("{:.0} s: {}", passed.as_secs_f64(), blow.name()));
            }
            load.pile_up();
            self.strike(&blow, seen)?;
            progress.set_message("");
            self.crew.check()?;
        }
    }

    fn progress(&self) -> ProgressBar {
        let seconds = self.arguments.duration.as_secs();
        if !self.context.output.is_for_people() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(seconds);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} s  {msg}");
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    }

    fn rest(&self, span: Duration, begun: Duration, progress: &ProgressBar) {
        let until = uptime() + span;
        while uptime() < until && !self.interrupted.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
            let passed = uptime().saturating_sub(begun);
            // The last fault may take longer than the time that was asked for.
            progress.set_position(passed.min(self.arguments.duration).as_secs());
        }
    }

    fn blows(&self) -> Vec<Blow> {
        let daemons = crew::Blow::ALL
            .map(Blow::Daemon)
            .into_iter()
            .filter(|_| !self.arguments.spare_daemons);
        match &self.servers {
            Servers::Own(_) => own::Blow::ALL
                .map(Blow::Own)
                .into_iter()
                .chain(daemons)
                .collect(),
            Servers::Theirs(injections) => injections
                .iter()
                .cloned()
                .map(Blow::Theirs)
                .chain(daemons)
                .collect(),
        }
    }

    /// Strikes, and waits until work goes on and the cluster is whole again.
    fn strike(&mut self, blow: &Blow, seen: &mut Seen) -> Result<(), Failure> {
        let switches = self.notes.switches();
        let name = blow.name().to_owned();
        let pause = Duration::from_millis(self.random.u64(..1_500));
        match (blow, &mut self.servers) {
            (Blow::Own(blow), Servers::Own(own)) => {
                own.prepare(*blow)?;
                thread::sleep(pause);
                self.notes.struck();
                self.injected.push(Injected { name, at: uptime() });
                own.strike(*blow)?;
                thread::sleep(pause);
                own.succeed(*blow)?;
                self.wait("another server takes writes", |test| {
                    test.notes.switches() > switches
                })?;
                if let Servers::Own(own) = &mut self.servers {
                    own.restore()?;
                }
            }
            (Blow::Theirs(injection), _) => {
                self.wait("a server takes writes", |_| seen.borrow().is_some())?;
                let hosts: Vec<String> = (0..self.target.address.hosts())
                    .map(|host| self.target.address.at(host).servers())
                    .collect();
                let primary = *seen.borrow();
                let present = primary.and_then(|host| hosts.get(host).cloned());
                let present = present.unwrap_or_default();
                self.notes.struck();
                self.injected.push(Injected {
                    name: name.clone(),
                    at: uptime(),
                });
                let struck = theirs::run(&name, &injection.command, &present, &hosts.join(","))
                    .and_then(|()| match injection.switches {
                        true => self.wait("another server takes writes", |test| {
                            test.notes.switches() > switches
                        }),
                        false => Ok(()),
                    })
                    .and_then(|()| self.until_it_flows());
                // Also after a fault that went wrong.
                let restored = match &self.arguments.restore {
                    Some(restore) => theirs::run("restore", restore, &present, &hosts.join(",")),
                    None => Ok(()),
                };
                struck.and(restored)?;
            }
            (Blow::Daemon(blow), _) => {
                let number = self.random.usize(..self.arguments.daemons);
                self.injected.push(Injected { name, at: uptime() });
                // Half of the frozen ones are away for longer than their lease.
                let away = pause + Duration::from_secs(self.random.u64(..2) * 11);
                self.crew.strike(number, *blow, away)?;
            }
            (Blow::Own(_), Servers::Theirs(_)) => {}
        }
        self.until_it_flows()?;
        self.notes.calm();
        Ok(())
    }

    /// Waits until a server takes enqueues.
    fn until_it_flows(&self) -> Result<(), Failure> {
        let before = self.notes.enqueues();
        self.wait("a server takes enqueues", |test| {
            test.notes.enqueues() > before + 2
        })
    }

    fn wait(&self, what: &str, good: impl Fn(&Self) -> bool) -> Result<(), Failure> {
        let begun = uptime();
        while !good(self) {
            if uptime().saturating_sub(begun) > PATIENCE {
                return Err(Failure::failed(format!("not within {PATIENCE:?}: {what}")));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Waits until a query says that it is good.
    fn until(&self, what: &str, sql: &str) -> Result<(), Failure> {
        self.wait(what, |test| {
            let asked = async {
                let (session, _) = Session::open(&test.target).await.ok()?;
                let rows = session.rows("selftest", sql, &[]).await.ok()?;
                rows.first()?.try_get::<_, bool>("good").ok()
            };
            test.runtime.block_on(asked) == Some(true)
        })
    }

    fn judge(&self) -> Result<Results, Failure> {
        let path = self.folder.path().join("witnesses");
        let text = fs::read_to_string(&path)
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
        let lines = tenure_verdict::read(complete).map_err(Failure::failed)?;
        let state = self.notes.all();
        let shown = self.runtime.block_on(shown(&self.target))?;
        let judgement = judge(&History {
            lines: &lines,
            enqueues: &state.enqueues,
            shown: &shown,
            switches: &state.switches,
            absences: &self.crew.absences,
            rerun: &[],
            uncovered: false,
            interruptions: state
                .switches
                .iter()
                .any(|switch| switch.writable - switch.fault > TRUSTED),
        });
        let mut results = Results::new(
            self.arguments.seed,
            &self.injected,
            &state,
            &lines,
            &judgement,
            LATE,
        );
        results.used = self.used;
        Ok(results)
    }
}

/// What the database shows of all jobs.
async fn shown(target: &Target) -> Result<BTreeMap<String, Shown>, Failure> {
    let (session, _) = Session::open(target).await?;
    let sql = "SELECT id::text AS id, status, result ->> 'token' AS token FROM %jobs";
    let mut shown = BTreeMap::new();
    for row in session.rows("selftest", sql, &[]).await? {
        let read = || -> Result<(String, Shown), StoreError> {
            Ok((
                row.try_get("id")?,
                Shown {
                    status: row.try_get("status")?,
                    token: row.try_get("token")?,
                },
            ))
        };
        let (id, is) = read()?;
        shown.insert(id, is);
    }
    Ok(shown)
}
