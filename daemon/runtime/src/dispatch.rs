//! The dispatcher: claims jobs into free slots and starts them.
//!
//! When to claim is decided by the pure `Poller`, how much by `core::claim`, whether a job may start by the lease keeper.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::breaker::Start;
use tenure_core::ids::{Call, Epoch, Lane, WorkerId};
use tenure_core::poll::{Command, Event, Poller};
use tenure_core::time::Mono;
use tenure_store::claim::Mark;
use tenure_store::error::StoreError;
use tenure_store::session::Db;
use tenure_store::value::since;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

use crate::attempt::{self, Bench};
use crate::claims::{self, ClaimAnswer};
use crate::clock;
use crate::events;
use crate::held::Held;
use crate::lanes::Lanes;
use crate::leases::Leases;
use crate::marks::Marks;
use crate::status::{Part, Status};
use crate::tasks::{random, spawn_on};

/// The most jobs of one claim.
const BATCH: i32 = 500;
/// Between two questions about marks.
const SETTLE: Duration = Duration::from_millis(200);

/// What the dispatcher is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Note {
    /// There may be a job.
    Woken,
    /// The highest lane there is.
    Lanes(i32),
    /// The worker is registered or re-attached.
    Registered,
    /// A handler that takes only so many jobs at once has one less.
    Room,
    /// A slot of this pool is free again.
    Freed(usize),
}

/// See the module.
pub(crate) struct Dispatcher {
    db: Db,
    leases: Arc<Leases>,
    status: Arc<Status>,
    bench: Bench,
    attempts: TaskTracker,
    lanes: Lanes,
    pools: Vec<(String, usize)>,
    free: Vec<usize>,
    poller: Poller,
    marks: Marks,
    settle_at: Mono,
    /// When a circuit may close, or its handler be tried.
    circuits_at: Option<Mono>,
    /// When a handler has room again although nothing ends.
    room_at: Option<Mono>,
    /// The last claim asked for less than there are slots, for want of room in a handler.
    short_of_room: bool,
    lanes_wanted: i32,
    /// What the poller commanded and is not under way yet.
    todo: Vec<Command>,
    /// A claim is under way.
    claiming: bool,
    /// The registration that all of this is about.
    member: Option<(WorkerId, Epoch)>,
}

type Work = Pin<Box<dyn Future<Output = Done> + Send>>;

/// What a statement that was under way has brought.
enum Done {
    Claimed(ClaimAnswer),
    Flagged(bool, Result<(), StoreError>),
    Lanes(Result<Vec<(Lane, String)>, StoreError>),
    Settled(Result<(Epoch, Vec<Mark>, i64), StoreError>),
}

impl Dispatcher {
    /// With all slots free. Attempts are counted by `attempts`.
    #[must_use]
    pub(crate) fn new(
        db: Db,
        lanes: Lanes,
        pools: Vec<(String, usize)>,
        status: Arc<Status>,
        bench: Bench,
        attempts: TaskTracker,
        idle_poll: Duration,
    ) -> Self {
        Self {
            db,
            leases: Arc::clone(&bench.leases),
            status,
            bench,
            attempts,
            lanes,
            free: pools.iter().map(|(_, slots)| *slots).collect(),
            pools,
            poller: Poller::new(idle_poll),
            marks: Marks::default(),
            settle_at: Mono::ZERO,
            circuits_at: None,
            room_at: None,
            short_of_room: false,
            lanes_wanted: i32::MAX,
            todo: Vec::new(),
            claiming: false,
            member: None,
        }
    }

