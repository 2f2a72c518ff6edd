//! `process` handlers: processes that are started once and do many jobs, one line in for each and one line out.
//!
//! [`Fleet`] has the processes of one handler and finds a place for each job, as the pure `tenure_core::crew` says; `member` is
//! one process as its jobs see it, `life` the task that looks after it, `burial` its end, and `seat` one job in it.
//!
//! Invariant: a job is over when its process has answered for it or is dead, and not before.

mod burial;
mod life;
mod member;
mod seat;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenure_core::crew::{Crew, Gone, Limits, Place, ProcessId};
use tenure_core::time::Mono;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock;
use crate::events;
use crate::exec::Executor;
use crate::settings::ProcessSettings;
use crate::tasks::spawn_on;
use member::Member;
pub(super) use seat::run;

/// The processes of one `process` handler. Clones are the same fleet.
#[derive(Debug, Clone)]
pub struct Fleet(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The handler's section, for people.
    name: String,
    settings: ProcessSettings,
    state: Mutex<State>,
    /// Jobs that are on their way to a place, wait for one, or have one.
    admitted: AtomicUsize,
    /// A place may have become free.
    changed: Notify,
    members: TaskTracker,
    /// No job gets a place any more.
    resting: CancellationToken,
    closing: CancellationToken,
}

/// Why a job has no place.
enum NoPlace {
    /// The daemon stops, and the job has not begun.
    Stopping,
    /// No process gets ready, and why.
    NotReady(String),
}

#[derive(Debug)]
struct State {
    crew: Crew,
    /// The same as in `crew`.
    members: BTreeMap<ProcessId, Arc<Member>>,
    /// Why the last process was gone before it was ready.
    not_ready: String,
}

impl Fleet {
    /// Without a process: the first job starts one.
    #[must_use]
    pub fn new(name: &str, settings: &ProcessSettings) -> Self {
        let limits = Limits {
            processes: settings.processes,
            concurrency: settings.concurrency,
            max_jobs: settings.max_jobs,
            max_age: settings.max_age,
            max_memory: settings.max_memory,
        };
        Self(Arc::new(Shared {
            name: name.to_owned(),
            settings: settings.clone(),
            state: Mutex::new(State {
                crew: Crew::new(limits),
                members: BTreeMap::new(),
                not_ready: String::new(),
            }),
            admitted: AtomicUsize::new(0),
            changed: Notify::new(),
            members: TaskTracker::new(),
            resting: CancellationToken::new(),
            closing: CancellationToken::new(),
        }))
    }

    /// How many jobs could begin now.
    #[must_use]
    pub fn capacity(&self) -> usize {
        let admitted = self.0.admitted.load(Ordering::Relaxed);
        self.state().crew.capacity(clock::now(), admitted)
    }

    /// A job is on its way to it, until what is returned is dropped.
    #[must_use]
    pub fn admit(&self) -> Admitted {
        self.0.admitted.fetch_add(1, Ordering::Relaxed);
        Admitted(Arc::clone(&self.0))
    }

    /// When more may begin although nothing ends: a process that ended badly is replaced after a wait.
    #[must_use]
    pub fn wake_at(&self) -> Option<Mono> {
        self.state().crew.starts_again_at(clock::now())
    }

    /// Gives no job a place any more: what waits for one has not begun.
    pub fn rest(&self) {
        self.0.resting.cancel();
    }

    /// Sends all processes away and waits until they are gone. No job may be in them any more.
    pub async fn close(&self) {
        self.0.closing.cancel();
        self.0.members.close();
        self.0.members.wait().await;
    }

    /// A place for a job in a process; waits for one.
    async fn place(&self, executor: &Executor, alone: bool) -> Result<Arc<Member>, NoPlace> {
        let waiting = Waiting::begin(self, alone);
        let failed = self.state().crew.failed_starts();
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // From here on a change is noticed, also one before the wait.
            changed.as_mut().enable();
            let until = {
                if self.0.resting.is_cancelled() {
                    return Err(NoPlace::Stopping);
                }
                let mut state = self.state();
                if state.crew.failed_starts() > failed && !state.crew.has_any() {
                    return Err(NoPlace::NotReady(state.not_ready.clone()));
                }
                match state.crew.place(clock::now(), alone) {
                    Place::Seat(id) => match state.members.get(&id) {
                        Some(member) => {
                            let member = Arc::clone(member);
                            drop(state);
                            drop(waiting);
                            return Ok(member);
                        }
                        None => continue,
                    },
                    Place::Start(id) => {
                        let member = Arc::new(Member::new(id));
                        state.members.insert(id, Arc::clone(&member));
                        drop(state);
                        let life = life::live(self.clone(), member, executor.clone());
                        spawn_on(&self.0.members, life);
                        None
                    }
                    Place::Wait(until) => until,
                }
            };
            self.show();
            tokio::select! {
                () = changed => {}
                () = self.0.resting.cancelled() => {}
                () = clock::sleep_until(until), if until.is_some() => {}
            }
        }
    }

    /// A job was given to this process; it goes after its last.
    fn given(&self, member: &Member) {
        let leave = self.state().crew.given(clock::now(), member.id);
        if let Some(why) = leave {
            member.leave(why);
            self.0.changed.notify_waiters();
        }
    }

    /// This process has answered for a job.
    fn over(&self, member: &Member, memory: u64) {
        let leave = self.state().crew.over(clock::now(), member.id, memory);
        if let Some(why) = leave {
            member.leave(why);
        }
        self.0.changed.notify_waiters();
    }

    fn gone(&self, id: ProcessId, how: Gone, why: &str) {
        let mut state = self.state();
        state.crew.gone(clock::now(), id, how);
        state.members.remove(&id);
        if how == Gone::Badly {
            why.clone_into(&mut state.not_ready);
        }
        drop(state);
        self.show();
        self.0.changed.notify_waiters();
    }

    fn show(&self) {
        events::processes(&self.0.name, self.state().crew.counts());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No change of the state can be left half done by a panic.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that counts against the room of a fleet.
#[derive(Debug)]
pub struct Admitted(Arc<Shared>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.admitted.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A job that waits for a place.
struct Waiting<'a> {
    fleet: &'a Fleet,
    alone: bool,
}

impl<'a> Waiting<'a> {
    fn begin(fleet: &'a Fleet, alone: bool) -> Self {
        fleet.state().crew.begin_waiting(alone);
        Self { fleet, alone }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.fleet.state().crew.end_waiting(self.alone);
        // Others may have waited behind it.
        self.fleet.0.changed.notify_waiters();
    }
}
