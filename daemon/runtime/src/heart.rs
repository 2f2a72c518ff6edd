//! The heart: registers, beats, re-attaches and listens, on its own thread, runtime and connection, so that no load on the
//! rest can make it late.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tenure_core::ids::{Beat, Call, Epoch, Token, WorkerId};
use tenure_core::lease::event::Event;
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tenure_store::finish::{Answer, EndAnswer};
use tenure_store::session::{Notifications, Session, Target};
use tenure_store::worker::Registration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::clock;
use crate::dispatch::Note;
use crate::ends::Ends;
use crate::events;
use crate::held::Statement;
use crate::leases::{Leases, Order};
use crate::stats::Stats;
use crate::status::{Part, Status};

/// The other workers beat at once when they hear of a new one, and then it may claim; it looks again after these times.
const ADMITTED: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
];
/// So many beats lie between two notifications to itself.
const PING_EVERY: i64 = 10;

/// What the heart works with.
pub(crate) struct Heart {
    /// Past any pooler.
    pub target: Target,
    /// What it says of this worker.
    pub registration: Registration,
    /// Workers that this daemon succeeds: they are dead.
    pub predecessors: Vec<WorkerId>,
    /// The leases.
    pub leases: Arc<Leases>,
    /// What a re-attach says beside what is held.
    pub ends: Arc<Ends>,
    /// To the dispatcher.
    pub notes: mpsc::Sender<Note>,
    /// A person asked for a drain.
    pub drain: CancellationToken,
    /// How it goes.
    pub status: Arc<Status>,
    /// What each beat says of the runs that ended lately.
    pub stats: Arc<Stats>,
}

/// The state of the connection, shared by what is under way on it.
struct Link {
    session: Option<Rc<Session>>,
    /// Pings sent and not come back.
    pings: u32,
    predecessors: Vec<WorkerId>,
    /// A registration whose order has not come to its end.
    registered: Option<(WorkerId, Epoch, i64)>,
    /// One registration at a time: the keeper asks again while an answer is out.
    registering: bool,
    /// Of the last epoch that was seen.
    epoch_no: i64,
}

/// Starts the heart's thread. It ends when `stop` is cancelled; the channel closes when it ends, whatever the reason.
///
/// # Errors
/// When the thread or its runtime cannot be made.
pub(crate) fn start(
    heart: Heart,
    orders: mpsc::Receiver<Order>,
    stop: CancellationToken,
) -> std::io::Result<(JoinHandle<()>, oneshot::Receiver<()>)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (alive, ended) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("heart".into())
        .spawn(move || {
            let _alive = alive;
            tokio::task::LocalSet::new().block_on(&runtime, heart.run(orders, stop));
        })?;
    Ok((thread, ended))
}

impl Heart {
    async fn run(self, mut orders: mpsc::Receiver<Order>, stop: CancellationToken) {
        let link = RefCell::new(Link {
            session: None,
            pings: 0,
            predecessors: self.predecessors.clone(),
            registered: None,
            registering: false,
            epoch_no: 0,
        });
        let (heard_in, mut heard) = mpsc::channel(64);
        let mut under_way = FuturesUnordered::new();
        loop {
            self.leases.on(Event::Tick);
            tokio::select! {
                () = stop.cancelled() => return,
                Some(order) = orders.recv() => under_way.push(self.carry_out(&link, &heard_in, order)),
                Some(()) = under_way.next(), if !under_way.is_empty() => {}
                Some(note) = heard.recv() => self.hear(&link, note),
                () = clock::sleep_until(self.leases.wake_at()) => {}
                () = self.leases.sooner() => {}
            }
        }
    }

