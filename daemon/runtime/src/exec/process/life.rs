//! The life of one process of a fleet: lines in, lines out, its log, one way to end it.
//!
//! ```text
//!   spawned ──ready──► working ──drain──► leaving, no job left: end of input ──► ended, a zombie, and nothing is left ──► reaped
//!      └────────────────┴─────────────────┴── breaks the protocol, has to be killed: TERM, grace, KILL ──►┘
//! ```
//!
//! Invariants: the pipes move side by side, so that none can block another; the jobs in it learn of its death only when nothing that it
//! started runs any more; each learns of it once.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use nix::unistd::{SysconfVar, sysconf};
use tenure_core::crew::Gone;
use tenure_protocol::lines::{self, Lines, Said};
use tenure_protocol::output::Capped;
use tenure_protocol::verdict::Ended;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;

use super::Fleet;
use super::burial::{Burial, End, Unburied, bury};
use super::member::{Answered, Member, Open, Over};
use crate::clock;
use crate::events::{self, ProcessEnd};
use crate::exec::exit::{Exit, How};
use crate::exec::spawn::{NotSpawned, Program, pid_of, spawn};
use crate::exec::started::Started;
use crate::exec::tree::Tree;
use crate::exec::{Executor, LAPSED, LINGER, after};
use crate::supervisor::{Order, handler_of};

/// How much longer than a result a line may be.
const SLACK: usize = 64 << 10;

/// How much of the end of its log is kept for its own death.
const LAST_WORDS: usize = 4 << 10;

/// How often its memory is looked at, at most.
const LOOK: Duration = Duration::from_millis(100);

/// Starts a process and looks after it until it is gone.
pub(super) async fn live(fleet: Fleet, member: Arc<Member>, executor: Executor) {
    let mut unburied = Unburied {
        fleet: &fleet,
        member: &member,
        over: false,
    };
    let settings = &fleet.0.settings;
    let program = Program {
        command: &settings.command,
        cwd: settings.cwd.as_deref(),
        env: &settings.env,
        confinement: &settings.confinement,
        own: Vec::new(),
    };
    let lapses = executor
        .guard
        .as_ref()
        .map_or(0, crate::guard::Guard::lapses);
    let Started { mut child, with } = match spawn(&executor, &program, || {
        fleet.0.closing.is_cancelled().then(String::new)
    })
    .await
    {
        Ok(started) => started,
        Err(NotSpawned::Stopped(_)) => {
            unburied.over = true;
            return fleet.gone(member.id, Gone::Well, "");
        }
        Err(NotSpawned::Refused(why)) => {
            events::process_gone(&fleet.0.name, 0, 0, ProcessEnd::NotReady, &why);
            unburied.over = true;
            return fleet.gone(member.id, Gone::Badly, &why);
        }
    };
    let Some(pid) = pid_of(&child) else {
        return;
    };
    events::process_started(&fleet.0.name, pid.as_raw());
    // Dropped before `child`, so also a dropped future has all killed while the supervisor is unreaped.
    let mut tree = Tree::new(pid, executor.guard.as_ref());
    let mut process = Process::new(&fleet, &member, &executor, &mut child, &tree);
    let mut end = process.work().await;
    // From here on it takes nothing.
    member.close();
    fleet.state().crew.leave(member.id);
    fleet.0.changed.notify_waiters();
    process.finish(&mut end, &mut tree).await;
    let (was_ready, flushed, last_words) = (process.ready, process.flushed, process.words.finish());
    let how = How::of(&mut child).await;
    let lapsed = tree
        .guard()
        .is_some_and(|guard| guard.has_lapsed_since(lapses));
    if lapsed && !matches!(end, End::Left) {
        end = End::Killed(LAPSED.to_owned());
    }
    let limits = &settings.confinement.limits;
    let exceeded = with.clear_up().await.or_else(|| how.exceeded(limits));
    if let (Some(exceeded), End::Died) = (exceeded, &end) {
        end = End::Exceeded(limits.explain(exceeded));
    }
    bury(
        &fleet,
        &member,
        pid.as_raw(),
        &Burial {
            end: &end,
            how: &how,
            was_ready,
            flushed,
            words: last_words.text().as_deref(),
        },
    );
    unburied.over = true;
}

/// A running process, as the task that looks after it sees it.
struct Process<'a> {
    fleet: &'a Fleet,
    member: &'a Member,
    exit: Exit,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    lines: Lines,
    /// What is being written.
    writing: Vec<u8>,
    written: usize,
    /// How many bytes were ever written.
    flushed: u64,
    /// It does not read any more.
    deaf: bool,
    words: Capped,
    ready: bool,
    /// It was told that no job comes any more.
    drained: bool,
    pid: i32,
    looked_at: Option<Instant>,
    memory: u64,
}

