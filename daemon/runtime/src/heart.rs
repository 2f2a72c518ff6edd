//! The heart: registers, beats, re-attaches and listens, on its own thread, runtime and connection, so that no load on the
//! rest can make it late.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tenure_core::ids::{Beat, Call, Epoch, WorkerId};
use tenure_core::lease::event::Event;
use tenure_store::error::StoreError;
use tenure_store::session::{Notifications, Session};
use tenure_store::worker::{Gate, Registration};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::clock;
use crate::dispatch::Note;
use crate::ends::Ends;
use crate::events;
use crate::journal::Legacy;
use crate::leases::{Leases, Order};
use crate::lookout::Lookout;
use crate::stats::Stats;
use crate::status::{Part, Status};

/// After a re-attach that met a lock.
const SOON: Duration = Duration::from_millis(50);
/// So many beats lie between two notifications to itself.
const PING_EVERY: i64 = 10;

/// What the heart works with.
pub(crate) struct Heart {
    /// Finds the primary.
    pub lookout: Lookout,
    /// What it says of this worker.
    pub registration: Registration,
    /// What the last process in `state_dir` left.
    pub legacy: Legacy,
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
pub(crate) struct Link {
    session: Option<Rc<Session>>,
    /// Pings sent and not come back.
    pings: u32,
    /// What the workers that this one succeeds have left: they are dead.
    pub(crate) legacy: Legacy,
    /// The workers that this process was before, the latest ones. It counts its beats on over all of them.
    pub(crate) formerly: Vec<WorkerId>,
    /// A registration whose order has not come to its end.
    pub(crate) registered: Option<(WorkerId, Epoch, i64)>,
    /// One registration or re-attach at a time: the keeper asks again while an answer is out.
    attaching: bool,
    /// Before a re-attach that met a lock is said again.
    pause: Duration,
    /// Of the last epoch that was seen.
    pub(crate) epoch_no: i64,
    /// The switch that is to be reported when its window has closed.
    pub(crate) report: Option<i64>,
    /// A person was told that the gate is on hold.
    on_hold: bool,
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
    async fn run(mut self, mut orders: mpsc::Receiver<Order>, stop: CancellationToken) {
        let link = RefCell::new(Link {
            session: None,
            pings: 0,
            legacy: std::mem::take(&mut self.legacy),
            formerly: Vec::new(),
            registered: None,
            attaching: false,
            pause: SOON,
            epoch_no: 0,
            report: None,
            on_hold: false,
        });
        let looking = self.lookout.run(|| link.borrow_mut().session = None);
        tokio::pin!(looking);
        let (heard_in, mut heard) = mpsc::channel(64);
        let mut under_way = FuturesUnordered::new();
        loop {
            self.leases.on(Event::Tick);
            tokio::select! {
                () = stop.cancelled() => return,
                () = &mut looking => return,
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
                if std::mem::replace(&mut link.borrow_mut().attaching, true) {
                    return;
                }
                let registered = self.register(link, heard, asked_at).await;
                link.borrow_mut().attaching = false;
                let Err(error) = registered else {
                    link.borrow_mut().pause = SOON;
                    return;
                };
                if matches!(error, StoreError::OtherEpoch(_) | StoreError::DeadWorker(_)) {
                    link.borrow_mut().registered = None;
                }
                self.missed(link, &error);
                self.leases.on(Event::RegisterFailed { asked_at });
                self.say_soon(link, &error).await;
            }
            Order::Reattach { worker, asked_at } => {
                if std::mem::replace(&mut link.borrow_mut().attaching, true) {
                    return;
                }
                let attached = self.reattach(link, heard, worker, asked_at).await;
                link.borrow_mut().attaching = false;
                let Err(error) = attached else {
                    link.borrow_mut().pause = SOON;
                    return;
                };
                self.missed(link, &error);
                self.leases.failed(worker, Epoch(Uuid::nil()), &error);
                self.leases.on(Event::RegisterFailed { asked_at });
                self.say_soon(link, &error).await;
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

    /// After a lock others wait for this worker: it does not wait for its next beat.
    async fn say_soon(&self, link: &RefCell<Link>, error: &StoreError) {
        if matches!(error, StoreError::Repeat(_)) {
            let pause = link.borrow().pause;
            link.borrow_mut().pause = (pause * 2).min(self.leases.limits().beat_every());
            tokio::time::sleep(pause).await;
            self.leases.on(Event::BeatNow);
        }
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
        self.note_gate(link, &session, answer.gate).await;
        self.leases
            .beat_answered(beat, answer.workers, &answer.revoked);
        self.note(Note::Lanes(answer.lanes));
        if answer.ghosts > 0 {
            events::ghosts(answer.ghosts);
        }
        if answer.drain {
            self.drain.cancel();
        }
        if beat.0 % PING_EVERY == 0 && !self.lookout.target.pooled {
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

    /// Tells of a hold, and of a switch that is over. That nobody can be told is no reason to miss a beat.
    async fn note_gate(&self, link: &RefCell<Link>, session: &Session, gate: Gate) {
        let hold = gate == Gate::Hold;
        if hold != link.borrow().on_hold {
            let reason = match session.cluster_status().await {
                Ok(status) => status.hold_reason.unwrap_or_default(),
                Err(_) => return,
            };
            link.borrow_mut().on_hold = hold;
            events::on_hold(hold.then_some(reason.as_str()));
        }
        let report = link.borrow().report.filter(|_| gate == Gate::Open);
        if let Some(epoch_no) = report
            && let Ok(switch) = session.switch(epoch_no).await
        {
            link.borrow_mut().report = None;
            events::switched(&switch);
        }
    }

    /// The connection, made anew if there is none; then it listens, and what came in between is looked for.
    pub(crate) async fn session(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
    ) -> Result<Rc<Session>, StoreError> {
        if let Some(session) = link.borrow().session.clone() {
            return Ok(session);
        }
        self.lookout.found().await?;
        let Lookout { target, routes, .. } = &self.lookout;
        let (session, notifications) = Session::open_along(target, &routes.direct).await?;
        if session.is_turned_away() {
            return Err(StoreError::Unreachable(
                "another server became the primary".to_owned(),
            ));
        }
        let session = Rc::new(session.within(self.leases.limits().answer_within()));
        // Also while it re-attaches: afterwards the connection is there and would not be asked again.
        if let Some(worker) = self.leases.identity() {
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
    pub(crate) async fn listen(
        &self,
        session: &Session,
        worker: WorkerId,
    ) -> Result<(), StoreError> {
        if self.lookout.target.pooled {
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
                    self.lookout.look.notify_one();
                    self.leases.on(Event::BeatNow);
                }
            }
        }
    }

    fn missed(&self, link: &RefCell<Link>, error: &StoreError) {
        if error.breaks_connection() {
            link.borrow_mut().session = None;
            self.lookout.look.notify_one();
        }
        self.status.trouble(Part::Heart, error);
    }

    pub(crate) fn note(&self, note: Note) {
        // Full only while the dispatcher is busy claiming; it looks by itself then.
        let _ = self.notes.try_send(note);
    }
}

pub(crate) enum Heard {
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