    async fn carry_out(&self, link: &RefCell<Link>, heard: &mpsc::Sender<Heard>, order: Order) {
        match order {
            Order::Register { asked_at } => {
                if std::mem::replace(&mut link.borrow_mut().registering, true) {
                    return;
                }
                let registered = self.register(link, heard, asked_at).await;
                link.borrow_mut().registering = false;
                if let Err(error) = registered {
                    if matches!(error, StoreError::OtherEpoch(_) | StoreError::DeadWorker(_)) {
                        link.borrow_mut().registered = None;
                    }
                    self.missed(link, &error);
                    self.leases.on(Event::RegisterFailed { asked_at });
                }
            }
            Order::Reattach { worker, asked_at } => {
                if let Err(error) = self.reattach(link, heard, worker, asked_at).await {
                    self.missed(link, &error);
                    self.leases.failed(worker, Epoch(Uuid::nil()), &error);
                    self.leases.on(Event::RegisterFailed { asked_at });
                }
            }
            Order::Beat {
                worker,
                epoch,
                beat,
                settled,
                open,
            } => {
                if let Err(error) = self
                    .beat(link, heard, worker, epoch, beat, settled, &open)
                    .await
                {
                    self.missed(link, &error);
                    self.leases.failed(worker, epoch, &error);
                    self.leases.on(Event::BeatFailed { beat });
                }
            }
        }
    }

    async fn register(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
        asked_at: Mono,
    ) -> Result<(), StoreError> {
        let session = self.session(link, heard).await?;
        let (worker, epoch, epoch_no) = self.make_known(link, &session).await?;
        let predecessors = link.borrow().predecessors.clone();
        let ends = self.ends.all();
        if !predecessors.is_empty() || !ends.is_empty() {
            let said = ends.iter().map(Statement::hold).collect::<Vec<_>>();
            let registration = &self.registration;
            let answers = session
                .reattach(
                    worker,
                    epoch,
                    Beat(0),
                    array(&said),
                    &[],
                    registration,
                    &predecessors,
                )
                .await?;
            lost(&answers)?;
            tracing::info!(
                ends = ends.len(),
                "Takes over from the last process in state_dir."
            );
        }
        self.listen(&session, worker).await?;
        let mut now = link.borrow_mut();
        // Should it have to become another worker, that one succeeds this.
        now.predecessors = vec![worker];
        now.registered = None;
        now.epoch_no = epoch_no;
        drop(now);
        self.ends.registered(worker);
        self.status.confirmed(asked_at);
        events::registered(worker, epoch_no);
        self.leases
            .registered(worker, epoch, epoch_no, asked_at, &[]);
        self.note(Note::Registered);
        self.ends.nudge();
        let notes = self.notes.clone();
        drop(tokio::task::spawn_local(async move {
            for wait in ADMITTED {
                tokio::time::sleep(wait).await;
                let _ = notes.try_send(Note::Woken);
            }
        }));
        Ok(())
    }

    /// Registers, unless an earlier try got as far and only what comes after it failed: each registration is a worker that
    /// others count on.
    async fn make_known(
        &self,
        link: &RefCell<Link>,
        session: &Session,
    ) -> Result<(WorkerId, Epoch, i64), StoreError> {
        let before = link.borrow_mut().registered.take();
        let known = match before {
            Some(known) => known,
            None => {
                let worker = WorkerId(Uuid::new_v4());
                let (epoch, epoch_no) = session.register(worker, &self.registration).await?;
                (worker, epoch, epoch_no)
            }
        };
        link.borrow_mut().registered = Some(known);
        Ok(known)
    }