    /// Runs until `stop` is cancelled and all attempts have ended.
    pub(crate) async fn run(mut self, mut notes: mpsc::Receiver<Note>, stop: CancellationToken) {
        let mut under_way: Vec<Work> = Vec::new();
        let mut asking_lanes = false;
        let open = Arc::clone(self.leases.open());
        loop {
            let stopping = stop.is_cancelled();
            if stopping {
                self.attempts.close();
                self.lanes.rest();
                if self.attempts.is_empty() && under_way.is_empty() {
                    self.lanes.close().await;
                    return;
                }
            }
            self.notice_registration();
            if !stopping && self.member.is_some() {
                if self.lanes.seen() < self.lanes_wanted && !asking_lanes {
                    asking_lanes = true;
                    // A word about a new lane that comes while we ask leads to another question.
                    self.lanes_wanted = 0;
                    under_way.push(self.ask_lanes());
                }
                self.poll(Event::Tick);
                if self.circuits_at.is_some_and(|at| at <= clock::now())
                    && self.bench.circuits.tick()
                {
                    self.poll(Event::Woken);
                }
                self.circuits_at = self.bench.circuits.wake_at();
                if self.room_at.is_some_and(|at| at <= clock::now()) {
                    self.poll(Event::Room);
                }
                self.room_at = self.lanes.room_at();
                for command in std::mem::take(&mut self.todo) {
                    // Two claims at once would both count on the same free slots.
                    if command == Command::Claim && std::mem::replace(&mut self.claiming, true) {
                        self.todo.push(command);
                    } else {
                        under_way.push(self.carry_out(command));
                    }
                }
                under_way.extend(self.ask_marks());
            }
            let (idle, attempts) = (under_way.is_empty(), self.attempts.clone());
            let wake = if stopping { None } else { self.wake_at() };
            tokio::select! {
                (done, index) = first(&mut under_way), if !under_way.is_empty() => {
                    drop(under_way.swap_remove(index));
                    asking_lanes &= !matches!(done, Done::Lanes(_));
                    // Asked again: the stop may have come in the same moment.
                    self.take_in(done, stop.is_cancelled());
                }
                note = notes.recv() => {
                    let Some(note) = note else { return };
                    self.note(note);
                    while let Ok(note) = notes.try_recv() {
                        self.note(note);
                    }
                    self.show_slots();
                }
                () = open.has_room(), if !stopping => self.poll(Event::Woken),
                () = clock::sleep_until(wake) => {}
                () = stop.cancelled(), if !stopping => {}
                () = attempts.wait(), if stopping && idle => {}
            }
        }
    }

    /// Under another registration or in another epoch everything begins anew.
    fn notice_registration(&mut self) {
        let member = self.leases.member();
        if member != self.member {
            self.member = member;
            if member.is_some() {
                self.marks.forget();
                self.todo.clear();
                self.lanes_wanted = i32::MAX;
                self.poll(Event::Registered);
            }
        }
    }

    fn wake_at(&self) -> Option<Mono> {
        // Without a registration there is nothing to do but to wait for it: a note tells.
        self.member?;
        self.poller
            .wake_at()
            .into_iter()
            .chain(self.circuits_at)
            .chain(self.room_at)
            .min()
    }

    fn note(&mut self, note: Note) {
        let event = match note {
            Note::Woken => Event::Woken,
            Note::Lanes(highest) => {
                self.lanes_wanted = self.lanes_wanted.max(highest);
                return;
            }
            // The registration itself is read in the loop.
            Note::Registered => return,
            // Only what was left out needs the word.
            Note::Room if !std::mem::take(&mut self.short_of_room) => return,
            Note::Room => Event::Room,
            Note::Freed(pool) => {
                self.free[pool] += 1;
                if self.free[pool] == 1 {
                    // The pool was full: what it could not take is looked for at once, whatever the other pools do.
                    self.poll(Event::Woken);
                }
                Event::Free(true)
            }
        };
        self.poll(event);
    }

    fn poll(&mut self, event: Event) {
        self.todo
            .extend(self.poller.on(clock::now(), event, random()));
    }

    fn carry_out(&mut self, command: Command) -> Work {
        match command {
            Command::Claim => self.claim(),
            Command::SetSleeping(sleeping) => {
                let (db, leases) = (self.db.clone(), Arc::clone(&self.leases));
                let lanes: Vec<_> = if sleeping {
                    self.lanes.all().collect()
                } else {
                    Vec::new()
                };
                Box::pin(async move {
                    let Some((worker, epoch)) = leases.member() else {
                        return Done::Flagged(sleeping, Err(not_a_member()));
                    };
                    let result = async {
                        db.session()
                            .await?
                            .set_sleeping(worker, epoch, &lanes)
                            .await
                    }
                    .await;
                    if let Err(error) = &result {
                        leases.failed(worker, epoch, error);
                    }
                    Done::Flagged(sleeping, result)
                })
            }
        }
    }

    fn claim(&mut self) -> Work {
        let (db, leases) = (self.db.clone(), Arc::clone(&self.leases));
        let asks = self.lanes.asks(&self.free, BATCH);
        let wants = claims::wants(&self.lanes, &self.marks, &asks);
        self.short_of_room = self.lanes.are_short(&self.free);
        Box::pin(async move { Done::Claimed(claims::claim(&db, &leases, wants).await) })
    }

    fn ask_lanes(&self) -> Work {
        let db = self.db.clone();
        Box::pin(async move { Done::Lanes(async { db.session().await?.lanes().await }.await) })
    }

    fn ask_marks(&mut self) -> Option<Work> {
        let now = clock::now();
        let (_, epoch) = self.leases.member()?;
        if now < self.settle_at {
            return None;
        }
        let (marks, seen, horizon) = self.marks.question()?;
        // Asked again when it is answered.
        self.settle_at = Mono::from_millis(u64::MAX);
        let db = self.db.clone();
        Some(Box::pin(async move {
            let settled = async {
                let session = db.session().await?;
                let (marks, horizon) = session.settle_marks(epoch, &marks, &seen, horizon).await?;
                Ok((epoch, marks, horizon))
            };
            Done::Settled(settled.await)
        }))
    }