impl<'a> Process<'a> {
    fn new(
        fleet: &'a Fleet,
        member: &'a Member,
        executor: &Executor,
        child: &mut Child,
        tree: &Tree<'_>,
    ) -> Self {
        let supervisor = tree.supervisor();
        Self {
            fleet,
            member,
            exit: Exit::of(supervisor),
            stdin: child.stdin.take(),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            lines: Lines::new(executor.limits.result.saturating_add(SLACK)),
            writing: Vec::new(),
            written: 0,
            flushed: 0,
            deaf: false,
            words: Capped::new(LAST_WORDS),
            ready: false,
            drained: false,
            pid: supervisor.as_raw(),
            looked_at: None,
            memory: 0,
        }
    }

    /// Until it ends, or has to.
    async fn work(&mut self) -> End {
        let settings = &self.fleet.0.settings;
        let hello = after(settings.hello_timeout);
        let (mut answers, mut log) = (vec![0; 64 << 10], vec![0; 16 << 10]);
        // Of the end of its input, or of its output.
        let mut bye: Option<Instant> = None;
        loop {
            if let Some(end) = self.orders(&mut bye) {
                return end;
            }
            let too_old_at = self.fleet.state().crew.too_old_at(self.member.id);
            tokio::select! {
                biased;
                () = self.exit.wait() => return End::Died,
                () = self.member.wake.notified() => {}
                () = self.fleet.0.closing.cancelled(), if !self.drained => {
                    self.fleet.state().crew.leave(self.member.id);
                    self.drain();
                }
                length = read(&mut self.stdout, &mut answers) => {
                    if length == 0 {
                        self.stdout = None;
                        self.member.close();
                        bye.get_or_insert(after(LINGER));
                        continue;
                    }
                    self.catch_up(&mut log);
                    if let Err(end) = self.hear(&answers[..length]) {
                        return end;
                    }
                }
                length = read(&mut self.stderr, &mut log) => {
                    if length == 0 {
                        self.stderr = None;
                    }
                    self.note(&log[..length]);
                }
                written = write(&mut self.stdin, &self.writing[self.written..]) => match written {
                    Some(length) => {
                        self.written += length;
                        self.flushed += length as u64;
                    }
                    None => {
                        // Perhaps it is just dying, and what it has answered is still to be heard.
                        self.stdin = None;
                        self.deaf = true;
                        self.member.close();
                        bye.get_or_insert(after(LINGER));
                    }
                },
                () = sleep_until(hello), if !self.ready => {
                    let limit = humantime::format_duration(settings.hello_timeout);
                    return End::Broke(format!("it did not say that it is ready within {limit} (hello_timeout)"));
                }
                () = clock::sleep_until(too_old_at), if self.ready && too_old_at.is_some() => {
                    let leave = self.fleet.state().crew.look(clock::now(), self.member.id, 0);
                    if let Some(why) = leave {
                        self.member.leave(why);
                        self.fleet.0.changed.notify_waiters();
                    }
                }
                () = sleep_until(bye.unwrap_or(hello)), if bye.is_some() => {
                    if self.drained && self.member.talk().open.is_empty() {
                        return End::Left;
                    }
                    let closed = if self.deaf { "input" } else { "output" };
                    return End::Broke(format!("it closed its standard {closed}"));
                }
            }
        }
    }

    /// Carries out what was ordered meanwhile.
    fn orders(&mut self, bye: &mut Option<Instant>) -> Option<End> {
        let mut talk = self.member.talk();
        if let Some(why) = talk.kill.clone() {
            return Some(End::Killed(why));
        }
        if self.written == self.writing.len() {
            self.writing.clear();
            self.written = 0;
            std::mem::swap(&mut self.writing, &mut talk.out);
        }
        let (leave, idle) = (talk.leave.take(), talk.open.is_empty());
        drop(talk);
        if let Some(why) = leave {
            events::process_leaves(&self.fleet.0.name, self.pid, why);
            self.drain();
            // The line is written first.
            return None;
        }
        if self.drained && idle && self.writing.is_empty() && self.stdin.take().is_some() {
            *bye = Some(after(self.fleet.0.settings.kill_grace));
        }
        None
    }

    /// No job comes any more.
    fn drain(&mut self) {
        if !self.drained {
            self.drained = true;
            // Under one lock: no job comes after this line.
            let mut talk = self.member.talk();
            talk.closed = true;
            talk.queue(lines::drain());
            drop(talk);
            self.member.wake.notify_one();
        }
    }

    /// What was logged before an answer belongs to its job, so it is read first; but not for ever.
    fn catch_up(&mut self, log: &mut [u8]) {
        for _ in 0..8 {
            let Some(length) = read(&mut self.stderr, log).now_or_never() else {
                return;
            };
            if length == 0 {
                self.stderr = None;
            }
            self.note(&log[..length]);
        }
    }