    async fn reattach(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
        worker: WorkerId,
        asked_at: Mono,
    ) -> Result<(), StoreError> {
        let session = self.session(link, heard).await?;
        let seen = link.borrow().epoch_no;
        let now = session.open_epoch(worker, seen).await?;
        let (mut said, beat, roster) = self.leases.holds();
        let held = said.len();
        let ends = self.ends.all();
        said.extend(ends.iter().map(Statement::hold));
        let answers = session
            .reattach(
                worker,
                now.epoch,
                beat,
                array(&said),
                &roster,
                &self.registration,
                &[],
            )
            .await?;
        let lost = lost(&answers)?;
        link.borrow_mut().epoch_no = now.number;
        self.status.confirmed(asked_at);
        events::reattached(worker, now.number, held, ends.len(), lost.len());
        self.leases
            .registered(worker, now.epoch, now.number, asked_at, &lost);
        self.note(Note::Registered);
        self.ends.nudge();
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one order")]
    async fn beat(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
        worker: WorkerId,
        epoch: Epoch,
        beat: Beat,
        settled: Call,
        open: &[Call],
    ) -> Result<(), StoreError> {
        let sent = clock::now();
        let session = self.session(link, heard).await?;
        let in_flight = i32::try_from(self.leases.running()).unwrap_or(i32::MAX);
        let draining = self.status.is_draining();
        let answer = session
            .heartbeat(
                worker,
                epoch,
                beat,
                settled,
                open,
                in_flight,
                draining,
                &self.stats.take(),
            )
            .await?;
        self.status.confirmed(sent);
        self.leases
            .beat_answered(beat, answer.workers, &answer.revoked);
        self.note(Note::Lanes(answer.lanes));
        if answer.ghosts > 0 {
            events::ghosts(answer.ghosts);
        }
        if answer.drain {
            self.drain.cancel();
        }
        if beat.0 % PING_EVERY == 0 && !self.target.pooled {
            let lost = std::mem::replace(&mut link.borrow_mut().pings, 1) > 0;
            events::listener(!lost);
            if lost {
                tracing::warn!("Notifications do not arrive; connecting anew. Polling goes on.");
                link.borrow_mut().session = None;
            } else {
                session.ping(worker).await?;
            }
        }
        Ok(())
    }

    /// The connection, made anew if there is none; then it listens, and what came in between is looked for.
    async fn session(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
    ) -> Result<Rc<Session>, StoreError> {
        if let Some(session) = link.borrow().session.clone() {
            return Ok(session);
        }
        let (session, notifications) = Session::open(&self.target).await?;
        let session = Rc::new(session.within(self.leases.limits().answer_within()));
        if let Some((worker, _)) = self.leases.member() {
            self.listen(&session, worker).await?;
            self.note(Note::Woken);
        }
        let mut now = link.borrow_mut();
        now.session = Some(Rc::clone(&session));
        now.pings = 0;
        drop(now);
        forward(notifications, heard.clone());
        Ok(session)
    }

    /// Behind a pooler that hands connections on there are no notifications: there polling alone finds jobs.
    async fn listen(&self, session: &Session, worker: WorkerId) -> Result<(), StoreError> {
        if self.target.pooled {
            events::listener(false);
            return Ok(());
        }
        session.listen(worker).await?;
        events::listener(true);
        Ok(())
    }

    fn hear(&self, link: &RefCell<Link>, heard: Heard) {
        match heard {
            Heard::Payload(payload) => match payload.as_str() {
                "beat" => self.leases.on(Event::BeatNow),
                "ping" => link.borrow_mut().pings = 0,
                "lanes" => self.note(Note::Lanes(i32::MAX)),
                _ => self.note(Note::Woken),
            },
            Heard::Closed => {
                events::listener(false);
                let mut link = link.borrow_mut();
                // Only if it is this one that closed, not a newer one.
                if link
                    .session
                    .as_ref()
                    .is_some_and(|session| session.client().is_closed())
                {
                    link.session = None;
                    drop(link);
                    self.leases.on(Event::BeatNow);
                }
            }
        }
    }

    fn missed(&self, link: &RefCell<Link>, error: &StoreError) {
        if error.breaks_connection() {
            link.borrow_mut().session = None;
        }
        self.status.trouble(Part::Heart, error);
    }

    fn note(&self, note: Note) {
        // Full only while the dispatcher is busy claiming; it looks by itself then.
        let _ = self.notes.try_send(note);
    }
}

/// The leases that are gone: their handlers must stop, and the ends among them are history.
fn lost(answers: &[EndAnswer]) -> Result<Vec<Token>, StoreError> {
    let of = |wanted| {
        answers
            .iter()
            .filter(move |answer| answer.answer == wanted)
            .map(|answer| answer.token)
    };
    match of(Answer::Busy).next() {
        // Everything has to be said again, in one piece: what is not named is taken for given up.
        Some(_) => Err(StoreError::Repeat(
            "a job is locked by another transaction".into(),
        )),
        None => Ok(of(Answer::Stop).collect()),
    }
}

enum Heard {
    Payload(String),
    Closed,
}

fn forward(mut notifications: Notifications, heard: mpsc::Sender<Heard>) {
    drop(tokio::task::spawn_local(async move {
        while let Some(payload) = notifications.recv().await {
            if heard.send(Heard::Payload(payload)).await.is_err() {
                return;
            }
        }
        let _ = heard.send(Heard::Closed).await;
    }));
}

fn array(items: &[String]) -> String {
    format!("[{}]", items.join(","))
}