    fn take_in(&mut self, done: Done, stopping: bool) {
        let event = match done {
            Done::Claimed(answer) => {
                self.claiming = false;
                let brought = answer.jobs.iter().any(|(_, jobs)| !jobs.is_empty());
                for (call, jobs) in answer.jobs {
                    self.start(call, jobs, stopping);
                }
                match answer.failed {
                    Some(error) => {
                        self.lost(&error, Part::Claims);
                        Event::Failed
                    }
                    None => {
                        self.status.fine(Part::Claims);
                        Event::Answered {
                            brought,
                            full: answer.full,
                        }
                    }
                }
            }
            Done::Flagged(sleeping, Ok(())) => {
                self.status.fine(Part::Notifications);
                Event::FlagWritten(sleeping)
            }
            Done::Flagged(_, Err(error)) => {
                self.lost(&error, Part::Notifications);
                Event::FlagFailed
            }
            Done::Lanes(Ok(lanes)) => {
                self.status.fine(Part::JobTypes);
                let before = self.lanes.all().count();
                if let Err(error) = self.lanes.update(&lanes) {
                    error!(%error, "A handler cannot be made ready.");
                }
                if self.lanes.all().count() == before {
                    return;
                }
                Event::LanesChanged
            }
            Done::Lanes(Err(error)) => {
                self.lost(&error, Part::JobTypes);
                return;
            }
            Done::Settled(answer) => {
                self.settle_at = clock::now() + SETTLE;
                match answer {
                    // Positions of another epoch mean nothing in this one.
                    Ok((epoch, marks, horizon))
                        if self.member.is_some_and(|(_, now)| now == epoch) =>
                    {
                        self.marks.settled(&marks, horizon);
                    }
                    Ok(_) | Err(_) => self.marks.unanswered(),
                }
                return;
            }
        };
        self.poll(event);
        self.show_slots();
    }

    /// Starts what the keeper lets start. Each claimed job has a free slot: nobody else takes slots.
    fn start(&mut self, call: Call, jobs: Vec<Arc<Held>>, stopping: bool) {
        events::claimed(jobs.len());
        for held in &jobs {
            events::picked_up(since(held.job.ready_at, held.job.started_at));
            self.marks
                .saw(held.job.lane, held.job.priority, held.job.pos);
        }
        let grace = |held: &Held| {
            self.lanes
                .route(held.job.lane)
                .map_or(Duration::ZERO, |route| route.kill_grace)
        };
        for (held, signal) in self.leases.claimed(call, jobs, grace) {
            match self.lanes.route(held.job.lane).cloned() {
                Some(route) if !stopping => {
                    let probe = match self.bench.circuits.start(&route.section) {
                        Start::Go => false,
                        Start::Probe => true,
                        Start::Wait(wait) => {
                            self.leases.ended(held.released_for(wait));
                            continue;
                        }
                    };
                    self.free[route.pool] = self.free[route.pool].saturating_sub(1);
                    if route.accepts.is_some() {
                        self.leases.open().asks(&route.section);
                    }
                    let admitted = route.handler.admit();
                    let attempt = attempt::run(self.bench.clone(), held, route, signal, probe);
                    let notes = self.bench.notes.clone();
                    spawn_on(&self.attempts, async move {
                        attempt.await;
                        if admitted.is_some() {
                            drop(admitted);
                            let _ = notes.send(Note::Room).await;
                        }
                    });
                }
                // Never started: given back.
                _ => self.leases.ended(held.released()),
            }
        }
        self.poll(Event::Free(self.free.iter().any(|free| *free > 0)));
    }

    fn lost(&self, error: &StoreError, part: Part) {
        if error.breaks_connection() {
            self.db.forget_connections();
        }
        // What the keeper learned of leads to a new registration, which tells about itself.
        if !matches!(
            error,
            StoreError::OtherEpoch(_) | StoreError::DeadWorker(_) | StoreError::Repeat(_)
        ) {
            self.status.trouble(part, error);
        }
    }

    fn show_slots(&self) {
        for ((name, slots), free) in self.pools.iter().zip(&self.free) {
            events::slots(name, *free, slots.saturating_sub(*free));
        }
    }
}

pub(crate) fn not_a_member() -> StoreError {
    StoreError::OtherEpoch("this worker is not registered".into())
}

/// The first of several futures to be done, with its place.
async fn first(works: &mut [Work]) -> (Done, usize) {
    std::future::poll_fn(|context| {
        for (index, work) in works.iter_mut().enumerate() {
            if let std::task::Poll::Ready(done) = work.as_mut().poll(context) {
                return std::task::Poll::Ready((done, index));
            }
        }
        std::task::Poll::Pending
    })
    .await
}