    /// Its log, which is that of all jobs in it.
    fn note(&mut self, bytes: &[u8]) {
        self.words.push(bytes);
        for open in self.member.talk().open.values_mut() {
            open.log.push(bytes);
        }
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), End> {
        // Taken out, since what a line says changes the rest of this.
        let mut lines = std::mem::replace(&mut self.lines, Lines::new(0));
        let heard = lines.push(bytes, |line| self.line(line));
        self.lines = lines;
        heard
    }

    fn line(&mut self, line: &[u8]) -> Result<(), End> {
        match lines::read(line)? {
            Said::Ready { concurrency } if !self.ready => {
                self.ready = true;
                let mut state = self.fleet.state();
                state.crew.ready(clock::now(), self.member.id, concurrency);
                drop(state);
                self.fleet.show();
                self.fleet.0.changed.notify_waiters();
                Ok(())
            }
            Said::Ready { .. } => Err(End::Broke("it said twice that it is ready".to_owned())),
            _ if !self.ready => Err(End::Broke(
                "it answered before it said that it is ready ({\"type\":\"ready\"})".to_owned(),
            )),
            Said::Ended { id, token, ended } => self.answer(id, token, ended),
            // What comes after the answer is of no use.
            Said::Progress { .. } => Ok(()),
        }
    }

    fn answer(&mut self, id: Uuid, token: Option<Uuid>, ended: Box<Ended>) -> Result<(), End> {
        let answered = self.member.talk().answered(id, token);
        let Open { answer, log, .. } = match answered {
            Answered::Open(open) => open,
            Answered::Late => return Ok(()),
            Answered::Unknown => {
                return Err(End::Broke(format!(
                    "it answered for job {id}, which it does not have: each job is answered once"
                )));
            }
        };
        let log = log.finish().text();
        // The seat is gone when the job was given up.
        let _ = answer.send(Over::Answered { ended, log });
        let memory = self.memory();
        self.fleet.over(self.member, memory);
        Ok(())
    }

    /// What it holds in memory, in bytes; looked at now and then, where there is a limit.
    fn memory(&mut self) -> u64 {
        let now = Instant::now();
        let is_new = |at: &Instant| now < *at + LOOK;
        if self.fleet.0.settings.max_memory.is_some()
            && !self.looked_at.is_some_and(|at| is_new(&at))
        {
            self.looked_at = Some(now);
            self.memory = handler_of(self.pid).and_then(resident).unwrap_or(0);
        }
        self.memory
    }

    /// Ends what is left of it. What it had written before is still heard, unless it broke the protocol.
    async fn finish(&mut self, end: &mut End, tree: &mut Tree<'_>) {
        self.stdin = None;
        let mut exit = Exit::of(tree.supervisor());
        let grace = self.fleet.0.settings.kill_grace;
        if matches!(end, End::Broke(_) | End::Left) {
            tree.tell(Order::Term);
            let member = self.member;
            let ended = async {
                tokio::select! {
                    () = exit.wait() => {}
                    () = member.until_killed() => {}
                    never = async { self.gather(end).await; std::future::pending().await } => never,
                }
            };
            let _ = timeout(grace, ended).await;
        }
        if matches!(end, End::Died) {
            let _ = timeout(LINGER, self.gather(end)).await;
        }
        tree.end();
        exit.wait().await;
        let _ = timeout(LINGER, self.gather(end)).await;
        if matches!(end, End::Died) && self.drained && self.member.talk().open.is_empty() {
            *end = End::Left;
        }
    }

    /// Reads until both pipes are closed; answers count as long as it has not broken the protocol.
    async fn gather(&mut self, end: &mut End) {
        let (mut answers, mut log) = (vec![0; 64 << 10], vec![0; 16 << 10]);
        while self.stdout.is_some() || self.stderr.is_some() {
            tokio::select! {
                length = read(&mut self.stdout, &mut answers) => {
                    if length == 0 {
                        self.stdout = None;
                    } else if !matches!(end, End::Broke(_))
                        && let Err(broken) = self.hear(&answers[..length])
                    {
                        *end = broken;
                    }
                }
                length = read(&mut self.stderr, &mut log) => {
                    if length == 0 {
                        self.stderr = None;
                    }
                    self.note(&log[..length]);
                }
            }
        }
    }
}

/// Reads from a pipe that is open; 0: it is closed now. Never returns where it was closed before.
async fn read(pipe: &mut Option<impl AsyncRead + Unpin>, buffer: &mut [u8]) -> usize {
    match pipe {
        Some(pipe) => pipe.read(buffer).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}

/// Writes some of `bytes`; `None`: nobody reads any more. Never returns when there is nothing to write.
async fn write(pipe: &mut Option<ChildStdin>, bytes: &[u8]) -> Option<usize> {
    match pipe {
        Some(pipe) if !bytes.is_empty() => pipe.write(bytes).await.ok(),
        _ => std::future::pending().await,
    }
}

/// Resident memory of a process, in bytes.
fn resident(pid: i32) -> Option<u64> {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten()?;
    pages.checked_mul(u64::try_from(page).ok()?)
}
